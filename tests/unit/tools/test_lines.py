"""``tools/`` makes what the pages show; a tool that has answered its question goes."""

from __future__ import annotations

from pathlib import Path

TOOLS = Path(__file__).parents[3] / "tools"
#: May fall, never rise.
MOST_LINES = 6778


def test_the_tools_stay_small() -> None:
    lines = sum(len(path.read_bytes().splitlines()) for path in TOOLS.rglob("*.py"))
    assert lines <= MOST_LINES


def test_every_tool_is_named_by_a_page_a_script_or_another_tool() -> None:
    root = TOOLS.parent
    readers = [*root.glob("*.md"), *root.glob("docs/*.md"), *root.glob("dev/*.md")]
    readers += [*TOOLS.glob("*.sh"), *TOOLS.glob("*.py"), root / "mkdocs.yml", root / ".ci" / "run"]
    texts = {path: path.read_text(encoding="utf-8") for path in readers}
    unused = [
        tool.name
        for tool in TOOLS.glob("*.py")
        if not any(tool.stem in text for path, text in texts.items() if path != tool)
    ]
    assert not unused, "remove what feeds nothing"
