"""Decode in this process and print the planned and the measured peak: ``python peak.py MODEL ...``.

A process of its own, because a peak can be measured once.
"""

from __future__ import annotations

import json
import sys

import PIL.Image
import safetensors.torch
import tokenizers
import torch

import lantern_accel.cli.generate
from lantern_accel.device.backend import dtype_policy
from lantern_accel.device.plugins import open_backend
from lantern_accel.generation.pipeline import Pipeline
from lantern_accel.memory.plan import Planner, runtime_of
from lantern_accel.models.bundle import load_model
from lantern_accel.models.locate import find_model

assert PIL.Image and safetensors.torch and tokenizers and lantern_accel.cli.generate


def main(model: str, prompt: str, strategy: str, batch: int, dtype: str) -> None:
    # Compiling is decided by timing: another peak on a busy machine.
    backend = open_backend("cpu", {"threads": 1, "compile": "off"})
    found = find_model(model)
    compute = dtype_policy(backend, dtype).compute
    runtime = runtime_of(backend)
    backend.memory(new_peak=True)
    loaded = load_model(found, backend, dtype=compute, device=backend.device)
    pipeline = Pipeline(loaded, backend, compute)
    request = pipeline.request([prompt] * batch, strategy=strategy, seed=1, batch_size=batch)
    result = pipeline.generate([prompt] * batch, strategy=strategy, seed=1, batch_size=batch)
    assert len(result.images) == batch
    peak = backend.memory().peak
    planner = Planner(loaded.manifest, dtype=compute, runtime=runtime, runtime_measured=True)
    plan = planner.plan(request.strategy, request.sampling, batch=batch)
    print(json.dumps({"measured": peak, "planned": plan.peak, "plan": plan.report()}))


if __name__ == "__main__":
    torch.manual_seed(0)
    main(sys.argv[1], sys.argv[2], sys.argv[3], int(sys.argv[4]), sys.argv[5])
