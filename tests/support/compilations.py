"""Counts the kernels that Triton would compile for a card; none is, and nothing runs."""

from __future__ import annotations

from typing import Any

import pytest


class Compilations:
    """The variants of kernels that were launched, by name; what a launch writes is left as it was."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, generation: int = 90) -> None:
        from triton.backends.compiler import GPUTarget
        from triton.compiler import make_backend
        from triton.runtime.jit import JITFunction, create_function_from_signature

        self.found: set[tuple[str, str, str]] = set()
        self.launches: list[str] = []
        #: Programs of each launch, by axis.
        self.grids: list[tuple[int, ...]] = []
        backend = make_backend(GPUTarget("cuda", generation, 32))

        def run(kernel: Any, *args: Any, grid: Any, warmup: bool, **given: Any) -> None:
            bind = create_function_from_signature(kernel.signature, kernel.params, backend)
            _, special, options = bind(*args, **given)
            name = kernel.__name__
            self.found.add((name, str(special), str(sorted(options.items()))))
            self.launches.append(name)
            self.grids.append(tuple(grid))

        monkeypatch.setattr(JITFunction, "run", run)

    def names(self) -> dict[str, int]:
        """Return how many variants of each kernel there are."""
        found: dict[str, int] = {}
        for name, *_ in self.found:
            found[name] = found.get(name, 0) + 1
        return found
