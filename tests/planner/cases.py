"""Small models and situations of the planner's tests."""

import torch
from torch import nn
from transformers import Gemma2Config, LlamaConfig, OPTConfig, Qwen2Config

from offload.devices import DeviceKind
from offload.planner.dry_run import Situation
from offload.planner.outline import outline_of
from offload.planner.prediction import Forecast
from offload.policy import Policy

CPU, CARD = DeviceKind("cpu"), DeviceKind("cuda", (8, 9))
SIZES = {
    "hidden_size": 64,
    "num_hidden_layers": 6,
    "num_attention_heads": 4,
    "vocab_size": 512,
}
LLAMA = {**SIZES, "num_key_value_heads": 2, "intermediate_size": 160}


def llama(**others):
    return LlamaConfig(**{**LLAMA, **others})


def qwen2(**others):
    return Qwen2Config(**{**LLAMA, **others})


def gemma2(**others):
    return Gemma2Config(**{**LLAMA, "head_dim": 16, "sliding_window": 96, **others})


def opt(**others):
    return OPTConfig(
        **{**SIZES, "ffn_dim": 256, "word_embed_proj_dim": 64, "dropout": 0.0, **others}
    )


def tiled(tile_tokens=64, **others):
    return Policy(
        **{"mode": "tiled", "tier": "host", "min_bytes": 0, "tile_tokens": tile_tokens, **others}
    )


def forecast(config, tokens=320, kind=CPU, *, train=True, optimizer="none", batch=1, **options):
    options.setdefault("dtype", torch.float32)
    situation = Situation(tokens, batch, train, kind)
    return Forecast(outline_of(config, **options), situation, optimizer)


class Block(nn.Module):
    """A layer of nobody's library."""

    def __init__(self, width):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)

    def forward(self, hidden):
        batch, tokens, width = hidden.shape
        q, k, v = self.qkv(self.norm(hidden)).view(batch, tokens, 3, 4, -1).permute(2, 0, 3, 1, 4)
        mixed = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return hidden + self.out(mixed.transpose(1, 2).reshape(batch, tokens, width))


class Plain(nn.Module):
    """A language model of nobody's library: ids in, logits out."""

    def __init__(self, width=32, layers=5):
        super().__init__()
        self.embedding = nn.Embedding(128, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(layers))
        self.head = nn.Linear(width, 128)

    def forward(self, ids):
        hidden = self.embedding(ids)
        for block in self.blocks:
            hidden = block(hidden)
        return self.head(hidden)
