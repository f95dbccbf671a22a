"""The EAGLE drafter for Anole and Lumina-mGPT: one Chameleon block on (next token, target feature).

Source: jadohu/LANTERN ``models/drafters/cnets_anole.py``. Unlike LlamaGen's drafter it has a norm before
attention and norms of queries and keys, it reads the prompt's own tokens, and its positions are those of
a line of text. Drafter position ``p`` consumes the target feature at ``p`` and token ``p + 1``.
"""

from __future__ import annotations

import torch
from pydantic import Field
from torch import Tensor
from torch.nn import functional as F

from lantern_accel.device.operations import TensorOps
from lantern_accel.families.chameleon.model import CodeEmbedding, Sized, TrunkConfig
from lantern_accel.nn.fusion import Fusion
from lantern_accel.nn.transformer import REFERENCE, Pass


class ChameleonDrafterConfig(TrunkConfig):
    """Sizes of a drafter; prompt length, picture and codes are its target's."""

    n_layer: int = Field(1, ge=1, le=1)
    bias: bool = True
    mask_padding: bool = True
    taps: tuple[int, ...] = Field((), max_length=0, description="they read the last states alone")


class ChameleonDrafter(Fusion, Sized):
    """Predicts the target's next feature from its last features and the token drawn from them."""

    config: ChameleonDrafterConfig

    def __init__(self, config: ChameleonDrafterConfig, *, ops: TensorOps = REFERENCE) -> None:
        super().__init__()
        self.config = config
        self.ops = ops
        # Its own table: the published drafters' embeddings were frozen, but not tied.
        self.embed_tokens = CodeEmbedding(config)
        self.make_fusion()
        self.layers = config.decoder.blocks()
        self.place_tables(torch.device("cpu"))

    @property
    def embedding(self) -> CodeEmbedding:
        """The table of all tokens."""
        return self.embed_tokens

    def _run(self, embedded: Tensor, features: Tensor, at: Pass) -> Tensor:
        x = self.joined(embedded, features)
        return self.config.decoder.run(self.ops, self.layers, x, at)

    def forward(self, codes: Tensor, features: Tensor, at: Pass) -> Tensor:
        """Predict features ``[R, T, D]`` from codes, int ``[R, T]``, and features ``[R, T, D]``."""
        return self._run(self.embed_tokens(codes), features, at)

    def forward_prefix(self, condition: Tensor, features: Tensor, at: Pass) -> Tensor:
        """Run the prompt: token ids ``[R, prefix]`` and the target's features of all but the last."""
        return self._run(self.embed_tokens.tokens(condition[:, 1:]), features, at)

    def forward_dense(self, ids: Tensor, features: Tensor, mask: Tensor) -> Tensor:
        """Run token ids ``[R, n]`` without a cache; ``mask`` bool ``[R, n]``, False at left padding."""
        return self._run(self.embed_tokens.tokens(ids), features, self.dense(mask, features.dtype))

    def forward_image(
        self, condition: Tensor, codes: Tensor, features: Tensor, prefix_mask: Tensor | None = None
    ) -> Tensor:
        """Run prompt and picture as training does: codes ``[R, n]``, features ``[R, p - 1 + n, D]``.

        ``condition``: the prompts' ids ``[R, p]``; ``prefix_mask`` bool ``[R, p - 1]``, False at pads.
        """
        ids = torch.cat((condition[:, 1:], self.embed_tokens.code_ids[codes]), dim=1)
        if prefix_mask is None:
            prefix_mask = torch.ones_like(condition[:, 1:], dtype=torch.bool)
        return self.forward_dense(
            ids, features, F.pad(prefix_mask, (0, codes.shape[1]), value=True)
        )
