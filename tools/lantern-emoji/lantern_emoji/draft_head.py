"""Trains the draft head: from what windows of the model see and choose, to guesses of the next tokens.

The model draws pictures in windows of four. Every step leaves examples: the last exact state, the states
that the pass had at the places behind it, with the wrong token on their left, and the tokens around. What
the target would have drawn from there, its distribution after guidance and filters, is what the head
learns, one, two and three tokens ahead.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save
from torch import Tensor, nn

from lantern_accel.decoding.session import Session
from lantern_accel.files import write_json, write_whole
from lantern_accel.generation.pipeline import Pipeline
from lantern_accel.measure.prompts import REPORTING, TUNING
from lantern_accel.nn.draft_head import DraftHead, DraftHeadConfig, usual_head
from lantern_accel.quality.progress import Progress
from lantern_accel.strategy.values import Window
from lantern_accel.training.drafter import head_matrix

#: Tokens of the windows that are recorded, pictures drawn together, and codes of a distribution kept.
SPAN, TOGETHER, KEPT = 4, 16, 64
#: The share of prompts that pair two things at random; the others are those of the list.
PAIRS = 0.25


@dataclass
class Traces:
    """Examples of pictures: ``exact [N, T + SPAN + 1, D]``, tokens' exact states, and ``tokens [N, T]``.

    Of E steps: ``image`` and ``last``, the last token known, ``[E]``; of the places behind it in the
    pass ``states [E, J, D]`` and ``saw [E, J]``, the token on the left there, V where it saw none.
    """

    exact: Tensor
    tokens: Tensor
    image: Tensor
    last: Tensor
    states: Tensor
    saw: Tensor

    @classmethod
    def joined(cls, parts: Sequence[Traces]) -> Traces:
        """Put the examples of several batches together."""
        images, first = [], 0
        for one in parts:
            images.append(one.image + first)
            first += len(one.tokens)
        rest = ("exact", "tokens", "last", "states", "saw")
        return cls(
            image=torch.cat(images), **{n: torch.cat([getattr(p, n) for p in parts]) for n in rest}
        )


def prompts_of(lines: Sequence[str], held: Sequence[str], count: int, seed: int) -> list[str]:
    """Return prompts of a list and pairs of its short ones; none of ``held`` or of the built-in ones."""
    draw, left_out = random.Random(seed), {*TUNING, *REPORTING, *held}
    lines = [line for line in lines if line not in left_out]
    short = [line for line in lines if len(line.split()) <= 2]
    found: list[str] = []
    while len(found) < count:
        pair = draw.random() < PAIRS
        one = f"{draw.choice(short)} and {draw.choice(short)}" if pair else draw.choice(lines)
        if one not in left_out:
            found.append(one)
    return found


@contextmanager
def recording(steps: list[tuple[Tensor, ...]]) -> Iterator[None]:
    """Note every step of windows inside the block: window, length, guided states, counts, open images."""
    before = Session.observer

    def noted(step: Any, window: Tensor, features: Tensor, logits: Tensor, coupled: Any) -> Any:
        state, guidance = step.session.state, step.verifying.guidance
        last = step.geometry.tokens - 1
        following = (state.length.unsqueeze(1) + step.source.ahead).clamp(max=last)
        guided = step.ops.guide(features.float(), following, guidance.scale)
        kept = (window, state.length, guided.bfloat16(), coupled.count, state.length < last)
        steps.append(tuple(one.clone() for one in kept))
        return coupled

    Session.observer = staticmethod(noted)
    try:
        yield
    finally:
        Session.observer = before


def record(
    pipeline: Pipeline, prompts: Sequence[str], seed: int, depths: int, progress: Progress
) -> Traces:
    """Draw pictures in windows, and return what the steps saw."""
    strategy = pipeline.strategy("scd").model_copy(update={"drafts": Window(length=SPAN)})
    sampling, parts = pipeline.sampling(), []
    progress.start("recording steps", len(prompts))
    for first in range(0, len(prompts), TOGETHER):
        here = list(prompts[first : first + TOGETHER])
        here += here[-1:] * (TOGETHER - len(here))
        made = pipeline.conditions(here)
        rows = pipeline.model.family.rows(pipeline.model, made, sampling)
        steps: list[tuple[Tensor, ...]] = []
        with recording(steps):
            drawn = pipeline.draw_tokens(
                rows, made.shape, strategy, sampling, seed + first, range(TOGETHER)
            )
        every = [torch.stack(column) for column in zip(*steps, strict=True)]
        parts.append(
            _examples(drawn.long(), every, depths, pipeline.model.manifest.target.vocab_size)
        )
        progress.advance(len(here))
    progress.finish()
    return Traces.joined(parts)


def _examples(tokens: Tensor, steps: Sequence[Tensor], depths: int, none: int) -> Traces:
    """Turn a batch's steps, ``[S, B, ...]`` each, into examples."""
    window, length, guided, count, open_ = steps
    images, total = tokens.shape
    node = torch.arange(SPAN)
    exact = torch.zeros(images, total + SPAN + 1, guided.shape[-1], dtype=torch.bfloat16)
    place = length.unsqueeze(-1) + 1 + node
    known = (node < count.unsqueeze(-1)) & open_.unsqueeze(-1) & (place < total)
    of = torch.arange(images).view(1, -1, 1).expand_as(place)
    exact[of[known], place[known]] = guided[known]
    last = length + count
    step, image = (open_ & (last + depths < total)).nonzero(as_tuple=True)
    behind = count[step, image].unsqueeze(1) + torch.arange(depths)
    inside, at = behind < SPAN, behind.clamp(max=SPAN - 1)
    pick = (step.unsqueeze(1), image.unsqueeze(1), at)
    states = guided[pick] * inside.unsqueeze(-1)
    saw = torch.where(inside, window[pick], none)
    return Traces(exact, tokens, image, last[step, image], states, saw)


class Teaching:
    """The target's distributions at the exact states, and the examples that lead there."""

    def __init__(self, traces: Traces, weight: Tensor, top_p: float) -> None:
        """``weight [V, D]`` of the target's own head; ``top_p`` of its filter."""
        self.traces = traces
        flat = traces.exact.flatten(0, 1)
        codes, shares = [], []
        for first in range(0, len(flat), 4096):
            most, which = (flat[first : first + 4096].float() @ weight.T).topk(KEPT, dim=-1)
            p = most.softmax(-1)
            p = torch.where(p.cumsum(-1) - p <= top_p, p, 0.0)
            codes.append(which.to(torch.int32))
            shares.append((p / p.sum(-1, keepdim=True)).half())
        self.codes = torch.cat(codes).view(*traces.exact.shape[:2], KEPT)
        self.shares = torch.cat(shares).view(*traces.exact.shape[:2], KEPT)

    def guesses(self, head: DraftHead, chosen: Tensor, ahead: int) -> tuple[Tensor, Tensor, Tensor]:
        """Return the head's logits ``[n, V]`` for examples, their images and places ``[n]``."""
        t = self.traces
        image, last = t.image[chosen], t.last[chosen]
        place = last + ahead
        known, seen = head.project(t.exact[image, last], t.states[chosen, ahead - 1].unsqueeze(1))
        saw = t.saw[chosen, ahead - 1]
        own = torch.where((saw < head.config.vocab_size).unsqueeze(1), seen[:, 0], 0.0)
        around = head.around(t.tokens[image], place, saw)
        return head(ahead, known, own, around, place), image, place

    def loss(self, head: DraftHead, chosen: Tensor, ahead: int) -> Tensor:
        """Return the cross-entropy of the target's distributions with the head's."""
        logits, image, place = self.guesses(head, chosen, ahead)
        codes, shares = self.codes[image, place].long(), self.shares[image, place].float()
        found: Tensor = logits.logsumexp(-1) - (shares * logits.gather(1, codes)).sum(-1)
        return found.mean()

    @torch.no_grad()
    def overlap(self, head: DraftHead, ahead: int) -> float:
        """Return what the two distributions have in common, on average over the examples."""
        total = 0.0
        for chosen in torch.split(torch.arange(len(self.traces.last)), 2048):
            logits, image, place = self.guesses(head, chosen, ahead)
            codes, shares = self.codes[image, place].long(), self.shares[image, place].float()
            total += float(torch.minimum(logits.softmax(-1).gather(1, codes), shares).sum())
        return total / max(len(self.traces.last), 1)


def train(
    teaching: Teaching, config: DraftHeadConfig, steps: int, seed: int, progress: Progress
) -> DraftHead:
    """Train a head; nearer places count more."""
    torch.manual_seed(seed)
    head = DraftHead(config)
    rate, batch, examples = 3e-3, 1536, len(teaching.traces.last)
    optimizer = torch.optim.AdamW(head.parameters(), lr=rate, weight_decay=0.05, betas=(0.9, 0.99))
    warm = torch.optim.lr_scheduler.LinearLR(optimizer, 0.02, total_iters=min(50, steps))
    cool = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, max(steps - 50, 1), rate / 50)
    schedule = torch.optim.lr_scheduler.SequentialLR(optimizer, [warm, cool], [min(50, steps)])
    progress.start("training the draft head", steps)
    for _ in range(steps):
        chosen = torch.randint(0, examples, (min(batch, examples),))
        loss = teaching.loss(head, chosen, 1)
        for ahead in range(2, config.depths + 1):
            loss = loss + 0.4 * teaching.loss(head, chosen[: len(chosen) // 3 + 1], ahead)
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        nn.utils.clip_grad_norm_(head.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        progress.advance(1)
    progress.finish()
    return head.eval().requires_grad_(False)


def train_draft_head(
    folder: Path, lists: Path, images: int, steps: int, seed: int, progress: Progress
) -> dict[str, float]:
    """Train a model's draft head and write it into the model's ``folder``.

    ``lists``: the folder of ``prompts.txt``, which is learned from, and ``composed.txt``, which is not.
    Returns the overlap with the target's distributions on the latter, by how far ahead a guess is.
    """
    import lantern_accel

    def read(name: str) -> list[str]:
        lines = (lists / name).read_text(encoding="utf-8").split("\n")
        return [line.strip() for line in lines if line.strip()]

    held = read("composed.txt")
    named = prompts_of(read("prompts.txt"), held, images, seed)
    with lantern_accel.load(str(folder)) as pipeline, torch.inference_mode():
        model = pipeline.model
        target: Any = model.manifest.target
        config = usual_head(target)
        weight, top_p = head_matrix(model.target).float(), pipeline.sampling().top_p
        learned = record(pipeline, named, seed + 10_000, config.depths, progress)
        tested = record(pipeline, held, seed + 900, config.depths, progress)
    # Tensors that were made while drawing take no part in gradients; copies do.
    teach, test = (
        Teaching(Traces(**{n: t.clone() for n, t in vars(one).items()}), weight.clone(), top_p)
        for one in (learned, tested)
    )
    head = train(teach, config, steps, seed, progress)
    found = {str(ahead): test.overlap(head, ahead) for ahead in range(1, config.depths + 1)}
    tensors = {name: value.bfloat16().contiguous() for name, value in head.state_dict().items()}
    data = save(tensors)
    write_whole(folder / "draft_head.safetensors", lambda stream: stream.write(data))
    manifest = json.loads((folder / "model.json").read_text(encoding="utf-8"))
    write_json(folder / "model.json", manifest | {"draft_head": config.model_dump(mode="json")})
    return found
