"""The public calls: ``generate`` for one line, ``load`` for a pipeline to reuse."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from lantern_accel.plugins import choose_device
from lantern_accel.strategy import Strategy, Tree
from lantern_accel.types import GenerationResult

if TYPE_CHECKING:
    from lantern_accel.pipeline import Pipeline

DEFAULT_MODEL = "lantern-emoji"


def load(
    model: str | Path = DEFAULT_MODEL,
    *,
    device: str = "auto",
    dtype: str = "auto",
    options: Mapping[str, Any] | None = None,
) -> Pipeline:
    """Load a model onto a device and return a pipeline to reuse.

    ``model``: a bundled model's name, or a folder with a ``model.json``. ``device``: a backend's name,
    with ``:index`` for one of several, or ``"auto"`` for the best available one. ``dtype``: ``"auto"``
    (the device's best), ``"float32"``, ``"bfloat16"`` or ``"float16"``. ``options`` go to the backend.

    Raises :class:`BackendError` for a device that is unknown or absent (never a silent fall-back),
    :class:`ModelError` for a model that is unknown or damaged.
    """
    # The device comes before torch: its absence is told at once, and its environment is set in time.
    chosen = choose_device(device, options)
    from lantern_accel.pipeline import open_pipeline

    return open_pipeline(model, chosen, dtype)


def generate(
    prompt: str | int | Sequence[str | int],
    *,
    device: str = "auto",
    model: str | Path = DEFAULT_MODEL,
    strategy: str | Strategy = "lantern++",
    num_images: int = 1,
    seed: int | None = None,
    dtype: str = "auto",
    batch_size: int | None = None,
    temperature: float | None = None,
    top_k: int | None = None,
    top_p: float | None = None,
    cfg_scale: float | None = None,
    tree: str | Tree | None = None,
    k: int | None = None,
    delta: float | None = None,
    lam: float | None = None,
    residual: Literal["aggregate", "official", "optimal"] | None = None,
    options: Mapping[str, Any] | None = None,
    on_progress: Callable[[int, int], None] | None = None,
) -> GenerationResult:
    """Generate images from a prompt, a list of prompts, or class ids.

    ``num_images`` a prompt; ``seed`` fixes the images on a device (None draws one, which the result
    tells). ``strategy``: ``vanilla``, ``eagle``, ``eagle2``, ``lantern``, ``lantern++`` or a
    :class:`Strategy`; ``tree``, ``k``, ``delta``, ``lam`` (lambda) and ``residual`` change a part of
    it. ``temperature=0`` is greedy. Settings left None are the model's.

    Returns ``.images`` (PIL), ``.tokens`` (int64 ``[n, tokens]``) and ``.stats``. Raises a subclass of
    :class:`LanternError`, before any decoding, for anything in the request that cannot be served.
    """
    with load(model, device=device, dtype=dtype, options=options) as pipeline:
        return pipeline.generate(
            prompt,
            on_progress=on_progress,
            strategy=strategy,
            num_images=num_images,
            seed=seed,
            batch_size=batch_size,
            tree=tree,
            k=k,
            delta=delta,
            lam=lam,
            residual=residual,
            temperature=temperature,
            top_k=top_k,
            top_p=top_p,
            cfg_scale=cfg_scale,
        )
