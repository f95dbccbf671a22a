"""The draft head: shapes, the tokens that it reads, and files that do not fit."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch

import lantern_accel
from lantern_accel.errors import CheckpointError
from lantern_accel.nn.draft_head import DraftHead, DraftHeadConfig, weights_of

CONFIG = DraftHeadConfig(dim=8, hidden=6, rank=5, vocab_size=10, grid=3, depths=2)
BUNDLED = Path(lantern_accel.__file__).parent / "assets" / "lantern-emoji"


def test_logits_depend_on_everything_that_is_read() -> None:
    torch.manual_seed(0)
    head = DraftHead(CONFIG)
    state, passed = torch.randn(2, 8), torch.randn(2, 4, 8)
    known, seen = head.project(state, passed)
    assert known.shape == (2, 2, 6) and seen.shape == (2, 4, 11)
    around, place = torch.randint(0, 10, (2, 6)), torch.tensor([4, 8])
    logits = head(1, known, seen[:, 0], around, place)
    assert logits.shape == (2, 10) and logits.dtype == torch.float32
    others = [
        head(2, known, seen[:, 0], around, place),
        head(1, known + 1, seen[:, 0], around, place),
        head(1, known, seen[:, 1], around, place),
        head(1, known, seen[:, 0], around, place - 1),
        *(
            head(1, known, seen[:, 0], around.scatter(1, torch.full((2, 1), i), 10), place)
            for i in range(6)
        ),
    ]
    assert all(not torch.allclose(logits, other) for other in others)
    deep = head(7, known, seen[:, 0], around, place)
    assert torch.equal(deep, others[0]), "farther places take the last projection"


@pytest.mark.parametrize(
    ("place", "want"),
    [
        (0, [10, 10, 10, 10, 10]),
        (1, [0, 10, 10, 10, 10]),
        (3, [2, 1, 0, 1, 10]),
        (4, [3, 2, 1, 2, 0]),
        (5, [4, 3, 2, 10, 1]),
        (8, [7, 6, 5, 10, 4]),
    ],
)
def test_the_tokens_around_a_place_stay_inside_the_picture(place: int, want: list[int]) -> None:
    tokens = torch.arange(10).unsqueeze(0)
    found = DraftHead(CONFIG).around(tokens, torch.tensor([place]), torch.tensor([7]))
    assert found.tolist() == [[*want, 7]]


def test_codes_far_from_the_likeliest_are_not_guessed() -> None:
    weights = weights_of(torch.tensor([[0.2, 0.021, 0.019, 0.0001]]).log())
    assert weights.gt(0).tolist() == [[True, True, False, False]]


def test_a_damaged_file_is_refused(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    shutil.copytree(BUNDLED, folder)
    path = folder / "draft_head.safetensors"
    path.write_bytes(path.read_bytes()[:100_000])
    with pytest.raises(CheckpointError, match="draft_head"):
        lantern_accel.load(str(folder), device="cpu")
    path.unlink()
    with pytest.raises(CheckpointError, match="draft_head"):
        lantern_accel.load(str(folder), device="cpu")
    text = (folder / "model.json").read_text(encoding="utf-8")
    (folder / "model.json").write_text(
        text.replace('"hidden": 128', '"hidden": 0'), encoding="utf-8"
    )
    with pytest.raises(CheckpointError, match="hidden"):
        lantern_accel.load(str(folder), device="cpu")
