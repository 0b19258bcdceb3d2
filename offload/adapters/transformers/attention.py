"""The library's attention, sent to `offload.attention` while our calls run.

The name of the attention function stands in the model's configuration, which models can share. So
it is switched for the duration of a call, and put back whatever happens.
"""

from __future__ import annotations

import functools
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from offload.adapters.hooks import has_user_hook
from offload.adapters.transformers.masks import (
    interval_mask,
    is_interval_mask,
    own_mask,
    with_own_mask,
)
from offload.errors import TileRefused
from offload.ops.attention import attention
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


@dataclass
class _Switch:
    """A configuration whose attention is ours at the moment, how often, and what it was before."""

    name: str
    users: int = 0


_switches: dict[int, _Switch] = {}
"""By the identity of configurations that a call in progress holds."""
_lock = threading.Lock()
_ours: ContextVar[bool] = ContextVar("offload_attention_is_ours", default=False)
"""Whether this thread wants our attention where a configuration is switched."""


def configs_of(module: nn.Module) -> list[Any]:
    """Returns the configurations that the modules inside a module read their attention from."""
    found: dict[int, Any] = {}
    for part in module.modules():
        config = getattr(part, "config", None)
        if hasattr(config, "_attn_implementation_internal"):
            found[id(config)] = config
    return list(found.values())


@contextmanager
def attention_routed(configs: list[Any]) -> Iterator[None]:
    """Makes modules with these configurations call our attention, and makes masks for it.

    Args:
        configs: configuration objects; nothing happens where there are none.

    Yields:
        Nothing.
    """
    if not configs:
        yield
        return
    _register()
    with _lock:
        for config in configs:
            name = config._attn_implementation_internal
            switch = _switches.setdefault(id(config), _Switch(name))
            switch.users += 1
            config._attn_implementation_internal = NAME
    token = _ours.set(True)
    try:
        yield
    finally:
        _ours.reset(token)
        with _lock:
            for config in configs:
                switch = _switches[id(config)]
                switch.users -= 1
                if switch.users == 0:
                    config._attn_implementation_internal = switch.name
                    del _switches[id(config)]


@contextmanager
def attention_as_before(module: nn.Module) -> Iterator[None]:
    """Within a call that is routed, gives the modules inside a module their own attention back.

    Args:
        module: a layer that is not run by tiles.

    Yields:
        Nothing.
    """
    if not _ours.get():
        yield
        return
    with _lock:
        # Where another thread uses the same configuration, the name stays and `_ours` decides.
        alone = [
            config
            for config in configs_of(module)
            if id(config) in _switches and _switches[id(config)].users == 1
        ]
        for config in alone:
            config._attn_implementation_internal = _switches[id(config)].name
    token = _ours.set(False)
    try:
        yield
    finally:
        _ours.reset(token)
        with _lock:
            for config in alone:
                config._attn_implementation_internal = NAME


def _register() -> None:
    modeling = sys.modules["transformers.modeling_utils"]
    if NAME not in modeling.ALL_ATTENTION_FUNCTIONS:
        from transformers import AttentionInterface, AttentionMaskInterface

        AttentionInterface.register(NAME, attention_forward)
        AttentionMaskInterface.register(NAME, mask_of_call)


def _previous_name(config: Any) -> str:
    switch = _switches.get(id(config))
    return switch.name if switch is not None else "sdpa"


def mask_of_call(*args: Any, **kwargs: Any) -> torch.Tensor | None:
    """Makes a mask as the library's mask functions do: an interval tensor where it can be one.

    Args:
        *args: none, by the library's convention.
        **kwargs: `batch_size`, `kv_length`, `mask_function` and what else the release passes.

    Returns:
        `[B or 1, S, 2]`, or what the model's own attention wants where rows are not intervals.
    """
    functions = sys.modules["transformers.masking_utils"].ALL_MASK_ATTENTION_FUNCTIONS
    name = _previous_name(kwargs.get("config"))
    make_own = functools.partial(functions[name if name in functions else "sdpa"], *args, **kwargs)
    intervals = interval_mask(**kwargs) if _ours.get() else None
    if intervals is None:
        own: torch.Tensor | None = make_own()
        return own
    return with_own_mask(intervals, make_own)


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
    if attention_mask is not None and is_interval_mask(attention_mask) and not _ours.get():
        attention_mask = own_mask(attention_mask)
    causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    reason = _why_not_ours(module, attention_mask, dropout, causal=causal, others=kwargs)
    if reason or not _ours.get():
        if current_route() is not None:
            raise TileRefused(reason)
        kwargs |= {"dropout": dropout, "scaling": scaling}
        kwargs |= {} if softcap is None else {"softcap": softcap}
        kwargs |= {} if is_causal is None else {"is_causal": is_causal}
        return _as_before(module, query, key, value, attention_mask, **kwargs)
    if softcap is not None and _ignores_softcap(_previous_name(module.config)):
        softcap = None
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


def _ignores_softcap(name: str) -> bool:
    """Whether an attention computes as if there were no softcap; transformers 5 refuses it."""
    return name == "sdpa" and sys.modules["transformers"].__version__.startswith("4.")


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
    if mask is not None and is_interval_mask(mask):
        mask = own_mask(mask)
    name = _previous_name(module.config)
    functions = sys.modules["transformers.modeling_utils"].ALL_ATTENTION_FUNCTIONS
    function = (
        functions[name]
        if name in functions
        else sys.modules[type(module).__module__].eager_attention_forward
    )
    result: tuple[torch.Tensor, torch.Tensor | None] = function(
        module, query, key, value, mask, **kwargs
    )
    return result
