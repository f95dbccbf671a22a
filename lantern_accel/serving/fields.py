"""Names of fields: ours, other programs' for the same, and slips; all others are ignored and named."""

from __future__ import annotations

import difflib
from collections.abc import Collection, Mapping
from typing import Any

from lantern_accel.serving.refusals import quote, wrong_value

#: Other programs' names, by ours.
TAKEN = {"cfg_scale": "guidance_scale", "num_images": "n", "num_images_per_prompt": "n"}
#: A name this near to one of ours, and of its length give or take a letter, is a slip.
NEAR = 0.75


def read_names(
    given: Mapping[str, Any], fields: Collection[str]
) -> tuple[dict[str, Any], dict[str, str], tuple[str, ...]]:
    """Return a body under our names, what was sent under another one, and what means nothing here.

    The second has the name that was sent, by ours. Raises :class:`Refusal` for a slip, and where one
    value comes under two names and differs.
    """
    found, sent = dict(given), dict[str, str]()
    for theirs, ours in TAKEN.items():
        _take(found, sent, theirs, ours, found.pop(theirs, None))
    sides = {name: found.pop(name, None) for name in ("width", "height")}
    if any(side is not None for side in sides.values()):
        for name, side in sides.items():
            if type(side) is not int:
                what = f"not {quote(side)}" if name in given else f"and {name} is missing"
                raise wrong_value(name, f"width and height are integers, in pixels, {what}")
        _take(found, sent, "width", "size", f"{sides['width']}x{sides['height']}")
    ignored = [name for name in found if name not in fields]
    for name in ignored:
        near = difflib.get_close_matches(name[:80].lower(), [*fields, *TAKEN], n=1, cutoff=NEAR)
        if near and abs(len(name) - len(near[0])) <= 1:
            text = f"there is no field {quote(name)} here; did you mean {near[0]}?"
            raise wrong_value(name[:80], text, "unknown_parameter")
    return found, sent, tuple(name[:80] for name in ignored[:32])


def _take(
    found: dict[str, Any], sent: dict[str, str], theirs: str, ours: str, value: object
) -> None:
    if value is None:
        return
    if found.get(ours) not in (None, value):
        raise wrong_value(
            theirs,
            f"{theirs} means {ours} here, and {sent.get(ours, ours)} is sent too with another value, "
            f"{quote(found[ours])} and {quote(value)}; leave one out",
        )
    found[ours], sent[ours] = value, theirs
