"""Reading weights: files are unpickled once, and what lies in them arrives as it is."""

from __future__ import annotations

import re
import zipfile
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from support.official import class_folder
from torch import Tensor, nn

import lantern_accel
from lantern_accel.checkpoints import weights
from lantern_accel.checkpoints.loading import Recipe, fill, without_data
from lantern_accel.checkpoints.weights import open_checkpoint
from lantern_accel.cli import main
from lantern_accel.errors import CheckpointError, StrategyError
from lantern_accel.nn.transformer import Projection


def test_finding_and_loading_unpickle_each_file_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened, load = list[str](), torch.load

    def counting(path: Path, **given: object) -> object:
        opened.append(Path(path).name)
        return load(path, **given)

    monkeypatch.setattr(torch, "load", counting)
    monkeypatch.setattr(weights, "BLOCK_BYTES", 64)
    lantern_accel.load(class_folder(tmp_path), device="cpu", options={"threads": 1}).close()
    assert sorted(opened) == ["c2i_tiny_384.pt", "vq_ds16_c2i.pt"]


def filled(path: Path, like: Tensor, rows: Tensor | None = None) -> Tensor:
    """Return a tensor that a module gets from the key ``weight`` of a file, in small blocks."""
    module = nn.Module()
    module.register_buffer("weight", torch.empty(like.shape, device="meta"))
    change = None if rows is None else (lambda _, tensor: tensor[rows])
    recipes = {"weight": Recipe(("weight",), change, rows)}
    given = {"dtype": like.dtype, "device": torch.device("cpu"), "what": "it"}
    fill(module, open_checkpoint(path), recipes, **given, unneeded=re.compile("other"))
    return module.get_buffer("weight")


def save(path: Path, tensors: dict[str, Tensor]) -> Path:
    if path.suffix == ".safetensors":
        save_file({key: tensor.contiguous() for key, tensor in tensors.items()}, path)
    else:
        torch.save(tensors, path, _use_new_zipfile_serialization=path.suffix != ".pth")
    return path


@pytest.mark.product("name", "layout")
@pytest.mark.parametrize("name", ["a.pt", "a.pth", "a.safetensors"])
@pytest.mark.parametrize("layout", ["whole", "view", "turned", "rows"])
def test_a_tensor_arrives_as_it_is_in_its_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, layout: str
) -> None:
    """``.pth`` is the format before torch 1.6, which cannot be mapped."""
    monkeypatch.setattr(weights, "BLOCK_BYTES", 56)  # no whole number of rows
    whole = torch.randn(13, 7)
    value = {"view": whole[3:9], "turned": whole.T}.get(layout, whole)
    path = save(tmp_path / name, {"other": torch.randn(5), "weight": value})
    if layout != "rows":
        assert torch.equal(filled(path, value), value)
        return
    rows = torch.tensor([11, 12, 2, 3, 5, 4])
    assert torch.equal(filled(path, value[rows], rows), value[rows])


@pytest.mark.parametrize("how", ["copied", "kept", "viewed", "mixed"])
def test_weights_share_memory_only_where_the_backend_has_packed_them_elsewhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    names, read, seen = list("abcd"), list[int](), list[int]()
    whole = {f"{n}.weight": torch.randn(9 - i, 7) for i, n in enumerate(names)}
    whole |= {f"{n}.bias": torch.randn(9 - i) for i, n in enumerate(names)}
    path, into = save(tmp_path / "a.safetensors", whole), weights.HeldFile.read_into

    def reading(file: weights.HeldFile, out: Tensor, at: int) -> None:
        read.append(out.untyped_storage().data_ptr())
        into(file, out, at)

    def ready(part: nn.Module) -> None:
        assert isinstance(part, Projection)
        if part.packed is None:
            seen.append(part.weight.untyped_storage().data_ptr())
            if how == "copied" or (how == "mixed" and len(seen) == 1):
                part.keep(part.weight.detach().clone())
            elif how == "viewed":
                part.keep(part.weight.detach().T)

    monkeypatch.setattr(weights.HeldFile, "read_into", reading)
    with without_data():
        module = nn.ModuleDict({n: Projection(7, 9 - i) for i, n in enumerate(names)})
    recipes = {key: Recipe((key,)) for key in whole}
    asked = {"dtype": torch.float32, "device": torch.device("cpu"), "what": "it"}
    fill(module, open_checkpoint(path), recipes, **asked, ready=ready)
    for name, part in module.items():
        packed = part.weight if part.packed is None else part.packed
        assert torch.equal(packed.T if how == "viewed" else packed, whole[f"{name}.weight"])
        assert torch.equal(part.bias, whole[f"{name}.bias"])
        if how == "mixed":  # one that stays does not hold a larger one's memory
            assert packed.untyped_storage().data_ptr() not in read
    if how != "mixed":
        assert set(seen) <= set(read)  # straight to where they stay
        assert len(set(seen)) == (1 if how == "copied" else 4)


def test_a_zip_whose_members_are_compressed_is_read(tmp_path: Path) -> None:
    whole = save(tmp_path / "a.pt", {"weight": torch.ones(64, 64)})
    with (
        zipfile.ZipFile(whole) as old,
        zipfile.ZipFile(tmp_path / "b.pt", "w", zipfile.ZIP_DEFLATED) as new,
    ):
        for one in old.infolist():
            new.writestr(one.filename, old.read(one))
    assert torch.equal(filled(tmp_path / "b.pt", torch.ones(64, 64)), torch.ones(64, 64))


@pytest.mark.parametrize("name", ["a.pt", "a.safetensors"])
def test_a_file_that_is_cut_while_it_is_open_is_named(tmp_path: Path, name: str) -> None:
    path = save(tmp_path / name, {"weight": torch.ones(64, 64)})
    checkpoint = open_checkpoint(path)
    path.write_bytes(path.read_bytes()[:9000])
    with pytest.raises(CheckpointError, match=name):
        checkpoint.read("weight")


def test_a_file_that_was_written_again_is_opened_again(tmp_path: Path) -> None:
    for shape in ((4, 4), (5, 3)):
        path = save(tmp_path / "a.pt", {"weight": torch.ones(shape)})
        assert open_checkpoint(path).shape("weight") == shape


def test_a_strategy_that_needs_a_drafter_is_refused_before_weights_are_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = class_folder(tmp_path)
    monkeypatch.setattr(weights.Checkpoint, "blocks", None)  # reads no weight
    with pytest.raises(StrategyError, match="no drafter"):
        lantern_accel.generate(3, model=folder, device="cpu", strategy="lantern", k=5)
    with pytest.raises(StrategyError, match="no drafter"):
        lantern_accel.load(folder, device="cpu", strategy="eagle2")
    command = ["generate", "3", "-m", str(folder), "-d", "cpu", "-s", "lantern++"]
    assert main([*command, "-o", str(tmp_path / "a.png")]) == 2
    assert "no drafter" in capsys.readouterr().err
