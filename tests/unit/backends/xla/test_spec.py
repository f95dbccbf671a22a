"""What is found of XLA before torch is imported."""

from __future__ import annotations

from pathlib import Path

import pytest

from lantern_accel.errors import (
    BackendError,
    DeviceLostError,
    DeviceMemoryError,
    NotCapturableError,
)
from lantern_accel_xla import environment, faults
from lantern_accel_xla.options import Options
from lantern_accel_xla.spec import Spec


def pretend(patch: pytest.MonkeyPatch, *modules: str, chips: int = 0, **versions: str) -> None:
    patch.setattr(environment, "is_installed", lambda name: name in modules)
    patch.setattr(environment, "version", lambda name: versions.get(name, ""))
    patch.setattr(environment, "tpu_chips", lambda: chips)
    patch.delenv("PJRT_DEVICE", raising=False)


@pytest.mark.parametrize(
    ("modules", "versions", "client", "words"),
    [
        ((), {}, "", ("torch_xla is not installed", "lantern-accel[xla]")),
        (("torch_xla",), {"torch": "2.13.0+cpu", "torch_xla": "2.9.0"}, "",
         ("torch_xla 2.9.0 is for torch 2.9, and torch 2.13.0+cpu is installed", "2.9.0 go together")),
        (("torch_xla",), {}, "TPU", ("libtpu is not installed", "torch_xla[tpu]")),
        (("torch_xla", "libtpu"), {}, "TPU", ("no TPU chip", "PJRT_DEVICE=CPU")),
    ],
)  # fmt: skip
def test_what_is_missing_is_told_with_a_way_out(monkeypatch, modules, versions, client, words):
    pretend(monkeypatch, *modules, **versions)
    monkeypatch.setenv("PJRT_DEVICE", client)
    probe = Spec().probe()
    assert words[0] in probe.reason and words[1] in probe.install


def test_the_cpu_client_is_never_automatic_and_a_tpu_is(monkeypatch):
    pretend(monkeypatch, "torch_xla")
    assert Spec().priority == -1
    assert "CPU" in str(Spec().probe().devices)
    pretend(monkeypatch, "torch_xla", "libtpu", chips=4)
    assert Spec().priority > 0
    assert list(Spec().probe().devices) == ["TPU"] * 4
    monkeypatch.setenv("PJRT_DEVICE", "CPU")
    assert Spec().priority == -1


def test_chips_are_counted_where_the_kernel_shows_them(tmp_path: Path):
    assert environment.tpu_chips(tmp_path) == 0
    (tmp_path / "vfio").mkdir()
    for name in ("vfio/0", "vfio/1", "vfio/vfio"):
        (tmp_path / name).touch()
    assert environment.tpu_chips(tmp_path) == 2
    (tmp_path / "accel0").touch()
    assert environment.tpu_chips(tmp_path) == 1


def test_the_client_is_named_before_torch_xla_looks_and_never_against_the_user(monkeypatch):
    pretend(monkeypatch, "torch_xla")
    environ: dict[str, str] = {}
    Spec().prepare(environ)
    kept, flags = environment.KEPT_VARIABLE, environment.FLAGS_VARIABLE
    assert environ == {"PJRT_DEVICE": "CPU", kept: "256", flags: environment.CPU_FLAGS}
    for asked in ({"PJRT_DEVICE": "TPU", kept: "9"}, {"PJRT_DEVICE": "CPU", kept: "9", flags: ""}):
        environ = dict(asked)
        Spec().prepare(environ)
        assert environ == asked


def test_options_are_checked_before_torch_is_imported():
    assert Spec().configure({"mode": "lazy"}).name == "xla"
    with pytest.raises(BackendError, match="mode='lazzy'"):
        Spec().configure({"mode": "lazzy"})
    with pytest.raises(BackendError):
        Options.read({"modes": "lazy"})


@pytest.mark.parametrize(
    ("error", "kind", "words"),
    [
        (RuntimeError("Unexpected execution happens inside the compiled function, exiting"),
         NotCapturableError, "on the host"),
        (RuntimeError("RESOURCE_EXHAUSTED: allocating 8 bytes"), DeviceMemoryError, "fewer images"),
        (RuntimeError("The TPU is already in use by process 12"), BackendError, "another process"),
        (RuntimeError("UNAVAILABLE: gone"), DeviceLostError, "start again"),
        (RuntimeError("shapes differ"), type(None), ""),
        (KeyError("UNAVAILABLE"), type(None), ""),
    ],
)  # fmt: skip
def test_the_runtime_s_errors_are_told_with_a_way_out(error, kind, words):
    found = faults.explain(error, "decoding")
    assert type(found) is kind and words in str(found)
