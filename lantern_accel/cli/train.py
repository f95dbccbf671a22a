"""``lantern-accel train``: a drafter or a draft head for any model."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import typer

from lantern_accel import bounds
from lantern_accel.cli.console import print_json, say
from lantern_accel.cli.options import USE, OnDevice, option, read_parts, with_options
from lantern_accel.errors import DataError
from lantern_accel.files import check_target
from lantern_accel.generation.settings import read_size
from lantern_accel.prompts import read_prompts

train = typer.Typer(
    help="Train a drafter or a draft head for any model. All stages resume.",
    no_args_is_help=True,
    rich_markup_mode=None,
)


@dataclass(frozen=True)
class TrainerOptions(OnDevice):
    """Options of every trainer."""

    work: Path = option(
        "Folder of the training run.", "--work", "-w", default=Path("lantern-train")
    )
    config: Path | None = option("JSON or TOML file of the trainer's settings.")
    steps: int | None = option("Optimizer steps.", min=1, max=bounds.MOST_STEPS)
    minutes: float | None = option(
        "Minutes of all runs together; the schedule ends then.", min=0.01, max=bounds.MOST_SECONDS
    )
    seed: int | None = option("Random seed.", min=0, max=bounds.MOST_SEED)
    resume: bool = option(
        "Continue from the checkpoint, or start over.", "--resume/--restart", default=True
    )

    def settings(self, kind: type[Any], **more: Any) -> Any:
        """Return a trainer's settings, ``kind``: of the file, then of these options and ``more``."""
        from lantern_accel.training.folder import read_config

        own = {"steps": self.steps, "max_minutes": self.minutes, "seed": self.seed}
        return read_config(kind, self.config, **own, **more)


def print_report(report: dict[str, object], folder: Path) -> None:
    """Print a trainer's figures as JSON, and say where it wrote."""
    left_out = ("curve", "config", "environment")
    print_json({k: v for k, v in report.items() if k not in left_out})
    say(str(folder), label="wrote", style="bold green")


@dataclass(frozen=True)
class Learning(TrainerOptions):
    """Options of trainers that learn from a model's images."""

    model: str = option(
        "Target model: any that generate takes, official files included.", "--model", default=...
    )
    prompts: Path | None = option("File with one prompt per line, for the target's images.")
    samples: int = option(
        "Number of images that the target generates.", min=2, max=bounds.MOST_IMAGES, default=256
    )
    size: str | None = option(
        "Width and height in pixels, for models with several sizes.", metavar="WxH"
    )
    use: list[str] = field(default_factory=list, metadata={"option": USE})
    into: Path | None = option(
        "Folder for the model with the trained part. It has a copy of a model folder, or names "
        "official files."
    )

    def learn(self, part: str, **more: Any) -> None:
        """Train a drafter or a head (``part``) in ``WORK/part``, and print its figures.

        ``more``: further settings of this trainer.
        """
        from lantern_accel.device.plugins import choose_device

        # Choose the device before torch is imported: some vendors read the environment then.
        choose_device(self.device, self.options)
        import lantern_accel
        from lantern_accel.families.base import Parts
        from lantern_accel.models.bundle import bundled_models
        from lantern_accel.models.locate import find_model
        from lantern_accel.progress import console_progress
        from lantern_accel.training.anymodel import run_model_drafter
        from lantern_accel.training.device import TrainDevice
        from lantern_accel.training.drafter import DrafterTrainConfig
        from lantern_accel.training.folder import check_copy, check_named, with_named, with_parts
        from lantern_accel.training.head import HeadTrainConfig, train_head

        run = run_model_drafter if part == "drafter" else train_head
        chosen = self.settings(DrafterTrainConfig if part == "drafter" else HeadTrainConfig)
        out, pixels = self.work / part, read_size(self.size) if self.size else None
        check_target(out / "report.json")
        folder = bundled_models().get(self.model, Path(self.model))
        copied = (folder / "model.json").is_file()
        if self.into is not None:
            if copied:
                check_copy(folder, self.into)
            else:
                find_model(self.model)  # raises where no model has this name
                check_named(self.into)
        lines: list[str | int] = []
        if self.prompts is not None:
            lines.extend(str(one) for one in read_prompts(self.prompts))
        with lantern_accel.load(
            self.model,
            device=self.device,
            options=self.options,
            **read_parts(self.use, ("vq", "text_encoder", "text_device")),
            drafter="none",
            head="none",
        ) as pipeline:
            if part == "head" and not lines:
                from lantern_accel.generation.built_in_prompts import built_in_prompts

                lines = built_in_prompts(pipeline, "tuning")  # those of reports stay untouched
            report = run(
                pipeline,
                chosen,
                out,
                TrainDevice(pipeline.backend, chosen.precision),
                console_progress(),
                resume=self.resume,
                prompts=lines,
                samples=self.samples,
                size=pixels,
                **more,
            )
        print_report(report, out)
        if self.into is not None:
            parts = Parts(head=out) if part == "head" else Parts(drafter=out)
            if copied:
                made = with_parts(folder, parts, self.into)
            else:
                made = with_named(self.model, part, out, self.into)
            say(str(made), label="wrote", style="bold green")


@train.command("drafter")
@with_options
def drafter(
    *,
    given: Learning,
    images: Path | None = typer.Option(
        None, help="Folder of captions.jsonl and images to learn from, instead of --prompts."
    ),
) -> None:
    """Train an EAGLE drafter on captioned images, or on images that the model generates."""
    if images is not None and given.prompts is not None:
        raise DataError("--images replaces --prompts; leave one of them out")
    given.learn("drafter", images=images)


@train.command("head")
@with_options
def head(*, given: Learning) -> None:
    """Train a draft head, which drafts the tokens of windows, on images that the model generates.

    Without --prompts the model generates built-in prompts. Some prompts are held out, and the report
    has their acceptance rate.
    """
    given.learn("head")
