"""The code that torch.compile's own compiler generates for a step, without compiling it further."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterable
from typing import Any

import torch


class _Enough(Exception):
    """Ends a compilation when its code is there."""


def generated(step: Callable[[], None], monkeypatch: Any) -> str:
    """Return Inductor's wrapper code of ``step`` as one graph; nothing is run or built."""
    from torch._inductor.graph import GraphLowering

    found: list[str] = []

    def stop(graph: Any) -> None:
        code = graph.codegen()[0]
        found.append(getattr(code, "value", code))
        raise _Enough

    monkeypatch.setattr(GraphLowering, "compile_to_module", stop)
    torch._dynamo.reset()
    with (
        torch._inductor.config.patch(fx_graph_cache=False),
        warnings.catch_warnings(),
        contextlib.suppress(Exception),
    ):
        warnings.simplefilter("ignore", DeprecationWarning)
        torch.compile(step, fullgraph=True, dynamic=False)()
    torch._dynamo.reset()
    assert len(found) == 1, f"{len(found)} graphs were generated, not one"
    return found[0]


def whole_caches(code: str, shapes: Iterable[tuple[int, ...]]) -> list[str]:
    """Return the lines that allocate a tensor of a cache's whole shape: a cache that is copied."""
    made = [line for line in code.splitlines() if "empty_strided" in line]
    assert len(made) > 20, "the test reads the allocations of this torch's wrapper"
    listed = {", ".join(map(str, shape)) for shape in shapes}
    return [line for line in made if any(f"(({shape})" in line for shape in listed)]
