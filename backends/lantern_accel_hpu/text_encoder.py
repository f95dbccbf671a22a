"""A T5 text encoder on Gaudi, with optimum-habana's versions of its layers.

optimum-habana pins transformers to one release for the whole environment and cannot be imported without
the SDK, so it is an extra (``pip install "lantern-accel[hpu-text]"``) and imported here alone.
"""

from __future__ import annotations

import importlib.metadata
from typing import TypeVar

import torch
from torch import nn

from lantern_accel.errors import BackendError

INSTALL = 'pip install "lantern-accel[hpu-text]" inside the Gaudi image'
#: What optimum-habana 1.21 replaces layers of; another release has other layers.
TRANSFORMERS = "4.55"

ModelT = TypeVar("ModelT", bound=nn.Module)


def prepare_text_encoder(
    model: ModelT, device: torch.device, dtype: torch.dtype = torch.bfloat16
) -> ModelT:
    """Return a T5 encoder of transformers, on the device and with Gaudi's layers, ready to be called.

    ``model``: a ``T5EncoderModel`` (or another with its layers); its classes are changed in this whole
    process. bfloat16 is what Gaudi computes best in; float16 overflows in T5. Raises BackendError
    where optimum-habana is missing, or transformers is another release than it replaces layers of.
    """
    _adapt()
    return model.to(device=device, dtype=dtype).eval().requires_grad_(False)


def memory_statistics() -> dict[str, float]:
    """Return optimum-habana's memory figures in GB: allocated, most allocated, available."""
    try:
        from optimum.habana.utils import get_hpu_memory_stats
    except ImportError as error:
        raise BackendError(f"optimum-habana is not installed; {INSTALL}") from error
    found: dict[str, float] = get_hpu_memory_stats()
    return found


def _adapt() -> None:
    """Replace transformers' layers by optimum-habana's; doing it twice is harmless."""
    version = _transformers()
    if not version:
        raise BackendError(f"transformers is not installed; {INSTALL}")
    if not version.startswith(f"{TRANSFORMERS}."):
        raise BackendError(
            f"optimum-habana replaces layers of transformers {TRANSFORMERS}, and {version} is "
            f"installed; {INSTALL} in an environment of its own"
        )
    try:
        from optimum.habana.transformers.modeling_utils import adapt_transformers_to_gaudi
    except ImportError as error:
        raise BackendError(f"optimum-habana is not installed; {INSTALL}") from error
    except IndexError as error:  # how it fails where pip lists no habana-torch-plugin
        raise BackendError(
            "optimum-habana finds no habana-torch-plugin; use it inside the Gaudi image"
        ) from error
    adapt_transformers_to_gaudi()


def _transformers() -> str:
    try:
        return importlib.metadata.version("transformers")
    except importlib.metadata.PackageNotFoundError:
        return ""
