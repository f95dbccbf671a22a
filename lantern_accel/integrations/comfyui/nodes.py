"""The nodes: one loads a model, one generates images with it.

ComfyUI imports this module and is imported by it. Its memory management owns a loaded model: it frees
other models for this one, and this one for others.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

import lantern_accel
from lantern_accel.bounds import MOST_CODES, MOST_IMAGES, MOST_SCALE, MOST_SEED, MOST_TEMPERATURE
from lantern_accel.device.backend import DTYPES
from lantern_accel.device.plugins import backend_specs, choose_device
from lantern_accel.errors import ModelError, RequestError
from lantern_accel.families.registry import list_published
from lantern_accel.generation.settings import check_prompts, read_settings
from lantern_accel.memory.limits import weights_bytes
from lantern_accel.models.bundle import bundled_models
from lantern_accel.models.hub import at_hand
from lantern_accel.models.locate import find_model
from lantern_accel.nn.rounding import FULL, ROUNDINGS
from lantern_accel.strategy.values import AUTO, STRATEGIES

try:
    from comfy.model_management import (
        get_torch_device,
        load_models_gpu,
        throw_exception_if_processing_interrupted,
    )
    from comfy.model_patcher import ModelPatcher
    from comfy.utils import ProgressBar
except ImportError as error:
    raise ImportError(f"lantern-accel's nodes need a newer ComfyUI ({error}); update it") from error

if TYPE_CHECKING:
    from lantern_accel.generation.pipeline import Pipeline

#: A node's inputs, by what they are called: a type or a list of choices, and how it is shown.
Inputs = dict[str, dict[str, tuple[object, ...]]]
CATEGORY = "lantern-accel"
KIND = "LANTERN_MODEL"
#: Partial images of each image, and the longest side of one that is shown.
PARTIALS, SHOWN = 8, 512
#: Stands for a setting that is left to the model.
OWN = -1
#: Inputs of a request that :class:`~lantern_accel.generation.settings.Settings` names otherwise.
NAMES = {"number": "num_images", "guidance": "cfg_scale"}


class Managed(ModelPatcher):  # type: ignore[misc]  # a class of ComfyUI has no types here
    """A model that ComfyUI keeps between runs and frees, whole, where it needs the memory."""

    pipeline: Pipeline | None = None

    def __init__(self, model: str, device: str, dtype: str, weights: str) -> None:
        """Find the device and the model's files; nothing is loaded.

        Raises :class:`BackendError` for an absent device, :class:`ModelError` for an absent model.
        """
        self.asked = {"model": model, "device": device, "dtype": dtype, "weights": weights}
        host = torch.device("cpu")
        place = host if choose_device(device).spec.scheduled_as == "CPU" else get_torch_device()
        nbytes = weights_bytes(find_model(model), DTYPES.get(dtype, torch.bfloat16))
        # An empty module stands for the weights: ComfyUI moves what it finds in one.
        super().__init__(torch.nn.Module(), place, host, size=nbytes)

    def ready(self) -> Pipeline:
        """Return the pipeline, loaded again where ComfyUI has freed it."""
        load_models_gpu([self])
        if self.pipeline is None:
            raise ModelError("this ComfyUI does not load models as these nodes ask; update ComfyUI")
        return self.pipeline

    # --- what ComfyUI calls --------------------------------------------------------------------

    def partially_load(self, *given: object, **more: object) -> int:
        """Load everything, unless somebody interrupts; returns the bytes that were loaded."""
        if self.pipeline is not None:
            return 0
        bar = ProgressBar(1)

        def read(part: str, known: int, total: int) -> None:
            throw_exception_if_processing_interrupted()
            bar.update_absolute(known, total)

        self.pipeline = lantern_accel.load(**self.asked, on_loading=read)  # type: ignore[arg-type]  # checked by load
        return self.loaded_size()

    def partially_unload(self, *given: object, **more: object) -> int:
        """Free nothing: no part of it can be used alone."""
        return 0

    def detach(self, unpatch_all: bool = True) -> object:
        """Free the model, unless ComfyUI only takes it off its list to put it on again."""
        if unpatch_all and self.pipeline is not None:
            used, self.pipeline = self.pipeline, None
            used.close()
        return self.model

    def loaded_size(self) -> int:
        """Return the bytes of weights that are loaded."""
        return 0 if self.pipeline is None else int(self.size)

    def current_loaded_device(self) -> object:
        """Return where ComfyUI believes the weights."""
        return self.offload_device if self.pipeline is None else self.load_device

    def __del__(self) -> None:
        if self.pipeline is not None:
            self.detach()


class LoadModel:
    """Loads a model, which is kept between runs."""

    CATEGORY = CATEGORY
    DESCRIPTION = "Loads an autoregressive image model for Generate image (drafts)."
    FUNCTION = "load"
    RETURN_TYPES = (KIND,)
    RETURN_NAMES = ("model",)

    @classmethod
    def INPUT_TYPES(cls) -> Inputs:
        """Return the inputs; the list of models has those that are here."""
        here = [*bundled_models(), *(one.name for one in list_published() if at_hand(one))]
        cost = "Quantized weights take less memory; what they cost is measured."
        folder = (
            "In place of the model above: a folder of weights, or a published model, fetched once."
        )
        return {
            "required": {
                "model": (here, {"tooltip": "Models that are on this machine."}),
                "device": (["auto", "gpu", *backend_specs()], {"default": "auto"}),
                "dtype": (["auto", *DTYPES], {"default": "auto"}),
                "weights": ([FULL, *ROUNDINGS], {"tooltip": cost}),
            },
            "optional": {"folder": ("STRING", {"default": "", "tooltip": folder})},
        }

    def load(
        self, model: str, device: str, dtype: str, weights: str, folder: str = ""
    ) -> tuple[Managed]:
        """Load a model; raises :class:`LanternError` where it is absent or does not fit."""
        made = Managed(folder.strip() or model, device, dtype, weights)
        made.ready()
        return (made,)


class GenerateImage:
    """Generates images by speculative decoding."""

    CATEGORY = CATEGORY
    DESCRIPTION = "Generates images; a seed gives the same image under every exact strategy."
    FUNCTION = "generate"
    RETURN_TYPES = ("IMAGE", "STRING")
    RETURN_NAMES = ("images", "measured")

    @classmethod
    def INPUT_TYPES(cls) -> Inputs:
        """Return the inputs."""

        def number(text: str, most: float, kind: str = "FLOAT") -> tuple[object, ...]:
            step = {"step": 0.05} if kind == "FLOAT" else {}
            shown = f"{text} Below 0: the model's own."
            return kind, {"default": OWN, "min": OWN, "max": most, "tooltip": shown, **step}

        text = {"default": "", "multiline": True}
        seed = {"default": 0, "min": 0, "max": MOST_SEED, "control_after_generate": True}
        size = "Width and height in pixels, such as 768x512, where the model has several sizes."
        relaxed = "Allow strategies that change what the model samples, for speed."
        return {
            "required": {
                "model": (KIND,),
                "prompt": ("STRING", text),
                "negative_prompt": ("STRING", text),
                "seed": ("INT", seed),
                "number": ("INT", {"default": 1, "min": 1, "max": MOST_IMAGES}),
                "strategy": ([AUTO, *STRATEGIES], {"default": AUTO}),
                "relaxed": ("BOOLEAN", {"default": False, "tooltip": relaxed}),
                "size": ("STRING", {"default": "", "tooltip": size}),
                "guidance": number("Guidance; 1 or less is off.", MOST_SCALE),
                "temperature": number("0 is greedy.", MOST_TEMPERATURE),
                "top_k": number("Keep the k most likely codes; 0 keeps all.", MOST_CODES, "INT"),
                "top_p": number("Keep the codes that hold this share.", 1.0),
            }
        }

    def generate(self, model: Managed, prompt: str, **given: str | float) -> tuple[Tensor, str]:
        """Return images, float32 ``[B, H, W, 3]`` in 0 to 1 on the host, and what was measured.

        They are those of ``lantern_accel.generate`` with the same settings. An interrupt is ComfyUI's own
        exception, raised before the next step; the model stays loaded.
        """
        settings = dict[str, object]()
        for name, value in given.items():
            one = value.strip() if isinstance(value, str) else value
            if one != "" and (isinstance(one, str) or one >= 0):  # else it is the model's own
                settings[NAMES.get(name, name)] = one
        check_prompts(prompt)
        read_settings(settings)  # before anything is loaded
        pipeline, number = model.ready(), int(given["number"])
        known, stop = [0] * number, throw_exception_if_processing_interrupted
        with pipeline.stream(prompt, partials=PARTIALS, on_step=stop, **settings) as stream:
            bar = ProgressBar(1)
            for event in stream:
                known[event.index] = event.known
                preview = None if event.image is None else ("JPEG", event.image, SHOWN)
                bar.update_absolute(sum(known), event.total * number, preview)
            result = stream.result
        if not result.images:
            name = pipeline.model.manifest.name
            raise RequestError(
                f"{name} makes tokens here and no images; its log says what is missing"
            )
        pixels = np.stack([np.asarray(image) for image in result.images])
        lines = [f"{name}: {value}" for name, value in result.figures().items()]
        return torch.from_numpy(pixels).float() / 255, "\n".join(lines)


NODE_CLASS_MAPPINGS = {"LanternLoadModel": LoadModel, "LanternGenerateImage": GenerateImage}
NODE_DISPLAY_NAME_MAPPINGS = {
    "LanternLoadModel": "Load autoregressive image model",
    "LanternGenerateImage": "Generate image (drafts)",
}
