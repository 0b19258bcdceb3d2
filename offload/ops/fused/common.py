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
        begin: position of the block's first key; not read if causal.
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
def bounds(mask, batch, rows, CAUSAL: tl.constexpr):
    """Returns lo and hi of rows, int32, within the block; those of rows beyond the tile are any."""
    if CAUSAL:
        hi = rows + (mask.first + 1)
        lo = hi - mask.window
    else:
        at = mask.at + batch * mask.batch + rows.to(tl.int64) * mask.row
        exists = rows < mask.rows
        # Any int64 may stand there: clamped before anything is subtracted or narrowed.
        end = mask.begin + mask.keys
        lo = tl.minimum(tl.maximum(tl.load(at, mask=exists, other=0), mask.begin), end)
        hi = tl.minimum(tl.maximum(tl.load(at + 1, mask=exists, other=0), mask.begin), end)
        lo = (lo - mask.begin).to(tl.int32)
        hi = (hi - mask.begin).to(tl.int32)
    return tl.maximum(lo, 0), tl.minimum(hi, mask.keys)


@triton.jit
def key_range(mask, rows, lo, hi, BLOCK_N: tl.constexpr):
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
def seen(lo, hi, keys):
    """Whether rows with these bounds see keys."""
    return (lo <= keys) & (keys < hi)


# -- rows of matrices ----------------------------------------------------------------------------


@triton.jit
def head_of(operand, batch, head):
    """Returns where a head's first row begins."""
    return operand.at + batch * operand.batch + head * operand.head


@triton.jit
def load_rows(at, rows, row_count, stride, D: tl.constexpr, BLOCK_D: tl.constexpr):
    """Loads `[rows, BLOCK_D]`; 0 beyond the last row and beyond the head dim."""
    dims = tl.arange(0, BLOCK_D)
    at = at + rows.to(tl.int64)[:, None] * stride + dims[None, :]
    exists = rows[:, None] < row_count
    if BLOCK_D != D:
        exists = exists & (dims[None, :] < D)
    return tl.load(at, mask=exists, other=0.0)


@triton.jit
def store_rows(at, values, rows, row_count, stride, D: tl.constexpr, BLOCK_D: tl.constexpr):
    """Stores `[rows, BLOCK_D]` in the dtype that is there; nothing beyond rows and head dim."""
    dims = tl.arange(0, BLOCK_D)
    at = at + rows.to(tl.int64)[:, None] * stride + dims[None, :]
    exists = (rows[:, None] < row_count) & (dims[None, :] < D)
    tl.store(at, values.to(at.dtype.element_ty), mask=exists)


@triton.jit
def logits(products, softmax_scale, softcap, SOFTCAP: tl.constexpr):
    """Returns the logits in units of log 2, and with a softcap their slope."""
    if SOFTCAP:
        x = products * (softmax_scale / softcap)
        # tanh by exp, right also where that overflows; near 0, where it cancels, by its series.
        bounded = 1 - 2 / (tl.exp2(x * (2 * LOG2_E)) + 1)
        y = x * x
        series = 2 / 15 + y * (-17 / 315 + y * (62 / 2835 - y * (1382 / 155925)))
        bounded = tl.where(y < 0.16, x * (1 + y * (-1 / 3 + y * series)), bounded)
        result, slope = bounded * (softcap * LOG2_E), 1 - bounded * bounded
    else:
        result, slope = products * (softmax_scale * LOG2_E), 1.0
    return result, slope
