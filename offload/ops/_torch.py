"""Attention of one tile over one range of keys by the kernels that come with torch.

Legend: `B` batch, `H` heads, `Hk` KV heads, `G = H / Hk`, `T` rows of the tile, `N` keys, `D` head
dim, `Dv` head dim of the values.

`forward` and `backward` have the contract of `offload.ops.reference_attention`, except that `out`
and the gradients may come in q's dtype. Which kernel runs:

| device | dtype | rows see all keys, or square causal | anything else |
|---|---|---|---|
| CPU | all | flash for CPU | the same with an additive mask |
| CUDA, sm_80 and newer | float16, bfloat16 | flash | memory-efficient with an additive mask |
| CUDA | float32, float16 | memory-efficient | the same with an additive mask |

The rest (softcap, float64 on CUDA, head dims that a kernel does not take, other devices) goes
through the plain formula, some rows at a time.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch

from offload.devices import capability_of, type_of
from offload.ops import reference_attention
from offload.ops.intervals import Part, Visibility
from offload.ops.reference_attention import wide_dtype

SCORE_BYTES = 64 << 20
"""Most bytes of one `[B, H, rows, N]` matrix of the plain formula.

The backward holds about five of them at once: a third of a gigabyte beside a tile's own tensors, in
matrix products still large enough to fill a card.
"""

_aten = torch.ops.aten
_Tensors = tuple[torch.Tensor, ...]


class _Kernel(NamedTuple):
    """A pair of kernels; both ignore what they cannot be asked (`_choose` sees to that)."""

    forward: Callable[..., tuple[torch.Tensor, torch.Tensor]]
    backward: Callable[..., tuple[torch.Tensor, torch.Tensor, torch.Tensor]]


def unit_last_stride(x: torch.Tensor) -> torch.Tensor:
    """Returns `x` with last stride 1; the CPU kernels read any other wrongly without a word."""
    return x if x.stride(-1) == 1 else x.contiguous()


def forward(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    part: Part,
    softmax_scale: float,
    softcap: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Computes the tile's output over the keys of `part` alone; see `reference_attention`.

    The last stride of `q`, `k` and `v` is 1.
    """
    kernel = _choose(q, v, part, softcap)
    if kernel is None:
        return _math_forward(q, k, v, part, softmax_scale, softcap)
    out, lse = kernel.forward(q, k, v, part, softmax_scale)
    if part.has_blind_rows:
        blind = part.blind_rows(q.device)
        lse = lse.masked_fill(blind, -math.inf)  # the kernels say 0 or +inf
        if not _is_cpu(q):
            out = out.masked_fill(blind.unsqueeze(-1), 0.0)
    return out, lse


def backward(
    d_out: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    part: Part,
    softmax_scale: float,
    softcap: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Computes the gradients through the keys of `part`; see `reference_attention`.

    The last stride of all is 1. `d_out` and `out` have q's dtype, and `lse` is **+inf** in rows
    without keys: `exp(score - lse)` is then 0 in every kernel.
    """
    kernel = _choose(q, v, part, softcap)
    if kernel is None:
        return _math_backward(d_out, q, k, v, out, lse, part, softmax_scale, softcap)
    return kernel.backward(d_out, q, k, v, out, lse, part, softmax_scale)


def _choose(q: torch.Tensor, v: torch.Tensor, part: Part, softcap: float) -> _Kernel | None:
    """Returns the kernels for these tensors; None for the plain formula."""
    head_dim = q.shape[-1]
    if softcap > 0 or v.shape[-1] != head_dim:
        return None
    if _is_cpu(q):
        return _CPU
    if type_of(q.device) != "cuda" or torch.version.hip is not None or q.dtype == torch.float64:
        return None
    ampere = capability_of(q.device) >= (8, 0)
    if q.dtype == torch.bfloat16 and not ampere:
        return None
    # 192 < D <= 224: the flash backward asks for more shared memory than sm_86, sm_89, sm_120 have
    flash_takes = head_dim % 8 == 0 and (head_dim <= 192 or 224 < head_dim <= 256)
    if (
        ampere
        and q.dtype != torch.float32
        and flash_takes
        and part.visibility is not Visibility.PARTIAL
    ):
        return _FLASH
    # the memory-efficient kernels read 16 bytes at a time
    return _EFFICIENT if head_dim * q.element_size() % 16 == 0 else None


def _is_cpu(x: torch.Tensor) -> bool:
    return type_of(x.device) == "cpu"


def _cpu_forward(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, part: Part, softmax_scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    causal = part.visibility is Visibility.SQUARE_CAUSAL
    out, lse = _aten._scaled_dot_product_flash_attention_for_cpu(
        q, k, v, 0.0, causal, attn_mask=_bias(part, q), scale=softmax_scale
    )
    return out, lse


def _cpu_backward(
    d_out: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    part: Part,
    softmax_scale: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    causal = part.visibility is Visibility.SQUARE_CAUSAL
    dq, dk, dv = _aten._scaled_dot_product_flash_attention_for_cpu_backward(
        d_out, q, k, v, out, lse, 0.0, causal, attn_mask=_bias(part, q), scale=softmax_scale
    )
    return dq, dk, dv


def _flash_forward(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, part: Part, softmax_scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    causal = part.visibility is Visibility.SQUARE_CAUSAL
    out, lse, _, _, _ = _aten._flash_attention_forward(
        *_bshd(q, k, v),
        None,
        None,
        q.shape[2],
        k.shape[2],
        0.0,
        causal,
        False,
        scale=softmax_scale,
    )
    return out.transpose(1, 2), lse


def _flash_backward(
    d_out: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    part: Part,
    softmax_scale: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    causal = part.visibility is Visibility.SQUARE_CAUSAL
    # the random state is read for dropout only
    rng_state = torch.empty(2, dtype=torch.uint64, device=q.device)
    unused = torch.empty((), dtype=torch.uint64, device=q.device)
    dq, dk, dv = _aten._flash_attention_backward(
        *_bshd(d_out, q, k, v, out),
        lse.contiguous(),
        None,
        None,
        q.shape[2],
        k.shape[2],
        0.0,
        causal,
        rng_state,
        unused,
        scale=softmax_scale,
    )
    dq, dk, dv = _bshd(dq, dk, dv)
    return dq, dk, dv


def _efficient_forward(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, part: Part, softmax_scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    heads, rows = q.shape[1:3]
    out, lse, _, _, _, _ = _aten._efficient_attention_forward(
        *_bshd(q, per_head(k, heads), per_head(v, heads)),
        _bias(part, q, heads=heads, multiple=16),
        None,
        None,
        None,
        None,
        0.0,
        _efficient_mask_type(part),
        True,
        scale=softmax_scale,
    )
    return out.transpose(1, 2), lse[..., :rows]


def _efficient_backward(
    d_out: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    part: Part,
    softmax_scale: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    heads, rows = q.shape[1:3]
    kv_heads, keys = k.shape[1:3]
    padded = torch.nn.functional.pad(lse, (0, -rows % 32), value=math.inf)
    seed = torch.empty((), dtype=torch.int64, device=q.device)  # read for dropout only
    if q.is_meta:  # torch 2.13's meta function lacks an argument of this operator
        dq, dk, dv = (torch.empty_like(x) for x in (q, per_head(k, heads), per_head(v, heads)))
        return dq, _per_kv_head(dk, kv_heads), _per_kv_head(dv, kv_heads)
    dq, dk, dv, _ = _aten._efficient_attention_backward(
        *_bshd(d_out, q, per_head(k, heads), per_head(v, heads)),
        _bias(part, q, heads=heads, multiple=16),
        out.transpose(1, 2).contiguous(),  # the kernel takes no stride of its rows and assumes this
        None,
        None,
        rows,
        keys,
        padded.contiguous(),
        0.0,
        seed,
        seed,
        _efficient_mask_type(part),
        False,
        scale=softmax_scale,
    )
    dq, dk, dv = _bshd(dq, dk, dv)
    return dq, _per_kv_head(dk, kv_heads), _per_kv_head(dv, kv_heads)


def _math_forward(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    part: Part,
    softmax_scale: float,
    softcap: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    pieces = [
        reference_attention.forward(
            q[:, :, begin:end], k, v, part.slice_rows(begin, end), softmax_scale, softcap
        )
        for begin, end in _row_slices(q, k)
    ]
    outs, lses = zip(*pieces, strict=True)
    return torch.cat(outs, dim=2), torch.cat(lses, dim=2)


def _math_backward(
    d_out: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    part: Part,
    softmax_scale: float,
    softcap: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    dqs = []
    dk, dv = (torch.zeros_like(x, dtype=wide_dtype(x)) for x in (k, v))
    for begin, end in _row_slices(q, k):
        d_out_, q_, out_, lse_ = (x[:, :, begin:end] for x in (d_out, q, out, lse))
        rows = part.slice_rows(begin, end)
        dq_, dk_, dv_ = reference_attention.backward(
            d_out_, q_, k, v, out_, lse_, rows, softmax_scale, softcap
        )
        dqs.append(dq_)
        dk.add_(dk_)
        dv.add_(dv_)
    return torch.cat(dqs, dim=2), dk, dv


_CPU = _Kernel(_cpu_forward, _cpu_backward)
_FLASH = _Kernel(_flash_forward, _flash_backward)
_EFFICIENT = _Kernel(_efficient_forward, _efficient_backward)


def _row_slices(q: torch.Tensor, k: torch.Tensor) -> Iterator[tuple[int, int]]:
    """Splits the rows so that the scores of each piece stay within `SCORE_BYTES`."""
    batch, heads, rows, _ = q.shape
    row_bytes = batch * heads * k.shape[2] * max(4, q.element_size())
    step = max(1, SCORE_BYTES // row_bytes)
    return ((begin, min(begin + step, rows)) for begin in range(0, rows, step))


def _bias(
    part: Part, q: torch.Tensor, *, heads: int | None = None, multiple: int = 1
) -> torch.Tensor | None:
    """Returns 0 where a row sees a key and -inf elsewhere; None where the kernel needs no mask.

    Args:
        part: the keys and what the rows see of them.
        q: gives dtype and device, and the batch of an expanded mask.
        heads: number of heads to expand the mask to; None leaves `[B or 1, 1, T, N]`.
        multiple: rows begin at multiples of so many elements.

    Returns:
        `[B, heads, T, N]`, expanded without a copy.
    """
    if part.visibility is not Visibility.PARTIAL:
        return None
    seen = part.dense(q.device)
    keys = seen.shape[-1]
    bias = torch.zeros((*seen.shape[:-1], keys + -keys % multiple), dtype=q.dtype, device=q.device)[
        ..., :keys
    ]
    bias.masked_fill_(~seen, -math.inf)
    return bias if heads is None else bias.expand(q.shape[0], heads, -1, -1)


def _efficient_mask_type(part: Part) -> int:
    return 1 if part.visibility is Visibility.SQUARE_CAUSAL else 0


def _bshd(*tensors: torch.Tensor) -> _Tensors:
    """Swaps the dims of heads and rows: between torch's order and flash-attention's."""
    return tuple(x.transpose(1, 2) for x in tensors)


def per_head(x: torch.Tensor, heads: int) -> torch.Tensor:
    """Repeats each KV head for the heads that share it: `[B, H, N, D]`."""
    batch, kv_heads, keys, head_dim = x.shape
    if kv_heads == heads:
        return x
    groups = heads // kv_heads
    expanded = x.unsqueeze(2).expand(batch, kv_heads, groups, keys, head_dim)
    return expanded.reshape(batch, heads, keys, head_dim)


def _per_kv_head(x: torch.Tensor, kv_heads: int) -> torch.Tensor:
    """Sums over the heads that share a KV head, in max(float32, dtype): `[B, Hk, N, D]`."""
    if x.shape[1] == kv_heads:
        return x
    batch, _, keys, head_dim = x.shape
    return x.reshape(batch, kv_heads, -1, keys, head_dim).sum(2, dtype=wide_dtype(x))
