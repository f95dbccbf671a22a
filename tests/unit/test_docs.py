"""What the documents say is true: commands, options, files and the porting example."""

from __future__ import annotations

import importlib
import re
import sys
from pathlib import Path

import pytest
import typer.main
from support.tools import tool_module

ROOT = Path(__file__).resolve().parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")


#: Pages of the site that are made when it is built.
MADE = {"index.md", "changelog.md", "contributing.md"} | {
    f"reference/{name}.md" for name in ("commands", "api", "values", "device", "testing")
}


def documents() -> list[Path]:
    """Every page that is read: in the root, in docs/ and dev/, and the models' cards."""
    return [
        *sorted(ROOT.glob("*.md")),
        *sorted((ROOT / "docs").rglob("*.md")),
        *sorted((ROOT / "dev").glob("*.md")),
        *sorted((ROOT / "lantern_accel" / "assets").rglob("*.md")),
    ]


def prose(path: Path) -> str:
    """A page without its code blocks."""
    return re.sub(r"```.*?```", "", path.read_text(encoding="utf-8"), flags=re.S)


def anchors(path: Path) -> set[str]:
    """The names that a page's headings can be linked by."""
    found = set()
    for heading in re.findall(r"^#+ (.+)$", prose(path), re.M):
        plain = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading).replace("`", "")
        found.add(re.sub(r"\s+", "-", re.sub(r"[^\w\s-]", "", plain).strip().lower()))
    return found


@pytest.mark.parametrize("page", documents(), ids=lambda path: str(path.relative_to(ROOT)))
def test_links_lead_to_files_and_headings_that_are_there(page):
    for target, anchor in re.findall(r"\]\(([^)#\s]*)(#[^)\s]*)?\)", prose(page)):
        if target.startswith(("http", "mailto:")):
            continue
        aim = (page.parent / target).resolve() if target else page
        assert aim.exists(), f"{page.name} links to {target}"
        if anchor:
            assert anchor[1:] in anchors(aim), f"{page.name} links to {target}{anchor}"


def test_every_page_is_in_the_navigation_of_the_site():
    config = (ROOT / "mkdocs.yml").read_text(encoding="utf-8")
    listed = set(re.findall(r": ([\w/-]+\.md)$", config, re.M))
    there = {str(path.relative_to(ROOT / "docs")) for path in (ROOT / "docs").rglob("*.md")}
    assert listed == there | MADE


def test_every_page_is_linked_from_another_page():
    pages = {path.resolve() for path in (ROOT / "docs").rglob("*.md")}
    linked = {
        (page.parent / target).resolve()
        for page in documents()
        for target in re.findall(r"\]\(([^)#\s]+)(?:#[^)\s]*)?\)", prose(page))
        if not target.startswith(("http", "mailto:")) and (page.parent / target).resolve() != page
    }
    assert not {str(page.relative_to(ROOT)) for page in pages - linked}


def test_no_page_shows_what_only_a_generator_understands():
    for page in documents():
        assert not re.search(r"^::: ", page.read_text(encoding="utf-8"), re.M), page


@pytest.fixture(scope="module")
def commands() -> dict[str, object]:
    """Every command and group, by the words that call it."""
    from lantern_accel.cli.app import app

    def below(path: str, command: object) -> dict[str, object]:
        found = {path: command}
        for name, child in getattr(command, "commands", {}).items():
            found |= below(f"{path} {name}", child)
        return found

    return below("lantern-accel", typer.main.get_command(app))


def options(command) -> set[str]:
    return {name for one in command.params for name in (*one.opts, *one.secondary_opts)}


def test_the_tutorial_s_commands_have_the_options_that_it_gives_them(commands):
    for page in documents():
        fenced = re.findall(r"^```(\w*)\n(.*?)^```", page.read_text(encoding="utf-8"), re.S | re.M)
        blocks = [text for language, text in fenced if not language]
        for line in "\n".join(blocks).splitlines():
            match = re.search(r"(?:^|&& )lantern-accel ([^#&]*)", line)
            if match is None:
                continue
            path, words = "lantern-accel", match.group(1).split()
            while words and f"{path} {words[0]}" in commands:
                path = f"{path} {words.pop(0)}"
            assert not hasattr(commands[path], "commands"), f"{page.name}: {line}"
            given = {word.split("=")[0] for word in words if word.startswith("--")}
            assert given <= options(commands[path]), f"{page.name}: {line}"


def test_every_option_that_the_readme_names_is_an_option(commands):
    known = {"--help"}.union(*map(options, commands.values()))
    assert set(re.findall(r"`?(--[a-z][a-z-]+)", README)) <= known


def test_the_porting_example_is_a_backend(monkeypatch, tmp_path):
    from lantern_accel.device import plugins
    from lantern_accel.testing import CHECKS, run_check

    tutorial = (ROOT / "docs" / "porting.md").read_text(encoding="utf-8")
    block = next(b for b in re.findall(r"```python\n(.*?)```", tutorial, re.S) if "hookimpl" in b)
    (tmp_path / "my_package.py").write_text(block)
    info = tmp_path / "my_package-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: my-package\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[lantern_accel]\nmine = my_package\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    plugins.load_plugins.cache_clear()
    try:
        specs = plugins.backend_specs()
        assert "mine" in specs, plugins.broken_plugins()
        state = {one.name: one for one in plugins.devices_report()}["mine"]
        assert state.state == "ready"
        with plugins.open_backend("mine") as backend:
            assert run_check(backend, "kv.round_trip", CHECKS["kv.round_trip"]).state == "passed"
    finally:
        plugins.load_plugins.cache_clear()
        sys.modules.pop("my_package", None)


@pytest.fixture(scope="module")
def made() -> dict[str, str]:
    """The pages of the reference as the site gets them."""
    return tool_module("docs_site").reference_pages()


def test_the_reference_has_the_pages_that_the_site_lists(made):
    assert {f"reference/{name}" for name in made} == {one for one in MADE if "/" in one}


def test_the_command_reference_has_every_command_and_option(made, commands):
    for path, command in commands.items():
        if path == "lantern-accel" or command.hidden:
            continue
        assert f" `{path}`\n" in made["commands.md"], path
        section = made["commands.md"].split(f" `{path}`\n")[1].split("\n#")[0]
        for one in command.params:
            if one.param_type_name == "option" and not one.hidden and one.name != "help":
                assert f"`{one.opts[0]}`" in section, f"{path} {one.opts[0]}"


def test_the_python_reference_names_what_exists(made):
    reference = tool_module("python_reference")
    for name, (_, _, sections) in reference.PAGES.items():
        assert made[f"{name}.md"].count("\n::: ") == len(sections)
        for file in sections.values():
            module = importlib.import_module(f"lantern_accel.{file[:-3].replace('/', '.')}")
            assert all(hasattr(module, one) for one in reference.NAMES.get(file, ())), file


def test_links_of_pages_from_the_root_lead_to_pages_of_the_site():
    hooks = tool_module("docs_site")
    site_text = hooks.site_text
    # mkdocs takes every function whose name begins so for an event, and knows no others.
    events = {name for name in vars(hooks) if name.startswith("on_")}
    assert events == {"on_files", "on_page_markdown", "on_page_content"}
    text = "[a](docs/auto.md#b) ![c](docs/showcase.png) [d](CONTRIBUTING.md) [e](LICENSE) [f](docs/x.md)"
    made = "[a](auto.md#b) ![c](showcase.png) [d](contributing.md) e (`LICENSE`) [f](x.md)"
    assert site_text(text, "index.md") == made
    text = "[a](auto.md) [d](../CONTRIBUTING.md) [e](../LICENSE) [f](../lantern_accel/api.py)"
    made = "[a](auto.md) [d](contributing.md) e (`LICENSE`) [f](reference/api.md)"
    assert site_text(text, "auto.md") == made
    assert site_text("[a](../auto.md)", "reference/api.md") == "[a](../auto.md)"
    assert site_text("[a](../lantern_accel/api.py)", "auto.md") == "[a](reference/api.md)"


def test_one_version_everywhere():
    import lantern_accel

    project = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    assert f'version = "{lantern_accel.__version__}"' in project
    assert f"## {lantern_accel.__version__}" in (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")


def test_the_exported_names_exist():
    import lantern_accel

    for name in lantern_accel.__all__:
        assert getattr(lantern_accel, name) is not None
    with pytest.raises(AttributeError, match="nothing_of_the_sort"):
        lantern_accel.nothing_of_the_sort  # noqa: B018


@pytest.mark.parametrize("page", documents(), ids=lambda path: str(path.relative_to(ROOT)))
def test_tables_and_lists_follow_a_blank_line_as_the_site_needs(page):
    """The site's Markdown shows a table or a list right behind a code block as plain text."""
    text = page.read_text(encoding="utf-8")
    assert not re.findall(r"^```\n(?:\||[-*] |\d+\. ).*$", text, re.M)
