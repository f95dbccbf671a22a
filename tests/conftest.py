"""What all tests share: one thread for each worker, native kernels compiled once, and two tiers."""

from __future__ import annotations

import functools
import gc
import os
import tempfile
import time
from collections.abc import Generator, Iterator
from pathlib import Path

# Two workers with two threads each would spin on two cores; read before torch is imported.
os.environ.setdefault("OMP_NUM_THREADS", "1")
if "LANTERN_ACCEL_CPU_LIBRARIES" not in os.environ:
    folder = Path(tempfile.gettempdir()) / f"lantern-accel-tests-{os.getuid()}" / "native"
    os.environ["LANTERN_ACCEL_CPU_LIBRARIES"] = str(folder)
# Dozens of tests start a process: without compiled modules each would compile the package anew.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)

import pytest  # after the settings that torch reads when it is imported
import torch
import typer.main
from support.tiers import leave_products

#: This process's CPU time when the set-up of a test begins.
BEGUN = pytest.StashKey[float]()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--cpu-limit",
        type=float,
        metavar="SECONDS",
        help="fail a test without the mark `long` that takes more CPU time of pytest's own process",
    )
    parser.addoption(
        "--inputs", type=int, default=0, help="number of hostile inputs to try (tests/fuzz)"
    )
    parser.addoption("--first-part", type=int, default=0, help="where --inputs begins, in 500s")


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> Generator[None]:
    item.stash[BEGUN] = time.process_time()
    yield


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_call(item: pytest.Item) -> Generator[None]:
    """Fail a passed test that took too long: the quick tier stays quick only if each test does."""
    yield
    limit, spent = item.config.getoption("--cpu-limit"), time.process_time() - item.stash[BEGUN]
    if limit is not None and spent > limit and "long" not in item.keywords:
        pytest.fail(
            f"{spent:.1f} s of CPU time, and --cpu-limit is {limit:g}; make it quicker or mark it long",
            pytrace=False,
        )


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    left = leave_products(items)
    config.hook.pytest_deselected(items=[item for item in items if item in left])
    items[:] = [item for item in items if item not in left]


def pytest_collection_finish() -> None:
    """Leave what is imported by now out of every later search for garbage: captures look each time."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True, scope="session")
def _the_command_is_built_once() -> Iterator[None]:
    """Keep what typer makes of all commands: it makes them for every call, of which are hundreds here."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(typer.main, "get_command", functools.cache(typer.main.get_command))
        yield


@pytest.fixture(autouse=True)
def _no_device_is_left_in_torch() -> Iterator[None]:
    """Fail the test that registers a software device here: torch keeps it, and later tests meet it.

    ``on_software_hpu`` runs a script in a process of its own.
    """
    before = torch._C._get_privateuse1_backend_name()
    yield
    now = torch._C._get_privateuse1_backend_name()
    assert now == before, f"the device {now!r} stays registered in this process for later tests"


@pytest.fixture(autouse=True)
def _rows_cost_what_vectors_take(monkeypatch: pytest.MonkeyPatch) -> None:
    """Give models in tests the costs of a processor without a matrix unit, without a clock."""
    from lantern_accel.generation import row_costs

    vectors = {2: 1.0, 4: 1.06, 8: 1.24, 16: 1.6, 32: 3.1, 64: 6.2, 128: 12.4}
    monkeypatch.setattr(row_costs, "measure", lambda *given: row_costs.RowCosts(costs=vectors))
