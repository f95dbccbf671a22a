"""Lists the backends that are installed, probes them, and opens one."""

from __future__ import annotations

import contextlib
import os
import re
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Literal, TypeVar

from lantern_accel.device import host
from lantern_accel.device.entry_points import load_plugins, why
from lantern_accel.device.spec import BackendSpec, Probe
from lantern_accel.device.timeouts import LOOKING, close_in_time, in_time
from lantern_accel.errors import (
    BackendError,
    DeviceRequestError,
    LanternError,
    LanternWarning,
    did_you_mean,
)
from lantern_accel.records import Frozen

if TYPE_CHECKING:
    from lantern_accel.device.backend import Backend

LIST_DEVICES = "run 'lantern-accel devices' to list what is there"
#: What to do about a plug-in that does not keep to the backend interface.
REPORT = "report it to the plug-in's author"
REINSTALL = "install lantern-accel itself with pip, which registers its own"

Used = TypeVar("Used")
Answer = TypeVar("Answer")

_DEVICE = re.compile(r"(?!auto:)(?P<name>[^:]+)(:(?P<index>[0-9]{1,4}))?")


class DeviceStatus(Frozen):
    """One backend as ``lantern-accel devices`` reports it."""

    name: str
    state: Literal["ready", "not available", "broken"]
    summary: str = ""
    devices: tuple[str, ...] = ()
    reason: str = ""
    install: str = ""
    api_version: int | None = None
    automatic: bool = False
    """True for the one that ``device="auto"`` opens."""


def backend_specs() -> dict[str, BackendSpec]:
    """Return the backends that loaded, by name, the ones that auto prefers first."""
    specs = load_plugins().specs.values()
    return {spec.name: spec for spec in sorted(specs, key=lambda one: (-one.priority, one.name))}


def broken_plugins() -> dict[str, str]:
    """Return why each plug-in that could not be loaded could not, by name."""
    return dict(load_plugins().broken)


@dataclass(frozen=True)
class Chosen:
    """A device that is there and can be opened.

    ``rest``: where ``auto`` or a word such as ``gpu`` chose, the backends that come next.
    ``automatic``: whether another may serve where this one fails; never for a device by name.
    """

    spec: BackendSpec
    index: int
    options: Mapping[str, object]
    rest: tuple[BackendSpec, ...] = ()
    automatic: bool = False

    def processes(self, jobs: int) -> list[Mapping[str, str]]:
        """Return the environments of up to ``jobs`` processes that may hold the device at one time."""
        call = lambda: tuple(self.spec.processes(self.index) or ())  # noqa: E731  # as short as its one use
        places = ask(self.spec.name, "processes", call, tuple)
        return [*(places[:jobs] if places and jobs > 1 else [{}] * jobs)]

    def open(self) -> Backend:
        """Open it, or what comes next; raises BackendError where nothing serves."""
        return self.serve(lambda backend, chosen: backend)

    def serve(self, use: Callable[[Backend, Chosen], Used]) -> Used:
        """Open the device and return what ``use`` makes of it; after a failure the next one is tried.

        ``use`` gets the backend, which is closed where it raises, and what was chosen at last. Where
        the device was asked for by name, its BackendError is raised; for ``auto`` one line of warning
        tells it, and the next backend serves.
        """
        chosen = self
        while True:
            try:
                return chosen._serve(use)
            except BackendError as error:
                chosen = chosen.after(error)

    def _serve(self, use: Callable[[Backend, Chosen], Used]) -> Used:
        backend = _open(self.spec, self.index, self.options)
        try:
            first_use(backend)
            return use(backend, self)
        except BaseException as error:
            # What it says while it is closed would hide the reason.
            with warnings.catch_warnings(), contextlib.suppress(Exception):
                warnings.simplefilter("ignore")
                close_in_time(backend.name, backend.close)
            known = None
            if isinstance(error, Exception) and not isinstance(error, LanternError):
                known = backend.explain(error)
            if known is not None:
                raise known from error
            raise

    def after(self, error: BackendError) -> Chosen:
        """Return what serves in place of this device, and warn; raises ``error`` where nothing does."""
        if not self.automatic:
            raise error
        for place, (spec, found) in enumerate(_probe_all(list(self.rest))):
            if isinstance(found, BackendError) or not found.available:
                continue
            # Options are those of the device that was expected; another one knows others.
            left_out = f", without {', '.join(self.options)}" if self.options else ""
            warnings.warn(
                f"device auto: {spec.name} serves in place of {self.spec.name}{left_out} ({error})",
                LanternWarning,
                stacklevel=2,
            )
            return Chosen(spec, 0, {}, self.rest[place + 1 :], automatic=True)
        raise error


def open_backend(device: str = "auto", options: Mapping[str, object] | None = None) -> Backend:
    """Open ``"auto"``, a backend's first device by name, or another as ``"name:index"``.

    Raises BackendError when there is no such backend or device, saying what was looked for and
    what to install. Only ``"auto"`` goes on to another device where the best one fails, and warns.
    """
    return choose_device(device, options).open()


def choose_device(device: str = "auto", options: Mapping[str, object] | None = None) -> Chosen:
    """Find what :func:`open_backend` opens, and prepare the environment for it.

    ``device`` may be a word that backends have as an alias, such as ``"gpu"``: the best available one
    of them. Imports torch only where the backend cannot look for its device without: call it before
    torch is imported, because some vendors read the environment while torch loads their SDK.
    """
    name, index = _parse(device)
    given = dict(options or {})
    specs = list(backend_specs().values())
    rest: tuple[BackendSpec, ...] = ()
    known = name == "auto" or name in load_plugins().specs or name in load_plugins().broken
    aliased = [] if known else [spec for spec in specs if _answers(spec, name)]
    if name == "auto" or len(aliased) > 1:
        candidates = aliased or [spec for spec in specs if spec.priority >= 0]
        spec, probe = _best(device, candidates)
        rest = tuple(candidates[candidates.index(spec) + 1 :])
        asked = _configure(spec, given)
        if asked is not spec:
            spec, probe = _probe_spec(asked)
    else:
        spec, probe = _probe_spec(_configure(aliased[0] if aliased else named_spec(name), given))
    if not probe.available:
        raise BackendError(
            f"device {device!r} is not available: {probe.reason}"
            f"{'; ' + probe.install if probe.install else ''}; {LIST_DEVICES}"
        )
    if index >= probe.count:
        names = ", ".join(f"{spec.name}:{i} ({one})" for i, one in enumerate(probe.devices))
        raise BackendError(
            f"device {device!r} is out of range: backend {spec.name!r} has {probe.count}, {names}"
        )
    return Chosen(spec, index, given, rest, automatic=name == "auto")


def devices_report() -> list[DeviceStatus]:
    """Probe every backend and return what it said, and what is broken, without opening any."""
    report: list[DeviceStatus] = []
    failed = broken_plugins()
    ready = False
    for spec, found in _probe_all(list(backend_specs().values())):
        if isinstance(found, BackendError):
            failed[spec.name] = str(found)
            continue
        automatic = found.available and spec.priority >= 0 and not ready
        ready = ready or automatic
        report.append(
            DeviceStatus(
                name=spec.name,
                state="ready" if found.available else "not available",
                summary=spec.summary,
                api_version=spec.api_version,
                automatic=automatic,
                **found.model_dump(include={"devices", "reason", "install"}),
            )
        )
    broken = (
        DeviceStatus(name=name, state="broken", reason=reason)
        for name, reason in sorted(failed.items())
    )
    return [*report, *broken]


# --- steps ------------------------------------------------------------------------------------


def _parse(device: str) -> tuple[str, int]:
    match = _DEVICE.fullmatch(str(device).strip().lower())  # str: a torch.device will do
    if match is None:
        raise DeviceRequestError(
            f"device {device!r} is not a device; write auto, a name, or a name and an index "
            f"such as cpu:0; {LIST_DEVICES}"
        )
    return match["name"], int(match["index"] or 0)


def named_spec(name: str) -> BackendSpec:
    plugins = load_plugins()
    if name in plugins.specs:
        return plugins.specs[name]
    if name in plugins.broken:
        raise BackendError(
            f"backend {name!r} failed to load: {plugins.broken[name]}; "
            "reinstall or uninstall its package"
        )
    if not plugins.specs:
        raise BackendError(f"no backend is installed; {REINSTALL}")
    words = {word for spec in plugins.specs.values() for word in spec.aliases}
    meant = [one for one, spec in plugins.specs.items() if name.lower() in spec.also_known_as]
    near = f"; did you mean {', '.join(meant)}?" if meant else ""
    near = near or did_you_mean(name, ["auto", *words, *plugins.specs])
    raise DeviceRequestError(f"no backend is named {name!r}{near}; {LIST_DEVICES}")


def _answers(spec: BackendSpec, word: str) -> bool:
    try:
        return in_time(lambda: bool(spec.answers(word)), LOOKING)
    except Exception:  # as good as a no: the word is another backend's, or nobody's
        return False


def _configure(spec: BackendSpec, options: Mapping[str, object]) -> BackendSpec:
    hint = "check the options it was given"
    call = partial(spec.configure, options)
    return ask(spec.name, "configure", call, BackendSpec, hint, LOOKING)  # type: ignore[type-abstract]  # for isinstance


def _probe_spec(spec: BackendSpec) -> tuple[BackendSpec, Probe]:
    _prepare(spec)
    return spec, _probe(spec)


def _best(device: str, candidates: list[BackendSpec]) -> tuple[BackendSpec, Probe]:
    """Return the available backend of the highest priority; warn about a better one that fails."""
    reasons = []
    for spec, found in _probe_all(candidates):
        if isinstance(found, BackendError):
            reason, skips = str(found), f"a backend: {found}"
        elif found.available:
            return spec, found
        else:
            reason = f"{spec.name}: {found.reason}"
            out = f"; {found.install}" if found.install else ""
            skips = f"{reason}{out}" if found.unusable else ""
        reasons.append(reason)
        if skips:
            warnings.warn(f"device {device} skips {skips}", LanternWarning, stacklevel=3)
    if not candidates:
        raise BackendError(f"no backend is installed; {REINSTALL}")
    what = "no device is available" if device == "auto" else f"no device {device!r} is available"
    raise BackendError(f"{what} ({'; '.join(reasons)}); {LIST_DEVICES}")


def _probe_all(specs: list[BackendSpec]) -> Iterator[tuple[BackendSpec, Probe | BackendError]]:
    """Prepare all, then probe each: one probe may import torch, which others must precede."""
    failed: dict[str, BackendError] = {}
    for spec in specs:
        try:
            _prepare(spec)
        except BackendError as error:
            failed[spec.name] = error
    for spec in specs:
        try:
            yield spec, failed.get(spec.name) or _probe(spec)
        except BackendError as error:
            yield spec, error


def _prepare(spec: BackendSpec) -> None:
    hint, call = "check the environment it reads", partial(spec.prepare, os.environ)
    ask(spec.name, "prepare", call, object, hint, LOOKING)


def _probe(spec: BackendSpec) -> Probe:
    return ask(spec.name, "probe", spec.probe, Probe, seconds=spec.seconds_to_probe)


def _open(spec: BackendSpec, index: int, options: Mapping[str, object]) -> Backend:
    from lantern_accel.device.backend import Backend
    from lantern_accel.device.context import own_context

    # Of any device: its host computes too, text encoders for example.
    host.limit_threads()
    hint = "check its driver and SDK with 'lantern-accel devices'"
    with own_context():
        backend = ask(spec.name, "open", lambda: spec.open(index, options), Backend, hint)  # type: ignore[type-abstract]  # for isinstance
    if getattr(backend, "name", None) != spec.name or not hasattr(backend, "version"):
        raise BackendError(
            f"backend {spec.name!r} failed in open: its Backend must have name {spec.name!r} and a "
            f"version; {REPORT}"
        )
    return backend


# --- what is opened -----------------------------------------------------------------------------


def ask(
    backend: str, hook: str, call: Callable[[], object], kind: type[Answer], hint: str = REPORT,
    seconds: float | None = None,
) -> Answer:  # fmt: skip
    """Return what a hook of a backend answers, in ``seconds`` at most.

    Raises BackendError for a failure or another type, and passes on a hook's own, except from a probe,
    which puts it into what it returns.
    """
    try:
        found = call() if seconds is None else in_time(call, seconds)
    except (Exception, SystemExit) as error:
        if isinstance(error, BackendError) and hook != "probe":
            raise
        raise BackendError(f"backend {backend!r} failed in {hook}: {why(error)}; {hint}") from error
    if not isinstance(found, kind):
        article = "an" if kind.__name__[0] in "AEIOU" else "a"
        raise BackendError(
            f"backend {backend!r} failed in {hook}: it returned a {type(found).__name__}, not "
            f"{article} {kind.__name__}; {REPORT}"
        )
    return found


def first_use(backend: Backend) -> None:
    """Allocate on a device and wait for it, so that one that is busy or has no kernels fails now.

    Raises BackendError, too, where the backend describes itself by something of another type.
    """
    import torch

    from lantern_accel.device.backend import DTYPES, DeviceFacts, MemoryUse

    try:
        torch.zeros(8, device=backend.device).add_(1)
        backend.synchronize()
    except Exception as error:
        known = error if isinstance(error, BackendError) else backend.explain(error)
        if known is error:
            raise
        raise known or BackendError(
            f"backend {backend.name!r} opened {backend.device}, but its first allocation failed: "
            f"{why(error)}; check with the vendor's tools that the device is free, or use another "
            "(`lantern-accel devices` lists them)"
        ) from error
    dtypes = backend.compute_dtypes()
    able = isinstance(dtypes, (tuple, list)) and all(one in DTYPES.values() for one in dtypes)
    if not able or not dtypes:
        raise BackendError(
            f"backend {backend.name!r} failed in compute_dtypes: it returned {dtypes!r}, not a tuple "
            f"of torch's {', '.join(DTYPES)}; {REPORT}"
        )
    ask(backend.name, "facts", backend.facts, DeviceFacts)
    ask(backend.name, "memory", backend.memory, MemoryUse)
    ask(backend.name, "counters", backend.counters, dict)
