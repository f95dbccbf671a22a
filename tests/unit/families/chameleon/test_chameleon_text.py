"""Chameleon's ids, prompts and picture sizes, against plain Python written from the official code."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from support.chameleon import vocabulary, write_text_tokenizer

from lantern_accel.errors import CheckpointError, RequestError
from lantern_accel.families.chameleon.family import ChameleonText
from lantern_accel.families.chameleon.layouts import chameleon_vq_config
from lantern_accel.families.chameleon.model import ChameleonConfig, ChameleonGPT, ChameleonManifest
from lantern_accel.families.chameleon.text import (
    ChameleonIds,
    anole_image_only,
    ids_from_vocabulary,
    image_token_name,
)
from lantern_accel.families.tokenizer import bucket, left_pad, read_tokenizer

WORDS = "Generate an image of 64x32 according to the following prompt: a red fox"


def official_code_of(name: str) -> int:
    """Meta's ``bpe2img``: the letters between IMGIMG and Z are digits, A to J."""
    digits = {chr(ord("A") + i): str(i) for i in range(10)}
    return int("".join(digits.get(c, c) for c in name[len("IMGIMG") : -1]))


def official_grammar(tokens: list[int]) -> list[int] | None:
    """Lumina's ``MultiModalLogitsProcessor``: the ids allowed after ``tokens``, None for any."""
    if tokens.count(8197) == tokens.count(8196):
        return None
    start = max(i for i, t in enumerate(tokens) if t == 8197)
    if len(tokens[start + 1 :]) < 2:
        return None
    h, w = (2 * (t - 8804) for t in tokens[start + 1 : start + 3])
    n = len(tokens[start + 3 :])
    if (n + 1) % (w + 1) == 0:
        return [8803]
    if n + 1 == (w + 1) * h + 1:
        return [8196]
    return list(range(4, 8196))


@pytest.mark.parametrize("code", [0, 7, 10, 53, 1023, 8191])
def test_names_of_codes(code: int) -> None:
    assert official_code_of(image_token_name(code)) == code
    assert image_token_name(53) == "IMGIMGFDZ"


def test_ids_come_from_the_vocabulary() -> None:
    published = {image_token_name(c): c + 4 for c in range(8192)}
    published.update({"<s>": 0, "<pad>": 1, "</s>": 2, "<unk>": 3, "<eoss>": 8196})
    published["<racm3:break>"] = 8197
    published.update({f"<reserved{n:05d}>": n + 4 for n in range(8700, 8900)})
    assert ids_from_vocabulary(published) == ChameleonIds()
    names = vocabulary(16, "a b", lumina=True)
    ids = ids_from_vocabulary(names)
    assert (ids.image_first, ids.image_codes) == (4, 16)
    assert ids.newline == names["<reserved08799>"]
    assert ids.grid == names["<reserved08800>"]


def test_a_vocabulary_in_another_order_is_refused() -> None:
    names = vocabulary(16, "a b", lumina=False)
    swapped = dict(names)
    a, b = image_token_name(3), image_token_name(5)
    swapped[a], swapped[b] = names[b], names[a]
    with pytest.raises(CheckpointError, match=r"IMGIMGDZ at 9, but code 3 must be token 7"):
        ids_from_vocabulary(swapped)
    with pytest.raises(CheckpointError, match="lacks image tokens"):
        ids_from_vocabulary({"<s>": 0})
    del names["<racm3:break>"]
    with pytest.raises(CheckpointError, match=r"lacks '<racm3:break>'"):
        ids_from_vocabulary(names)


def test_prompts(tmp_path: Path) -> None:
    names = vocabulary(16, WORDS, lumina=True)
    write_text_tokenizer(tmp_path / "t.json", names)
    ids = ids_from_vocabulary(names)
    fox = [names[w] for w in ["a", "red", "fox"]]
    eot, boi = names["<reserved08706>"], names["<racm3:break>"]
    anole, lumina = (manifest(variant, ids=ids) for variant in ("anole", "lumina"))
    one = ChameleonText(tmp_path / "t.json", anole)
    assert one.prompts(["a red fox"], 2, 4) == [[0, *fox, eot, boi]]
    assert anole.start(2, 4) == [boi]
    # A picture in the prompt stays in the middle branch, its text goes.
    picture = [boi, 4, 5, 6, names["<eoss>"]]
    assert anole_image_only(ids, [0, *fox, *picture, eot, boi]) == [0, *picture, boi]
    assert anole_image_only(ids, [0, *fox, eot, boi]) == [0, boi]
    # Width before height in the text, height before width in the tokens.
    text = [names[w] for w in WORDS.split()]
    sizes = [names["<reserved08801>"], names["<reserved08802>"]]
    (got,) = ChameleonText(tmp_path / "t.json", lumina).prompts(["a red fox"], rows=2, columns=4)
    assert got == [0, *text, eot, boi, *sizes]
    assert lumina.start(2, 4) == [boi, *sizes]
    with pytest.raises(CheckpointError, match="cannot be read as a tokenizer"):
        read_tokenizer(tmp_path / "none.json")
    (tmp_path / "broken.json").write_text("{")
    with pytest.raises(CheckpointError, match="cannot be read as a tokenizer"):
        read_tokenizer(tmp_path / "broken.json")


@pytest.mark.parametrize(("rows", "columns"), [(2, 2), (4, 2), (2, 6), (48, 48)])
def test_a_target_allows_what_luminas_grammar_does(rows: int, columns: int) -> None:
    config = ChameleonConfig(
        dim=8, n_layer=1, n_head=2, ffn_dim=8, newline_id=8803, height=rows, width=columns
    )
    ids, start = config.token_ids(), manifest("lumina").start(rows, columns)
    with torch.device("meta"):
        target = ChameleonGPT(config)
    target.output.weight = torch.nn.Parameter(torch.empty(0))
    grammar, written = target.allowed_codes(), list(start)
    assert grammar is not None and start[0] == 8197
    for kind in grammar.kind.tolist():
        allowed = [ids[code] for code in torch.nonzero(grammar.penalty[kind] == 0).flatten()]
        assert allowed == official_grammar(written)
        written.append(allowed[0])
    # The end of the image, which is not generated, follows the last row.
    assert official_grammar(written) == [8196]
    assert len(written) - len(start) == config.num_tokens == rows * (columns + 1)


def test_padding() -> None:
    ids, mask = left_pad([[5, 6, 7], [8]], 4, pad=1)
    assert ids.tolist() == [[1, 5, 6, 7], [1, 1, 1, 8]]
    assert mask.tolist() == [[False, True, True, True], [False, False, False, True]]
    assert [bucket(n) for n in (1, 64, 65)] == [64, 64, 128]
    with pytest.raises(RequestError, match="5 tokens, the buffers hold 4"):
        left_pad([[1] * 5], 4, pad=1)


def manifest(variant: str, side: int = 48, ids: ChameleonIds | None = None) -> ChameleonManifest:
    target = ChameleonConfig(
        dim=8, n_layer=1, n_head=2, ffn_dim=8, height=side, width=side,
        newline_id=8803 if variant == "lumina" else None,
    )  # fmt: skip
    return ChameleonManifest(
        name="m", variant=variant, side=side, ids=ids or ChameleonIds(), target=target,
        vq=chameleon_vq_config(),
    )  # fmt: skip


def test_picture_sizes() -> None:
    lumina = manifest("lumina")
    assert lumina.grid(None) == (48, 48)
    assert lumina.grid((768, 768)) == (48, 48)
    assert lumina.grid((1024, 576)) == (36, 64)
    assert lumina.grid((512, 512)) == (32, 32)
    for size in ((800, 768), (770, 768), (2048, 256), (0, 768)):
        with pytest.raises(RequestError, match=r"no more pixels than 768x768; ask"):
            lumina.grid(size)
    anole = manifest("anole", 32)
    assert anole.grid((512, 512)) == (32, 32)
    with pytest.raises(RequestError, match="generates 512x512 pixels only, not 768x512"):
        anole.grid((768, 512))


def official_sizes(target: int) -> set[tuple[int, int]]:
    """Lumina's ``generate_crop_size_list``: the largest width of every height, in pixels."""
    patches, sizes = (target // 32) ** 2, set()
    wide, high = patches, 1
    while wide > 0:
        if max(wide, high) / min(wide, high) <= 4.0:
            sizes.add((wide * 32, high * 32))
        if (high + 1) * wide <= patches:
            high += 1
        else:
            wide -= 1
    return sizes


@pytest.mark.parametrize("target", [512, 768, 1024])
def test_every_size_that_lumina_was_trained_on_is_allowed(target: int) -> None:
    model = manifest("lumina", target // 16)
    sizes = official_sizes(target)
    assert len(sizes) > 20
    for width, height in sizes:
        assert model.grid((width, height)) == (height // 16, width // 16)
