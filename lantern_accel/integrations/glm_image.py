"""The prior of GLM-Image, from prompts and the processor that a library has loaded with it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from lantern_accel.device.context import own_context
from lantern_accel.errors import RequestError
from lantern_accel.families.controls import Controls
from lantern_accel.integrations.adapter import Own, SampledTokens
from lantern_accel.integrations.decoding import Accelerated
from lantern_accel.integrations.distribution import processors_of, prompts_of, sampling_of
from lantern_accel.strategy.values import Sampling


@own_context()
def sample_prior(
    ours: Accelerated | Own,
    processor: Any,
    prompts: Sequence[str],
    size: tuple[int, int],
    seeds: Sequence[tuple[int, int]],
    on_progress: Callable[[int], None] | None = None,
) -> SampledTokens:
    """Sample the codes of both grids, ``[B, N]``, one image of each prompt.

    Around a module the distribution is that of its own ``generate(do_sample=True)``. ``size``: width and
    height in pixels, multiples of 32; ``seeds`` as in :meth:`Adapter.draw`. Raises :class:`RequestError`
    for a prompt that holds a token's own string.
    """
    reads = getattr(getattr(processor, "tokenizer", None), "backend_tokenizer", None)
    if reads is not None:  # else our own prior's tokenizer is asked, below
        Controls(reads).check(prompts)
    if isinstance(ours, Own):
        return ours.generate_prompts(prompts, size, seeds, on_progress)
    given = processor.apply_chat_template(
        [[{"role": "user", "content": [{"type": "text", "text": one}]}] for one in prompts],
        tokenize=True,
        padding=len(prompts) > 1,
        target_h=size[1],
        target_w=size[0],
        return_dict=True,
        return_tensors="pt",
    )
    ids, mask, shapes = (given[n] for n in ("input_ids", "attention_mask", "image_grid_thw"))
    model: Any = ours.module
    config, _ = model._prepare_generation_config(None, do_sample=True)
    processors = processors_of(model, config, ids, [])
    target = ours.ready().model.manifest.target
    sampling = ours.sampling(sampling_of(processors, target.head_rows, sample=True))
    return sample_ids(ours, ids, mask, shapes, sampling, seeds, on_progress)


@own_context()
def sample_ids(
    ours: Accelerated,
    ids: Tensor,
    mask: Tensor,
    grids: Tensor | None,
    sampling: Sampling,
    seeds: Sequence[tuple[int, int]],
    on_progress: Callable[[int], None] | None = None,
) -> SampledTokens:
    """Sample the codes of both grids, ``[B, N]``, of prompts that GLM-Image's processor made.

    ``ours`` is ready; ``grids``: the processor's ``image_grid_thw``, of which the first is the large one.
    """
    if grids is None or len(grids) < 2:
        raise RequestError(
            "the request has no image_grid_thw of a small and a large grid; make it with the model's "
            "processor, apply_chat_template(..., target_h=, target_w=)"
        )
    assert ours.pipeline is not None
    model = ours.pipeline.model
    large = (int(grids[0][1]), int(grids[0][2]))
    both = model.manifest.target.model_copy(update={"height": large[0], "width": large[1]}).grids
    others = {(int(one[1]), int(one[2])) for one in grids}
    if others - set(both):
        raise RequestError(
            f"image_grid_thw has grids {sorted(others)}, but an image of {large[0]} x {large[1]} tokens "
            f"has {both[0][0]} x {both[0][1]} before it; a batch is of one size"
        )
    prompts = prompts_of(ids, mask)
    return ours.generate_ids(prompts, sampling, seeds, grid=large, on_progress=on_progress)
