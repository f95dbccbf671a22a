"""The size of an image, read off a function that says which ids may follow: Emu3's grammar."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from lantern_accel.families.emu3.model import Emu3Manifest

#: Stands for all codes, where an id stands for itself alone.
_CODES = -1


def grid_of_grammar(
    allowed: Callable[[int, Tensor], object], ids: Tensor, manifest: Emu3Manifest
) -> tuple[int, int]:
    """Return rows and columns of the images that a grammar allows behind ``ids [B, length]``.

    ``allowed``: from a row's number and its ids to those that may follow; it is called at every place of
    an image before anything is sampled. Raises :class:`ValueError` where it allows something else than
    images of one size.
    """
    special, target = manifest.ids, manifest.target
    codes = torch.arange(target.image_first, target.image_first + target.image_codes)
    ends = [special.frame_end, special.image_end, special.eos]
    sizes = set[tuple[int, int]]()
    for row, prompt in enumerate(ids):
        written = torch.cat((prompt, prompt.new_full((target.max_positions,), special.first)))
        kinds: list[int] = []
        all_codes = None
        while len(kinds) < target.max_positions and kinds[-1:] != ends[-1:]:
            place = len(prompt) + len(kinds)
            given = allowed(row, written[:place])
            if given is not all_codes:
                asked = torch.as_tensor(given).flatten().cpu()
                if len(asked) == 1:
                    kinds.append(int(asked))
                    written[place] = asked[0]
                    continue
                if not torch.equal(asked.sort().values, codes):
                    break
                all_codes = given
            kinds.append(_CODES)
        rows = kinds.count(special.row_end)
        columns = (*kinds, special.row_end).index(special.row_end)
        if kinds != [*([_CODES] * columns + [special.row_end]) * rows, *ends] or not rows * columns:
            raise ValueError(
                f"a prefix_allowed_tokens_fn that is not Emu3's at token {len(kinds)} of the image"
            )
        sizes.add((rows, columns))
    if len(sizes) > 1:
        raise ValueError("images of several sizes in one batch")
    return sizes.pop()
