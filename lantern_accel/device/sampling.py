"""Turns the logits of a pass into distributions and draws.

Every method of :class:`SamplingOps` has tensor code as its reference, here or, where it follows a paper,
in :mod:`lantern_accel.decoding`; a backend overrides what its device does in one kernel.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor
from torch.nn import functional as F

from lantern_accel.device.noise import exponential
from lantern_accel.device.plan import AcceptancePlan, DraftedTree, Filter
from lantern_accel.device.preferences import Preferences

#: Lowest logarithm of a share: keeps sums finite and strictly falling from parent to child.
FLOOR = -1e4
#: Values that are summed up at once: a matmul of this width.
SCAN_BLOCK = 128


def triangle(size: int, device: torch.device, dtype: torch.dtype = torch.float32) -> Tensor:
    """Return the matrix of ones that :func:`two_level_scan` multiplies ``size`` weights by."""
    # One triangle, of which the smaller level takes a corner.
    blocks = -(-size // SCAN_BLOCK)
    width = size if blocks == 1 else max(SCAN_BLOCK, blocks)
    at = torch.arange(width, device=device, dtype=torch.int32)
    return (at.unsqueeze(1) <= at).to(dtype)


def two_level_scan(weights: Tensor, ones: Tensor | None = None) -> Tensor:
    """Return the running sums of ``weights [..., V]``, at least 0; never falling.

    Blocks of 128 are summed up, then their sums. One scan of a long row is cut into pieces that a GPU
    adds in the order in which they end, so that the same weights give other sums from run to run, and a
    scan that adds in pairs may fall by a rounding, where a draw would pick a code without weight. In a
    product every sum is made in one order, with zeros for what comes later, so that none falls. A
    block's last weight ends where the next block starts, bit for bit. ``ones``: their :func:`triangle`,
    where it is made once.
    """
    size = weights.shape[-1]
    blocks = -(-size // SCAN_BLOCK)
    if ones is None:
        ones = triangle(size, weights.device, weights.dtype)
    if blocks == 1:
        return weights @ ones
    if size % SCAN_BLOCK:
        weights = F.pad(weights, (0, blocks * SCAN_BLOCK - size))
    x = weights.reshape(*weights.shape[:-1], blocks, SCAN_BLOCK)
    inner = x @ ones[:SCAN_BLOCK, :SCAN_BLOCK]
    ends = inner[..., -1]
    after = (ends @ ones[:blocks, :blocks]).unsqueeze(-1)
    before = F.pad(after[..., :-1, :], (0, 0, 1, 0))
    total = torch.where(inner < ends.unsqueeze(-1), torch.minimum(before + inner, after), after)
    return total.flatten(-2)[..., :size]


def guide(
    logits: Tensor,
    scale: Tensor | None,
    image_scale: Tensor | float | None = None,
    above: Tensor | None = None,
) -> Tensor:
    """Combine rows ``[cond; uncond]`` by classifier-free guidance, ``u + s (c - u)``.

    ``logits`` float32 ``[2B, T, V]`` with ``scale`` float32 ``[B, T]``; None: rows pass as they are.
    With ``image_scale`` rows are ``[cond; image only; uncond]`` and the rule is InstructPix2Pix's
    (arXiv 2211.09800), ``u + s_image (i - u) + s (c - i)``. Where the scale is 1 or less the result is
    the conditional row, bit for bit; ``above`` bool ``[B, T]``: where it is more, if that is known.
    """
    if scale is None:
        return logits
    s = scale.unsqueeze(-1)
    more = s > 1 if above is None else above.unsqueeze(-1)
    if image_scale is None:
        cond, uncond = logits.chunk(2, dim=0)
        return torch.where(more, uncond + s * (cond - uncond), cond)
    cond, image, uncond = logits.chunk(3, dim=0)
    mixed = uncond + image_scale * (image - uncond) + s * (cond - image)
    return torch.where(more, mixed, cond)


@dataclass(frozen=True)
class Tables:
    """What draws and filters look up, made once for an engine; None where they take nothing.

    ``sums``: for :meth:`SamplingOps.sample`. ``filter``: for :meth:`SamplingOps.filter`; only the device
    looks inside.
    """

    sums: Tensor | None = None
    filter: object | None = None


class SamplingOps(Protocol):
    """What follows a pass: guidance, filters, draws."""

    index: torch.dtype = torch.int64
    preferences: Preferences = Preferences()

    def snapshot(self, buffer: Tensor) -> Tensor:
        """Return what a static buffer holds now, for a step that reads it late and writes it early.

        The reference returns the buffer, since operators run in the order in which they are written. A
        device whose compiler puts them in another order returns a copy, which that has to make first.
        """
        return buffer

    def put(self, buffer: Tensor, dim: int, index: Tensor, values: Tensor) -> None:
        """Write ``values`` to entries ``index [n]`` of a buffer, dimensions ``dim, dim + 1`` as one.

        ``values`` has n entries in the place of the two. The reference writes them in place, through a
        view; a device whose recordings take no write to a view writes the whole buffer.
        """
        # torch takes a long index here, and only it.
        buffer.flatten(dim, dim + 1).index_copy_(dim, index.long(), values)

    def scan(self, weights: Tensor) -> Tensor:
        """Return the running sums of ``weights [..., V]``, none of them below the one before it.

        The same bits every time, for the same weights: draws by inverse CDF depend on it. The reference
        is :func:`two_level_scan`.
        """
        return two_level_scan(weights)

    def guide(
        self,
        logits: Tensor,
        token: Tensor,
        scale: Tensor | None,
        image_scale: Tensor | float | None = None,
        penalties: tuple[Tensor, Tensor] | None = None,
    ) -> Tensor:
        """Return guided logits ``[B, T, V]`` from float32 rows ``[R, T, V]``, branch by branch.

        ``token`` integer ``[B, T]``, or ``[B]`` where all T are of one: the image tokens that the logits
        are of. ``scale`` float32 ``[N]``: the guidance of each token (:func:`guide`); None without.
        ``penalties``: integer ``[N]`` and float32 ``[K, V]``: which row is added to each token's logits.
        """
        shape: tuple[int, ...] = (len(token), 1)
        flat = token
        if token.dim() == 2:
            shape, flat = token.shape, token.flatten()
        if scale is not None:
            logits = guide(logits, scale.index_select(0, flat).view(shape), image_scale)
        if penalties is not None:
            kind, penalty = penalties
            rows = penalty.index_select(0, kind.index_select(0, flat))
            logits = logits + rows.view(*shape, -1)
        return logits

    def tables(self, size: int, device: torch.device) -> Tables:
        """Return what draws from ``size`` weights and filters also take, made once for an engine.

        The reference's draws take the :func:`triangle` of their scan; a device that scans or draws in a
        way of its own takes something else, or nothing.
        """
        own = type(self)
        if own.scan is not SamplingOps.scan or own.sample is not SamplingOps.sample:
            return Tables()
        return Tables(triangle(size, device))

    def filter(self, logits: Tensor, given: Filter, tables: object | None = None) -> Tensor:
        """Return the probabilities ``[..., V]`` that a filter makes of logits ``[..., V]``, all float32.

        Logits over the temperature; then top-k, which keeps values equal to the k-th, and top-p, which
        keeps a code while the codes before it hold p or less, in the order that ``given.p_first`` says;
        then a softmax. 0 and None leave a filter out. ``tables``: the ``filter`` of :meth:`tables`.
        """
        x, k, p = logits / given.temperature, given.top_k, given.top_p
        if p is None:
            x = _keep_top_k(x, k, given.never)
        elif not given.p_first:
            x = self._keep_top_k_then_p(x, k, p)
        else:
            x = _keep_top_k(self._keep_top_p(x, p), k, given.never)
        return x.softmax(dim=-1)

    def sample(self, weights: Tensor, uniforms: Tensor, sums: Tensor | None = None) -> Tensor:
        """Sample by inverse CDF: codes of the shape of ``uniforms`` from weights ``[..., V]`` of any sum.

        ``uniforms [...]``: a code each. ``[..., K]``: K different codes, one after the other; where fewer
        have a weight, the rest repeat code V - 1 with no weight, and acceptance skips drafts whose
        probability is 0. They are below ``1 - 2**-22`` (:mod:`lantern_accel.device.noise`), so that
        rounding cannot push a draw past the last code with a weight. ``sums``: of :meth:`tables`.
        """
        if uniforms.dim() < weights.dim():
            return self._sample(weights, uniforms, sums)
        picks = [self._sample(weights, uniforms[..., 0], sums)]
        for r in range(1, uniforms.shape[-1]):
            weights = weights.scatter(-1, picks[-1].unsqueeze(-1), 0.0)
            picks.append(self._sample(weights, uniforms[..., r], sums))
        return torch.stack(picks, dim=-1)

    def _sample(self, weights: Tensor, uniform: Tensor, sums: Tensor | None) -> Tensor:
        total = self.scan(weights) if sums is None else two_level_scan(weights, sums)
        bar = uniform.unsqueeze(-1) * total[..., -1:]
        # Sums never fall, so that these are a row's first; of weights that are all 0, V - 1.
        return (total[..., :-1] <= bar).sum(dim=-1, dtype=self.index)

    def race(
        self, weights: Tensor, keys: Tensor, positions: Tensor, count: int | None = None
    ) -> Tensor:
        """Sample codes ``[B, T]`` from weights ``[B, T, V]`` of any sum, by position-keyed noise.

        The code with the largest ``weight / noise``, the lower of two that are equal
        (:mod:`lantern_accel.device.noise`): the same for the same row, key and position, whatever else
        is computed with it. ``keys`` int32 ``[B, 3]``; ``positions`` integer ``[B, T]``, of the tokens.

        With ``count``: that many different codes ``[B, T, count]``, the race's first, second, ... Codes
        without weight come last, and acceptance never keeps them.
        """
        scores = self.perturb(weights, keys, positions)
        if count is None:
            return scores.argmax(dim=-1).to(self.index)
        return scores.topk(count, dim=-1).indices.to(self.index)

    def perturb(self, weights: Tensor, keys: Tensor, positions: Tensor) -> Tensor:
        """Return weights over the noise of their place, ``[B, T, V]``, which :meth:`race` compares.

        Arguments as in :meth:`race`.
        """
        return weights / self.noise(keys, positions, weights.shape[-1])

    def noise(self, keys: Tensor, positions: Tensor, codes: int) -> Tensor:
        """Return the noise of all codes at positions, float32 ``[B, T, codes]``.

        The same bits on every device (:func:`lantern_accel.device.noise.exponential`); ``keys`` and
        ``positions`` as in :meth:`race`.
        """
        return exponential(keys, positions, codes)

    def likeliest(
        self, weights: Tensor, count: int, luck: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Return predictions for the ``count`` likeliest codes, and the codes: ``[B, T, count]``.

        ``weights [B, T, V]`` sum to 1. ``luck [B, 1, V]``: what they are multiplied by first, one over
        the noise of a position. Predictions are logarithms of shares, float32, :data:`FLOOR` at
        least, the largest first. Which of equal codes come first is the device's choice.
        """
        if luck is not None:
            weights = weights * luck
            weights = weights / weights.sum(dim=-1, keepdim=True)
        return self.best(weights.log().clamp(min=FLOOR), count)

    def best(self, values: Tensor, count: int) -> tuple[Tensor, Tensor]:
        """Return the ``count`` largest of ``values [..., n]``, the largest first, and their places.

        Which of equal ones come first is the device's choice.
        """
        found, places = values.topk(count, dim=-1)
        return found, places.to(self.index)

    def accept(
        self,
        tree: DraftedTree,
        logits: Tensor,
        given: Filter,
        rule: AcceptancePlan,
        uniforms: Tensor,
        bonus_uniform: Tensor,
        masked: bool,
    ) -> tuple[Tensor, ...] | None:
        """Filter the rows of a tree that are visited, walk down it and draw the token after it.

        Takes and returns what :func:`lantern_accel.decoding.accept.accept` does, the fields of an
        ``Accepted``; None where the device has no kernel for this tree or rule, as here: then the tensor
        code of that module runs. ``masked``: logits of -inf are codes that may not be.
        """
        return None

    def accept_invariant(
        self, tree: DraftedTree, logits: Tensor, given: Filter, keys: Tensor, length: Tensor
    ) -> tuple[Tensor, ...] | None:
        """Filter the rows of a tree that are visited, and walk down the tokens that win there.

        Takes what :func:`lantern_accel.decoding.accept.accept_invariant` does, and returns the fields
        of an ``Accepted``; None where the device has no kernel for this tree, as here: then the tensor
        code of that module runs.
        """
        return None

    def _keep_top_p(self, logits: Tensor, p: float | Tensor) -> Tensor:
        ordered, index = logits.sort(dim=-1, descending=True)
        mass = ordered.softmax(dim=-1)
        # A code goes when the codes before it already hold more than p.
        drop = (self.scan(mass) - mass) > p
        return logits.scatter(-1, index, torch.where(drop, float("-inf"), ordered))

    def _keep_top_k_then_p(self, logits: Tensor, k: int, p: float | Tensor) -> Tensor:
        """Apply both filters, sorting the k values that the first leaves in place of the vocabulary."""
        if k <= 0 or k >= logits.shape[-1]:
            return self._keep_top_p(logits, p)
        ordered, index = logits.topk(k, dim=-1)
        kth = ordered[..., -1:]
        within = torch.where(logits < kth, float("-inf"), logits).softmax(dim=-1)
        mass = within.gather(-1, index)
        total = self.scan(mass)
        inside = torch.where(total - mass > p, float("-inf"), ordered)
        # Further values equal to the k-th come after it, one by one, as long as the sum is below p.
        further = (logits == kth).scatter(-1, index, False)
        before = total[..., -1:] + (further.cumsum(-1, dtype=torch.int32) - 1) * mass[..., -1:]
        rest = torch.where(further & (before <= p), logits, float("-inf"))
        return rest.scatter(-1, index, inside)


def _keep_top_k(logits: Tensor, k: int, never: Tensor | None) -> Tensor:
    if k <= 0 or k >= logits.shape[-1]:
        return logits
    # Values equal to the k-th stay (LlamaGen and transformers agree on this).
    kth = logits.topk(k, dim=-1).values[..., -1:]
    return torch.where(logits < kth, float("-inf") if never is None else never, logits)
