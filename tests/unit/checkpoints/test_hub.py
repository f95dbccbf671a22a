"""Published names: where their files come from, offline and from an existing cache."""

from __future__ import annotations

import json
from pathlib import Path

import huggingface_hub.constants
import pytest
import torch
from support.official import (
    drafter_config,
    drafter_weights,
    gpt_weights,
    vq_weights,
)

from lantern_accel.errors import ModelError
from lantern_accel.families import registry
from lantern_accel.families.base import Family
from lantern_accel.families.registry import entry, family, is_published, list_published, parts_of
from lantern_accel.families.spec import FamilySpec
from lantern_accel.models import hub
from lantern_accel.models.locate import find_model, named_parts


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty Hub cache of this test's own, and no network."""
    folder = tmp_path / "hub"
    folder.mkdir()
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(folder))
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("LANTERN_ACCEL_CACHE", str(tmp_path / "cache"))
    return folder


def put(cache: Path, repo: str, path: str, content: object) -> Path:
    """Put a file into the Hub's cache as huggingface_hub lays it out."""
    root = cache / f"models--{repo.replace('/', '--')}"
    (root / "refs").mkdir(parents=True, exist_ok=True)
    (root / "refs" / "main").write_text("f" * 40)
    blob = root / "blobs" / path.replace("/", "-")
    blob.parent.mkdir(exist_ok=True)
    if isinstance(content, str):
        blob.write_text(content)
    else:
        torch.save(content, blob)
    link = root / "snapshots" / ("f" * 40) / path
    link.parent.mkdir(parents=True, exist_ok=True)
    link.symlink_to(blob)
    return link


def test_every_entry_is_complete_and_its_parts_exist() -> None:
    names = [one.name for one in list_published(None)]
    assert len(names) == len(set(names))
    for one in list_published(None):
        assert one.licence and one.licence_url.startswith("https://") and one.files
        assert one.nbytes > 10**8
        assert set(one.uses) <= set(names)
    kinds = {kind: len(list_published(kind)) for kind in ("model", "vq", "drafter", "text")}
    assert kinds == {"model": 22, "vq": 7, "drafter": 3, "text": 1}
    assert {"vq", "drafter", "text"} == set(parts_of(entry("llamagen-t2i-stage1")))
    assert is_published("llamagen-b-256") and not is_published("flan-t5-xl")
    with pytest.raises(ModelError, match="did you mean llamagen-drafter"):
        entry("llamagen-draftr")


@pytest.mark.parametrize("name", [e.name for e in list_published() if e.family == "llamagen"])
def test_the_manifest_of_every_llamagen_fits_its_files(name: str) -> None:
    one = entry(name)
    manifest = family("llamagen").from_entry(one)
    assert manifest.target.grid * manifest.vq.downsample == one.config["pixels"]
    assert (manifest.drafter is None) == ("drafter" not in parts_of(one))


def test_without_network_and_cache_everything_that_is_missing_is_named() -> None:
    said: list[str] = []
    with pytest.raises(ModelError) as caught:
        find_model("llamagen-t2i-stage1", tell=said.append)
    text = str(caught.value)
    first, *commands, last = text.splitlines()
    assert "llamagen-t2i-stage1 (15.0 GB) is not here" in first and "HF_HUB_OFFLINE is set" in first
    used = {
        "vq": "llamagen-vq-ds16-t2i",
        "drafter": "llamagen-drafter",
        "text-encoder": "flan-t5-xl",
    }
    for command, name in zip(commands, ("llamagen-t2i-stage1", *used.values()), strict=True):
        assert command.startswith(f"  hf download {entry(name).repo} {entry(name).files[0].path}")
        assert command.endswith(f"--local-dir models/{name}")
    options = " ".join(f"--use {part}=models/{name}" for part, name in used.items())
    assert last.endswith(f"--model llamagen-t2i-stage1=models/llamagen-t2i-stage1 {options}")
    assert not said, "nothing is fetched, so nothing is announced"
    with pytest.raises(ModelError) as caught:
        find_model("llamagen-t2i-stage1", named_parts(drafter="none", embeddings="x.npz"))
    assert "flan-t5" not in str(caught.value) and "llamagen_drafter" not in str(caught.value)


def test_where_the_model_is_at_hand_its_missing_parts_are_named_with_their_options(
    cache: Path,
) -> None:
    one = entry("llamagen-t2i-stage1")
    put(cache, one.repo, one.files[0].path, gpt_weights())
    with pytest.raises(ModelError) as caught:
        find_model(one.name, named_parts(embeddings="x.npz"), tell=lambda text: None)
    text = str(caught.value)
    assert "t2i_XL_stage1_256.pt" not in text and "--model" not in text
    assert "\n  hf download jadohu" in text
    assert "add --use vq=models/llamagen-vq-ds16-t2i" in text


def test_a_network_that_is_not_there_is_told_without_trying_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def unreachable(url: str, timeout: float) -> None:
        raise ConnectionError("no route")

    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(huggingface_hub, "get_hf_file_metadata", unreachable)
    monkeypatch.setattr(hub, "download", None)
    with pytest.raises(ModelError, match="no network"):
        find_model("anole-7b", tell=lambda text: None)


def test_a_licence_is_told_once(cache: Path) -> None:
    one = entry("llamagen-b-256")
    weights = gpt_weights(dim=768, layers=1, ffn=8, vocab=64, classes=3)
    put(cache, one.repo, one.files[0].path, weights)
    said: list[str] = []
    for _ in range(2):
        with pytest.raises(ModelError):
            find_model("llamagen-b-256", tell=said.append)
    licences = [text for text in said if "is under MIT" in text]
    assert len(licences) == 1 and "llamagen-b-256" in licences[0]


def test_what_the_cache_holds_is_used_and_nothing_else_is_fetched(cache: Path) -> None:
    one = entry("llamagen-b-256")
    weights = gpt_weights(dim=768, layers=12, ffn=8, vocab=64, classes=3)
    target = put(cache, one.repo, one.files[0].path, weights)
    put(cache, one.repo, "vq_ds16_c2i.pt", {"model": vq_weights(64)})
    assert hub.at_hand(one)
    said: list[str] = []
    found = find_model("llamagen-b-256", tell=said.append)
    assert found.files["target"] == target
    assert found.files["vq"].name == "vq_ds16_c2i.pt"
    assert found.manifest.name == "llamagen-b-256"
    assert (found.manifest.target.n_head, found.manifest.target.grid) == (12, 16)
    assert not any("fetching" in text for text in said)


def test_a_folder_of_several_files_is_given_as_its_snapshot(cache: Path) -> None:
    one = entry("llamagen-drafter")
    assert not hub.at_hand(one)
    put(cache, one.repo, "config.json", json.dumps(drafter_config("t2i")))
    assert not hub.at_hand(one)
    put(cache, one.repo, "pytorch_model.bin", drafter_weights())
    folder = hub.fetch(one, lambda text: None)
    assert (folder / "config.json").is_file() and (folder / "pytorch_model.bin").is_file()


def test_a_token_is_never_in_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(repo: str, path: str) -> str:
        raise OSError("401 for Bearer hf_abcdefghijklmnop")

    monkeypatch.setattr(huggingface_hub, "hf_hub_download", broken)
    monkeypatch.setattr(hub, "reach", lambda repo, path: None)
    with pytest.raises(ModelError) as caught:
        find_model("llamagen-b-256", tell=lambda text: None)
    assert "hf_abc" not in str(caught.value) and "OSError" in str(caught.value)


def test_a_family_that_this_build_lacks_is_told_before_anything_is_fetched(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    real = registry._load

    def loaded(spec: FamilySpec) -> Family | str:
        return "ImportError: gone" if spec.name == "chameleon" else real(spec)

    monkeypatch.setattr(registry, "_load", loaded)
    with pytest.raises(ModelError, match=r"unknown model 'anole-7b'.*'chameleon' could not.*gone"):
        find_model("anole-7b")
    with pytest.raises(ModelError, match="'chameleon' failed to load: ImportError: gone"):
        family("chameleon")
