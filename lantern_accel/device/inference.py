"""Running functions in the inference mode that a backend chooses."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeVar

Called = TypeVar("Called", bound=Callable[..., Any])


def inferring(function: Called) -> Called:
    """Run a function in the inference mode of its first argument, a backend or what has one."""

    @functools.wraps(function)
    def run(first: Any, *args: Any, **kwargs: Any) -> Any:
        with getattr(first, "backend", first).inference():
            return function(first, *args, **kwargs)

    return run  # type: ignore[return-value]
