"""Explains errors of torch_xla, and says what to do."""

from __future__ import annotations

from lantern_accel.errors import (
    BackendError,
    DeviceLostError,
    DeviceMemoryError,
    NotCapturableError,
)

#: Parts of messages, by what they mean. Their own texts: torch_xla 2.9.0 and PJRT.
HOST_READ = ("Unexpected execution happens inside the compiled function",)
SECOND_GRAPH = ("different graphs", "max_different_graphs")
NO_MEMORY = ("RESOURCE_EXHAUSTED", "Out of memory", "out of memory")
LOST = ("UNAVAILABLE", "DEADLINE_EXCEEDED", "device is in an error state", "Core halted")
BUSY = ("already in use", "The TPU is in use", "libtpu.so is already")


def explain(error: Exception, doing: str) -> BackendError | None:
    """Return what an error of the runtime means while ``doing``; None where it is not the runtime's."""
    said = str(error)
    line = next(iter(said.strip().splitlines()), "")
    if not isinstance(error, RuntimeError):
        return None
    if any(part in said for part in HOST_READ):
        return NotCapturableError(
            f"{doing}: the step needs a value on the host, so it is not one program; run "
            "`lantern-accel conform xla --only static`, which names the line"
        )
    if any(part in said for part in SECOND_GRAPH):
        return NotCapturableError(
            f"{doing}: the step became a second program, and every call would compile; run "
            "`lantern-accel conform xla --only static.one_graph`, which names the line"
        )
    if any(part in said for part in BUSY):
        return BackendError(f"{doing}: another process holds the device ({line}); end it first")
    if any(part in said for part in NO_MEMORY):
        return DeviceMemoryError(
            f"{doing}: the device's memory is full ({line}); ask for fewer images at once "
            "(--batch), or for --dtype bfloat16"
        )
    if any(part in said for part in LOST):
        return DeviceLostError(f"{doing}: the device stopped working ({line}); start again")
    return None
