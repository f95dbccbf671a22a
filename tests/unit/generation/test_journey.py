"""The journey from text to pixels is written once, read off the calls of the code."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping
from functools import cache

import pytest
from support.imports import modules

#: Where the parts of a journey are called, by what is called (the end of the call's text). Whoever
#: generates images goes through these: a second copy of the loop would have to call one of them.
JOURNEY: Mapping[str, set[str]] = {
    "family.conditions": {"generation.runtime:Runtime.conditions"},
    # The prompt's pass: of a batch that begins, of an image that joins, of candidates that are timed.
    "engine.start": {"generation.engines:CapturedEngine.begin"},
    "ready.begin": {
        "generation.batch:Batch.begin",
        "generation.measurements:Measurements.ask",
        "generation.pipeline:Pipeline.step_times",
    },
    "single.begin": {"generation.batch:Batch.join"},
    # The loop over steps.
    "course.advance": {"generation.batch:Batch.advance", "decoding.engine:Engine.run"},
    "engine.run": set(),
    # Of an image that moves to another batch, the counters.
    "engine.read_tokens": {
        "generation.batch:Batch._complete",
        "serving.running:RunningBatch.widen",
    },
    # Pixels.
    "family.pixels": {"generation.runtime:Runtime.pixels"},
    "family.render_images": {"generation.runtime:Runtime.decode_images"},
}
#: Where events of a batch become what a caller asked for: five places, each around one loop.
PLACES = {
    "generation.batch:Batch.run",
    "generation.stream:Stream._turn",
    "generation.folder:FolderImages._group",
    "serving.running:RunningBatch.advance",
    "serving.scheduler:Scheduler._turn",
}


def calls(tree: ast.AST, inside: str = "") -> Iterator[tuple[str, str]]:
    """Go through (function, text of what it calls); functions in functions are part of the outer one."""
    for node in ast.iter_child_nodes(tree):
        here = inside
        if isinstance(node, ast.ClassDef) or (
            isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
            and (not inside or isinstance(tree, ast.ClassDef))
        ):
            here = f"{inside}.{node.name}" if inside else node.name
        if isinstance(node, ast.Call):
            yield inside, ast.unparse(node.func)
        yield from calls(node, here)


@cache
def every_call(source: str) -> tuple[tuple[str, str], ...]:
    return tuple(calls(ast.parse(source)))


def callers(called: str, sources: Mapping[str, str]) -> set[str]:
    """Return the functions of some files that call what ends so."""
    return {
        f"{module.removeprefix('lantern_accel.')}:{function}"
        for module, source in sources.items()
        for function, text in every_call(source)
        if text == called or text.endswith((f".{called}", f"_{called}"))
    }


@cache
def sources() -> dict[str, str]:
    """Return the product's files: families have their own pixels, the kit of conformance its engines."""
    apart = ("lantern_accel.families", "lantern_accel.testing", "lantern_accel.porting")
    return {
        name: path.read_text(encoding="utf-8")
        for name, path in modules().items()
        if name.startswith(("lantern_accel.", "lantern_accel_profiles."))
        and not name.startswith(apart)
    }


@pytest.mark.parametrize("called", JOURNEY)
def test_each_part_of_the_journey_is_called_in_one_place(called: str) -> None:
    assert callers(called, sources()) == JOURNEY[called]


def test_the_loops_over_images_iterate_one_batch() -> None:
    assert callers("batch.advance", sources()) | callers("self.advance", sources()) == PLACES


@pytest.mark.parametrize(
    ("called", "copy"),
    [
        ("course.advance", "while True:\n        progress = batch.engine.course.advance()"),
        ("family.pixels", "images = host.family.pixels(host, decoded.tokens, shape)"),
        ("engine.start", "engine.start(condition, mask, uniforms)"),
        ("engine.run", "decoded = ready.engine.run()"),
        ("batch.advance", "for event in batch.advance():\n        yield event"),
    ],
)
def test_a_second_copy_is_found(called: str, copy: str) -> None:
    name = "lantern_accel.generation.stream"
    planted = {**sources(), name: sources()[name] + f"\n\ndef again():\n    {copy}\n"}
    more = callers(called, planted) - callers(called, sources())
    assert more == {"generation.stream:again"}
