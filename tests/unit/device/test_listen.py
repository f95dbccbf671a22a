"""Listening to a step's phases: what is reported, what is put back, and who may not swallow it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager

import pytest
from support.gaudi import Gaudi

from lantern_accel.device.capture import listening
from lantern_accel.device.operations import TensorOps
from lantern_accel_hpu.backend import DeviceBackend
from lantern_accel_hpu.bridge import Bridge

Noting = Callable[[str], AbstractContextManager[None]]


def noting(names: list[str]) -> Noting:
    @contextmanager
    def listener(name: str) -> Iterator[None]:
        names.append(f"+{name}")
        yield
        names.append(f"-{name}")

    return listener


# A backend that marks phases itself leaves them to the listener.
@pytest.mark.parametrize("ops", [TensorOps(), DeviceBackend(Bridge(Gaudi()))], ids=["", "marks"])
def test_phases_are_reported_inside_the_block_only(ops: TensorOps) -> None:
    seen: list[str] = []
    with ops.phase("draft"):
        pass
    with listening(ops, noting(seen)), ops.phase("draft"):
        pass
    with ops.phase("verify"):
        pass
    assert seen == ["+draft", "-draft"]


def test_the_listener_before_is_put_back_whatever_happens() -> None:
    inner: list[str] = []
    outer: list[str] = []
    ops = TensorOps()
    with listening(ops, noting(outer)):
        with pytest.raises(KeyError), listening(ops, noting(inner)), ops.phase("a"):
            raise KeyError
        with ops.phase("b"):
            pass
    assert (inner, outer, ops.listener) == (["+a"], ["+b", "-b"], None)
