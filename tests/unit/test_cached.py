"""No cache entry is trusted without its checksum: what was changed is made anew."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from lantern_accel.families.llamagen.features import FeatureFile
from lantern_accel.families.llamagen.t5 import T5Text
from lantern_accel.files import CHECKSUM, read_record, read_tensors, write_record, write_tensors
from lantern_accel.nn.neighbours import cached_neighbour_table, neighbour_table

BOOK = torch.randn(30, 4, generator=torch.Generator().manual_seed(1))


def table(folder: Path) -> torch.Tensor:
    return cached_neighbour_table(BOOK, 5, normalise=False, cache=folder)


@pytest.mark.parametrize(
    "change",
    [
        lambda t: t.float(),
        lambda t: t.long(),
        lambda t: t[:, :4],
        lambda t: t + 25,
        lambda t: t - 20,
    ],
    ids=["float", "int64", "narrow", "out of range", "negative"],
)
def test_what_was_never_this_table_is_made_anew_whatever_its_checksum(
    change: Any, tmp_path: Path
) -> None:
    want = table(tmp_path)
    (entry,) = tmp_path.glob("neighbours/*.safetensors")
    write_tensors(entry, {"neighbours": change(load_file(entry)["neighbours"])})
    assert torch.equal(table(tmp_path), want) and want.dtype == torch.int32
    assert torch.equal(load_file(entry)["neighbours"], want), "and put right"
    assert torch.equal(want, neighbour_table(BOOK, 5))


def test_every_byte_that_is_flipped_is_noticed(tmp_path: Path) -> None:
    want = table(tmp_path)
    (entry,) = tmp_path.glob("neighbours/*.safetensors")
    whole = entry.read_bytes()
    for at in range(0, len(whole), 7):
        entry.write_bytes(whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :])
        assert torch.equal(table(tmp_path), want), at


@pytest.mark.parametrize("kind", ["pipe", "folder", "device", "empty", "loop"])
def test_an_entry_that_is_no_file_is_no_entry(kind: str, tmp_path: Path) -> None:
    for path in (tmp_path / "a.json", tmp_path / "a.safetensors"):
        if kind == "pipe":
            os.mkfifo(path)
        elif kind == "folder":
            path.mkdir()
        elif kind == "empty":
            path.write_bytes(b"")
        else:
            path.symlink_to("/dev/zero" if kind == "device" else path)
    assert read_record(tmp_path / "a.json") is None
    assert read_tensors(tmp_path / "a.safetensors", lambda found: True) is None


def test_a_record_is_read_back_and_a_changed_one_is_not(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    write_record(path, {"paths": ((0,), (0, 1)), "rate": 0.1})
    assert read_record(path) == {"paths": [[0], [0, 1]], "rate": 0.1}
    whole = json.loads(path.read_text())
    for changed in (
        {**whole, "rate": 0.2},
        {k: v for k, v in whole.items() if k != CHECKSUM},
        {**whole, CHECKSUM: 5},
        [whole],
    ):
        path.write_text(json.dumps(changed))
        assert read_record(path) is None
    for text in ("{", "[" * 100_000, "\0", "NaN"):
        path.write_text(text)
        assert read_record(path) is None


def test_features_of_a_caption_are_made_anew_where_they_are_not_finite(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "t5").mkdir()
    made: list[str] = []

    def encode(self: T5Text, text: str) -> torch.Tensor:
        made.append(text)
        return torch.ones(3, 8)

    monkeypatch.setattr(T5Text, "_encode", encode)
    monkeypatch.setattr("lantern_accel.families.llamagen.t5.encoder_hash", lambda folder: "1")
    source = T5Text(
        tmp_path / "t5", 4, device=torch.device("cpu"), dtype=torch.float32, cache=tmp_path
    )
    assert torch.equal(source._caption("a"), source._caption("a")) and made == ["a"]
    (entry,) = tmp_path.glob("captions/*.safetensors")
    for wrong in (torch.full((3, 8), float("nan")), torch.ones(5, 8), torch.ones(3, 8).int()):
        write_tensors(entry, {"features": wrong})
        assert torch.equal(source._caption("a"), torch.ones(3, 8))
    save_file({"features": torch.zeros(3, 8)}, entry)
    assert torch.equal(source._caption("a"), torch.ones(3, 8))
    assert len(made) == 5


def test_features_from_elsewhere_are_finite(tmp_path: Path) -> None:
    from lantern_accel.errors import RequestError

    features = torch.ones(1, 3, 8)
    features[0, 1, 2] = float("inf")
    save_file({"embeddings": features, "mask": torch.ones(1, 3)}, tmp_path / "e.safetensors")
    with pytest.raises(RequestError, match="the features are not finite"):
        FeatureFile(tmp_path / "e.safetensors", 4, 8)
