"""Tensors with a shape, a dtype and a device, and no data: what a step is traced on.

A device's name is all that is needed of it. Every operator runs on torch's ``meta`` tensors, so that an
operator which reads data has nothing to read, and one whose result's shape depends on data is refused.
Torch's own fake tensors refuse the same, and take several times as long for it.
"""

from __future__ import annotations

import functools
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.utils._python_dispatch import TorchDispatchMode

_HOST = torch.device("cpu")
_META = torch.device("meta")


class RefusedOperator(Exception):
    """An operator that needs data, or that torch cannot run on shapes alone; ``rule``: the kit's."""

    def __init__(self, rule: str, operator: str, why: str = "") -> None:
        super().__init__(f"{operator}: {why}" if why else operator)
        self.rule, self.operator = rule, operator


class Shape(Tensor):
    """A tensor of a device without data; ``meta``: torch's tensor of the same shape and strides."""

    meta: Tensor
    # As torch's own Parameter has it. The type is ignored since torch declares a method.
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @staticmethod
    def __new__(cls, meta: Tensor, device: torch.device) -> Shape:
        """Give ``meta``'s shape, strides and dtype to a tensor of ``device``."""
        made: Shape = Tensor._make_wrapper_subclass(
            cls,
            meta.size(),
            strides=meta.stride(),
            storage_offset=meta.storage_offset(),
            dtype=meta.dtype,
            device=device,
        )
        made.meta = meta
        return made

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]  # torch's own is typed as a static method
        cls,
        func: OpOverload,
        types: object,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> object:
        """Run an operator outside of a mode, as within one."""
        return _run(func, args, kwargs or {})

    def tolist(self) -> NoReturn:
        """Refuse: there are no numbers."""
        raise RefusedOperator("host_read", "tolist")

    def numpy(self, *, force: bool = False) -> NoReturn:
        """Refuse: there are no numbers."""
        raise RefusedOperator("host_read", "numpy")


class WithoutData(TorchDispatchMode):
    """Makes every tensor of a block one without data."""

    # As torch's fake tensors have both: no tensor of a block asks for a driver, not even one of numbers.
    _mode_key = torch._C._TorchDispatchModeKey.FAKE

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch types none
        self._before: list[bool] = []  # an operator of several parts enters the block again

    def __enter__(self) -> WithoutData:
        """Begin the block."""
        self._before.append(torch._C._only_lift_cpu_tensors())
        torch._C._set_only_lift_cpu_tensors(True)
        super().__enter__()  # type: ignore[no-untyped-call]  # torch types none of them
        return self

    def __exit__(self, *exc: Any) -> None:
        """End the block."""
        torch._C._set_only_lift_cpu_tensors(self._before.pop())
        super().__exit__(*exc)  # type: ignore[no-untyped-call]  # torch types none of them

    def __torch_dispatch__(
        self,
        func: OpOverload,
        types: object,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> object:
        """Run an operator on shapes, one of several parts part by part."""
        if implicit(func):
            with self:
                return func.decompose(*args, **(kwargs or {}))
        return _run(func, args, kwargs or {})


@functools.cache
def implicit(func: Any) -> bool:
    """Return whether torch makes the operator of others on every device."""
    name, key = func.name(), "CompositeImplicitAutograd"
    return name.startswith("aten::") and bool(
        torch._C._dispatch_has_kernel_for_dispatch_key(name, key)
    )


@functools.cache
def _rule(func: OpOverload) -> str:
    """Return the rule that an operator breaks wherever it runs; "" for most."""
    if torch.Tag.data_dependent_output in func.tags:
        return "host_read"
    # An index breaks it only where it is a mask.
    dynamic = torch.Tag.dynamic_output_shape in func.tags and func._schema.name != "aten::index"
    return "dynamic_shape" if dynamic else ""


@functools.cache
def _makes(func: OpOverload) -> bool:
    """Return whether an operator can be asked for a tensor of a device."""
    return any(one.name == "device" for one in func._schema.arguments)


@functools.cache
def _looks(func: OpOverload) -> bool:
    """Return whether an operator gives a view of its first tensor."""
    infos = [one.alias_info for one in func._schema.returns]
    return any(one is not None and not one.is_write for one in infos)


class _Given:
    """What an operator is given: the tensors by the ``meta`` tensor of each, and their device."""

    def __init__(self) -> None:
        self.device = _HOST
        self.of: dict[int, Tensor] = {}

    def meta(self, value: object) -> object:
        """Return an argument with ``meta`` tensors in place of its own."""
        if isinstance(value, Tensor):
            # One with data, as a table is that was made outside of the block, is worth its shape.
            meta = (
                value.meta
                if isinstance(value, Shape)
                else torch.empty_strided(
                    value.size(), value.stride(), dtype=value.dtype, device=_META
                )
            )
            if value.device != _HOST:  # a number of the host may stand next to a device's tensors
                self.device = value.device
            self.of[id(meta)] = value
            return meta
        if isinstance(value, list | tuple):
            return type(value)([self.meta(one) for one in value])
        return value

    def own(self, out: object, device: torch.device, mutable: bool) -> object:
        """Return a result as tensors of ``device``; what was changed in place as it was given."""
        if isinstance(out, Tensor):
            same = self.of.get(id(out))
            if same is not None and (mutable or isinstance(same, Shape)):
                return same
            return Shape(out, device)
        if isinstance(out, list | tuple):
            return type(out)([self.own(one, device, mutable) for one in out])
        return out


def _run(func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> object:
    """Run an operator on shapes; raises :class:`RefusedOperator` where it needs more."""
    if rule := _rule(func):
        raise RefusedOperator(rule, func._schema.name)
    if func._schema.name == "aten::index" and any(
        isinstance(one, Tensor) and one.dtype in (torch.bool, torch.uint8) for one in args[1]
    ):
        raise RefusedOperator("dynamic_shape", func._schema.name)
    given = _Given()
    plain = [given.meta(one) for one in args]
    named = {key: given.meta(one) for key, one in kwargs.items()}
    device = given.device
    if _makes(func):
        device = torch.device(kwargs.get("device") or device)
        named["device"] = _META
        named.pop("pin_memory", None)
    try:
        out = func(*plain, **named)
    except NotImplementedError as error:  # what torch raises for an operator without a meta kernel
        raise RefusedOperator("operators", func._schema.name, str(error)) from error
    if _looks(func) and not next(iter(given.of.values())).is_inference():
        # A view of a tensor from outside of the inference mode is none of the mode's.
        with torch.inference_mode(False):
            return given.own(out, device, mutable=False)
    return given.own(out, device, func._schema.is_mutable)
