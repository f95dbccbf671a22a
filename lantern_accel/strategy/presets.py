"""Published settings by name, each with its source, so that a number can be reproduced by name.

A preset fills in what a request leaves open; options that are given win. Presets of one name may differ
by model: the first that suits the model is taken.
"""

from __future__ import annotations

import fnmatch
from typing import Any, Literal

from pydantic import Field

from lantern_accel.errors import RequestError, did_you_mean
from lantern_accel.records import Frozen


class Preset(Frozen):
    """Settings that somebody published, and where.

    ``sampling`` has fields of :class:`~lantern_accel.strategy.values.Sampling`; ``overrides`` has what
    ``Pipeline.strategy`` takes besides a name (``tree``, ``k``, ``delta``, ``lam``, ``residual``,
    ``neighbour_space``). ``models`` are patterns of names; ``conditioning`` distinguishes
    LlamaGen's kinds, ``variant`` Chameleon's.
    """

    name: str
    summary: str
    source: str
    family: str
    conditioning: Literal["class", "text"] | None = None
    variant: Literal["anole", "lumina"] | None = None
    models: tuple[str, ...] = ("*",)
    strategy: str
    sampling: dict[str, Any] = Field(default_factory=dict)
    overrides: dict[str, Any] = Field(default_factory=dict)

    def suits(self, manifest: Any) -> bool:
        """Return whether these settings are for a model."""
        kind = getattr(manifest.target, "conditioning", None)
        return (
            manifest.family == self.family
            and self.conditioning in (None, kind)
            and self.variant in (None, getattr(manifest, "variant", None))
            and any(fnmatch.fnmatch(manifest.name, pattern) for pattern in self.models)
        )


#: What the papers' figures were made with: their code removes all neighbours from the residual, and
#: measures them on the raw codebook.
_OFFICIAL = {"residual": "official", "neighbour_space": "raw"}
_DYNAMIC = {"tree": "dynamic:10,4,59"}
_STATIC = {"tree": "naive_extend_57"}
_LANTERN_CODE = "jadohu/LANTERN 3a56e45"
_LLAMAGEN_CODE = "FoundationVision/LlamaGen ce98ec4"
_TEXT = {"cfg_scale": 7.5, "top_k": 1000, "top_p": 1.0, "temperature": 1.0, "cfg_interval": -1}
_CLASS = {"cfg_scale": 4.0, "top_k": 0, "top_p": 1.0, "temperature": 1.0, "cfg_interval": -1}
_CLI = {"cfg_scale": 3.0, "top_k": 2000, "top_p": 1.0, "temperature": 1.0, "cfg_interval": -1}


#: LANTERN's own settings by name: the strategy, its settings, what they are of, and the source.
_LANTERN = {
    "paper-lantern": (
        "lantern",
        {"k": 1000, "delta": 0.1, **_DYNAMIC},
        "LANTERN on {}; the paper sweeps delta about 0.1 to 0.4",
        f"arXiv 2410.03355; tree and residual of {_LANTERN_CODE}",
    ),
    "paper-lantern++": (
        "lantern++",
        {"k": 10, "lam": 2.0, **_STATIC},
        "LANTERN++ on {}; the paper sweeps lambda about 2 to 5",
        f"arXiv 2502.06352; tree and residual of {_LANTERN_CODE}",
    ),
    "official-cli": (
        "lantern",
        {"k": 1000, "delta": 0.1, **_DYNAMIC},
        "LANTERN's command line with --lantern and nothing else: k 1000, delta 0.1",
        f"{_LANTERN_CODE}, defaults of entrypoints/generate_images.py and EaModel",
    ),
    "official-run": (
        "lantern++",
        {"k": 10, "lam": 5.0, **_STATIC},
        "LANTERN's own benchmark script: static tree, k 10, lambda 5",
        f"{_LANTERN_CODE}, run.sh (--lantern_k 10 --lantern_delta 5)",
    ),
}


def _lantern(
    name: str, conditioning: Literal["class", "text"] | None = None, *, anole: bool = False
) -> Preset:
    """Return LANTERN's settings: the papers' by what LlamaGen is conditioned on, else its command line's.

    Anole's codebook has one space, so that its presets name none.
    """
    strategy, values, summary, source = _LANTERN[name]
    return Preset(
        name=name,
        summary=summary.format("Anole" if anole else f"{conditioning}-conditional LlamaGen"),
        source=source,
        family="chameleon" if anole else "llamagen",
        conditioning=conditioning,
        variant="anole" if anole else None,
        strategy=strategy,
        sampling={"text": _TEXT, "class": _CLASS}.get(conditioning or "", _CLI),
        overrides={**values, "residual": "official"} if anole else {**values, **_OFFICIAL},
    )


def _fid(sizes: tuple[str, ...], scale: float) -> Preset:
    return Preset(
        name="llamagen-fid",
        summary="class-conditional samples for FID, drawn token by token",
        source=f"{_LLAMAGEN_CODE}, GETTING_STARTED.md and sample_c2i_ddp.py",
        family="llamagen",
        conditioning="class",
        models=tuple(f"llamagen-{size}-*" for size in sizes),
        strategy="vanilla",
        sampling={**_CLASS, "cfg_scale": scale},
    )


PRESETS: tuple[Preset, ...] = (
    _lantern("paper-lantern", "text"),
    _lantern("paper-lantern", "class"),
    _lantern("paper-lantern++", "text"),
    _lantern("paper-lantern++", "class"),
    _lantern("official-cli"),
    _lantern("official-run"),
    Preset(
        name="llamagen-cli",
        summary="LlamaGen's command line, text: CFG 7.5, top-k 1000",
        source=f"{_LLAMAGEN_CODE}, defaults of sample_t2i.py",
        family="llamagen",
        conditioning="text",
        strategy="vanilla",
        sampling=_TEXT,
    ),
    Preset(
        name="llamagen-cli",
        summary="LlamaGen's command line, classes: CFG 4, top-k 2000",
        source=f"{_LLAMAGEN_CODE}, defaults of sample_c2i.py",
        family="llamagen",
        conditioning="class",
        strategy="vanilla",
        sampling={**_CLASS, "top_k": 2000},
    ),
    Preset(
        name="llamagen-demo",
        summary="LlamaGen's web demo, classes: CFG 4, top-k 4000",
        source=f"{_LLAMAGEN_CODE}, sliders of app.py",
        family="llamagen",
        conditioning="class",
        strategy="vanilla",
        sampling={**_CLASS, "top_k": 4000},
    ),
    *(_lantern(name, anole=True) for name in _LANTERN),
    Preset(
        name="anole-cli",
        summary="Anole's own program: temperature 0.7, top-p 0.9, text scale 3, image scale 1.2",
        source="GAIR-NLP/anole af563fa, Options.Image of chameleon/inference/chameleon.py",
        family="chameleon",
        variant="anole",
        strategy="vanilla",
        # A prompt of text alone makes the three-way rule the two-way: the image scale cancels.
        sampling={"cfg_scale": 3.0, "top_k": 0, "top_p": 0.9, "temperature": 0.7},
    ),
    Preset(
        name="lumina-readme",
        summary="Lumina-mGPT's README: CFG 4, top-k 2000",
        source="Alpha-VLLM/Lumina-mGPT 104abe4, README.md",
        family="chameleon",
        variant="lumina",
        strategy="vanilla",
        sampling={**_CLI, "cfg_scale": 4.0},
    ),
    Preset(
        name="lumina-demo",
        summary="Lumina-mGPT's web demo: CFG 3, top-k 4000",
        source="Alpha-VLLM/Lumina-mGPT 104abe4, demos/demo_image_generation.py",
        family="chameleon",
        variant="lumina",
        strategy="vanilla",
        sampling={**_CLI, "top_k": 4000},
    ),
    Preset(
        name="janus-script",
        summary="Janus's own script: CFG 5, temperature 1, no filter",
        source="deepseek-ai/Janus 1daa72f, generation_inference.py",
        family="janus",
        strategy="vanilla",
        sampling={"cfg_scale": 5.0, "top_k": 0, "top_p": 1.0, "temperature": 1.0},
    ),
    Preset(
        name="glm-image-readme",
        summary="GLM-Image's README: temperature 0.9, top-p 0.75, no guidance in the prior",
        source="zai-org/GLM-Image, README.md and generation_config.json",
        family="glm_image",
        strategy="vanilla",
        sampling={"cfg_scale": 1.0, "top_k": 0, "top_p": 0.75, "temperature": 0.9},
    ),
    _fid(("b", "l"), 2.0),
    _fid(("xl", "xxl"), 1.75),
    _fid(("3b",), 1.65),
)


def preset_for(name: str, manifest: Any) -> Preset:
    """Return the preset of a name that suits a model.

    Raises :class:`RequestError` for a name that is unknown, or that has no settings for this model.
    """
    named = [one for one in PRESETS if one.name == name]
    if not named:
        raise RequestError(
            f"unknown preset {name!r}{did_you_mean(name, {one.name for one in PRESETS})}"
        )
    for one in named:
        if one.suits(manifest):
            return one
    suitable = sorted({one.name for one in PRESETS if one.suits(manifest)})
    raise RequestError(
        f"the preset {name!r} has no settings for the model {manifest.name!r} ("
        f"{'for it: ' + ', '.join(suitable) if suitable else 'none is published for it'})"
    )
