"""``lantern-accel evaluate --suite`` on tiny models: drawn, stopped, continued, refused, written."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor, nn

import lantern_accel
from lantern_accel.errors import DataError, RequestError
from lantern_accel.generation.pipeline import Pipeline
from lantern_accel_profiles.evaluation.run import Evaluator
from lantern_accel_profiles.evaluation.schema import Evaluation, EvaluationSettings, Suite
from lantern_accel_profiles.evaluation.suite import judges
from lantern_accel_profiles.evaluation.suite.captions import read_captions
from lantern_accel_profiles.evaluation.suite.generation import SuiteRequest, choose_strategies
from lantern_accel_profiles.evaluation.suite.networks import Unavailable
from lantern_accel_profiles.evaluation.suite.protocol import Preprocessing, Protocol
from lantern_accel_profiles.quality.interval import Interval

PROMPTS = ("red heart", "dog face", "a blue fish")
RULE = Preprocessing(crop="centre square", size=16, to_network="network")
TINY = Protocol(
    name="tiny",
    summary="random networks",
    source="a test",
    caption="first",
    count=8,
    network="tiny",
    preprocessing=RULE,
    manifold="tiny",
    manifold_preprocessing=RULE,
    is_splits=2,
    clip="tiny",
    clip_preprocessing=RULE,
)


class TinyNetwork:
    """A random network in the place of Inception: six features, five classes."""

    name, side = "a tiny random network", None

    def __init__(self) -> None:
        torch.manual_seed(1)
        self.net = nn.Sequential(nn.AdaptiveAvgPool2d(4), nn.Flatten(), nn.Linear(48, 6), nn.Tanh())
        self.head = nn.Linear(6, 5)

    def __call__(self, images: Tensor) -> tuple[Tensor, Tensor | None]:
        found = self.net(images.float() / 255)
        return found, self.head(found)


class TinyScorer:
    """Words and brightness in the place of CLIP."""

    name, note = "a tiny scorer", ""

    def __call__(self, images: Sequence[Image.Image], prompts: Sequence[str]) -> list[float]:
        pairs = zip(images, prompts, strict=True)
        return [float(np.asarray(image).mean()) + len(prompt) for image, prompt in pairs]


@pytest.fixture(autouse=True)
def _judges_that_are_here(monkeypatch: pytest.MonkeyPatch) -> None:
    def load(key: str, *_: Any) -> TinyScorer:
        if key == "hpsv2":
            raise Unavailable("open_clip is not installed")
        return TinyScorer()

    monkeypatch.setenv("HF_HUB_OFFLINE", "1")  # where a command is a process of its own
    monkeypatch.setattr(judges, "load_network", lambda *_: TinyNetwork())
    monkeypatch.setattr(judges, "load_scorer", load)


@pytest.fixture
def real(tmp_path: Path) -> Path:
    """Six captioned pictures, as COCO lists them."""
    folder = tmp_path / "val2017"
    folder.mkdir()
    rng = np.random.default_rng(0)
    lines: dict[str, list[dict[str, Any]]] = {"images": [], "annotations": []}
    for i in range(6):
        noise = rng.integers(0, 255, (20, 24, 3), dtype=np.uint8)
        Image.fromarray(noise).convert("L" if i == 3 else "RGB").save(folder / f"{i}.png")
        lines["images"].append({"id": i, "file_name": f"{i}.png"})
        caption = "a blue fish in the sea" if i == 5 else PROMPTS[i % 3]  # longer than the prefix
        lines["annotations"].append({"id": i, "image_id": i, "caption": caption})
    (tmp_path / "captions.json").write_text(json.dumps(lines))
    return folder


def request(pipeline: Pipeline, real: Path, **changes: Any) -> SuiteRequest:
    sampling = pipeline.sampling()
    words = changes.pop("words", ["vanilla", "lantern:k=4,delta=0.5"])
    strategies = choose_strategies(pipeline, words, sampling, 2, "red heart")
    values: dict[str, Any] = {
        "name": "coco",
        "protocol": TINY,
        "captioned": read_captions(real.parent / "captions.json", real),
        "prompts_source": "captions.json",
        "strategies": strategies,
        "sampling": sampling,
        "work": real.parent / "pictures",
        "chunk": 2,
        "batch": 2,
        "resamples": 6,
    }
    return SuiteRequest(**(values | changes))


def without_times(suite: Suite | None) -> dict[str, Any]:
    """Return all of a table but what a clock said."""
    assert suite is not None
    found = suite.model_dump(mode="json")
    for row in found["rows"]:
        del row["details"], row["speed"]["seconds_per_image"], row["speed"]["speedup"]
    return found


def run(pipeline: Pipeline, out: Path, made: SuiteRequest) -> Evaluation:
    return Evaluator(pipeline, out, EvaluationSettings.quick()).run((), made)


@pytest.fixture
def pipeline(tiny_model: Path):
    with lantern_accel.load(tiny_model, device="cpu", dtype="float32") as opened:
        yield opened


@pytest.mark.long
def test_a_suite_that_was_killed_three_times_ends_with_the_same_table(
    pipeline, real, tmp_path, monkeypatch
):
    whole = run(pipeline, tmp_path / "a.json", request(pipeline, real)).suite
    draw, calls = Pipeline.generate, []

    def dies(self: Pipeline, *words: Any, **named: Any) -> Any:
        calls.append(named["seed"])
        if len(calls) in (2, 5, 7):
            raise KeyboardInterrupt
        return draw(self, *words, **named)

    monkeypatch.setattr(Pipeline, "generate", dies)
    out = tmp_path / "b.json"
    for _ in range(3):
        with pytest.raises(KeyboardInterrupt):
            run(pipeline, out, request(pipeline, real, work=tmp_path / "again"))
    stopped = run(pipeline, out, request(pipeline, real, work=tmp_path / "again")).suite
    assert without_times(stopped) == without_times(whole)
    assert len(calls) == 2 * 3 + 3  # every chunk once, and the three that were lost
    assert stopped is not None
    exact, relaxed = stopped.rows
    assert [row.label for row in stopped.rows] == ["vanilla", "lantern:k=4,delta=0.5"]
    assert stopped.prompts_cut == 1
    assert relaxed.strategy.acceptance.model_dump()["delta"] == 0.5
    assert isinstance(exact.speed.total_variation_per_token, Interval)
    assert exact.speed.total_variation_per_token.value == 0
    for row in stopped.rows:
        measured = {key for key, value in row.metrics.items() if isinstance(value, Interval)}
        expected = {"fid", "fid_infinity", "kid", "inception_score", "precision", "recall", "clip"}
        assert measured == expected
    assert stopped.reference["not_rgb"] == {"grey": 1}
    assert "open_clip" in str(exact.metrics["hpsv2"])
    again = run(pipeline, out, request(pipeline, real, work=tmp_path / "again")).suite
    assert without_times(again) == without_times(whole)
    assert len(calls) == 9


def test_every_strategy_draws_the_same_prompts_from_the_same_seeds(pipeline, real, tmp_path):
    found = run(pipeline, tmp_path / "a.json", request(pipeline, real, words=["vanilla"])).suite
    assert found is not None
    folders = sorted(path for path in (tmp_path / "pictures").iterdir() if path.is_dir())
    vanilla = next(path for path in folders if path.name.startswith("vanilla"))
    made = pipeline.generate(
        ["red heart", "dog face"], strategy="vanilla", seed=0, batch_size=2
    ).images
    assert [np.asarray(Image.open(vanilla / f"{i:06d}.png")).tolist() for i in range(2)] == [
        np.asarray(image).tolist() for image in made
    ]
    later = pipeline.generate(
        ["a blue fish", "red heart"], strategy="vanilla", seed=2, batch_size=2
    ).images
    assert np.array_equal(Image.open(vanilla / "000002.png"), later[0])


def test_images_of_another_seed_or_model_are_their_own(pipeline, real, tmp_path, undrafted_model):
    def ask(opened: Pipeline, out: str, **changes: Any) -> dict[str, str]:
        run(opened, tmp_path / out, request(opened, real, words=["vanilla"], **changes))
        images = sorted((tmp_path / "pictures").glob("*/000000.png"))
        return {one.parent.name: hashlib.sha256(one.read_bytes()).hexdigest() for one in images}

    first = ask(pipeline, "a.json")
    both = ask(pipeline, "b.json", seed=1)
    assert len(both) == len(set(both.values())) == 2 and first.items() < both.items()
    with lantern_accel.load(undrafted_model, device="cpu", dtype="float32") as other:
        assert len(ask(other, "c.json")) == 3
    with pytest.raises(RequestError, match=r"suite .* its chunk is 2, not 4; name another file"):
        ask(pipeline, "a.json", chunk=4)


@pytest.mark.long
def test_pictures_from_elsewhere_are_measured_next_to_the_others(
    command, pipeline, real, tmp_path, tiny_model
):
    whole = run(pipeline, tmp_path / "a.json", request(pipeline, real, words=["vanilla"])).suite
    place = next(path for path in (tmp_path / "pictures").iterdir() if path.is_dir())
    other = tmp_path / "fleet"
    other.mkdir()
    for i in range(6):
        (other / f"image_{i}.png").write_bytes((place / f"{i:06d}.png").read_bytes())
    made = request(pipeline, real, words=["vanilla"], pictures={"fleet": other})
    found = run(pipeline, tmp_path / "a.json", made).suite
    assert whole is not None
    assert found is not None
    assert found.rows[1].strategy is None
    assert found.rows[1].metrics == found.rows[0].metrics == whole.rows[0].metrics
    assert found.rows[1].speed.speedup == "not measured: the images were generated elsewhere"
    (other / "image_5.png").unlink()
    with pytest.raises(DataError, match="has 5 images, and the suite 6 prompts"):
        run(pipeline, tmp_path / "a.json", made)
    done = command(
        "evaluate", "--suite", "coco", "--captions", real.parent / "captions.json", "--images", real,
        "--write-prompts", tmp_path / "prompts.jsonl",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    lines = [json.loads(line) for line in (tmp_path / "prompts.jsonl").read_text().splitlines()]
    assert lines[1] == {"id": "000001", "prompt": "dog face"}
    done = command("generate", "--prompts", tmp_path / "prompts.jsonl", "--model",
                   tiny_model, "-o", tmp_path / "here", "--device", "cpu")  # fmt: skip
    assert done.returncode == 0, done.stderr
    made = request(pipeline, real, words=["vanilla"], pictures={"here": tmp_path / "here"})
    found = run(pipeline, tmp_path / "a.json", made).suite
    assert found is not None
    assert [row.label for row in found.rows] == ["vanilla", "here", "fleet"]


def test_prompts_alone_get_scores_only(command, tiny_model, tmp_path):
    (tmp_path / "prompts.txt").write_text("\n".join(PROMPTS[:2]))
    done = command(
        "evaluate", "--prompts", tmp_path / "prompts.txt", "--model", tiny_model, "--strategy",
        "vanilla", "-o", tmp_path / "p.json", "--device", "cpu",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "there are no real images; --suite coco takes them" in done.stdout


def test_classes_are_measured_against_adm_s_batch(class_model, tmp_path):
    rng = np.random.default_rng(2)
    np.savez(tmp_path / "adm.npz", arr_0=rng.integers(0, 255, (9, 16, 16, 3), dtype=np.uint8))
    from lantern_accel_profiles.evaluation.suite.captions import class_prompts

    with lantern_accel.load(class_model, device="cpu", dtype="float32") as pipeline:
        sampling = pipeline.sampling()
        made = SuiteRequest(
            name="imagenet",
            protocol=TINY,
            captioned=class_prompts(7, 8, 8),
            prompts_source="class ids",
            strategies=choose_strategies(pipeline, ["vanilla"], sampling, 4, 0),
            sampling=sampling,
            work=tmp_path / "pictures",
            chunk=4,
            batch=4,
            resamples=4,
            reference=tmp_path / "adm.npz",
        )
        row = run(pipeline, tmp_path / "c.json", made).suite
    assert row is not None
    assert isinstance(row.rows[0].metrics["precision"], Interval)
    assert row.rows[0].metrics["clip"] == "not measured: class ids are not text"
    assert row.reference["source"] == "adm.npz"
    assert row.published == []


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--suite", "coc"], "did you mean coco"),
        (["--suite", "coco"], "--captions is missing"),
        (["--suite", "coco", "--captions", "CAPTIONS"], "--images is missing"),
        (["--suite", "coco", "--images", "REAL"], "--captions is missing"),
        (["--suite", "imagenet"], "generates from text; use --suite coco"),
        (["--suite", "imagenet", "--images", "REAL"], "leave --images out"),
        (["COCO", "--pictures", "x"], "takes NAME=FOLDER"),
        (["COCO", "--strategy", "vanilla", "--pictures", "x=gone"], "there is no such folder"),
        (["--captions", "CAPTIONS"], "belong to --suite"),
        (["COCO", "--count", "9"], "asks for 9 prompts, and there are 6"),
        (["COCO", "--protocol", "lantren"], "did you mean lantern"),
        (["COCO", "--metric-weights", "clip"], "takes NAME=PATH"),
        (["COCO", "--grid", "a.png"], "ask for one of them"),
        (["COCO", "--strategy", "lantren"], "did you mean"),
        (["COCO", "--strategy", "lantern:k"], "cannot be read; write NAME:SETTING=VALUE"),
        (["COCO", "--strategy", "eagle:k=3"], "has no k"),
        (["COCO", "--strategy", ","], "no strategy is named"),
        (["COCO", "--strategy", "vanilla,lantern", "--strategy", "lantern:k=100000"], "k"),
        (["COCO", "-o", "table.md"], "is the name of a table; end it in .json"),
        (["--prompts", "gone.txt"], "gone.txt is not a file of prompts"),
        (["--part", "likelyhood"], "did you mean likelihood"),
        (["--images", "REAL"], "captions.jsonl is not there"),
    ],
)
def test_bad_input_is_refused_in_a_sentence_before_any_picture(
    command, tiny_model, real, tmp_path, words, message, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    captions = str(real.parent / "captions.json")
    known = {"COCO": ["--suite", "coco", "--captions", captions, "--images", str(real)]}
    known |= {"REAL": [str(real)], "CAPTIONS": [captions]}
    typed = [one for word in words for one in known.get(word, [word])]
    done = command("evaluate", "--model", tiny_model, "--device", "cpu", *typed)
    assert done.returncode == 2
    assert message in " ".join(done.stderr.split())
    assert not list(tmp_path.rglob("000000.png"))
