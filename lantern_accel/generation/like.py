"""Reads from a PNG what its image was made from, so that the same image is made again."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import Field, ValidationError

from lantern_accel.bounds import MOST_IMAGES, SEEDS
from lantern_accel.errors import BackendError, ModelError, RequestError
from lantern_accel.generation.decision import Decision
from lantern_accel.generation.settings import Asked
from lantern_accel.records import Frozen, first_wrong

if TYPE_CHECKING:
    from lantern_accel.generation.pipeline import Pipeline


class Like(Frozen):
    """The origin of an image, from its PNG (:func:`~.result.describe`).

    ``image``: its number under ``seed``.
    """

    path: Path
    prompt: str
    negative_prompt: str | None = None
    seed: int = Field(ge=0, lt=SEEDS)
    image: int = Field(ge=0, lt=MOST_IMAGES)
    weights: str = "full"
    tokens_sha256: str
    decision: Decision

    @classmethod
    def read(cls, path: Path) -> Like:
        """Read a PNG that ``generate`` wrote; raises :class:`RequestError` for any other file."""
        from PIL import Image

        try:
            with Image.open(path, formats=["PNG"]) as image:
                text: dict[str, str] = image.text  # type: ignore[attr-defined]  # of PNGs alone
            found = {name: text[name] for name in cls.model_fields if name in text}
            decision = Decision.model_validate_json(found.pop("decision", ""))
            return cls.model_validate({**found, "path": path, "decision": decision})
        except (OSError, ValueError, SyntaxError, Image.DecompressionBombError) as error:
            why = "not a PNG"
            if isinstance(error, ValidationError):
                why = first_wrong(error)
            elif isinstance(error, OSError):
                why = error.strerror or why
            raise RequestError(
                f"{path} does not say what its image was made from ({why}); name a PNG of one image that "
                "`generate` wrote without --no-metadata"
            ) from None

    @property
    def loading(self) -> dict[str, Any]:
        """Keywords of :func:`lantern_accel.load`."""
        one = self.decision
        device = one.backend.partition(" ")[0]
        return {"model": one.model, "device": device, "dtype": one.dtype, "weights": self.weights}

    @property
    def settings(self) -> Asked:
        """Settings of ``generate``."""
        one, own = self.decision, Asked(seed=self.seed, num_images=self.image + 1)
        own |= Asked(strategy=one.strategy, sampling=one.sampling, size=one.size)
        return own | Asked(negative_prompt=self.negative_prompt)

    @contextmanager
    def open_pipeline(self, loading: AbstractContextManager[Pipeline]) -> Iterator[Pipeline]:
        """Open the pipeline; an error names what the image was made by, where that is not here."""
        one = self.decision
        with ExitStack() as stack:
            try:
                pipeline = stack.enter_context(loading)
                if (here := pipeline.model.weights_hash) != one.weights_hash:
                    raise ModelError(
                        f"the weights are {here[:12]} here, not {one.weights_hash[:12]}"
                    )
            except (BackendError, ModelError) as error:
                raise type(error)(
                    f"{self.path} was made by the model {one.model} on {one.device} ({one.backend}) in "
                    f"{one.dtype}: {error}; name the model's folder with --model, or another --device or "
                    "--dtype, where rounding may change tokens"
                ) from None
            yield pipeline
