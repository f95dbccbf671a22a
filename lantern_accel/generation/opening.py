"""Opens a device, loads a model on it, and returns the pipeline."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from lantern_accel.checkpoints.loading import LoadingProgress
from lantern_accel.device.backend import DTYPES, Backend
from lantern_accel.errors import DeviceRequestError, did_you_mean
from lantern_accel.families.base import Parts
from lantern_accel.generation.pipeline import Pipeline
from lantern_accel.memory.limits import check_weights
from lantern_accel.nn.rounding import FULL, rounding

if TYPE_CHECKING:
    from lantern_accel.device.plugins import Chosen


def open_pipeline(
    model: str | Path,
    device: Chosen,
    dtype: str,
    *,
    parts: Parts | None = None,
    weights: str = FULL,
    tell: Callable[[str], None] | None = None,
    on_loading: LoadingProgress | None = None,
) -> Pipeline:
    """Open the device, then load the model on it; see :func:`lantern_accel.load`.

    ``tell`` gets lines about licences, downloads and prices that are measured, ``on_loading`` a part's
    name, bytes read and bytes in all. Where ``auto`` chose the device and it fails, the next one is
    opened, now or when it is first used.
    """
    from lantern_accel.models.bundle import load_model
    from lantern_accel.models.locate import find_model, log

    if dtype != "auto" and dtype not in DTYPES:
        raise DeviceRequestError(
            f"no dtype is named {dtype!r}{did_you_mean(dtype, ['auto', *DTYPES])}"
        )
    how = None if weights == FULL else rounding(weights)
    found = find_model(model, parts, tell or log)

    def load(backend: Backend, chosen: Chosen) -> Pipeline:
        if backend.device.type == "meta":
            raise DeviceRequestError(
                f"the backend {backend.name!r} has shapes and no data, so it draws nothing; choose "
                "another device (`lantern-accel devices` lists them)"
            )
        policy = backend.dtypes(dtype)
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
            from lantern_accel.generation.rounding_price import rounded_model

            loaded = rounded_model(loaded, backend, policy.compute, how, tell or log)
        return Pipeline(
            loaded,
            backend,
            policy.compute,
            otherwise=lambda error: chosen.after(error).serve(load),
        )

    return device.serve(load)
