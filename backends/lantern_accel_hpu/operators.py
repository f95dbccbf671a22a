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
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.utils._pytree import arg_tree_leaves, tree_leaves

if TYPE_CHECKING:
    from lantern_accel.device.backend import OperatorRule


def _aten(names: str) -> frozenset[str]:
    return frozenset(f"aten::{name}" for name in names.split())


DATA = Path(__file__).with_name("gaudi_ops.json")
REGISTRY = Path(__file__).with_name("gaudi_registry.json")
TESTED = Path(__file__).with_name("gaudi_tested.json")
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

Known = frozenset[torch.dtype] | dict[str, frozenset[torch.dtype]] | None


@functools.cache
def table() -> dict[str, Known]:
    """Return the dtypes of each operator's kernel on Gaudi 2, by name; None where not known.

    A set holds for the dtype that the operator computes in, a dictionary for single arguments.
    """
    found: dict[str, Known] = {}
    for name, dtypes in json.loads(DATA.read_text(encoding="utf-8"))["operators"].items():
        if isinstance(dtypes, dict):
            found[name] = {arg: frozenset(map(DTYPES.get, of)) for arg, of in dtypes.items()}  # type: ignore[arg-type]
        else:
            found[name] = None if dtypes is None else frozenset(DTYPES[one] for one in dtypes)
    return found


@functools.cache
def read_tested_dtypes() -> dict[str, frozenset[torch.dtype]]:
    """Return the dtypes in which the vendor tests an operator, by its bare name."""
    found = json.loads(TESTED.read_text(encoding="utf-8"))["operators"]
    return {name: frozenset(DTYPES[one] for one in dtypes) for name, dtypes in found.items()}


@functools.cache
def names() -> frozenset[str]:
    """Return the operators with a kernel without their overloads."""
    return frozenset(name.partition(".")[0] for name in table())


@functools.cache
def list_supported() -> frozenset[str]:
    """Return the operators with a kernel, and the exceptions."""
    return frozenset(table()) | frozenset(EXCEPTIONS)


@functools.cache
def list_registered() -> frozenset[str]:
    """Return the exact names that the bridge has a lowering for, with overloads."""
    return frozenset(json.loads(REGISTRY.read_text(encoding="utf-8"))["registered"])


@functools.cache
def list_decomposed() -> frozenset[str]:
    """Return the exact names that ``hpu_backend`` takes apart before; ``.*`` stands for all overloads."""
    return frozenset(json.loads(REGISTRY.read_text(encoding="utf-8"))["decomposed"])


def _composite(name: str) -> bool:
    """Return whether torch makes the operator of others on a device that has no kernel for it."""
    has = torch._C._dispatch_has_kernel_for_dispatch_key
    keys = ("CompositeImplicitAutograd", "CompositeExplicitAutograd")
    return any(has(name, key) for key in keys)


# --- rules --------------------------------------------------------------------------------------


def has_kernel(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> str:
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
    if base in FILLED and _dtype_made(base, args, kwargs) == torch.bool:
        return (
            "hpu_backend takes it apart into a full with a bool scalar, and leaves the graph for that; "
            "use lantern_accel.device.operations.flags"
        )
    if base == "aten::constant_pad_nd" and (why := _padded_wrong(*args, **kwargs)):
        return why
    if any(isinstance(one, float) and one != one for one in arg_tree_leaves(*args, **kwargs)):
        return "hpu_backend leaves the graph for a NaN scalar"
    if full in list_supported() or _composite(func.name()):
        return ""
    return UNLISTED


def _padded_wrong(padded: Tensor, pad: Any, value: float = 0) -> str:
    """Complain of a pad that its kernel may read wrongly: its value is an int or a float in one place.

    The bridge writes a float for bool, whose kernel reads an integer of 8 bits: True becomes 0.
    """
    if padded.dtype == torch.bool:
        return "a pad of bool may be False whatever its value; keep numbers, or join with torch.cat"
    if padded.dtype.is_floating_point or type(value) is int:
        return ""
    return (
        f"its value {value!r} is not an integer, as {_short(padded.dtype)} is; join with torch.cat"
    )


def has_lowering(func: Any) -> str:
    """Complain of an operator that no graph can hold: its exact name is in no registry.

    In a graph a write in place is the function that it is made of, and a copy. What torch makes of
    others for every device never gets there.
    """
    base, full = names_of(func)
    if not base.startswith(("aten::", "hpu::")):
        return ""
    given = {full, full.replace(base, base.rstrip("_"), 1)}
    if given & (list_registered() | list_decomposed()) or f"{base}.*" in list_decomposed():
        return ""
    if torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), "CompositeImplicitAutograd"):
        return ""
    return "the bridge's registry has no lowering of this overload, so that no graph can hold it"


def has_dtype(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> str:
    """Complain of a dtype that a kernel is known not to have: the bridge runs it on the CPU.

    The bridge asks for the dtype in which the operator computes: ``dtype=`` where it is given, else
    what the tensors promote to.
    """
    base, full = names_of(func)
    values = arg_tree_leaves(*args, **kwargs)
    dtypes = [v.dtype for v in values if isinstance(v, Tensor)]
    dtypes += [v for v in values if isinstance(v, torch.dtype)]
    if base in COMPLEX or any(dtype.is_complex for dtype in dtypes):
        return "Gaudi has no complex numbers; keep real and imaginary parts apart"
    known = table().get(full)
    if known is None:
        return ""
    if isinstance(known, dict):
        named = dict(zip((a.name for a in func._schema.arguments), args, strict=False)) | dict(
            kwargs
        )
        for arg, able in known.items():
            value = named.get(arg)
            if isinstance(value, Tensor) and value.dtype not in able:
                return f"its {arg} is {_short(value.dtype)}, kernels take {_list(able)}"
        return ""
    padded = base == "aten::constant_pad_nd"  # its value has no part in its dtype
    dtype = args[0].dtype if padded else kwargs.get("dtype") or _promote(args)
    if dtype is not None and dtype not in known:
        return f"it computes in {_short(dtype)}, kernels in {_list(known)}"
    return ""


def was_tested(
    func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], made: Any = None
) -> str:
    """Complain of a dtype or a rank that no test of the vendor gives the operator; ``made``: its result.

    Placement takes some operators by name, so that a wrong dtype shows only where the graph is compiled.
    What moves no data, and what is taken apart before, passes.
    """
    base, full = names_of(func)
    tensors = [v for v in arg_tree_leaves(*args, **kwargs) if isinstance(v, Tensor)]
    results = [v for v in tree_leaves(made) if isinstance(v, Tensor)]
    if any(one.dim() > AXES for one in (*tensors, *results)):
        return f"a tensor has more than {AXES} axes, which no kernel takes; fold some of them"
    name = base.removeprefix("aten::")
    name = name if name.endswith("__") else name.rstrip("_")  # a write is its function, and a copy
    if base in VIEWS or not base.startswith("aten::"):
        return ""
    known = read_tested_dtypes().get(name)
    if known is None:
        apart = (
            full in list_decomposed() or f"{base}.*" in list_decomposed() or _composite(func.name())
        )
        listed = all((name, one.dtype) in UNTESTED for one in tensors)
        return "" if apart or listed else "no test of the vendor's runs it"
    dtypes = {one.dtype for one in tensors}
    if "dtype" in kwargs and not tensors:
        dtypes.add(kwargs["dtype"])
    wrong = [one for one in dtypes - known if (name, one) not in UNTESTED]
    return f"no test of the vendor's gives it {_list(frozenset(wrong))}" if wrong else ""


def has_index(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> str:
    """Complain of an int64 tensor: Gaudi's kernels take int32, and cast what is wider every time."""
    base, _ = names_of(func)
    if base in VIEWS or base in TAKES_INT64 or base.startswith("prim::"):
        return ""
    values = arg_tree_leaves(*args, **kwargs)
    if any(isinstance(v, Tensor) and v.dtype == torch.int64 for v in values):
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


def names_of(func: Any) -> tuple[str, str]:
    """Return an operator's name without and with its overload (``aten::add.Tensor``)."""
    name: str = func._schema.name
    overload = func._overloadname
    return name, name if overload == "default" else f"{name}.{overload}"


def _dtype_made(base: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> torch.dtype | None:
    """Return the dtype of what an operator of ``FILLED`` makes."""
    if kwargs.get("dtype") is not None:
        found: torch.dtype = kwargs["dtype"]
        return found
    return args[0].dtype if args and isinstance(args[0], Tensor) else torch.get_default_dtype()


def _promote(args: tuple[Any, ...]) -> torch.dtype | None:
    """Return what tensors and Python numbers compute in together; None without a tensor."""
    values = arg_tree_leaves(*args)
    dtypes = [v.dtype for v in values if isinstance(v, Tensor)]
    if not dtypes:
        return None
    dtype = functools.reduce(torch.promote_types, dtypes)
    real = any(isinstance(v, float) for v in values)
    return torch.get_default_dtype() if real and not dtype.is_floating_point else dtype


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _list(dtypes: frozenset[torch.dtype]) -> str:
    return ", ".join(sorted(map(_short, dtypes)))
