"""Load the plug-ins, each by itself, so that one that fails never hides the others."""

from __future__ import annotations

import functools
import importlib.metadata
import inspect
import re
import types
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Generic, Protocol, TypeVar

import pluggy
from pydantic import BaseModel, ConfigDict, ValidationError

from lantern_accel.device import hookspecs
from lantern_accel.device.spec import API_VERSION, BackendSpec
from lantern_accel.device.timeouts import LOOKING, in_time

GROUP = "lantern_accel"
HOOK = "lantern_accel_backends"
HOOKS = (HOOK, "lantern_accel_families")

_NAME = re.compile(r"[a-z][a-z0-9_]*")


class Named(Protocol):
    """What every hook offers: something with a name of its own."""

    @property
    def name(self) -> str: ...


OfferT = TypeVar("OfferT", bound=Named)


@dataclass(frozen=True)
class Offers(Generic[OfferT]):
    """What one hook of all plug-ins offers, by name, and why each plug-in that failed did."""

    specs: dict[str, OfferT] = field(default_factory=dict)
    broken: dict[str, str] = field(default_factory=dict)


@functools.cache
def load_plugins() -> Offers[BackendSpec]:
    """Load every backend once; ``load_plugins.cache_clear()`` forgets them."""
    return load_offers(HOOK, "backend", check_backend)


def load_offers(hook: str, what: str, check: Callable[[object], OfferT]) -> Offers[OfferT]:
    """Ask every entry point of the group for what its ``hook`` offers.

    ``what``: a singular noun for errors. ``check`` returns an offer that can be used and raises
    :class:`Unfit` for another.
    """
    offers: list[tuple[str, str, OfferT]] = []
    failures: list[tuple[str, str, str]] = []
    points = importlib.metadata.entry_points(group=GROUP)
    # A package that is installed twice (a wheel and an editable one) has two equal entry points.
    for name, value in sorted({(point.name, point.value) for point in points}):

        def ask(name: str = name, value: str = value) -> list[OfferT]:
            plugin = importlib.metadata.EntryPoint(name, value, GROUP).load()
            return [check(one) for one in _ask_plugin(plugin, hook, what)]

        try:
            offers += [(name, value, one) for one in in_time(ask, LOOKING)]
        except Exception as error:  # a stranger's module may do anything
            failures.append((name, value, why(error)))
    specs: dict[str, OfferT] = {}
    # A name belongs first to the entry point of that name, so that none can take another's.
    for name, value, spec in sorted(offers, key=lambda offer: offer[0] != offer[2].name):
        if spec.name in specs:
            reason = f"another plug-in already has a {what} named {spec.name!r}; uninstall one"
            failures.append((name, value, reason))
        else:
            specs[spec.name] = spec
    broken: dict[str, str] = {}
    for name, value, reason in failures:
        taken = name in specs or name in broken
        broken[f"{name} ({value})" if taken else name] = reason
    return Offers(specs, broken)


def why(error: BaseException) -> str:
    """Return an exception as one line; our own complaints about a plug-in stand by themselves."""
    if isinstance(error, ValidationError):
        wrong = [(".".join(map(str, one["loc"])), one["msg"]) for one in error.errors()]
        return f"{error.title}: {'; '.join(f'{where}: {text.lower()}' for where, text in wrong)}"
    text = " ".join(str(error).split())
    if isinstance(error, Unfit):
        return text
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


class Unfit(Exception):
    """A plug-in loaded, but is not what a plug-in must be."""


def _ask_plugin(plugin: object, hook: str, what: str) -> list[object]:
    """Ask one plug-in what it offers; raises Unfit when it cannot be asked."""
    # pluggy reads every attribute of what it registers; on an instance that runs properties.
    if not isinstance(plugin, types.ModuleType) and not inspect.isclass(plugin):
        raise Unfit(
            f"its entry point names a {type(plugin).__name__}; let it name the module that has "
            f"the hook {hook}"
        )
    manager = pluggy.PluginManager(hookspecs.PROJECT)
    manager.add_hookspecs(hookspecs)
    manager.register(plugin)
    callers = {one.name: one for one in manager.get_hookcallers(plugin) or ()}
    if not callers.keys() & set(HOOKS):
        raise Unfit(
            f"{plugin.__name__} has no hook {HOOK} or {HOOKS[1]}; write one and mark it with "
            "@hookimpl from lantern_accel.device.hookspecs"
        )
    if hook not in callers:
        return []
    offered: list[object] = []
    for result in callers[hook]():
        if not isinstance(result, (list, tuple)):
            raise Unfit(f"its hook {hook} returned a {type(result).__name__}, not a list")
        offered.extend(result)
    if not offered:
        raise Unfit(f"its hook {hook} returned no {what}; return a list of {what.title()}Spec")
    return offered


class Fields(BaseModel):
    """What every specification sets, by type."""

    model_config = ConfigDict(strict=True, from_attributes=True, title="its specification")

    summary: str
    priority: int


class BackendFields(Fields):
    """What a backend's specification sets besides."""

    aliases: tuple[str, ...]
    variants: tuple[Mapping[str, object], ...]


def check_spec(
    spec: object, kind: type, what: str, api: int, fields: type[Fields] = Fields
) -> None:
    """Check what all offers have; raises Unfit, or ValidationError for a field of another type."""
    if not isinstance(spec, kind):
        given = spec.__name__ if inspect.isclass(spec) else type(spec).__name__
        hook = HOOK if what == "backend" else HOOKS[1]
        raise Unfit(f"its hook {hook} returned a {given}, not an instance of {kind.__name__}")
    # A stranger's class may lack what its base only declares.
    version = getattr(spec, "api_version", None)
    if version != api:
        newer = isinstance(version, int) and version > api
        raise Unfit(
            f"it was written for {what} API {version}, this lantern-accel has {api}; "
            f"upgrade {'lantern-accel' if newer else 'the plug-in'}"
        )
    name = getattr(spec, "name", None)
    if not isinstance(name, str) or not _NAME.fullmatch(name) or name == "auto":
        raise Unfit(
            f"its {what} is named {name!r}; use lower-case letters, digits and '_', not 'auto'"
        )
    fields.model_validate(spec)


def check_backend(spec: object) -> BackendSpec:
    """Return ``spec`` if it can be used; raises Unfit or ValidationError with the reason if not."""
    check_spec(spec, BackendSpec, "backend", API_VERSION, BackendFields)
    assert isinstance(spec, BackendSpec)
    return spec
