"""The plan of a step: all that a fused step reads and writes, as one typed value.

An engine describes its step once, when it is made: sizes, where drafts come from, how logits become
tokens, the models' weights, and the static buffers. A backend takes the whole plan and returns a
function that does the step in calls of its own, or says why it has none and the step runs operator by
operator (:meth:`.Capture.fused_step`). It needs nothing else: a plan can be made of plain tensors,
without an engine.

Every buffer keeps its address. Letters of shapes: ``B`` images, ``R`` rows (images x guidance
branches), ``M`` masks (``R`` where rows have prompts of their own, else ``B``), ``P`` tokens of a
prompt, ``N`` of an image, ``T`` nodes of a step, ``V`` codes; a letter that is explained nowhere is a
size that several buffers share.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Annotated, Literal, get_args, get_type_hints

import torch
from torch import Tensor

from lantern_accel.device.kv_cache import KVCache
from lantern_accel.device.packed import Weight
from lantern_accel.errors import BackendError

#: The version of this module's values. It rises when a field is added, removed, or means something else:
#: a backend refuses a plan of a version that it was not written for.
PLAN_VERSION = 3

#: ``index``: the dtype of token ids, positions and slots on the device. ``weights``: the models'.
Kind = Literal["index", "float32", "bfloat16", "int32", "bool", "weights"]


@dataclass(frozen=True)
class Of:
    """The dtype and the shape of a buffer, such as ``Of("float32", "B N+1")``."""

    kind: Kind
    shape: str


@dataclass(frozen=True)
class Filter:
    """How logits become a distribution.

    They are divided by ``temperature``, a number or float32 ``[1]``. The ``top_k`` largest stay with
    those that equal the last; 0: all. Of these the codes stay before which the larger ones hold at most
    ``top_p`` of the mass, a number or float32 ``[1]``; None: all. ``p_first``: the other way round.
    ``never``: -inf as float32 ``[1]`` on the device, where it is made once.
    """

    temperature: Tensor | float = 1.0
    top_k: int = 0
    top_p: Tensor | float | None = None
    p_first: bool = False
    never: Tensor | None = None


@dataclass(frozen=True)
class AcceptancePlan:
    """How drafts are tested.

    ``kind``: the rule's registered name, ``exact`` for the ordinary test; ``residual``: what is left
    after a rejection (``aggregate``, ``official`` or ``optimal``). A relaxed rule lets the ``k`` nearest
    codes of ``neighbours``, integer ``[V, >= k]``, add mass to a draft, by its numbers ``params``,
    float32. ``budget``: float32 ``[1]``, the most total variation that a token may cost; None for no
    limit.
    """

    kind: str = "exact"
    relaxed: bool = False
    residual: str = "aggregate"
    k: int = 0
    neighbours: Tensor | None = None
    params: Tensor | None = None
    budget: Tensor | None = None


@dataclass(frozen=True)
class Matrix:
    """A weight matrix ``[rows, columns]`` with a bias ``[rows]``, if it has one.

    ``packed``: what the device's ``pack`` returned for it.
    """

    packed: Weight
    rows: int
    columns: int
    bias: Tensor | None = None


@dataclass(frozen=True)
class Norm:
    """Root mean square normalisation: a weight ``[D]`` and the epsilon."""

    weight: Tensor
    eps: float


@dataclass(frozen=True)
class BlockWeights:
    """A pre-norm decoder block of ``heads`` heads: attention and a SwiGLU, each added to what it read.

    Rows of ``wqkv`` are queries, keys, values; those of ``w13`` gate and up. A drafter's first block
    has no ``attention_norm``.
    """

    heads: int
    attention_norm: Norm | None
    wqkv: Matrix
    wo: Matrix
    ffn_norm: Norm
    w13: Matrix
    w2: Matrix


@dataclass(frozen=True)
class Stack:
    """A model that is nothing but ``head(norm(blocks(embedding[codes])))``; ``embedding [V, D]``."""

    embedding: Tensor
    blocks: tuple[BlockWeights, ...]
    norm: Norm
    head: Matrix


@dataclass(frozen=True)
class DraftStack:
    """A drafter that is nothing but ``blocks(fc([embedding[codes]; feature]))``.

    The feature is ``fuse`` of the target's states side by side, those of taps through a norm each; what
    has the width of one already is taken as it is. Without taps ``fuse`` is None.
    """

    embedding: Tensor
    tap_norms: tuple[Norm, ...]
    fuse: Matrix | None
    fc: Matrix
    blocks: tuple[BlockWeights, ...]


@dataclass(frozen=True)
class TargetModel:
    """The target of a step, with its cache and what guides its logits.

    ``cos, sin`` float32 ``[P + N, d/2]``: rotary rows of the prompt's positions, then of the image's
    tokens. ``taps``: blocks, counted from 1, whose states the drafter reads. ``scale`` float32 ``[N]``:
    the guidance with which each token is predicted, None without; ``image_scale`` that of a third
    branch. ``penalties``: integer ``[N]`` and float32 ``[K, V]``, which row is added to each token's
    logits.
    """

    stack: Stack
    cache: KVCache
    cos: Tensor
    sin: Tensor
    taps: tuple[int, ...] = ()
    scale: Tensor | None = None
    image_scale: Tensor | float | None = None
    penalties: tuple[Tensor, Tensor] | None = None


@dataclass(frozen=True)
class DrafterModel:
    """The drafter of a step, with its cache.

    ``cos, sin`` as the target's, of one prompt position fewer. ``slots`` per row of the cache: prompt,
    image, ``scratch`` for drafted nodes, and one that is never read. ``hides_pads``: it does not see
    the pads of a prompt.
    """

    stack: DraftStack
    cache: KVCache
    cos: Tensor
    sin: Tensor
    slots: int
    scratch: int
    hides_pads: bool


@dataclass(frozen=True)
class StepSizes:
    """Sizes of a step.

    ``images`` B; ``branches`` rows of each; ``prefix`` P and ``tokens`` N, positions of prompt and
    image; ``nodes`` T that a step runs, of which ``depth`` is the longest chain of drafts; ``vocab`` V;
    ``slots`` per row of the target's cache that a step looks at; ``own_prompts``: rows have prompts of
    their own.
    """

    images: int
    branches: int
    prefix: int
    tokens: int
    nodes: int
    depth: int
    vocab: int
    slots: int
    own_prompts: bool = False

    @property
    def rows(self) -> int:
        """Rows of a pass, R."""
        return self.images * self.branches

    @property
    def masks(self) -> int:
        """Entries of a tensor of masks, M."""
        return self.rows if self.own_prompts else self.images


@dataclass(frozen=True)
class Buffers:
    """What every step reads and writes.

    Read: ``prefix_mask``, which prompt tokens are real; ``start``, how many are, where rows have
    prompts of their own. Either ``uniforms`` of every step or ``keys`` decides (the seed's low and high
    word, and the image's number); a greedy step reads neither.

    Written: ``length``, the position of the last token whose keys and values are committed before the
    next step; ``tokens``, known ones and, in a window, drafts, with a last column for what is past the
    image; ``step`` and ``steps``, counters of the request and of each image until it is complete;
    ``histogram``, steps by accepted drafts; ``quality_loss`` of relaxation; ``last_length``, drafts that
    the last step accepted, -1 for complete images; ``finite`` and ``holds``, passes before the first one
    whose numbers are not finite, and whether there was none; ``report``, the lengths and ``finite`` for
    the host.
    """

    length: Annotated[Tensor, Of("index", "B")]
    tokens: Annotated[Tensor, Of("index", "B N+1")]
    prefix_mask: Annotated[Tensor, Of("bool", "M P")]
    step: Annotated[Tensor, Of("index", "1")]
    steps: Annotated[Tensor, Of("index", "B")]
    histogram: Annotated[Tensor, Of("index", "B H")]
    quality_loss: Annotated[Tensor, Of("float32", "B")]
    last_length: Annotated[Tensor, Of("index", "B")]
    finite: Annotated[Tensor, Of("index", "B")]
    holds: Annotated[Tensor, Of("bool", "B")]
    report: Annotated[Tensor, Of("index", "2 B")]
    start: Annotated[Tensor | None, Of("index", "R")] = None
    uniforms: Annotated[Tensor | None, Of("float32", "B N C")] = None
    keys: Annotated[Tensor | None, Of("int32", "B 3")] = None


@dataclass(frozen=True)
class NoDrafts:
    """Plain decoding: a step runs ``root``, the last known token, and draws the one after it."""

    root: Annotated[Tensor, Of("index", "B")]
    kind: Literal["none"] = "none"


@dataclass(frozen=True)
class TreeBuffers:
    """What a step with a drafter's tree reads and writes besides :class:`Buffers`.

    ``root``: the token that is known and not yet run. ``slot_of``: the slot of the target's cache,
    behind the prompt, that holds each image position, a permutation, and ``place_of`` its inverse:
    accepted nodes stay where verification wrote them. ``pending_*``: the tokens that the drafter has
    yet to run, how many, and the target's states that they follow from. ``last_path``: the nodes that
    the last step accepted.
    """

    root: Annotated[Tensor, Of("index", "B")]
    pending_tokens: Annotated[Tensor, Of("index", "B W")]
    pending_count: Annotated[Tensor, Of("index", "B")]
    pending_features: Annotated[Tensor, Of("weights", "R W F")]
    last_path: Annotated[Tensor, Of("index", "B W")]
    slot_of: Annotated[Tensor, Of("index", "B S")]
    place_of: Annotated[Tensor, Of("index", "B S")]


@dataclass(frozen=True)
class StaticTreePlan:
    """A tree whose shape is fixed; node 0 is the root, parents come first and siblings together.

    ``parents, depths``: one per node. ``inner``: the nodes with children, depth by depth; ``widths``:
    the most children of one of them, by depth. ``draft_columns``: the first of a step's uniforms, which
    drafts are sampled with. Of every image: ``first_child`` and ``num_children`` of each node, and
    ``group``, the number of each inner node among all.
    """

    parents: tuple[int, ...]
    depths: tuple[int, ...]
    inner: tuple[tuple[int, ...], ...]
    widths: tuple[int, ...]
    draft_columns: int
    first_child: Annotated[Tensor, Of("index", "B T")]
    num_children: Annotated[Tensor, Of("index", "B T")]
    group: Annotated[Tensor, Of("index", "B T")]
    buffers: TreeBuffers
    kind: Literal["static"] = "static"


@dataclass(frozen=True)
class DynamicTreePlan:
    """EAGLE-2's tree: the best ``total`` nodes of ``depth`` + 1 levels of a beam of ``top_k`` paths."""

    top_k: int
    depth: int
    total: int
    buffers: TreeBuffers
    kind: Literal["dynamic"] = "dynamic"


@dataclass(frozen=True)
class GuessHead:
    """A draft head's parameters, float32, as :class:`~lantern_accel.nn.draft_head.DraftHead` has them.

    ``grid``: tokens from a position to the one below; ``least``: the share of the likeliest code's weight
    below which a code is not guessed.
    """

    codes: Tensor
    place: Tensor
    start: Tensor
    state: Tensor
    seen: Tensor
    mid: Tensor
    head: Tensor
    bias: Tensor
    grid: int
    least: float


@dataclass(frozen=True)
class WindowPlan:
    """Drafts of the target's own earlier passes, which stay at their positions of the image.

    ``fresh``: what positions that no pass has seen are drafted from (a kind of
    :class:`~lantern_accel.strategy.sources.Window`, or ``given`` where all drafts are written by another
    source before they are read, and none is made), ``width`` tokens from a position to the one below;
    ``above [N]``: each token's token above, where rows differ. ``code_kind [N]``, ``open_codes [K,
    V]``: the codes that a token may be, where not every token may be any. Where noise
    decides, drafts behind a rejected one are looked up in the last ``passes`` passes. Where uniforms do,
    drafts are SJD's, and ``fresh_column`` is the first of the uniforms for fresh ones.

    ``newest``: the last position that a pass has predicted. ``place``: the row of ``q`` that each
    position has, of ``kept`` rows, the last for what is past the image; ``q``: the distributions of
    positions. Of the last passes ``row_keys``: position times V plus the token before it,
    ``row_previous``: the token before that, and ``row_tokens``: the token chosen.

    ``head``: what guesses drafts that no row of a pass knows better, where ``fresh`` is ``head``;
    ``feature``: the last exact state, after guidance, that it guesses from.
    """

    fresh: str
    width: int
    passes: int
    kept: int
    fresh_column: int
    newest: Annotated[Tensor, Of("index", "B")]
    place: Annotated[Tensor, Of("index", "A")]
    q: Annotated[Tensor | None, Of("float32", "B K V")] = None
    row_keys: Annotated[Tensor | None, Of("index", "B Q L")] = None
    row_previous: Annotated[Tensor | None, Of("index", "B Q L")] = None
    row_tokens: Annotated[Tensor | None, Of("index", "B Q L")] = None
    above: Annotated[Tensor | None, Of("index", "N")] = None
    code_kind: Annotated[Tensor | None, Of("index", "N")] = None
    open_codes: Annotated[Tensor | None, Of("float32", "G V")] = None
    head: GuessHead | None = None
    feature: Annotated[Tensor | None, Of("float32", "B D")] = None
    kind: Literal["window"] = "window"


Source = NoDrafts | StaticTreePlan | DynamicTreePlan | WindowPlan


@dataclass(frozen=True)
class StepPlan:
    """One step of an engine.

    ``target``: None for a fused step that starts from a pass's guided logits, float32 ``[B, T, V]``;
    ``drafter``: that of a tree. ``greedy``: tokens are the likeliest codes. Otherwise noise of the keys
    decides tokens where ``buffers.keys`` is there, and uniforms do elsewhere.
    """

    sizes: StepSizes
    source: Source
    filter: Filter
    rule: AcceptancePlan
    greedy: bool
    buffers: Buffers
    target: TargetModel | None = None
    drafter: DrafterModel | None = None
    version: int = PLAN_VERSION

    @property
    def title(self) -> str:
        """What is decoded, in some words, and which part of it a fused step shall do."""
        kinds = {"none": "plain decoding", "window": "a window", "static": "a tree"}
        what = kinds.get(self.source.kind, "a dynamic tree")
        return f"{what}, {'what follows its pass' if self.target is None else 'whole steps'}"

    def check(self, index: torch.dtype) -> None:
        """Raise :class:`BackendError` for a buffer of another dtype or shape than its field says."""
        at = self.sizes
        known = {
            "B": at.images, "R": at.rows, "M": at.masks, "P": at.prefix, "N": at.tokens,
            "T": at.nodes, "V": at.vocab,
        }  # fmt: skip
        source = self.source
        tree = (source.buffers,) if isinstance(source, StaticTreePlan | DynamicTreePlan) else ()
        for part in (self.buffers, source, *tree):
            for name, of in list_buffers(type(part)):
                tensor: Tensor | None = getattr(part, name)
                if tensor is None:
                    continue
                want = _shape(of.shape, known, tuple(tensor.shape))
                right = _dtype(of.kind, index, tensor.dtype)
                if tuple(tensor.shape) != want or not right:
                    raise BackendError(
                        f"a step's plan has {name} as {tensor.dtype} {list(tensor.shape)}; it must be "
                        f"{of.kind} [{of.shape.replace(' ', ', ')}], here {list(want)}"
                    )


@dataclass(frozen=True)
class FusedStep:
    """A step, or what follows a pass, in a device's own calls; no value is read by the host.

    ``run(logits)`` marks its phases (:meth:`.Capture.phase`), changes the plan's buffers and caches as
    the operators do, and returns True. With False it has changed caches at most, and the operators do
    the step. A captured step records what it does. ``logits``: guided ones of the pass, for a plan
    without a target, else None.

    ``guess()``: guesses a window's drafts that no pass has seen, for a plan with a draft head; None: the
    operators do.
    """

    run: Callable[[Tensor | None], bool]
    guess: Callable[[], bool] | None = None


@dataclass(frozen=True)
class Refused:
    """Why a device has no step of its own for a plan, as the end of 'operator by operator: ...'."""

    why: str


@dataclass(frozen=True, kw_only=True)
class DraftedTree:
    """What walking down a drafted tree reads, integer ``[B, T]`` by node.

    ``tokens``: their codes; ``first_child``, and ``num_children``, how many follow it;
    ``max_children``: the most children of a node, by depth (loop bounds). ``q``: what each group of
    siblings was sampled from, float32 ``[B, G, V]``, None where drafts are certain (q = 1); ``group``:
    the group that a node's children were sampled from. ``first_tests``: the uniform that each node's
    first child is tested with.
    """

    tokens: Tensor
    first_child: Tensor
    num_children: Tensor
    max_children: tuple[int, ...]
    first_tests: Tensor
    q: Tensor | None = None
    group: Tensor | None = None


def list_buffers(part: type) -> Iterator[tuple[str, Of]]:
    """Go through the buffers of a class of this module: their names, dtypes and shapes."""
    for name, hint in get_type_hints(part, include_extras=True).items():
        for note in get_args(hint):
            if isinstance(note, Of):
                yield name, note


def _shape(letters: str, known: dict[str, int], found: tuple[int, ...]) -> tuple[int, ...]:
    """Return the sizes of ``letters``; one that is not ``known`` yet is what the tensor has there."""

    def size(letter: str, here: int) -> int:
        name, _, more = letter.partition("+")
        return int(name) if name.isdigit() else known.setdefault(name, here) + int(more or 0)

    names = letters.split()
    return tuple(map(size, names, (*found, *(0 for _ in names))))


def _dtype(kind: Kind, index: torch.dtype, found: torch.dtype) -> bool:
    if kind == "weights":
        return found.is_floating_point
    return found == index if kind == "index" else str(found) == f"torch.{kind}"
