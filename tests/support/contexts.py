"""What a caller may have set of torch around a call, and what is set now."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any

import torch
from torch import overrides


@contextmanager
def held(put: Callable[[Any], object], value: object, before: object) -> Iterator[None]:
    """Set a value of torch, and afterwards what it was before."""
    put(value)
    try:
        yield
    finally:
        put(before)


@contextmanager
def everything() -> Iterator[None]:
    with ExitStack() as stack:
        for name in ("autocast bfloat16", "default meta", "float64", "deterministic"):
            stack.enter_context(CONTEXTS[name]())
        torch.set_autocast_enabled("cuda", True)  # torch.autocast refuses what is not here
        stack.callback(torch.set_autocast_enabled, "cuda", False)
        stack.enter_context(torch.device("cpu"))
        stack.enter_context(torch.device("meta"))
        stack.enter_context(torch.enable_grad())
        yield


CONTEXTS: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    "autocast bfloat16": lambda: torch.autocast("cpu", torch.bfloat16),
    "autocast float16": lambda: torch.autocast("cpu", torch.float16),
    "a block on meta": lambda: torch.device("meta"),
    "default meta": lambda: held(torch.set_default_device, "meta", None),
    "default cpu": lambda: held(torch.set_default_device, "cpu", None),
    "float64": lambda: held(torch.set_default_dtype, torch.float64, torch.float32),
    "bfloat16": lambda: held(torch.set_default_dtype, torch.bfloat16, torch.float32),
    "inference": torch.inference_mode,
    "no gradients": torch.no_grad,
    "gradients": torch.enable_grad,
    "deterministic": lambda: held(torch.use_deterministic_algorithms, True, False),
    "everything": everything,
}


def set_now() -> dict[str, Any]:
    """Return what is set of torch in this thread."""
    types = ("cpu", "cuda")
    return {
        "autocast": {t: (torch.is_autocast_enabled(t), torch.get_autocast_dtype(t)) for t in types},
        "modes": overrides._get_current_function_mode_stack(),
        "device": torch.get_default_device(),
        "dtype": torch.get_default_dtype(),
        "inference": torch.is_inference_mode_enabled(),
        "gradients": torch.is_grad_enabled(),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
    }
