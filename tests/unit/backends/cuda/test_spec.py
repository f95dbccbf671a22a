"""Why there is no GPU, what to do, and options that do not exist."""

from __future__ import annotations

import importlib
import importlib.util
import warnings

import pytest
import torch
from support.cuda_double import CudaDouble

from lantern_accel.device.plugins import open_backend
from lantern_accel.errors import BackendError
from lantern_accel_cuda.options import Options
from lantern_accel_cuda.spec import Spec

module = importlib.import_module("lantern_accel_cuda.spec")

SAID = {
    "CUDA initialization: Found no NVIDIA driver on your system. Please check that you have": (
        "CUDA initialization: Found no NVIDIA driver on your system",
        "install the NVIDIA driver; nvidia-smi must list the GPU",
    ),
    "CUDA initialization: The NVIDIA driver on your system is too old (found version 11040). "
    "Please update your GPU driver by downloading and installing a new version": (
        "CUDA initialization: The NVIDIA driver on your system is too old (found version 11040)",
        "update the NVIDIA driver, or install a torch built for an older CUDA (this one is built "
        "for 12.8)",
    ),
    "CUDA initialization: CUDA unknown error - this may be due to an incorrectly set up "
    "environment, e.g. changing env variable CUDA_VISIBLE_DEVICES after program start.": (
        "CUDA unknown error",
        "reload the kernel module nvidia_uvm",
    ),
    "": ("torch finds no GPU", "CUDA_VISIBLE_DEVICES does not hide it"),
}


@pytest.mark.parametrize("said", SAID, ids=["no driver", "old driver", "unknown", "nothing said"])
def test_the_probe_says_what_torch_says_and_what_helps(
    monkeypatch: pytest.MonkeyPatch, said: str
) -> None:
    def unavailable() -> bool:
        if said:
            warnings.warn(said, stacklevel=1)
        return False

    monkeypatch.setattr(module, "_torch_build", lambda: {"cuda": "12.8"})
    monkeypatch.setattr(torch.cuda, "is_available", unavailable)
    probe = Spec().probe()
    reason, install = SAID[said]
    assert reason in probe.reason
    assert install in probe.install
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
    monkeypatch.setattr("lantern_accel.device.plugins._first_use", lambda backend: None)


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


def test_machine_code_alone_does_not_run_on_the_next_generation(
    two_cards: CudaDouble, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "get_arch_list", lambda: ["sm_80", "sm_90"])
    two_cards.capability = (12, 0)
    with pytest.raises(BackendError, match="is sm_120; install a torch build that names it"):
        open_backend("cuda")


def test_options_are_checked_by_name_and_value() -> None:
    assert Options.read({"graph": "phases"}).graph == "phases"
    with pytest.raises(
        BackendError, match="backend 'cuda' has no option 'graphs'; it takes graph: "
    ):
        Options.read({"graphs": "off"})
    with pytest.raises(BackendError, match="got attention='flash'; known: matmul, sdpa, triton"):
        Options.read({"attention": "flash"})
    with pytest.raises(
        BackendError, match="got compile='max-autotune'; did you mean max-autotune-n"
    ):
        Options.read({"compile": "max-autotune"})


def test_a_wrong_option_is_told_before_the_device_is_looked_for() -> None:
    with pytest.raises(BackendError, match="got graph='steps'; did you mean step"):
        open_backend("cuda", {"graph": "steps"})


def test_triton_is_asked_for_only_where_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert Options.read({}).kernels == "torch"
    with pytest.raises(
        BackendError, match="kernels=triton, but the package triton is not installed"
    ):
        Options.read({"kernels": "triton"})
