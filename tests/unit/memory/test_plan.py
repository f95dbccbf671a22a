"""The memory plan: what it counts, what it advises, and that measured peaks agree with it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from support import loading
from support.engines import engine_of
from support.official import gpt_weights, write_sizes, write_trained

from lantern_accel.device.operations import TensorOps
from lantern_accel.device.plugins import open_backend
from lantern_accel.device.preferences import Preferences
from lantern_accel.errors import BackendError, RequestError, StrategyError
from lantern_accel.families.llamagen.model import LlamaGenConfig, LlamaGenGPT, LlamaGenManifest
from lantern_accel.families.registry import entry, family
from lantern_accel.memory.footprint import Footprint, LiveBytes, measure
from lantern_accel.memory.plan import Planner, parse_size, planner_for
from lantern_accel.models.bundle import bundled_models, read_manifest
from lantern_accel.nn.vq import VQConfig, VQModel
from lantern_accel.strategy.trees import parse_drafts
from lantern_accel.strategy.values import Sampling, Strategy

ROOT = Path(__file__).resolve().parents[3]
linux = pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="reads Linux's VmHWM")


@pytest.fixture(autouse=True)
def _own_cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LANTERN_ACCEL_CACHE", str(tmp_path_factory.getbasetemp() / "cache"))


@pytest.fixture(scope="module")
def medium(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A class-conditional model of 60M parameters, 64 tokens, with a tokenizer of real depth."""
    folder = tmp_path_factory.mktemp("medium")
    weights = gpt_weights(dim=512, layers=12, ffn=1536, vocab=16384, classes=1000)
    write_trained(folder / "c2i_medium.pt", weights)
    write_sizes(folder / "c2i_medium.json", n_head=8, block_size=64)
    torch.manual_seed(0)
    vq = VQModel(VQConfig(ch=64))
    write_trained(folder / "vq_ds16_c2i.pt", dict(vq.state_dict()))
    return folder


def child(script: str, *words: object, cache: Path) -> dict[str, Any]:
    done = subprocess.run(
        [sys.executable, str(ROOT / script), *map(str, words)],
        capture_output=True,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1", "LANTERN_ACCEL_CACHE": str(cache)},
    )
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    return found


@pytest.fixture(scope="module")
def kept(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A cache folder that the cases share: the first makes the neighbour table, others read it."""
    return tmp_path_factory.mktemp("kept")


#: Run twice: the first makes the neighbour table, and the second finds it.
RELAXED = ("lantern-emoji", "red heart", "lantern++", 4, "bfloat16")


@pytest.mark.long
@linux
@pytest.mark.parametrize(
    ("model", "prompt", "strategy", "batch", "dtype"),
    [
        RELAXED,
        RELAXED,
        # Nearly all that it takes is weights and what the process holds.
        ("lantern-emoji", "red heart", "vanilla", 1, "bfloat16"),
        # Pixels of 128 x 128 take more than decoding.
        ("medium", "3", "vanilla", 4, "float32"),
    ],
)
def test_the_measured_peak_is_within_a_tenth_of_the_plan(
    medium: Path, kept: Path, model: str, prompt: str, strategy: str, batch: int, dtype: str
) -> None:
    path = medium if model == "medium" else model
    found = child("tests/support/peak.py", path, prompt, strategy, batch, dtype, cache=kept)
    assert found["planned"] == pytest.approx(found["measured"], rel=0.1), found


@pytest.mark.long
@linux
def test_loading_holds_little_more_than_the_weights(tmp_path: Path) -> None:
    loading.write_checkpoint(tmp_path, "llamagen-b-256", 2)
    found = loading.measure(tmp_path)
    assert found["weights"] > 500e6
    assert found["peak"] - found["before"] < 1.3 * found["weights"]


def test_live_bytes_count_what_is_made_inside_and_forget_what_is_gone() -> None:
    before = torch.zeros(1000)
    with LiveBytes() as live:
        first = before + 1  # 4000 bytes
        first = first * 2  # 4000 more, then the first go
        before.add_(first)  # in place: nothing new
        view = first[:10]
        del first
        second = torch.zeros(250)  # 1000, while the view holds 4000
        del view, second
    assert live.peak == 8000


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_making_a_cache_takes_no_more_than_the_cache(dtype: torch.dtype) -> None:
    with open_backend("cpu") as backend:
        layout = backend.kv_layout(3, 2, 40, 4, 16, dtype)
        with LiveBytes() as live:
            cache = backend.allocate(layout)
        assert cache.first is not None
        assert live.peak == layout.nbytes + cache.first.nbytes
        assert not any(buffer.any() for buffer in cache.buffers)


def tiny() -> LlamaGenManifest:
    config = LlamaGenConfig(
        dim=32, n_layer=5, n_head=4, ffn_dim=48, vocab_size=64, grid=4, conditioning="class",
        prefix_length=1, num_classes=7,
    )  # fmt: skip
    vq = VQConfig(ch=32, ch_mult=(1, 1), z_channels=32, codebook_size=64, codebook_dim=8)
    return LlamaGenManifest(name="tiny", target=config, vq=vq)


def measured(sampling: Sampling, dtype: torch.dtype, ops: TensorOps | None = None) -> Footprint:
    """Return what three images of the tiny model take."""
    return measure(family("llamagen"), tiny(), Strategy(), sampling, batch=3, dtype=dtype, ops=ops)


@pytest.mark.parametrize("scale", [1.0, 4.0])
def test_weights_and_buffers_are_exact(scale: float) -> None:
    sampling = Sampling(cfg_scale=scale)
    found = measured(sampling, torch.float32)
    target = LlamaGenGPT(tiny().target)
    engine = engine_of((target, None), Strategy(), sampling, 3, ops=target.ops)
    assert found.buffers == engine.nbytes
    tables = (target.rope_cos, target.rope_sin)
    tensors = [*target.parameters(), *tables]
    assert found.weights["target"] == sum(t.numel() * t.element_size() for t in tensors)
    halved = measured(sampling, torch.bfloat16)
    assert halved.weights["vq"] == found.weights["vq"]
    assert halved.weights["target"] < found.weights["target"]


def test_a_table_of_noise_is_counted_where_it_is_made() -> None:
    sampling, target = Sampling(cfg_scale=4.0), LlamaGenGPT(tiny().target)
    table = 4 * 3 * target.config.num_tokens * target.config.vocab_size
    found = []
    for most in (table - 1, table):
        ops = TensorOps()
        ops.preferences = Preferences(noise_bytes=most)
        found.append(measured(sampling, torch.float32, ops))
        engine = engine_of((target, None), Strategy(), sampling, 3, ops=ops)
        assert found[-1].buffers == engine.nbytes
    assert found[1].buffers - found[0].buffers == table
    # What a piece of it takes on the way is the prefill's.
    assert found[1].workspace["prefill"] >= found[0].workspace["prefill"]
    assert found[1].workspace["prefill"] >= 2 * table


@pytest.mark.long
def test_the_largest_batch_is_the_largest() -> None:
    planner = Planner(tiny(), dtype=torch.float32, runtime=0)
    strategy, sampling = Strategy(), Sampling(cfg_scale=4.0)
    capacity = 2_000_000
    most = planner.largest_batch(strategy, sampling, capacity)
    assert planner.plan(strategy, sampling, batch=most).peak <= capacity
    assert planner.plan(strategy, sampling, batch=most + 1).peak > capacity
    assert planner.largest_batch(strategy, sampling, 1000) == 0


def published(name: str, capacity: float, **options: Any) -> Planner:
    one = entry(name)
    return Planner(
        family(one.family).from_entry(one), dtype=torch.bfloat16, capacity=int(capacity), **options
    )


@pytest.mark.long
def test_advice_names_what_would_fit() -> None:
    planner = published("llamagen-t2i-stage1", 4e9, text_bytes=4 * 1_223_527_424)
    strategy, sampling = planner.strategy("lantern++"), planner.manifest.defaults.sampling
    plan = planner.plan(strategy)
    assert (plan.strategy, plan.nodes, plan.fits) == ("lantern++", 58, False)
    tips = planner.advice(plan, strategy, sampling)
    assert len(tips) == 1 and "--use text-device=cpu" in tips[0]
    host = replace(planner, text_device="cpu")
    on_host = host.plan(strategy)
    assert on_host.fits and "text" not in on_host.workspace
    assert host.advice(on_host, strategy, sampling) == []
    host = replace(host, dtype=torch.float32)
    wide = host.plan(strategy, batch=2)
    assert any("bfloat16" in tip for tip in host.advice(wide, strategy, sampling))


def test_the_text_encoder_counts_in_the_dtype_it_runs_in() -> None:
    planner = published("llamagen-t2i-stage1", 24e9, text_bytes=4_000)
    plain = planner.strategy("vanilla")
    assert planner.plan(plain).workspace["text"] == 2_000
    assert replace(planner, dtype=torch.float32).plan(plain).workspace["text"] == 4_000


@pytest.mark.long
def test_a_window_by_a_draft_head_is_planned_with_it() -> None:
    manifest = read_manifest(bundled_models()["lantern-emoji"])
    tree = parse_drafts("window:4,head")
    by_head = Strategy(name="scd", drafts=tree, coupling="invariant")
    found = measure(
        family(manifest.family), manifest, by_head, Sampling(), batch=2, dtype=torch.bfloat16
    )
    config = manifest.draft_head
    assert found.weights["draft_head"] > 4 * config.rank * config.vocab_size


def test_the_largest_models_and_a_tree_of_60_nodes_fit_a_card_of_24_gb() -> None:
    planner = published("llamagen-t2i-stage2", 24e9, text_bytes=4 * 1_223_527_424)
    strategy = planner.strategy("lantern", drafts="dynamic:10,4,60")
    assert planner.plan(strategy).fits
    assert published("llamagen-3b-384", 24e9).plan().fits


@pytest.mark.parametrize(
    ("text", "size"), [("24GB", 24e9), ("24 GiB", 24 * 2**30), ("512MB", 512e6), ("7000000", 7e6)]
)
def test_sizes_as_people_write_them(text: str, size: float) -> None:
    assert parse_size(text) == size


def test_what_cannot_be_planned_is_told() -> None:
    with pytest.raises(RequestError, match="is not a size"):
        parse_size("much")
    with pytest.raises(BackendError, match="no device here and no profile"):
        planner_for("lantern-emoji", device="gpu-of-the-future")
    with pytest.raises(BackendError, match="float8"):
        planner_for("lantern-emoji", dtype="float8")
    with pytest.raises(StrategyError, match="no drafter"):
        Planner(tiny(), dtype=torch.float32).strategy("eagle")
    planner = planner_for("lantern-emoji", device="cpu")
    assert planner.capacity and planner.runtime_measured
