"""The native library's C interface, as ``native.h`` declares it."""

from __future__ import annotations

import ctypes
import os
import warnings
from ctypes import (
    POINTER,
    Structure,
    byref,
    c_char_p,
    c_double,
    c_float,
    c_int,
    c_int32,
    c_int64,
    c_size_t,
    c_void_p,
)
from functools import cache
from pathlib import Path
from typing import Any

from lantern_accel.errors import BackendError
from lantern_accel_cpu.native import build

VERSION = 14
PANEL = 32


class Cache(Structure):
    _fields_ = [
        ("row", c_int64), ("head", c_int64), ("slot", c_int64), ("heads", c_int32), ("width", c_int32),
    ]  # fmt: skip


class Mask(Structure):
    _fields_ = [
        ("bytes", c_void_p), ("row", c_int64), ("query", c_int64), ("rows", c_int32),
        ("count", c_int32), ("capacity", c_int32),
    ]  # fmt: skip


class Linear(Structure):
    _fields_ = [
        ("x", c_void_p), ("weight", c_void_p), ("bias", c_void_p), ("y", c_void_p),
        ("x_stride", c_int64), ("m", c_int64), ("k", c_int64), ("n", c_int64), ("dtype", c_int32),
        ("sums", c_int32),
    ]  # fmt: skip


class Attend(Structure):
    _fields_ = [
        ("cache", Cache), ("mask", Mask), ("q", c_void_p), ("k", c_void_p), ("v", c_void_p),
        ("out", c_void_p), ("dtype", c_int32),
    ]  # fmt: skip


class Rotary(Structure):
    _fields_ = [("cos", c_void_p), ("sin", c_void_p), ("row", c_int64)]


class RotateWrite(Structure):
    _fields_ = [
        ("cache", Cache), ("rotary", Rotary), ("qkv", c_void_p), ("k", c_void_p), ("v", c_void_p),
        ("q", c_void_p), ("slots", c_void_p), ("rows", c_int32), ("count", c_int32),
        ("dtype", c_int32),
    ]  # fmt: skip


class Block(Structure):
    _fields_ = [
        ("attention_norm", c_void_p), ("ffn_norm", c_void_p), ("wqkv", c_void_p), ("wo", c_void_p),
        ("w13", c_void_p), ("w2", c_void_p), ("k", c_void_p), ("v", c_void_p),
        ("attention_eps", c_float), ("ffn_eps", c_float),
    ]  # fmt: skip


class Trunk(Structure):
    _fields_ = [
        ("cache", Cache), ("mask", Mask), ("rotary", Rotary), ("blocks", POINTER(Block)),
        ("x", c_void_p), ("out", c_void_p), ("slots", c_void_p), ("norm", c_void_p),
        ("taps", POINTER(c_int32)), ("out_stride", c_int64), ("layers", c_int32), ("dim", c_int32),
        ("hidden", c_int32), ("tap_count", c_int32), ("dtype", c_int32), ("norm_eps", c_float),
    ]  # fmt: skip


class WindowPass(Structure):
    _fields_ = [
        ("trunk", Trunk), ("embedding", c_void_p), ("head", c_void_p), ("cos", c_void_p),
        ("sin", c_void_p), ("prompt", c_void_p), ("tokens", c_void_p), ("length", c_void_p),
        ("scale", c_void_p), ("images", c_int64), ("span", c_int64), ("image", c_int64),
        ("vocab", c_int64), ("prefix", c_int64), ("slots", c_int64), ("features", c_void_p),
        ("branches", c_int32), ("blind", c_int32),
    ]  # fmt: skip


class Filter(Structure):
    _fields_ = [
        ("temperature", c_void_p), ("top_p", c_void_p), ("top_k", c_int64), ("p_first", c_int32),
    ]  # fmt: skip


class Guide(Structure):
    _fields_ = [
        ("logits", c_void_p), ("scale", c_void_p), ("image_scale", c_void_p), ("penalty", c_void_p),
        ("token", c_void_p), ("kind", c_void_p), ("out", c_void_p), ("images", c_int64),
        ("count", c_int64), ("vocab", c_int64), ("branches", c_int32), ("whole_image", c_int32),
    ]  # fmt: skip


class Rule(Structure):
    _fields_ = [
        ("neighbours", c_void_p), ("rule_param", c_void_p), ("budget", c_void_p),
        ("neighbour_stride", c_int64), ("neighbour_width", c_int64), ("k", c_int64),
        ("kind", c_int32), ("residual", c_int32),
    ]  # fmt: skip


class Accept(Structure):
    _fields_ = [
        ("filter", Filter), ("rule", Rule), ("logits", c_void_p), ("tokens", c_void_p),
        ("first_child", c_void_p), ("num_children", c_void_p), ("group", c_void_p), ("q", c_void_p),
        ("uniforms", c_void_p), ("bonus_uniform", c_void_p), ("widths", POINTER(c_int32)),
        ("path", c_void_p), ("length", c_void_p), ("bonus", c_void_p), ("weights", c_void_p),
        ("price", c_void_p), ("images", c_int64), ("nodes", c_int64), ("vocab", c_int64),
        ("groups", c_int64), ("uniform_stride", c_int64), ("bonus_stride", c_int64),
        ("depth", c_int32), ("masked", c_int32),
    ]  # fmt: skip


class Couple(Structure):
    _fields_ = [
        ("x", c_void_p), ("p", c_void_p), ("q", c_void_p), ("tests", c_void_p), ("draws", c_void_p),
        ("tokens", c_void_p), ("count", c_void_p),
        ("images", c_int64),
        ("length", c_int64), ("vocab", c_int64), ("test_stride", c_int64), ("draw_stride", c_int64),
    ]  # fmt: skip


_POINTERS = (
    "embedding head own_embedding fc fc_bias fuse tap_norms cos sin own_cos own_sin prompt scale "
    "first_child num_children group"
)
_TABLES = "parent depth_of inner inner_count widths"
_STATE = (
    "length root known pending_tokens pending_count pending_features uniforms keys step steps histogram "
    "price last_path last_length slot_of place_of holds finite report tokens q logits states path kept "
    "bonus weights prices"
)
_SIZES = (
    "images nodes depth groups image prefix vocab columns draft_columns image_slots ahead own_slots "
    "width top_k"
)


class Copy(Structure):
    _fields_ = [
        ("weight", c_void_p), ("out", c_void_p), ("k", c_int64), ("n", c_int64),
        ("dtype", c_int32), ("kept", c_int32), ("tries", c_int32),
    ]  # fmt: skip


class TreeStep(Structure):
    _fields_ = [
        ("target", Trunk), ("drafter", Trunk), ("filter", Filter), ("rule", Rule),
        *((name, c_void_p) for name in _POINTERS.split()),
        *((name, POINTER(c_int32)) for name in _TABLES.split()),
        *((name, c_void_p) for name in _STATE.split()),
        *((name, c_int64) for name in _SIZES.split()),
        ("branches", c_int32), ("blind", c_int32), ("hides_pads", c_int32), ("tap_eps", c_float),
    ]  # fmt: skip


class Advance(Structure):
    _fields_ = [
        ("filter", Filter), ("uniforms", c_void_p), ("tokens", c_void_p), ("length", c_void_p),
        ("step", c_void_p), ("steps", c_void_p), ("last_length", c_void_p), ("histogram", c_void_p),
        ("root", c_void_p), ("holds", c_void_p), ("finite", c_void_p), ("report", c_void_p),
        ("images", c_int64), ("vocab", c_int64), ("image", c_int64), ("columns", c_int64),
        ("histogram_stride", c_int64),
    ]  # fmt: skip


class Choose(Structure):
    _fields_ = [
        ("filter", Filter), ("logits", c_void_p), ("tokens", c_void_p), ("first_child", c_void_p),
        ("num_children", c_void_p), ("keys", c_void_p), ("root_at", c_void_p), ("path", c_void_p),
        ("length", c_void_p), ("bonus", c_void_p), ("weights", c_void_p), ("images", c_int64),
        ("nodes", c_int64), ("vocab", c_int64), ("depth", c_int32),
    ]  # fmt: skip


class GuessHead(Structure):
    _fields_ = [
        ("codes", c_void_p), ("place", c_void_p), ("start", c_void_p), ("state", c_void_p),
        ("seen", c_void_p), ("mid", c_void_p), ("head", c_void_p), ("bias", c_void_p),
        ("feature", c_void_p), ("features", c_void_p), ("dim", c_int64), ("hidden", c_int64),
        ("rank", c_int64), ("depths", c_int64), ("grid", c_int64), ("dtype", c_int32),
    ]  # fmt: skip


class AdvanceChosen(Structure):
    _fields_ = [
        ("filter", Filter), ("keys", c_void_p), ("place", c_void_p), ("tokens", c_void_p),
        ("length", c_void_p), ("newest", c_void_p), ("step", c_void_p), ("steps", c_void_p),
        ("last_length", c_void_p), ("histogram", c_void_p), ("rows", c_void_p), ("row_keys", c_void_p),
        ("row_previous", c_void_p), ("row_tokens", c_void_p), ("root", c_void_p), ("holds", c_void_p),
        ("finite", c_void_p), ("report", c_void_p), ("images", c_int64), ("span", c_int64),
        ("vocab", c_int64), ("image", c_int64), ("kept", c_int64), ("passes", c_int64),
        ("wide", c_int64), ("histogram_stride", c_int64), ("width", c_int64),
        ("head", POINTER(GuessHead)), ("fresh", c_int32),
    ]  # fmt: skip


_SIGNATURES: dict[str, tuple[object, list[object]]] = {
    "version": (c_int, []),
    "sources": (c_char_p, []),
    "select": (c_int, [c_char_p]),
    "selected": (c_char_p, []),
    "runs": (c_int, [c_char_p]),
    "tiles_from": (c_int, [c_int]),
    "threads": (None, [c_int]),
    "pack": (None, [c_void_p, c_int64, c_int64, c_int64, c_int32, c_void_p]),
    "takes_words": (c_int, []),
    "pack_words": (None, [c_void_p, c_int64, c_int64, c_int64, c_void_p]),
    "store": (None, [POINTER(Cache), c_void_p, c_void_p, c_void_p, c_int32, c_int32, c_int32]),
    "linear": (None, [POINTER(Linear)]),
    "copy": (None, [POINTER(Copy)]),
    "attend": (None, [POINTER(Attend)]),
    "rotate_write": (None, [POINTER(RotateWrite)]),
    "rms_norm": (None, [c_void_p, c_void_p, c_float, c_int64, c_int64, c_void_p, c_int32]),
    "swiglu": (None, [c_void_p, c_int64, c_int64, c_void_p, c_int32]),
    "trunk": (None, [POINTER(Trunk)]),
    "window_pass": (None, [POINTER(WindowPass), c_void_p]),
    "guide": (None, [POINTER(Guide)]),
    "filter": (None, [POINTER(Filter), c_void_p, c_int64, c_int64, c_void_p]),
    "draw": (None, [c_void_p, c_void_p, c_int64, c_int64, c_int64, c_void_p]),
    "accept": (None, [POINTER(Accept)]),
    "couple": (None, [POINTER(Couple)]),
    "advance": (None, [POINTER(Advance), c_void_p]),
    "race": (None, [c_void_p, c_void_p, c_void_p, c_int64, c_int64, c_int64, c_void_p]),
    "perturb": (None, [c_void_p, c_void_p, c_void_p, c_int64, c_int64, c_int64, c_void_p]),
    "choose": (None, [POINTER(Choose)]),
    "fresh_guesses": (None, [POINTER(AdvanceChosen)]),
    "advance_chosen": (None, [POINTER(AdvanceChosen), c_void_p]),
    "likeliest": (
        None,
        [c_void_p, c_void_p, c_int64, c_int64, c_int64, c_int64, c_void_p, c_void_p],
    ),
    "tree_step": (None, [POINTER(TreeStep), c_int32]),
    "read_seconds": (c_double, [c_void_p, c_size_t, c_int]),
    "multiply_seconds": (c_double, [c_int64, c_int]),
    "lanes": (c_int, []),
}


class Library:
    """The loaded library: its functions as attributes, without their prefix ``lantern_``."""

    def __init__(self, path: Path, unit: str = "") -> None:
        try:
            loaded = ctypes.CDLL(str(path))
        except OSError as error:
            raise BackendError(f"native kernels: {path} cannot be loaded ({error})") from None
        for name, (result, arguments) in _SIGNATURES.items():
            function = getattr(loaded, f"lantern_{name}", None)
            if function is None:
                raise BackendError(f"native kernels: {path} has no lantern_{name}; delete it")
            function.restype, function.argtypes = result, arguments
            setattr(self, name, function)
        self.path = path
        if self.version() != VERSION:
            raise BackendError(f"native kernels: {path} is of another version; delete it")
        if not self.select(unit.encode()):
            raise BackendError(
                f"native kernels: this processor does not run {unit or 'any unit'} of {path}"
            )
        self.unit: str = self.selected().decode()

    # What setattr above fills in.
    def __getattr__(self, name: str) -> Any:
        raise AttributeError(name)


@cache
def _load(unit: str) -> Library:
    path = build.library()
    try:
        loaded = Library(path, unit)
        stale = path == build.PREBUILT and loaded.sources().decode() != build.digest()
    except BackendError:
        if path != build.PREBUILT or build.compiler() is None:
            raise
        stale = True
    if stale and build.compiler() is not None:  # a wheel's library, and sources that were changed
        loaded = Library(build.compiled(build.chosen_units()), unit)
    return loaded


def load() -> Library:
    """Return the library, compiled if need be; raises BackendError where there can be none."""
    return _load(os.environ.get(build.UNIT_VARIABLE, ""))


def load_or_warn() -> Library | None:
    """Return the library, or None after one warning where it could not be compiled or loaded.

    A machine that has no compiler gets no warning: ``lantern-accel devices`` says what it lacks.
    """
    if build.missing():
        return None
    try:
        return load()
    except BackendError as error:
        warnings.warn(f"{error}; decoding goes on without native kernels", stacklevel=2)
        return None


def describe() -> str:
    """Say whether there are native kernels, without compiling them."""
    if reason := build.missing():
        return f"no native kernels: {reason}"
    if build.PREBUILT.is_file():
        return "native kernels"
    units = build.chosen_units()
    ready = build.target(units).is_file()
    refused = build.refused_tiles()
    return (
        f"native kernels ({units[0]}{'' if ready else ', compiled on first use'})"
        f"{'; ' * bool(refused)}{refused}"
    )


__all__ = [
    "PANEL", "Accept", "AdvanceChosen", "Attend", "Block", "Cache", "Choose", "Filter", "Guide",
    "Library", "Linear", "Mask", "Rotary", "RotateWrite", "Rule", "TreeStep", "Trunk", "WindowPass",
    "byref", "describe", "load", "load_or_warn",
]  # fmt: skip
