"""What a result tells of itself: counts, seconds, settings and versions."""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING

import torch

from lantern_accel.decoding.engine import Decoded
from lantern_accel.generation.result import GenerationRequest, GenerationStats, PhaseSeconds

if TYPE_CHECKING:
    from lantern_accel.generation.pipeline import Pipeline


def generation_stats(
    pipeline: Pipeline,
    request: GenerationRequest,
    parts: list[Decoded],
    seconds: PhaseSeconds,
    batch: int,
    buffers: int,
) -> GenerationStats:
    """Count what a request's batches made; ``parts`` are the batches, ``buffers`` their bytes."""
    import lantern_accel

    steps = sum(int(p.steps.sum()) for p in parts)
    tokens = sum(p.tokens.numel() for p in parts)
    images = sum(len(p.tokens) for p in parts)
    histogram = sum((p.histogram.sum(0) for p in parts[1:]), parts[0].histogram.sum(0))
    busy = seconds.prefill + seconds.decode
    drawn = torch.cat([p.tokens for p in parts]).long().contiguous().numpy()
    return GenerationStats(
        tokens=tokens,
        tokens_sha256=hashlib.sha256(drawn.tobytes()).hexdigest(),
        steps=steps,
        step_compression=(tokens - images) / steps if steps else 1.0,
        accepted_histogram=histogram.tolist(),
        total_variation=sum(float(p.price.sum()) for p in parts) / tokens,
        seconds=seconds,
        tokens_per_second=None if pipeline.backend.simulated else tokens / busy if busy else 0.0,
        images=images,
        prompts=list(request.prompts),
        device=str(pipeline.backend.device),
        device_name=pipeline.backend.facts().name,
        simulated=pipeline.backend.simulated,
        backend=pipeline.backend.name,
        backend_version=pipeline.backend.version,
        dtype=str(pipeline.dtype).removeprefix("torch."),
        model=pipeline.model.manifest.name,
        weights_hash=pipeline.model.weights_hash,
        strategy=request.strategy,
        sampling=request.sampling,
        seed=request.seed,
        batch_size=batch,
        buffers_bytes=buffers,
        lantern_accel=lantern_accel.__version__,
        torch=torch.__version__,
    )
