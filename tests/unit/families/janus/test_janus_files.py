"""Janus's folders: what is read off them, and what is refused in one sentence."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from support.janus import SPECIAL, config_of, weights_of, write_janus, write_tokenizer

import lantern_accel
from lantern_accel.errors import CheckpointError, LanternError, RequestError
from lantern_accel.families import registry
from lantern_accel.families.janus import official
from lantern_accel.families.registry import entry
from lantern_accel.memory.plan import planner_for
from lantern_accel.models.check import check
from lantern_accel.models.locate import find_model, named_parts


@pytest.mark.parametrize("layout", ["original", "hf"])
def test_check_says_what_is_there(layout: str, tmp_path: Path) -> None:
    report = check(write_janus(tmp_path / "Janus-Pro-1B", layout))
    assert report.family == "janus" and report.usable
    assert {one.part: one.state for one in report.parts} == {
        "target": "found", "vq": "found", "text_tokenizer": "found", "drafter": "missing",
    }  # fmt: skip


def test_without_a_tokenizer_there_are_no_prompts(tmp_path: Path) -> None:
    folder = write_janus(tmp_path / "Janus-Pro-1B", tokenizer=False)
    assert not check(folder).usable
    with (
        lantern_accel.load(folder, device="cpu") as pipe,
        pytest.raises(
            RequestError, match=r"lacks a text tokenizer: put the model's tokenizer\.json"
        ),
    ):
        pipe.generate("a cube")


def test_a_tokenizer_without_the_image_tags(tmp_path: Path) -> None:
    folder = write_janus(tmp_path / "Janus-Pro-1B")
    for name in list(SPECIAL)[:4]:
        if "end" in name:
            continue
        write_tokenizer(folder, drop=name)
        with pytest.raises(CheckpointError, match="so it cannot prompt Janus for an image"):
            find_model(folder)


def test_weights_that_only_read_pictures(tmp_path: Path) -> None:
    for layout, own in (("original", "gen_"), ("hf", "model.generation_")):
        given = {k: v for k, v in weights_of(layout).items() if not k.startswith(own)}
        given["vision_model.x" if layout == "original" else "model.vision_model.x"] = torch.ones(1)
        folder = write_janus(tmp_path / layout, layout, weights=given)
        with pytest.raises(CheckpointError, match="holds only the half of Janus that reads images"):
            find_model(folder)


def test_janusflow_is_another_method(tmp_path: Path) -> None:
    given = {**weights_of("original"), "vision_gen_dec_model.conv.weight": torch.ones(1)}
    with pytest.raises(CheckpointError, match="is JanusFlow, which generates by flow matching"):
        find_model(write_janus(tmp_path / "JanusFlow-1.3B", weights=given))


def test_a_generation_that_nothing_says_has_to_be_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = write_janus(tmp_path / "x")
    assert find_model(folder).manifest.variant == "pro"
    # Both generations have these sizes now, as Janus-Pro-1B and Janus-1.3B do.
    entries = [entry("janus-pro-1b"), entry("janus-1.3b")]
    for module in (official, registry):
        monkeypatch.setattr(module, "entries_like", lambda _: entries)
    with pytest.raises(CheckpointError, match=r"--model janus-pro-1b=.*x \(or janus-1.3b\)"):
        find_model(folder)
    found = find_model(f"janus-1.3b={folder}")
    assert (found.manifest.variant, found.manifest.name) == ("1.3b", "janus-1.3b")


def test_mixed_layouts(tmp_path: Path) -> None:
    given = {k: v.clone() for one in ("original", "hf") for k, v in weights_of(one).items()}
    with pytest.raises(CheckpointError, match="has keys of two layouts"):
        find_model(write_janus(tmp_path / "both", weights=given))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_attention_heads": 3}, "not 3 heads of one width"),
        ({"num_attention_heads": "four"}, "num_attention_heads 'four'"),
        (
            {"num_hidden_layers": 4},
            "num_hidden_layers 3 by its shapes, but its configuration says 4",
        ),
        ({"rope_scaling": {"rope_type": "yarn"}}, "asks for rope_scaling"),
        ({"rope_parameters": [1]}, r"rope_parameters \[1\], which"),
        ({"hidden_act": "gelu"}, "asks for hidden_act 'gelu'"),
    ],
)
def test_configurations_of_other_models(
    changes: dict[str, object], message: str, tmp_path: Path
) -> None:
    said = config_of("original")
    said["language_config"] = {**said["language_config"], **changes}
    with pytest.raises(CheckpointError, match=message):
        find_model(write_janus(tmp_path / "Janus-Pro-1B", config=said))


def test_a_part_that_is_absent(tmp_path: Path) -> None:
    given = weights_of("original")
    for key in ("language_model.model.layers.1.mlp.up_proj.weight", "gen_head.vision_head.bias"):
        some = {k: v for k, v in given.items() if k != key}
        folder = write_janus(tmp_path / key, weights=some)
        assert not check(folder).usable
        with pytest.raises(CheckpointError):
            lantern_accel.load(folder, device="cpu")
    some = {k: v for k, v in given.items() if "conv_blocks" not in k}
    with pytest.raises(LanternError, match=r"fetch it again|unsupported size"):
        find_model(write_janus(tmp_path / "vq", weights=some))


def test_what_a_request_cannot_have(tmp_path: Path) -> None:
    said = config_of("original")
    said["language_config"]["max_position_embeddings"] = 60
    folder = write_janus(tmp_path / "Janus-Pro-1B", config=said)
    with pytest.raises(CheckpointError, match="is not a drafter for this model"):
        find_model(folder, named_parts(drafter=folder))
    with lantern_accel.load(folder, device="cpu", dtype="float32") as pipe:
        with pytest.raises(RequestError, match=r"generates 12x12 pixels only, not 24x12"):
            pipe.generate("a cube", size=(24, 12))
        with pytest.raises(RequestError, match="shorten the prompt to 24 tokens"):
            pipe.generate("a very long description of a cube")
        with pytest.raises(RequestError, match="the prompt 3 is a number"):
            pipe.generate(3)
        with pytest.raises(RequestError, match="two-way guidance"):
            pipe.generate("a cube", cfg_scale_image=1.5)


@pytest.mark.parametrize(
    ("name", "parameters"),
    [("janus-pro-1b", 1.52e9), ("janus-pro-7b", 6.7e9), ("janus-1.3b", 1.52e9)],
)
def test_published_models_are_planned_before_anything_is_fetched(
    name: str, parameters: float
) -> None:
    planner = planner_for(name, memory=24 * 10**9)
    plan = planner.plan()
    # Two bytes a number, and the table that the aligner is folded into.
    assert plan.weights["target"] == pytest.approx(2 * parameters, rel=0.1)
    assert plan.fits
    assert plan.weights["vq"] == pytest.approx(4 * 71.9e6, rel=0.01)
