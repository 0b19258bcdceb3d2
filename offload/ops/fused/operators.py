"""The kernels of this folder as operators of torch, one launch each.

Legend: `B` batch, `H` heads, `Hk` KV heads, `T` rows of the tile, `N` keys, `D` head dim, `Dv` head
dim of the values.

As operators they are seen by whatever follows torch's dispatcher: counters of FLOPs, profilers,
fake tensors. They are below autograd; `attend` and `attend_backward` call them. They are defined
bare: `torch.library.custom_op` adds checks that take several times as long as a launch.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import triton

from offload.devices import capability_of
from offload.ops.flops import product_flops, register_flops
from offload.ops.fused.backward import delta_kernel, key_backward_kernel, query_backward_kernel
from offload.ops.fused.common import Mask, Operand
from offload.ops.fused.forward import forward_kernel
from offload.ops.fused.tiles import KernelTile, KernelTiles, tiles_for

INTERPRETED = not isinstance(forward_kernel, triton.runtime.JITFunction)
"""Whether the kernels run in Triton's interpreter, which takes tensors of the CPU."""

_INTERPRETER_TILE = KernelTile(32, 32, 1, 1)
_DELTA_TILE = KernelTile(64, 64, 4, 1)
_LIBRARY = torch.library.Library("offload", "FRAGMENT")  # type: ignore[no-untyped-call]


def _operator(name: str, mutates: tuple[str, ...] = ()) -> Callable[[Any], Any]:
    """Makes an operator of the package from a function on real tensors; it writes to `mutates`."""

    def register(function: Callable[..., Any]) -> Any:
        schema = torch.library.infer_schema(function, mutates_args=mutates)
        _LIBRARY.define(name + schema)  # type: ignore[no-untyped-call]
        for backend in ("CPU", "CUDA"):
            _LIBRARY.impl(name, function, backend)  # type: ignore[no-untyped-call]
        return getattr(torch.ops.offload, name).default

    return register


@_operator("fused_forward", mutates=("out", "lse"))
def forward(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    intervals: torch.Tensor | None,
    begin: int,
    first: int,
    window_size: int,
    softmax_scale: float,
    softcap: float,
    carry: torch.Tensor | None,
    carry_lse: torch.Tensor | None,
    out: torch.Tensor,
    lse: torch.Tensor,
) -> None:
    """Computes the tile's output over `carry` and some keys, into `out` and `lse`.

    Args:
        q: `[B, H, T, D]`, last stride 1, as all others.
        k: `[B, Hk, N, D]`.
        v: `[B, Hk, N, Dv]`.
        intervals: `[B or 1, T, 2]` int64 on q's device; None for a causal tile.
        begin: position of the first key.
        first: position of the first row; causal tiles only.
        window_size: number of keys that a row sees at most; causal tiles only.
        softmax_scale: factor of the logits.
        softcap: bound of the logits, 0 for none.
        carry: `[B, H, T, Dv]`, the output over other keys, or None; may be `out`.
        carry_lse: `[B, H, T]` float32, contiguous, that of `carry`; may be `lse`.
        out: `[B, H, T, Dv]`, any float dtype.
        lse: `[B, H, T]` float32, contiguous.
    """
    tile = kernel_tiles(q, v).forward
    _launch(
        forward_kernel,
        (q.shape[0] * q.shape[1], triton.cdiv(q.shape[2], tile.block_m)),
        tile,
        *(_operand(x) for x in (q, k, v)),
        _mask(q, k, intervals, begin, first, window_size),
        _operand(out if carry is None else carry),
        lse if carry_lse is None else carry_lse,
        _operand(out),
        lse,
        *_scalars(q, k, softmax_scale, softcap),
        **_options(q, v, softcap),
        BLOCK_M=tile.block_m,
        BLOCK_N=tile.block_n,
        CAUSAL=intervals is None,
        CARRY=carry is not None,
    )


@_operator("fused_delta")
def delta_of(d_out: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
    """Sums `d_out * out` over the head dim, which every gradient of a row needs.

    Args:
        d_out: `[B, H, T, Dv]`.
        out: `[B, H, T, Dv]`.

    Returns:
        `[B, H, T]` float32, contiguous.
    """
    batch, heads, rows, head_dim = out.shape
    delta = torch.empty(batch, heads, rows, dtype=torch.float32, device=out.device)
    _launch(
        delta_kernel,
        (batch * heads, triton.cdiv(rows, _DELTA_TILE.block_m)),
        _DELTA_TILE,
        _operand(d_out),
        _operand(out),
        delta,
        heads,
        rows,
        DV=head_dim,
        BLOCK_M=_DELTA_TILE.block_m,
        BLOCK_DV=padded(head_dim),
    )
    return delta


@_operator("fused_backward_queries", mutates=("dq",))
def backward_queries(
    d_out: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    lse: torch.Tensor,
    delta: torch.Tensor,
    intervals: torch.Tensor | None,
    begin: int,
    first: int,
    window_size: int,
    softmax_scale: float,
    softcap: float,
    carry: torch.Tensor | None,
    dq: torch.Tensor,
) -> None:
    """Computes the gradient of the queries through `carry` and some keys, into `dq`.

    Args:
        d_out: `[B, H, T, Dv]`.
        q: as for `forward`, and so are all that follow if nothing else is said.
        k: `[B, Hk, N, D]`.
        v: `[B, Hk, N, Dv]`.
        lse: `[B, H, T]` float32, contiguous, +inf in rows without keys.
        delta: of `delta_of`.
        intervals: `[B or 1, T, 2]` int64 or None.
        begin: position of the first key.
        first: position of the first row.
        window_size: number of keys.
        softmax_scale: factor of the logits.
        softcap: bound of the logits.
        carry: `[B, H, T, D]`, the gradient through other keys, or None; may be `dq`.
        dq: `[B, H, T, D]`, any float dtype.
    """
    tile = kernel_tiles(q, v).queries
    _launch(
        query_backward_kernel,
        (q.shape[0] * q.shape[1], triton.cdiv(q.shape[2], tile.block_m)),
        tile,
        *(_operand(x) for x in (q, k, v, d_out)),
        lse,
        delta,
        _mask(q, k, intervals, begin, first, window_size),
        _operand(dq if carry is None else carry),
        _operand(dq),
        *_scalars(q, k, softmax_scale, softcap),
        **_options(q, v, softcap),
        BLOCK_M=tile.block_m,
        BLOCK_N=tile.block_n,
        CAUSAL=intervals is None,
        CARRY=carry is not None,
    )


@_operator("fused_backward_keys", mutates=("dk", "dv"))
def backward_keys(
    d_out: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    lse: torch.Tensor,
    delta: torch.Tensor,
    intervals: torch.Tensor | None,
    begin: int,
    first: int,
    window_size: int,
    softmax_scale: float,
    softcap: float,
    dk: torch.Tensor,
    dv: torch.Tensor,
) -> None:
    """**Adds** the gradients of some keys and values to `dk` and `dv`.

    Args:
        d_out: as for `backward_queries`, and so are all that follow but the last two.
        q: `[B, H, T, D]`.
        k: `[B, Hk, N, D]`.
        v: `[B, Hk, N, Dv]`.
        lse: `[B, H, T]`.
        delta: `[B, H, T]`.
        intervals: `[B or 1, T, 2]` or None.
        begin: position of the first key.
        first: position of the first row.
        window_size: number of keys.
        softmax_scale: factor of the logits.
        softcap: bound of the logits.
        dk: `[B, Hk, N, D]` float32.
        dv: `[B, Hk, N, Dv]` float32.
    """
    tile = kernel_tiles(q, v).keys
    _launch(
        key_backward_kernel,
        (k.shape[0] * k.shape[1], triton.cdiv(k.shape[2], tile.block_n)),
        tile,
        *(_operand(x) for x in (q, k, v, d_out)),
        lse,
        delta,
        _mask(q, k, intervals, begin, first, window_size),
        _operand(dk),
        _operand(dv),
        *_scalars(q, k, softmax_scale, softcap),
        **_options(q, v, softcap),
        BLOCK_M=tile.block_m,
        BLOCK_N=tile.block_n,
        CAUSAL=intervals is None,
    )


# -- what compilers and counters see ---------------------------------------------------------------


def _writes_only_its_arguments(*arguments: Any) -> None:
    """What is left of a kernel that returns nothing where nothing is computed."""


for _name in ("fused_forward", "fused_backward_queries", "fused_backward_keys"):
    torch.library.register_fake(f"offload::{_name}", _writes_only_its_arguments, lib=_LIBRARY)


def _empty_delta(d_out: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
    return out.new_empty(out.shape[:3], dtype=torch.float32)


torch.library.register_fake("offload::fused_delta", _empty_delta, lib=_LIBRARY)


def _fused_forward_flops(q_shape: Any, k_shape: Any, v_shape: Any, *_: Any, **__: Any) -> int:
    return product_flops(q_shape, k_shape, v_shape, of_keys=1, of_values=1)


def _fused_backward_queries_flops(
    _d: Any, q_shape: Any, k_shape: Any, v_shape: Any, *_: Any, **__: Any
) -> int:
    return product_flops(q_shape, k_shape, v_shape, of_keys=2, of_values=1)


def _fused_backward_keys_flops(
    _d: Any, q_shape: Any, k_shape: Any, v_shape: Any, *_: Any, **__: Any
) -> int:
    return product_flops(q_shape, k_shape, v_shape, of_keys=2, of_values=2)


register_flops(torch.ops.offload.fused_forward, _fused_forward_flops)
register_flops(torch.ops.offload.fused_backward_queries, _fused_backward_queries_flops)
register_flops(torch.ops.offload.fused_backward_keys, _fused_backward_keys_flops)


# -- arguments of a launch -------------------------------------------------------------------------


def _launch(
    kernel: Callable[..., Any],
    grid: tuple[int, int],
    tile: KernelTile,
    *arguments: Any,
    **options: Any,
) -> None:
    if INTERPRETED:
        kernel[grid](*arguments, **options)  # type: ignore[index]
        return
    with torch.cuda.device(arguments[0].at.device):
        kernel[grid](*arguments, **options, **compiler_options(tile))  # type: ignore[index]


def compiler_options(tile: KernelTile) -> dict[str, Any]:
    """Returns how a kernel is compiled for a tile, whatever a release of Triton does by itself."""
    return {"num_warps": tile.warps, "num_stages": tile.stages, "enable_fp_fusion": True}


def _operand(x: torch.Tensor) -> Operand:
    batch, head, row, last = x.stride()
    assert last == 1 or x.shape[-1] <= 1
    return Operand(x, batch, head, row)


def _mask(
    q: torch.Tensor,
    k: torch.Tensor,
    intervals: torch.Tensor | None,
    begin: int,
    first: int,
    window_size: int,
) -> Mask:
    rows, keys = q.shape[2], k.shape[2]
    if intervals is None:
        return Mask(q, 0, 0, rows, keys, 0, first - begin, window_size)
    batch, row, last = intervals.stride()
    assert last == 1
    shared = 0 if intervals.shape[0] == 1 else batch
    return Mask(intervals, shared, row, rows, keys, begin, 0, 0)


def _scalars(
    q: torch.Tensor, k: torch.Tensor, softmax_scale: float, softcap: float
) -> tuple[int, int, float, float]:
    heads = q.shape[1]
    return heads, heads // k.shape[1], softmax_scale, softcap


def _options(q: torch.Tensor, v: torch.Tensor, softcap: float) -> dict[str, Any]:
    return {
        "D": q.shape[-1],
        "DV": v.shape[-1],
        "BLOCK_D": padded(q.shape[-1]),
        "BLOCK_DV": padded(v.shape[-1]),
        "SOFTCAP": softcap > 0,
        "PRECISION": precision_of(q.dtype),
    }


def precision_of(dtype: torch.dtype) -> str:
    """Returns how float32 is multiplied: "tf32" where torch was told so for its own products."""
    # Not `allow_tf32`, which raises once the newer setting was used.
    asked = dtype == torch.float32 and torch.backends.cuda.matmul.fp32_precision == "tf32"
    return "tf32" if asked else "ieee"


def padded(head_dim: int) -> int:
    """Returns how wide the kernels' matrices are: a power of two, at least 16."""
    return max(16, 1 << (head_dim - 1).bit_length())


def kernel_tiles(q: torch.Tensor, v: torch.Tensor) -> KernelTiles:
    """Returns the tiles with which the kernels run on these tensors."""
    if INTERPRETED:
        return KernelTiles(*[_INTERPRETER_TILE] * 3)
    return tiles_for(capability_of(q.device), max(q.shape[-1], v.shape[-1]), q.dtype)
