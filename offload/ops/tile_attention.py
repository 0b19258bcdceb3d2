"""Attention of one tile of queries over a sequence of key blocks: exact, mergeable, by blocks.

Legend: `B` batch, `T` rows of a tile, `N` keys of a block, `H` heads, `Hk` KV heads, `D` head dim
(the values' may differ: `Dv`).

Results over disjoint keys merge by their `lse`, the natural logarithm of the sum of exponentials;
the backward takes the merged `out` and `lse`, so each block can be handled alone, in any order.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence

import torch

from offload.devices import is_planned
from offload.ops._torch import unit_last_stride
from offload.ops.backends import choose_backend
from offload.ops.intervals import check_intervals
from offload.ops.key_blocks import KeyBlock, seen_keys
from offload.ops.reference_attention import wide_dtype


@torch.no_grad()
def attend(
    q: torch.Tensor,
    blocks: Sequence[KeyBlock],
    intervals: torch.Tensor,
    *,
    softmax_scale: float | None = None,
    softcap: float = 0.0,
    carry: tuple[torch.Tensor, torch.Tensor] | None = None,
    out_dtype: torch.dtype | None = None,
    backend: str = "auto",
) -> tuple[torch.Tensor, torch.Tensor]:
    """Computes the attention of one tile over key blocks; autograd does not see it.

    Costs what one call of torch's kernel over the same keys costs, plus a pass over `out` in
    max(float32, dtype) for each block after the first. Blocks that no row sees cost nothing. Writes
    to none of its arguments; never waits on the device if the intervals know their host copy.

    Args:
        q: `[B, H, T, D]`, any strides.
        blocks: disjoint blocks of keys, in any order.
        intervals: `[B or 1, T, 2]` int64, on q's device or the CPU: row `i` sees the keys
            `lo[i] <= k < hi[i]`, in positions of the whole sequence.
        softmax_scale: factor of the logits; None for `D ** -0.5`.
        softcap: bound of the logits, `softcap * tanh(logit / softcap)`; 0 for none.
        carry: `(out, lse)` over other keys to continue from.
        out_dtype: dtype of `out`; None for q's. Give float32 to a result that will be a `carry`.
        backend: "auto", "triton", "torch" or "reference".

    Returns:
        `out` `[B, H, T, Dv]`, and `lse` `[B, H, T]` in max(float32, dtype of q). A row that sees no
        key has out 0 and lse -inf.

    Raises:
        ValueError: if shapes or devices do not fit together, or the backend does not take them.
        TypeError: if dtypes do not fit together.

    Source:
        Merging partial results by their logsumexp: Milakov and Gimelshein, arXiv:1805.02867, as in
        flash-attention (arXiv:2205.14135) between blocks and ring attention (arXiv:2310.01889)
        between devices. Here between kernel calls, with a mask of intervals for any block.
    """
    shape = _checked_shape("attend", q, blocks, intervals, softcap)
    kernels = choose_backend("attend", backend, q, shape[-1])
    wide = wide_dtype(q)
    out_dtype = q.dtype if out_dtype is None else out_dtype
    if carry is not None:
        _check_like("attend", "carry[0]", carry[0], shape)
        _check_like("attend", "carry[1]", carry[1], shape[:3])
    if q.device.type == "meta" and not is_planned():
        return q.new_empty(shape, dtype=out_dtype), q.new_empty(shape[:3], dtype=wide)
    scale = q.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale
    q = unit_last_stride(q)
    with _without_autocast(q.device):
        seen = seen_keys(blocks, intervals) if q.numel() else ()
        result = kernels.attend(q, seen, scale, softcap, carry, out_dtype)
    if result is None:
        lse = q.new_full(shape[:3], -torch.inf, dtype=wide)
        return q.new_zeros(shape, dtype=out_dtype), lse
    return result


@torch.no_grad()
def attend_backward(
    d_out: torch.Tensor,
    q: torch.Tensor,
    blocks: Sequence[KeyBlock],
    out: torch.Tensor,
    lse: torch.Tensor,
    intervals: torch.Tensor,
    *,
    softmax_scale: float | None = None,
    softcap: float = 0.0,
    backend: str = "auto",
) -> torch.Tensor:
    """Computes the gradients of one tile's attention over key blocks.

    **Adds** to `dk` and `dv` of the blocks in place, allocating them where a row sees the block for
    the first time. The blocks may be some of those that the forward saw: what several calls return
    for disjoint blocks adds up to the gradient of q. Autograd does not see it.

    Args:
        d_out: `[B, H, T, Dv]`, gradient of `out`.
        q: `[B, H, T, D]`, any strides.
        blocks: disjoint blocks of keys, in any order.
        out: `[B, H, T, Dv]`, merged over all blocks of the forward.
        lse: `[B, H, T]`, merged over all blocks of the forward.
        intervals: `[B or 1, T, 2]` int64, as in the forward.
        softmax_scale: as in the forward.
        softcap: as in the forward.
        backend: "auto", "triton", "torch" or "reference".

    Returns:
        `dq` `[B, H, T, D]` in q's dtype, accumulated over the blocks in max(float32, dtype).

    Raises:
        ValueError: if shapes or devices do not fit together, or the backend does not take them.
        TypeError: if dtypes do not fit together.
    """
    shape = _checked_shape("attend_backward", q, blocks, intervals, softcap)
    kernels = choose_backend("attend_backward", backend, q, shape[-1])
    _check_like("attend_backward", "d_out", d_out, shape)
    _check_like("attend_backward", "out", out, shape)
    _check_like("attend_backward", "lse", lse, shape[:3])
    if q.device.type == "meta" and not is_planned():
        for block in blocks:
            block.accumulators()
        return torch.empty_like(q)
    scale = q.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale
    q = unit_last_stride(q)
    d_out, out = (unit_last_stride(x.to(q.dtype)) for x in (d_out, out))
    lse = lse.masked_fill(lse == -torch.inf, torch.inf)  # rows without keys: exp(score - lse) is 0
    with _without_autocast(q.device):
        seen = seen_keys(blocks, intervals) if q.numel() else ()
        dq = kernels.backward(d_out, q, seen, out, lse, scale, softcap)
    return torch.zeros_like(q) if dq is None else dq


def _without_autocast(device: torch.device) -> contextlib.AbstractContextManager[object]:
    """Keeps autocast from narrowing the float32 products of the plain formula."""
    if autocast_is_on(device):
        return torch.autocast(device.type, enabled=False)
    return contextlib.nullcontext()


def autocast_is_on(device: torch.device) -> bool:
    """Whether autocast narrows what runs on a device now."""
    # asking about a device without autocast, as meta, raises
    return torch.amp.is_autocast_available(device.type) and torch.is_autocast_enabled(device.type)


def _checked_shape(
    function: str,
    q: torch.Tensor,
    blocks: Sequence[KeyBlock],
    intervals: torch.Tensor,
    softcap: float,
) -> tuple[int, int, int, int]:
    """Raises where the arguments of a tile do not fit; returns the shape of `out`."""
    for block in blocks:
        check_tensors(function, q, block.k, block.v, softcap)
    check_intervals(function, q, intervals)
    batch, heads, rows, head_dim = q.shape
    return batch, heads, rows, blocks[0].v.shape[-1] if blocks else head_dim


def check_tensors(
    function: str, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, softcap: float
) -> None:
    """Raises where queries, keys and values do not fit together; `function` names the caller."""
    if q.dim() != 4 or k.dim() != 4 or v.dim() != 4:
        raise ValueError(
            f"{function}: expected q [B, H, T, D], k and v [B, Hk, N, D], got shapes "
            f"{_shapes(q, k, v)}. Keep the dim of heads before the tokens."
        )
    if not q.is_floating_point() or not q.dtype == k.dtype == v.dtype:
        raise TypeError(
            f"{function}: expected q, k, v of one floating dtype, got {q.dtype}, {k.dtype}, "
            f"{v.dtype}. Cast them."
        )
    if not q.device == k.device == v.device:
        raise ValueError(
            f"{function}: expected q, k, v on one device, got {q.device}, {k.device}, {v.device}. "
            "Move them."
        )
    fits = q.shape[0] == k.shape[0] and q.shape[3] == k.shape[3] and k.shape[:3] == v.shape[:3]
    if not fits or k.shape[1] == 0 or q.shape[1] % k.shape[1] != 0:
        raise ValueError(
            f"{function}: expected q [B, H, T, D], k and v [B, Hk, N, D] with Hk dividing H, got "
            f"shapes {_shapes(q, k, v)}. Make batch, heads and head dim agree."
        )
    if softcap < 0:
        raise ValueError(
            f"{function}: expected softcap of at least 0, got {softcap}. Pass 0 for none."
        )


def _check_like(function: str, name: str, x: torch.Tensor, shape: Sequence[int]) -> None:
    if x.shape != tuple(shape):
        raise ValueError(
            f"{function}: expected {name} of shape {tuple(shape)}, got {tuple(x.shape)}. "
            "Pass what belongs to q."
        )


def _shapes(*tensors: torch.Tensor) -> str:
    return ", ".join(str(tuple(x.shape)) for x in tensors)
