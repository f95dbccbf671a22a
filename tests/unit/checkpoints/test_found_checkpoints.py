"""Checkpoints as people have them: wrapped keys, several sets of weights, ids of the Hub."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from support.official import (
    add_drafter,
    gpt_weights,
    hugging_face,
    shard_folder,
    vq_weights,
    write_sizes,
    write_trained,
)

import lantern_accel
from lantern_accel.checkpoints.weights import bare_names, open_checkpoint
from lantern_accel.cli import main
from lantern_accel.errors import CheckpointError, LanternWarning, ModelError, RequestError
from lantern_accel.families.registry import family, known_as, list_published
from lantern_accel.memory.plan import Planner, planner_for
from lantern_accel.models import hub, locate
from lantern_accel.models.locate import find_model, known_manifest

Write = Callable[[Path, dict[str, torch.Tensor]], object]


# --- keys ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "prefix",
    ["module.", "_orig_mod.", "module._orig_mod.", "_orig_mod.module.", "module.module.",
     "_orig_mod._orig_mod.", "_orig_mod.module._orig_mod.", "module._fsdp_wrapped_module."],
)  # fmt: skip
@pytest.mark.parametrize("suffix", [".pt", ".safetensors"])
def test_what_wrappers_put_before_keys_is_taken_off(
    tmp_path: Path, prefix: str, suffix: str
) -> None:
    given = gpt_weights(classes=5)
    wrapped = {prefix + key: value.contiguous() for key, value in given.items()}
    path = tmp_path / f"c2i_256{suffix}"
    if suffix == ".pt":
        torch.save({"model": wrapped}, path)
    else:
        save_file(wrapped, path)
    write_sizes(tmp_path / "c2i_256.json", n_head=4)
    assert find_model(path).manifest.target.num_classes == 5
    opened = open_checkpoint(path)
    assert set(opened) == set(given)
    name = "layers.0.attention.wo.weight"
    assert torch.equal(opened.read(name), given[name]) and opened.shape(name) == given[name].shape


def test_shards_with_wrapped_keys_and_an_index_are_one_checkpoint(tmp_path: Path) -> None:
    given = {f"module._orig_mod.{k}": v for k, v in hugging_face(gpt_weights()).items()}
    made = shard_folder(tmp_path / "LlamaGen-T2I", given)
    torch.save(given, made / "pytorch_model.bin")  # the same in another format
    assert find_model(made).manifest.target.n_layer == 2


def test_a_name_of_the_model_s_own_stays() -> None:
    assert bare_names(["module.a", "b"]) == {"module.a": "module.a", "b": "b"}
    inner = bare_names(["layers.0._orig_mod.w", "layers.1.w"])
    assert inner == {"layers.0.w": "layers.0._orig_mod.w", "layers.1.w": "layers.1.w"}
    both = ["_orig_mod.a", "a"]  # they would become one
    assert bare_names(both) == dict(zip(both, both, strict=True))
    assert bare_names([]) == {}


# --- names of state dicts -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name",
    ["model", "module", "state_dict", "ema", "model_ema", "ema_state_dict", "params_ema", "net",
     "my_own_name"],
)  # fmt: skip
def test_one_set_of_weights_is_found_under_any_name(tmp_path: Path, name: str) -> None:
    content: dict[str, Any] = {name: gpt_weights(classes=5), "steps": 3, "decay": torch.tensor(0.9)}
    content.setdefault("model", {"kind": "gpt"})  # a usual name without weights is passed over
    content["optimizer"] = {"state": {0: {"exp_avg": torch.zeros(2)}}, "param_groups": []}
    torch.save(content, tmp_path / "c2i_256.pt")
    write_sizes(tmp_path / "c2i_256.json", n_head=4)
    assert find_model(tmp_path / "c2i_256.pt").manifest.target.num_classes == 5


def test_of_several_sets_the_official_one_is_read_and_the_others_are_told(tmp_path: Path) -> None:
    other = gpt_weights(classes=6)
    torch.save({"ema": other, "model": gpt_weights(classes=5)}, tmp_path / "c2i_256.pt")
    write_sizes(tmp_path / "c2i_256.json", n_head=4)
    with pytest.warns(LanternWarning, match=r"under 'model', 'ema'; 'model' is read; to take"):
        found = find_model(tmp_path / "c2i_256.pt")
    assert found.manifest.target.num_classes == 5


@pytest.mark.parametrize("names", [("ema", "model_ema"), ("first", "second")])
def test_several_sets_without_an_order_are_a_question(
    tmp_path: Path, names: tuple[str, str]
) -> None:
    torch.save({name: gpt_weights(classes=5) for name in names}, tmp_path / "x.pt")
    with pytest.raises(CheckpointError) as caught:
        open_checkpoint(tmp_path / "x.pt")
    assert all(repr(name) in str(caught.value) for name in names)
    assert "into a file of its own" in str(caught.value)


# --- parts within a folder ------------------------------------------------------------------------------


@pytest.mark.parametrize("index", [True, False])
def test_an_image_tokenizer_within_a_hugging_face_folder_is_found(
    tmp_path: Path, index: bool
) -> None:
    made = shard_folder(tmp_path / "LlamaGen-T2I", count=2, index=index)
    write_trained(made / "vq_ds16_t2i.pt", vq_weights(64))
    torch.save({"state": {}}, made / "optimizer.pt")
    torch.save({"x": 1}, made / "training_args.bin")
    drafter = add_drafter(tmp_path)
    found = find_model(made)
    assert found.files["vq"] == made / "vq_ds16_t2i.pt" and found.files["target"] == made
    assert found.files["drafter"] == drafter


# --- ids of the Hub -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "name"),
    [
        ("deepseek-ai/Janus-Pro-1B", "janus-pro-1b"),
        ("DeepSeek-AI/janus-pro-1b", "janus-pro-1b"),
        ("deepseek-ai/Janus-Pro-1B/", "janus-pro-1b"),
        ("deepseek-ai/Janus-Pro-1B@main", "janus-pro-1b"),
        ("https://huggingface.co/deepseek-ai/Janus-Pro-1B", "janus-pro-1b"),
        ("http://hf.co/deepseek-ai/Janus-Pro-1B/tree/main?x=1", "janus-pro-1b"),
        ("huggingface.co/zai-org/GLM-Image/tree/main/vision_language_encoder", "glm-image"),
        ("hf://zai-org/GLM-Image", "glm-image"),
        ("BAAI/Emu3-Gen", "emu3-gen"),
        ("hf.co/BAAI/Emu3.5-Image", "emu3.5-image"),
        ("LlamaGen-B-256", "llamagen-b-256"),
        ("FoundationVision/LlamaGen/c2i_B_256.pt", "llamagen-b-256"),
        (
            "https://huggingface.co/FoundationVision/LlamaGen/blob/main/c2i_L_384.pt",
            "llamagen-l-384",
        ),
        ("google/flan-t5-xl", "flan-t5-xl"),
        ("someone/else", "someone/else"),
        ("./models/x", "./models/x"),
    ],
)
def test_an_id_of_the_hub_is_known_by_its_name(given: str, name: str) -> None:
    assert known_as(given) == name


def test_every_repository_of_the_list_is_known_or_names_its_models() -> None:
    for one in list_published():
        try:
            assert known_as(one.repo.upper()) == one.name
        except ModelError as error:
            assert one.name in str(error)


def test_an_id_is_loaded_fetched_and_planned(monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    asked = []

    def resolve(one: Any, tell: Any, *, skip: Any = ()) -> Any:
        asked.append(one.name)
        raise ModelError("there is no network")

    monkeypatch.setattr(locate, "resolve", resolve)
    monkeypatch.setattr(hub, "resolve", resolve)
    for name in ("https://huggingface.co/deepseek-ai/Janus-Pro-1B/", "GAIR/Anole-7b-v0.1"):
        with pytest.raises(ModelError, match="no network"):
            find_model(name)
    assert main(["models", "fetch", "jadohu/anole_drafter"]) == 2
    with pytest.raises(ModelError, match="no network"):  # of a size that it can generate
        lantern_accel.generate(1, model="llamagen-b-256", size="256x256", device="cpu")
    assert asked == ["janus-pro-1b", "anole-7b", "anole-drafter", "llamagen-b-256"]
    for name, says in (
        ("peizesun/llamagen_t2i", "name one of them: llamagen-t2i-stage1, llamagen-t2i-stage2"),
        ("deepseek-ai/Janus-Pro-1B@v2", "names the revision 'v2'"),
        ("google/flan-t5-xl", "is 'flan-t5-xl', a part that models use"),
    ):
        with pytest.raises(ModelError, match=says):
            find_model(name)


def test_a_folder_of_that_name_comes_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    shard_folder(tmp_path / "google" / "flan-t5-xl", index=False)
    assert find_model("google/flan-t5-xl").manifest.target.n_layer == 2


# --- sizes --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("model", "size"),
    [
        ("llamagen-b-256", "384x384"),
        ("LlamaGen-B-256", "384x384"),
        ("deepseek-ai/Janus-Pro-1B", "512x512"),
        ("glm-image", "1000x1000"),
        ("lumina-mgpt-7b-768", "10x10"),
        ("lantern-emoji", "300x200"),
    ],
)
def test_a_size_that_a_published_model_cannot_draw_is_refused_before_it_is_fetched(
    model: str, size: str, monkeypatch: pytest.MonkeyPatch, capsys: Any, tmp_path: Path
) -> None:
    def resolve(*given: Any, **more: Any) -> Any:
        raise AssertionError("it was to be fetched")

    monkeypatch.setattr(locate, "resolve", resolve)
    with pytest.raises(RequestError, match=r"\d+x\d+|pixels"):
        lantern_accel.generate("1", model=model, size=size, device="cpu")
    out = ["-o", str(tmp_path / "x.png")]
    assert main(["generate", "1", "-m", model, "--size", size, "-d", "cpu", *out]) == 2
    told = capsys.readouterr().err
    assert told.startswith("error: ") and "pixels" in told
    assert main(["models", "plan", model, "--size", size]) == 2


@pytest.mark.long
def test_a_plan_of_a_size_is_that_of_its_tokens() -> None:
    assert planner_for("glm-image", picture=(512, 256)).shape[1:] == (8, 16)  # type: ignore[index]
    lumina, manifest = family("chameleon"), known_manifest("lumina-mgpt-7b-768")
    assert lumina.shape_for(manifest, (1024, 576)) == (manifest.target.prefix_length, 36, 64)
    assert family("llamagen").shape_for(known_manifest("llamagen-b-256"), (256, 256)) is None
    for kind in (family("glm_image"), lumina):
        tiny: Any = kind.tiny()
        large = tiny.target.prefix_length, 2 * tiny.target.height, 2 * tiny.target.width
        plans = []
        for shape in (None, large):
            planner = Planner(tiny, dtype=torch.float32, shape=shape)
            plans.append(planner.plan(planner.strategy("vanilla")))
        assert plans[1].weights == plans[0].weights and plans[1].buffers > plans[0].buffers
        assert plans[1].workspace["pixels"] >= plans[0].workspace["pixels"]


@pytest.mark.long
def test_the_command_plans_a_size(capsys: pytest.CaptureFixture[str]) -> None:
    def plan(*words: str) -> dict[str, Any]:
        asked = ["models", "plan", *words, "--strategy", "vanilla", "--memory", "999GB", "--json"]
        assert main(asked) == 0
        return dict(json.loads(capsys.readouterr().out))

    own = plan("lumina-mgpt-7b-768")
    assert plan("lumina-mgpt-7b-768", "--size", "768x768") == own
    wide = plan("lumina-mgpt-7b-768", "--size", "1024x576")
    assert wide["weights"] == own["weights"] and wide["peak"] != own["peak"]
