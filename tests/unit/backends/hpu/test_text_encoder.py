"""The T5 encoder's way onto Gaudi: optimum-habana is asked for, and its absence is one sentence."""

from __future__ import annotations

import sys
from types import ModuleType

import pytest
import torch
from torch import nn

from lantern_accel.errors import BackendError
from lantern_accel_hpu import text_encoder


@pytest.fixture
def optimum(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Install doubles of the two functions that are used; return what was called."""
    calls: list[str] = []
    for name in (
        "optimum",
        "optimum.habana",
        "optimum.habana.utils",
        "optimum.habana.transformers",
        "optimum.habana.transformers.modeling_utils",
    ):
        module = ModuleType(name)
        module.__path__ = []
        monkeypatch.setitem(sys.modules, name, module)
    vars(sys.modules["optimum.habana.transformers.modeling_utils"])[
        "adapt_transformers_to_gaudi"
    ] = lambda: calls.append("adapt")
    vars(sys.modules["optimum.habana.utils"])["get_hpu_memory_stats"] = lambda device=None: {
        "memory_allocated (GB)": 1.5
    }
    monkeypatch.setattr(text_encoder, "_transformers", lambda: "4.55.4")
    return calls


def test_the_model_is_adapted_and_moved(optimum: list[str]) -> None:
    model = nn.Linear(2, 2)
    prepared = text_encoder.prepare_text_encoder(model, torch.device("cpu"))
    assert optimum == ["adapt"]
    assert prepared is model
    assert prepared.weight.dtype == torch.bfloat16
    assert not prepared.weight.requires_grad
    assert not prepared.training
    assert text_encoder.memory_statistics() == {"memory_allocated (GB)": 1.5}


@pytest.mark.parametrize(
    ("version", "says"),
    [
        ("", "transformers is not installed; pip install"),
        ("4.57.1", "replaces layers of transformers 4.55, and 4.57.1 is installed"),
        ("4.550.0", "and 4.550.0 is installed"),
    ],
)
def test_another_transformers_is_refused(
    optimum: list[str], monkeypatch: pytest.MonkeyPatch, version: str, says: str
) -> None:
    monkeypatch.setattr(text_encoder, "_transformers", lambda: version)
    with pytest.raises(BackendError, match=says):
        text_encoder.prepare_text_encoder(nn.Linear(2, 2), torch.device("cpu"))
    assert optimum == []


def test_a_missing_extra_names_the_command(
    optimum: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "optimum.habana.transformers.modeling_utils", None)
    monkeypatch.setitem(sys.modules, "optimum.habana.utils", None)
    with pytest.raises(BackendError, match=r"not installed; pip install \"lantern-accel\[hpu-text"):
        text_encoder.prepare_text_encoder(nn.Linear(2, 2), torch.device("cpu"))
    with pytest.raises(BackendError, match="not installed"):
        text_encoder.memory_statistics()


def test_an_image_without_the_plugin_is_told(
    optimum: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    class Fails(ModuleType):
        def __getattr__(self, name: str) -> object:
            raise IndexError("list index out of range")

    name = "optimum.habana.transformers.modeling_utils"
    monkeypatch.setitem(sys.modules, name, Fails(name))
    with pytest.raises(BackendError, match="finds no habana-torch-plugin; use it inside the Gaudi"):
        text_encoder.prepare_text_encoder(nn.Linear(2, 2), torch.device("cpu"))
