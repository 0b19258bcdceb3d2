"""Shapes of models that people plan for, so that nothing need be downloaded.

Source: the `config.json` of each model as its publisher released it.
"""

from __future__ import annotations

from typing import Any


def _llama(
    hidden: int,
    layers: int,
    heads: int,
    kv_heads: int,
    mlp: int,
    vocab: int,
    positions: int,
    **others: Any,
) -> dict[str, Any]:
    return {
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "intermediate_size": mlp,
        "vocab_size": vocab,
        "max_position_embeddings": positions,
        **others,
    }


def _opt(hidden: int, layers: int, heads: int) -> dict[str, Any]:
    return {
        "hidden_size": hidden,
        "word_embed_proj_dim": hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "ffn_dim": 4 * hidden,
        "vocab_size": 50272,
        "max_position_embeddings": 2048,
        "dropout": 0.0,
    }


_TIED = {"tie_word_embeddings": True}

PRESETS: dict[str, tuple[str, dict[str, Any]]] = {
    "opt-1.3b": ("opt", _opt(2048, 24, 32)),
    "opt-6.7b": ("opt", _opt(4096, 32, 32)),
    "llama-3.2-1b": ("llama", _llama(2048, 16, 32, 8, 8192, 128256, 131072, head_dim=64, **_TIED)),
    "llama-3.2-3b": ("llama", _llama(3072, 28, 24, 8, 8192, 128256, 131072, head_dim=128, **_TIED)),
    "llama-3.1-8b": ("llama", _llama(4096, 32, 32, 8, 14336, 128256, 131072)),
    "qwen2.5-0.5b": ("qwen2", _llama(896, 24, 14, 2, 4864, 151936, 32768, **_TIED)),
    "qwen2.5-1.5b": ("qwen2", _llama(1536, 28, 12, 2, 8960, 151936, 131072, **_TIED)),
    "qwen2.5-7b": ("qwen2", _llama(3584, 28, 28, 4, 18944, 152064, 131072)),
    "qwen3-8b": ("qwen3", _llama(4096, 36, 32, 8, 12288, 151936, 40960, head_dim=128)),
    "mistral-7b": ("mistral", _llama(4096, 32, 32, 8, 14336, 32768, 32768, sliding_window=None)),
    "gemma-2-2b": (
        "gemma2",
        _llama(2304, 26, 8, 4, 9216, 256000, 8192, head_dim=256, sliding_window=4096, **_TIED),
    ),
}
"""By name: transformers' `model_type`, and the sizes of its configuration."""
