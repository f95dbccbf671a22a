"""Weights in fewer bits as the target: what is drawn, and what it costs, in every result."""

from __future__ import annotations

import json

import pytest
import torch

import lantern_accel
from lantern_accel.errors import ModelError, RequestError
from lantern_accel.files import cache_dir
from lantern_accel.generation import quantized
from lantern_accel.generation.quantized import next_tokens
from lantern_accel.nn.rounding import ROUNDINGS, round_weight
from lantern_accel.nn.transformer import Projection, rounded_copy

FOUR = ("red heart", "dog face", "blue fish", "red sea")
# Of the model's own examples, which tests give to it as well.
pytestmark = pytest.mark.filterwarnings("ignore:the prompt has")


@pytest.fixture(autouse=True)
def _few_images(monkeypatch, tmp_path):
    monkeypatch.setenv("LANTERN_ACCEL_CACHE", str(tmp_path))
    monkeypatch.setattr(quantized, "IMAGES", 4)


def load(model, weights="full", **options):
    said = options.pop("tell", lambda text: None)
    return lantern_accel.load(
        model, device="cpu", dtype="float32", weights=weights, tell=said, options=options
    )


def rounded_by_hand(pipeline, how):
    """Put the dense form of rounded weights in the place of a model's own."""
    for part in pipeline.model.target.modules():
        if isinstance(part, Projection):
            part.packed = None
            dense = round_weight(part.weight, ROUNDINGS[how]).dense(torch.float32)
            part.weight = torch.nn.Parameter(dense, requires_grad=False)


@pytest.mark.parametrize("native", ["auto", pytest.param("off", marks=pytest.mark.long)])
@pytest.mark.parametrize("how", ["int8", "int6", "int4"])
def test_the_rounded_model_is_the_one_whose_weights_are_dense(tiny_model, how, native, monkeypatch):
    with load(tiny_model, how, native=native) as pipeline:
        drawn = pipeline.generate(list(FOUR[:2]), seed=3, strategy="vanilla")
        tree = pipeline.generate(list(FOUR[:2]), seed=3, strategy="eagle")
    # A model that no backend has packed can be read and changed.
    monkeypatch.setattr("lantern_accel.models.bundle.pack", lambda *given, **more: None)
    with load(tiny_model, native="off") as pipeline:
        rounded_by_hand(pipeline, how)
        expected = pipeline.generate(list(FOUR[:2]), seed=3, strategy="vanilla")
        assert torch.equal(drawn.tokens, expected.tokens)
        expected = pipeline.generate(list(FOUR[:2]), seed=3, strategy="eagle")
        assert torch.equal(tree.tokens, expected.tokens)


@pytest.mark.long
def test_the_price_is_the_total_variation_along_the_rounded_models_images(tiny_model, monkeypatch):
    with load(tiny_model, "int4", native="off") as pipeline:
        quality_loss = pipeline.model.rounding
        sampling = pipeline.sampling()
        prompts = list(pipeline.model.family.examples(pipeline.model.manifest))
        drawn = [
            pipeline.decode_only(
                [prompts[i % len(prompts)]], quantized.PLAIN, sampling, quantized.SEED + i
            )[0].tokens
            for i in range(4)
        ]
    monkeypatch.setattr("lantern_accel.models.bundle.pack", lambda *given, **more: None)
    rows = {}
    for name in ("full", "int4"):
        with load(tiny_model, native="off") as pipeline, torch.inference_mode():
            if name != "full":
                rounded_by_hand(pipeline, name)
            rows[name] = [
                next_tokens(
                    pipeline.model,
                    pipeline.backend,
                    pipeline.conditions([prompts[i % len(prompts)]]),
                    drawn[i],
                    sampling,
                )
                for i in range(4)
            ]
    for i, said in enumerate(quality_loss.by_image):
        p, q = rows["full"][i].double(), rows["int4"][i].double()
        assert float(0.5 * (p - q).abs().sum(-1).mean()) == pytest.approx(said, abs=1e-6)
    assert quality_loss.total_variation_per_token > 0.001
    assert quality_loss.weights == "int4"


def test_every_result_says_what_rounding_costs(tiny_model, tmp_path, command):
    out = tmp_path / "run.json"
    made = command(
        "generate", "red heart", "-m", tiny_model, "-d", "cpu", "--dtype", "float32", "--seed", "3",
        "--weights", "int8",
        "-o", tmp_path / "a.png", "--stats", out, "--strategy", "vanilla",
    )  # fmt: skip
    assert made.returncode == 0, made.stderr
    stats = json.loads(out.read_text())
    quality_loss = stats["rounding"]
    assert quality_loss["weights"] == "int8"
    assert len(quality_loss["by_image"]) == 4
    mean = sum(quality_loss["by_image"]) / 4
    assert stats["total_variation_per_token"] == pytest.approx(mean)
    assert f"int8 weights: TV {mean:.4f} per token" in " ".join(made.stdout.split())
    assert "a mean" in made.stdout and "upper bound" not in made.stdout
    with load(tiny_model, "int8") as pipeline:
        result = pipeline.generate("red heart", seed=3, strategy="vanilla")
        assert f"TV {mean:.4f} per token" in result._repr_html_()
        assert result.stats.rounding.total_variation_per_token == pytest.approx(mean)
    with load(tiny_model) as pipeline:
        result = pipeline.generate("red heart", seed=3, strategy="vanilla")
        assert result.stats.rounding is None
        assert result.stats.total_variation_per_token == 0


def test_a_price_is_measured_once_and_an_interrupted_one_goes_on(tiny_model, monkeypatch):
    lines: list[str] = []
    stop = {"after": 2}

    def tell(text):
        lines.append(text)
        if len(lines) == stop["after"]:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        load(tiny_model, "int8", tell=tell)
    stop["after"] = -1
    with load(tiny_model, "int8", tell=tell) as pipeline:
        first = pipeline.model.rounding
    assert [line for line in lines if "quality loss" in line][2:] and len(lines) == 4
    with load(tiny_model, "int8", tell=tell) as pipeline:
        assert pipeline.model.rounding == first
    assert len(lines) == 4
    kept = next((cache_dir() / "rounding").glob("int8-*.json"))
    kept.write_text(kept.read_text().replace('"tokens"', '"token"'))  # damaged: measured anew
    with load(tiny_model, "int8", tell=tell) as pipeline:
        assert pipeline.model.rounding == first
    assert len(lines) == 8


def test_an_unknown_rounding_is_refused_before_anything_is_loaded(tiny_model, monkeypatch):
    def never(*given, **options):
        raise AssertionError("the model was loaded")

    monkeypatch.setattr("lantern_accel.models.bundle.load_model", never)
    with pytest.raises(RequestError, match="int5"):
        load(tiny_model, "int5")


def test_a_price_that_is_no_number_is_refused(tiny_model, monkeypatch):
    true = quantized.next_tokens

    def broken(*given):
        return true(*given) * float("nan")

    monkeypatch.setattr(quantized, "next_tokens", broken)
    with pytest.raises(ModelError, match="not a total variation"):
        load(tiny_model, "int8")


@pytest.mark.parametrize("native", ["auto", "off"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_copy_is_made_of_packed_weights_and_shares_the_rest(
    tiny_model, native, dtype, monkeypatch
):
    with lantern_accel.load(
        tiny_model, device="cpu", dtype=dtype, options={"native": native}
    ) as pipeline:
        target, backend = pipeline.model.target, pipeline.backend
        copy = rounded_copy(target, backend, ROUNDINGS["int8"])
        assert copy.tok_embeddings.weight is target.tok_embeddings.weight
        assert copy.norm.weight is target.norm.weight
        assert copy.ops is target.ops
        again = rounded_copy(copy, backend, ROUNDINGS["int8"])
        found = [part.packed.dense(torch.float32) for part in (copy.output, again.output)]
        assert target.output.packed is not copy.output.packed
    monkeypatch.setattr("lantern_accel.models.bundle.pack", lambda *given, **more: None)
    with lantern_accel.load(tiny_model, device="cpu", dtype=dtype) as pipeline:
        whole = pipeline.model.target.output.weight
        expected = round_weight(whole, ROUNDINGS["int8"]).dense(torch.float32)
    assert torch.equal(found[0], expected)
    torch.testing.assert_close(found[1], expected, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("native", ["auto", "off"])
@pytest.mark.parametrize("drafts", ["self:4", "self:5,int4,window=4"])
def test_drafts_of_the_models_own_weights_give_plain_decodings_tokens(tiny_model, native, drafts):
    with load(tiny_model, native=native) as pipeline:
        for temperature in (1.0, 0.0):
            asked = {"seed": 3, "num_images": 2, "batch_size": 2, "temperature": temperature}
            plain = pipeline.generate("red heart", strategy="vanilla", **asked)
            made = pipeline.generate("red heart", strategy="self", drafts=drafts, **asked)
            assert torch.equal(made.tokens, plain.tokens)
            assert made.stats.steps < plain.stats.steps
            assert len(pipeline.engines.capacity.copies) == 1
