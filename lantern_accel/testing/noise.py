"""Noise against its definition: known words of Threefry, exponentials in float64, and the race by them.

Words are made here by other code than the device's: in Python's terms, 64 bits wide, each cut to 32.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from lantern_accel.device.backend import Backend, record_replay
from lantern_accel.device.capture import Replay
from lantern_accel.device.noise import MOST_CODES, noise_keys
from lantern_accel.device.plan import Filter
from lantern_accel.testing.result import (
    Compared,
    Failed,
    Measured,
    compare,
    doing,
    left_to_reference,
)
from lantern_accel.testing.tiny import normal
from lantern_accel.testing.tolerances import FLOAT32

MASK = 0xFFFFFFFF
ROTATIONS = (13, 15, 26, 6, 17, 29, 16, 24)
#: The generator's published vectors (Random123's kat_vectors, threefry2x32 of 20 rounds): key, counter,
#: words; the counter's first word is a position and half a code, its second the image.
KNOWN = (
    ((0, 0), (0, 0), (0x6B200159, 0x99BA4EFE)),
    ((MASK, MASK), (MASK, MASK), (0x1CB996FC, 0xBB002BE7)),
    ((0x13198A2E, 0x03707344), (0x243F6A88, 0x85A308D3), (0xC4923A9C, 0x483DF7A0)),
)
#: Two units in the last place of an exponential, and one of the quotient that shows it.
NEAR = 3 * 2 * FLOAT32
Add = Callable[[Tensor, Tensor], Tensor]


def _wrapping(a: Tensor, b: Tensor) -> Tensor:
    return (a + b) & MASK


def _saturating(a: Tensor, b: Tensor) -> Tensor:
    """Add signed words as an engine does that stops at the largest."""
    signed = (torch.where(x > MASK >> 1, x - (1 << 32), x) for x in (a & MASK, b & MASK))
    return sum(signed, torch.zeros_like(a)).clamp(-(1 << 31), MASK >> 1) & MASK


def _words(
    low: Tensor, high: Tensor, x0: Tensor, x1: Tensor, add: Add = _wrapping
) -> tuple[Tensor, Tensor]:
    """Return Threefry's two words, 0 to 2**32 - 1 as int64."""
    keys = (low, high, low ^ high ^ 0x1BD11BDA)
    x0, x1 = add(x0, low), add(x1, high)
    for number in range(20):
        by = ROTATIONS[number % 8]
        x0 = add(x0, x1)
        x1 = ((x1 << by | x1 >> (32 - by)) & MASK) ^ x0
        if number % 4 == 3:
            turn = number // 4 + 1
            x0 = add(x0, keys[turn % 3])
            x1 = add(add(x1, keys[(turn + 1) % 3]), torch.tensor(turn))
    return x0, x1


def words(keys: Tensor, positions: Tensor, codes: int, add: Add = _wrapping) -> Tensor:
    """Return the words of codes, int64 ``[B, T, codes]``: keys int32 ``[B, 3]``, positions ``[B, T]``."""
    low, high, image = (keys.long()[:, i].view(-1, 1, 1) & MASK for i in range(3))
    half = torch.arange((codes + 1) // 2)
    counter = (positions.long() << 16).unsqueeze(-1) | half
    both = _words(low, high, counter & MASK, image.expand_as(counter), add)
    return torch.stack(both, dim=-1).flatten(-2)[..., :codes]


def exponentials(drawn: Tensor) -> Tensor:
    """Return the exponentials of words in float64: ``-log((r + 1/2) / 2**32)``."""
    low = drawn <= MASK >> 1
    share = (torch.where(low, drawn, MASK - drawn).double() + 0.5) / 2.0**32
    return torch.where(low, -share.log(), -torch.log1p(-share))


def _mistakes(keys: Tensor, positions: Tensor, codes: int) -> dict[str, Tensor]:
    """Return one over the noise, as it is often got wrong."""
    first = keys.clone()
    first[:, 2] = 0
    low = keys.clone()
    low[:, 1] = 0
    right = words(keys, positions, codes)
    even = codes - codes % 2
    flipped = right[..., :even].reshape(*right.shape[:-1], -1, 2).flip(-1).flatten(-2)
    wrong = {
        "additions of 32-bit words saturate": words(keys, positions, codes, _saturating),
        "noise is that of the next position": words(keys, positions + 1, codes),
        "noise is that of the position before": words(keys, positions - 1, codes),
        "every image has the first one's noise": words(first, positions, codes),
        "the seed's high word is left out": words(low, positions, codes),
        "noise is that of the next code": words(keys, positions, codes + 1)[..., 1:],
        "the two words of a counter are exchanged": torch.cat((flipped, right[..., even:]), dim=-1),
        "the logarithm is that of 1 - u": MASK - right,
    }
    return {name: 1 / exponentials(one) for name, one in wrong.items()}


def _cases() -> tuple[Tensor, Tensor]:
    """Return the keys and positions of the published vectors, ``[3, 3]`` and ``[3, 1]``."""
    known = [(*key, counter[1]) for key, counter, _ in KNOWN]
    keys = torch.tensor(known).to(torch.int32)
    return keys, torch.tensor([[counter[0] >> 16] for _, counter, _ in KNOWN])


def noise(backend: Backend) -> Measured:
    """Compare noise with known words and float64, eager and captured, from graphs of three shapes."""
    checked = Compared(backend, "perturb")
    keys, positions = _cases()
    drawn = words(keys, positions, MOST_CODES)
    for row, (_, counter, pair) in enumerate(KNOWN):
        first = 2 * (counter[0] & 0xFFFF)
        assert drawn[row, 0, first : first + 2].tolist() == [*pair]
    doing("the published vectors")
    want = 1 / exponentials(drawn)
    ones = torch.ones(want.shape)
    given = [one.to(backend.device) for one in (ones, keys, positions.to(backend.index))]
    what = "one over the noise of row, column and code"
    got = backend.perturb(*given)
    causes = partial(_mistakes, keys, positions, MOST_CODES)
    checked.hold(got, want, NEAR * want, what, torch.float32, causes)
    graphs = _graphs(backend, checked)
    found = checked.to_measured("sets of noise")
    return replace(found, detail=f"{found.detail}; {graphs} graphs have the same bits")


#: A small vocabulary, and one that no block of a device divides.
VOCABS = (48, 1003)
#: What plain decoding, a window, and the prefill of a batch draw at once: images and positions.
SHAPES = (("step", 2, 1), ("step", 2, 16), ("prefill", 2, 1))


def _graphs(backend: Backend, checked: Compared) -> int:
    """Draw the same positions eagerly and by captured functions of several shapes: the same bits."""
    count = 0
    keys = noise_keys([7, -(2**40)], [0, 3])
    for vocab in VOCABS:
        logits = 2 * normal(vocab, 2, 16, vocab)
        for request, start in enumerate((0, 100)):
            bits: dict[str, Tensor] = {}
            for name, images, length in SHAPES:
                doing(f"{vocab} codes, {name} of {length} positions, request {request}")
                step = _SamplingStep(backend, logits[:, :length])
                for how in ("eager", "captured"):
                    replay = (
                        Replay(step.run)
                        if how == "eager"
                        else record_replay(backend, step.run, name)
                    )
                    try:
                        # Other keys first: what was kept of them shows.
                        for these, at in ((keys.flip(0), 3), (keys, start)):
                            step.load(these, at)
                            replay()
                            backend.synchronize()
                        bits[f"the {how} {name} of {length}, {images}"] = step.bits.cpu()
                    finally:
                        replay.release()
                    count += how == "captured"
            _hold(bits, keys, start, vocab, checked)
    return count


class _SamplingStep:
    """What a step does with noise: filters logits, and races; static buffers, as a step's are.

    ``changes``: what :meth:`run` changes, for devices that replay functions of inputs and outputs.
    """

    def __init__(self, backend: Backend, logits: Tensor) -> None:
        device, (images, length, _) = backend.device, logits.shape
        self.backend, self.logits, self.length = backend, logits.to(device), length
        self.keys = torch.zeros(images, 3, dtype=torch.int32, device=device)
        self.positions = torch.zeros(images, length, dtype=backend.index, device=device)
        self.ones = torch.ones(logits.shape, device=device)
        self.bits = torch.zeros(logits.shape, device=device)
        self.codes = torch.zeros(images, length, dtype=backend.index, device=device)

    @property
    def changes(self) -> dict[str, Tensor]:
        return {"codes": self.codes, "bits": self.bits}

    def load(self, keys: Tensor, start: int) -> None:
        self.keys.copy_(keys)
        self.positions.copy_(start + torch.arange(self.length))
        self.bits.zero_()

    def run(self) -> None:
        weights = self.backend.filter(self.logits, Filter(0.9, top_k=20))
        self.codes.copy_(self.backend.race(weights, self.keys, self.positions))
        self.bits.copy_(self.backend.perturb(self.ones, self.keys, self.positions))


def _hold(
    found: dict[str, Tensor], keys: Tensor, start: int, vocab: int, checked: Compared
) -> None:
    """Hold every graph's noise to float64, and to the bits of the longest one."""
    longest = max(found, key=lambda name: found[name].shape[1])
    for name, bits in found.items():
        positions = (start + torch.arange(bits.shape[1])).expand(2, -1)
        want = 1 / exponentials(words(keys, positions, vocab))
        causes = partial(_mistakes, keys, positions, vocab)
        checked.hold(bits, want, NEAR * want, f"one over the noise of {name}", None, causes)
        other = bits != found[longest][:, : bits.shape[1]]
        if bool(other.any()):
            raise Failed(
                f"noise has other bits in {name} than in {longest}, {int(other.sum())} of "
                f"{other.numel()}: a token near a tie would depend on the step that drew it; likely one "
                "of them contracts a product and a sum into one operation, or divides by a reciprocal"
            )


def race(backend: Backend) -> Measured:
    """Sample by noise, one code and several: each is the likeliest of weight over noise in float64."""
    drawn = 0
    keys = noise_keys([7, -(2**40), 7], [0, 3, 1])
    positions = torch.tensor([[0, 1, 300], [65535, 2, 40], [5, 5, 6]])
    for vocab in (48, 1003, 16384):
        doing(f"{vocab} codes")
        weights = (3 * normal(vocab, 3, 3, vocab)).softmax(-1)
        weights[0, 1, ::2] = 0.0
        weights[1, 0, 20:] = 0.0
        scores = weights.double() / exponentials(words(keys, positions, vocab))
        to = backend.device
        given = weights.to(to), keys.to(to), positions.to(to, backend.index)
        alone, several = backend.race(*given).cpu(), backend.race(*given, 8).cpu()
        if alone.dtype != backend.index or several.dtype != backend.index:
            raise Failed(f"codes are {alone.dtype} and {several.dtype}, not {backend.index}")
        first = alone != several[..., 0]
        if bool(first.any()):
            raise Failed(
                f"{vocab} codes: the first of several is not race's in {int(first.sum())} rows"
            )
        if bool((several.sort(-1).values.diff(dim=-1) == 0).any()):
            raise Failed(f"{vocab} codes: several draws of one position are not different codes")
        best = scores.topk(8, dim=-1).values
        mine = scores.gather(-1, several.long())
        # The k-th best within rounding: another code where two are equal to it.
        what = f"weight over noise of the drawn codes, of {vocab}, by image, position and draw"
        compare(mine, best, 4 * NEAR * best, what)
        drawn += several.numel() + alone.numel()
    return Measured(f"{drawn} codes win their race in float64{left_to_reference(backend, 'race')}")
