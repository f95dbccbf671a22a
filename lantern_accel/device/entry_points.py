"""Load the plug-ins, each by itself, so that one that fails never hides the others."""

from __future__ import annotations

import functools
import importlib.metadata
import inspect
import re
import types
from dataclasses import dataclass, field

import pluggy

from lantern_accel.device import hookspecs
from lantern_accel.device.spec import API_VERSION, BackendSpec

GROUP = "lantern_accel"
HOOK = "lantern_accel_backends"

_NAME = re.compile(r"[a-z][a-z0-9_]*")


@dataclass(frozen=True)
class Plugins:
    """All backends found, by name, and why each plug-in that failed did."""

    specs: dict[str, BackendSpec] = field(default_factory=dict)
    broken: dict[str, str] = field(default_factory=dict)


@functools.cache
def load_plugins() -> Plugins:
    """Load every entry point of the group once; ``load_plugins.cache_clear()`` forgets them."""
    manager = pluggy.PluginManager(hookspecs.PROJECT)
    manager.add_hookspecs(hookspecs)
    offers: list[tuple[str, str, BackendSpec]] = []
    failures: list[tuple[str, str, str]] = []
    points = importlib.metadata.entry_points(group=GROUP)
    # A package that is installed twice (a wheel and an editable one) has two equal entry points.
    for name, value in sorted({(point.name, point.value) for point in points}):
        try:
            plugin = importlib.metadata.EntryPoint(name, value, GROUP).load()
            offers += [(name, value, one) for one in _offered(manager, f"{name} = {value}", plugin)]
        except (Exception, SystemExit) as error:  # a stranger's module may do anything
            failures.append((name, value, why(error)))
    specs: dict[str, BackendSpec] = {}
    # A name belongs first to the entry point of that name, so that none can take another's.
    for name, value, spec in sorted(offers, key=lambda offer: offer[0] != offer[2].name):
        if spec.name in specs:
            reason = f"another plug-in already has a backend named {spec.name!r}; uninstall one"
            failures.append((name, value, reason))
        else:
            specs[spec.name] = spec
    broken: dict[str, str] = {}
    for name, value, reason in failures:
        taken = name in specs or name in broken
        broken[f"{name} ({value})" if taken else name] = reason
    return Plugins(specs, broken)


def why(error: BaseException) -> str:
    """Return an exception as one line; our own complaints about a plug-in stand by themselves."""
    text = " ".join(str(error).split())
    if isinstance(error, _Unfit):
        return text
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


class _Unfit(Exception):
    """A plug-in loaded, but is not what a plug-in must be."""


def _offered(manager: pluggy.PluginManager, name: str, plugin: object) -> list[BackendSpec]:
    """Register one plug-in and ask it alone for its backends; raises _Unfit when one is unfit."""
    # pluggy reads every attribute of what it registers; on an instance that runs properties.
    if not isinstance(plugin, types.ModuleType) and not inspect.isclass(plugin):
        raise _Unfit(
            f"its entry point names a {type(plugin).__name__}; let it name the module that has "
            f"the hook {HOOK}"
        )
    manager.register(plugin, name=name)
    hook = getattr(manager.hook, HOOK)
    if not any(one.plugin is plugin for one in hook.get_hookimpls()):
        raise _Unfit(
            f"{plugin.__name__} has no hook {HOOK}; write it and mark it with @hookimpl from "
            "lantern_accel.device.hookspecs"
        )
    others = [one for one in manager.get_plugins() if one is not plugin]
    offered: list[BackendSpec] = []
    for result in manager.subset_hook_caller(HOOK, others)():
        if not isinstance(result, (list, tuple)):
            raise _Unfit(f"its hook {HOOK} returned a {type(result).__name__}, not a list")
        offered.extend(_check(spec) for spec in result)
    if not offered:
        raise _Unfit(f"its hook {HOOK} returned no backend; return a list of BackendSpec")
    return offered


def _check(spec: object) -> BackendSpec:
    """Return ``spec`` if it can be used; raises _Unfit with the reason if not."""
    if not isinstance(spec, BackendSpec):
        kind = spec.__name__ if inspect.isclass(spec) else type(spec).__name__
        raise _Unfit(f"its hook {HOOK} returned a {kind}, not an instance of BackendSpec")
    # A stranger's class may lack what BackendSpec only declares.
    version = getattr(spec, "api_version", None)
    if version != API_VERSION:
        newer = isinstance(version, int) and version > API_VERSION
        raise _Unfit(
            f"it was written for backend API {version}, this lantern-accel has {API_VERSION}; "
            f"upgrade {'lantern-accel' if newer else 'the plug-in'}"
        )
    name = getattr(spec, "name", None)
    if not isinstance(name, str) or not _NAME.fullmatch(name) or name == "auto":
        raise _Unfit(
            f"its backend is named {name!r}; use lower-case letters, digits and '_', not 'auto'"
        )
    if not isinstance(getattr(spec, "summary", None), str):
        raise _Unfit(f"its backend {name!r} has no summary; set it to one line of text")
    return spec
