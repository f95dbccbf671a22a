"""Listening to a step's phases: what is reported, what is put back, and who may not swallow it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from support.gaudi import Gaudi

from lantern_accel.device.capture import listening
from lantern_accel.device.operations import TensorOps
from lantern_accel_hpu.backend import DeviceBackend
from lantern_accel_hpu.bridge import Bridge


def test_phases_are_reported_inside_the_block_only() -> None:
    seen: list[str] = []

    @contextmanager
    def listener(name: str) -> Iterator[None]:
        seen.append(f"+{name}")
        yield
        seen.append(f"-{name}")

    ops = TensorOps()
    with ops.phase("draft"):
        pass
    with listening(ops, listener), ops.phase("draft"):
        pass
    with ops.phase("verify"):
        pass
    assert seen == ["+draft", "-draft"]


def test_the_listener_before_is_put_back_whatever_happens() -> None:
    inner: list[str] = []
    outer: list[str] = []

    def noting(names: list[str]):  # type: ignore[no-untyped-def]
        @contextmanager
        def listener(name: str) -> Iterator[None]:
            names.append(name)
            yield

        return listener

    ops = TensorOps()
    with listening(ops, noting(outer)):
        with pytest.raises(KeyError), listening(ops, noting(inner)), ops.phase("a"):
            raise KeyError
        with ops.phase("b"):
            pass
    assert (inner, outer, ops.listener) == (["a"], ["b"], None)


def test_a_backend_that_marks_phases_itself_leaves_them_to_the_listener() -> None:
    seen: list[str] = []

    @contextmanager
    def listener(name: str) -> Iterator[None]:
        seen.append(name)
        yield

    backend = DeviceBackend(Bridge(Gaudi()))
    with listening(backend, listener), backend.phase("accept"):
        pass
    assert seen == ["accept"]
