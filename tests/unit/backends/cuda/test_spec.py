"""Why there is no GPU, what to do, and options that do not exist."""

from __future__ import annotations

import importlib
import importlib.util
import sys
import warnings
from pathlib import Path

import pytest
import torch
from support.cuda_double import CudaDouble

from lantern_accel.device.plugins import open_backend
from lantern_accel.errors import BackendError, DeviceRequestError, LanternWarning
from lantern_accel_cuda.options import Options
from lantern_accel_cuda.spec import Spec

module = importlib.import_module("lantern_accel_cuda.spec")

#: What torch says, as it begins, and a fragment of the way out.
SAID = {
    "CUDA initialization: Found no NVIDIA driver on your system": "install the NVIDIA driver",
    "CUDA initialization: The NVIDIA driver on your system is too old (found version 11040)": (
        "built for an older CUDA (this one is built for 12.8)"
    ),
    "CUDA initialization: CUDA unknown error - this may be due": "the kernel module nvidia_uvm",
    "": "CUDA_VISIBLE_DEVICES does not hide it",
}


@pytest.mark.parametrize("said", SAID, ids=["no driver", "old driver", "unknown", "nothing said"])
def test_the_probe_says_what_torch_says_and_what_helps(
    monkeypatch: pytest.MonkeyPatch, said: str
) -> None:
    def unavailable() -> bool:
        if said:
            warnings.warn(f"{said}. Please check", stacklevel=1)
        return False

    monkeypatch.setattr(module, "_torch_build", lambda: {"cuda": "12.8"})
    monkeypatch.setattr(torch.cuda, "is_available", unavailable)
    probe = Spec().probe()
    assert probe.reason == (said or "torch finds no GPU")
    assert SAID[said] in probe.install
    with pytest.raises(BackendError, match="device 'cuda' is not available: "):
        open_backend("cuda")


def test_a_cpu_build_of_torch_is_told_before_torch_is_imported(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, "_torch_build", lambda: {"__version__": "2.9+cpu"})
    probe = Spec().probe()
    assert probe.reason == "this torch build (2.9+cpu) has no CUDA support"
    assert probe.install == "install a CUDA build of torch from pytorch.org"


@pytest.fixture(autouse=True)
def _no_first_use(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave out the first allocation: the double says what a card is, but holds no memory."""
    monkeypatch.setattr("lantern_accel.device.plugins.first_use", lambda backend: None)
    monkeypatch.setattr("lantern_accel_cuda.backend.DeviceBackend.acquire", lambda self: None)


@pytest.fixture
def two_cards(monkeypatch: pytest.MonkeyPatch) -> CudaDouble:
    double = CudaDouble()
    double.install(monkeypatch)
    monkeypatch.setattr(module, "_torch_build", lambda: {"cuda": "12.8"})
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    return double


def test_several_cards_are_counted_and_an_absent_one_is_an_error(two_cards: CudaDouble) -> None:
    assert Spec().probe().devices == ("Double of a GPU, 24 GiB",) * 2
    with open_backend("cuda:1") as backend:
        assert str(backend.device) == "cuda:1"
    with pytest.raises(
        BackendError, match=r"'cuda:2' is out of range: backend 'cuda' has 2, cuda:0"
    ):
        open_backend("cuda:2")


@pytest.mark.parametrize(
    ("capability", "fits"), [((8, 6), True), ((8, 9), True), ((7, 5), False), ((12, 0), True)]
)
def test_a_card_that_this_torch_has_no_kernels_for_is_refused(
    two_cards: CudaDouble, capability: tuple[int, int], fits: bool
) -> None:
    two_cards.capability = capability
    if fits:
        open_backend("cuda").close()
        return
    with pytest.raises(
        BackendError, match=r"has kernels for sm_80, .* but the GPU cuda:0 .* sm_75"
    ):
        open_backend("cuda")


def test_auto_says_in_one_line_why_the_gpu_does_not_serve(two_cards: CudaDouble) -> None:
    two_cards.capability = (7, 5)
    said = (
        r"^device auto skips cuda: this torch build .* sm_75; install a torch build that names it$"
    )
    with pytest.warns(LanternWarning, match=said) as lines, open_backend("auto") as backend:
        assert backend.name == "cpu"
    assert len(lines) == 1
    probe = Spec().probe()
    assert (probe.available, probe.unusable) == (False, True)


BUSY = "CUDA error: all CUDA-capable devices are busy or unavailable"


def test_a_card_that_does_not_answer_is_no_fault_of_the_plug_in(
    two_cards: CudaDouble, monkeypatch: pytest.MonkeyPatch
) -> None:
    def busy(index: int) -> None:
        raise RuntimeError(f"{BUSY}\nCUDA kernel errors might be reported later")

    monkeypatch.setattr(torch.cuda, "get_device_properties", busy)
    with pytest.warns(LanternWarning, match=f"device auto skips cuda: .*{BUSY}"):
        open_backend("auto").close()
    with pytest.raises(BackendError, match=rf"not available: .*{BUSY}.*no other process holds it"):
        open_backend("cuda")


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (RuntimeError(f"{BUSY}\nCUDA kernel errors"), f"cannot be used: {BUSY}; check with nvidia"),
        (RuntimeError("CUDA error: no kernel image is available"), "no kernel image is available"),
        (
            torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 MiB. GPU 0"),
            "ran out of memory while being opened .*Tried to allocate 2.00 MiB",
        ),
    ],
    ids=["busy", "kernels", "memory"],
)
def test_the_first_allocation_is_part_of_opening(
    two_cards: CudaDouble, monkeypatch: pytest.MonkeyPatch, error: Exception, words: str
) -> None:
    def fail(backend: object) -> None:
        raise error

    monkeypatch.setattr("lantern_accel_cuda.backend.DeviceBackend.acquire", fail)
    with pytest.raises(BackendError, match=words) as told:
        open_backend("cuda:1")
    assert "\n" not in str(told.value)
    with pytest.warns(
        LanternWarning, match="cpu serves in place of cuda .the GPU cuda:0 "
    ) as lines:
        open_backend("auto").close()
    assert len(lines) == 1


@pytest.mark.parametrize(
    ("given", "asked"),
    [({}, False), ({"preset": "safe"}, False)]
    + [({"graph": graph}, graph != "off") for graph in ("off", "step", "phases")],
)
def test_a_capture_that_was_asked_for_is_known(given: dict[str, str], asked: bool) -> None:
    found = Options.read(given)
    assert (found.asked, found.graph) == (asked, given.get("graph", "step"))


@pytest.mark.parametrize(
    ("given", "says"),
    [({"graphs": "off"}, "'graphs'; it takes preset"), ({"preset": "fats"}, "did you mean fast")],
)
def test_options_are_checked_by_name_and_value(given: dict[str, str], says: str) -> None:
    with pytest.raises(DeviceRequestError, match=says):
        Options.read(given)


def test_without_triton_torch_serves_unless_fast_was_asked_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert not Options.read({}).fused
    with pytest.raises(DeviceRequestError, match="preset=fast, but the package triton"):
        Options.read({"preset": "fast"})


def test_a_triton_that_cannot_be_imported_leaves_torch_s_operators(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "triton.py").write_text("raise ImportError('libstdc++.so.6: version not found')")
    monkeypatch.delitem(sys.modules, "triton", raising=False)
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.warns(LanternWarning, match=r"cannot be imported \(libstdc.*preset=safe"):
        assert not Options.read({}).fused
    assert not Options.read({"preset": "safe"}).fused


def test_a_node_of_many_cards_has_the_time_that_its_driver_takes(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    assert module._cards_of_driver(tmp_path / "none") == 0
    for number in range(8):
        (tmp_path / f"0000:{number:02x}:00.0").mkdir()
    assert module._cards_of_driver(tmp_path) == 8
    monkeypatch.setattr(module, "_cards_of_driver", lambda: 8)
    assert Spec().seconds_to_probe == 62
