"""The forward kernel; see `common` for its words."""

from __future__ import annotations

import triton
import triton.language as tl

from offload.ops.fused.common import (
    INF,
    LN_2,
    LOG2_E,
    bounds,
    head_of,
    key_range,
    load_rows,
    logits,
    seen,
    store_rows,
)


@triton.jit
def _attend_to(
    acc,
    top,
    total,
    q,
    k,
    v,
    mask,
    lo,
    hi,
    begin,
    end,
    k_row,
    v_row,
    softmax_scale,
    softcap,
    D: tl.constexpr,
    DV: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_DV: tl.constexpr,
    MASKED: tl.constexpr,
    SOFTCAP: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Takes the keys from `begin` to `end` into a running softmax."""
    for start in range(begin, end, BLOCK_N):
        keys = start + tl.arange(0, BLOCK_N)
        k_rows = load_rows(k, keys, mask.keys, k_row, D, BLOCK_D)
        products = tl.dot(q, tl.trans(k_rows), input_precision=PRECISION)
        scores, _ = logits(products, softmax_scale, softcap, SOFTCAP)
        if MASKED:
            scores = tl.where(seen(lo[:, None], hi[:, None], keys[None, :]), scores, -INF)
        new_top = tl.maximum(top, tl.max(scores, 1))
        # A row that has seen nothing yet: -inf - 0 where -inf - -inf would be NaN.
        shift = tl.where(new_top == -INF, 0.0, new_top)
        weights = tl.exp2(scores - shift[:, None])
        decay = tl.exp2(top - shift)
        total = total * decay + tl.sum(weights, 1)
        v_rows = load_rows(v, keys, mask.keys, v_row, DV, BLOCK_DV)
        acc = acc * decay[:, None]
        acc = tl.dot(weights.to(v_rows.dtype), v_rows, acc, input_precision=PRECISION)
        top = new_top
    return acc, top, total


@triton.jit
def forward_kernel(
    q,
    k,
    v,
    mask,
    carry,
    carry_lse,
    out,
    lse,
    heads,
    group,
    softmax_scale,
    softcap,
    D: tl.constexpr,
    DV: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_DV: tl.constexpr,
    CAUSAL: tl.constexpr,
    CARRY: tl.constexpr,
    SOFTCAP: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """One program: `BLOCK_M` rows of one head, over all keys of the block that they see.

    `q`, `k`, `v`, `carry` and `out` are `Operand`, `mask` is `Mask`; `carry_lse` and `lse` point to
    contiguous `[B, H, T]` float32. `carry` may be `out`.
    """
    # In causal tiles the last rows have the most to do: they begin first.
    row_block = tl.num_programs(1) - 1 - tl.program_id(1)
    batch = (tl.program_id(0) // heads).to(tl.int64)
    head = (tl.program_id(0) % heads).to(tl.int64)
    rows = row_block * BLOCK_M + tl.arange(0, BLOCK_M)
    exists = rows < mask.rows
    stats = (batch * heads + head) * mask.rows + rows

    q_rows = load_rows(head_of(q, batch, head), rows, mask.rows, q.row, D, BLOCK_D)
    k_head = head_of(k, batch, head // group)
    v_head = head_of(v, batch, head // group)
    if CARRY:
        carry_head = head_of(carry, batch, head)
        acc = load_rows(carry_head, rows, mask.rows, carry.row, DV, BLOCK_DV).to(tl.float32)
        top = tl.load(carry_lse + stats, mask=exists, other=-INF) * LOG2_E
        total = tl.full([BLOCK_M], 1.0, tl.float32)  # out is divided by the sum already
    else:
        acc = tl.zeros([BLOCK_M, BLOCK_DV], tl.float32)
        top = tl.full([BLOCK_M], -INF, tl.float32)
        total = tl.zeros([BLOCK_M], tl.float32)

    lo, hi = bounds(mask, batch, rows, CAUSAL)
    begin, masked_from, end = key_range(mask, rows, lo, hi, BLOCK_N)
    for MASKED in tl.static_range(2):
        acc, top, total = _attend_to(
            acc,
            top,
            total,
            q_rows,
            k_head,
            v_head,
            mask,
            lo,
            hi,
            masked_from if MASKED else begin,
            end if MASKED else masked_from,
            k.row,
            v.row,
            softmax_scale,
            softcap,
            D,
            DV,
            BLOCK_N,
            BLOCK_D,
            BLOCK_DV,
            MASKED,
            SOFTCAP,
            PRECISION,
        )

    total = tl.where(total == 0, 1.0, total)  # of a row without keys, whose top is -inf
    acc = acc / total[:, None]
    store_rows(head_of(out, batch, head), acc, rows, mask.rows, out.row, DV, BLOCK_DV)
    tl.store(lse + stats, (top + tl.log2(total)) * LN_2, mask=exists)
