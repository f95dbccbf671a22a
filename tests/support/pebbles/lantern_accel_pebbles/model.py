"""The modules: a target, a drafter, and a painter that gives every code a colour."""

import torch
from pydantic import BaseModel
from torch import nn
from torch.nn import functional as F

from lantern_accel.decoding.rows import Allowed
from lantern_accel.nn.transformer import REFERENCE, Decoder, Projection, RMSNorm

#: Pixels along the side of a code.
SIDE = 4


class Sizes(BaseModel):
    """Sizes of a target or a drafter; the last code ends a row, and stands nowhere else."""

    dim: int = 16
    n_layer: int = 2
    n_head: int = 2
    ffn_dim: int = 32
    colours: int = 20
    rows: int = 3
    columns: int = 4
    prompts: int = 5
    prefix_length: int = 2
    mask_padding: bool = False

    @property
    def kv_heads(self):
        return self.n_head

    @property
    def head_dim(self):
        return self.dim // self.n_head

    @property
    def vocab_size(self):
        return self.colours + 1

    @property
    def above(self):
        return None

    @property
    def row_tokens(self):
        return self.columns + 1

    @property
    def num_tokens(self):
        return self.rows * (self.columns + 1)


class Colours(BaseModel):
    """Sizes of the painter."""

    colours: int = 20


def tables(length, head_dim, device):
    """Rotary tables: the angle of pair j at position n is n / 100^(2j/d)."""
    angle = torch.arange(length).float()[:, None] / 100 ** torch.linspace(0, 1, head_dim // 2)
    return angle.cos().to(device), angle.sin().to(device)


class Tabled(nn.Module):
    def place_tables(self, device):
        c = self.config
        with torch.device("cpu"):
            tables_ = tables(c.prefix_length + c.num_tokens, c.head_dim, device)
        self.rope_cos, self.rope_sin = tables_


def blocks(c):
    return Decoder.plain(c.dim, c.n_head, c.ffn_dim, 1e-5, c.n_layer).blocks()


class Target(Tabled):
    draft_head = stack = None  # it has no draft head, and no fused step takes it
    own_prompts = False  # guidance branches share a mask, and every prompt has one length
    unsampled = 0  # every id of the head is a code

    def __init__(self, config, ops=REFERENCE):
        super().__init__()
        self.config, self.ops = config, ops
        self.codes = nn.Embedding(config.vocab_size, config.dim)
        self.prompts = nn.Embedding((config.prompts + 1) * config.prefix_length, config.dim)
        self.layers = blocks(config)
        self.norm = RMSNorm(config.dim, 1e-5)
        self.output = Projection(config.dim, config.vocab_size, bias=False)

    @property
    def weight(self):
        return self.output.weight

    def embed_tokens(self, codes):
        return F.embedding(codes, self.codes.weight)

    def embed_prefix(self, condition):
        return F.embedding(condition, self.prompts.weight)

    def condition_buffer(self, rows):
        shape = (rows, self.config.prefix_length)
        return torch.zeros(shape, dtype=self.ops.index, device=self.output.weight.device)

    def allowed_codes(self):
        c, device = self.config, self.output.weight.device
        kind = torch.zeros(c.rows, c.columns + 1, dtype=self.ops.index, device=device)
        kind[:, -1] = 1
        penalty = torch.zeros(2, c.vocab_size, device=device)
        penalty[0, c.colours] = penalty[1, : c.colours] = float("-inf")
        return Allowed(kind.flatten(), penalty)

    def guidance_scales(self, cfg_scale):
        return None  # every token is guided alike

    def forward(self, x, at):
        return self.ops.trunk(self.layers, x, at, norm=self.norm)

    def head(self, features):
        return self.output(features, self.ops).float()

    all_logits = head


class Drafter(Tabled):
    stack = None  # no fused step takes it
    taps = ()  # it reads the target's last states only

    def __init__(self, config, ops=REFERENCE):
        super().__init__()
        self.config, self.ops = config, ops
        self.codes = nn.Embedding(config.vocab_size, config.dim)
        self.fc = Projection(2 * config.dim, config.dim)
        self.layers = blocks(config)

    def forward(self, codes, features, at):
        pair = torch.cat((F.embedding(codes, self.codes.weight), features), dim=-1)
        return self.ops.trunk(self.layers, self.fc(pair, self.ops), at)

    def forward_prefix(self, condition, features, at):
        codes = torch.zeros(features.shape[:2], dtype=self.ops.index, device=features.device)
        return self(codes, features, at)


class Painter(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.colour = nn.Parameter(torch.rand(config.colours, 3))
