"""What a suite reads: captions, prompts, pictures of all kinds, weights, stored references."""

from __future__ import annotations

import json
import re
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor

from lantern_accel.errors import DataError, RequestError
from lantern_accel_profiles.evaluation.suite import networks
from lantern_accel_profiles.evaluation.suite.captions import class_prompts, read_captions
from lantern_accel_profiles.evaluation.suite.generation import find_images
from lantern_accel_profiles.evaluation.suite.image_files import (
    batches,
    cached_features,
    features_of,
    prepare_image,
    read_image,
    read_reference,
)
from lantern_accel_profiles.evaluation.suite.networks import Unavailable, read_given, weights_file
from lantern_accel_profiles.evaluation.suite.protocol import PROTOCOLS, WEIGHTS, Preprocessing

LANTERN, ADM = PROTOCOLS["lantern"], PROTOCOLS["adm"]

RULE = Preprocessing(crop="none", size=8, to_network="network")


def picture(path: Path, seed: int = 0, mode: str = "RGB", size: tuple[int, int] = (12, 10)) -> Path:
    noise = np.random.default_rng(seed).integers(0, 255, (size[1], size[0], 3), dtype=np.uint8)
    Image.fromarray(noise).convert(mode).save(path)
    return path


def coco(folder: Path, notes: list[tuple[int, str]], names: dict[int, str]) -> Path:
    path = folder / "captions.json"
    value = {
        "images": [{"id": i, "file_name": name} for i, name in names.items()],
        "annotations": [{"id": n, "image_id": i, "caption": c} for n, (i, c) in enumerate(notes)],
    }
    path.write_text(json.dumps(value))
    return path


class Tiny:
    """A feature network of nothing: the means of the quarters of a picture."""

    def __init__(self, name: str = "tiny") -> None:
        self.name, self.side = name, None
        self.seen = 0

    def __call__(self, images: Tensor) -> tuple[Tensor, Tensor | None]:
        self.seen += len(images)
        x = torch.nn.functional.adaptive_avg_pool2d(images.float(), 2).flatten(1) / 255
        return x, x


def test_the_longest_or_the_first_caption_of_each_image_is_its_prompt(tmp_path: Path) -> None:
    for i in (1, 2):
        picture(tmp_path / f"{i}.png", i)
    notes = [(2, "short "), (1, "one"), (2, "the longest"), (2, "as long two")]
    path = coco(tmp_path, notes, {1: "1.png", 2: "2.png"})
    longest = read_captions(path, tmp_path, "longest")
    # The official script keeps the first of equally long ones, in the order of annotations.
    assert longest.prompts == ["the longest", "one"]
    assert [p.name for p in longest.images or []] == ["2.png", "1.png"]
    assert read_captions(path, tmp_path, "first").prompts == ["short", "one"]
    assert not longest.left_out


def test_what_cannot_be_paired_is_left_out_and_counted(tmp_path: Path) -> None:
    picture(tmp_path / "a.png", 1)
    picture(tmp_path / "b.png", 2)
    picture(tmp_path / "lonely.jpg", 3)
    lines = [{"file": name, "prompt": name} for name in ("a.png", "b.png", "gone.png")]
    path = tmp_path / "captions.jsonl"
    path.write_text("\n".join(map(json.dumps, [*lines, lines[0]])))
    found = read_captions(path, tmp_path)
    assert found.prompts == ["a.png", "b.png"]
    assert found.left_out == {
        "captions whose image is not there": "1 (gone.png)",
        "images without a caption": "1 (lonely.jpg)",
    }
    with pytest.raises(DataError, match=r"asks for 3 prompts, and there are 2 .*gone\.png.*lower"):
        found.first(3)
    assert found.first(1).images == [tmp_path / "a.png"]


@pytest.mark.parametrize(
    ("name", "text", "folder", "fragment"),
    [
        ("a.json", "{", "", "is not a list of captions as COCO writes it"),
        ("a.json", '{"images": [], "annotations": {}}', "", "no caption in"),
        ("a.json", '{"images": [{"id": 1}], "annotations": []}', "", "is not a list of captions"),
        ("a.json", "[1, 2]", "", "is not a list of captions"),
        ("a.json", None, "gone", "is not a folder"),
        ("a.json", None, "", "captions_val2017.json"),
        ("b.jsonl", f'{{"file": "{"x" * 300}", "prompt": "a"}}\n', "", "no caption in"),
        ("b.jsonl", '{"file": "x.png"}\n', "", "b.jsonl, line 1: expected 'prompt'"),
    ],
)
def test_captions_that_are_none_are_refused(
    tmp_path: Path, name: str, text: str | None, folder: str, fragment: str
) -> None:
    if text is not None:
        (tmp_path / name).write_text(text)
    with pytest.raises(DataError, match=re.escape(fragment)):
        read_captions(tmp_path / name, tmp_path / folder)


def test_images_from_elsewhere_are_in_the_order_of_their_numbers(tmp_path: Path) -> None:
    for i in (10, 2, 1):
        picture(tmp_path / f"image_{i}.png", i)
    found = find_images("other", tmp_path, 3)
    assert [path.name for path in found] == ["image_1.png", "image_2.png", "image_10.png"]


def test_classes_come_in_turn() -> None:
    assert class_prompts(3, 7, 50).prompts == [0, 1, 2, 0, 1, 2, 0]
    assert len(class_prompts(3, None, 50).prompts) == 50


@pytest.mark.parametrize(
    ("mode", "name"), [("L", "grey"), ("CMYK", "CMYK"), ("P", "palette"), ("RGBA", "transparent")]
)
def test_pictures_of_other_kinds_become_rgb_and_are_named(
    tmp_path: Path, mode: str, name: str
) -> None:
    path = picture(tmp_path / ("a.jpg" if mode == "CMYK" else "a.png"), mode=mode)
    image, was = read_image(path)
    assert (image.mode, was) == ("RGB", name)


def test_a_grey_picture_of_sixteen_bits_keeps_its_brightness(tmp_path: Path) -> None:
    grey = np.linspace(0, 65535, 64).astype(np.uint16).reshape(8, 8)
    Image.fromarray(grey).save(tmp_path / "a.png")
    image, was = read_image(tmp_path / "a.png")
    assert was == "grey"
    assert np.abs(np.asarray(image)[..., 0] - grey / 257).max() <= 0.5


def test_an_unreadable_picture_is_named(tmp_path: Path) -> None:
    (tmp_path / "bad.png").write_bytes(b"broken")
    with pytest.raises(DataError, match=r"bad\.png cannot be read .*replace it"):
        read_image(tmp_path / "bad.png")
    whole = picture(tmp_path / "a.jpg", size=(64, 64)).read_bytes()
    (tmp_path / "cut.jpg").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(DataError, match=r"cut\.jpg cannot be read"):
        read_image(tmp_path / "cut.jpg")


def test_pictures_are_cropped_and_resized_by_the_protocol_s_rule() -> None:
    wide = np.zeros((256, 512, 3), dtype=np.uint8)
    wide[:, 128:384] = 200  # the middle square
    image = Image.fromarray(wide)
    assert np.asarray(prepare_image(image, LANTERN.preprocessing, 299)).min() == 200
    assert prepare_image(image, LANTERN.preprocessing, 299).size == (299, 299)
    assert prepare_image(image, LANTERN.manifold_preprocessing, 224).size == (224, 224)
    assert prepare_image(image, PROTOCOLS["sjd"].preprocessing, 299).size == (512, 256)
    assert prepare_image(image, ADM.preprocessing, 299).size == (256, 256)
    same = Image.fromarray(wide[:, 128:384])
    assert np.array_equal(prepare_image(same, ADM.preprocessing, 299), same)
    assert "lanczos to 256 x 256" in LANTERN.preprocessing.text()


def test_pictures_of_several_shapes_make_several_batches(tmp_path: Path) -> None:
    sizes = [(8, 8), (8, 8), (9, 8), (8, 8), (8, 8), (8, 8)]
    paths = [picture(tmp_path / f"{i}.png", i, size=s) for i, s in enumerate(sizes)]
    rule = Preprocessing(crop="none", size=None, to_network="network")
    shapes = [tuple(pixels.shape) for pixels, _ in batches(paths, rule, None, 2)]
    assert shapes == [(2, 3, 8, 8), (1, 3, 8, 9), (2, 3, 8, 8), (1, 3, 8, 8)]


def test_features_are_kept_and_found_again_for_the_same_pictures(tmp_path: Path) -> None:
    paths = [picture(tmp_path / f"{i}.png", i, mode="L" if i else "RGB") for i in range(3)]
    net = Tiny()
    first = cached_features(paths, net, RULE, tmp_path, "features")
    again = cached_features(paths, net, RULE, tmp_path, "features")
    assert net.seen == 3
    assert np.array_equal(first.features, again.features)
    assert first.modes == again.modes == {"grey": 2}
    picture(paths[0], 9)
    cached_features(paths, net, RULE, tmp_path, "features")
    assert net.seen == 6
    stored = next(tmp_path.glob("features-*.npz"))
    stored.write_bytes(b"damaged")
    assert np.array_equal(features_of(paths, net, RULE).features[1:], first.features[1:])


def test_adm_s_batch_gives_images_and_its_own_moments(tmp_path: Path) -> None:
    images = np.random.default_rng(1).integers(0, 255, (7, 8, 8, 3), dtype=np.uint8)
    path = tmp_path / "adm.npz"
    np.savez(path, arr_0=images)
    plain = read_reference(path, Tiny(), RULE)
    assert plain.features is not None
    assert plain.moments.mean == pytest.approx(plain.features.mean(0), rel=1e-5)
    moments = {"mu": np.ones(12), "sigma": np.eye(12), "mu_s": np.ones(3), "sigma_s": np.eye(3)}
    for arrays, fragment in (
        ({"arr_0": images.astype(np.float32)}, "not a set of images"),
        ({"something": images}, "has something; it takes"),
    ):
        np.savez(path, **arrays)
        with pytest.raises(DataError, match=fragment):
            read_reference(path, Tiny(), RULE)
    np.savez(path, arr_0=images, **moments)
    other = read_reference(path, Tiny(), RULE)
    assert np.array_equal(other.moments.mean, plain.moments.mean)
    assert other.about["moments"] == "ours"
    stored = read_reference(path, Tiny("an Inception"), RULE)
    assert np.array_equal(stored.moments.mean, np.ones(12))
    assert stored.about["moments"] == "stored"
    path.write_bytes(b"PK")
    with pytest.raises(DataError, match="cannot be read"):
        read_reference(path, Tiny(), RULE)


def test_missing_weights_are_named_with_size_licence_and_option(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setenv("LANTERN_ACCEL_CACHE", str(tmp_path))
    monkeypatch.setattr("huggingface_hub.try_to_load_from_cache", lambda *a: None)
    for key, one in WEIGHTS.items():
        with pytest.raises(Unavailable) as found:
            weights_file(key, {}, print)
        for text in (one.size, one.licence, f"--metric-weights {key}=PATH"):
            assert text in str(found.value)
    assert weights_file("vgg16", {"vgg16": tmp_path}, print) == tmp_path


def test_weights_whose_content_is_not_what_they_say_are_not_kept(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("LANTERN_ACCEL_CACHE", str(tmp_path))
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    (tmp_path / "vgg16-397923af.pth").write_bytes(b"something else")
    served = WEIGHTS["vgg16"].model_copy(update={"url": (tmp_path / "vgg16-397923af.pth").as_uri()})
    monkeypatch.setitem(networks.WEIGHTS, "vgg16", served)
    with pytest.raises(Unavailable, match="invalid hash value"):
        weights_file("vgg16", {}, lambda text: None)
    assert not (tmp_path / "metrics" / "vgg16-397923af.pth").exists()


def test_options_of_weights_are_checked(tmp_path: Path) -> None:
    (tmp_path / "w.pth").write_bytes(b"")
    assert read_given([f"vgg16={tmp_path / 'w.pth'}"]) == {"vgg16": tmp_path / "w.pth"}
    for word, fragment in (
        ("vgg16", "takes NAME=PATH"),
        ("vgg=a", "did you mean vgg16"),
        (f"vgg16={tmp_path / 'gone'}", "there is no file"),
    ):
        with pytest.raises(RequestError, match=fragment):
            read_given([word])


@pytest.mark.parametrize("name", ["inception", "vgg16"])
def test_a_library_that_is_not_there_is_named(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    def refuse(module: str) -> None:
        raise ModuleNotFoundError("No module named 'torchvision'", name="torchvision")

    monkeypatch.setattr("importlib.import_module", refuse)
    with pytest.raises(Unavailable, match=r"No module named 'torchvision'.*; `pip install"):
        networks.load_network(name, {}, torch.device("cpu"), print)
    with pytest.raises(Unavailable, match=r"open_clip cannot be imported .*torchvision"):
        networks.load_scorer("clip", LANTERN, {}, torch.device("cpu"), print)
