"""Makes operators of torch of functions that launch kernels: what traces or records sees one call."""

from __future__ import annotations

from collections.abc import Callable
from typing import ParamSpec, TypeVar

import torch

_Given = ParamSpec("_Given")
_Made = TypeVar("_Made")
_LIBRARY = torch.library.Library("lantern_accel_cuda", "FRAGMENT")


def operator(
    schema: str, like: Callable[..., object] = lambda *given: None
) -> Callable[[Callable[_Given, _Made]], Callable[_Given, _Made]]:
    """Register a function by its ``schema``; its callers call the operator from then on.

    ``like`` returns empty tensors of the shapes of its results, of tensors without memory.
    """
    name = schema.partition("(")[0]

    def register(function: Callable[_Given, _Made]) -> Callable[_Given, _Made]:
        _LIBRARY.define(schema)
        _LIBRARY.impl(name, function, "CompositeExplicitAutograd")
        torch.library.register_fake(f"lantern_accel_cuda::{name}")(like)
        made: Callable[_Given, _Made] = getattr(torch.ops.lantern_accel_cuda, name)
        return made

    return register
