"""Tells whether a loaded module is still what our decoder of it was made from.

Parts of a decoder are copies: packed matrices, rows in another order, a quantized copy for drafts.
So a call compares first. Kinds of modules, their hooks and numbers, and where tensors lie are compared
one by one; values are compared by sums of their bits, since a write through ``.data`` (as of an adapter
that is merged) leaves no other trace. The sums read the weights twice, as two decoding steps do.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules import module as torch_modules

from lantern_accel.errors import ModelError, RequestError

#: Forward passes of these packages compute what our decoder does.
_KNOWN = ("transformers.", "torch.nn.modules.")
_HOOKS = ("_forward_hooks", "_forward_pre_hooks")
_GLOBAL_HOOKS = (torch_modules._global_forward_hooks, torch_modules._global_forward_pre_hooks)
_PLAIN = (Tensor, nn.Parameter, nn.Buffer)
_INTS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class Watch:
    """The modules of a model that its tokens depend on.

    ``beside``: patterns of keys; what all of them match, such as a tower that reads images, is left out.
    """

    def __init__(self, model: Any, beside: Sequence[re.Pattern[str]]) -> None:
        self.model, self.beside = model, beside
        self.seen: tuple[object, ...] | None = None

    def modules(self, model: nn.Module | None = None) -> Iterator[tuple[str, nn.Module]]:
        """Go through paths and modules; the model's own path is empty."""
        todo: list[tuple[str, nn.Module]] = [("", self.model if model is None else model)]
        while todo:
            path, one = todo.pop()
            yield path, one
            for name, inner in reversed(one._modules.items()):
                place = f"{path}.{name}" if path else name
                if inner is not None and not all(p.search(f"{place}.") for p in self.beside):
                    todo.append((place, inner))

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Go through the parameters and buffers of these modules."""
        for path, one in self.modules():
            for name, tensor in (*one._parameters.items(), *one._buffers.items()):
                if tensor is not None:
                    yield f"{path}.{name}", tensor

    def has_changed(self) -> bool:
        """Return whether anything differs from what :meth:`note` saw last."""
        return self.seen is None or self.seen[0] != self._form() or self.seen[1] != self._sums()

    def note(self) -> tuple[int, ...]:
        """Keep what the model is now; returns the sums of its values."""
        self.seen = (self._form(), self._sums())
        sums: tuple[int, ...] = self.seen[1]
        return sums

    def _form(self) -> list[object]:
        """Return what is compared without reading a weight."""
        found: list[object] = [_global_hooks()]
        found += [(path, _facts(one)) for path, one in self.modules()]
        for path, t in self.tensors():
            place = t.data_ptr() if type(t) in _PLAIN else id(t)
            found += [path, place, t.shape, t.stride(), t.dtype, t.device]
        return found

    def _sums(self) -> tuple[int, ...]:
        """Return a sum of the bits of every tensor, in which a number's place counts."""
        with torch.no_grad():
            sums = [_sum(t) for _, t in self.tensors() if not t.is_meta]
            by_device: dict[torch.device, list[Tensor]] = {}
            for one in sums:
                by_device.setdefault(one.device, []).append(one)
            return tuple(n for some in by_device.values() for n in torch.stack(some).tolist())

    def check(self) -> None:
        """Raise :class:`ModelError` for a module that computes something else than our decoder does.

        Raises :class:`RequestError` where it is offloaded.
        """
        away = [path for path, one in self.modules() if "_hf_hook" in vars(one)]
        away += [path for path, tensor in self.tensors() if tensor.is_meta]
        if away:
            raise RequestError(
                f"{away[0] or 'the module'} is offloaded, so that its weights are not on its device "
                "while tokens are sampled; load it without offloading (device_map, "
                "enable_model_cpu_offload)"
            )
        if hooks := _global_hooks():
            raise _other("every module", f"has the hooks {hooks}")
        with torch.device("meta"):
            made = type(self.model)(self.model.config)
        expected = {path: _facts(one) for path, one in self.modules(made)}
        for path, one in self.modules():
            found = _facts(one)
            for name, value in expected.pop(path, {"class": "nothing"}).items():
                if found.get(name) != value:
                    what = (
                        f"has the {name} {found.get(name)}, where its configuration makes {value}"
                    )
                    raise _other(path, what)
            if not f"{_module_of(type(one).forward)}.".startswith(_KNOWN):
                raise _other(path, f"has the forward of {_module_of(type(one).forward)}")
        for path in expected:
            raise _other(path, "is absent")
        for path, tensor in self.tensors():
            if type(tensor) not in _PLAIN:
                raise _other(path, f"is a {type(tensor).__qualname__}, no plain tensor")


def _facts(module: nn.Module) -> dict[str, object]:
    """Return what decides what a module computes besides its tensors; hooks of transformers aside."""
    own, kind = vars(module), type(module)
    hooks = [hook for name in _HOOKS for hook in own[name].values()]
    # With these a family prepares a pass; an object's own one stands before its class's.
    given = (name for name, one in own.items() if callable(one))
    methods = [name for name in given if name.startswith(("prepare_", "get_"))]
    numbers = {n: one for n, one in own.items() if type(one) is float and "dropout" not in n}
    return {
        "class": f"{kind.__module__}.{kind.__qualname__}",
        "forward": own.get("forward"),
        "hooks": [
            _name_of(one) for one in hooks if not _module_of(one).startswith("transformers.")
        ],
        "methods": methods,
        **numbers,
    }


def _global_hooks() -> list[str]:
    """Return the names of what torch calls around every module."""
    return [_name_of(hook) for hooks in _GLOBAL_HOOKS for hook in hooks.values()]


def _module_of(thing: object) -> str:
    return getattr(thing, "__module__", "")


def _name_of(hook: object) -> str:
    return getattr(hook, "__qualname__", type(hook).__qualname__)


def _other(path: str, what: str) -> ModelError:
    return ModelError(
        f"{path or 'the module'} {what}, which lantern-accel does not run; undo it (an adapter: "
        "merge_and_unload()), or call restore() for the library's own loop"
    )


def _sum(tensor: Tensor) -> Tensor:
    """Return int64 ``[]``: a sum of a tensor's bits in which places of rows and columns count."""
    t = tensor.detach().contiguous()
    if not t.numel():
        return torch.zeros((), dtype=torch.int64, device=t.device)
    t = t.reshape(len(t) if t.dim() > 1 else 1, -1)
    # Integers as wide as fit its rows.
    wide = t.shape[-1] * t.element_size() % 8 == 0 and t.data_ptr() % 8 == 0
    words = t.view(torch.int64 if wide else _INTS[t.element_size()])
    rows, columns = words.sum(dim=1, dtype=torch.int64), words.sum(dim=0, dtype=torch.int64)
    first, second = ((one * _odd(len(one), one.device)).sum() for one in (rows, columns))
    return first + second


@functools.lru_cache(maxsize=64)
def _odd(count: int, device: torch.device) -> Tensor:
    with torch.inference_mode(False):
        return torch.arange(1, 2 * count, 2, device=device, dtype=torch.int64)
