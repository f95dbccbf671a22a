"""``generate --on``: a file of prompts becomes a folder of images, on this device or on a fleet."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from lantern_accel.cli.console import bar, note, say, warn
from lantern_accel.cli.options import LoadingParts
from lantern_accel.errors import LanternError, RequestError, did_you_mean, shown
from lantern_accel.files import check_target


def draw_folder(
    prompts: Path | None,
    output: Path | None,
    on: str,
    workers: str,
    load: LoadingParts,
    settings: Mapping[str, Any],
    resume: bool,
    quiet: bool,
) -> None:
    """Draw, and say how fast every worker was; raises RequestError for what cannot be drawn so."""
    from lantern_accel.distributed.run import draw_file

    if on not in ("here", "ray"):
        raise RequestError(f"--on cannot be {shown(on)}{did_you_mean(on, ['here', 'ray'])}")
    if prompts is None:
        raise RequestError("--on draws a file of prompts; name it with --prompts FILE")
    if output is None or output.suffix:
        instead = "" if output is None else f", not {output}"
        raise RequestError(f"--on writes a folder of images; name one with --output{instead}")
    if workers != "auto" and on != "ray":
        raise RequestError("--workers says what Ray is asked for; give --on ray, or leave it out")
    if on == "ray" and load.device != "auto":
        raise RequestError("with --on ray the devices are those of --workers; leave --device out")
    make = partial(_workers, on, load, settings, workers, quiet)
    with bar("drawing", quiet, unit="images") as report:
        summary = draw_file(
            prompts, output, make, load.keywords(), settings, resume=resume, on_progress=report
        )
    if quiet:
        return
    for name, one in summary["workers_of_this_call"].items():
        speed = one["images_per_second"]
        rate = "whose times mean nothing" if speed is None else f"{speed:.2f} images/s"
        say(f"{one['images']} images on {one['device']}, {rate}", label=name, style="bold")
    for text in summary["lost_workers"]:
        warn(text, "lost")
    for number, text in list(summary["failed"].items())[:10]:
        warn(f"row {int(number) + 1}: {text}", "not drawn")
    say(f"{summary['images']} images in {output}, seed {summary['seed']}", label="wrote",
        style="bold green")  # fmt: skip


@contextmanager
def _workers(
    on: str, load: LoadingParts, settings: Mapping[str, Any], workers: str, quiet: bool
) -> Iterator[Any]:
    """Give what draws: a worker in this process, or a fleet on Ray."""
    slots = settings.get("batch_size")
    if on == "here":
        from lantern_accel.distributed.painter import Painter
        from lantern_accel.distributed.run import Here

        with Here(Painter(load.keywords(), settings, slots=slots)) as here:
            yield here
        return
    from lantern_accel.distributed.fleet import Fleet, connected, read_workers

    with connected() as ray:
        kinds = read_workers(workers, ray.cluster_resources(), load.threads)
        if not quiet:
            note(f"workers: {', '.join(map(str, kinds))}")
        given = replace(load, threads=None).keywords()  # a kind of device has its own
        tell = partial(warn, label="fleet")
        with Fleet(
            ray, kinds, given, settings, threads=load.threads, slots=slots, say=tell
        ) as fleet:
            yield fleet


def measure_folder(
    output: Path,
    given: Mapping[str, Any],
    clash: Mapping[str, Any],
    quick: bool,
    workers: str,
    patience: float,
) -> None:
    """Measure a fleet into a folder: a run per kind of device, and one report.

    ``given``: options of ``profile`` for every run, by name; ``clash``: those that only one device has.
    """
    from lantern_accel.cli.compare import compare
    from lantern_accel.distributed.fleet import connected
    from lantern_accel.distributed.measuring import measure_fleet, models_of, write_runs
    from lantern_accel.report import render

    for name, one in clash.items():
        if one:
            raise RequestError(f"--fleet measures every kind of device; leave {name} out")
    if output.suffix:
        raise RequestError(f"--fleet writes a folder of runs; name one with --output, not {output}")
    report = output / "report.html"
    check_target(report)
    render.check_kind(report)

    def tell(text: str) -> None:
        say(text, label="fleet", to_stderr=True, style="dim")

    words = ["--quick"] if quick else []
    for name, value in given.items():
        for one in value if isinstance(value, list) else [value]:
            words += [] if one is None else [name, str(one)]
    with connected() as ray:
        models = models_of(ray.cluster_resources(), workers)
        found = write_runs(
            output, measure_fleet(ray, models, words, patience=patience, say=tell), tell
        )
    usable = [str(path) for path in found if _readable(path, tell)]
    if not usable:
        raise RequestError(f"no run in {output} can be compared; repeat the command")
    compare(usable, report, [], None, 0.0)


def _readable(path: Path, tell: Callable[[str], None]) -> bool:
    """Return whether a run can be compared; says why not: it must not cost the others their report."""
    from lantern_accel.measure.reading import check_comparable, read_file

    try:
        run: Any = read_file(path)
        check_comparable([run], [str(path)])
        return True
    except LanternError as error:
        tell(f"left out of the report: {error}")
        return False
