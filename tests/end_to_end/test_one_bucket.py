"""Requests that differ in numbers alone share one bucket: nothing is compiled after its warm-up."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.processes import Run, on_software_hpu, passes

__all__ = ["on_software_hpu"]

SCRIPT = """
import sys, warnings
import pytest
import lantern_accel
from lantern_accel.errors import LanternWarning
from lantern_accel.strategy import values

warnings.simplefilter("error", LanternWarning)
options = {"software": True, "mode": "compile"}
with lantern_accel.load(sys.argv[1], device="hpu", options=options, dtype="float32") as pipeline:
    pipeline.warm_up((3,), [pipeline.strategy("lantern++", k=3)])
    warm = pipeline.backend.counters()
    assert (warm["buckets.prefill"], warm["buckets.step"], warm["buckets.graphs"]) == (1, 1, 2), warm

    def draw(index):
        numbers = {"temperature": 0.5 + index / 20, "lam": 1.0 + index / 4}
        numbers |= {"cfg_scale": 1.5 + index / 3, "seed": index, "strategy": "lantern++", "k": 3}
        return pipeline.generate("red heart", num_images=3, batch_size=3, **numbers)

    requests = int(sys.argv[2])
    drawn = {draw(index).tokens.numpy().tobytes() for index in range(requests)}
    assert len(drawn) > requests // 2
    # Not a graph, and not a recipe either: loading, reading and drawing were warmed up as well.
    after = pipeline.backend.counters()
    # What rose between two steps is told with the second, of the same recipes that were counted before.
    assert {n: after[n] for n in warm} == warm, (warm, after)
    assert {n for n in after if not n.startswith("between.")} <= set(warm), after
    # A bucket's key that holds a number is caught.
    values.Sampling.bucket = property(lambda self: self.model_dump_json())
    with pytest.raises(LanternWarning, match="was not warmed up and is compiled now"):
        draw(20)
print("fine")
"""


@pytest.mark.long
def test_requests_of_three_images_compile_one_bucket(
    on_software_hpu: Run, tiny_model: Path
) -> None:
    assert "fine" in passes(on_software_hpu(str(tiny_model), "20", script=SCRIPT))
