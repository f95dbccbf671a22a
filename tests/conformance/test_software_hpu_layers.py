"""What a Gaudi does with a step that its compiler refuses: layer by layer, or operator by operator."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.models import write_tiny_model
from support.processes import Run, passes

REFUSED = """
import sys, torch, warnings
import lantern_accel
from lantern_accel_hpu import environment

# The default of new Gaudi software, which nobody asked for by name.
environment.runner = lambda *given: "compile"
real = torch.compile

def texts():
    yield "aten::view.dtype isn't registered in KernelRegistry!"
    yield "synNodeCreateWithId failed for node: add_fwd_i32 with synStatus 18 [Unsupported]. ."
    yield ("Input arg 2 for View op needs to be either Int List or Shape Tensor\\n[Rank:0] Habana "
           "exception raised from AllocateAndAddSynapseNode at tensor_shape_kernels.cpp:212")
    yield "Graph compile failed. synStatus=synStatus 26 [Generic failure]. "
    yield ("aten::add() Expected a value of type 'Tensor' for argument 'other' but instead found type "
           "'int'.")
    yield "aten::bitwise_right_shift.Tensor_Scalar is not lowered: no synapse node was created for it"

def refusing(said):
    def compile_(function, **options):
        if function.__code__.co_name == "lantern_layer" and sys.argv[2] == "layers":
            return real(function, **options)
        def run(*given):  # recipes are made when a function is first called
            raise RuntimeError(said)
        return run
    return compile_

def drawn(device, **options):
    with lantern_accel.load(sys.argv[1], device=device, dtype="float32", options=options) as pipeline:
        made = pipeline.generate("red heart", seed=3, strategy="vanilla")
        return made.tokens.tolist(), pipeline.backend.counters()

def cast_in_the_middle():
    # Placement takes the name, and the registry has no such overload.
    backend = lantern_accel.load(sys.argv[1], device="hpu", options={"software": True}).backend
    x = torch.ones(4, device=backend.device)
    def step():
        x.copy_((x + 1).view(torch.int32).add(1).view(torch.float32))
    try:
        backend.capture(step)
    except lantern_accel.LanternError as error:
        assert "aten::view.dtype isn't registered in KernelRegistry" in str(error), error
    else:
        raise AssertionError("a graph holds what the registry has not")

if sys.argv[2] == "everything":
    cast_in_the_middle()
wanted, _ = drawn("cpu")
for said in list(texts())[:1 if sys.argv[2] == "layers" else None]:
    torch.compile = refusing(said)
    with warnings.catch_warnings(record=True) as lines:
        warnings.simplefilter("always")
        got, counted = drawn("hpu", software=True)
    assert got == wanted
    told = [str(one.message) for one in lines]
    assert len(told) == 1, told
    line = told[0]
    assert said.split()[0] in line or "compiler refused" in line, line
    if sys.argv[2] == "layers":
        assert line.startswith("SLOWER: the prefill is compiled layer by layer"), line
        # Two layers share a graph, in the prefill and in the step; none is made while it draws.
        assert counted["graph_compilation.TotalNumber"] == counted["buckets.graphs"] == 2, counted
        assert not [name for name in counted if name.startswith("late.")], counted
    else:
        assert "SLOW: every call of the" in line, line
print("fine")
"""


@pytest.mark.long
@pytest.mark.parametrize("refused", ["everything", "layers"])
def test_a_refused_step_still_draws_with_one_line(
    on_software_hpu: Run, tmp_path: Path, refused: str
) -> None:
    """Texts are the bridge's own: its registry, its asserts, Synapse's status, TorchScript's types."""
    model = write_tiny_model(tmp_path / "model")
    assert "fine" in passes(on_software_hpu(str(model), refused, script=REFUSED))
