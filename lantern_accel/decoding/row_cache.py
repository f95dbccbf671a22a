"""Redraws drafts behind a replacement from an earlier pass that had the same past.

Behind a replacement a pass has seen the wrong left neighbour. But drafts come and go: an earlier pass
often had just this token at this position, and what it gave for the next one is a far better draft than
what the last pass gave. The rows of a few passes are kept, with the tokens that they followed.

A draft may be drawn from anything that is fixed before the draft itself, so this is exact; see
``docs/jacobi.md``. This project's; no paper is known to do it.
"""

from __future__ import annotations

import torch
from torch import Tensor

from lantern_accel.decoding.logits import Draws
from lantern_accel.decoding.rule import TINY
from lantern_accel.decoding.state import State
from lantern_accel.device.plan import Lookup

#: Drafts behind a replacement that are looked up; farther on the past changes once more anyway.
LOOKED_UP = 3


class RowCache:
    """Finds what one of the last ``passes`` gave behind the same past, over windows of ``length``.

    The buffers are the state's: ``row_keys`` integer ``[B, M, L]``, which position a row is of and which
    token it followed, as one number; ``row_previous`` likewise, the token before that; and what the pass
    gave, the distribution ``row_probs [B, M, L, V]`` or the token chosen, ``row_tokens [B, M, L]``.
    """

    def __init__(
        self,
        passes: int,
        length: int,
        tokens: int,
        vocab: int,
        device: torch.device,
        drawing: Draws,
    ) -> None:
        self.passes, self.length, self.tokens, self.vocab = passes, length, tokens, vocab
        self.ops, self.drawing = drawing.ops, drawing
        self.index = index = self.ops.index
        self.slots = torch.arange(LOOKED_UP, dtype=index, device=device)
        self.ahead = torch.arange(1, length + 1, dtype=index, device=device)
        self.order = torch.arange(passes, dtype=index, device=device)

    def find(
        self, state: State | Lookup, places: Tensor, left: Tensor, earlier: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Return where to look for positions ``places [B, S]``, and whether there is a row of them.

        Integer ``[B, S]``, of M L rows, and bool ``[B, S]``. ``left``: the token on the left of each,
        ``earlier``: the one before that. The latest pass comes first, and before it one in which the
        earlier token agrees too.
        """
        wide = state.row_keys.shape[2]
        # Read now: their writes need less than what is compared with them.
        held = (self.ops.held(t) for t in (state.row_keys, state.row_previous))
        keys, previous = (t.flatten(1).unsqueeze(1) for t in held)
        hit = keys == (places * self.vocab + left).unsqueeze(-1)
        age = (self.order - state.step - 1) % self.passes
        recent = 1 + age.unsqueeze(1).expand(-1, wide).flatten()
        worth = torch.where(previous == earlier.unsqueeze(-1), recent + self.passes, recent)
        entry = torch.where(hit, worth, 0).argmax(dim=-1).to(self.index)
        return entry, hit.any(dim=-1)

    def write(
        self, state: State, places: Tensor, x: Tensor, buffer: Tensor, values: Tensor
    ) -> None:
        """Keep what a pass gave for positions ``places [B, L]``, behind the window's tokens ``x [B, L]``.

        ``values [B, L, ...]`` go to ``buffer``, one of the state's.
        """
        # A shorter window on a longer one's buffers leaves older rows behind its own: they stay true.
        at = (state.step % self.passes) * state.row_keys.shape[2] + self.ahead - 1
        self.ops.put(buffer, 1, at, values.to(buffer.dtype))
        self.ops.put(state.row_keys, 1, at, places * self.vocab + x)
        # What is before the first lies outside the window; the token itself stands for it.
        self.ops.put(state.row_previous, 1, at, torch.cat((x[:, :1], x[:, :-1]), dim=1))

    def refine(self, given: Lookup) -> tuple[Tensor, Tensor, Tensor]:
        """Draw the drafts behind a replacement again, where there is a better row for them.

        Returns tokens ``[B, L]`` after the look-up, and the rows ``[B, S, V]`` of positions ``[B, S]``,
        which are past the image where nothing was changed.
        """
        done = self.ops.recall(given)
        if done is not None:
            return done
        x, p, q, tokens = given.x, given.p, given.q, given.tokens
        last, vocab = self.length - 1, self.vocab
        slot = given.first.unsqueeze(1) + self.slots
        row = slot.clamp(max=last)
        drafted = row.clamp(max=last - 1)

        def rows(values: Tensor, index: Tensor) -> Tensor:
            return values.gather(1, index.unsqueeze(-1).expand(-1, -1, vocab))

        now = tokens.gather(1, (row - 1).clamp(min=0))
        changed = (slot <= last) & (now != x.gather(1, row))
        places = given.length.unsqueeze(1) + 1 + row
        probs = self.ops.held(given.row_probs)
        # The token before that agrees too, or at least the pass is recent.
        earlier = torch.cat((x[:, :1], tokens), dim=1).gather(1, (row - 1).clamp(min=0))
        entry, found = self.find(given, places, now, earlier)
        found = changed & found
        index = torch.arange(len(x), dtype=self.index, device=x.device).unsqueeze(1)
        index = index * (self.passes * probs.shape[2]) + entry
        probs = probs.flatten(0, 2).index_select(0, index.flatten()).view(*row.shape, vocab)
        # Rounded as they are, they have a sum of their own.
        probs = probs.float()
        total = probs.sum(dim=-1, keepdim=True)
        found = found & (total.squeeze(-1) > 0)
        guess = torch.where(found.unsqueeze(-1), probs / total.clamp(min=TINY), rows(p, row))
        inside = (row < last).unsqueeze(-1)
        was = torch.where(inside, rows(q, drafted), 0.0)
        code = x.gather(1, drafted + 1).unsqueeze(-1)
        kept = given.tests.gather(1, drafted) * was.gather(-1, code).squeeze(-1) < guess.gather(
            -1, code
        ).squeeze(-1)
        kept = kept & inside.squeeze(-1)
        left = (guess - was).clamp(min=0.0)
        left = torch.where(left.sum(-1, keepdim=True) > 0, left, guess)
        drawn = self.drawing.draw(left, given.draws.gather(1, row))
        drawn = torch.where(kept, code.squeeze(-1), drawn)
        spare = torch.cat((tokens, tokens[:, :1]), dim=1)
        spare = spare.scatter(1, torch.where(found, row, self.length), drawn)
        places = torch.where(found, places, self.tokens)
        return spare[:, : self.length], guess, places
