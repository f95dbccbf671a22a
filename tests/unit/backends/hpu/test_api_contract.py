"""What stands for a vendor's library has its names and signatures, and nothing that it lacks.

``api.json`` has both, read off the libraries' sources. Tests run the backend on these doubles, and long
ones on the software HPU: a name or a call that the vendor's library would refuse fails there.
"""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from support import gaudi

from lantern_accel_hpu.software import floats
from lantern_accel_hpu.software import hpu as software

API = json.loads(Path(__file__).with_name("api.json").read_text(encoding="utf-8"))
HPU = "habana_frameworks.torch.hpu"
#: What the double adds to the bridge's names.
OWN = {"compile", "compile_operator", "fall_back", "finish", "later"}


def members(name: str, of: Any) -> Iterator[tuple[str, Callable[..., object]]]:
    """Yield what a class of a double has, by the name in the API, methods without ``self``."""
    for one, value in vars(of).items():
        if inspect.isfunction(value) and not one.startswith("_"):
            yield f"{name}.{one}", value.__get__(object())


def doubles() -> Iterator[tuple[str, Callable[..., object]]]:
    hpu = gaudi.Gaudi(lazy=True)
    for module, content in gaudi.sdk(hpu).items():
        for name, value in content.items():
            if inspect.isroutine(value) and name not in OWN:
                yield f"{module}.{name}".replace("metric_global", "metrics.metric_global"), value
            elif inspect.isclass(value) and hasattr(value, "forward"):
                yield f"{module}.{name}.apply", value.forward.__get__(object())
    for kind in (gaudi.HPUGraph, gaudi.Event):
        yield from members(f"{HPU}.{kind.__name__}", kind)
    yield f"{HPU}.metrics.Metric.stats", gaudi.Metric().stats
    for name, value in vars(gaudi.hlml([0])).items():
        yield f"pyhlml.{name}", value


def stood_in() -> Iterator[tuple[str, Callable[..., object]]]:
    """Yield what the software HPU has of the bridge's functions."""
    for name in (one for one in API["calls"] if one.startswith(f"{HPU}.")):
        found: Any = software
        for part in name.removeprefix(f"{HPU}.").split("."):
            found = getattr(found, part, None)
        if found is not None:
            yield name, found.__get__(object()) if "." in found.__qualname__ else found
    yield "torch.ops.hpu.cast_to_fp8_v2", floats._cast
    yield "torch.ops.hpu.fp8_gemm_v2", floats._gemm


def signature(function: Callable[..., object]) -> inspect.Signature:
    """Return names, kinds and defaults; what can be given by name alone is an addition of our own."""
    found = inspect.signature(function).parameters.values()
    return inspect.Signature(
        [one.replace(annotation=one.empty) for one in found if one.kind != one.KEYWORD_ONLY]
    )


@pytest.mark.parametrize(("made", "least"), [(doubles, 30), (stood_in, 25)])
def test_a_double_takes_what_the_library_takes_and_nothing_else(
    made: Callable[[], Iterator[tuple[str, Callable[..., object]]]], least: int
) -> None:
    """A double with laxer signatures would let a wrong call pass."""
    seen = 0
    for name, function in made():
        scope: dict[str, Any] = {}
        exec(f"def f{API['calls'][name]}: pass", scope)
        assert signature(function) == signature(scope["f"]), name
        seen += 1
    assert seen >= least


def test_no_double_has_a_module_or_a_class_that_the_library_lacks() -> None:
    known = [f"{one}." for one in (*API["names"], *API["calls"])]
    for module, content in gaudi.sdk(gaudi.Gaudi()).items():
        classes = [f"{module}.{name}" for name, one in content.items() if inspect.isclass(one)]
        for name in (module, *classes):
            assert any(one.startswith(f"{name}.") for one in known), name
