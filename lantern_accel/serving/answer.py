"""Answers a client: images in base64, OpenAI's fields around them, and our figures next to those."""

from __future__ import annotations

import base64
import io
import json
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

from lantern_accel.generation.runtime import steps_by_accepted
from lantern_accel.serving.body import FORMATS, ImageRequest
from lantern_accel.serving.queue import STAGES, Completed, Finished, Partial
from lantern_accel.strategy.values import NoTree

if TYPE_CHECKING:
    from PIL.Image import Image


def encode_image(image: Image, request: ImageRequest) -> str:
    """Return an image in the format that was asked for, as base64."""
    stream, asked = io.BytesIO(), request.body
    more = {} if asked.output_format == "png" else {"quality": asked.output_compression}
    image.convert("RGB").save(stream, format=FORMATS[asked.output_format], **more)
    return base64.b64encode(stream.getvalue()).decode("ascii")


def _common(request: ImageRequest, image: Image) -> dict[str, object]:
    return {
        "size": f"{image.width}x{image.height}",
        "quality": request.body.quality,
        "background": "opaque",
        "output_format": request.body.output_format,
    }


def usage(done: Sequence[Finished]) -> dict[str, object]:
    """Count tokens as OpenAI does: the prompt's once per request, the images' all."""
    text = done[0].text_tokens
    image = sum(one.done.decoded.tokens.numel() for one in done)
    return {
        "input_tokens": text,
        "output_tokens": image,
        "total_tokens": text + image,
        "input_tokens_details": {"text_tokens": text, "image_tokens": 0},
        "output_tokens_details": {"text_tokens": 0, "image_tokens": image},
    }


def statistics(done: Sequence[Finished], rounding: float) -> dict[str, float]:
    """Return tokens per target pass, and the quality loss: total variation per token, 0 where exact.

    ``rounding``: what quantized weights add, per token.
    """
    decoded = [one.done.decoded for one in done]
    tokens = sum(one.tokens.numel() for one in decoded)
    steps = sum(int(one.steps.sum()) for one in decoded)
    return {
        "tokens": tokens,
        "steps": steps,
        "tokens_per_step": (tokens - len(decoded)) / steps if steps else 1.0,
        "total_variation_per_token": sum(float(one.quality_loss.sum()) for one in decoded) / tokens
        + rounding,
    }


def speculation(done: Sequence[Finished], completed: Completed) -> dict[str, object] | None:
    """Return counts of drafts in the form of vLLM's ``speculative_decoding``; None for plain decoding.

    A step accepts a chain: drafts that compete for one place of it are counted once.
    """
    if isinstance(completed.strategy.drafts, NoTree):
        return None
    histogram = steps_by_accepted(one.done.decoded for one in done)
    steps, drafts = sum(histogram), sum(one.done.images[0].drafts for one in done)
    accepted = sum(count * n for count, n in enumerate(histogram))
    return {
        "acceptance_histogram": histogram,
        "mean_acceptance_length": 1 + accepted / steps if steps else 1.0,
        "draft_acceptance_rate": accepted / drafts if drafts else 0.0,
        "num_accepted_draft_tokens": accepted,
        "num_draft_tokens": drafts,
        "num_spec_steps": steps,
        "num_spec_tokens": len(histogram) - 1,
    }


def figures(
    request: ImageRequest, model: str, done: Sequence[Finished], completed: Completed
) -> dict[str, object]:
    """Return our own keys of an answer."""
    drafts = speculation(done, completed)
    seeds = [request.seeds[one.index][0] for one in done]
    several = isinstance(request.body.seed, list) and len(seeds) > 1
    counted, images = statistics(done, completed.rounding), len(request.seeds)
    # An event of a stream has one image of the request.
    tokens = counted["tokens"] * images / len(done)
    steps = completed.stages.get("prefill", 0.0) + completed.stages.get("decode", 0.0)
    return {
        "model": model,
        "seed": seeds if several else seeds[0],
        "strategy": completed.strategy.name,
        "relaxed": completed.strategy.acceptance.relaxed,
        "exact": not completed.strategy.acceptance.relaxed and not completed.rounding,
        "statistics": {
            **counted,
            "tokens_per_second": round(tokens / steps, 1) if steps else None,
            "seconds_per_image": round(completed.seconds / images, 4),
            "seconds": round(completed.seconds, 4),
            "seconds_waited": round(completed.stages["waiting"], 4),
            "stages": {name: round(completed.stages.get(name, 0.0), 4) for name in STAGES},
            "peak_memory_bytes": completed.peak,
        },
        "metrics": {"speculative_decoding": drafts} if drafts else {},
        "ignored": list(request.ignored),
        "notes": list(completed.notes),
    }


def whole_answer(
    request: ImageRequest, model: str, done: Sequence[Finished], completed: Completed
) -> dict[str, object]:
    """Return the answer of a request that is not streamed."""
    ordered = sorted(done, key=lambda one: one.index)
    return {
        "created": int(time.time()),
        "data": [{"b64_json": encode_image(one.image, request)} for one in ordered],
        **_common(request, done[0].image),
        "usage": usage(ordered),
        **figures(request, model, ordered, completed),
    }


def partial_event(request: ImageRequest, event: Partial) -> dict[str, object]:
    """Return ``image_generation.partial_image``; ``image_index`` says of which image."""
    return {
        **_event("partial_image", request, event.image, event.index),
        "partial_image_index": event.number,
        "known_tokens": event.known,
        "tokens": event.tokens,
    }


def completed_event(
    request: ImageRequest, model: str, one: Finished, completed: Completed
) -> dict[str, object]:
    """Return ``image_generation.completed`` of one image."""
    return {
        **_event("completed", request, one.image, one.index),
        "usage": usage([one]),
        **figures(request, model, [one], completed),
    }


def _event(kind: str, request: ImageRequest, image: Image, index: int) -> dict[str, object]:
    return {
        "type": f"image_generation.{kind}",
        "b64_json": encode_image(image, request),
        "created_at": int(time.time()),
        **_common(request, image),
        "image_index": index,
    }


#: What a stream that waits sends: a line that clients pass over, and that proxies count as traffic.
COMMENT = ": waiting\n\n"


def sse(data: dict[str, object]) -> str:
    """Write one server-sent event."""
    name = data.get("type", "error")
    return f"event: {name}\ndata: {json.dumps(data, ensure_ascii=False)}\n\n"
