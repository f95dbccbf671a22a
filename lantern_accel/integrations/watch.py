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

#: Modules and hooks of these packages compute what our decoder does.
_KNOWN = ("transformers.", "torch.nn.modules.")
_HOOKS = ("_forward_hooks", "_forward_pre_hooks")
_GLOBAL_HOOKS = (torch_modules._global_forward_hooks, torch_modules._global_forward_pre_hooks)
_INTS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class Watch:
    """The modules of a model that its tokens depend on.

    ``beside``: patterns of keys; what all of them match, such as a tower that reads images, is left out.
    """

    def __init__(self, model: nn.Module, beside: Sequence[re.Pattern[str]]) -> None:
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
        found: list[object] = [len(hooks) for hooks in _GLOBAL_HOOKS]
        for path, one in self.modules():
            own = vars(one)
            found += [path, type(one), "forward" in own, "_hf_hook" in own, _find_replaced(one)]
            found += [{n: value for n, value in own.items() if type(value) is float}]
            found += [list(own[name].values()) for name in _HOOKS]
        for path, t in self.tensors():
            plain = type(t) in (Tensor, nn.Parameter, nn.Buffer)
            place = t.data_ptr() if plain else id(t)
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
        """Raise :class:`ModelError` for a module that computes something else than our decoder does."""
        for hooks in _GLOBAL_HOOKS:
            for hook in hooks.values():
                raise _other("every module", f"has the global hook {_hook_name(hook)}", _HOOK)
        expected = self._make_expected()
        for path, one in self.modules():
            where, own = path or "the module", vars(one)
            if "_hf_hook" in own:
                raise RequestError(
                    f"{where} is offloaded, so that its weights are not on its device while tokens are "
                    "sampled; load it without offloading (device_map, enable_model_cpu_offload)"
                )
            kind = type(one)
            known = f"{kind.__module__}.".startswith(_KNOWN)
            forward = _module_of(kind.forward)
            made = None if expected is None else expected.pop(path, None)
            if not known or (expected is not None and type(made) is not kind):
                adapter = kind.__module__.startswith("peft.")
                way_out = _ADAPTER if adapter else "put the module back that the library made"
                raise _other(where, f"is a {kind.__module__}.{kind.__qualname__}", way_out)
            if "forward" in own or not f"{forward}.".startswith(_KNOWN):
                raise _other(where, f"has the forward of {forward or 'another package'}", _HOOK)
            for name in _find_replaced(one):
                raise _other(where, f"has another {name}() than its class", _HOOK)
            for name, value in vars(made).items() if made is not None else ():
                if type(value) is float and "dropout" not in name and own.get(name) != value:
                    raise _other(
                        where,
                        f"has {name} {own.get(name)}, where its configuration makes {value}",
                        "put the same value in both",
                    )
            for hook in (hook for name in _HOOKS for hook in own[name].values()):
                if not _module_of(hook).startswith("transformers."):
                    raise _other(where, f"has the hook {_hook_name(hook)}", _HOOK)
        for path in expected or ():
            raise _other(path, "is absent", "put it back")
        for path, t in self.tensors():
            if t.is_meta:
                raise RequestError(
                    f"the module is offloaded: {path} is on no device; load it without offloading "
                    "(device_map, enable_model_cpu_offload)"
                )
            if type(t) not in (Tensor, nn.Parameter, nn.Buffer):
                raise _other(path, f"is a {type(t).__qualname__}, no plain tensor", _UNPACKED)

    def _make_expected(self) -> dict[str, nn.Module] | None:
        """Return the modules that the configuration makes, no data in them; None where none here."""
        kind: Any = type(self.model)
        try:
            with torch.device("meta"):
                made = kind(self.model.config)
        except Exception:  # a class that needs more than its configuration
            return None
        return dict(self.modules(made))


_ADAPTER = "merge the adapter (merge_and_unload()) or take it out"
_HOOK = "remove it"
_UNPACKED = "load the model without quantization"


def _find_replaced(module: nn.Module) -> list[str]:
    """Return the methods with which a family prepares a pass that this one object has others of."""
    kind = type(module)
    return [
        name
        for name, value in vars(module).items()
        if name.startswith(("prepare_", "get_"))
        and callable(value)
        and _module_of(getattr(kind, name, None)).startswith("transformers.models.")
    ]


def _module_of(thing: object) -> str:
    return getattr(thing, "__module__", "")


def _hook_name(hook: object) -> str:
    return getattr(hook, "__qualname__", type(hook).__qualname__)


def _other(where: str, what: str, way_out: str) -> ModelError:
    return ModelError(
        f"{where} {what}, which lantern-accel does not run; {way_out}, or call restore() for the "
        "library's own loop"
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
