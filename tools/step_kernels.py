"""List the kernels of captured steps: ``python tools/step_kernels.py SIZE --device NAME -o FILE``.

Random weights of a real size, as in ``lantern-accel stepcost``. torch's profiler watches replays of a
plain step and of a window. A device that the profiler does not see is listed by the host's operators.
"""

from __future__ import annotations

import sys
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import typer

ROOT = str(Path(__file__).resolve().parents[1])
sys.path[:0] = [ROOT] if ROOT not in sys.path else []

from lantern_accel.cli import run_single  # noqa: E402
from lantern_accel.files import check_target, write_json  # noqa: E402
from tools.on_device_report import kernels_text  # noqa: E402

#: Samples of a step's time; the median is reported.
SAMPLES = 7


def kernels_of(timer: Any) -> tuple[str, list[dict[str, Any]]]:
    """Return who was watched, and each kernel of one step with its microseconds, the longest first."""
    from torch.autograd import DeviceType  # type: ignore[attr-defined]  # its C part defines it
    from torch.profiler import profile, supported_activities

    activities = sorted(supported_activities(), key=str)  # type: ignore[no-untyped-call]
    with profile(activities=activities) as seen:
        timer.ms()
    found: dict[str, list[float]] = defaultdict(list)
    for event in seen.events() or ():
        if event.device_type != DeviceType.CPU and not event.is_user_annotation:
            found[event.name].append(event.time_range.elapsed_us())
    where = "device"
    if not found:
        where = "host"
        for row in seen.key_averages():
            found[row.key] = [row.self_cpu_time_total / row.count] * row.count
    steps = timer.inner
    rows = [{"name": k, "us": sum(v) / steps, "launches": len(v) / steps} for k, v in found.items()]
    return where, sorted(rows, key=lambda row: -row["us"])


def step_kernels(
    size: str = typer.Argument(help="A size that `lantern-accel stepcost` takes."),
    device: str = typer.Option(..., help="A backend's name, or NAME:INDEX."),
    window: int = typer.Option(16, min=2, help="Positions of the window."),
    dtype: str = typer.Option("auto", help="bfloat16, float16 or float32."),
    output: Path = typer.Option(..., "--output", "-o", help="JSON."),
) -> None:
    """Write the kernels of a plain step and of a window."""
    check_target(output)
    from lantern_accel.device.plugins import open_backend

    with open_backend(device) as backend:
        from lantern_accel.families.random_weights import manifest_of_size
        from lantern_accel.strategy.trees import EAGLE2_TREE, NAIVE_EXTEND_57
        from lantern_accel.strategy.values import named_strategy
        from lantern_accel_profiles.measure.record import StepCell
        from lantern_accel_profiles.measure.steps import PLAIN, StepTimer, make_model, sampling_of

        manifest = manifest_of_size(size)
        windows = named_strategy("scd", static=NAIVE_EXTEND_57, dynamic=EAGLE2_TREE)
        kinds = [
            StepCell(kind="vanilla", strategy=PLAIN, batch=1, nodes=1),
            StepCell(kind="step", strategy=windows.override(window=window), batch=1, nodes=window),
        ]
        model = make_model(backend, manifest, dtype, 16)
        sampling = sampling_of(manifest, None, None)
        few = min(sampling.top_k, manifest.target.vocab_size)
        sampling = sampling.model_copy(update={"top_k": few})
        steps = []
        with backend.inference():
            for cell in kinds:
                with StepTimer(backend, model, cell, sampling) as timer:
                    ms = sorted(timer.ms() for _ in range(SAMPLES))[SAMPLES // 2]
                    where, rows = kernels_of(timer)
                step = {"step": cell.label, "ms": ms, "captured": cell.captured, "watched": where}
                steps.append({**step, "floor_bytes": cell.floor_bytes, "kernels": rows})
                write_json(output, {"size": size, "device": backend.facts().name, "steps": steps})
    typer.echo(kernels_text({"steps": steps}))


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; 0, or 2 with one sentence."""
    return run_single(step_kernels, argv)


if __name__ == "__main__":
    sys.exit(main())
