"""Attention of a whole sequence: an operator of torch over tiles of queries and chunks of keys.

Legend: `B` batch, `Sq` queries, `Sk` keys, `H` heads, `Hk` KV heads, `D` head dim (the values' may
differ: `Dv`).
"""

from __future__ import annotations

import itertools
from typing import Any

import torch
from torch.autograd.function import once_differentiable

from offload.ops.backends import check_name
from offload.ops.flops import product_flops, register_flops
from offload.ops.intervals import (
    causal_intervals,
    check_intervals,
    full_intervals,
    limit_window,
    slice_rows,
)
from offload.ops.key_blocks import KeyBlock
from offload.ops.reference_attention import wide_dtype
from offload.ops.routing import AttentionCall, current_route
from offload.ops.tile_attention import attend, attend_backward, autocast_is_on, check_tensors

TILE_TOKENS = 2048
"""Queries and keys that `attention` hands to a kernel at once.

A mask of that size is 16 MiB in float32, and a kernel's launch no longer shows at it.
"""


def attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    causal: bool = True,
    window_size: int | None = None,
    intervals: torch.Tensor | None = None,
    softmax_scale: float | None = None,
    softcap: float = 0.0,
    backend: str = "auto",
) -> torch.Tensor:
    """Computes exact attention with exact first-order gradients, in memory linear in the sequence.

    Call it in a layer's forward in place of `F.scaled_dot_product_attention`. Where the layer runs
    tile by tile, the call belongs to the whole sequence and the executor takes it; elsewhere it is
    ordinary attention, of about the same speed. Under autocast it computes in autocast's dtype.

    Args:
        q: `[B, H, Sq, D]`, any strides.
        k: `[B, Hk, Sk, D]`; `Hk` divides `H`.
        v: `[B, Hk, Sk, Dv]`.
        causal: whether a query sees the keys up to its own position only. With more keys than
            queries, the last query has the position of the last key.
        window_size: number of keys a query sees at most, itself included; None for no limit.
        intervals: `[B or 1, Sq, 2]` int64, on q's device or the CPU: query `i` sees the keys
            `lo[i] <= k < hi[i]`. Takes the place of `causal`.
        softmax_scale: factor of the logits; None for `D ** -0.5`.
        softcap: bound of the logits, `softcap * tanh(logit / softcap)`; 0 for none.
        backend: "auto", "triton", "torch" or "reference"; where the executor takes the call, its
            policy decides.

    Returns:
        `[B, H, Sq, Dv]` in q's dtype; 0 for a query that sees no key.

    Raises:
        ValueError: if shapes or devices do not fit together, or the backend does not take them.
        TypeError: if dtypes do not fit together.
        NotImplementedError: if the executor takes a call that is not causal.
    """
    if autocast_is_on(q.device):
        q, k, v = (_as_autocast(x) for x in (q, k, v))
    check_tensors("attention", q, k, v, softcap)
    check_name("attention", backend)
    route = current_route()
    if route is not None:
        if intervals is None and not causal:
            raise NotImplementedError(
                "attention: expected causal attention in a layer that runs tile by tile, got "
                "causal=False. Pass intervals, or run the layer with Policy(mode='checkpoint')."
            )
        return route(AttentionCall(q, k, v, intervals, window_size, softmax_scale, softcap))
    if intervals is not None:
        check_intervals("attention", q, intervals)
    out: torch.Tensor = _attention(
        q, k, v, intervals, causal, window_size, softmax_scale, softcap, backend
    )[0]
    return out


# -- the operator ----------------------------------------------------------------------------------


@torch.library.custom_op("offload::attention", mutates_args=())
def _attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    intervals: torch.Tensor | None,
    causal: bool,
    window_size: int | None,
    softmax_scale: float | None,
    softcap: float,
    backend: str,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Computes `out` `[B, H, Sq, Dv]` and `lse` `[B, H, Sq]`; see `attention`."""
    rows = q.shape[2]
    out, lse = _empty_results(q, k, v)
    bounds = _bounds(q, k, intervals, causal, window_size)
    blocks = _chunks(k, v, rows)
    for begin, end in _tiles(rows):
        tile = slice(begin, end)
        out[:, :, tile], lse[:, :, tile] = attend(
            q[:, :, tile],
            blocks,
            slice_rows(bounds, begin, end),
            softmax_scale=softmax_scale,
            softcap=softcap,
            backend=backend,
        )
    return out, lse


@torch.library.custom_op("offload::attention_backward", mutates_args=())
def _attention_backward(
    d_out: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    intervals: torch.Tensor | None,
    causal: bool,
    window_size: int | None,
    softmax_scale: float | None,
    softcap: float,
    backend: str,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Computes the gradients of q, k and v, each in its dtype and contiguous."""
    rows = q.shape[2]
    dq = q.new_empty(q.shape)
    dk = k.new_zeros(k.shape, dtype=wide_dtype(k))
    dv = v.new_zeros(v.shape, dtype=wide_dtype(v))
    bounds = _bounds(q, k, intervals, causal, window_size)
    blocks = _chunks(k, v, rows)
    for block in blocks:
        keys = slice(block.start, block.end)
        block.dk, block.dv = dk[:, :, keys], dv[:, :, keys]
    for begin, end in _tiles(rows):
        tile = slice(begin, end)
        dq[:, :, tile] = attend_backward(
            d_out[:, :, tile],
            q[:, :, tile],
            blocks,
            out[:, :, tile],
            lse[:, :, tile],
            slice_rows(bounds, begin, end),
            softmax_scale=softmax_scale,
            softcap=softcap,
            backend=backend,
        )
    return dq, dk.to(k.dtype), dv.to(v.dtype)


@_attention.register_fake
def _empty_results(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *settings: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    batch, heads, rows, _ = q.shape
    # Laid out as [B, S, H, Dv], which is what the output projection reads.
    out = q.new_empty((batch, rows, heads, v.shape[-1])).transpose(1, 2)
    return out, q.new_empty((batch, heads, rows), dtype=wide_dtype(q))


@_attention_backward.register_fake
def _empty_gradients(
    d_out: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *_: Any
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape)


def _keep_for_backward(ctx: Any, inputs: tuple[Any, ...], output: tuple[Any, ...]) -> None:
    q, k, v, intervals, *settings = inputs
    ctx.save_for_backward(q, k, v, *output)
    ctx.mark_non_differentiable(output[1])
    ctx.intervals = intervals  # an attribute keeps the host copy on the same object
    ctx.settings = settings


@once_differentiable
def _differentiate(ctx: Any, d_out: torch.Tensor, _: Any) -> tuple[torch.Tensor | None, ...]:
    gradients = _attention_backward(d_out, *ctx.saved_tensors, ctx.intervals, *ctx.settings)
    return (*gradients, None, *(None for _ in ctx.settings))


_attention.register_autograd(_differentiate, setup_context=_keep_for_backward)


def _forward_flops(q_shape: Any, k_shape: Any, v_shape: Any, *_: Any, **__: Any) -> int:
    return product_flops(q_shape, k_shape, v_shape, of_keys=1, of_values=1)


def _backward_flops(_d: Any, q_shape: Any, k_shape: Any, v_shape: Any, *_: Any, **__: Any) -> int:
    return product_flops(q_shape, k_shape, v_shape, of_keys=3, of_values=2)


register_flops(torch.ops.offload.attention, _forward_flops)
register_flops(torch.ops.offload.attention_backward, _backward_flops)


# -- tiles and chunks ------------------------------------------------------------------------------


def _bounds(
    q: torch.Tensor,
    k: torch.Tensor,
    intervals: torch.Tensor | None,
    causal: bool,
    window_size: int | None,
) -> torch.Tensor:
    """Returns the intervals, `[B or 1, Sq, 2]`, that the arguments of `attention` amount to."""
    if intervals is None:
        return _intervals_of(q, k, causal=causal, window_size=window_size)
    return limit_window(intervals, window_size)


def _intervals_of(
    q: torch.Tensor, k: torch.Tensor, *, causal: bool, window_size: int | None
) -> torch.Tensor:
    """Returns the intervals, on the CPU, of attention that is causal or sees everything."""
    rows, keys = q.shape[2], k.shape[2]
    if causal:
        if keys < rows:
            raise ValueError(
                f"attention: expected at least as many keys as queries, got {keys} keys for {rows} "
                "queries. Pass causal=False or intervals."
            )
        return causal_intervals(keys - rows, rows, window_size=window_size)
    if window_size is not None:
        raise ValueError(
            f"attention: expected no window_size with causal=False, got {window_size}. "
            "Pass intervals."
        )
    return full_intervals(rows, keys)


def _chunks(k: torch.Tensor, v: torch.Tensor, rows: int) -> list[KeyBlock]:
    """Cuts keys so that, in causal attention, the last chunk a tile sees is the tile's own."""
    keys = k.shape[2]
    past = max(0, keys - rows)
    starts = [*range(0, past, TILE_TOKENS), *range(past, keys, TILE_TOKENS), keys]
    return [
        KeyBlock(k[:, :, begin:end], v[:, :, begin:end], begin)
        for begin, end in itertools.pairwise(starts)
    ]


def _tiles(rows: int) -> list[tuple[int, int]]:
    return [(begin, min(begin + TILE_TOKENS, rows)) for begin in range(0, rows, TILE_TOKENS)]


def _as_autocast(x: torch.Tensor) -> torch.Tensor:
    """Casts as autocast does for `F.scaled_dot_product_attention`."""
    if not x.is_floating_point() or x.dtype == torch.float64:
        return x
    return x.to(torch.get_autocast_dtype(x.device.type))
