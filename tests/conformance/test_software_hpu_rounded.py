"""Steps with weights in fewer bits on the software HPU: the CPU's tokens, by listed operators alone."""

from __future__ import annotations

import pytest
from support.processes import Run, passes

from lantern_accel.nn.rounding import ROUNDINGS

ROUNDED = """
import sys, torch, warnings
from dataclasses import replace
from lantern_accel.device.plugins import choose_device, open_backend
warnings.simplefilter("error")
mode, drafts, *weights = sys.argv[1:]
hpu = choose_device("hpu", {"software": True, "mode": mode}).open()
cpu = open_backend("cpu", {"native": "off"})
from support import every_function as every
from support.engines import engine_of
from lantern_accel.nn.rounding import rounding
from lantern_accel.nn.transformer import rounded_copy
from lantern_accel.strategy.trees import parse_drafts
from lantern_accel.strategy.values import Sampling
from lantern_accel.testing import tiny
from lantern_accel.testing.trace import OpRecorder
from lantern_accel_hpu import operators, rounded
from lantern_accel_hpu.software import hpu as software

def rounded_engine(backend, strategy, how, dtype=torch.float32):
    model = tiny.tiny_model(backend, backend.device, dtype)
    fewer = replace(model, target=rounded_copy(model.target, backend, rounding(how)))
    shape = model.family.usual_shape(model)
    (target, drafter), (copy, _) = (model.family.target_for_shape(one, shape) for one in (model, fewer))
    chosen = tiny.tiny_strategy(strategy)
    if strategy == "self":
        chosen = chosen.override(drafts=parse_drafts(f"{drafts},{how}"))
    else:
        target, copy = copy, None
    found = {type(part.packed) for part in (copy or target).modules() if hasattr(part, "packed")}
    assert (rounded.ByteCodes in found) == (backend is hpu), found
    sampling = Sampling(cfg_scale=2.5, top_k=32)
    given = {"neighbours": model.neighbours, "copy": copy}
    made = engine_of((target, drafter), chosen, sampling, 2, ops=backend, **given)
    vars(made)["model"] = model
    return made

with torch.inference_mode():
    for word in weights:
        strategy, how = word.split("=")
        tokens = []
        for backend in (hpu, cpu):
            engine = rounded_engine(backend, strategy, how)
            made = every.captured(backend, engine) if backend is hpu else None
            tokens.append(every.tokens_of(engine, made, 3))
        assert tokens[0] == tokens[1], (strategy, how)
        for dtype in (torch.float32, torch.bfloat16):
            engine = rounded_engine(hpu, strategy, how, dtype)
            tiny.start(engine, 3)
            seen = OpRecorder(hpu.device, hpu.conformance().rules)
            software.reset_kernels()
            with seen:
                engine.step()
            assert not seen.violations, (word, dtype, seen.violations)
            for name in software.kernels():
                base = name.partition(".")[0]
                listed = {base, base.rstrip("_")} & operators.names()
                assert listed or base in operators.EXCEPTIONS, (word, dtype, name)
"""
OWN_WINDOWS = "self:4,window=4,passes=3"
EVERY = tuple(f"{('vanilla', 'self')[n % 2]}={how}" for n, how in enumerate(ROUNDINGS))


@pytest.mark.long
@pytest.mark.parametrize(
    ("mode", "drafts", "weights"),
    [
        pytest.param("graph", OWN_WINDOWS, EVERY, id="graph"),
        pytest.param("compile", OWN_WINDOWS, ("self=int6",), id="compile"),
    ],
)
def test_rounded_weights_give_the_tokens_of_the_cpu(
    on_software_hpu: Run, mode: str, drafts: str, weights: tuple[str, ...]
) -> None:
    """Of a target in fewer bits, and of drafts by a copy, which writes the target's cache as well."""
    passes(on_software_hpu(mode, drafts, *weights, script=ROUNDED))


FLOATS = """
import sys, pytest, torch, warnings
from lantern_accel.device.plugins import choose_device, open_backend
warnings.simplefilter("error")
from lantern_accel.errors import RequestError
from lantern_accel.nn.rounding import rounding
from lantern_accel.nn.transformer import Projection, pack, rounded_copy
from lantern_accel.testing import tiny
from lantern_accel.testing.trace import OpRecorder
from lantern_accel.strategy.trees import parse_drafts
from lantern_accel.strategy.values import named_strategy
from support import every_function as every

hpu = choose_device("hpu", {"software": True, "mode": sys.argv[1]}).open()
cpu, how = open_backend("cpu"), rounding("fp8")
assert parse_drafts("self:4,fp8").weights == "fp8"

with torch.inference_mode():
    # A copy in fp8 drafts, and the target decides: the picture is plain decoding's.
    real = tiny.rounding
    tiny.rounding = lambda name: how if name == "int8" else real(name)
    drafting = tiny.tiny_engine(hpu, "self", batch=2)
    tiny.rounding = real
    tiny.start(drafting, 3)
    seen = OpRecorder(hpu.device, hpu.conformance().rules)
    with seen:
        drafting.step()
    wrong = [one for one in seen.violations if one.rule in hpu.conformance().rules]
    assert not wrong, wrong
    assert any("fp8_gemm_v2" in str(one) for one in seen.signature)
    made = every.captured(hpu, drafting)
    plain = tiny.tiny_engine(cpu, "self", batch=2)  # of a copy in int8
    assert every.tokens_of(drafting, made, 3) == every.tokens_of(plain, None, 3)

    # A target is refused, and so is a device that has no such products, by name.
    layer = Projection(8, 8, bias=False)
    with pytest.raises(RequestError, match="fp8 are for copies that draft .*self:4,fp8"):
        pack(layer, hpu, how)
    with pytest.raises(RequestError, match="fp8 .*this is none: draft with int8"):
        rounded_copy(layer, cpu, how, drafts=True)
"""


@pytest.mark.long
def test_a_copy_in_floats_of_8_bits_drafts_and_the_target_decides(on_software_hpu: Run) -> None:
    passes(on_software_hpu("graph", script=FLOATS))
