"""Growing a trained target without changing what it computes, so that training goes on from there.

Source: Net2Net (arXiv 1511.05641), for pre-norm blocks: new residual channels start at zero (nothing
writes to them), new heads and hidden units start at random behind output weights of zero. New layers
are spread among the old ones; each reads what the old one before it reads and writes nothing yet. Every
new weight gets a gradient from the first step: of each pair of new matrices only one is zero.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from lantern_accel.errors import DataError
from lantern_accel.families.llamagen.model import CaptionEmbedder, LlamaGenGPT
from lantern_accel.nn.transformer import Attention, Block, FeedForward, RMSNorm


def _paste(into: Tensor, old: Tensor) -> None:
    """Copy ``old`` into the leading corner of ``into``."""
    into[tuple(slice(0, n) for n in old.shape)] = old


def _grow_norm(new: RMSNorm, old: RMSNorm) -> None:
    small, large = len(old.weight), len(new.weight)
    # The mean square is taken over more channels, the new ones 0: larger by this factor.
    new.weight.fill_(float(old.weight.mean()) * (small / large) ** 0.5)
    new.weight[:small] = old.weight * (small / large) ** 0.5


def _grow_reader(new: Tensor, old: Tensor, groups: int) -> None:
    """Widen a matrix of ``groups`` stacked parts that reads the residual; new parts stay random."""
    _paste(new.view(groups, -1, new.shape[-1]), old.view(groups, -1, old.shape[-1]))


def _grow_writer(new: Tensor, old: Tensor) -> None:
    """Widen a matrix that writes to the residual; whatever is new is zero."""
    new.zero_()
    _paste(new, old)


def _grow_block(new: Block, old: Block) -> None:
    attention: tuple[Attention, Attention] = new.attention, old.attention
    ffn: tuple[FeedForward, FeedForward] = new.feed_forward, old.feed_forward
    if new.attention_norm is not None and old.attention_norm is not None:
        _grow_norm(new.attention_norm, old.attention_norm)
    _grow_norm(new.ffn_norm, old.ffn_norm)
    _grow_reader(attention[0].wqkv.weight, attention[1].wqkv.weight, 3)
    _grow_writer(attention[0].wo.weight, attention[1].wo.weight)
    _grow_reader(ffn[0].w13.weight, ffn[1].w13.weight, 2)
    _grow_writer(ffn[0].w2.weight, ffn[1].w2.weight)


@torch.no_grad()
def widen(new: LlamaGenGPT, old: LlamaGenGPT) -> None:
    """Make the freshly initialised ``new`` compute what ``old`` does; ``new`` may be wider or deeper.

    Raises :class:`DataError` where the two cannot fit: another codebook, grid, prefix or head width,
    or fewer channels, heads, hidden units or layers.
    """
    a, b = old.config, new.config
    same = ("vocab_size", "grid", "prefix_length", "caption_dim", "prefix_rotary", "head_dim")
    for name in (*same, "conditioning"):
        if getattr(a, name) != getattr(b, name):
            raise DataError(
                f"the target to start from has {name} {getattr(a, name)}, the configuration asks for "
                f"{getattr(b, name)}; only dim, n_head, ffn_dim and n_layer may grow"
            )
    for name in ("dim", "n_head", "hidden_dim", "n_layer"):
        if getattr(a, name) > getattr(b, name):
            raise DataError(
                f"the target to start from has {name} {getattr(a, name)}, more than the "
                f"configuration's {getattr(b, name)}; a target can only grow"
            )
    embedding: tuple[nn.Module, nn.Module] = new.cls_embedding, old.cls_embedding
    for target, source in ((new.tok_embeddings.weight, old.tok_embeddings.weight),):
        _grow_writer(target, source)
    if isinstance(embedding[0], CaptionEmbedder) and isinstance(embedding[1], CaptionEmbedder):
        _paste(embedding[0].cap_proj.fc1.weight, embedding[1].cap_proj.fc1.weight)
        _grow_writer(embedding[0].cap_proj.fc2.weight, embedding[1].cap_proj.fc2.weight)
        embedding[0].uncond_embedding.copy_(embedding[1].uncond_embedding)
    for i, block in enumerate(new.layers):
        at = i * a.n_layer // b.n_layer
        source_block = old.layers[at]
        assert isinstance(block, Block) and isinstance(source_block, Block)
        _grow_block(block, source_block)
        if i and (i - 1) * a.n_layer // b.n_layer == at:  # a further layer begins as the identity
            block.attention.wo.weight.zero_()
            block.feed_forward.w2.weight.zero_()
    _grow_norm(new.norm, old.norm)
    _paste(new.output.weight, old.output.weight)
