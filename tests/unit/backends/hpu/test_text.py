"""optimum-habana, as a double of release 1.21.2: its requirements, its entry, what it replaces of T5."""

from __future__ import annotations

import importlib.metadata
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
import torch
from support.gaudi import Gaudi
from torch import nn

from lantern_accel.errors import LanternWarning
from lantern_accel.families.llamagen.t5 import T5Text
from lantern_accel_hpu import text
from lantern_accel_hpu.backend import DeviceBackend
from lantern_accel_hpu.bridge import Bridge

#: Of the wheel's METADATA, and releases that fit.
REQUIRES = [
    *("transformers<4.56.0,>=4.55.0", "optimum<2.1.0,>=2.0.0", "torch", "sentencepiece"),
    'datasets==3.6.0; extra == "tests"',
]
RELEASES = {"transformers": "4.55.4", "optimum": "2.0.0", "sentencepiece": "0.2.1", "torch": "2.7"}
#: As its modeling_utils does: all of transformers' classes that it knows, T5's among them.
ADAPTS = """
import habana_frameworks.torch.core
import transformers
print("Not using HPU fused kernel for RMSNorm")

def gaudi_T5Stack_forward(self, input_ids=None, attention_mask=None):
    return "by optimum-habana"

def adapt_transformers_to_gaudi():
    transformers.models.t5.modeling_t5.T5Stack.forward = gaudi_T5Stack_forward
"""


def released(name: str) -> str:
    if name not in (known := {**RELEASES, text.PACKAGE: "1.21.2"}):
        raise importlib.metadata.PackageNotFoundError
    return known[name]


class T5Stack(nn.Module):
    def forward(self, input_ids=None, attention_mask=None):
        return "by transformers"


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Install the double and what it requires; nothing that it replaces or imports outlives the test."""
    known = set(sys.modules)
    monkeypatch.setattr(text.importlib.metadata, "version", released)
    monkeypatch.setattr(text.importlib.metadata, "requires", lambda name: REQUIRES)
    package = tmp_path / "optimum/habana/transformers"
    package.mkdir(parents=True)
    (package / "modeling_utils.py").write_text(ADAPTS)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(T5Stack, "forward", T5Stack.forward)  # undone at the end
    stack = SimpleNamespace(modeling_t5=SimpleNamespace(T5Stack=T5Stack))
    transformers = ModuleType("transformers")
    vars(transformers).update(models=SimpleNamespace(t5=stack), __version__="4.55.4")
    tokenizer = SimpleNamespace(from_pretrained=lambda *of, **more: object())
    encoder = SimpleNamespace(from_pretrained=lambda *of, **more: T5Stack())
    vars(transformers).update(AutoTokenizer=tokenizer, T5EncoderModel=encoder)
    for name in ("habana_frameworks", "habana_frameworks.torch", "habana_frameworks.torch.core"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setitem(sys.modules, "transformers", transformers)
    text.adapt.cache_clear()
    yield tmp_path
    text.adapt.cache_clear()
    for name in set(sys.modules) - known:
        if name.partition(".")[0] == "optimum":
            del sys.modules[name]


def test_a_text_encoder_on_the_card_runs_adapted_layers(
    site: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    device, dtype = torch.device("cpu"), torch.float32
    plain = T5Text(tmp_path, 12, device=device, dtype=dtype)
    assert plain._load()[1](None) == "by transformers"
    backend = DeviceBackend(Bridge(Gaudi()))
    adapted = T5Text(tmp_path, 12, device=device, dtype=dtype, adapt=backend.text_encoder)
    assert adapted._load()[1](None) == "by optimum-habana"
    assert capsys.readouterr().out == "", "it prints, and --json is printed there"


def test_where_it_is_not_installed_nothing_changes(
    monkeypatch: pytest.MonkeyPatch, recwarn: pytest.WarningsRecorder
) -> None:
    monkeypatch.setattr(text, "PACKAGE", "optimum-habana-that-is-not-here")
    text.adapt.cache_clear()
    encoder = nn.Linear(1, 1)
    assert DeviceBackend(Bridge(Gaudi())).text_encoder(encoder) is encoder
    assert not recwarn.list and not any(name.startswith("optimum") for name in sys.modules)
    text.adapt.cache_clear()


@pytest.mark.parametrize(
    "name, release, says",
    [
        ("transformers", "5.8.0", "needs transformers<4.56.0,>=4.55.0, and 5.8.0 is installed"),
        ("transformers", "4.54.1", "and 4.54.1 is installed"),
        ("optimum", "2.1.0", "needs optimum<2.1.0,>=2.0.0"),
        ("sentencepiece", "", "needs sentencepiece, which is not installed"),
    ],
)
def test_a_release_outside_of_its_pins_is_not_used(
    site: Path, monkeypatch: pytest.MonkeyPatch, name: str, release: str, says: str
) -> None:
    if release:
        monkeypatch.setitem(RELEASES, name, release)
    else:
        monkeypatch.delitem(RELEASES, name)
    with pytest.warns(LanternWarning, match="optimum-habana 1.21.2 is not used") as told:
        assert not text.adapt()
    assert says in str(told[0].message)
    assert "optimum.habana.transformers.modeling_utils" not in sys.modules
    assert T5Stack()(None) == "by transformers"


def test_what_its_import_raises_costs_one_line(site: Path) -> None:
    utils = site / "optimum/habana/transformers/modeling_utils.py"
    utils.write_text("raise IndexError('list index out of range')  # pip lists no plug-in\n")
    with pytest.warns(LanternWarning, match="IndexError"):
        assert not text.adapt()
    assert not text.adapt(), "and is told once"
