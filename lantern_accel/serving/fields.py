"""Names of fields: those that mean one of ours, those that are refused with the right name, and others.

Nothing that a client sends on purpose is passed over in silence: a name of this project or of other image
programs is taken, or refused with the name that is meant here.
"""

from __future__ import annotations

import difflib
from collections.abc import Collection, Mapping
from typing import Any

from lantern_accel.generation.settings import Settings
from lantern_accel.serving.refusals import quote, wrong_value

#: Taken as what they are called here.
TAKEN = {"cfg_scale": "guidance_scale", "num_images": "n", "num_images_per_prompt": "n"}
#: Refused with the name that is meant: values of another kind, or of another meaning elsewhere.
MEANT = {
    **dict.fromkeys(("cfg", "guidance", "true_cfg_scale", "cfg_guidance"), "guidance_scale"),
    **dict.fromkeys(
        ("batch_size", "batch", "num_samples", "num_outputs", "n_images", "samples"), "n"
    ),
    **dict.fromkeys(("negative", "uncond_prompt", "unconditional_prompt"), "negative_prompt"),
    **dict.fromkeys(("random_seed", "manual_seed", "sampling_seed", "generator"), "seed"),
    **dict.fromkeys(("resolution", "image_size", "aspect_ratio"), "size"),
    **dict.fromkeys(("text", "caption", "prompts"), "prompt"),
    **dict.fromkeys(("format", "image_format"), "output_format"),
}
#: Of diffusion models, where tokens are drawn one after another: passed over, with a note.
NO_STEPS = ("num_inference_steps", "steps")
#: Fields of other servers and clients that mean nothing here, however near to ours their names are.
FOREIGN = frozenset(
    (
        # OpenAI's
        *("style", "user", "safety_identifier", "complexity", "frame_count", "frame_duration_ms"),
        *("svg",),
        # diffusion servers'
        *("flow_shift", "generator_device", "lora", "guidance_scale_2", "extra_params", "layers"),
        *("bot_task", "system_prompt", "return_stage_metrics", "vae_use_slicing", "vae_use_tiling"),
        *("max_sequence_length", "diffusers_kwargs", "enhance_prompt", "perf_dump_path"),
    )
)
#: This near to one of ours a name is a slip.
NEAR = 0.75


def read_names(
    given: Mapping[str, Any], fields: Collection[str]
) -> tuple[dict[str, Any], dict[str, str], tuple[str, ...]]:
    """Return a body under our names, what was sent under another one, and what means nothing here.

    The second has the name that was sent, by ours. Raises :class:`Refusal` for a name that is refused,
    and where one value comes under two names and differs.
    """
    found, sent = dict(given), dict[str, str]()
    for theirs, ours in TAKEN.items():
        _take(found, sent, theirs, ours, found.pop(theirs, None))
    sides = {name: found.pop(name, None) for name in ("width", "height")}
    if any(side is not None for side in sides.values()):
        for name, side in sides.items():
            if type(side) is not int:
                what = f"not {quote(side)}" if name in given else f"and {name} is missing"
                raise wrong_value(name, f"width and height are whole numbers of pixels, {what}")
        _take(found, sent, "width", "size", f"{sides['width']}x{sides['height']}")
    ignored = []
    for name in found:
        if name in fields or (found[name] is None and name in MEANT):
            continue
        if (text := _refusal(name, fields)) is not None:
            raise wrong_value(name[:80], text, "unknown_parameter")
        ignored.append(name[:80])
    return found, sent, tuple(ignored[:32])


def _take(found: dict[str, Any], sent: dict[str, str], theirs: str, ours: str, value: Any) -> None:
    if value is None:
        return
    if found.get(ours) not in (None, value):
        raise wrong_value(
            theirs,
            f"{theirs} means {ours} here, and {sent.get(ours, ours)} is sent too with another value, "
            f"{quote(found[ours])} and {quote(value)}; leave one out",
        )
    found[ours], sent[ours] = value, theirs


def _refusal(name: str, fields: Collection[str]) -> str | None:
    """Return why a name is refused, with the right one; None for one that means nothing here."""
    if name in FOREIGN or name in NO_STEPS:
        return None
    meant = MEANT.get(name)
    if meant is None and name in (*Settings.model_fields, "lambda"):
        return (
            f"{quote(name)} is a setting of `lantern-accel generate` that a server does not take; it "
            "takes strategy, relaxed, tv_budget, temperature, top_k, top_p and guidance_scale"
        )
    near = difflib.get_close_matches(name[:80].lower(), [*fields, *TAKEN], n=1, cutoff=NEAR)
    meant = meant or next(iter(near), None)
    return None if meant is None else f"there is no field {quote(name)} here; did you mean {meant}?"
