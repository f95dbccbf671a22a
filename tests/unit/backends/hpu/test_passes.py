"""The facts of the vendor's passes: every function that is captured, and none changed by them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from lantern_accel.device.plugins import open_backend
from lantern_accel.errors import RequestError
from lantern_accel_hpu import functions
from lantern_accel_hpu.software import passes

ROOT = Path(__file__).parents[4]
FACTS = ROOT / "backends/lantern_accel_hpu/gaudi_passes.json"
#: Sums in another order, in float32 numbers of about 1.
ROUNDING = 1e-4


@pytest.fixture(scope="module")
def rows() -> list[dict]:
    return json.loads(FACTS.read_text())["functions"]


@pytest.mark.parametrize("kind", functions.KINDS)
def test_every_function_is_in_the_table(rows: list[dict], kind: str) -> None:
    with open_backend("null") as backend, torch.inference_mode():
        names = set(functions.functions_of(functions.engine_of(backend, kind, 1, True)))
    for batch in (1, 2, 4):
        for guided in (True, False):
            found = {
                row["function"]
                for row in rows
                if (row["kind"], row["batch"], row["guided"]) == (kind, batch, guided)
            }
            assert found == names, (kind, batch, guided)


def test_none_is_changed_or_leaves_its_graph(rows: list[dict]) -> None:
    for row in rows:
        assert row["largest_difference"] <= ROUNDING, row
        assert (row["integers_that_differ"], row["error"]) == (0, ""), row
        assert (row["partitions"], row["eager"]) == (1, []), row
    # The passes did something: a table of graphs that nothing touched would show nothing.
    assert {"pass_inference_fuse_linear", "pass_reinplace_index_copy_ops"} <= {
        name for row in rows for name in row["passes"]
    }


def test_a_folder_that_is_no_clone_is_told(tmp_path: Path) -> None:
    with pytest.raises(
        RequestError, match="give a clone of HabanaAI/gaudi-pytorch-bridge with its"
    ):
        passes.Vendor(tmp_path)
