"""HPUGraph on the software HPU: capture executes and records, replay runs the record again.

Semantics are the bridge's, as its 1.19 sources have them: a capture also executes; one capture a
process at a time, and none any more once one has failed to end; what the host reads and what writes to a
view of a tensor cannot be captured;
replay writes the tensors of the capture, so whoever keeps one past the next replay clones it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten
from torch.utils.weak import TensorWeakRef

from lantern_accel_hpu.software import late, metrics

#: Operators that hand a value to the host.
HOST_READS = frozenset(
    {"aten::_local_scalar_dense", "aten::item", "aten::equal", "aten::is_nonzero"}
)


def _storages(values: Any) -> set[int]:
    tensors = (v for v in tree_flatten(values)[0] if isinstance(v, Tensor))
    return {t.untyped_storage()._cdata for t in tensors}


def _on_host(values: Any) -> bool:
    tensors = (v for v in tree_flatten(values)[0] if isinstance(v, Tensor))
    return any(t.device.type == "cpu" and t.dim() for t in tensors)


def _find_written(func: Any, args: tuple[Any, ...]) -> list[Tensor]:
    """Return the positional arguments that an operator writes to."""
    pairs = zip(func._schema.arguments, args, strict=False)
    writes = (value for a, value in pairs if a.alias_info is not None and a.alias_info.is_write)
    return [value for value in writes if isinstance(value, Tensor)]


# torch leaves the base class untyped.
class _Tape(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Runs operators and records those that a replay must run again."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.record: list[tuple[Any, tuple[Any, ...], dict[str, Any], tuple[Tensor, ...]]] = []
        self._views: dict[int, TensorWeakRef] = {}

    def _is_view(self, tensor: Tensor) -> bool:
        """Return whether a tensor is a view: one that this block made, or a part of what it shows."""
        made = self._views.get(id(tensor))
        part = tensor.untyped_storage().nbytes() != tensor.numel() * tensor.element_size()
        return part or (made is not None and made() is tensor)

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        name = func._schema.name
        if name in HOST_READS:
            raise RuntimeError(
                f"{name}: cpu fallback is not supported during hpu graph capturing (the host reads)"
            )
        for value in _find_written(func, args):
            if self._is_view(value):
                raise RuntimeError(
                    f"{name}: an in-place update of a view is not supported during hpu graph "
                    "capturing; write to the whole tensor"
                )
        out = func(*args, **kwargs)
        # torch itself detaches what it makes, which is the same tensor under another name.
        shows = name != "aten::detach" or self._is_view(args[0])
        if (
            shows
            and not func._schema.is_mutable
            and any(r.alias_info for r in func._schema.returns)
        ):
            for one in tree_flatten(out)[0]:
                # What an operator gives back as it was, cast to its own dtype say, is not a view.
                if isinstance(one, Tensor) and not any(one is given for given in args):
                    self._views[id(one)] = TensorWeakRef(one)
        if _on_host((args, kwargs, out)):
            raise RuntimeError(
                f"{name}: cpu fallback is not supported during hpu graph capturing (host tensor)"
            )
        if name.startswith("prim::"):
            return out
        given = _storages((args, kwargs))
        made = [o for o in tree_flatten(out)[0] if isinstance(o, Tensor)]
        fresh = tuple(o for o in made if o.untyped_storage()._cdata not in given)
        # A view needs no replay: it shows what its base holds by then.
        if fresh or func._schema.is_mutable:
            self.record.append((func, args, kwargs, fresh))
        return out


class HPUGraph:
    """A recording of device work on fixed tensors."""

    _capturing: HPUGraph | None = None

    def __init__(self) -> None:
        self._tape: _Tape | None = None
        self._open = False

    def capture_begin(self, dry_run: bool = False) -> None:
        """Record and execute what follows; raises RuntimeError where a capture is under way."""
        if dry_run:
            raise NotImplementedError("the software HPU executes what it captures: no dry_run")
        if HPUGraph._capturing is not None:
            raise RuntimeError("a graph is being captured in this process; end that capture first")
        HPUGraph._capturing = self
        self._open = True
        self._tape = _Tape()
        self._tape.__enter__()  # type: ignore[no-untyped-call]

    def capture_end(self) -> None:
        """End the recording; raises RuntimeError without :meth:`capture_begin`."""
        if not self._open or self._tape is None:
            raise RuntimeError("no capture was begun on this graph")
        self._tape.__exit__(None, None, None)  # type: ignore[no-untyped-call]  # torch types no mode
        if said := late.count_run("HPUGraph"):
            raise RuntimeError(said)  # as in the bridge, the capture stays open for good
        self._open = False
        HPUGraph._capturing = None
        metrics.graph_compilation.add()

    def replay(self, asynchronous: bool = False) -> None:
        """Run the recorded work again on the same tensors; raises RuntimeError before a capture."""
        if self._tape is None or self._open:
            raise RuntimeError("nothing was captured on this graph")
        torch.ops.lantern_software_hpu.launch()
        if late.count_run("replay"):
            return
        for func, args, kwargs, fresh in self._tape.record:
            made = [o for o in tree_flatten(func(*args, **kwargs))[0] if isinstance(o, Tensor)]
            for old, new in zip(fresh, made[-len(fresh) :] if fresh else [], strict=True):
                old.copy_(new)

    def reset(self) -> None:
        """Forget the recording and free what it holds."""
        self._tape = None


@contextlib.contextmanager
def graph(hpu_graph: HPUGraph, stream: Any = None, dry_run: bool = False) -> Iterator[None]:
    """Capture the block into a graph, and end the capture whatever the block raised."""
    hpu_graph.capture_begin(dry_run)
    try:
        yield
    finally:
        hpu_graph.capture_end()
