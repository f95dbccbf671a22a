"""One spelling for the same thing in every command."""

from __future__ import annotations

from collections.abc import Iterator
from importlib.metadata import EntryPoint
from typing import Any

import pytest
import typer.main

from lantern_accel.cli import main
from lantern_accel.cli.app import app
from lantern_accel.cli.options import strategy_words
from lantern_accel.errors import StrategyError
from lantern_accel.strategy.values import DynamicTree, StaticTree, named_strategy
from lantern_accel_profiles.commands.tables import numbers, whole_numbers


def commands(of: Any = None, path: tuple[str, ...] = ()) -> Iterator[tuple[str, Any]]:
    """Every command by its words."""
    command = typer.main.get_command(app) if of is None else of
    for name, one in getattr(command, "commands", {}).items():
        if getattr(one, "commands", None):
            yield from commands(one, (*path, name))
        else:
            yield " ".join((*path, name)), one


EVERY = dict(commands())


def options(command: Any) -> dict[str, Any]:
    return {name: one for one in command.params for name in one.opts if name.startswith("-")}


@pytest.mark.parametrize("words", EVERY)
def test_the_same_option_is_the_same_kind_of_thing(words: str) -> None:
    """``--json`` is a flag, ``-o`` is ``--output``, ``-b`` ``--batch``, ``-s`` ``--strategy``."""
    known = options(EVERY[words])
    assert "--json" not in known or known["--json"].is_flag
    for short, long in (("-o", "--output"), ("-b", "--batch"), ("-s", "--strategy")):
        assert short not in known or known[short] is known[long]


def test_several_stand_with_commas_between_or_repeated() -> None:
    assert whole_numbers("--batch", ["1,4", "4", " 8"], 1, 1024) == [1, 4, 8]
    assert numbers("--temperature", ["0,0.5", "1e0"], 0, 2) == [0, 0.5, 1]
    assert strategy_words(["vanilla,scd", "scd"]) == ["vanilla", "scd"]
    both = ["lantern++:k=10,lambda=2", "auto", "scd"]
    assert strategy_words(["lantern++:k=10,lambda=2; auto,scd"], presets=True) == both


@pytest.mark.parametrize(
    "words", ["tune --strategy", "stepcost --strategy", "serve --port 0 --warm-up"]
)
def test_settings_are_refused_where_names_alone_are_taken(
    words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    for given in ("lantern++:k=10", "of.json"):
        assert main([*words.split(), given]) == 2
        assert "is a name alone here" in capsys.readouterr().err


def test_strategies_of_packages_are_known_and_listed(monkeypatch: pytest.MonkeyPatch) -> None:
    brought = [EntryPoint("row-above", "my_drafts", "lantern_accel.sources")]
    monkeypatch.setattr(
        "lantern_accel.strategy.sources.entry_points",
        lambda group, name=None: [one for one in brought if name in (None, one.name)],
    )
    assert strategy_words(["row-above,vanilla"]) == ["row-above", "vanilla"]
    with pytest.raises(StrategyError, match="did you mean row-above"):
        strategy_words(["row-abov"])
    with pytest.raises(StrategyError, match=r"known: .*, row-above, "):
        named_strategy("none-of-these", static=StaticTree(paths=((0,),)), dynamic=DynamicTree())
