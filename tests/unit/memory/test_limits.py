"""What fits on a device is told before it is made, and errors of a device keep what was finished."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from PIL import Image
from support.models import write_tiny_model

import lantern_accel
from lantern_accel.cli import main
from lantern_accel.device.backend import Backend, MemoryUse, Support
from lantern_accel.device.capture import Replay
from lantern_accel.device.plugins import open_backend
from lantern_accel.errors import BackendError, DeviceLostError
from lantern_accel.generation.pipeline import Pipeline
from lantern_accel.memory.limits import weights_bytes
from lantern_accel.memory.plan import Planner, most_images
from lantern_accel.models.locate import find_model
from lantern_accel.records import format_bytes
from lantern_accel.strategy.values import STRATEGIES

MODEL = find_model("lantern-emoji")


@pytest.fixture
def small(tmp_path: Path) -> Iterator[Pipeline]:
    """A model whose images have 16 tokens."""
    folder = write_tiny_model(tmp_path / "tiny")
    with lantern_accel.load(folder, device="cpu", dtype="float32") as loaded:
        yield loaded


def limit(monkeypatch: pytest.MonkeyPatch, **use: int) -> None:
    monkeypatch.setattr(
        type(open_backend("cpu")), "memory", lambda self: MemoryUse(limit=2**34, **use)
    )


def planner(pipeline: Pipeline) -> Planner:
    return Planner(pipeline.model.manifest, dtype=torch.float32, ops=pipeline.backend)


@pytest.mark.long
def test_buffers_are_counted_without_making_them(small: Pipeline) -> None:
    sampling = small.sampling()
    for number, name in enumerate(STRATEGIES):
        batch = (1, 3)[number % 2]
        strategy = small.strategy(name, k=8 if "lantern" in name else None)
        counted = planner(small).plan(strategy, sampling, batch=batch).buffers
        assert counted == small.engine(batch, strategy, sampling).engine.nbytes


def test_weights_are_counted_before_they_are_read() -> None:
    wide, narrow = weights_bytes(MODEL, torch.float32), weights_bytes(MODEL, torch.bfloat16)
    with lantern_accel.load(device="cpu", dtype="float32") as pipeline:
        model = pipeline.model
        parts = [model.target, model.drafter]
        head = model.target.draft_head
        model.target.draft_head = None  # which is in float32
        computed = sum(p.numel() for part in parts for p in part.state_dict().values())
        rest = 4 * sum(p.numel() for p in head.parameters())
        rest += 4 * sum(p.numel() for p in model.vq.state_dict().values())
        for part in (*parts, model.vq):  # tables stay as they are
            weights = part.state_dict()
            rest += sum(b.nbytes for name, b in part.named_buffers() if name not in weights)
    assert wide == 4 * computed + rest
    assert narrow == 2 * computed + rest


def test_the_largest_batch_is_found_whatever_memory_grows_like() -> None:
    grows = {
        "in proportion": lambda n: 100 + 7 * n,
        "by the larger of two phases": lambda n: max(500 + 2 * n, 20 * n),
        "in steps": lambda n: 64 * (n // 8) + 3,
        "not at all": lambda n: 50,
    }
    for name, needed in grows.items():
        for limit in (1, 2, 5, 64, 1024):
            for free in (10, 49, 107, 520, 3000, 10**6):
                most = max((n for n in range(1, limit + 1) if needed(n) <= free), default=0)
                calls = []

                def counted(n: int, needed=needed, calls=calls) -> int:
                    calls.append(n)
                    return needed(n)

                assert most_images(counted, free, limit) == most, (name, limit, free)
                if name == "in proportion":
                    assert len(set(calls)) <= 5


def test_free_memory_is_what_the_device_says_or_what_is_left() -> None:
    assert MemoryUse().left is None
    assert MemoryUse(in_use=3, limit=10).left == 7
    assert MemoryUse(in_use=3, limit=10, free=2).left == 2


def test_a_model_that_does_not_fit_is_told_before_it_is_loaded(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    between = (weights_bytes(MODEL, torch.float32) + weights_bytes(MODEL, torch.bfloat16)) // 2
    limit(monkeypatch, free=between)
    with pytest.raises(BackendError) as caught:
        lantern_accel.load(device="cpu", dtype="float32")
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        assert format_bytes(weights_bytes(MODEL, dtype)) in str(caught.value)
    assert f"{format_bytes(between)} free of 16.00 GiB; use the dtype bfloat16" in str(caught.value)
    limit(monkeypatch, free=1000)
    with pytest.raises(BackendError, match="use a device with more memory, or end other"):
        lantern_accel.load(device="cpu")


@pytest.mark.long
def test_a_batch_that_does_not_fit_names_the_one_that_does(
    small: Pipeline, monkeypatch: pytest.MonkeyPatch
) -> None:
    pipeline = small
    strategy, sampling = pipeline.strategy(), pipeline.sampling()

    def need(batch: int) -> int:
        return pipeline.engines.capacity.count_bytes(batch, strategy, sampling)

    limit(monkeypatch, free=need(5) + 1)
    pipeline.generate("dog face", num_images=5, batch_size=5, seed=0)
    with pytest.raises(BackendError, match=r"a batch of 16 takes .* free of .*; a batch of 5 fits"):
        pipeline.generate("dog face", num_images=16, batch_size=16, seed=0)
    limit(monkeypatch, free=need(1) - 1)
    with pytest.raises(BackendError, match="not even one fits; use a smaller model"):
        pipeline.generate("dog face", num_images=2, batch_size=2, seed=0)


def test_kept_engines_make_room_for_a_new_one(
    small: Pipeline, monkeypatch: pytest.MonkeyPatch
) -> None:
    pipeline = small
    strategy, sampling = pipeline.strategy("vanilla"), pipeline.sampling()
    whole = pipeline.engines.capacity.count_bytes(3, strategy, sampling)

    def memory(backend: Backend) -> MemoryUse:
        used = sum(ready.engine.nbytes for ready in pipeline.engines.ready)
        return MemoryUse(in_use=used, limit=whole, free=whole - used)

    monkeypatch.setattr(type(pipeline.backend), "memory", memory)
    for batch in (1, 2, 1):
        pipeline.engine(batch, strategy, sampling)
    assert len(pipeline.engines.ready) == 2
    pipeline.engine(3, strategy, sampling)
    assert [r.engine.geometry.batch for r in pipeline.engines.ready] == [3]


def test_batches_have_the_rows_of_captured_steps_where_these_fit(
    small: Pipeline, monkeypatch: pytest.MonkeyPatch
) -> None:
    capacity, kind = small.engines.capacity, type(small.backend)
    asked = small.strategy("vanilla"), small.sampling()
    monkeypatch.setattr(kind, "support", lambda self, what: Support(False))
    assert capacity.batches(7, 3, *asked) == {3: 3, 1: 1}
    assert capacity.batches(6, 3, *asked) == {3: 3}
    monkeypatch.setattr(kind, "support", lambda self, what: Support(True))
    assert capacity.batches(7, 3, *asked) == {3: 4, 1: 1}
    monkeypatch.setattr(capacity, "fits", lambda *given: False)
    assert capacity.batches(7, 3, *asked) == {3: 3, 1: 1}
    monkeypatch.setattr(capacity, "largest", lambda *given: 0)
    assert capacity.batches(7, None, *asked) == {1: 1}, "an engine that does not fit says so"


class Dies(Replay):
    """A step that ends with an error of the device after some calls."""

    left = 0

    def __call__(self) -> None:
        type(self).left -= 1
        if type(self).left < 0:
            raise RuntimeError("the device is gone")
        super().__call__()


@pytest.fixture
def dying(monkeypatch: pytest.MonkeyPatch) -> None:
    kind = type(open_backend("cpu"))
    monkeypatch.setattr(kind, "capture", lambda self, step, name="step": Dies(step))
    monkeypatch.setattr(
        kind,
        "explain",
        lambda self, error: DeviceLostError("lost") if "gone" in str(error) else None,
    )


def test_images_finished_before_a_device_was_lost_are_kept(
    small: Pipeline, dying: None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    calls = 2 * (1 + 15) + 1  # a prefill and 15 steps an image, and the third image's prefill
    Dies.left = calls
    with pytest.raises(DeviceLostError) as caught:
        small.generate("dog face", strategy="vanilla", num_images=4, batch_size=1, seed=3)
    assert len(caught.value.images) == 2
    Dies.left = calls
    out = tmp_path / "out" / "dog.png"
    out.parent.mkdir()
    words = f"--model {tmp_path / 'tiny'} --strategy vanilla --num-images 4 --batch 1 --seed 3"
    assert main(["generate", "dog face", *words.split(), "-d", "cpu", "-o", str(out)]) == 4
    said = capsys.readouterr().err
    assert "kept:" in said and "error: lost" in said
    for index in range(2):
        Image.open(out.parent / f"dog-{index}.png").load()
    assert len(list(out.parent.glob("*.png"))) == 2


def test_other_errors_pass_as_they_are(small: Pipeline, dying: None) -> None:
    Dies.left = 10**6

    def progress(known: int, total: int) -> None:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        small.generate("pizza", on_progress=progress, seed=1, strategy="vanilla")
