"""Lists the kernels that Gaudi has, with their dtypes: the rules that a traced step is held to.

The data, ``gaudi_ops.json``, is read off the bridge's sources of release 1.19: a name says that
there is a kernel, dtypes are known for about a tenth. ``gaudi_registry.json`` has the exact names that a
graph may hold: its nodes are looked up by name and overload, where placement asks for the name alone.
Newer releases have more operators. ``gaudi_tested.json`` has the dtypes in which the vendor's tests run
each operator that a step uses. Others are refused, unless :data:`UNTESTED` lists them.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping, Set
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.utils._pytree import tree_leaves

if TYPE_CHECKING:
    from lantern_accel.device.backend import OperatorRule


def _aten(names: str) -> frozenset[str]:
    return frozenset(f"aten::{name}" for name in names.split())


#: The most axes of a tensor that a kernel takes (Synapse's ``SYN_MAX_TENSOR_DIM``).
AXES = 5

#: Operators without an entry in the data that a step may use, each with the reason. What torch composes
#: of others needs none: the check static.kernels looks at the parts.
EXCEPTIONS = {
    "prim::device": "reads an attribute; runs nothing",
    "aten::_to_copy": "a cast; hpu_backend takes it by name, eagerly it is a copy_",
    "aten::detach": "the same tensor under another name, as torch writes a view in another dtype",
    "aten::copy": "a write to a buffer inside a graph; hpu_backend takes it by name",
}

#: What hpu_backend takes by name, without asking whether there is a kernel: functions that a graph has in
#: place of writes, and views.
BY_NAME = frozenset(EXCEPTIONS) | _aten(
    "alias as_strided as_strided_scatter clamp clone copy_ full select_scatter slice slice_scatter "
    "split squeeze sum view _unsafe_view"
)

#: Operators that run although they are listed as kernels: hpu_backend leaves the graph for them.
FALLBACKS = {
    "aten::index": "advanced indexing; use index_select or gather",
    "aten::addcmul": "write the product and the sum",
    "aten::slice_backward": "training only",
    "aten::nonzero": "its shape depends on data",
    "aten::_unique2": "its shape depends on data",
    "aten::bincount": "its shape depends on data; compare with an arange and sum",
}

#: Operators that fill a tensor; torch makes ``full`` of them, with a bool scalar for a bool dtype.
FILLED = _aten("zeros ones new_zeros new_ones zeros_like ones_like")

UNLISTED = "no kernel is listed for it"

#: What a step needs although no test of the vendor has it: operators with their dtypes, and the reason.
UNTESTED = {
    (
        "add",
        torch.bool,
    ): "a count and a flag: the bridge casts what promotes, and its tests have mul so",
    ("copy", torch.bool): "moves bytes; a mask that a buffer keeps, which is compared with nothing",
    ("ge", torch.int32): "a kernel of one family with gt and lt, which are tested so",
    ("le", torch.int32): "a kernel of one family with gt and lt, which are tested so",
    ("reciprocal", torch.float32): "a division by one number a row; wrong ones change drafts alone",
    ("select_scatter", torch.int32): "a slice and a copy; moves words of 4 bytes, as of float32",
    ("select_scatter", torch.bfloat16): "a slice and a copy; moves words of 2 bytes",
    ("where", torch.int32): "moves words of 4 bytes, as of float32",
    ("zero", torch.bool): "a constant of zeros, which is the same in every dtype",
    ("zero", torch.int32): "a constant of zeros, which is the same in every dtype",
    ("zero", torch.bfloat16): "a constant of zeros, which is the same in every dtype",
}

#: Operators that make complex numbers of real ones.
COMPLEX = _aten("complex polar view_as_complex _fft_r2c")

#: Operators that move no data: a view of int64 costs nothing.
VIEWS = _aten(
    "alias as_strided detach expand select slice split split_with_sizes squeeze t transpose unbind "
    "unsqueeze view _unsafe_view"
)

#: Operators that may take int64: the casts out of it, and what torch gives no choice.
TAKES_INT64 = {
    "aten::_to_copy": "the cast to int32",
    "aten::copy_": "the cast into an int32 buffer",
    "aten::index_copy_": "torch demands a long index of it, and only it",
    "aten::index_copy": "torch demands a long index of it, and only it",
}

DTYPES = {
    "BFloat16": torch.bfloat16,
    "Bool": torch.bool,
    "Byte": torch.uint8,
    "Char": torch.int8,
    "Float": torch.float32,
    "Float8_e4m3fn": torch.float8_e4m3fn,
    "Float8_e5m2": torch.float8_e5m2,
    "Half": torch.float16,
    "Int": torch.int32,
    "Long": torch.int64,
    "Short": torch.int16,
}


@functools.cache
def _read(name: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(
        Path(__file__).with_name(f"gaudi_{name}.json").read_text("utf-8")
    )
    return found


@functools.cache
def _dtypes(name: str) -> dict[str, frozenset[torch.dtype]]:
    """Return the dtypes of operators for which a file has any; those of single arguments are left out.

    ``ops``: dtypes of its kernel on Gaudi 2, by its name; ``tested``: those that the vendor tests, by its
    bare name.
    """
    every = _read(name)["operators"].items()
    return {
        one: frozenset(map(DTYPES.__getitem__, of)) for one, of in every if isinstance(of, list)
    }


@functools.cache
def names() -> frozenset[str]:
    """Return the operators with a kernel without their overloads."""
    return frozenset(name.partition(".")[0] for name in _read("ops")["operators"])


@functools.cache
def _made_of_others(func: OpOverload, every_device: bool = False) -> bool:
    """Return whether torch makes an operator of others: where there is no kernel, or on every device."""
    has = torch._C._dispatch_has_kernel_for_dispatch_key
    keys = ("CompositeImplicitAutograd", "CompositeExplicitAutograd")
    return any(has(names_of(func)[1], key) for key in keys[: 1 if every_device else 2])


@functools.cache
def _is_decomposed(func: OpOverload) -> bool:
    """Return whether ``hpu_backend`` takes an operator apart before; ``.*`` stands for all overloads."""
    base, full = names_of(func)
    return not {full, f"{base}.*"}.isdisjoint(_read("registry")["decomposed"])


def _tensors(*values: Any) -> list[Tensor]:
    return [one for one in tree_leaves(values) if isinstance(one, Tensor)]


# --- rules --------------------------------------------------------------------------------------


def has_kernel(func: OpOverload, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> str:
    """Complain of an operator without a kernel, and of one for which a graph is left.

    What torch composes of other operators passes here: ``static.kernels`` follows it down.
    """
    base, full = names_of(func)
    if base in FALLBACKS:
        return f"hpu_backend leaves the graph for it: {FALLBACKS[base]}"
    if base == "aten::permute" and args[0].dtype == torch.int64:
        return "hpu_backend leaves the graph for an int64 permute; cast to int32 first"
    if base in ("aten::mul", "aten::full") and isinstance(args[1], bool):
        return "hpu_backend leaves the graph for a bool scalar; use 0 or 1"
    like = args[0].dtype if args and isinstance(args[0], Tensor) else None
    if base in FILLED and (kwargs.get("dtype") or like) == torch.bool:
        return (
            "hpu_backend takes it apart into a full with a bool scalar, and leaves the graph for that; "
            "use lantern_accel.device.operations.flags"
        )
    if base == "aten::constant_pad_nd" and not args[0].dtype.is_floating_point:
        value = args[2] if len(args) > 2 else kwargs.get("value", 0)
        # The bridge writes a float for bool, whose kernel reads an integer of 8 bits: True becomes 0.
        if args[0].dtype == torch.bool or type(value) is not int:
            return "its kernel may read a value of another kind for the pad's; join with torch.cat"
    if any(isinstance(one, float) and one != one for one in tree_leaves((args, kwargs))):
        return "hpu_backend leaves the graph for a NaN scalar"
    if full in _read("ops")["operators"] or base in EXCEPTIONS or _made_of_others(func):
        return ""
    return UNLISTED


@functools.cache
def has_lowering(func: OpOverload) -> str:
    """Complain of an operator that no graph can hold: its exact name is in no registry.

    In a graph a write in place is the function that it is made of, and a copy. What torch makes of
    others for every device never gets there.
    """
    base, full = names_of(func)
    if not base.startswith(("aten::", "hpu::")):
        return ""
    given = {full, full.replace(base, base.rstrip("_"), 1)}
    if not given.isdisjoint([*_read("registry")["registered"], *_read("registry")["decomposed"]]):
        return ""
    if _is_decomposed(func) or _made_of_others(func, every_device=True):
        return ""
    return "the bridge's registry has no lowering of this overload, so that no graph can hold it"


def has_dtype(func: OpOverload, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> str:
    """Complain of a dtype that a kernel is known not to have: the bridge runs it on the CPU.

    The bridge asks for the dtype in which the operator computes: ``dtype=`` where it is given, else
    what the tensors promote to.
    """
    base, full = names_of(func)
    tensors = _tensors(args, kwargs)
    if base in COMPLEX or any(one.dtype.is_complex for one in tensors):
        return "Gaudi has no complex numbers; keep real and imaginary parts apart"
    known = _dtypes("ops").get(full)
    if known is None or not tensors:
        return ""
    dtype = kwargs.get("dtype") or functools.reduce(
        torch.promote_types, (one.dtype for one in tensors)
    )
    # The value of a pad has no part in its dtype.
    if base != "aten::constant_pad_nd" and any(isinstance(one, float) for one in tree_leaves(args)):
        dtype = dtype if dtype.is_floating_point else torch.get_default_dtype()
    return "" if dtype in known else f"it computes in {_list({dtype})}, kernels in {_list(known)}"


def was_tested(func: OpOverload, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> str:
    """Complain of a dtype or a rank that no test of the vendor gives the operator.

    Placement takes some operators by name, so that a wrong dtype shows only where the graph is compiled.
    What moves no data, and what is taken apart before, passes.
    """
    base, _ = names_of(func)
    tensors = _tensors(args, kwargs)
    if any(one.dim() > AXES for one in tensors):
        return f"a tensor has more than {AXES} axes, which no kernel takes; fold some of them"
    name = base.removeprefix("aten::")
    name = name if name.endswith("__") else name.rstrip("_")  # a write is its function, and a copy
    if base in VIEWS or not base.startswith("aten::"):
        return ""
    known = _dtypes("tested").get(name)
    if known is None and (_is_decomposed(func) or _made_of_others(func)):
        return ""
    dtypes = {one.dtype for one in tensors}
    if "dtype" in kwargs and not tensors:
        dtypes.add(kwargs["dtype"])
    wrong = {one for one in dtypes - (known or set()) if (name, one) not in UNTESTED}
    return f"no test of the vendor's gives it {_list(wrong)}" if wrong else ""


def has_index(func: OpOverload, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> str:
    """Complain of an int64 tensor: Gaudi's kernels take int32, and cast what is wider every time."""
    base, _ = names_of(func)
    if base in VIEWS or base in TAKES_INT64 or base.startswith("prim::"):
        return ""
    if any(one.dtype == torch.int64 for one in _tensors(args, kwargs)):
        return "it takes int64; cast to the device's index dtype, int32"
    return ""


def rules(index: torch.dtype = torch.int32) -> dict[str, OperatorRule]:
    """Return the rules by the name of the check that they belong to.

    Where ``index`` is int64, because this torch takes no other, there is none for indices.
    """
    own: dict[str, OperatorRule] = {
        "operators": lambda *call: has_kernel(*call) or has_lowering(call[0]),
        "dtypes": lambda *call: has_dtype(*call) or was_tested(*call),
    }
    return own if index == torch.int64 else {**own, "indices": has_index}


@functools.cache
def names_of(func: OpOverload) -> tuple[str, str]:
    """Return an operator's name without and with its overload (``aten::add.Tensor``)."""
    name: str = func._schema.name
    overload = func._overloadname
    return name, name if overload == "default" else f"{name}.{overload}"


def _list(dtypes: Set[torch.dtype]) -> str:
    return ", ".join(sorted(str(one).removeprefix("torch.") for one in dtypes))
