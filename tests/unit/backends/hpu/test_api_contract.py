"""Every symbol of a vendor's library that this backend touches exists, and takes the call.

``api.json`` has the names and signatures, read off the libraries' sources. The backend's own source is
walked: imports, attribute chains, and the arguments of calls.
"""

from __future__ import annotations

import ast
import inspect
import json
from pathlib import Path

import pytest
from support import gaudi

import lantern_accel_hpu

API = json.loads(Path(__file__).with_name("api.json").read_text(encoding="utf-8"))
FOLDER = Path(lantern_accel_hpu.__file__).parent
SOURCES = sorted(FOLDER.glob("*.py"))  # software/ stands in for the SDK and does not use it
SDK = ("habana_frameworks", "pyhlml")
HPU = "habana_frameworks.torch.hpu"
KERNELS = "habana_frameworks.torch.hpex"
#: What our names for the SDK's objects hold; ``x.hpu`` and a name ``hpu`` are the module.
OBJECTS = {
    "hpu": HPU,
    "_graph": f"{HPU}.HPUGraph",
    "_from": f"{HPU}.Event",
    "_to": f"{HPU}.Event",
    "taken": f"{HPU}.Event",
    "copied": f"{HPU}.Event",
    "metric": f"{HPU}.metrics.Metric",
    "pyhlml": "pyhlml",
    "ops.hpu": "torch.ops.hpu",
    "kernels.sdpa": f"{KERNELS}.kernels.FusedSDPA",
    "kernels.rms_norm": f"{KERNELS}.normalization.FusedRMSNorm",
    "kernels.rotary": f"{KERNELS}.kernels.apply_rotary_pos_emb",
}


#: What the double adds to the bridge's names.
OWN = ("compile", "compile_operator", "fall_back", "running", "finish", "later")


def _chain(node: ast.expr) -> list[str]:
    """Return ``a.b.c`` as its names; calls on the way are passed over, anything else is empty."""
    names: list[str] = []
    while True:
        if isinstance(node, ast.Attribute):
            names.append(node.attr)
            node = node.value
        elif isinstance(node, ast.Name):
            return [node.id, *reversed(names)]
        else:
            return []


def _resolve(chain: list[str], imported: dict[str, str]) -> str | None:
    """Return the SDK's name that a chain stands for; None where it is not the SDK's."""
    if chain and chain[0] in imported:
        whole = ".".join([imported[chain[0]], *chain[1:]])
        return whole if whole.startswith(SDK) else None
    for size in (2, 1):
        for end in range(len(chain), size - 1, -1):
            known = OBJECTS.get(".".join(chain[end - size : end]))
            if known is not None:
                return ".".join([known, *chain[end:]])
    return None


def _exists(name: str) -> bool:
    known = {*API["names"], *API["calls"]}
    return name in known or any(one.startswith(f"{name}.") for one in known)


def _signature(text: str) -> inspect.Signature:
    scope: dict[str, object] = {}
    exec(f"def f{text}: pass", scope)
    return inspect.signature(scope["f"])  # type: ignore[arg-type]


def _complaints(source: str) -> tuple[list[str], set[str]]:
    """Return what is wrong with a module's use of the SDKs, and which of their names it touches."""
    tree = ast.parse(source)
    imported: dict[str, str] = {}
    touched: set[str] = set()
    wrong: list[str] = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for one in node.names:
                if one.name.startswith(SDK):
                    touched.add(one.name)
                    if one.asname:
                        imported[one.asname] = one.name
        elif isinstance(node, ast.ImportFrom):
            for one in node.names:
                imported[one.asname or one.name] = f"{node.module}.{one.name}"
                if (node.module or "").startswith(SDK):
                    touched.add(f"{node.module}.{one.name}")
    inner = {id(n.value) for n in ast.walk(tree) if isinstance(n, ast.Attribute)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute | ast.Name) and id(node) not in inner:
            name = _resolve(_chain(node), imported)
            if name is not None:
                touched.add(name)
        if isinstance(node, ast.Call):
            name = _resolve(_chain(node.func), imported)
            text = API["calls"].get(name)
            if name is None or text is None:
                continue
            given = [None for _ in node.args]
            named = {k.arg: None for k in node.keywords if k.arg}
            try:
                _signature(text).bind(*given, **named)
            except TypeError as error:
                wrong.append(f"line {node.lineno}: {name}{text}: {error}")
    wrong += [f"{name} is not in the API" for name in sorted(touched) if not _exists(name)]
    return wrong, touched


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: path.name)
def test_every_symbol_exists_and_takes_the_call(path: Path) -> None:
    assert _complaints(path.read_text(encoding="utf-8"))[0] == []


def test_the_walk_sees_what_the_backend_does() -> None:
    touched: set[str] = set()
    for path in SOURCES:
        touched |= _complaints(path.read_text(encoding="utf-8"))[1]
    for name in (
        "HPUGraph",
        "HPUGraph.replay",
        "HPUGraph.reset",
        "Event.elapsed_time",
        "graph",
        "default_stream",
        "memory_stats",
        "metrics.metric_global",
        "metrics.Metric.stats",
        "synchronize",
        "current_device",
        "is_initialized",
        "Stream",
        "stream",
        "Event.wait",
        "get_device_name",
        "reset_peak_memory_stats",
    ):
        assert f"{HPU}.{name}" in touched, name
    assert f"{KERNELS}.kernels.FusedSDPA.apply" in touched
    assert f"{KERNELS}.normalization.FusedRMSNorm.apply" in touched
    assert f"{KERNELS}.kernels.RotaryPosEmbeddingMode.PAIRWISE" in touched
    assert "pyhlml.hlmlDeviceGetTotalEnergyConsumption" in touched
    assert "habana_frameworks.torch.core.mark_step" in touched
    assert {"torch.ops.hpu.cast_to_fp8_v2", "torch.ops.hpu.fp8_gemm_v2"} <= touched


@pytest.mark.parametrize(
    ("source", "says"),
    [
        ("self.bridge.hpu.synchronise()", f"{HPU}.synchronise is not in the API"),
        ("hpu.memory_stats(0, 1)", "too many positional arguments"),
        ("bridge.hpu.Event(timing=True)", "unexpected keyword argument 'timing'"),
        ("self._graph.replay(asynchron=True)", "unexpected keyword argument 'asynchron'"),
        ("self.kernels.sdpa.apply(q, k)", "missing a required argument: 'v'"),
        ("self._from.elapsed()", f"{HPU}.Event.elapsed is not in the API"),
        ("import habana_frameworks.torch.graphs", "torch.graphs is not in the API"),
        ("from pyhlml import hlmlDeviceGetEnergy", "hlmlDeviceGetEnergy is not in the API"),
        ("import habana_frameworks.torch.core as ht\nht.mark_step(1, 2, 3)", "too many positional"),
    ],
)
def test_a_wrong_use_is_caught(source: str, says: str) -> None:
    assert any(says in one for one in _complaints(source)[0])


def test_the_double_takes_what_the_bridge_takes_and_nothing_else() -> None:
    """A double with laxer signatures would let a wrong call pass."""
    hpu = gaudi.Gaudi(lazy=True)
    doubles = {
        f"{HPU}.{name}": getattr(hpu, name)
        for name in vars(gaudi.Gaudi)
        if not name.startswith("_") and name not in OWN
    }
    doubles[f"{HPU}.graph"] = hpu.graph
    for kind, name in ((gaudi.HPUGraph, "HPUGraph"), (gaudi.Event, "Event")):
        methods = {k: v for k, v in vars(kind).items() if inspect.isfunction(v) and k[0] != "_"}
        for method, function in methods.items():
            doubles[f"{HPU}.{name}.{method}"] = function.__get__(object())
    for kernel, name in (
        (gaudi.FusedSDPA, "kernels.FusedSDPA"),
        (gaudi.FusedRMSNorm, "normalization.FusedRMSNorm"),
    ):
        doubles[f"{KERNELS}.{name}.apply"] = kernel.forward.__get__(object())
    doubles[f"{KERNELS}.kernels.apply_rotary_pos_emb"] = gaudi.apply_rotary_pos_emb
    assert len(doubles) > 20
    for name, function in doubles.items():
        if name == f"{HPU}.metric_global":
            name = f"{HPU}.metrics.metric_global"
        found = [
            p.replace(annotation=inspect.Parameter.empty)
            for p in inspect.signature(function).parameters.values()
        ]
        want = _signature(API["calls"][name])
        assert inspect.Signature(found) == want, name
