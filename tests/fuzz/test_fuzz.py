"""Some inputs of the fuzz suite, and all that ever failed; ``--inputs 20000`` tries thousands."""

from __future__ import annotations

import collections
import json
from pathlib import Path

import pytest
from hypothesis import HealthCheck, Phase, given, seed, settings

from fuzz.cases import cases
from fuzz.harness import Case, keep, run_case, write_whole_files
from fuzz.words import commands

FAILED = sorted((Path(__file__).parent / "cases").glob("*.json"))
KNOWN = commands()
#: Inputs of one part of ``--inputs``: no process grows old, and one that dies takes few with it.
PART = 500


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "part" in metafunc.fixturenames:
        inputs, first = (metafunc.config.getoption(name) for name in ("inputs", "first_part"))
        metafunc.parametrize("part", range(first, first + -(-inputs // PART)))


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("whole")
    write_whole_files(folder)
    return folder


@pytest.mark.parametrize("examples", [12, pytest.param(240, marks=pytest.mark.long)])
def test_no_input_ends_in_a_traceback_a_hang_or_a_picture_of_nan(
    whole: Path, examples: int
) -> None:
    @settings(max_examples=examples, deadline=None, database=None, derandomize=True,
              suppress_health_check=list(HealthCheck))  # fmt: skip
    @given(cases(whole, KNOWN))
    def holds(case: Case) -> None:
        outcome = run_case(case, whole)
        assert not outcome.fault, f"{outcome.kind}: {outcome.details}"

    holds()


def test_thousands_of_inputs_hold(whole: Path, part: int) -> None:
    """What fails is kept, to be replayed, and the part goes on; ``-rP`` prints how inputs ended."""
    counts: collections.Counter[str] = collections.Counter()
    slowest, kept = 0.0, list[str]()

    @seed(part)
    @settings(max_examples=PART, deadline=None, database=None, phases=[Phase.generate],
              suppress_health_check=list(HealthCheck))  # fmt: skip
    @given(cases(whole, KNOWN))
    def count(case: Case) -> None:
        nonlocal slowest
        outcome = run_case(case, whole)
        counts[outcome.kind] += 1
        slowest = max(slowest, outcome.seconds)
        if outcome.fault:
            path = keep(case, Path(__file__).parent / "cases")
            kept.append(f"{outcome.kind}: {path}\n{outcome.details[-1500:]}")

    count()
    print(dict(counts), f"slowest {slowest:.2f} s")
    assert not kept, "\n".join(kept)


@pytest.mark.parametrize("path", FAILED, ids=lambda path: path.stem)
def test_what_failed_once_holds(path: Path, whole: Path) -> None:
    outcome = run_case(json.loads(path.read_text(encoding="utf-8")), whole)
    assert not outcome.fault, f"{outcome.kind}: {outcome.details}"


def test_every_command_and_option_is_known() -> None:
    words = {" ".join(command.words) for command in KNOWN}
    assert {"generate", "bench", "train drafter", "models plan", "compare", "conform"} <= words
    assert sum(len(command.parameters) for command in KNOWN) > 100


def test_the_harness_sees_faults(whole: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import time

    from fuzz import harness

    monkeypatch.setattr(harness, "LIMIT", 0.2)
    for wrong, kind in ((lambda *a: {}["x"], "traceback"), (lambda *a: time.sleep(5), "hang"),
                        (lambda *a: 3, "traceback"), (lambda *a: 2, "refused")):  # fmt: skip
        monkeypatch.setitem(harness.TARGETS, "command", wrong)
        assert run_case({"target": "command", "words": []}, whole).kind == kind
