"""The draft head: guesses the next few tokens from one state of the target and the tokens around.

It has no attention and no cache: table rows for the neighbouring tokens, and projections of two of the
target's states, are added up and go through one hidden layer to logits. Each guess reads the one
before, as in Hydra (Ankner et al., arXiv 2402.05109). That guesses look at the row of the image
above, and mend what a pass made of a wrong past, is this project's.
"""

from __future__ import annotations

from typing import Annotated, Any

import torch
from pydantic import Field
from torch import Tensor, nn
from torch.nn import functional as F

from lantern_accel.device.plan import GuessHead
from lantern_accel.nn.sizes import Sizes
from lantern_accel.records import Frozen

#: Tokens around a guess that are read: left, the one left of it, above, above right, above left; and the
#: token that the last pass saw on the left, where it was another.
AROUND = 6
#: A code that is less likely than this share of the likeliest is not guessed (min-p).
LEAST = 0.1

Width = Annotated[int, Field(ge=2, le=65536)]


class DraftHeadConfig(Sizes):
    """Sizes of a draft head.

    ``dim`` of the target's states, ``hidden`` of the hidden layer and ``rank`` of what makes the logits;
    ``vocab_size`` codes; ``grid`` tokens in a row of the image, and ``tokens`` in all, 0 for a square;
    ``depths``: positions ahead that have projections of their own, farther ones take the last one's.
    """

    dim: Width
    hidden: Width
    rank: Width
    vocab_size: Width
    grid: Annotated[int, Field(ge=1, le=4096)]
    tokens: Annotated[int, Field(ge=0, le=1 << 20)] = 0
    depths: Annotated[int, Field(ge=1, le=16)] = 3

    def misfit(self, dim: int, codes: int) -> str | None:
        """Say why a head of these sizes is not for a target of this width and codes; None: it may be."""
        if (self.dim, self.vocab_size) == (dim, codes):
            return None
        ours = f"it is for states of {self.dim} and {self.vocab_size} codes"
        return f"{ours}, the target has {dim} and {codes}"


class HeadFile(Frozen):
    """What the file of a trained head says: its sizes, and the fingerprint of the target it is for."""

    config: DraftHeadConfig
    trunk: str


def usual_head(target: Any, hidden: int = 128, rank: int = 64, depths: int = 3) -> DraftHeadConfig:
    """Return the sizes of a head for a target of this configuration, as the bundled model's."""
    return DraftHeadConfig(
        dim=target.dim, hidden=hidden, rank=rank, vocab_size=target.vocab_size,
        grid=target.row_tokens, tokens=target.num_tokens, depths=depths,
    )  # fmt: skip


class DraftHead(nn.Module):
    """A small network for guesses; its parameters are the buffers that kernels read.

    ``codes [AROUND, V + 1, h]``, the last row for no token; ``place [N, h]``; ``start [J, h]``, of each
    depth; ``state [J h, D]`` and ``seen [h + r, D]``, projections of the last exact state, and of what
    the last pass had at the position itself (for the hidden layer, and past it); ``mid [r, h]``;
    ``head [V, r]`` and ``bias [V]``.
    """

    def __init__(self, config: DraftHeadConfig) -> None:
        super().__init__()
        self.config, h, r, d = config, config.hidden, config.rank, config.dim
        v, cells = config.vocab_size, config.tokens or config.grid**2

        def new_parameter(*shape: int, by: float = 0.0) -> nn.Parameter:
            one = nn.Parameter(torch.empty(shape))
            if not one.is_meta:  # else they are read from a file
                nn.init.normal_(one, std=by)
            return one

        self.codes = new_parameter(AROUND, v + 1, h, by=0.3)
        self.place = new_parameter(cells, h, by=0.3)
        self.start = new_parameter(config.depths, h, by=0.3)
        self.state = new_parameter(config.depths * h, d, by=d**-0.5)
        self.seen = new_parameter(h + r, d, by=d**-0.5)
        self.mid = new_parameter(r, h, by=h**-0.5)
        self.head = new_parameter(v, r, by=r**-0.5)
        self.bias = new_parameter(v)

    def fit(self, grid: int, tokens: int) -> DraftHead:
        """Return a head on the same parameters for images of another size.

        ``grid``, ``tokens``: as in the configuration. Places past the trained ones take the last row.
        """
        if (grid, tokens) == (self.config.grid, len(self.place)):
            return self
        with torch.device("meta"):
            made = DraftHead(self.config.model_copy(update={"grid": grid, "tokens": tokens}))
        cells = torch.arange(tokens, device=self.place.device).clamp(max=len(self.place) - 1)
        kept = dict(self.named_parameters()) | {"place": self.place.index_select(0, cells)}
        for name, value in kept.items():
            setattr(made, name, nn.Parameter(value, requires_grad=False))
        return made.eval()

    def to_plan(self) -> GuessHead:
        """Return the parameters as a step's plan has them."""
        return GuessHead(
            **{name: value.detach().float() for name, value in self.named_parameters()},
            grid=self.config.grid,
            least=LEAST,
        )

    def project(self, state: Tensor, seen: Tensor) -> tuple[Tensor, Tensor]:
        """Project the last exact state ``[B, D]`` for all depths, and a pass's states ``[B, T, D]``.

        Returns float32 ``[B, J, h]`` and ``[B, T, h + r]``.
        """
        depths = self.config.depths
        known = F.linear(state.float(), self.state.float())
        return known.view(len(known), depths, -1), F.linear(seen.float(), self.seen.float())

    def around(self, tokens: Tensor, place: Tensor, wrong: Tensor) -> Tensor:
        """Return the codes that a guess for ``place [B]`` reads, integer ``[B, AROUND]``.

        ``tokens [B, N + 1]``: known ones and guesses, up to the place; ``wrong [B]``: what the last pass
        saw on the left, V for nothing.
        """
        grid, none = self.config.grid, self.config.vocab_size
        column = place % grid
        found = []
        for back, there in (
            (1, place >= 1),
            (2, place >= 2),
            (grid, place >= grid),
            (grid - 1, (place >= grid) & (column < grid - 1) & (place >= grid - 1)),
            (grid + 1, (place >= grid + 1) & (column > 0)),
        ):
            code = tokens.gather(1, (place - back).clamp(min=0).unsqueeze(1)).squeeze(1)
            found.append(torch.where(there, code, none))
        return torch.stack([*found, wrong], dim=1)

    def forward(
        self, depth: int, known: Tensor, seen: Tensor, around: Tensor, place: Tensor
    ) -> Tensor:
        """Return logits float32 ``[B, V]`` of ``place [B]``, ``depth`` behind the last known token.

        ``known [B, J, h]`` and ``seen [B, h + r]``: as :meth:`project` gives them, zeros where no pass
        has seen the place; ``around [B, AROUND]``: the codes.
        """
        config = self.config
        which = min(depth, config.depths) - 1
        rows = self.codes.float().flatten(0, 1)
        first = torch.arange(AROUND, dtype=around.dtype, device=around.device)
        at = (around + first * (config.vocab_size + 1)).flatten()
        summed = rows.index_select(0, at).view(*around.shape, -1).sum(dim=1)
        cell = place.clamp(max=len(self.place) - 1)
        hidden, past = seen[:, : config.hidden], seen[:, config.hidden :]
        hidden = hidden + summed + self.place.float().index_select(0, cell)
        hidden = F.silu(hidden + known[:, which] + self.start.float()[which])
        out = F.linear(hidden, self.mid.float()) + past
        return F.linear(out, self.head.float(), self.bias.float())


def empty_head(config: DraftHeadConfig | None) -> DraftHead | None:
    """Return a draft head of these sizes without data; None where a model has none."""
    if config is None:
        return None
    with torch.device("meta"):
        return DraftHead(config)


def weights_of(logits: Tensor) -> Tensor:
    """Return the weights with which a guess races, of any sum: codes far from the likeliest have none."""
    most = logits.amax(dim=-1, keepdim=True)
    weights = (logits - most).exp()
    least = torch.full_like(
        weights[..., :1], LEAST
    )  # some compilers compare with a number in double
    return torch.where(weights >= least, weights, 0.0)
