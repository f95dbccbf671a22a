"""The conformance kit passes the CPU, and every planted fault is caught by its named check."""

from __future__ import annotations

import json
import xml.etree.ElementTree as ET
from collections.abc import Callable
from dataclasses import replace
from itertools import count

import pytest
import torch

import lantern_accel
import lantern_accel.decoding.engine as engine_module
import lantern_accel.decoding.running as running
from lantern_accel.cli import main
from lantern_accel.device.backend import Backend, HostCopy, KVCache, MemoryUse, Replay, Stopwatch
from lantern_accel.device.plugins import open_backend
from lantern_accel.errors import BackendError, ModelError
from lantern_accel.testing import CHECKS, Measured, NeedsCard, caches, run_checks, static, tiny
from lantern_accel.testing.kit import Report, checks_of, select
from lantern_accel_cpu.backend import DeviceBackend

Plant = Callable[[pytest.MonkeyPatch, Backend], None]


def after_commit(act: Callable[..., None]) -> Plant:
    """Do something wrong at the end of every step."""

    def plant(patch: pytest.MonkeyPatch, backend: Backend) -> None:
        real = engine_module.commit

        def wrong(verifying, state, tree, features, accepted):
            real(verifying, state, tree, features, accepted)
            act(state)

        patch.setattr(engine_module, "commit", wrong)

    return plant


def method(name: str, make: Callable[[Callable], Callable]) -> Plant:
    """Replace a method of the opened backend."""

    def plant(patch: pytest.MonkeyPatch, backend: Backend) -> None:
        patch.setattr(backend, name, make(getattr(backend, name)))

    return plant


def counting(state) -> None:
    counting.n += 1
    state.price.add_(1e-9 * counting.n).sub_(1e-9 * counting.n)


counting.n = 0


def rebinding(state) -> None:
    state.length = state.length + 0


class Stale(Replay):
    """Records the first request's states and gives them again to every later one."""

    def __init__(self, step, state) -> None:
        super().__init__(step)
        self.state, self.seen, self.index = state, [], 0

    def __call__(self) -> None:
        if self.index < len(self.seen):
            for name, value in self.seen[self.index].items():
                getattr(self.state, name).copy_(value)
        else:
            super().__call__()
            self.seen.append({k: v.clone() for k, v in vars(self.state).items()})
        self.index += 1
        if int(self.state.length.min()) + 1 >= self.state.tokens.shape[1] - 1:
            self.index = 0


def last_argmax(patch: pytest.MonkeyPatch, backend: Backend) -> None:
    real = torch.Tensor.argmax

    def argmax(self, dim=None, keepdim=False):
        if not self.is_floating_point():
            return real(self, dim=dim, keepdim=keepdim)
        return self.shape[dim] - 1 - real(self.flip(dim), dim=dim, keepdim=keepdim)

    patch.setattr(torch.Tensor, "argmax", argmax)


def spilling(write):
    def wrong(kv, layer, address, k, v):
        write(kv, layer, address, k, v)
        kv.keys[0].view(-1)[0] += 1

    return wrong


def stale_step(real):
    """Capture prefill as it should be, and the step stale."""
    return lambda function, name: (
        real(function, name) if name == "prefill" else Stale(function, function.__self__.state)
    )


def short(x: torch.Tensor) -> torch.Tensor:
    """Keep TF32's eleven bits of each float32."""
    return ((x.view(torch.int32) + 0x1000) & ~0x1FFF).view(torch.float32)


def in_three_parts(attend):
    """Multiply as a GPU that makes a float32 product of three in TF32: values lose their last bits."""

    def wrong(q, kv, layer, mask):
        out = attend(q, kv, layer, mask)
        if out.dtype != torch.float32:
            return out
        return short(out) + short(out - short(out))

    return wrong


def forgetful(real):
    """Draw every code from the same weights."""
    return lambda weights, uniforms: torch.cat(
        [real(weights, uniforms[..., i : i + 1]) for i in range(uniforms.shape[-1])], dim=-1
    )


def generous(real):
    """Test every draft with a smaller uniform."""
    return lambda tree, logits, given, rule, uniforms, *rest: real(
        tree, logits, given, rule, uniforms * 0.5, *rest
    )


def off_by_one_head(patch: pytest.MonkeyPatch, backend: Backend) -> None:
    """Let native attention take every head for the first one."""
    if backend.kernels is None:
        pytest.skip("no native kernels here: there is no compiler, and no head to be off by")
    from lantern_accel_cpu.native import kernels
    from lantern_accel_cpu.native.library import Cache

    real = kernels.Attend

    def attend(cache, *rest):
        return real(Cache(cache.row, 0, cache.slot, cache.heads, cache.width), *rest)

    patch.setattr(kernels, "Attend", attend)


def restless(scan):
    """Add in another order every time, as a long row is scanned in pieces."""
    times = count()

    def wrong(weights):
        found = scan(weights)
        return torch.where(
            found > found[..., -1:] / 2, found * (1 + 1e-7 * (next(times) % 3)), found
        )

    return wrong


def falling(scan):
    def wrong(weights):
        found = scan(weights)
        found[..., 1::2] -= 2e-6
        return found

    return wrong


def refusing(rule: str) -> Plant:
    """Give the backend a rule against one operator that every step runs."""
    rules = {rule: lambda func, args, kwargs: "too hot" if "argmax" in func.name() else ""}
    return method("operator_rules", lambda real: lambda: rules)


class Late(HostCopy):
    """A copy that arrives a step late, and forgets nothing when a request is cancelled."""

    lag = 1

    def __init__(self, source: torch.Tensor) -> None:
        super().__init__(source)
        self.posted: list[torch.Tensor] = []

    def post(self) -> None:
        self.posted.append(self._source.clone())

    def read(self) -> torch.Tensor:
        return self.posted.pop(0)


class Forgets(Late):
    def clear(self) -> None:
        self.posted.clear()


def without_views(linear):
    """Refuse weights from outside the inference mode, as a runtime does that makes no views of them."""

    def strict(x, weight, bias=None):
        if torch.is_inference_mode_enabled() and not weight.is_inference():
            raise RuntimeError("Cannot set version_counter for inference tensor")
        return linear(x, weight, bias)

    return strict


def rising() -> Callable[[], dict[str, int]]:
    numbers = count()
    return lambda: {"graphs": next(numbers)}


class Hasty(Stopwatch):
    def __init__(self) -> None:
        super().__init__(lambda: None)

    def __exit__(self, *exc: object) -> None:
        super().__exit__(*exc)
        self.seconds *= 0.5


def kept_view(real):
    """Keep a slice of the cache's slots from construction, as the reference once did."""

    def build(backend, *args, **kwargs):
        engine = real(backend, *args, **kwargs)
        engine.verifying.scratch = engine.verifying.slots[:4].expand(2, -1)
        return engine

    return build


def one_cache_tensor(backend: Backend) -> Callable:
    """Allocate one tensor for all layers, and let each layer's keys and values be views of it."""

    def allocate(layout):
        whole = torch.zeros(2, layout.layers, *layout.shape, dtype=layout.dtype)
        return KVCache(layout, tuple(whole[0]), tuple(whole[1]))

    return allocate


def spreads(real):
    """Write keys through a view of the layer's tensor."""

    def write(kv, layer, address, k, v):
        kv.keys[layer].view(kv.keys[layer].shape).add_(0)
        real(kv, layer, address, k, v)

    return write


class Boasts(Replay):
    """Calls Python, and says that it is compiled."""

    captured = True
    kind = "compiled"


class Silent(Boasts):
    """Traces at each call, and does not say what that costs."""

    kind = "traced"


MUTANTS: list[tuple[str, str, Plant]] = [
    ("a hidden .item()", "static.host_read", after_commit(lambda s: s.length.sum().item())),
    ("a Python branch", "static.host_read", after_commit(lambda s: bool((s.length > 3).all()))),
    ("a boolean index", "static.dynamic_shape", after_commit(lambda s: s.tokens[s.tokens > 3])),
    ("nonzero", "static.dynamic_shape", after_commit(lambda s: s.tokens.nonzero())),
    ("float64", "static.float64", after_commit(lambda s: s.price.double())),
    ("a double in a comparison", "static.float64", after_commit(lambda s: s.price > 0.3)),
    ("a view kept from construction", "static.views",
     lambda patch, backend: patch.setattr(tiny, "tiny_engine", kept_view(tiny.tiny_engine))),
    ("a buffer that is not named", "static.buffers",
     lambda patch, backend: patch.setattr(running, "GIVEN", (*running.GIVEN, "price"))),
    ("a cache written through a view", "static.buffers", method("write", spreads)),
    ("one cache tensor for all layers", "kv.separate",
     lambda patch, backend: patch.setattr(backend, "allocate", one_cache_tensor(backend))),
    ("a replay that boasts", "replay.kind",
     method("capture", lambda real: lambda step, name: Boasts(step))),
    ("a tracing that is not told", "replay.kind",
     method("capture", lambda real: lambda step, name: Silent(step))),
    ("a draw", "static.device_generator", after_commit(lambda s: torch.rand_like(s.price).uniform_())),
    ("an operator not listed", "static.operators",
     method("operators", lambda real: lambda: frozenset({"aten::mm"}))),
    ("a Python int that changes", "static.one_graph", after_commit(counting)),
    ("a slot handed out twice", "kv.slots",
     after_commit(lambda s: s.slot_of[:, 5].copy_(s.slot_of[:, 2]))),
    ("a lost layer", "kv.round_trip",
     method("write", lambda real: lambda kv, layer, *rest: real(kv, 0, *rest))),
    ("a write that spills", "kv.sentinels", method("write", spilling)),
    ("a scan that is not repeatable", "draw.scan", method("scan", restless)),
    ("a scan that falls", "draw.scan", method("scan", falling)),
    ("a filter that keeps one code more", "draw.filter",
     method("filter", lambda real: lambda x, f: real(x, replace(f, top_k=f.top_k + bool(f.top_k))))),
    ("guidance with its branches swapped", "draw.guidance",
     method("guide", lambda real: lambda x, *rest: real(x.flip(0), *rest))),
    ("a draw that forgets what it took", "draw.codes",
     method("draw_without_replacement", forgetful)),
    ("an accepted draft too many", "accept.decisions", method("accept", generous)),
    ("a native kernel off by one head", "attention.float64", off_by_one_head),
    ("a cache that attention does not read", "kv.round_trip",
     method("attend", lambda real: lambda q, kv, layer, mask: real(q, kv, 0, mask))),
    ("a buffer that moves", "kv.addresses", after_commit(rebinding)),
    ("a mask that is ignored", "attention.float64",
     method("mask", lambda real: lambda seen, dtype: real(torch.ones_like(seen), dtype))),
    ("a wrong scale", "attention.float64",
     method("attend", lambda real: lambda q, *rest: real(2 * q, *rest))),
    ("a wrong tie-break", "accept.ties", last_argmax),
    ("a stale replay", "replay.eager",
     method("capture", lambda real: stale_step(real))),
    ("a copy that outlives its request", "decode.interrupted",
     method("host_copy", lambda real: Late)),
    ("an inference mode without views", "decode.weights_from_outside",
     method("linear", lambda real: without_views(real))),
    ("an operator with a reason against it", "static.operators", refusing("operators")),
    ("a dtype without a kernel", "static.dtypes", refusing("dtypes")),
    ("an index that is too wide", "static.indices", refusing("indices")),
    ("a graph compiled every time", "replay.stable",
     method("counters", lambda real: rising())),
    ("a clock that does not wait", "device.stopwatch", method("stopwatch", lambda real: Hasty)),
    ("a meter that stands still", "device.memory",
     method("memory", lambda real: lambda: MemoryUse(in_use=1, peak=1))),
]  # fmt: skip


@pytest.mark.parametrize(("check", "plant"), [m[1:] for m in MUTANTS], ids=[m[0] for m in MUTANTS])
def test_a_planted_fault_is_caught_by_its_check(monkeypatch, check, plant):
    with open_backend("cpu") as backend:
        plant(monkeypatch, backend)
        outcome = run_checks(backend, {check: CHECKS[check]}).outcomes[0]
    assert outcome.state == "failed", outcome


def test_a_late_copy_that_is_cleared_passes(monkeypatch):
    with open_backend("cpu") as backend:
        monkeypatch.setattr(backend, "host_copy", Forgets)
        for _ in range(3):  # the step at which it is cancelled is drawn
            assert run_checks(backend, select("decode.interrupted")).passed


def test_a_backend_chooses_the_inference_mode_of_all_that_decodes(monkeypatch):
    real = DeviceBackend.linear

    def strict(self, x, weight, bias=None):
        assert not torch.is_inference_mode_enabled()
        return real(self, x, weight, bias)

    monkeypatch.setattr(DeviceBackend, "inference", lambda self: torch.no_grad())
    monkeypatch.setattr(DeviceBackend, "linear", strict)
    with lantern_accel.load(device="cpu", dtype="float32") as pipeline:
        pipeline.warm_up((1,), ("lantern++",), temperature=0)
        drawn = pipeline.generate("red heart", seed=1, strategy="lantern++", temperature=0)
        again, _ = pipeline.decode_only(
            ["red heart"], pipeline.strategy("lantern++"), pipeline.sampling(temperature=0), 1
        )
        assert torch.equal(drawn.tokens, again.tokens)
        chosen = select(["decode.weights_from_outside", "replay"])
        assert run_checks(pipeline.backend, chosen).passed


@pytest.mark.parametrize("check", ["kv.round_trip", "kv.sentinels"])
def test_a_cache_is_not_judged_by_how_attention_rounds(monkeypatch, check):
    with open_backend("cpu") as backend:
        method("attend", in_three_parts)(monkeypatch, backend)
        cache, _, v = caches.filled(backend, torch.float32)
        # One visible slot a query: its value comes back through products, and not bit for bit.
        slots = cache.layout.capacity
        one = backend.mask(
            torch.eye(slots, dtype=torch.bool).expand(caches.ROWS, 1, -1, -1), v.dtype
        )
        q = torch.zeros(caches.ROWS, slots, caches.HEADS, caches.WIDTH)
        through = backend.attend(q, cache, 0, one)[:, : caches.CAPACITY]
        assert not torch.equal(through, v[0]) and torch.allclose(through, v[0], atol=3e-7)
        assert run_checks(backend, {check: CHECKS[check]}).passed


def test_two_steps_that_differ_are_told_with_the_source_line(monkeypatch):
    with open_backend("cpu") as backend:
        after_commit(counting)(monkeypatch, backend)
        report = run_checks(backend, select("static.one_graph"))
    assert "state.price.add_(1e-9 * counting.n)" in report.outcomes[0].detail
    assert "conformance/test_kit.py:" in report.outcomes[0].detail


def test_a_static_failure_names_the_source_line(monkeypatch):
    plant = after_commit(lambda s: s.length.sum().item())
    with open_backend("cpu") as backend:
        plant(monkeypatch, backend)
        report = run_checks(backend, select("static.host_read"))
    assert "test_kit.py" in report.outcomes[0].detail
    assert ".item()" in report.outcomes[0].detail


def test_the_cpu_passes_everything_and_writes_its_reports(tmp_path, capsys):
    files = tmp_path / "report.json", tmp_path / "junit.xml"
    assert main(["conform", "cpu", "--json", str(files[0]), "--junit", str(files[1])]) == 0
    report = Report.model_validate(json.loads(files[0].read_text()))
    assert report.passed
    assert {o.name for o in report.outcomes} == set(CHECKS)
    suite = ET.parse(files[1]).getroot()
    assert suite.get("failures") == "0"
    assert len(suite.findall("testcase")) == len(CHECKS)
    left = {o.name: o.detail for o in report.outcomes if o.state == "not applicable"}
    # What the CPU has no answer to, and says so; a meter of energy some CPUs have.
    assert set(left) - {"device.energy"} == {
        "static.operators",
        "static.dtypes",
        "static.indices",
        "replay.stable",
    }
    assert all("backend 'cpu'" in reason for reason in left.values())
    shown = capsys.readouterr().out
    assert f"{len(CHECKS) - len(left)} passed, 0 failed, {len(left)} not applicable\n" in shown


def test_a_backend_without_data_is_checked_for_shapes(monkeypatch, capsys):
    monkeypatch.setattr(static, "STRATEGIES", ("lantern++",))
    assert main(["conform", "null", "--only", "static", "--only", "kv"]) == 0
    shown = capsys.readouterr().out
    assert "passed: static.dynamic_shape" in shown
    assert "not applicable: kv.slots: the backend has shapes and no data" in shown
    after_commit(lambda s: s.tokens.nonzero())(monkeypatch, None)
    assert main(["conform", "null", "--only", "static.dynamic_shape"]) == 1


@pytest.mark.parametrize("command", ["bench", "tune", "stepcost"])
def test_a_simulated_device_is_never_measured(command, monkeypatch, capsys):
    monkeypatch.setattr(DeviceBackend, "simulated", True)
    assert main([command, "--device", "cpu"]) == 2
    told = capsys.readouterr()
    assert "measure on a real device" in told.err
    assert "tokens/s" not in told.out


def test_a_backend_adds_checks_and_says_what_needs_a_card(monkeypatch):
    def far(backend):
        raise NeedsCard("it is too far away")

    own = {"beads.counted": lambda backend: Measured("ten"), "beads.weighed": far}
    with open_backend("cpu") as backend:
        monkeypatch.setattr(backend, "checks", lambda: own)
        monkeypatch.setattr(backend, "simulated", True, raising=False)
        checks = select(["beads", "device.stopwatch"], checks_of(backend))
        report = run_checks(backend, checks)
    assert [o.state for o in report.outcomes] == ["passed", *["not applicable"] * 2]
    assert report.outcomes[1].detail == "needs a card: it is too far away"
    assert report.summary().endswith("1 passed, 0 failed, 2 not applicable (2 need a card)")
    suite = ET.fromstring(report.junit())
    found = {p.get("name"): p.get("value") for p in suite.iter("property")}
    assert (found["simulated"], found["needs_card"]) == ("True", "2")


@pytest.mark.parametrize("text", ["mode", "=x"])
def test_an_option_that_is_none_is_told(text, capsys):
    wrong = main(["conform", "cpu", "--option", text])
    assert (wrong, "NAME=VALUE" in capsys.readouterr().err) == (2, True)


def test_a_failure_is_exit_code_1_and_the_others_still_run(monkeypatch, capsys):
    real = DeviceBackend.write

    def write(self, kv, layer, address, k, v):
        real(self, kv, layer, address, k, v)
        if k.shape[1] < kv.layout.capacity:
            kv.keys[layer].add_(1)

    monkeypatch.setattr(DeviceBackend, "write", write)
    assert main(["conform", "cpu", "--only", "kv"]) == 1
    out = capsys.readouterr().out
    assert "failed: kv.sentinels" in out
    assert "passed: kv.round_trip" in out


def test_an_unknown_check_is_named(capsys):
    with pytest.raises(BackendError, match="did you mean static"):
        select("statik")
    assert main(["conform", "nowhere"]) == 2


def test_without_a_family_nothing_passes(monkeypatch):
    monkeypatch.setattr("lantern_accel.testing.tiny.families", lambda: iter(()))
    with pytest.raises(ModelError, match="no family of models is installed"):
        tiny.cases(("vanilla",))
