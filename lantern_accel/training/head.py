"""Training a draft head for any model: from what windows see and choose, to guesses of the next tokens.

The model generates images in windows. Steps leave examples: the last exact state, the states that the
pass had at the places behind it, with the wrong token on their left, and the tokens around. What the
target would have sampled there, its distribution after guidance and filters, is what the head learns,
one, two and more tokens ahead. Images of some prompts are learned from, those of the others only judge.
"""

from __future__ import annotations

import random
import shutil
from collections.abc import Sequence
from pathlib import Path

import torch
from pydantic import Field
from torch import Tensor

from lantern_accel.decoding.logits import distribution
from lantern_accel.decoding.maximal_coupling import Coupled
from lantern_accel.decoding.sources.window import WindowDrafts
from lantern_accel.decoding.step import Step
from lantern_accel.device.context import with_gradients
from lantern_accel.errors import DataError, DiskFullError
from lantern_accel.families.base import Size
from lantern_accel.generation.pipeline import Pipeline, Prompt
from lantern_accel.models.bundle import HEAD
from lantern_accel.nn.draft_head import DraftHead, DraftHeadConfig, HeadFile, usual_head, weights_of
from lantern_accel.progress import Progress
from lantern_accel.records import digest, format_bytes
from lantern_accel.strategy.values import Window
from lantern_accel.training.device import TrainDevice
from lantern_accel.training.folder import write_weights
from lantern_accel.training.loop import (
    ResumableTask,
    TrainConfig,
    check_checkpoint,
    held_out,
    run,
    seed_everything,
)
from lantern_accel.training.recording import (
    Encoded,
    chosen_prompts,
    generate_batch,
    part_of,
    record_batches,
)

#: Codes of a distribution that are kept, and examples that an evaluation looks at.
KEPT, JUDGED = 128, 4096
#: Farther guesses count less, and are learned from a part of a batch.
FARTHER, PART = 0.4, 3
#: Settings that decide what is recorded.
RECORDED = ("span", "depths", "examples", "images_at_once", "seed")


class HeadTrainConfig(TrainConfig):
    """Settings of the draft head's trainer."""

    steps: int = Field(5500, ge=1, description="optimizer steps at most")
    batch_size: int = Field(1536, ge=1, description="examples per step")
    lr: float = Field(3e-3, gt=0, description="peak learning rate")
    weight_decay: float = Field(0.05, ge=0)
    warmup: int = Field(50, ge=0, description="steps of linear warm-up")
    hidden: int = Field(128, ge=2, description="width of the head's hidden layer")
    rank: int = Field(64, ge=2, description="rank of what makes the head's logits")
    depths: int = Field(3, ge=1, le=16, description="places ahead that are learned")
    span: int = Field(4, ge=2, le=64, description="tokens of the windows that are recorded")
    examples: int = Field(64, ge=1, description="steps of an image that are learned from")
    images_at_once: int = Field(16, ge=1, description="images that the model generates together")
    evaluate_every: int = Field(250, ge=1)
    patience: int | None = Field(6, ge=1, description="evaluations without progress before a stop")


class StepRecorder:
    """An observer of a batch's steps (:attr:`.Session.observer`)."""

    def __init__(self) -> None:
        self.steps: list[tuple[Tensor, ...]] = []

    def __call__(
        self, step: Step, window: Tensor, features: Tensor, logits: Tensor, coupled: Coupled
    ) -> Coupled:
        """Note window, length, guided states, count, and the likeliest codes with their shares."""
        session, state, drafts = step.session, step.session.state, step.source
        assert isinstance(drafts, WindowDrafts)
        guided = drafts.guide_states(features, state.length).bfloat16()
        p = logits if session.greedy else distribution(logits, session.filters)
        shares, codes = p.topk(min(KEPT, p.shape[-1]), dim=-1)
        if session.greedy:
            shares = torch.zeros_like(shares)
            shares[..., 0] = 1.0
        noted = window, state.length, guided, coupled.count, codes.int(), shares.half()
        self.steps.append(tuple(one.to("cpu", copy=True) for one in noted))
        return coupled

    def examples(
        self, tokens: Tensor, config: HeadTrainConfig, vocab: int, seed: int
    ) -> dict[str, Tensor]:
        """Return what is learned from of ``tokens [n, N]``: E steps, ``config.examples`` of each image.

        ``tokens``, and for each the target's likeliest ``codes, shares [n, N, K]``; ``image`` and
        ``last``, the last token known, ``[E]``; ``exact [E, D]``, the state that it was sampled from; of
        the J places behind it in the pass ``states [E, J, D]`` and ``saw [E, J]``, the token on the
        left there, V for none.
        """
        columns = (torch.stack(column) for column in zip(*self.steps, strict=True))
        window, length, guided, count, codes, shares = columns
        images, total, span = *tokens.shape, window.shape[-1]
        open_, node = length < total - 1, torch.arange(span)
        place = length.unsqueeze(-1) + 1 + node
        known = (node < count.unsqueeze(-1)) & open_.unsqueeze(-1) & (place < total)
        of = torch.arange(images).view(1, -1, 1).expand_as(place)[known], place[known]
        table = [
            torch.zeros(images, total, codes.shape[-1], dtype=t) for t in (torch.int, torch.half)
        ]
        table[0][of], table[1][of] = codes[known], shares[known]
        last = length + count
        able = open_ & (last + config.depths < total)
        order = torch.rand(able.shape, generator=torch.Generator().manual_seed(seed))
        nth = order.masked_fill(~able, 2.0).argsort(0).argsort(0)
        step, image = (able & (nth < config.examples)).nonzero(as_tuple=True)
        behind = count[step, image].unsqueeze(1) + torch.arange(config.depths)
        inside, at = behind < span, behind.clamp(max=span - 1)
        pick = (step.unsqueeze(1), image.unsqueeze(1), at)
        return {
            "tokens": tokens.int(), "codes": table[0], "shares": table[1], "image": image.int(),
            "last": last[step, image].int(), "exact": guided[step, image, count[step, image] - 1],
            "states": guided[pick] * inside.unsqueeze(-1),
            "saw": torch.where(inside, window[pick], vocab).int(),
        }  # fmt: skip


def record(
    pipeline: Pipeline,
    prompts: Sequence[Prompt],
    config: HeadTrainConfig,
    sizes: DraftHeadConfig,
    encoded: Encoded,
    folder: Path,
    progress: Progress,
) -> dict[str, Tensor]:
    """Generate an image of each prompt in windows, and return what is learned from; ``folder`` keeps it.

    Raises :class:`DiskFullError` where the disk has less space than that takes.
    """
    batch = config.images_at_once
    firsts = range(0, len(prompts), batch)
    missing = sum(min(batch, len(prompts) - i) for i in firsts if not part_of(folder, i).is_file())
    each = 2 * config.examples * (1 + config.depths) * sizes.dim
    needed = missing * (each + 6 * sizes.tokens * min(KEPT, sizes.vocab_size))
    progress.log(
        f"the model generates {missing} images of {sizes.tokens} tokens, whose steps take up to "
        f"{format_bytes(needed)} in {folder}; then come {config.steps} steps of training at most"
    )
    folder.mkdir(parents=True, exist_ok=True)
    if (free := shutil.disk_usage(folder).free) < needed:
        raise DiskFullError(
            f"{folder} has {format_bytes(free)} of free space, and recording takes "
            f"{format_bytes(needed)}; free some, change --work, or ask for fewer --samples"
        )
    strategy = pipeline.strategy("scd").model_copy(update={"drafts": Window(length=config.span)})

    def generate(here: Sequence[Prompt], first: int) -> dict[str, Tensor]:
        steps, seed = StepRecorder(), config.seed + first
        tokens = generate_batch(pipeline, encoded, here, batch, strategy, seed, steps)
        made = steps.examples(tokens, config, sizes.vocab_size, seed)
        return {**made, "image": made["image"] + first}

    return record_batches(prompts, batch, folder, progress, generate)


def acceptance(p: Tensor, q: Tensor) -> Tensor:
    """Return how often races of ``p, q [n, K]`` with the same noise end alike, ``[n]``.

    ``sum over i of 1 / sum over j of max(p_j / p_i, q_j / q_i)``: code i wins both races where its time
    is less than that of every other j in either. What p and q lack of one lies in codes not listed.
    """
    able = (p > 0) & (q > 0)
    p_i, q_i = (torch.where(able, one, 1.0).unsqueeze(2) for one in (p, q))
    larger = torch.maximum(p.unsqueeze(1) / p_i, q.unsqueeze(1) / q_i).sum(2)
    for listed, own in ((p, p_i), (q, q_i)):
        larger = larger + (1 - listed.sum(1, keepdim=True)).clamp(min=0) / own.squeeze(2)
    return torch.where(able, 1 / larger, 0.0).sum(1)


class HeadTask(ResumableTask):
    """One draft head in training; the weights with the best acceptance on untouched prompts are kept."""

    label = "draft head"

    def __init__(
        self,
        config: HeadTrainConfig,
        sizes: DraftHeadConfig,
        data: dict[str, Tensor],
        untouched: Tensor,
        device: TrainDevice,
        key: str,
    ) -> None:
        """``data``: from :class:`StepRecorder`; ``untouched``: bool ``[E]``, steps that only judge."""
        self.config, self.data, self.device, self.key = config, data, device, key
        self.evaluate_every, self.patience = config.evaluate_every, config.patience
        held, self.learned = (which.nonzero().flatten() for which in (untouched, ~untouched))
        if not len(held) or not len(self.learned):
            raise DataError(
                "the images have too few tokens to learn from; lower depths in --config"
            )
        self.held = held[:JUDGED]
        self.module = self.head = DraftHead(sizes).to(device.device)
        rest: dict[str, object] = {"betas": (0.9, 0.99), "weight_decay": config.weight_decay}
        self.optimizer = device.adamw(self.head.parameters(), lr=config.lr, **rest)
        self.begin()

    def _guesses(self, chosen: Tensor, ahead: int) -> tuple[Tensor, Tensor, Tensor]:
        """Return the head's logits ``[n, V]`` for steps, and the target's codes and their shares."""
        of, one = self.data, ahead - 1
        image, last = of["image"][chosen].long(), of["last"][chosen].long()
        place = last + ahead
        given = of["tokens"][image].long(), place, of["saw"][chosen, one].long()
        tokens, place, saw, exact, state, codes, shares = self.device.to(
            *given, of["exact"][chosen], of["states"][chosen, one : ahead],
            of["codes"][image, place].long(), of["shares"][image, place].float(),
        )  # fmt: skip
        head = self.head
        known, seen = head.project(exact, state)
        own = torch.where((saw < head.config.vocab_size).unsqueeze(1), seen[:, 0], 0.0)
        return head(ahead, known, own, head.around(tokens, place, saw), place), codes, shares

    def step(self, index: int, rate: float, done: float, rng: random.Random) -> dict[str, float]:
        """Take one optimizer step on examples at random: cross-entropy with the target's distribution."""
        generator = torch.Generator().manual_seed(rng.getrandbits(62))
        count = min(self.config.batch_size, len(self.learned))
        every = self.learned[torch.randint(len(self.learned), (count,), generator=generator)]
        total = torch.zeros((), device=self.device.device)
        for ahead in range(1, self.config.depths + 1):
            chosen = every if ahead == 1 else every[: count // PART + 1]
            logits, codes, shares = self._guesses(chosen, ahead)
            of_codes = (shares * logits.gather(1, codes)).sum(-1)
            loss = (shares.sum(-1) * logits.logsumexp(-1) - of_codes).mean()
            total = total + (loss if ahead == 1 else FARTHER * loss)
        weights = list(self.head.parameters())
        self.device.descend(self.optimizer, total, weights, rate, self.config.clip_norm)
        return {"loss": float(total.detach())}

    @torch.no_grad()
    def evaluate(self, index: int) -> dict[str, float]:
        """Return how often a guess for untouched prompts is the target's token, by how far ahead."""
        found = {}
        for ahead in range(1, self.config.depths + 1):
            total = 0.0
            for chosen in torch.split(self.held, 256):
                logits, codes, p = self._guesses(chosen, ahead)
                q = weights_of(logits)
                total += float(acceptance(p, (q / q.sum(1, keepdim=True)).gather(1, codes)).sum())
            found[f"accepted_{ahead}"] = total / len(self.held)
        self.keep(sum(found.values()))
        return found


@with_gradients()
def train_head(
    pipeline: Pipeline,
    config: HeadTrainConfig,
    out: Path,
    device: TrainDevice,
    progress: Progress | None = None,
    *,
    resume: bool = True,
    prompts: Sequence[Prompt] = (),
    samples: int = 256,
    size: Size | None = None,
) -> dict[str, object]:
    """Train a draft head for a loaded model in ``out``, write ``draft_head.safetensors``, and report.

    ``prompts, samples, size``: what the model generates, as :func:`.recording.recorded_images` takes
    them; some of the prompts are left untouched. A run that was killed goes on from what it had written.
    """
    say, model = Progress() if progress is None else progress, pipeline.model
    named = chosen_prompts(pipeline, config.seed, prompts, samples)
    distinct = list(dict.fromkeys(named))
    if len(distinct) < 2:
        raise DataError(
            f"{len(distinct)} prompt is too few to train a draft head with, since some are left "
            "untouched to judge it; name 2 or more"
        )
    untouched = {distinct[i] for i in held_out(len(distinct), config.seed)[0]}
    encoded = Encoded(pipeline, named, size)
    target = model.family.target_for_shape(model, encoded.shape)[0].config
    sizes = usual_head(target, config.hidden, config.rank, config.depths)
    asked = [getattr(config, name) for name in RECORDED]
    asked += [named, size, model.trunk, str(model.rounding), repr(pipeline.sampling())]
    key = digest(asked)[:16]
    if resume:
        check_checkpoint(out, config, key, HeadTask.label)
    data = record(pipeline, named, config, sizes, encoded, out / f"steps-{key}", say)
    # The last batch was filled up: further images of its last prompt.
    judges = torch.tensor([one in untouched for one in named])
    judges = judges[data["image"].long().clamp(max=len(named) - 1)]
    seed_everything(config.seed)
    task = HeadTask(config, sizes, data, judges, device, key)
    done = run(task, config, out, device, say, resume=resume)
    known = {"prompts": len(distinct), "untouched": len(untouched)}
    report = task.finish(done, config, out, **known)
    said = HeadFile(config=sizes, trunk=model.trunk).model_dump_json()
    write_weights(task.head.state_dict(), out / f"{HEAD}.safetensors", {HEAD: said})
    return report
