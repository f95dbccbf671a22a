"""The published LlamaGen sizes, as configurations.

Source: FoundationVision/LlamaGen ce98ec4, ``autoregressive/models/gpt.py`` and its README: B and L are
published at 256 and 384 pixels, XL, XXL and 3B at 384, the text-conditional XL at 256 and 512.
"""

from __future__ import annotations

from lantern_accel.families.llamagen.model import LlamaGenConfig

#: Layers, heads and width; the 3B has heads of 100, the others of 64.
SHAPES = {
    "B": (12, 12, 768),
    "L": (24, 16, 1024),
    "XL": (36, 20, 1280),
    "XXL": (48, 24, 1536),
    "3B": (24, 32, 3200),
}


def llamagen_config(size: str, pixels: int, *, text: bool = False) -> LlamaGenConfig:
    """Return the configuration of a LlamaGen ``size`` (B, L, XL, XXL, 3B) at 256, 384 or 512 pixels."""
    n_layer, n_head, dim = SHAPES[size]
    return LlamaGenConfig(
        dim=dim,
        n_layer=n_layer,
        n_head=n_head,
        ffn_dim=0,
        vocab_size=16384,
        grid=pixels // 16,
        conditioning="text" if text else "class",
        prefix_length=120 if text else 1,
        num_classes=1000,
        caption_dim=2048,
    )
