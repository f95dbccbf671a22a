"""What the documents say is true: commands, options, files and the porting example."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest
import typer.main
import typer.testing

ROOT = Path(__file__).resolve().parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")


def test_the_files_that_documents_link_to_are_there():
    for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md"):
        text = (ROOT / name).read_text(encoding="utf-8")
        for target in re.findall(r"\]\(([^)#]+)\)", text):
            if not target.startswith("http"):
                assert (ROOT / target).exists(), f"{name} links to {target}"


def test_every_option_that_the_readme_names_is_an_option(command_help):
    for option in set(re.findall(r"`?(--[a-z][a-z-]+)", README)):
        assert option in command_help or option == "--help", option


@pytest.fixture(scope="module")
def command_help() -> str:
    """The help of every command, in one text."""
    from lantern_accel.cli.app import app

    runner = typer.testing.CliRunner()
    texts = [runner.invoke(app, ["--help"]).output]
    for words in (
        ["generate"], ["models"], ["models", "check"], ["models", "plan"], ["devices"], ["bench"],
        ["conform"], ["tune"], ["stepcost"], ["train", "data"],
        ["train", "tokenizer"], ["train", "target"], ["train", "drafter"], ["train", "bundle"],
        ["profile"], ["compare"], ["profiles"],
        ["evaluate"],
    ):  # fmt: skip
        texts.append(runner.invoke(app, [*words, "--help"]).output)
        assert "Usage" in texts[-1], words
    return "\n".join(texts)


def test_no_placeholder_is_left_in_the_readme():
    assert not re.findall(r"@[A-Z]+@", README)


def test_the_porting_example_is_a_backend(monkeypatch, tmp_path):
    from lantern_accel.device import plugins

    block = next(b for b in re.findall(r"```python\n(.*?)```", README, re.S) if "hookimpl" in b)
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
        assert state.state in ("ready", "not available")
    finally:
        plugins.load_plugins.cache_clear()
        sys.modules.pop("my_package", None)


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
