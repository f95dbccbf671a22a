"""Golden sets through the public loaders: the recorded weights on disk in the official layouts."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from support.golden import golden, golden_metadata
from support.official import (
    drafter_config,
    gpt_weights,
    hugging_face,
    recorded_captions,
    vq_weights,
    write_drafter,
    write_shards,
    write_sizes,
    write_trained,
)
from torch.testing import assert_close

import lantern_accel
from lantern_accel.generation.pipeline import Pipeline
from lantern_accel.nn.vq import pixels_to_uint8

CLOSE = {"rtol": 0.0, "atol": 1e-4}


def load(path: Path, **parts: object) -> Pipeline:
    return lantern_accel.load(path, device="cpu", dtype="float32", **parts)  # type: ignore[arg-type]


@pytest.fixture(autouse=True)
def _own_cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LANTERN_ACCEL_CACHE", str(tmp_path_factory.getbasetemp() / "cache"))


@pytest.fixture(scope="module")
def classes(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("pretrained_models")
    write_trained(folder / "c2i_golden.pt", golden("llamagen_c2i/weights"))
    write_trained(folder / "vq_ds16_c2i.pt", vq_weights(128))
    write_sizes(folder / "c2i_golden.json", n_head=4, block_size=64)
    return folder


@pytest.mark.parametrize(
    ("name", "scale", "interval"),
    [("greedy_cfg4", 4.0, -1), ("greedy_cfg4_interval10", 4.0, 10), ("greedy_cfg1", 1.0, -1)],
)
def test_class_tokens(classes: Path, name: str, scale: float, interval: int) -> None:
    io = golden("llamagen_c2i/io")
    with load(classes) as pipeline:
        result = pipeline.generate(
            io["class_ids"].tolist(),
            strategy="vanilla", temperature=0, cfg_scale=scale, cfg_interval=interval,
        )  # fmt: skip
    assert torch.equal(result.tokens, io[name].long())


@pytest.fixture(scope="module")
def texts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("pretrained_models")
    write_trained(folder / "t2i_golden.pt", golden("llamagen_t2i/weights"), "module")
    write_trained(folder / "vq_ds16_t2i.pt", vq_weights(128))
    write_sizes(folder / "t2i_golden.json", n_head=4, block_size=64)
    return folder


@pytest.mark.parametrize("padded", ["left", "right", "all features seen"])
def test_text_tokens(texts: Path, tmp_path: Path, padded: str) -> None:
    io, file = golden("llamagen_t2i/io"), tmp_path / "captions.safetensors"
    features, mask = recorded_captions(padded)
    if padded.startswith("all"):
        features, mask = io["cond_embeds"], torch.ones_like(mask)
    save_file({"embeddings": features, "mask": mask.to(torch.uint8)}, file)
    with load(texts, embeddings=file) as pipeline:
        conditions = pipeline.conditions(["a", "b", "c"])
        assert torch.equal(conditions.condition, io["cond_embeds"])
        result = pipeline.generate(
            ["a", "b", "c"], strategy="vanilla", temperature=0, cfg_scale=7.5
        )
    expected = io["greedy_cfg7p5_nomask" if padded.startswith("all") else "greedy_cfg7p5"]
    assert torch.equal(result.tokens, expected.long())


def test_lanterns_converted_layout_in_shards(tmp_path: Path) -> None:
    """``ckpts/llamagen``: a Hugging Face folder, the VQ file beside it."""
    io = golden("llamagen_t2i/io")
    renamed = hugging_face(golden("llamagen_t2i/weights"))
    assert sorted(renamed) == json.loads(golden_metadata("llamagen_t2i/weights")["hf_keys"])
    root = tmp_path / "ckpts" / "llamagen"
    model = write_shards(root / "LlamaGen-T2I", renamed, 3)
    sizes = {"num_attention_heads": 4, "hidden_size": 64, "num_hidden_layers": 3, "block_size": 64}
    write_sizes(model / "config.json", **sizes, input_type="t2i", rms_norm_eps=1e-5)
    write_trained(root / "vq_ds16_t2i.pt", vq_weights(128))
    file = tmp_path / "captions.safetensors"
    features, mask = recorded_captions()
    save_file({"embeddings": features, "mask": mask}, file)
    for path in (model, root):  # the model's folder, or the one above with a single model
        with load(path, embeddings=file) as pipeline:
            result = pipeline.generate(
                ["a", "b", "c"], strategy="vanilla", temperature=0, cfg_scale=7.5
            )
        assert torch.equal(result.tokens, io["greedy_cfg7p5"].long())


def test_image_tokenizer(tmp_path: Path) -> None:
    io = golden("llamagen_vq/io")
    codes = golden("llamagen_vq/weights")["quantize.embedding.weight"].shape[0]
    write_trained(tmp_path / "c2i_any.pt", gpt_weights(vocab=codes, classes=3), None)
    write_sizes(tmp_path / "c2i_any.json", n_head=4, block_size=16)
    harmless = {"quantize.codebook_used": torch.zeros(65536)}
    write_trained(tmp_path / "vq_ds16_c2i.pt", {**golden("llamagen_vq/weights"), **harmless})
    with load(tmp_path) as pipeline:
        vq = pipeline.model.vq
        assert vq.config.downsample == 16 and vq.config.codebook_size == codes
        assert torch.equal(vq.encode(io["image"]), io["image_codes"])
        assert_close(vq.encode_latents(io["image"]), io["enc_prequant"], **CLOSE)
        codes = io["codes"].view(2, 4, 4)
        assert_close(vq.lookup(codes), io["zq"], rtol=0.0, atol=1e-6)
        assert_close(vq.decode(codes), io["pixels"], **CLOSE)
        drawn = pipeline.pixels(io["codes"])
    near = (drawn.int() - io["pixels_uint8_hwc"].int()).abs()
    assert near.max() <= 1 and (near > 0).float().mean() < 1e-3
    assert torch.equal(pixels_to_uint8(io["pixels"]), io["pixels_uint8_hwc"])


def test_published_drafter(tmp_path: Path) -> None:
    """The recorded drafter in LANTERN's layout, beside a target of its sizes."""
    io, weights = (
        golden("lantern_drafters/llamagen_io"),
        golden("lantern_drafters/llamagen_weights"),
    )
    dim, vocab = 64, 128
    write_trained(tmp_path / "t2i.pt", gpt_weights(dim=dim, vocab=vocab))
    write_sizes(tmp_path / "t2i.json", n_head=4, block_size=256)
    write_trained(tmp_path / "vq_ds16_t2i.pt", vq_weights(vocab))
    config = drafter_config("t2i", dim=dim, ffn=176, vocab=vocab)
    write_drafter(tmp_path / "trained_drafters" / "llamagen_drafter", weights, config)
    with load(tmp_path) as pipeline:
        drafter = pipeline.model.drafter
        assert (drafter.config.norm_eps, drafter.config.mask_padding) == (1e-6, False)
        assert (drafter.config.prefix_length, drafter.config.grid) == (119, 16)
        assert torch.equal(drafter.embed_tokens.weight, weights["embed_tokens.weight"])
        codes = io["input_ids"][:, 119:]  # the drafter is fed code 0 for each place of the prompt
        out = drafter.forward_image(None, codes, io["hidden_states"])
    assert_close(out, io["out_hidden"], **CLOSE)


@pytest.fixture(scope="module")
def lantern(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """LANTERN's recorded target, drafter and codebook."""
    root = tmp_path_factory.mktemp("ckpts") / "llamagen"
    target = golden("lantern/target")
    write_shards(root / "LlamaGen-T2I", hugging_face(target), 1)
    sizes = {"num_attention_heads": 4, "block_size": 256, "input_type": "t2i", "rms_norm_eps": 1e-5}
    write_sizes(root / "LlamaGen-T2I" / "config.json", **sizes)
    codebook = {"quantize.embedding.weight": golden("lantern/proximity")["codebook_raw"]}
    write_trained(root / "vq_ds16_t2i.pt", {**vq_weights(1024), **codebook})
    drafter = dict(golden("lantern/drafter"))
    # What the official training left there: the embedding came from the head.
    drafter["embed_tokens.weight"] = target["output.weight"]
    said = drafter_config("t2i", dim=128, ffn=512, vocab=1024) | {"rms_norm_eps": 1e-5}
    write_drafter(root / "trained_drafters" / "llamagen_drafter", drafter, said)
    io = golden("lantern/target_io")
    for cap in ("cap0", "cap1"):
        features, mask = (io[f"{cap}.{name}"][None] for name in ("cond_left_padded", "mask_left"))
        captions = {"embeddings": features.contiguous(), "mask": mask.contiguous()}
        save_file(captions, root / f"{cap}.safetensors")
    return root


#: The trees of the recordings: a relaxed draft is kept where a tree holds it.
STATIC, DYNAMIC = {"drafts": "naive_extend_57"}, {"drafts": "dynamic:10,4,59"}


@pytest.mark.parametrize(
    ("cap", "strategy", "recorded", "overrides"),
    [
        ("cap0", "vanilla", "cap0.vanilla_greedy", {}),
        *(
            pytest.param(*one, marks=pytest.mark.long)
            for one in (
                ("cap0", "eagle", "cap0.static.off", STATIC),
                ("cap1", "eagle2", "cap1.dynamic.off", DYNAMIC),
            )
        ),
        ("cap1", "lantern", "cap1.dynamic.k10_d0.1", {"k": 10, "delta": 0.1, **DYNAMIC}),
        ("cap1", "lantern++", "cap1.static.k10_d5", {"k": 10, "lam": 5, **STATIC}),
    ],
)
def test_lantern_sequences(
    lantern: Path, cap: str, strategy: str, recorded: str, overrides: dict[str, object]
) -> None:
    stored = golden("lantern/greedy_sequences")
    with load(lantern / "LlamaGen-T2I", embeddings=lantern / f"{cap}.safetensors") as pipeline:
        result = pipeline.generate(
            "x", strategy=strategy, temperature=0, cfg_scale=3.0, neighbour_space="raw", **overrides
        )
    expected = stored.get(recorded, stored.get(f"{recorded}.tokens"))
    assert expected is not None
    assert torch.equal(result.tokens[0], expected.long())


def test_neighbour_tables_in_both_spaces(lantern: Path) -> None:
    recorded = golden("lantern/proximity")
    with load(lantern / "LlamaGen-T2I") as pipeline:
        for space, name in (("raw", "nearest_raw"), ("decoder", "nearest_l2norm")):
            table = pipeline.engines.neighbours(32, space)
            assert torch.equal(table, recorded[name].int()), space
