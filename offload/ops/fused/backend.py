"""Attention of one tile over one range of keys by the kernels of this folder.

Legend: `B` batch, `H` heads, `Hk` KV heads, `T` rows of the tile, `N` keys, `D` head dim, `Dv` head
dim of the values.

Unlike the other backends these kernels continue from what earlier keys left: nothing is merged
afterwards, and the gradients of keys are added where they belong.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import Any

import torch
import triton
from triton.runtime.interpreter import InterpretedFunction

from offload.ops._torch import unit_last_stride
from offload.ops.fused.backward import delta_kernel, key_backward_kernel, query_backward_kernel
from offload.ops.fused.common import Mask, Operand
from offload.ops.fused.forward import forward_kernel
from offload.ops.fused.tiles import KernelTile, KernelTiles, tiles_for
from offload.ops.intervals import Part, causal_pattern
from offload.ops.key_blocks import SeenKeys

NO_WINDOW = 1 << 30
INTERPRETED = isinstance(forward_kernel, InterpretedFunction)
"""Whether the kernels run in Triton's interpreter, which takes tensors of the CPU."""

_INTERPRETER_TILE = KernelTile(16, 32, 1, 1)


def refusal(q: torch.Tensor, value_dim: int) -> str:
    """Says why the kernels do not take some tensors; empty where they do."""
    if q.dtype not in (torch.float32, torch.float16, torch.bfloat16):
        return f"dtype {q.dtype}"
    if max(q.shape[-1], value_dim) > 256:
        return f"a head dim of {max(q.shape[-1], value_dim)}, more than 256"
    if INTERPRETED:
        return "" if q.dtype != torch.bfloat16 else "bfloat16 in Triton's interpreter"
    if q.device.type != "cuda":
        return f"tensors on {q.device}"
    major, minor = _capability(q.device)
    return "" if major >= 8 else f"a card of compute capability {major}.{minor}, less than 8.0"


class TritonBackend:
    """A `backends.Backend` that goes from one key block to the next without merging."""

    def attend(
        self,
        q: torch.Tensor,
        seen: Iterable[SeenKeys],
        softmax_scale: float,
        softcap: float,
        carry: tuple[torch.Tensor, torch.Tensor] | None,
        out_dtype: torch.dtype,
    ) -> tuple[torch.Tensor, torch.Tensor] | None:
        """Computes out and lse over the keys and the carry; None where there is neither."""
        blocks = list(seen)
        if not blocks:
            return None if carry is None else (carry[0].to(out_dtype, copy=True), carry[1].clone())
        if carry is not None:
            carry = unit_last_stride(carry[0]), carry[1].to(torch.float32).contiguous()
        shape = (*q.shape[:3], blocks[0].v.shape[-1])
        lse = q.new_empty(shape[:3], dtype=torch.float32)
        out = q.new_empty(shape, dtype=out_dtype)
        # Between blocks the result is kept as it is computed, in float32.
        whole = out_dtype == torch.float32 or len(blocks) == 1
        between = out if whole else torch.empty_like(out, dtype=torch.float32)
        for keys in blocks:
            target = out if keys is blocks[-1] else between
            forward(q, keys.k, keys.v, keys.part, softmax_scale, softcap, carry, target, lse)
            carry = target, lse
        return out, lse

    def backward(
        self,
        d_out: torch.Tensor,
        q: torch.Tensor,
        seen: Iterable[SeenKeys],
        out: torch.Tensor,
        lse: torch.Tensor,
        softmax_scale: float,
        softcap: float,
    ) -> torch.Tensor | None:
        """Adds to the keys' accumulators and returns dq; None where no key is seen."""
        blocks = list(seen)
        if not blocks:
            return None
        lse = lse.to(torch.float32).contiguous()
        delta = delta_of(d_out, out)
        dq = torch.empty_like(q)
        between = dq if len(blocks) == 1 else torch.empty_like(q, dtype=torch.float32)
        carry = None
        for keys in blocks:
            shared = (keys.part, softmax_scale, softcap)
            backward_keys(d_out, q, keys.k, keys.v, lse, delta, *shared, *keys.accumulators())
            target = dq if keys is blocks[-1] else between
            backward_queries(d_out, q, keys.k, keys.v, lse, delta, *shared, carry, target)
            carry = target
        return dq


BACKEND = TritonBackend()


def forward(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    part: Part,
    softmax_scale: float,
    softcap: float,
    carry: tuple[torch.Tensor, torch.Tensor] | None,
    out: torch.Tensor,
    lse: torch.Tensor,
) -> None:
    """Computes the tile's output over `carry` and the keys of `part`, into `out` and `lse`.

    Args:
        q: `[B, H, T, D]`, last stride 1, as all others.
        k: `[B, Hk, N, D]`.
        v: `[B, Hk, N, Dv]`.
        part: what the rows see of the keys.
        softmax_scale: factor of the logits.
        softcap: bound of the logits, 0 for none.
        carry: out and lse over other keys, or None; the lse contiguous float32.
        out: `[B, H, T, Dv]`, any float dtype; may be the carry's.
        lse: `[B, H, T]` float32, contiguous; may be the carry's.
    """
    tile = _tiles(q, v).forward
    mask, causal = _mask_of(part, q.device)
    carry_out, carry_lse = (out, lse) if carry is None else carry
    _launch(
        forward_kernel,
        (triton.cdiv(q.shape[2], tile.block_m), q.shape[0] * q.shape[1]),
        tile,
        q,
        *(_operand(x) for x in (q, k, v)),
        mask,
        _operand(carry_out),
        carry_lse,
        _operand(out),
        lse,
        *_scalars(q, k, softmax_scale, softcap),
        **_options(q, v, softcap),
        BLOCK_M=tile.block_m,
        BLOCK_N=tile.block_n,
        CAUSAL=causal,
        CARRY=carry is not None,
    )


def delta_of(d_out: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
    """Returns the sum over the head dim of `d_out * out`, `[B, H, T]` float32."""
    batch, heads, rows, head_dim = out.shape
    delta = torch.empty(batch, heads, rows, dtype=torch.float32, device=out.device)
    tile = KernelTile(64, 64, 4, 1)
    _launch(
        delta_kernel,
        (triton.cdiv(rows, tile.block_m), batch * heads),
        tile,
        out,
        _operand(d_out),
        _operand(out),
        delta,
        heads,
        rows,
        DV=head_dim,
        BLOCK_M=tile.block_m,
        BLOCK_DV=_padded(head_dim),
    )
    return delta


def backward_queries(
    d_out: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    lse: torch.Tensor,
    delta: torch.Tensor,
    part: Part,
    softmax_scale: float,
    softcap: float,
    carry: torch.Tensor | None,
    dq: torch.Tensor,
) -> None:
    """Computes the gradient of the queries through `carry` and the keys of `part`, into `dq`.

    Args:
        d_out: `[B, H, T, Dv]`.
        q: as for `forward`.
        k: as for `forward`.
        v: as for `forward`.
        lse: `[B, H, T]` float32, contiguous, +inf in rows without keys.
        delta: of `delta_of`.
        part: as for `forward`.
        softmax_scale: as for `forward`.
        softcap: as for `forward`.
        carry: `[B, H, T, D]`, the gradient through other keys, or None.
        dq: `[B, H, T, D]`; may be the carry.
    """
    tile = _tiles(q, v).queries
    mask, causal = _mask_of(part, q.device)
    _launch(
        query_backward_kernel,
        (triton.cdiv(q.shape[2], tile.block_m), q.shape[0] * q.shape[1]),
        tile,
        q,
        *(_operand(x) for x in (q, k, v, d_out)),
        lse,
        delta,
        mask,
        _operand(dq if carry is None else carry),
        _operand(dq),
        *_scalars(q, k, softmax_scale, softcap),
        **_options(q, v, softcap),
        BLOCK_M=tile.block_m,
        BLOCK_N=tile.block_n,
        CAUSAL=causal,
        CARRY=carry is not None,
    )


def backward_keys(
    d_out: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    lse: torch.Tensor,
    delta: torch.Tensor,
    part: Part,
    softmax_scale: float,
    softcap: float,
    dk: torch.Tensor,
    dv: torch.Tensor,
) -> None:
    """**Adds** the gradients of the keys and values of `part` to `dk` and `dv`.

    Args:
        d_out: as for `backward_queries`.
        q: as for `backward_queries`.
        k: as for `backward_queries`.
        v: as for `backward_queries`.
        lse: as for `backward_queries`.
        delta: as for `backward_queries`.
        part: as for `backward_queries`.
        softmax_scale: as for `backward_queries`.
        softcap: as for `backward_queries`.
        dk: `[B, Hk, N, D]` float32.
        dv: `[B, Hk, N, Dv]` float32.
    """
    tile = _tiles(q, v).keys
    mask, causal = _mask_of(part, q.device)
    _launch(
        key_backward_kernel,
        (triton.cdiv(k.shape[2], tile.block_n), k.shape[0] * k.shape[1]),
        tile,
        q,
        *(_operand(x) for x in (q, k, v, d_out)),
        lse,
        delta,
        mask,
        _operand(dk),
        _operand(dv),
        *_scalars(q, k, softmax_scale, softcap),
        **_options(q, v, softcap),
        BLOCK_M=tile.block_m,
        BLOCK_N=tile.block_n,
        CAUSAL=causal,
    )


def _launch(
    kernel: Callable[..., Any],
    grid: tuple[int, int],
    tile: KernelTile,
    on: torch.Tensor,
    *arguments: Any,
    **options: Any,
) -> None:
    if INTERPRETED:
        kernel[grid](*arguments, **options)
        return
    with torch.cuda.device(on.device):
        kernel[grid](*arguments, **options, num_warps=tile.warps, num_stages=tile.stages)


def _operand(x: torch.Tensor) -> Operand:
    batch, head, row, last = x.stride()
    assert last == 1
    return Operand(x, batch, head, row)


def _mask_of(part: Part, device: torch.device) -> tuple[Mask, bool]:
    rows, keys = part.intervals.shape[1], part.end - part.begin
    pattern = causal_pattern(part.intervals)
    if pattern is not None:
        first, window = pattern
        at = torch.empty(0, dtype=torch.int64, device=device)
        window = NO_WINDOW if window is None else window
        return Mask(at, 0, 0, rows, keys, part.begin, first - part.begin, window), True
    intervals = part.intervals.to(device)
    batch, row, last = intervals.stride()
    if last != 1:
        intervals = intervals.contiguous()
        batch, row, _ = intervals.stride()
    shared = 0 if intervals.shape[0] == 1 else batch
    return Mask(intervals, shared, row, rows, keys, part.begin, 0, NO_WINDOW), False


def _scalars(
    q: torch.Tensor, k: torch.Tensor, softmax_scale: float, softcap: float
) -> tuple[int, int, float, float]:
    heads = q.shape[1]
    return heads, heads // k.shape[1], float(softmax_scale), float(softcap)


def _options(q: torch.Tensor, v: torch.Tensor, softcap: float) -> dict[str, Any]:
    head_dim, value_dim = q.shape[-1], v.shape[-1]
    exact = q.dtype != torch.float32 or not torch.backends.cuda.matmul.allow_tf32
    return {
        "D": head_dim,
        "DV": value_dim,
        "BLOCK_D": _padded(head_dim),
        "BLOCK_DV": _padded(value_dim),
        "SOFTCAP": softcap > 0,
        "PRECISION": "ieee" if exact else "tf32",
    }


def _padded(head_dim: int) -> int:
    return max(16, triton.next_power_of_2(head_dim))


def _tiles(q: torch.Tensor, v: torch.Tensor) -> KernelTiles:
    if INTERPRETED:
        return KernelTiles(*[_INTERPRETER_TILE] * 3)
    return tiles_for(_capability(q.device), max(q.shape[-1], v.shape[-1]), q.dtype)


@functools.cache
def _capability(device: torch.device) -> tuple[int, int]:
    return torch.cuda.get_device_capability(device)
