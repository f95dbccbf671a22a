"""The worker: one loaded model on one device that generates items. It knows nothing of Ray.

A scheduler makes it in a process of its own; the device is opened there, before torch is imported.
"""

from __future__ import annotations

import copy
import hashlib
import os
import platform
import time
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from lantern_accel.errors import LanternWarning, NotFiniteError, RequestError, noted

if TYPE_CHECKING:
    from lantern_accel.families.base import Conditions
    from lantern_accel.generation.slots import Drawn
    from lantern_accel.prompts import Item


@dataclass(frozen=True)
class Painted:
    """One image as it comes back: the file's bytes, and its figures; or why there is none."""

    number: int
    picture: bytes = b""
    tokens_sha256: str = ""
    tokens: int = 0
    steps: int = 0
    price: float = 0.0
    seed: int = 0
    note: str | None = None
    error: str | None = None


@dataclass(frozen=True)
class Batch:
    """What one call of :meth:`Painter.draw` made: images, seconds and joules, and who made them."""

    worker: str
    device: str
    images: tuple[Painted, ...]
    seconds: float
    joules: float | None


class Painter:
    """Generates items with one strategy; every image depends on its prompt and random stream alone.

    ``load`` are the arguments of :func:`lantern_accel.load`, ``settings`` those of ``generate``;
    ``slots``: images decoded together, None for as many as is usual.
    """

    def __init__(
        self,
        load: Mapping[str, Any],
        settings: Mapping[str, Any],
        *,
        slots: int | None = None,
        name: str = "worker",
    ) -> None:
        import lantern_accel

        self.pipeline = pipeline = lantern_accel.load(**load, size=settings.get("size"))
        self.name = name
        self.size = slots or pipeline.backend.preferences.default_batch
        # Settings are checked here once; prompts are checked one by one.
        examples = pipeline.model.family.examples(pipeline.model.manifest)
        batch = {"batch_size": self.size, "num_images": self.size}
        self.request = pipeline.request(examples[0], **{**settings, **batch, "seed": 0})
        self._notes: dict[int, str] = {}
        self._host = None
        if pipeline.dtype.itemsize == 4 and pipeline.backend.device.type != "cpu":
            # A sum in another order moves a pixel in some thousands by one level.
            self._host = replace(pipeline.model, vq=copy.deepcopy(pipeline.model.vq).to("cpu"))
        self.device = f"{pipeline.backend.device} ({pipeline.backend.facts().name})"

    def facts(self) -> dict[str, Any]:
        """Return who this is: its device, dtype, model, and what decides the images besides prompts."""
        pipeline = self.pipeline
        return {
            "worker": self.name,
            "pid": os.getpid(),
            "host": platform.node(),
            "device": self.device,
            "simulated": pipeline.backend.simulated,
            "dtype": str(pipeline.dtype).removeprefix("torch."),
            "model": pipeline.model.manifest.name,
            "weights_hash": pipeline.model.weights_hash,
            "strategy": self.request.strategy.name,
            "relaxed": self.request.strategy.acceptance.relaxed,
            "slots": self.size,
        }

    def close(self) -> None:
        """Give the device back."""
        self.pipeline.close()

    def draw(self, items: Sequence[Item]) -> Batch:
        """Generate items; a prompt that the model cannot take comes back with its error."""
        backend, began = self.pipeline.backend, time.perf_counter()
        before = backend.energy_mj()
        painted: dict[int, Painted] = {}
        with backend.inference():
            shapes: dict[Any, list[tuple[Item, Conditions]]] = {}
            for item in items:
                try:
                    with noted() as notes:
                        made = self.pipeline.runtime.conditions(
                            [item.prompt], self.request.size, self.request.negative_prompt
                        )
                    shapes.setdefault(made.shape, []).append((item, made))
                    if notes:
                        self._notes[item.number] = "; ".join(notes)
                        warnings.warn(self._notes[item.number], LanternWarning, stacklevel=2)
                except RequestError as error:
                    painted[item.number] = Painted(item.number, error=str(error))
            for group in shapes.values():
                painted |= {one.number: one for one in self._group(group)}
        after = backend.energy_mj()
        joules = None if before is None or after is None else (after - before) / 1000
        images = tuple(painted[item.number] for item in items)
        return Batch(self.name, self.device, images, time.perf_counter() - began, joules)

    def _group(self, waiting: list[tuple[Item, Conditions]]) -> list[Painted]:
        from lantern_accel.generation.slots import Slots

        pipeline, request = self.pipeline, self.request
        size = min(self.size, len(waiting))
        if pipeline.backend.support("capture"):
            size = self.size  # captured steps of the usual size are there
        first = waiting[0][1]
        slots: Slots[tuple[Item, Conditions]] = Slots(
            pipeline.runtime, request.strategy, request.sampling, first, size, size
        )
        found: list[Painted] = []
        left = list(waiting)
        while left or slots.images:
            while left and slots.joinable:
                item, conditions = one = left.pop(0)
                asked = request.sampling, request.negative_prompt, request.size
                rows = pipeline.runtime.rows(conditions, *asked)
                slots.join(one, rows, item.seed, item.index)
            slots.advance()
            for (item, conditions), made in slots.news():
                if isinstance(made, NotFiniteError):
                    found.append(Painted(item.number, error=str(made)))
                elif not isinstance(made, int):
                    found.append(self._painted(item, conditions, made))
        return found

    def _painted(self, item: Item, conditions: Conditions, drawn: Drawn) -> Painted:
        """Generate tokens, in float32 on the host where images must not depend on the device."""
        from lantern_accel.generation.result import pictures, png_bytes

        done, shape, host = drawn.decoded, conditions.shape, self._host
        if host is None:
            seeds = [item.seed + item.index]
            made = self.pipeline.runtime.pictures(done.tokens, shape, [item.prompt], seeds)
            assert made, "a worker that cannot generate was refused when it began"
        else:
            made = pictures(host.family.pixels(host, done.tokens, shape))
        tokens = done.tokens.contiguous().numpy()
        return Painted(
            number=item.number,
            picture=png_bytes(made[0]),
            tokens_sha256=hashlib.sha256(tokens.tobytes()).hexdigest(),
            tokens=int(tokens.size),
            steps=int(done.steps.sum()),
            price=float(done.price.sum()),
            seed=item.seed,
            note=self._notes.pop(item.number, None),
        )
