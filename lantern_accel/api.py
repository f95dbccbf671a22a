"""The public calls: ``generate`` for one line, ``load`` for a pipeline to reuse."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from lantern_accel.device.plugins import choose_device
from lantern_accel.generation.result import GenerationResult
from lantern_accel.strategy.values import NeighbourSpace, Strategy, Tree

if TYPE_CHECKING:
    from lantern_accel.generation.pipeline import Pipeline

DEFAULT_MODEL = "lantern-emoji"


def load(
    model: str | Path = DEFAULT_MODEL,
    *,
    device: str = "auto",
    dtype: str = "auto",
    options: Mapping[str, Any] | None = None,
    vq: str | Path | None = None,
    drafter: str | Path | None = None,
    text_encoder: str | Path | None = None,
    text_device: Literal["device", "cpu"] = "device",
    embeddings: str | Path | None = None,
    tell: Callable[[str], None] | None = None,
    on_loading: Callable[[str, int, int], None] | None = None,
) -> Pipeline:
    """Load a model onto a device and return a pipeline to reuse.

    ``model``: a name that ``lantern-accel models`` lists (fetched through the Hugging Face Hub if it is
    not in its cache), a folder with a ``model.json``, or a folder or file of official weights.
    ``device``: a backend's name, with ``:index`` for one of several, or ``"auto"`` for the best available
    one. ``dtype``: ``"auto"`` (the device's best), ``"float32"``, ``"bfloat16"`` or ``"float16"``.
    ``options`` go to the backend.

    ``vq``, ``drafter`` and ``text_encoder`` name parts that lie elsewhere (``drafter="none"``: decode
    without one); ``text_device="cpu"`` keeps a large text encoder off the device; ``embeddings`` is a
    ``.safetensors`` or ``.npz`` file with the prompts' features in place of the text encoder. ``tell``
    gets lines about licences and downloads, ``on_loading`` a part's name, bytes read, bytes in all.

    Raises :class:`BackendError` for a device that is unknown or absent (never a silent fall-back),
    :class:`ModelError` for a model that is unknown or damaged.
    """
    # The device comes before torch: its absence is told at once, and its environment is set in time.
    chosen = choose_device(device, options)
    from lantern_accel.checkpoints.locate import named_parts
    from lantern_accel.generation.opening import open_pipeline

    parts = named_parts(
        vq=vq,
        drafter=drafter,
        text_encoder=text_encoder,
        text_device=text_device,
        embeddings=embeddings,
    )
    return open_pipeline(model, chosen, dtype, parts=parts, tell=tell, on_loading=on_loading)


def generate(
    prompt: str | int | Sequence[str | int],
    *,
    device: str = "auto",
    model: str | Path = DEFAULT_MODEL,
    preset: str | None = None,
    strategy: str | Strategy | None = None,
    num_images: int = 1,
    seed: int | None = None,
    dtype: str = "auto",
    batch_size: int | None = None,
    size: tuple[int, int] | None = None,
    temperature: float | None = None,
    top_k: int | None = None,
    top_p: float | None = None,
    cfg_scale: float | None = None,
    cfg_interval: int | None = None,
    cfg_scale_image: float | None = None,
    tree: str | Tree | None = None,
    window: int | None = None,
    k: int | None = None,
    delta: float | None = None,
    lam: float | None = None,
    residual: Literal["aggregate", "official", "optimal"] | None = None,
    neighbour_space: NeighbourSpace | None = None,
    options: Mapping[str, Any] | None = None,
    on_progress: Callable[[int, int], None] | None = None,
    **parts: Any,
) -> GenerationResult:
    """Generate images from a prompt, a list of prompts, or class ids.

    ``num_images`` a prompt; ``seed`` fixes the images on a device (None draws one, which the result
    tells). ``strategy``: ``vanilla``, ``eagle``, ``eagle2``, ``lantern``, ``lantern++`` (the default);
    without a drafter ``sjd``, ``scd``, ``scd-gumbel``, ``sjd-pac``, ``lantern-jacobi``,
    ``lantern++-jacobi``; or a :class:`Strategy`; ``tree``, ``window`` (its length), ``k``, ``delta``,
    ``lam`` (lambda), ``residual`` and ``neighbour_space`` change a part of it. ``temperature=0`` is
    greedy. ``size`` is the width and height in pixels, where a model draws several;
    ``cfg_scale_image`` asks for three-way guidance (Anole). Settings left None are the preset's
    (``lantern-accel models --presets``) or the model's.
    ``parts`` are those of :func:`load` (``vq``, ``drafter``, ``text_encoder``, ``embeddings``, ...).

    Returns ``.images`` (PIL), ``.tokens`` (int64 ``[n, tokens]``) and ``.stats``. Raises a subclass of
    :class:`LanternError`, before any decoding, for anything in the request that cannot be served.
    """
    with load(model, device=device, dtype=dtype, options=options, **parts) as pipeline:
        return pipeline.generate(
            prompt,
            on_progress=on_progress,
            preset=preset,
            strategy=strategy,
            num_images=num_images,
            seed=seed,
            batch_size=batch_size,
            size=size,
            tree=tree,
            window=window,
            k=k,
            delta=delta,
            lam=lam,
            residual=residual,
            neighbour_space=neighbour_space,
            temperature=temperature,
            top_k=top_k,
            top_p=top_p,
            cfg_scale=cfg_scale,
            cfg_interval=cfg_interval,
            cfg_scale_image=cfg_scale_image,
        )
