"""The page of ``tools/conform_xla.py``: tokens are compared, and nothing is skipped without a word."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[3]


def tool() -> Any:
    spec = importlib.util.spec_from_file_location("conform_xla", ROOT / "tools" / "conform_xla.py")
    assert spec is not None and spec.loader is not None
    import sys

    module = sys.modules["conform_xla"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_every_strategy_is_drawn_on_both_devices_before_the_kit():
    names = [stage.name for stage in tool().stages(["kv.slots", "xla.float64"], profile=False)]
    assert {"red-heart-vanilla-cpu", "dog-face-vanilla-xla", "dog-face-lantern++-xla"} <= set(names)
    assert names[-2:] == ["kv.slots", "xla.float64"]
    assert [stage.name for stage in tool().stages(["kv.slots"], profile=True)][-1] == "compare"


def test_the_page_tells_what_differs_and_what_has_no_result(tmp_path: Path):
    module, checks = tool(), ["kv.slots", "kv.commit"]
    for device, tokens in (("cpu", "a" * 64), ("xla", "b" * 64)):
        drawn = {"vanilla": tokens, "eagle": "c" * 64}
        for strategy, sha in drawn.items():
            path = tmp_path / f"red-heart-{strategy}-{device}.json"
            path.write_text(json.dumps({"tokens_sha256": sha}))
    text = module.page(tmp_path, checks, {})
    assert "| red heart | vanilla | aaaaaaaaaaaa | bbbbbbbbbbbb | **not the same** |" in text
    assert "| red heart | eagle | cccccccccccc | cccccccccccc | the same tokens |" in text
    assert "| dog face | eagle | no result | no result | **not the same** |" in text
    assert "The kit has no result." in text
    outcome = {"name": "kv.slots", "state": "failed", "seconds": 61.0, "detail": "a | b"}
    kit = {"outcomes": [outcome], "device_name": "cpu through XLA", "torch": "2.9.0"}
    (tmp_path / "kit").mkdir()
    (tmp_path / "kit" / "kv.slots.json").write_text(json.dumps(kit))
    text = module.page(tmp_path, checks, {"red-heart-vanilla-cpu": 61.0, "kv.slots": 61.0})
    assert "0 passed, 1 failed, 0 not applicable,\nin 1 minutes." in text
    assert "Without a result: kv.commit." in text
    assert "| kv.slots | failed | 61 | a \\| b |" in text
    assert "red-heart-vanilla-cpu: 61 s" in text and "kv.slots: 61 s" not in text


def test_a_run_that_was_interrupted_is_no_result(tmp_path: Path):
    module, run = tool(), tmp_path / "run-xla.json"
    assert not module.finished(run)
    run.write_text(json.dumps({"state": "running"}))
    assert not module.finished(run)
    run.write_text(json.dumps({"state": "complete"}))
    assert module.finished(run)
    page = tmp_path / "report.md"
    assert not module.finished(page)
    page.write_text("# A report\n")
    assert module.finished(page)
