"""Fused attention of one tile over one key block, forward and backward, in Triton.

Legend: `B` batch, `H` heads, `Hk` KV heads, `G = H / Hk`, `T` rows of the tile, `N` keys of the
block, `D` head dim, `Dv` head dim of the values.

What a row sees is given as in `offload.ops.intervals`, in one of two forms (`CAUSAL`): bounds of a
causal tile are computed from its position, all others are read. Either way keys are counted from
the block's first. Keys that no row of a program sees are skipped, and those that all of its rows
see are not masked.

Logits are kept in units of log 2, so that `exp2` does it. Every product of an index and a stride is
made in 64 bits.

Source: the online softmax of Milakov and Gimelshein, arXiv:1805.02867, by tiles as in
flash-attention 2, arXiv:2307.08691. Here a program continues from what earlier key blocks left, and
the backward makes one pass for keys and one for queries, so that every sum has one owner and a
fixed order.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

LOG2_E = tl.constexpr(1.4426950408889634)
LN_2 = tl.constexpr(0.6931471805599453)
INF = tl.constexpr(float("inf"))
SCAN_ROWS = tl.constexpr(256)
"""Rows whose bounds a program of keys reads at once while it looks for those that see it."""


class Operand(NamedTuple):
    """A tensor `[B, heads, rows, dim]` whose last stride is 1, and its other strides."""

    at: Any
    batch: Any
    head: Any
    row: Any


class Mask(NamedTuple):
    """What the rows of a tile see of a key block.

    Attributes:
        at: intervals `[B or 1, T, 2]` int64 in positions of the sequence; not read if causal.
        batch, row: its strides; `batch` is 0 where all sequences share the intervals.
        rows, keys: T and N.
        begin: position of the block's first key.
        first: position of the tile's first row, less `begin`.
        window: number of keys that a row sees at most, itself included.
    """

    at: Any
    batch: Any
    row: Any
    rows: Any
    keys: Any
    begin: Any
    first: Any
    window: Any


# -- what is seen --------------------------------------------------------------------------------


@triton.jit
def _bounds(mask, batch, rows, CAUSAL: tl.constexpr):
    """Returns lo and hi of rows, int32, within the block; those of rows beyond the tile are any."""
    if CAUSAL:
        hi = rows + (mask.first + 1)
        lo = hi - mask.window
    else:
        at = mask.at + batch * mask.batch + rows.to(tl.int64) * mask.row
        exists = rows < mask.rows
        # Clamped before they are narrowed: positions are int64.
        lo = tl.load(at, mask=exists, other=0) - mask.begin
        hi = tl.load(at + 1, mask=exists, other=0) - mask.begin
        lo = tl.minimum(tl.maximum(lo, 0), mask.keys).to(tl.int32)
        hi = tl.minimum(tl.maximum(hi, 0), mask.keys).to(tl.int32)
    return tl.maximum(lo, 0), tl.minimum(hi, mask.keys)


@triton.jit
def _key_range(mask, rows, lo, hi, BLOCK_N: tl.constexpr):
    """Returns where the keys of some rows begin, where a mask becomes needed, and where they end.

    Keys from `begin` on are seen by every row, until the first row has seen enough.
    """
    exists = rows < mask.rows
    seeing = exists & (lo < hi)
    begin = tl.min(tl.where(seeing, lo, mask.keys), 0)
    end = tl.max(tl.where(seeing, hi, 0), 0)
    all_from = tl.max(tl.where(exists, lo, 0), 0)
    all_until = tl.min(tl.where(exists, hi, mask.keys), 0)
    whole = tl.maximum(all_until - begin, 0) // BLOCK_N * BLOCK_N
    masked_from = tl.where(all_from <= begin, begin + whole, begin)
    return begin, tl.minimum(masked_from, end), end


@triton.jit
def _row_range(mask, batch, key_from, key_until, CAUSAL: tl.constexpr):
    """Returns where the rows that see some of a program's keys begin, where no mask is needed any
    more, and where they end.
    """
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
            lo, hi = _bounds(mask, batch, rows, CAUSAL)
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
def _seen(lo, hi, keys):
    return (lo <= keys) & (keys < hi)


# -- rows of matrices ----------------------------------------------------------------------------


@triton.jit
def _head_of(operand, batch, head):
    return operand.at + batch * operand.batch + head * operand.head


@triton.jit
def _load_rows(at, rows, row_count, stride, D: tl.constexpr, BLOCK_D: tl.constexpr):
    """Loads `[rows, BLOCK_D]`; 0 beyond the last row and beyond the head dim."""
    dims = tl.arange(0, BLOCK_D)
    at = at + rows.to(tl.int64)[:, None] * stride + dims[None, :]
    exists = rows[:, None] < row_count
    if BLOCK_D != D:
        exists = exists & (dims[None, :] < D)
    return tl.load(at, mask=exists, other=0.0)


@triton.jit
def _store_rows(at, values, rows, row_count, stride, D: tl.constexpr, BLOCK_D: tl.constexpr):
    dims = tl.arange(0, BLOCK_D)
    at = at + rows.to(tl.int64)[:, None] * stride + dims[None, :]
    exists = (rows[:, None] < row_count) & (dims[None, :] < D)
    tl.store(at, values.to(at.dtype.element_ty), mask=exists)


@triton.jit
def _logits(products, softmax_scale, softcap, SOFTCAP: tl.constexpr):
    """Returns the logits in units of log 2, and with a softcap their slope."""
    if SOFTCAP:
        # tanh(x) = 1 - 2 / (exp(2 x) + 1), right also where exp overflows
        power = tl.exp2(products * (2 * LOG2_E * softmax_scale / softcap))
        bounded = 1 - 2 / (power + 1)
        return bounded * (softcap * LOG2_E), 1 - bounded * bounded
    return products * (softmax_scale * LOG2_E), 1.0


# -- forward -------------------------------------------------------------------------------------


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
        k_rows = _load_rows(k, keys, mask.keys, k_row, D, BLOCK_D)
        products = tl.dot(q, tl.trans(k_rows), input_precision=PRECISION)
        scores, _ = _logits(products, softmax_scale, softcap, SOFTCAP)
        if MASKED:
            scores = tl.where(_seen(lo[:, None], hi[:, None], keys[None, :]), scores, -INF)
        new_top = tl.maximum(top, tl.max(scores, 1))
        # A row that has seen nothing yet: -inf - 0 where -inf - -inf would be NaN.
        shift = tl.where(new_top == -INF, 0.0, new_top)
        weights = tl.exp2(scores - shift[:, None])
        decay = tl.exp2(top - shift)
        total = total * decay + tl.sum(weights, 1)
        v_rows = _load_rows(v, keys, mask.keys, v_row, DV, BLOCK_DV)
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
    row_block = tl.num_programs(0) - 1 - tl.program_id(0)
    batch = (tl.program_id(1) // heads).to(tl.int64)
    head = (tl.program_id(1) % heads).to(tl.int64)
    rows = row_block * BLOCK_M + tl.arange(0, BLOCK_M)
    exists = rows < mask.rows
    stats = (batch * heads + head) * mask.rows + rows

    q_rows = _load_rows(_head_of(q, batch, head), rows, mask.rows, q.row, D, BLOCK_D)
    k_head = _head_of(k, batch, head // group)
    v_head = _head_of(v, batch, head // group)
    if CARRY:
        carry_head = _head_of(carry, batch, head)
        acc = _load_rows(carry_head, rows, mask.rows, carry.row, DV, BLOCK_DV).to(tl.float32)
        top = tl.load(carry_lse + stats, mask=exists, other=-INF) * LOG2_E
        total = tl.where(top == -INF, 0.0, 1.0)
    else:
        acc = tl.zeros([BLOCK_M, BLOCK_DV], tl.float32)
        top = tl.full([BLOCK_M], -INF, tl.float32)
        total = tl.zeros([BLOCK_M], tl.float32)

    lo, hi = _bounds(mask, batch, rows, CAUSAL)
    begin, masked_from, end = _key_range(mask, rows, lo, hi, BLOCK_N)
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

    blind = total == 0
    total = tl.where(blind, 1.0, total)
    acc = acc / total[:, None]
    _store_rows(_head_of(out, batch, head), acc, rows, mask.rows, out.row, DV, BLOCK_DV)
    result = tl.where(blind, -INF, (top + tl.log2(total)) * LN_2)
    tl.store(lse + stats, result, mask=exists)


# -- backward ------------------------------------------------------------------------------------


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
    batch = (tl.program_id(1) // heads).to(tl.int64)
    head = (tl.program_id(1) % heads).to(tl.int64)
    rows = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    gradient = _load_rows(_head_of(d_out, batch, head), rows, row_count, d_out.row, DV, BLOCK_DV)
    value = _load_rows(_head_of(out, batch, head), rows, row_count, out.row, DV, BLOCK_DV)
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
        k_rows = _load_rows(k, keys, mask.keys, k_row, D, BLOCK_D)
        v_rows = _load_rows(v, keys, mask.keys, v_row, DV, BLOCK_DV)
        products = tl.dot(q, tl.trans(k_rows), input_precision=PRECISION)
        scores, slope = _logits(products, softmax_scale, softcap, SOFTCAP)
        weights = tl.exp2(scores - lse[:, None])
        if MASKED:
            weights = tl.where(_seen(lo[:, None], hi[:, None], keys[None, :]), weights, 0.0)
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
    row_block = tl.num_programs(0) - 1 - tl.program_id(0)
    batch = (tl.program_id(1) // heads).to(tl.int64)
    head = (tl.program_id(1) % heads).to(tl.int64)
    rows = row_block * BLOCK_M + tl.arange(0, BLOCK_M)
    exists = rows < mask.rows
    stats = (batch * heads + head) * mask.rows + rows

    q_rows = _load_rows(_head_of(q, batch, head), rows, mask.rows, q.row, D, BLOCK_D)
    d_head = _head_of(d_out, batch, head)
    d_rows = _load_rows(d_head, rows, mask.rows, d_out.row, DV, BLOCK_DV)
    # An lse of +inf makes weights 0: of rows without keys, and of those beyond the tile.
    top = tl.load(lse + stats, mask=exists, other=INF) * LOG2_E
    row_delta = tl.load(delta + stats, mask=exists, other=0.0)
    k_head = _head_of(k, batch, head // group)
    v_head = _head_of(v, batch, head // group)

    lo, hi = _bounds(mask, batch, rows, CAUSAL)
    begin, masked_from, end = _key_range(mask, rows, lo, hi, BLOCK_N)
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
        carry_head = _head_of(carry, batch, head)
        gradient += _load_rows(carry_head, rows, mask.rows, carry.row, D, BLOCK_D)
    _store_rows(_head_of(dq, batch, head), gradient, rows, mask.rows, dq.row, D, BLOCK_D)


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
        q_rows = _load_rows(q, rows, end, q_row, D, BLOCK_D)
        top = tl.load(lse + rows, mask=exists, other=INF) * LOG2_E
        products = tl.dot(k, tl.trans(q_rows), input_precision=PRECISION)
        scores, slope = _logits(products, softmax_scale, softcap, SOFTCAP)
        weights = tl.exp2(scores - top[None, :])
        if MASKED:
            lo, hi = _bounds(mask, batch, rows, CAUSAL)
            weights = tl.where(_seen(lo[None, :], hi[None, :], keys[:, None]), weights, 0.0)
        d_rows = _load_rows(d_out, rows, end, d_row, DV, BLOCK_DV)
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
    batch = (tl.program_id(1) // kv_heads).to(tl.int64)
    kv_head = (tl.program_id(1) % kv_heads).to(tl.int64)
    key_from = tl.program_id(0) * BLOCK_N
    key_until = tl.minimum(key_from + BLOCK_N, mask.keys)
    keys = key_from + tl.arange(0, BLOCK_N)

    k_rows = _load_rows(_head_of(k, batch, kv_head), keys, mask.keys, k.row, D, BLOCK_D)
    v_rows = _load_rows(_head_of(v, batch, kv_head), keys, mask.keys, v.row, DV, BLOCK_DV)
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
                _head_of(q, batch, head),
                _head_of(d_out, batch, head),
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
        dk_head, dv_head = _head_of(dk, batch, kv_head), _head_of(dv, batch, kv_head)
        dk_sum = dk_sum * softmax_scale
        dk_sum += _load_rows(dk_head, keys, mask.keys, dk.row, D, BLOCK_D)
        dv_sum += _load_rows(dv_head, keys, mask.keys, dv.row, DV, BLOCK_DV)
        _store_rows(dk_head, dk_sum, keys, mask.keys, dk.row, D, BLOCK_D)
        _store_rows(dv_head, dv_sum, keys, mask.keys, dv.row, DV, BLOCK_DV)
