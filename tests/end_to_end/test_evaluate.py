"""``lantern-accel evaluate`` on a tiny model: every part, resumed, refused, and as pictures."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from lantern_accel_profiles.evaluation.schema import PARTS, Evaluation


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Four captioned images, one of them damaged."""
    out = tmp_path / "images"
    out.mkdir()
    rng = np.random.default_rng(0)
    lines = []
    for i in range(4):
        picture = Image.fromarray(rng.integers(0, 255, (20, 24, 3), dtype=np.uint8))
        picture.save(out / f"{i}.png")
        lines.append(json.dumps({"file": f"{i}.png", "prompt": "red heart"}))
    (out / "3.png").write_bytes(b"broken")
    (out / "captions.jsonl").write_text("\n".join(lines) + "\n")
    return out


@pytest.mark.long
def test_every_part_is_measured_and_the_same_twice(command, tiny_model, folder, tmp_path):
    reports = []
    for name in ("a", "b"):
        out = tmp_path / f"{name}.json"
        done = command(
            "evaluate", "--model", tiny_model, "--quick", "--images", folder, "-o", out,
            "--device", "cpu", "--dtype", "float32",
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        assert "skipped 3.png" in done.stderr
        reports.append(Evaluation.model_validate_json(out.read_text()))
    one, other = reports
    assert one == other
    assert one.likelihood is not None
    assert one.likelihood[0].count == 3
    assert one.likelihood[0].nll == pytest.approx(np.log(48), rel=0.2)
    assert one.ambiguity is not None
    assert [row.cfg for row in one.ambiguity] == [1.0, 3.0]
    assert one.interchange is not None
    own, near, _, any_code = one.interchange
    assert own.psnr > near.psnr > any_code.psnr
    assert one.frontier is not None
    assert {p.strategy.name for p in one.frontier} == {"eagle", "eagle2", "lantern", "lantern++"}
    exact = [p for p in one.frontier if p.strategy.acceptance.kind == "exact"]
    assert all(p.total_variation_per_token.value == 0 for p in exact)
    assert any(p.strategy.tv_budget for p in one.frontier)
    assert one.distances is not None
    greedy = {
        r.strategy.name: r.greedy_same_tokens.value for r in one.distances if r.greedy_same_tokens
    }
    assert greedy["vanilla"] == greedy["eagle"] == greedy["eagle2"] == 1.0
    assert set(one.skipped) <= {"features"}
    text = (tmp_path / "a.md").read_text()
    assert "## Interchangeable codes" in text and "## Distance to exact decoding" in text


@pytest.mark.long
def test_a_stopped_evaluation_goes_on_and_another_one_is_refused(
    command, tiny_model, folder, tmp_path, monkeypatch
):
    out = tmp_path / "eval.json"
    words = ["evaluate", "--model", tiny_model, "--quick", "--images", folder, "-o", out]
    assert command(*words, "--part", "likelihood").returncode == 0
    first = json.loads(out.read_text())
    assert [part for part in PARTS if first[part] is not None] == ["likelihood"]
    from lantern_accel_profiles.evaluation import run

    monkeypatch.setattr(run, "likelihood", lambda *a: pytest.fail("measured again"))
    assert command(*words, "--part", "likelihood", "--part", "interchange").returncode == 0
    second = json.loads(out.read_text())
    assert second["likelihood"] == first["likelihood"]
    assert second["interchange"] is not None
    done = command(*words, "--seed", 5)
    assert done.returncode == 2
    assert "its setting seed is 0, not 5" in " ".join(done.stderr.split())
    full = command(*(one for one in words if one != "--quick"), "--part", "likelihood")
    assert full.returncode == 2
    assert "its setting" in " ".join(full.stderr.split())
    monkeypatch.chdir(tmp_path)  # each has a file of its own where none is named
    assert command(*words[:4], "--part", "frontier").returncode == 0
    assert (tmp_path / "eval-quick.json").is_file()
    out.write_text("{}")
    assert "has schema version None" in command(*words).stderr


def test_the_grid_has_every_prompt_and_strategy(command, tiny_model, tmp_path):
    path = tmp_path / "grid.png"
    words = ["evaluate", "--model", tiny_model, "--grid", path, "--strategy", "vanilla"]
    assert command(*words, "--prompt", "red heart", "--prompt", "dog face").returncode == 0
    before = path.read_bytes()
    with Image.open(path) as picture:
        assert picture.width >= 2 * 16
    command(*words, "--prompt", "red heart", "--prompt", "dog face")
    assert path.read_bytes() == before
