"""A test of the quick tier that takes too much CPU time fails where CI sets a limit."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest_plugins = ("pytester",)

TESTS = """
    import time
    import pytest

    def busy():
        until = time.process_time() + 0.2
        while time.process_time() < until:
            pass

    @pytest.fixture
    def slow():
        busy()

    def test_quick(): time.sleep(0.2)
    def test_busy(): busy()
    def test_set_up(slow): pass
    @pytest.mark.long
    def test_marked(): busy()
"""


@pytest.mark.parametrize(("options", "failed"), [((), 0), (("--cpu-limit=0.15",), 2)])
def test_a_busy_test_fails_unless_it_is_long(
    pytester: pytest.Pytester, options: tuple[str, ...], failed: int
) -> None:
    pytester.makeconftest((Path(__file__).parents[1] / "conftest.py").read_text(encoding="utf-8"))
    pytester.makeini("[pytest]\nmarkers = long: takes long")
    pytester.makepyfile(TESTS)
    done = pytester.runpytest_inprocess("-p", "no:cacheprovider", *options)
    done.assert_outcomes(passed=4 - failed, failed=failed)
    if failed:
        done.stdout.fnmatch_lines(["*--cpu-limit is 0.15*"])
