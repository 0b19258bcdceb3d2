"""Attention of one tile over one range of keys, as the formula says. Slow and plain.

Legend: `B` batch, `H` heads, `Hk` KV heads, `G = H / Hk`, `T` rows of the tile, `N` keys, `D` head
dim, `Dv` head dim of the values. Everything is computed in max(float32, dtype), and the whole
`T x N` matrix exists.
"""

from __future__ import annotations

import math
from typing import Protocol

import torch

from offload.ops.intervals import Part


class PartKernels(Protocol):
    """Attention of one tile over one range of keys. Contract: the functions below."""

    def forward(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        part: Part,
        softmax_scale: float,
        softcap: float,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns out and lse over the keys of `part` alone."""
        ...

    def backward(
        self,
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
        """Returns dq, dk and dv through the keys of `part`."""
        ...


def wide_dtype(x: torch.Tensor) -> torch.dtype:
    """Returns the dtype that sums over `x` are kept in: max(float32, dtype)."""
    return torch.promote_types(x.dtype, torch.float32)


def forward(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    part: Part,
    softmax_scale: float,
    softcap: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Computes the tile's output over the keys of `part` alone.

    Args:
        q: `[B, H, T, D]`.
        k: `[B, Hk, N, D]`, the keys of `part`.
        v: `[B, Hk, N, Dv]`.
        part: what the rows see of the keys.
        softmax_scale: factor of the logits.
        softcap: bound of the logits, 0 for none.

    Returns:
        `out` `[B, H, T, Dv]` and `lse` `[B, H, T]`, the natural logarithm of the sum of the
        exponentials, both in max(float32, dtype). A row without keys has out 0 and lse -inf.
    """
    q, k, v = _grouped(q, k), _wide(k), _wide(v)
    scores, _ = _scores(q, k, part, softmax_scale, softcap)
    lse = torch.logsumexp(scores, dim=-1)  # [B, Hk, G, T]
    weights = torch.exp(scores - _infinite_where_empty(lse).unsqueeze(-1))
    out = torch.einsum("bkgtn,bknd->bkgtd", weights, v)
    return out.flatten(1, 2), lse.flatten(1, 2)


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
    """Computes what the keys of `part` contribute to the gradients.

    Args:
        d_out: `[B, H, T, Dv]`.
        q: `[B, H, T, D]`.
        k: `[B, Hk, N, D]`, the keys of `part`.
        v: `[B, Hk, N, Dv]`.
        out: `[B, H, T, Dv]`, merged over all keys.
        lse: `[B, H, T]`, merged over all keys; infinite, of either sign, for a row without keys.
        part: what the rows see of the keys.
        softmax_scale: factor of the logits.
        softcap: bound of the logits, 0 for none.

    Returns:
        `dq` `[B, H, T, D]`, `dk` `[B, Hk, N, D]` and `dv` `[B, Hk, N, Dv]` in max(float32, dtype).
    """
    d_out, q, out, lse = (_grouped(x, k) for x in (d_out, q, out, lse))
    k, v = _wide(k), _wide(v)
    scores, slope = _scores(q, k, part, softmax_scale, softcap)
    weights = torch.exp(scores - _infinite_where_empty(lse).unsqueeze(-1))
    delta = (d_out * out).sum(-1, keepdim=True)
    d_weights = torch.einsum("bkgtd,bknd->bkgtn", d_out, v)
    d_scores = weights * (d_weights - delta) * slope
    dq = torch.einsum("bkgtn,bknd->bkgtd", d_scores, k).flatten(1, 2)
    dk = torch.einsum("bkgtn,bkgtd->bknd", d_scores, q)
    dv = torch.einsum("bkgtn,bkgtd->bknd", weights, d_out)
    return dq, dk, dv


def _scores(
    q: torch.Tensor, k: torch.Tensor, part: Part, softmax_scale: float, softcap: float
) -> tuple[torch.Tensor, torch.Tensor | float]:
    """Returns the masked logits `[B, Hk, G, T, N]`, and their derivative by the product of q, k."""
    scores = torch.einsum("bkgtd,bknd->bkgtn", q, k) * softmax_scale
    slope: torch.Tensor | float = softmax_scale
    if softcap > 0:
        bounded = torch.tanh(scores / softcap)
        scores, slope = softcap * bounded, softmax_scale * (1 - bounded * bounded)
    hidden = ~part.dense(q.device).unsqueeze(1)  # [B, 1, 1, T, N]
    return scores.masked_fill_(hidden, -math.inf), slope


def _infinite_where_empty(lse: torch.Tensor) -> torch.Tensor:
    """Makes `exp(scores - lse)` 0, not NaN, in rows without keys."""
    return lse.masked_fill(lse == -math.inf, math.inf)


def _grouped(x: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
    """Sorts the heads of `x` by the KV head they share: `[B, H, ...]` to `[B, Hk, G, ...]`."""
    return _wide(x).reshape(x.shape[0], k.shape[1], -1, *x.shape[2:])


def _wide(x: torch.Tensor) -> torch.Tensor:
    return x.to(wide_dtype(x))
