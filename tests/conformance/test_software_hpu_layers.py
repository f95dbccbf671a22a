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
PARTS = ("lantern_layer", "lantern_draft", "lantern_end")

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
        if function.__code__.co_name in PARTS and sys.argv[2] == "layers":
            return real(function, **options)
        def run(*given):  # recipes are made when a function is first called
            raise RuntimeError(said)
        return run
    return compile_

def drawn(device, **options):
    with lantern_accel.load(sys.argv[1], device=device, dtype="float32", options=options) as pipeline:
        made = pipeline.generate("red heart", seed=3, strategy="vanilla")
        counted = pipeline.backend.counters()
        return made.tokens.tolist(), counted

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
    assert said.split()[0] in line, line
    if sys.argv[2] == "layers":
        assert line.startswith("SLOWER: the prefill is compiled layer by layer"), line
        # Two layers share a graph, in the prefill and in the step, which has two more, of its drafts and
        # of all behind its pass; none is made while it draws.
        assert counted["graph_compilation.TotalNumber"] == counted["buckets.graphs"] == 4, counted
        assert not [name for name in counted if name.startswith("late.")], counted
    else:
        assert "SLOW: every call of the" in line, line
"""


@pytest.mark.long
@pytest.mark.parametrize("refused", ["everything", "layers"])
def test_a_refused_step_still_draws_with_one_line(
    on_software_hpu: Run, tmp_path: Path, refused: str
) -> None:
    """Texts are the bridge's own: its registry, its asserts, Synapse's status, TorchScript's types."""
    model = write_tiny_model(tmp_path / "model")
    passes(on_software_hpu(str(model), refused, script=REFUSED))


LATE = """
import sys, warnings
import lantern_accel
from lantern_accel.errors import BackendError, DeviceLostError, NotCapturableError
from lantern_accel_hpu import environment
from lantern_accel_hpu.software import late

environment.runner = lambda *given: "compile"  # which nobody asked for by name

def load(device, **options):
    return lantern_accel.load(sys.argv[1], device=device, dtype="float32", options=options)

def drawn(pipeline, strategy):
    with warnings.catch_warnings(record=True) as lines:
        warnings.simplefilter("always")
        made = pipeline.generate("red heart", seed=3, strategy=strategy)
    return made.tokens.tolist(), [str(one.message) for one in lines]

def refused(pipeline, strategy, kind=BackendError):
    try:
        drawn(pipeline, strategy)
    except kind as error:
        return str(error)
    finally:
        late.clear()
    raise AssertionError("an image was drawn from work that was lost")

strategies = ("vanilla", "auto")
with load("cpu") as cpu:
    wanted = {name: drawn(cpu, name)[0] for name in strategies}
for strategy, function, errors, at_launch in (
    ("vanilla", "prefill", 2, True),
    ("vanilla", "step", 1, False),
    ("auto", "step 16", 2, True),
):
    with load("hpu", software=True) as pipeline:
        planted = late.plant(function, errors=errors, at_launch=at_launch)
        got, told = drawn(pipeline, strategy)
        late.clear()
        assert planted.runs == 1 and got == wanted[strategy], (function, planted)
        assert len(told) == 1 and told[0].startswith(f"SLOWER: the {function} "), told
        # The other of the two functions fails once its image has begun: nothing goes on in silence.
        if strategy == "vanilla":
            other = {"prefill": "step", "step": "prefill"}[function]
            late.plant(other, first=9 if other == "step" else 1, errors=errors, at_launch=at_launch)
            assert "refused a graph while decoding" in refused(pipeline, strategy)
        # What comes next meets none of it.
        assert drawn(pipeline, strategy) == (wanted[strategy], [])
        # A card that is lost stays that.
        if (function, errors) == ("step", 1):
            late.plant("prefill", text="synStatus=17 [Device reset]")
            refused(pipeline, strategy, DeviceLostError)

# Blocks and parts that are refused late as well leave the step to operators.
with load("hpu", software=True) as pipeline:
    for function in ("step", "layer", "draft", "end"):
        late.plant(function, errors=2, at_launch=True)
    got, told = drawn(pipeline, "vanilla")
    late.clear()
    assert got == wanted["vanilla"] and len(told) == 1 and "SLOW:" in told[0], told
"""


@pytest.mark.long
def test_errors_that_come_late_let_another_way_serve(on_software_hpu: Run, tmp_path: Path) -> None:
    """One thread's error or two, at a wait or at the next launch, in prefill, steps and their parts."""
    model = write_tiny_model(tmp_path / "model")
    passes(on_software_hpu(str(model), script=LATE))


LAZY = """
import sys, pytest
import lantern_accel
from lantern_accel.errors import BackendError, NotCapturableError
from lantern_accel_hpu.software import late

def load():
    return lantern_accel.load(
        sys.argv[1], device="hpu", dtype="float32", options={"software": True, "mode": "graph"}
    )

with load() as pipeline:
    wanted = pipeline.generate("red heart", seed=3, strategy="vanilla").tokens
    late.plant("replay", first=5)
    with pytest.raises(BackendError, match="refused a graph while decoding"):
        pipeline.generate("red heart", seed=3, strategy="vanilla")
    late.clear()
    assert (pipeline.generate("red heart", seed=3, strategy="vanilla").tokens == wanted).all()
    pipeline.release_engines()
    late.plant("HPUGraph", errors=0)
    with pytest.raises(BackendError, match="new process with --option mode=eager") as told:
        pipeline.generate("red heart", seed=3, strategy="vanilla")
    assert not isinstance(told.value, NotCapturableError)
    # As on a card: no other graph can be captured in this process.
    late.clear()
    with pytest.raises(BackendError, match="that capture first"):
        pipeline.generate("red heart", seed=3, strategy="vanilla")
"""


@pytest.mark.long
def test_a_failed_capture_in_lazy_mode_asks_for_another_process(
    on_software_hpu: Run, tmp_path: Path
) -> None:
    model = write_tiny_model(tmp_path / "model")
    passes(on_software_hpu(str(model), script=LAZY))
