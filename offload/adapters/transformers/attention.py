"""The library's attention, sent to `offload.attention` while our calls run.

The name of the attention function stands in the model's configuration, which models can share. So
it is switched for the duration of a call, and put back whatever happens.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
from torch import nn

from offload.adapters.hooks import has_user_hook
from offload.adapters.transformers.masks import interval_mask, is_interval_mask
from offload.errors import LayerRefused, TileRefused
from offload.ops.attention import attention
from offload.ops.intervals import dense_mask
from offload.ops.routing import current_route

NAME = "offload"
"""Under which our functions stand in the library's registries."""

_HARMLESS = frozenset(
    {
        "cache",
        "cache_position",
        "cu_seq_lens_k",
        "cu_seq_lens_q",
        "layer_idx",
        "max_length_k",
        "max_length_q",
        "num_items_in_batch",
        "output_attentions",
        "output_hidden_states",
        "output_router_logits",
        "past_key_values",
        "position_embeddings",
        "position_ids",
        "return_dict",
        "sliding_window",
        "use_cache",
    }
)
"""Arguments that reach attention functions and that torch's own kernels ignore as well."""

_previous_names: ContextVar[dict[int, str] | None] = ContextVar("offload_previous", default=None)
"""The names that stood in the configurations, by their identity; they live longer than a call."""


def configs_of(module: nn.Module) -> list[Any]:
    """Returns the configurations that the modules inside a module read their attention from."""
    found: dict[int, Any] = {}
    for part in module.modules():
        config = getattr(part, "config", None)
        if hasattr(config, "_attn_implementation_internal"):
            found[id(config)] = config
    return list(found.values())


def routed_among(configs: list[Any]) -> list[Any]:
    """Picks the configurations whose attention is ours at the moment."""
    return [config for config in configs if config._attn_implementation_internal == NAME]


@contextmanager
def attention_routed(configs: list[Any]) -> Iterator[None]:
    """Makes modules with these configurations call our attention, and makes masks for it.

    Args:
        configs: configuration objects; nothing happens where there are none.

    Yields:
        Nothing.
    """
    previous = {
        id(config): config._attn_implementation_internal
        for config in configs
        if config._attn_implementation_internal != NAME
    }
    if not previous:
        yield
        return
    _register()
    token = _previous_names.set((_previous_names.get() or {}) | previous)
    try:
        for config in configs:
            config._attn_implementation_internal = NAME
        yield
    finally:
        for config in configs:
            if id(config) in previous:
                config._attn_implementation_internal = previous[id(config)]
        _previous_names.reset(token)


def _register() -> None:
    modeling = sys.modules["transformers.modeling_utils"]
    if NAME not in modeling.ALL_ATTENTION_FUNCTIONS:
        from transformers import AttentionInterface, AttentionMaskInterface

        AttentionInterface.register(NAME, attention_forward)
        AttentionMaskInterface.register(NAME, mask_of_call)


def _previous_name(config: Any) -> str:
    return (_previous_names.get() or {}).get(id(config)) or "sdpa"


def mask_of_call(*args: Any, **kwargs: Any) -> torch.Tensor | None:
    """Makes a mask as the library's mask functions do: an interval tensor where it can be one.

    Args:
        *args: none, by the library's convention.
        **kwargs: `batch_size`, `kv_length`, `mask_function` and what else the release passes.

    Returns:
        `[B or 1, S, 2]`, or what the model's own attention wants where rows are not intervals.
    """
    intervals = interval_mask(**kwargs)
    if intervals is not None:
        return intervals
    functions = sys.modules["transformers.masking_utils"].ALL_MASK_ATTENTION_FUNCTIONS
    name = _previous_name(kwargs.get("config"))
    mask: torch.Tensor | None = functions[name if name in functions else "sdpa"](*args, **kwargs)
    return mask


def attention_forward(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    softcap: float | None = None,
    is_causal: bool | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Computes attention for a module of the library, through `offload.attention`.

    What that cannot express goes to the attention that the model had; inside a tile it is refused.

    Args:
        module: the attention module.
        query: `[B, H, T, D]`.
        key: `[B, Hk, N, D]`.
        value: `[B, Hk, N, D]`.
        attention_mask: an interval tensor, None, or a mask of the model's own attention.
        dropout: of attention weights.
        scaling: factor of the logits.
        softcap: bound of the logits.
        is_causal: without a mask; None asks the module.
        **kwargs: others, which must be harmless.

    Returns:
        `[B, T, H, D]`, and None or the model's own attention weights.

    Raises:
        TileRefused: in a tile that cannot serve the call.
    """
    causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    reason = _why_not_ours(module, attention_mask, dropout, causal=causal, others=kwargs)
    if reason:
        if current_route() is not None:
            raise TileRefused(reason)
        kwargs |= {"dropout": dropout, "scaling": scaling}
        kwargs |= {} if softcap is None else {"softcap": softcap}
        kwargs |= {} if is_causal is None else {"is_causal": is_causal}
        return _as_before(module, query, key, value, attention_mask, **kwargs)
    out = attention(
        query,
        key,
        value,
        causal=causal,
        intervals=attention_mask,
        softmax_scale=scaling,
        softcap=softcap or 0.0,
    )
    return out.transpose(1, 2), None


def _why_not_ours(
    module: nn.Module,
    mask: torch.Tensor | None,
    dropout: float,
    *,
    causal: bool,
    others: dict[str, Any],
) -> str:
    unknown = [name for name, value in others.items() if value is not None]
    unknown = [name for name in unknown if name not in _HARMLESS]
    if unknown:
        return f"its attention gets {', '.join(sorted(unknown))}"
    if dropout > 0:
        return "its attention has dropout"
    if has_user_hook(module):  # which may be there for the weights
        return "its attention has a hook"
    if mask is not None and not is_interval_mask(mask):
        return "its attention mask does not let each token see one range of earlier ones"
    if mask is None and not causal:
        return "its attention is not causal"
    return ""


def _as_before(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    **kwargs: Any,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Calls the attention that the model had before the name was switched."""
    name = _previous_name(module.config)
    functions = sys.modules["transformers.modeling_utils"].ALL_ATTENTION_FUNCTIONS
    if mask is not None and is_interval_mask(mask):
        if name not in ("sdpa", "eager"):
            raise LayerRefused(
                f"offload: expected attention '{name}' with arguments that offload.attention "
                "takes, or attention 'sdpa' or 'eager'. Load the model with "
                "attn_implementation='sdpa', or use Policy(mode='checkpoint')."
            )
        mask = dense_mask(mask.to(query.device), 0, key.shape[2])
        if name == "eager":
            least = torch.finfo(query.dtype).min
            mask = torch.zeros_like(mask, dtype=query.dtype).masked_fill_(~mask, least)
    function = (
        functions[name]
        if name in functions
        else sys.modules[type(module).__module__].eager_attention_forward
    )
    result: tuple[torch.Tensor, torch.Tensor | None] = function(
        module, query, key, value, mask, **kwargs
    )
    return result
