"""Captions to features: cleaning, padding, files, and flan-T5 where transformers is installed."""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from support.golden import golden
from support.official import recorded_captions, text_folder

import lantern_accel
from lantern_accel.errors import CheckpointError, LanternWarning, RequestError
from lantern_accel.families.llamagen.captions import clean_caption
from lantern_accel.families.llamagen.features import FeatureFile
from lantern_accel.families.llamagen.t5 import T5Text, encoder_hash, encoder_parameters


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LANTERN_ACCEL_CACHE", str(tmp_path / "cache"))


# --- files of features --------------------------------------------------------------------------


@pytest.mark.parametrize("left", [False, True])
def test_features_from_a_file_of_numpy(tmp_path: Path, left: bool) -> None:
    io = golden("llamagen_t2i/io")
    features, mask = (io["cond_embeds"], io["cond_masks"]) if left else recorded_captions()
    path = tmp_path / "captions.npz"
    np.savez(path, embeddings=features.numpy(), mask=mask.numpy())
    found, seen = FeatureFile(path, 121, 48).encode(["a", "b", "c"])
    assert torch.equal(found[:, 1:], io["cond_embeds"]) and not found[:, 0].any()
    assert torch.equal(seen[:, 1:], io["cond_masks"].bool()) and not seen[:, 0].any()


WRONG: list[tuple[dict[str, torch.Tensor], str]] = [
    ({"embeddings": torch.zeros(1, 2, 4)}, "needs embeddings"),
    ({"embeddings": torch.zeros(2, 4), "mask": torch.ones(2, 4)}, "do not fit"),
    ({"embeddings": torch.zeros(1, 2, 5), "mask": torch.ones(1, 2)}, "width 5, the model takes 4"),
    ({"embeddings": torch.zeros(1, 2, 4), "mask": torch.zeros(1, 2)}, "has no token"),
    (
        {"embeddings": torch.zeros(1, 3, 4), "mask": torch.tensor([[1, 0, 1]])},
        "the mask has gaps",
    ),
    ({"embeddings": torch.zeros(1, 9, 4), "mask": torch.ones(1, 9)}, "prefix holds 8"),
]


@pytest.mark.parametrize(("tensors", "told"), WRONG)
def test_features_that_do_not_fit_are_refused(
    tmp_path: Path, tensors: dict[str, torch.Tensor], told: str
) -> None:
    save_file(tensors, tmp_path / "x.safetensors")
    with pytest.raises(RequestError, match=told):
        FeatureFile(tmp_path / "x.safetensors", 8, 4)


def test_files_that_cannot_be_read_are_refused(tmp_path: Path) -> None:
    for name, content, told in (
        ("a.npz", b"no", "cannot be read as embeddings"),
        ("a.pt", b"no", "not a .safetensors or .npz file"),
        ("b.npz", None, "there is no file of embeddings"),
    ):
        if content is not None:
            (tmp_path / name).write_bytes(content)
        with pytest.raises(RequestError, match=told):
            FeatureFile(tmp_path / name, 8, 4)


# --- cleaning -----------------------------------------------------------------------------------

#: What LlamaGen's own cleaning makes of these, recorded once.
CLEANED = [
    ("A photo of a corgi", "a photo of a corgi"),
    ("A <b>Bold</b> cat &amp; dog &quot;hi&quot;", 'a bold cat dog "hi"'),
    ("https://foo.com/bar see www.example.org/x?y=1 now", "see ?y=1 now"),
    ("<person> standing at 192.168.0.1", "person standing at"),
    ("this-is-my-cute-cat_pic", "this is my cute cat pic"),
    ("AUSVERKAUFT!!! ***sale*** #12 #12345 1234567", "ausverkauft!!! sale"),
    (
        "img_001.png of a \u201cred\u201d \u2018car\u2019 \u2014 12x34 jc6640 jc6640vc 6640vc231",
        "of a \"red\" 'car'",
    ),
    (
        "free shipping worldwide download click here for more page 12",
        "worldwide click here for more",
    ),
    ("'quoted text'", "quoted text"),
    (".hidden", ""),
    ("\u6f22\u5b57 kana \u30c6\u30b9\u30c8 \u3231 \u3314", "kana \u30c6\u30b9\u30c8"),
    ("a\\nb  . c", "a b c"),
    ("wow...nice", "wow nice"),
    ("e.g.,this/that", "e. g., this that"),
    ("@nick hello", "hello"),
    ("caf\u00c3\u00a9 \u2014 \u3030", "caf\u00e3"),
    ("100%25 sure + more", "100% sure more"),
    ("time 3:45 ", "time 3:45"),
    ("-lead and trail-", "lead and trail"),
    ("x \u00d7 y 3.5\u00d74.2", "x \u00d7 y"),
]


@pytest.mark.parametrize(("caption", "cleaned"), CLEANED, ids=[str(i) for i in range(len(CLEANED))])
def test_captions_are_cleaned_as_in_training(caption: str, cleaned: str) -> None:
    pytest.importorskip("ftfy")
    pytest.importorskip("bs4")
    assert clean_caption(caption) == cleaned


def test_without_the_extra_the_way_to_it_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    import sys

    monkeypatch.setitem(sys.modules, "ftfy", None)
    with pytest.raises(
        RequestError, match=r"pip install 'lantern-accel\[text\]'.*--use embeddings"
    ):
        clean_caption("a corgi")


# --- flan-T5 ------------------------------------------------------------------------------------

WORDS = ["<pad>", "</s>", "<unk>", "a", "photo", "of", "corgi", "red", "heart", "cat", "dog"]


def write_t5(folder: Path, width: int = 24) -> Path:
    """Write a tiny random T5 with a word tokenizer, as a Hugging Face folder."""
    transformers = pytest.importorskip("transformers")
    tokenizers = pytest.importorskip("tokenizers")
    words = tokenizers.Tokenizer(
        tokenizers.models.WordLevel({w: i for i, w in enumerate(WORDS)}, unk_token="<unk>")
    )
    words.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    words.post_processor = tokenizers.processors.TemplateProcessing(
        single="$A </s>", special_tokens=[("</s>", 1)]
    )
    fast = transformers.PreTrainedTokenizerFast(
        tokenizer_object=words, pad_token="<pad>", eos_token="</s>", unk_token="<unk>"
    )
    config = transformers.T5Config(
        vocab_size=len(WORDS), d_model=width, d_kv=8, d_ff=32, num_layers=2, num_heads=3,
        feed_forward_proj="gated-gelu", dropout_rate=0.0, decoder_start_token_id=0,
    )  # fmt: skip
    torch.manual_seed(4)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        transformers.T5ForConditionalGeneration(config).save_pretrained(folder)
        fast.save_pretrained(folder)
    return folder


@pytest.fixture
def t5(tmp_path: Path) -> Path:
    pytest.importorskip("ftfy")
    pytest.importorskip("bs4")
    return write_t5(tmp_path / "t5-ckpt" / "flan-t5-tiny")


def encoder(folder: Path, prefix: int = 12, **options: Any) -> T5Text:
    return T5Text(folder, prefix, device=torch.device("cpu"), dtype=torch.float32, **options)


def test_features_are_transformers_own(t5: Path) -> None:
    import transformers

    features, mask = encoder(t5).encode(["A red heart", "a photo of a CORGI"])
    assert features.shape == (2, 12, 24)
    assert mask.sum(1).tolist() == [4, 6], "the end token counts"
    assert not features[0, :8].any()
    model = transformers.T5EncoderModel.from_pretrained(t5).eval()
    ids = torch.tensor([[3, 7, 8, 1] + [0] * 8])
    with torch.no_grad():
        state = model(ids, attention_mask=(ids > 0).long()).last_hidden_state
    assert torch.allclose(features[0, 8:], state[0, :4], atol=1e-6)
    counted = encoder_parameters(json.loads((t5 / "config.json").read_text()))
    assert counted == sum(p.numel() for p in model.parameters())


def test_features_are_kept_on_disk_by_text_encoder_and_dtype(t5: Path, tmp_path: Path) -> None:
    (first, _), _ = encoder(t5, cache=t5 / "c").encode(["a cat", "a photo of a dog"])
    alone, _ = encoder(t5).encode(["a cat"])
    assert torch.equal(alone[0], first)  # whatever is asked with it
    first = alone
    kept = list((tmp_path / "cache" / "captions").iterdir())
    assert len(kept) == 1
    again = encoder(t5)
    second, _ = again.encode(["a cat"])
    assert torch.equal(first, second)
    assert again._encoder is None, "nothing was loaded"
    kept[0].write_bytes(b"damaged")
    assert torch.equal(encoder(t5).encode(["a cat"])[0], first)
    half = T5Text(t5, 12, device=torch.device("cpu"), dtype=torch.bfloat16)
    assert not torch.equal(half.encode(["a cat"])[0], first)
    assert len(list((tmp_path / "cache" / "captions").iterdir())) == 2
    # T5 overflows in float16.
    assert T5Text(t5, 12, device=torch.device("cpu"), dtype=torch.float16).dtype == torch.bfloat16


def test_the_encoder_is_freed_before_decoding_unless_it_is_kept(t5: Path) -> None:
    freed, kept = encoder(t5), encoder(t5, keep=True, cache=t5 / "c")
    for text in (freed, kept):
        text.encode(["a cat"])
        assert text._encoder is not None
        text.release()
    assert freed._encoder is None and kept._encoder is not None


def test_a_long_caption_is_cut_with_a_warning(t5: Path) -> None:
    with pytest.warns(LanternWarning, match="has 7 tokens, the model's prefix holds 4"):
        _, mask = encoder(t5, prefix=4).encode(["a photo of a red heart"])
    assert mask.sum() == 4


def test_a_damaged_encoder_is_told(t5: Path) -> None:
    before = encoder_hash(t5)
    weights = t5 / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:1000])
    assert encoder_hash(t5) != before
    with pytest.raises(CheckpointError, match="cannot be loaded"):
        encoder(t5).encode(["a cat"])
    weights.unlink()
    with pytest.raises(CheckpointError, match="fetch its files again"):
        encoder(t5).encode(["a cat"])


def test_the_parameters_of_flan_t5_xl() -> None:
    from lantern_accel.families.registry import entry

    config = {
        "d_model": 2048, "d_kv": 64, "num_heads": 32, "d_ff": 5120, "num_layers": 24,
        "vocab_size": 32128, "feed_forward_proj": "gated-gelu",
    }  # fmt: skip
    assert encoder_parameters(config) == entry("flan-t5-xl").config["encoder_parameters"]


def test_a_text_model_with_its_encoder_beside_it_draws(t5: Path, tmp_path: Path) -> None:
    folder = text_folder(tmp_path)
    with lantern_accel.load(folder, device="cpu", dtype="float32") as pipeline:
        result = pipeline.generate("a photo of a corgi", strategy="vanilla", seed=1)
        assert pipeline.model.text._encoder is not None, "it fits next to the rest, so it stays"
    assert result.tokens.shape == (1, 256)
    with lantern_accel.load(folder, device="cpu", dtype="float32", text_device="cpu") as pipeline:
        again = pipeline.generate("a photo of a corgi", strategy="vanilla", seed=1)
    assert torch.equal(result.tokens, again.tokens)
    other = json.loads((t5 / "config.json").read_text()) | {"d_model": 32}
    wrong = tmp_path / "wide"
    wrong.mkdir()
    (wrong / "config.json").write_text(json.dumps(other))
    with pytest.raises(CheckpointError, match="a T5 encoder of width 32, not 24"):
        lantern_accel.load(folder, device="cpu", text_encoder=wrong)
