"""Attention of layers that do not run by tiles, on meta tensors, as the planned device computes it.

Left to itself torch takes its plain formula on meta, whose S x S scores no device would hold.
"""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Iterator
from typing import Any

import torch
from torch.nn import functional as F

from offload.devices import type_of
from offload.ops._torch import per_head
from offload.ops.routing import current_route

_aten = torch.ops.aten
_one_at_a_time = threading.RLock()
_TORCH_ATTENTION = F.scaled_dot_product_attention
_MATH = 0
"""What `torch._fused_sdp_choice` calls the plain formula."""


@contextlib.contextmanager
def fused_on_meta() -> Iterator[None]:
    """Makes `scaled_dot_product_attention` of meta tensors take a fused kernel, for a while.

    The function is replaced, since a mode of functions is not entered in backward, where layers are
    recomputed. That is for the whole process, so one thread at a time is let in; what other tensors
    ask for is passed on.

    Yields:
        Nothing.
    """

    def fused(query: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        if not query.is_meta or current_route() is not None:
            return _TORCH_ATTENTION(query, *args, **kwargs)
        return _attention(query, *args, **kwargs)

    with _one_at_a_time:
        F.scaled_dot_product_attention = fused
        try:
            yield
        finally:
            F.scaled_dot_product_attention = _TORCH_ATTENTION


def _attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> torch.Tensor:
    options: dict[str, Any] = {"scale": scale}
    if type_of(query.device) == "cpu":
        if not _cpu_is_fused(query.dtype, query.shape[1], key.shape[1], query.shape[3], dropout_p):
            return _TORCH_ATTENTION(
                query,
                key,
                value,
                attn_mask,
                dropout_p,
                is_causal,
                scale=scale,
                enable_gqa=enable_gqa,
            )
        cpu_kernel: Any = _aten._scaled_dot_product_flash_attention_for_cpu
        out: torch.Tensor = cpu_kernel(
            query, key, value, 0.0, is_causal, attn_mask=attn_mask, **options
        )[0]
        return out
    key, value = (per_head(x, query.shape[1]) for x in (key, value))
    card_kernel: Any = _aten._scaled_dot_product_flash_attention
    card_out: torch.Tensor = card_kernel(query, key, value, dropout_p, is_causal, **options)[0]
    return card_out


@functools.cache
def _cpu_is_fused(
    dtype: torch.dtype, heads: int, kv_heads: int, head_dim: int, dropout_p: float
) -> bool:
    """Asks torch which kernel it takes on the CPU for tensors of this kind."""
    q = torch.zeros(1, heads, 2, head_dim, dtype=dtype, requires_grad=True)
    k = torch.zeros(1, kv_heads, 2, head_dim, dtype=dtype, requires_grad=True)
    choice = torch._fused_sdp_choice(q, k, k, None, dropout_p, True, enable_gqa=heads != kv_heads)
    return choice != _MATH
