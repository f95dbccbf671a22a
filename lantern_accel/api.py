"""The public calls: ``generate`` for one line, ``load`` for a pipeline to reuse."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from lantern_accel.device.plugins import choose_device
from lantern_accel.errors import DeviceRequestError, did_you_mean
from lantern_accel.generation.result import GenerationResult
from lantern_accel.generation.settings import (
    Asked,
    check_prompts,
    read_settings,
    read_size,
    takes_settings,
)

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from lantern_accel.device.backend import Backend
    from lantern_accel.device.plugins import Chosen
    from lantern_accel.generation.decision import Decision
    from lantern_accel.generation.pipeline import Pipeline
    from lantern_accel.strategy.strategy import Strategy

DEFAULT_MODEL = "lantern-emoji"


def load(
    model: str | Path = DEFAULT_MODEL,
    *,
    device: str = "auto",
    dtype: str = "auto",
    options: Mapping[str, object] | None = None,
    vq: str | Path | None = None,
    drafter: str | Path | None = None,
    head: str | Path | None = None,
    text_encoder: str | Path | None = None,
    text_device: Literal["device", "cpu"] = "device",
    embeddings: str | Path | None = None,
    weights: str = "full",
    size: tuple[int, int] | str | None = None,
    strategy: str | Strategy | None = None,
    tell: Callable[[str], None] | None = None,
    on_loading: Callable[[str, int, int], None] | None = None,
) -> Pipeline:
    """Load a model onto a device, and return a pipeline to reuse.

    ``model``: a name from ``lantern-accel models`` (downloaded from the Hugging Face Hub unless it is in
    the cache), a folder with a ``model.json``, or a folder or file of official weights. ``device``: a
    backend's name, optionally with ``:index``; ``"gpu"``; or ``"auto"``, the best available one. If the
    device of ``"auto"`` fails, the next one is used, with a warning. ``dtype``: ``"auto"`` (the device's
    best), ``"float32"``, ``"bfloat16"`` or ``"float16"``. ``options``: options of the backend.

    ``vq``, ``drafter``, ``head`` (a draft head) and ``text_encoder``: paths of model parts.
    ``drafter="none"`` and ``head="none"`` leave a part out. ``text_device="cpu"`` keeps a large text
    encoder off the device. ``embeddings``: a ``.safetensors`` or ``.npz`` file of prompt features, which
    replaces the text encoder.

    ``weights``: ``"full"``, or the target's weights quantized to ``"int8"``, ``"int6"`` or ``"int4"``.
    Their quality loss is measured once per model, and every result has it. ``size`` and ``strategy``: the
    ones of later requests. An impossible size is rejected before a download, and a strategy without its
    drafter before weights are read. ``tell`` gets lines about licences, downloads and measurements.
    ``on_loading`` gets a part's name, the bytes read and the total bytes.

    Raises :class:`BackendError` if the device is unknown, absent or fails, and :class:`ModelError` if the
    model is unknown or damaged.
    """
    # The device comes before torch: its absence is said at once, and its environment is set in time.
    chosen = choose_device(device, options)
    from lantern_accel.device.backend import DTYPES, dtype_policy
    from lantern_accel.device.context import with_gradients
    from lantern_accel.generation.pipeline import Pipeline
    from lantern_accel.generation.quantized import quantized_model
    from lantern_accel.memory.limits import check_weights
    from lantern_accel.models.bundle import load_model
    from lantern_accel.models.locate import check_size, find_model, log, named_parts
    from lantern_accel.nn.rounding import FULL, rounding
    from lantern_accel.strategy.choose import choose_strategy

    if dtype != "auto" and dtype not in DTYPES:
        raise DeviceRequestError(
            f"no dtype is named {dtype!r}{did_you_mean(dtype, ['auto', *DTYPES])}"
        )
    how = None if weights == FULL else rounding(weights)
    parts = named_parts(
        vq=vq,
        drafter=drafter,
        head=head,
        text_encoder=text_encoder,
        text_device=text_device,
        embeddings=embeddings,
    )
    check_size(model, read_size(size) if isinstance(size, str) else size)
    found = find_model(model, parts, tell or log)
    if strategy is not None:
        wanted = choose_strategy(found.manifest.defaults, strategy)
        wanted.check_drafter(found.manifest.drafter is not None)

    def load_on(backend: Backend, chosen: Chosen) -> Pipeline:
        if backend.device.type == "meta":
            raise DeviceRequestError(
                f"the backend {backend.name!r} has shapes and no data, so it generates nothing; choose "
                "another device (`lantern-accel devices` lists them)"
            )
        policy = dtype_policy(backend, dtype)
        check_weights(backend, found, policy.compute)
        loaded = load_model(
            found,
            backend,
            dtype=policy.compute,
            text_dtype=policy.operators,
            device=backend.device,
            progress=on_loading,
            pack_target=how is None,
        )
        if how is not None:
            loaded = quantized_model(loaded, backend, policy.compute, how, tell or log)
        # Where auto chose a device that fails, now or when it is first used, the next one serves.
        return Pipeline(
            loaded,
            backend,
            policy.compute,
            otherwise=lambda error: chosen.after(error).serve(load_on),
        )

    with with_gradients():
        return chosen.serve(load_on)


@takes_settings
def generate(
    prompt: str | int | Sequence[str | int],
    *,
    device: str = "auto",
    model: str | Path = DEFAULT_MODEL,
    dtype: str = "auto",
    options: Mapping[str, object] | None = None,
    vq: str | Path | None = None,
    drafter: str | Path | None = None,
    head: str | Path | None = None,
    text_encoder: str | Path | None = None,
    text_device: Literal["device", "cpu"] = "device",
    embeddings: str | Path | None = None,
    weights: str = "full",
    decision: Decision | None = None,
    on_progress: Callable[[int, int], None] | None = None,
    **settings: Unpack[Asked],
) -> GenerationResult:
    """Generate images from a prompt, a list of prompts, or class ids.

    ``num_images``: images per prompt. ``seed``: the random seed; exact strategies give the same images
    for it. None takes a random seed, and the result has it. ``strategy``: ``auto`` (the default),
    ``vanilla``, ``eagle``, ``eagle2``, ``lantern``, ``lantern++``; without a drafter ``self``, ``scd``,
    ``sjd``; or a :class:`Strategy`. ``decision``: an earlier result's ``stats.decision``, to decode in
    the same way. ``drafts``, ``window`` (length), ``accept`` (a rule, or text such as
    ``"lantern++:k=10,lambda=2"``), ``k``, ``delta``, ``lam`` (lambda), ``tv_budget``, ``residual``,
    ``coupling`` and ``neighbour_space`` change parts of the strategy. ``relaxed`` lets ``auto`` relax
    acceptance. ``sampling``: a :class:`Sampling`, or its fields one by one (``temperature=0`` is
    greedy, and ``guidance_scale`` is another name of ``cfg_scale``). ``size``: width and height in
    pixels, for models with several sizes. ``cfg_scale_image``: Anole's three-way guidance. Settings that
    are None take the default of the preset (``lantern-accel models --presets``) or the model. The other
    arguments are those of :func:`load`.

    Returns ``.images`` (PIL), ``.tokens`` (int64 ``[n, tokens]``) and ``.stats``. Raises a subclass of
    :class:`LanternError` before decoding if the request is invalid.
    """
    check_prompts(prompt)
    asked = read_settings(settings)  # before anything is loaded
    pipeline = load(
        model,
        device=device,
        dtype=dtype,
        options=options,
        vq=vq,
        drafter=drafter,
        head=head,
        text_encoder=text_encoder,
        text_device=text_device,
        embeddings=embeddings,
        weights=weights,
        size=asked.size,
        strategy=asked.drafting,
    )
    with pipeline:
        return pipeline.generate(prompt, decision=decision, on_progress=on_progress, **settings)
