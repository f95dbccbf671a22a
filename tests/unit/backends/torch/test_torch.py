"""A device that torch knows and nobody else claims: asked, checked once, and left where it fails."""

from __future__ import annotations

import threading
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from support import beads

from lantern_accel.cli import main
from lantern_accel.device import plugins, timeouts
from lantern_accel.device.backend import dtype_policy
from lantern_accel.device.spec import BackendSpec
from lantern_accel.errors import BackendError, LanternWarning
from lantern_accel.testing import CHECKS
from lantern_accel_torch import accelerator, asked, selfcheck
from lantern_accel_torch.backend import DeviceBackend
from lantern_accel_torch.spec import Spec

QUICK = ("kv.round_trip", "attention.float64")


@pytest.fixture(autouse=True)
def cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    monkeypatch.setenv("LANTERN_ACCEL_CACHE", str(tmp_path))
    return tmp_path


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """The beads, with a self-check of a moment, in this thread: what they lack is a mode of a thread."""
    beads.install(monkeypatch)
    monkeypatch.setattr(selfcheck, "CHECKS", QUICK)
    monkeypatch.setattr(selfcheck, "in_time", lambda call, seconds: call())


def never(*given: object, **more: object) -> None:
    raise AssertionError("it is not checked again")


def state(name: str = "torch") -> plugins.DeviceStatus:
    return {one.name: one for one in plugins.devices_report()}[name]


# --- what torch says --------------------------------------------------------------------------------


def nothing() -> None:
    raise RuntimeError("Cannot access accelerator device when none is available.")


@pytest.mark.parametrize(
    ("api", "reason"),
    [
        (
            SimpleNamespace(current_accelerator=lambda: None),
            f"this torch build ({torch.__version__}) has no accelerator",
        ),
        (
            SimpleNamespace(current_accelerator=nothing),
            f"this torch build ({torch.__version__}) has no accelerator",
        ),
        (
            SimpleNamespace(
                current_accelerator=lambda: torch.device("xpu"), is_available=lambda: False
            ),
            "torch is built for xpu, and finds no such device",
        ),
    ],
    ids=["none", "none, and it raises", "not here"],
)
def test_it_says_why_there_is_no_device(
    api: object, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch, "accelerator", api)
    assert Spec().probe().reason == reason


@pytest.mark.parametrize("kind", ["cuda", "hpu", "slate"])
def test_a_device_that_another_backend_claims_is_left_to_it(
    monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    class Slate(BackendSpec):
        name, summary, api_version, aliases = "chalk", "slate", 1, ("slate",)
        probe = open = never  # type: ignore[assignment]

    specs = {**plugins.backend_specs(), "chalk": Slate()}
    monkeypatch.setattr(plugins, "backend_specs", lambda: specs)
    monkeypatch.setattr(accelerator, "find", lambda: beads.Beads(kind, 1))
    owner = "chalk" if kind == "slate" else kind
    assert (
        Spec().probe().reason
        == f"torch's accelerator is {kind}, which the backend '{owner}' serves"
    )


@pytest.mark.usefixtures("quick")
def test_it_is_listed_and_opened_by_torch_s_own_name() -> None:
    assert state().devices == ("beads: Beads 9", "beads: Beads 9")
    assert state().automatic
    with plugins.open_backend("beads:1") as backend:
        facts = backend.facts()
    assert (facts.backend, facts.name, facts.driver) == ("torch", "Beads 9", "driver 1")
    with pytest.raises(BackendError, match="no backend is named 'rods'"):
        plugins.open_backend("rods")


@pytest.mark.parametrize("options", [{"check": "maybe"}, {"chek": "on"}])
def test_options_are_checked(options: dict[str, str]) -> None:
    with pytest.raises(BackendError, match="torch"):
        plugins.choose_device("torch", options)


# --- what the device says ---------------------------------------------------------------------------


def opened() -> DeviceBackend:
    return DeviceBackend(0, beads.Beads("beads", 2))


def test_a_device_with_everything() -> None:
    backend = opened()
    assert backend.compute_dtypes() == (torch.bfloat16, torch.float32, torch.float16)
    assert backend.index == torch.int64
    with backend.inference():
        assert torch.is_inference_mode_enabled()


@pytest.mark.usefixtures("quick")
def test_a_device_without_bfloat16_passes_and_computes_in_float32() -> None:
    with beads.Lacking(beads.no_bfloat16), plugins.open_backend("auto") as backend:
        assert backend.name == "torch"
        assert backend.compute_dtypes() == (torch.float32, torch.float16)
        assert dtype_policy(backend).compute == torch.float32
    with pytest.raises(BackendError, match="does not compute in bfloat16; use auto or one of"):
        dtype_policy(backend, "bfloat16")


def test_a_dtype_in_which_products_are_wrong_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    real = torch.nn.functional.linear

    def wrong(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        out = real(x, weight)
        return out * 2 if x.dtype == torch.bfloat16 else out

    monkeypatch.setattr(torch.nn.functional, "linear", wrong)
    assert torch.bfloat16 not in asked.dtypes(torch.device("cpu"))


def test_a_device_that_gathers_by_32_bits_gets_such_indices() -> None:
    with beads.Lacking(beads.no_wide_gather, narrow=True):
        assert opened().index == torch.int32


def test_a_device_without_views_in_inference_mode_runs_without_gradients(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    real = torch.Tensor.view

    def view(self: torch.Tensor, *shape: int) -> torch.Tensor:
        if torch.is_inference_mode_enabled() and not self.is_inference():
            raise RuntimeError("Cannot set version_counter for inference tensor")
        return real(self, *shape)

    monkeypatch.setattr(torch.Tensor, "view", view)
    with opened().inference():
        assert not torch.is_inference_mode_enabled() and not torch.is_grad_enabled()


def test_errors_say_what_to_do() -> None:
    backend = opened()
    assert "--batch" in str(backend.explain(RuntimeError("MPS backend out of memory")))
    assert "newer torch" in str(backend.explain(NotImplementedError("aten::foo")))
    assert backend.explain(ValueError("no")) is None


# --- the self-check ---------------------------------------------------------------------------------


@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize("change", ["nothing", "driver", "damage", "another's", "again"])
def test_it_is_checked_again_where_the_verdict_is_not_this_one(
    change: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    plugins.open_backend("auto").close()
    key = selfcheck.key_of(beads.Beads("beads", 2), 0)
    verdict = selfcheck.load_verdict(key)
    assert verdict is not None and verdict.passed and verdict.key["torch"] == torch.__version__
    if change == "driver":
        monkeypatch.setattr(beads.Beads, "driver", lambda self, index: "driver 2")
    elif change == "damage":
        selfcheck.path_of(key).write_text("{")
    elif change == "another's":
        other = verdict.model_copy(update={"key": {**verdict.key, "torch": "1.0"}})
        selfcheck.path_of(key).write_text(other.model_dump_json())
    calls: list[str] = []
    real = selfcheck.examine

    def examine(backend: DeviceBackend, key: dict[str, str]) -> selfcheck.Verdict:
        calls.append(key["driver"])
        return real(backend, key)

    monkeypatch.setattr(selfcheck, "examine", examine)
    options = {"check": "again"} if change == "again" else None
    with plugins.open_backend("torch", options) as backend:
        assert backend.name == "torch"
    assert calls == ([] if change == "nothing" else [beads.Beads("beads", 2).driver(0)])


@pytest.mark.usefixtures("quick")
def test_where_an_operator_is_missing_the_check_names_it_and_the_cpu_draws(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with beads.Lacking(beads.no_operator):
        with pytest.warns(
            LanternWarning, match=r"cpu serves in place of torch .*'aten::index_copy_'"
        ):
            assert plugins.open_backend("auto").name == "cpu"
        # From now on it is known, and auto passes it over without a word.
        assert plugins.open_backend("auto").name == "cpu"
        assert state().state == "not available"
        assert main(["devices"]) == 0
        said = "torch: not available: beads failed its self-check on this machine: kv.round_trip: "
        (line,) = [line for line in capsys.readouterr().out.splitlines() if said in line]
        assert "'aten::index_copy_'" in line and "--option check=again" in line
        with pytest.raises(BackendError, match=r"failed its self-check.*'aten::index_copy_'"):
            plugins.open_backend("beads")
        assert plugins.open_backend("beads", {"check": "off"}).name == "torch"
    assert plugins.open_backend("beads", {"check": "again"}).name == "torch"  # repaired
    assert state().automatic


@pytest.mark.usefixtures("quick")
def test_a_check_that_hangs_fails_and_the_cpu_draws(monkeypatch: pytest.MonkeyPatch) -> None:
    over = threading.Event()
    monkeypatch.setattr(selfcheck, "LIMIT", 0.2)
    monkeypatch.setattr(selfcheck, "in_time", timeouts.in_time)
    monkeypatch.setitem(CHECKS, selfcheck.CHECKS[0], lambda backend: over.wait(60))
    try:
        with pytest.warns(LanternWarning, match=r"cpu serves .*: it did not return within 0\.2 s"):
            assert plugins.open_backend("auto").name == "cpu"
    finally:
        over.set()


@pytest.mark.long
def test_the_whole_self_check_passes_a_right_device(monkeypatch: pytest.MonkeyPatch) -> None:
    beads.install(monkeypatch)
    with plugins.open_backend("auto") as backend:
        assert backend.name == "torch"


@pytest.mark.usefixtures("quick")
def test_a_device_without_a_gather_by_64_bits_is_told_so_and_the_cpu_draws() -> None:
    with (
        beads.Lacking(beads.no_wide_gather, narrow=True),
        pytest.warns(
            LanternWarning, match=r"cpu serves in place of torch .*'aten::gather'.*64 bits"
        ),
    ):
        assert plugins.open_backend("auto").name == "cpu"
