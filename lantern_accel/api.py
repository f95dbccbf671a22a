"""The public calls: ``generate`` for one line, ``load`` for a pipeline to reuse."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

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
    options: Mapping[str, Any] | None = None,
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
    """Load a model onto a device and return a pipeline to reuse.

    ``model``: a name that ``lantern-accel models`` lists (fetched through the Hugging Face Hub if it is
    not in its cache), a folder with a ``model.json``, or a folder or file of official weights.
    ``device``: a backend's name, with ``:index`` for one of several, ``"gpu"`` for the best of those, or
    ``"auto"`` for the best available one (another serves where it fails, with a warning). ``dtype``:
    ``"auto"`` (the device's best), ``"float32"``, ``"bfloat16"`` or ``"float16"``. ``options`` go to the
    backend.

    ``vq``, ``drafter``, ``head`` (a draft head) and ``text_encoder`` name parts stored elsewhere
    (``drafter="none"`` and ``head="none"``: decode without one); ``text_device="cpu"`` keeps a large
    text encoder off the device; ``embeddings`` is a ``.safetensors`` or ``.npz`` file with the prompts'
    features in place of the text encoder.

    ``weights``: ``"full"``, as the model has them, or the target's quantized, ``"int8"``,
    ``"int6"`` or ``"int4"``: what that costs is measured once per model and stands in every result.
    ``size`` and ``strategy``: those that requests will ask for. A size that a published model cannot
    generate is refused before the model is fetched, a strategy without the drafter that it needs before
    weights are read. ``tell`` gets lines about licences, downloads and such measurements,
    ``on_loading`` a part's name, bytes read, bytes in all.

    Raises :class:`BackendError` for a device that is unknown or absent, or that was asked for by name
    and fails; :class:`ModelError` for a model that is unknown or damaged.
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
    options: Mapping[str, Any] | None = None,
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

    ``num_images`` per prompt; ``seed`` fixes the images, the same under every exact strategy (None: a
    random one, stated in the result). ``strategy``: ``auto`` (the default), ``vanilla``, ``eagle``,
    ``eagle2``, ``lantern``, ``lantern++``, without a drafter ``self``, ``scd`` and ``sjd``, or a
    :class:`Strategy`; ``decision``: an earlier result's ``stats.decision``, to decode with that.
    ``tree``, ``window`` (its length), ``accept`` (a rule, or text such as
    ``"lantern++:k=10,lambda=2"``), ``k``, ``delta``, ``lam`` (lambda), ``tv_budget``, ``residual``,
    ``coupling`` and ``neighbour_space`` change a part of a strategy; ``relaxed`` lets ``auto`` relax
    acceptance. ``sampling`` is a :class:`Sampling`; its fields may be given one by one
    (``temperature=0`` is greedy; ``guidance_scale`` is another name of ``cfg_scale``). ``size`` is the
    width and height in pixels, where a model generates several; ``cfg_scale_image`` asks for three-way
    guidance (Anole). Settings left None are the preset's (``lantern-accel models --presets``) or the
    model's. The other arguments are those of :func:`load`.

    Returns ``.images`` (PIL), ``.tokens`` (int64 ``[n, tokens]``) and ``.stats``. Raises a subclass of
    :class:`LanternError`, before any decoding, for anything in the request that cannot be served.
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
