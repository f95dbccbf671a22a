"""Both tiny models in a process without a compiler and with an empty cache, as in a slim container."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("transformers", minversion="5.8")

DRAWN = """
import copy, warnings
warnings.simplefilter("ignore")
import torch
from support.hub_models import glm, glm_inputs, glm_processor, janus
from lantern_accel.device.plugins import open_backend
from lantern_accel.integrations import accelerate
from lantern_accel.integrations.transformers import decoder_of, decode

assert "native kernels: none" in open_backend("cpu").facts().notes
prompts = torch.tensor([[90, 5, 6, 7, 8, 92]])
asked = {"generation_mode": "image", "do_sample": False, "attention_mask": torch.ones_like(prompts)}
given = glm_inputs(glm_processor(), ["a red cube"], 32, 32)
more = {"do_sample": False, "max_new_tokens": 20}
for dtype in (torch.float32, torch.bfloat16, torch.float16):
    for make in (janus, glm):
        model = make(3, layers=1).to(dtype)
        if make is janus:
            draw = lambda one: one.generate(prompts, **asked)
            want = draw(model)
            accelerate(model, strategy="scd")
        else:
            draw = lambda one: one.generate(**given, **more, custom_generate=decode)
            want = model.generate(**given, **more)
        made = draw(model)
        if dtype == torch.float32:
            assert torch.equal(made, want), (make, made, want)
            assert torch.equal(draw(copy.deepcopy(model)), made)
        else:
            assert made.shape == want.shape
        memory = decoder_of(model).memory
        assert memory.beside > 0, memory
        print(make.__name__, dtype, memory)
"""


def test_every_dtype_is_drawn(tmp_path: Path) -> None:
    root = Path(__file__).parents[3]
    places = [str(root / "tests"), *(one for one in sys.path if one)]
    keep = {k: v for k, v in os.environ.items() if k not in ("CXX", "CC", "LANTERN_ACCEL_NATIVE")}
    empty = tmp_path / "bin"
    empty.mkdir()
    done = subprocess.run(
        [sys.executable, "-c", DRAWN],
        env={
            **keep, "PATH": str(empty), "LANTERN_ACCEL_CACHE": str(tmp_path / "cache"),
            "PYTHONPATH": os.pathsep.join(places), "OMP_NUM_THREADS": "1",
        },
        capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.count("next to it") == 6
