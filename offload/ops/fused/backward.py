"""The backward kernels; see `common` for their words."""

from __future__ import annotations

import triton
import triton.language as tl

from offload.ops.fused.common import (
    INF,
    LOG2_E,
    bounds,
    head_of,
    key_range,
    load_rows,
    logits,
    seen,
    store_rows,
)

SCAN_ROWS = tl.constexpr(256)
"""Rows whose bounds a program of keys reads at once while it looks for those that see it."""


@triton.jit
def delta_kernel(
    d_out,
    out,
    delta,
    heads,
    row_count,
    DV: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_DV: tl.constexpr,
):
    """The sum over the head dim of `d_out * out`, which every gradient of a row needs."""
    batch = (tl.program_id(0) // heads).to(tl.int64)
    head = (tl.program_id(0) % heads).to(tl.int64)
    rows = tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M)
    gradient = load_rows(head_of(d_out, batch, head), rows, row_count, d_out.row, DV, BLOCK_DV)
    value = load_rows(head_of(out, batch, head), rows, row_count, out.row, DV, BLOCK_DV)
    sums = tl.sum(gradient.to(tl.float32) * value.to(tl.float32), 1)
    tl.store(delta + (batch * heads + head) * row_count + rows, sums, mask=rows < row_count)


@triton.jit
def _query_gradient(
    dq,
    q,
    d_out,
    lse,
    delta,
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
    """Adds what the keys from `begin` to `end` contribute to the gradient of the queries."""
    for start in range(begin, end, BLOCK_N):
        keys = start + tl.arange(0, BLOCK_N)
        k_rows = load_rows(k, keys, mask.keys, k_row, D, BLOCK_D)
        v_rows = load_rows(v, keys, mask.keys, v_row, DV, BLOCK_DV)
        products = tl.dot(q, tl.trans(k_rows), input_precision=PRECISION)
        scores, slope = logits(products, softmax_scale, softcap, SOFTCAP)
        weights = tl.exp2(scores - lse[:, None])
        if MASKED:
            weights = tl.where(seen(lo[:, None], hi[:, None], keys[None, :]), weights, 0.0)
        d_weights = tl.dot(d_out, tl.trans(v_rows), input_precision=PRECISION)
        d_scores = weights * (d_weights - delta[:, None]) * slope
        dq = tl.dot(d_scores.to(k_rows.dtype), k_rows, dq, input_precision=PRECISION)
    return dq


@triton.jit
def query_backward_kernel(
    q,
    k,
    v,
    d_out,
    lse,
    delta,
    mask,
    carry,
    dq,
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
    """One program: the gradient of `BLOCK_M` queries of one head through the block's keys.

    Operands as for `forward_kernel`; `lse` is +inf in rows without keys. `carry`, a gradient
    through other keys to add to, may be `dq`.
    """
    row_block = tl.num_programs(1) - 1 - tl.program_id(1)
    batch = (tl.program_id(0) // heads).to(tl.int64)
    head = (tl.program_id(0) % heads).to(tl.int64)
    rows = row_block * BLOCK_M + tl.arange(0, BLOCK_M)
    exists = rows < mask.rows
    stats = (batch * heads + head) * mask.rows + rows

    q_rows = load_rows(head_of(q, batch, head), rows, mask.rows, q.row, D, BLOCK_D)
    d_head = head_of(d_out, batch, head)
    d_rows = load_rows(d_head, rows, mask.rows, d_out.row, DV, BLOCK_DV)
    # An lse of +inf makes weights 0: of rows without keys, and of those beyond the tile.
    top = tl.load(lse + stats, mask=exists, other=INF) * LOG2_E
    row_delta = tl.load(delta + stats, mask=exists, other=0.0)
    k_head = head_of(k, batch, head // group)
    v_head = head_of(v, batch, head // group)

    lo, hi = bounds(mask, batch, rows, CAUSAL)
    begin, masked_from, end = key_range(mask, rows, lo, hi, BLOCK_N)
    gradient = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    for MASKED in tl.static_range(2):
        gradient = _query_gradient(
            gradient,
            q_rows,
            d_rows,
            top,
            row_delta,
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
    gradient *= softmax_scale
    if CARRY:
        carry_head = head_of(carry, batch, head)
        gradient += load_rows(carry_head, rows, mask.rows, carry.row, D, BLOCK_D)
    store_rows(head_of(dq, batch, head), gradient, rows, mask.rows, dq.row, D, BLOCK_D)


@triton.jit
def _row_range(mask, batch, key_from, key_until, CAUSAL: tl.constexpr):
    """Returns where the rows that see a program's keys begin, need no more mask, and end."""
    if CAUSAL:
        begin = tl.maximum(key_from - mask.first, 0)
        end = tl.minimum(key_until + mask.window - mask.first - 1, mask.rows)
        whole_from = key_until - mask.first - 1
        # In a window, rows leave the first keys behind before the last.
        whole_until = key_from + mask.window - mask.first
        whole_from = tl.where(whole_until >= end, whole_from, end)
    else:
        begin = tl.full([], 0, tl.int32) + mask.rows
        end = tl.full([], 0, tl.int32)
        partly_until = tl.full([], 0, tl.int32)
        count = tl.full([], 0, tl.int32)
        for start in range(0, mask.rows, SCAN_ROWS):
            rows = start + tl.arange(0, SCAN_ROWS)
            lo, hi = bounds(mask, batch, rows, CAUSAL)
            seeing = (rows < mask.rows) & (lo < hi) & (lo < key_until) & (hi > key_from)
            partly = seeing & ((lo > key_from) | (hi < key_until))
            begin = tl.minimum(begin, tl.min(tl.where(seeing, rows, mask.rows), 0))
            end = tl.maximum(end, tl.max(tl.where(seeing, rows + 1, 0), 0))
            partly_until = tl.maximum(partly_until, tl.max(tl.where(partly, rows + 1, 0), 0))
            count += tl.sum(seeing.to(tl.int32), 0)
        # A row among them that sees none of the keys needs a mask as well.
        whole_from = tl.where(count == end - begin, partly_until, end)
    return begin, tl.minimum(tl.maximum(whole_from, begin), end), end


@triton.jit
def _key_gradient(
    dk,
    dv,
    k,
    v,
    keys,
    q,
    d_out,
    lse,
    delta,
    mask,
    batch,
    begin,
    end,
    q_row,
    d_row,
    softmax_scale,
    softcap,
    D: tl.constexpr,
    DV: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_DV: tl.constexpr,
    CAUSAL: tl.constexpr,
    MASKED: tl.constexpr,
    SOFTCAP: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Adds what the rows from `begin` to `end` of one head contribute to keys and values."""
    for start in range(begin, end, BLOCK_M):
        rows = start + tl.arange(0, BLOCK_M)
        exists = rows < end
        q_rows = load_rows(q, rows, end, q_row, D, BLOCK_D)
        top = tl.load(lse + rows, mask=exists, other=INF) * LOG2_E
        products = tl.dot(k, tl.trans(q_rows), input_precision=PRECISION)
        scores, slope = logits(products, softmax_scale, softcap, SOFTCAP)
        weights = tl.exp2(scores - top[None, :])
        if MASKED:
            lo, hi = bounds(mask, batch, rows, CAUSAL)
            weights = tl.where(seen(lo[None, :], hi[None, :], keys[:, None]), weights, 0.0)
        d_rows = load_rows(d_out, rows, end, d_row, DV, BLOCK_DV)
        dv = tl.dot(weights.to(d_rows.dtype), d_rows, dv, input_precision=PRECISION)
        row_delta = tl.load(delta + rows, mask=exists, other=0.0)
        d_weights = tl.dot(v, tl.trans(d_rows), input_precision=PRECISION)
        d_scores = weights * (d_weights - row_delta[None, :]) * slope
        dk = tl.dot(d_scores.to(q_rows.dtype), q_rows, dk, input_precision=PRECISION)
    return dk, dv


@triton.jit
def key_backward_kernel(
    q,
    k,
    v,
    d_out,
    lse,
    delta,
    mask,
    dk,
    dv,
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
    SOFTCAP: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """One program: **adds** to the accumulators of `BLOCK_N` keys of one KV head.

    It goes over all heads of the group, so that no other program touches these keys. Operands as
    for `query_backward_kernel`; `dk` and `dv` are float32.
    """
    kv_heads = heads // group
    batch = (tl.program_id(0) // kv_heads).to(tl.int64)
    kv_head = (tl.program_id(0) % kv_heads).to(tl.int64)
    key_from = tl.program_id(1) * BLOCK_N
    key_until = tl.minimum(key_from + BLOCK_N, mask.keys)
    keys = key_from + tl.arange(0, BLOCK_N)

    k_rows = load_rows(head_of(k, batch, kv_head), keys, mask.keys, k.row, D, BLOCK_D)
    v_rows = load_rows(head_of(v, batch, kv_head), keys, mask.keys, v.row, DV, BLOCK_DV)
    begin, whole_from, end = _row_range(mask, batch, key_from, key_until, CAUSAL)
    dk_sum = tl.zeros([BLOCK_N, BLOCK_D], tl.float32)
    dv_sum = tl.zeros([BLOCK_N, BLOCK_DV], tl.float32)
    for member in range(group):
        head = kv_head * group + member
        stats = (batch * heads + head) * mask.rows
        for WHOLE in tl.static_range(2):
            dk_sum, dv_sum = _key_gradient(
                dk_sum,
                dv_sum,
                k_rows,
                v_rows,
                keys,
                head_of(q, batch, head),
                head_of(d_out, batch, head),
                lse + stats,
                delta + stats,
                mask,
                batch,
                whole_from if WHOLE else begin,
                end if WHOLE else whole_from,
                q.row,
                d_out.row,
                softmax_scale,
                softcap,
                D,
                DV,
                BLOCK_M,
                BLOCK_D,
                BLOCK_DV,
                CAUSAL,
                not WHOLE,
                SOFTCAP,
                PRECISION,
            )
    if end > begin:
        dk_head, dv_head = head_of(dk, batch, kv_head), head_of(dv, batch, kv_head)
        dk_sum = dk_sum * softmax_scale
        dk_sum += load_rows(dk_head, keys, mask.keys, dk.row, D, BLOCK_D)
        dv_sum += load_rows(dv_head, keys, mask.keys, dv.row, DV, BLOCK_DV)
        store_rows(dk_head, dk_sum, keys, mask.keys, dk.row, D, BLOCK_D)
        store_rows(dv_head, dv_sum, keys, mask.keys, dv.row, DV, BLOCK_DV)
