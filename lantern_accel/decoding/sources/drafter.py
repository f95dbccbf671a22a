"""Drafts by a drafter: it catches up on what was committed, then proposes a tree.

Every pass has a fixed shape. The drafter's cache holds the prompt, the image tokens, scratch slots
for the tree's inner nodes, and a trash slot.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from lantern_accel.decoding.logits import distribution
from lantern_accel.decoding.rows import Branches
from lantern_accel.decoding.sources.base import Drafts, Kept, Setting, register
from lantern_accel.decoding.state import State, put_first
from lantern_accel.decoding.target import logits_of
from lantern_accel.decoding.trees import DraftTree, TreeTables, Written
from lantern_accel.device import plan
from lantern_accel.device.kv_cache import KVCache
from lantern_accel.device.operations import flags
from lantern_accel.device.sampling import FLOOR
from lantern_accel.nn.transformer import Pass
from lantern_accel.strategy.values import ChainTree, DynamicTree, StaticTree

DrafterTree = ChainTree | StaticTree | DynamicTree


class Picks:
    """Columns of a tensor, by numbers that are known beforehand: a view where they are one after another.

    Also where they are one column, several times.
    """

    def __init__(self, numbers: list[int], device: torch.device, index: torch.dtype) -> None:
        self.first, self.count = (numbers or [0])[0], len(numbers)
        self.same = len(set(numbers)) == 1
        self.index: Tensor | None = None
        if not self.same and numbers != list(range(self.first, self.first + self.count)):
            self.index = torch.tensor(numbers, dtype=index, device=device)

    def of(self, values: Tensor) -> Tensor:
        """Return the columns of ``values [B, n, ...]``."""
        if self.index is not None:
            return values.index_select(1, self.index)
        if self.same:
            shape = (len(values), self.count, *values.shape[2:])
            return values[:, self.first : self.first + 1].expand(shape)
        return values[:, self.first : self.first + self.count]


@dataclass(frozen=True)
class Level:
    """Nodes of one depth of a static tree that are run.

    ``codes`` of the level before it, and the nodes there whose ``features`` go with them; ``seen``: the
    device's form of the mask ``[M, 1, n, L - base]`` of what is behind the image.
    """

    codes: Picks
    features: Picks
    seen: Tensor


@dataclass(frozen=True)
class Depths:
    """What the levels of one draft share, for every depth from the root's on.

    ``rotary``: rows of the image tokens, ``[R, D + 1, 1, d/2]``; ``committed``: the device's form of the
    mask ``[M, 1, 1, base]`` of prompt and image; ``guides``: what guides logits of each depth.
    """

    rotary: tuple[Tensor, Tensor]
    committed: Tensor
    guides: Sequence[Callable[[Tensor], Tensor]]


@register(ChainTree)
@register(StaticTree)
@register(DynamicTree)
class Drafting(Drafts[DrafterTree]):
    """The drafter of one engine, with its cache and constants."""

    def __init__(self, given: Setting[DrafterTree]) -> None:
        super().__init__(given)
        assert given.drafter is not None and given.cache is not None
        self.drafter, self.target, self.cache = given.drafter, given.target, given.cache
        self.choices, self.guidance = given.choices, given.guidance
        self.dynamic = given.source if isinstance(given.source, DynamicTree) else None
        g = self.geometry
        device = self.target.weight.device
        self.prefix = g.prefix - 1
        self.slots = torch.arange(self.cache.layout.capacity, dtype=self.ops.index, device=device)
        self.trash = g.drafter_slots - 1
        self.base = self.prefix + g.tokens
        #: Slots that committed tokens lie in, by number; the others are beyond any reach.
        self.reached = torch.where(self.slots < self.base, self.slots, self.cache.layout.capacity)
        self.filters = self.choices.filters
        self.behind = self.slots[: self.base] - self.prefix
        self.branches = Branches(g.batch, g.branches, g.prefix, g.own_prompts)
        self._rows = self.branches.rows
        #: Which picks of each level are nodes of the tree; the levels behind the root's, and the scratch
        #: slots that each level writes.
        self.kept: list[Picks] = []
        self.levels: list[Level] = []
        self.written: list[Tensor] = []
        if self.dynamic is not None:
            k = self.dynamic.top_k
            self.written = [self._scratch(level * k, k) for level in range(self.dynamic.depth)]
        if self.tables is not None:
            self._plan_levels(self.tables, device)

    @property
    def caches(self) -> tuple[KVCache, ...]:
        """The drafter's cache."""
        return (self.cache,)

    def _scratch(self, first: int, count: int) -> Tensor:
        """Return the address of ``count`` scratch slots, the same for every image."""
        place = self.slots[self.base + first : self.base + first + count]
        return self.ops.address(self.cache, place.repeat(self.geometry.rows, 1)).clone()

    def _plan_levels(self, tables: TreeTables, device: torch.device) -> None:
        """Prepare the tables of each level of a static tree."""
        inner = [node for level in tables.inner[1:] for node in level]
        place = {node: i for i, node in enumerate(inner)}
        order, drawn, first = [0], 1, 0  # the root, then the picks of all levels
        behind = self.cache.layout.capacity - self.base
        for depth, level in enumerate(tables.inner):
            group = {node: i for i, node in enumerate(level)}
            below = [i for i in range(tables.nodes) if tables.depths[i] == depth + 1]
            width = tables.max_children[depth]
            rank = {n: n - tables.children[tables.parents[n]][0] for n in below}
            picks = [group[tables.parents[n]] * width + rank[n] for n in below]
            self.kept.append(Picks(picks, device, self.ops.index))
            order += [drawn + pick for pick in picks]
            drawn += len(level) * width
            if depth + 1 == len(tables.inner):
                break
            following = tables.inner[depth + 1]
            inputs = [picks[below.index(n)] for n in following]
            parents = [group[tables.parents[n]] for n in following]
            seen = torch.zeros(1, len(following), behind, dtype=torch.bool)
            for i, node in enumerate(following):
                while node:
                    seen[0, i, place[node]] = True
                    node = tables.parents[node]
            self.levels.append(
                Level(
                    Picks(inputs, device, self.ops.index),
                    Picks(parents, device, self.ops.index),
                    self._mask(seen.repeat(self.branches.masks, 1, 1).to(device)).clone(),
                )
            )
            self.written.append(self._scratch(first, len(following)))
            first += len(following)
        # Picks that are no views of their level are taken of all levels at once.
        self.order = Picks(order, device, self.ops.index)
        if any(one.index is not None for one in self.kept):
            self.kept = []

    # --- passes --------------------------------------------------------------------------------

    def _mask(self, visible: Tensor) -> Tensor:
        """Return the device's form of a mask, ``[M, 1, T, n]`` from bool ``[M, T, n]``."""
        return self.ops.mask(visible.unsqueeze(1), self.target.weight.dtype)

    def _pass(self, rotary: tuple[Tensor, Tensor], address: Tensor, mask: Tensor) -> Pass:
        """Describe a pass: rotary rows of its image tokens, where it writes, mask [M, 1, T, L]."""
        return Pass(*rotary, self.branches.spread(mask), self.cache, address)

    def _rotary(self, state: State, cells: Tensor) -> tuple[Tensor, Tensor]:
        """Return the rotary rows of image tokens ``[B, T]``, for all rows."""
        return self.branches.image_rotary(self.drafter, state.start, cells, back=1)

    def _shown(self, state: State) -> Tensor | None:
        """Return which slots hold no caption pad, bool ``[M, L]``; None where pads are seen."""
        if not self.drafter.config.mask_padding or not self.prefix:
            return None
        rest = self.cache.layout.capacity - self.prefix
        return F.pad(state.prefix_mask[:, : self.prefix], (0, rest), value=1)

    def _seen(self, visible: Tensor, shown: Tensor | None) -> Tensor:
        """Hide caption pads from what images see of the first slots: bool ``[B, T, n]`` to [M, T, n]."""
        visible = self.branches.masked(visible)
        if shown is None:
            return visible
        return visible & shown[:, : visible.shape[-1]].unsqueeze(1)

    def begin(self, state: State, features: Tensor) -> None:
        """Run the prompt, and let the first token be what is caught up on next."""
        self.prefill(state, features)
        state.pending_tokens[:, 0].copy_(state.root)
        state.pending_features[:, 0].copy_(features[:, -1])
        state.pending_count.fill_(1)

    def prefill(self, state: State, features: Tensor) -> None:
        """Run the drafter over the prompt with the target's features ``[R, prefix, D]``."""
        if not self.prefix:
            return
        g = self.geometry
        slots = self.slots[: self.prefix]
        visible = self.slots <= slots.unsqueeze(-1)
        visible = visible.expand(g.batch, -1, -1)
        # A hidden pad still sees itself.
        seen = self._seen(visible, self._shown(state))
        visible = seen | (self.slots == slots.unsqueeze(-1))
        cos, sin = self.branches.prompt_rotary(
            self.drafter, state.prefix_mask, self.prefix, self.ops.index
        )
        address = self.ops.address(self.cache, slots.expand(g.rows, -1))
        at = self._pass((cos, sin), address, self._mask(visible))
        self.drafter.forward_prefix(state.condition, features[:, :-1], at)

    def catch_up(self, state: State, shown: Tensor | None) -> Tensor:
        """Run the pending tokens, keep their keys and values; return the root's state [R, 1, D].

        ``shown``: what :meth:`_shown` returns.
        """
        count, width = state.pending_count.unsqueeze(1), state.pending_tokens.shape[1]
        entry, after = self.slots[:width], self.slots[1 : width + 1]
        cells = (state.length.unsqueeze(1) - count) + after
        place = (cells + self.prefix).masked_fill(entry >= count, self.trash)
        visible = self._seen(self.reached <= place.unsqueeze(-1), shown)
        rotary = self._rotary(state, cells.clamp(min=0, max=self.geometry.tokens - 1))
        address = self.ops.address(self.cache, self._rows(place))
        at = self._pass(rotary, address, self._mask(visible))
        out: Tensor = self.drafter(self._rows(state.pending_tokens), state.pending_features, at)
        last = self._rows((state.pending_count - 1).clamp(min=0)).view(-1, 1, 1)
        return out.gather(1, last.expand(-1, 1, out.shape[-1]))

    def _begin(self, state: State, shown: Tensor | None) -> Depths:
        """Prepare what the levels of one draft have in common; ``shown`` as in :meth:`catch_up`."""
        g = self.geometry
        cells = (state.length.unsqueeze(1) + self.slots[: g.depth + 2]).clamp(max=g.tokens - 1)
        past = self.behind <= state.length.view(-1, 1, 1)
        committed = self._mask(self._seen(past, shown))
        guides = self.guidance.columns(cells[:, 1:])
        return Depths(self._rotary(state, cells[:, :-1]), committed, guides)

    def _level(
        self, ahead: Depths, depth: int, codes: Tensor, features: Tensor, seen: Tensor
    ) -> Tensor:
        """Run drafted nodes ``codes [B, n]`` at ``depth``; states [R, n, D].

        ``seen``: the mask of what is behind the image, as :class:`Level` has it.
        """
        count = codes.shape[1]
        mask = torch.cat((ahead.committed.expand(-1, -1, count, -1), seen), dim=-1)
        cos, sin = (t[:, depth : depth + 1].expand(-1, count, -1, -1) for t in ahead.rotary)
        at = self._pass((cos, sin), self.written[depth - 1], mask)
        out: Tensor = self.drafter(self._rows(codes), features, at)
        return out

    def _guided(self, ahead: Depths, depth: int, features: Tensor) -> Tensor:
        """Return the drafter's guided logits of the tokens after ``depth``, [B, n, V]."""
        return ahead.guides[depth](logits_of(self.target, features))

    # --- trees ---------------------------------------------------------------------------------

    def draft(
        self, state: State, uniforms: Tensor | None, window: Written | None = None
    ) -> DraftTree:
        """Catch up and propose a tree; ``window`` is a static tree's.

        ``uniforms [B, columns]``: the first are for drafts; None: keys decide.
        """
        shown = self._shown(state)
        features = self.catch_up(state, shown)
        ahead = self._begin(state, shown)
        if self.dynamic is not None:
            return self._draft_dynamic(state, ahead, features, self.dynamic)
        return self._draft_static(state, ahead, features, uniforms, window)

    def _draft_static(
        self,
        state: State,
        ahead: Depths,
        features: Tensor,
        uniforms: Tensor | None,
        window: Written | None,
    ) -> DraftTree:
        tables = self.tables
        assert tables is not None
        batch = self.geometry.batch
        tokens, dists = [state.root.unsqueeze(1)], []
        used = 0
        for depth, width in enumerate(tables.max_children):
            logits = self._guided(ahead, depth, features)
            groups = logits.shape[1]
            if self.choices.greedy:
                picks = self.ops.best(logits, width)[1]
            elif uniforms is None:
                q = distribution(logits, self.filters)
                places = (state.length + (depth + 1)).unsqueeze(1).expand(-1, groups)
                picks = self.choices.ranked(q, places, width)
            else:
                q = distribution(logits, self.filters)
                here = uniforms[:, used : used + groups * width].view(batch, groups, width)
                used += groups * width
                picks = self.filters.draws.draw(q, here)
                dists.append(q)
            codes = picks.flatten(1)
            tokens.append(self.kept[depth].of(codes) if self.kept else codes)
            if depth < len(self.levels):
                level = self.levels[depth]
                features = self._level(
                    ahead, depth + 1, level.codes.of(codes), level.features.of(features), level.seen
                )
        drafted = torch.cat(tokens, dim=1)
        rows = torch.cat(dists, dim=1) if dists else None
        return self.tree(drafted if self.kept else self.order.of(drafted), rows, window)

    def after(self, state: State, kept: Kept) -> None:
        """Keep the accepted tokens and the target's features, for the next step to catch up on."""
        g, open_tokens, rows = self.geometry, kept.open.unsqueeze(1), self._rows
        tokens, pending = state.pending_tokens, state.pending_features
        put_first(tokens, torch.where(open_tokens, kept.tokens, tokens[:, : g.depth + 1]))
        index = rows(kept.path).unsqueeze(-1).expand(-1, -1, kept.features.shape[-1])
        features = kept.features.gather(1, index)
        open_ = rows(kept.open).view(-1, 1, 1)
        put_first(pending, torch.where(open_, features, pending[:, : g.depth + 1]))
        state.pending_count.copy_(torch.where(kept.open, kept.gained, state.pending_count))

    def planned(self, state: State) -> plan.Source:
        """Describe the tree and the buffers that are its own."""
        buffers = plan.TreeBuffers(
            state.root, state.pending_tokens, state.pending_count, state.pending_features,
            state.last_path, state.slot_of, state.place_of,
        )  # fmt: skip
        dynamic, tables = self.dynamic, self.tables
        if dynamic is not None:
            return plan.DynamicTree(dynamic.top_k, dynamic.depth, dynamic.total, buffers)
        assert tables is not None
        return plan.StaticTree(
            parents=tuple(tables.parents),
            depths=tuple(tables.depths),
            inner=tuple(tuple(level) for level in tables.inner),
            widths=tables.max_children,
            draft_columns=self.geometry.draft_columns,
            first_child=self.topology["first_child"],
            num_children=self.topology["num_children"],
            group=self.topology["group"],
            buffers=buffers,
        )

    def _likeliest(self, logits: Tensor, count: int, luck: Tensor | None) -> tuple[Tensor, Tensor]:
        """Return what the ``count`` likeliest codes promise, as logarithms, and the codes.

        ``[B, n, count]`` each, of ``logits [B, n, V]``. ``luck [B, 1, V]``: where noise decides, codes
        count with that of their position, as the target will choose.
        """
        if self.choices.greedy:
            return self.ops.best(logits.log_softmax(dim=-1).clamp(min=FLOOR), count)
        return self.ops.likeliest(distribution(logits, self.filters), count, luck)

    def _luck(self, state: State, levels: int) -> list[Tensor | None]:
        """Return one over the noise of the next positions, ``[B, 1, V]`` each; None without noise."""
        g = self.geometry
        if self.choices.greedy or not g.keyed:
            return [None] * levels
        places = state.length.unsqueeze(1) + self.slots[1 : levels + 1]
        even = torch.ones(g.batch, levels, g.vocab, device=places.device)
        return list(torch.split(self.choices.scores(even, places), 1, dim=1))

    def _draft_dynamic(
        self, state: State, ahead: Depths, features: Tensor, tree: DynamicTree
    ) -> DraftTree:
        """EAGLE-2: a beam of ``top_k`` paths, ``depth`` further levels, the best nodes kept.

        The pool is laid out as ``top_k`` first-level candidates, then ``top_k`` rows of ``top_k``
        children a level; flat index f sits in row ``f // top_k``.
        """
        batch, k = self.geometry.batch, tree.top_k
        device = features.device
        luck = self._luck(state, tree.depth + 1)
        found = self._likeliest(self._guided(ahead, 0, features), k, luck[0])
        scores, codes = (one[:, 0] for one in found)
        pool_codes, pool_scores = [codes], [scores]
        #: For every row of the pool: the flat index + 1 of the node whose children it holds.
        origin = [torch.zeros(batch, 1, dtype=self.ops.index, device=device)]
        beam_flat = torch.arange(k, dtype=self.ops.index, device=device).expand(batch, -1)
        features = features.expand(-1, k, -1)
        behind = self.cache.layout.capacity - self.base
        seen = flags(False, batch, k, behind, device=device)
        eye = torch.eye(k, dtype=torch.bool, device=device).expand(batch, -1, -1)
        for level in range(tree.depth):
            first = level * k
            pads = (seen[..., :first], eye, seen[..., first + k :])
            seen = torch.cat(pads, dim=-1)
            mask = self._mask(self.branches.masked(seen))
            features = self._level(ahead, level + 1, codes, features, mask)
            guided = self._guided(ahead, level + 1, features)
            best, children = self._likeliest(guided, k, luck[level + 1])
            # A child ranks strictly below its parent, so that ties cannot part the two.
            margin = scores.abs().unsqueeze(-1) * 2.0**-22 + 2.0**-30
            total = scores.unsqueeze(-1) + best.clamp(max=0.0) - margin
            pool_codes.append(children.flatten(1))
            pool_scores.append(total.flatten(1))
            origin.append(beam_flat + 1)
            scores, pick = self.ops.best(total.flatten(1), k)
            codes = children.flatten(1).gather(1, pick)
            row = pick // k
            beam_flat = k + level * k * k + pick
            rows = self._rows(row).unsqueeze(-1).expand(-1, -1, features.shape[-1])
            features = features.gather(1, rows)
            seen = seen.gather(1, row.unsqueeze(-1).expand(-1, -1, seen.shape[-1]))
        kept = self.ops.best(torch.cat(pool_scores, dim=1), tree.total - 1)[1]
        return self._linked(
            state.root, tree, torch.cat(pool_codes, dim=1), kept, torch.cat(origin, dim=1)
        )

    @staticmethod
    def _linked(
        root: Tensor, tree: DynamicTree, codes: Tensor, kept: Tensor, origin: Tensor
    ) -> DraftTree:
        """Link the candidates ``kept [B, total - 1]``, in the order of the pool."""
        batch, total, k = root.shape[0], tree.total, tree.top_k
        device = root.device
        kept = kept.sort(dim=-1).values
        tokens = torch.cat((root.unsqueeze(1), codes.gather(1, kept)), dim=1)
        parent_flat = origin.gather(1, kept // k)
        # Node ids by flat index + 1; the root has flat index -1.
        flat = torch.cat((torch.zeros_like(root).unsqueeze(1), kept + 1), dim=1)
        # Their rank, by counting: some devices have no kernel for searchsorted.
        parent = (flat.unsqueeze(1) < parent_flat.unsqueeze(-1)).sum(dim=-1, dtype=root.dtype)
        parent = torch.cat((torch.zeros_like(root).unsqueeze(1), parent), dim=1)
        ids = torch.arange(total, dtype=root.dtype, device=device).expand(batch, -1)
        link = (parent.unsqueeze(-1) == ids.unsqueeze(1)) & (ids.unsqueeze(-1) > 0)
        visible = torch.eye(total, dtype=torch.bool, device=device).expand(batch, -1, -1)
        for _ in range(tree.depth + 1):
            above = visible.gather(1, parent.unsqueeze(-1).expand(-1, -1, total))
            visible = visible | above
        depth = visible.sum(dim=-1, dtype=root.dtype) - 1
        is_child = link.transpose(1, 2)
        num_children = is_child.sum(dim=-1, dtype=root.dtype)
        first_child = is_child.to(torch.int32).argmax(dim=-1).to(root.dtype)
        # Greedy prefers the path whose leaf comes first.
        leaf = (num_children == 0).unsqueeze(-1) & visible
        row_rank = torch.where(leaf, ids.unsqueeze(-1), total).amin(dim=1)
        levels = tree.depth + 1
        return DraftTree(
            tokens=tokens,
            parent=parent,
            depth=depth,
            first_child=first_child,
            num_children=num_children,
            visible=visible,
            row_rank=row_rank,
            max_children=(k,) * levels,
            first_tests=depth * k,
        )
