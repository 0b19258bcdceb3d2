"""Backends whose kernels know one range of keys: partial results are merged by their LSE.

Legend: `B` batch, `H` heads, `T` rows of a tile, `Dv` head dim of the values.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch

from offload.ops.key_blocks import SeenKeys
from offload.ops.reference_attention import PartKernels, wide_dtype


class MergingBackend:
    """A `backends.Backend` of kernels for one range of keys.

    Args:
        kernels: theirs.
    """

    def __init__(self, kernels: PartKernels) -> None:
        self._kernels = kernels

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
        merged, owned = carry, False
        for keys in seen:
            new = self._kernels.forward(q, keys.k, keys.v, keys.part, softmax_scale, softcap)
            merged = new if merged is None else _merge(*merged, *new, in_place=owned)
            owned = True
        if merged is None:
            return None
        copy = not owned  # of the carry
        return merged[0].to(out_dtype, copy=copy), merged[1].to(wide_dtype(q), copy=copy)

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
        dq: torch.Tensor | None = None
        for keys in seen:
            dq_part, *kv_parts = self._kernels.backward(
                d_out, q, keys.k, keys.v, out, lse, keys.part, softmax_scale, softcap
            )
            dq = dq_part.to(wide_dtype(q)) if dq is None else dq.add_(dq_part)
            for total, added in zip(keys.accumulators(), kv_parts, strict=True):
                total.add_(added)
        return None if dq is None else dq.to(q.dtype)


def merge(
    out_a: torch.Tensor, lse_a: torch.Tensor, out_b: torch.Tensor, lse_b: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Merges the attention of the same rows over two disjoint sets of keys.

    Args:
        out_a: `[B, H, T, Dv]` over the first keys.
        lse_a: `[B, H, T]` over the first keys; -inf in rows that see none of them.
        out_b: `[B, H, T, Dv]` over the second keys.
        lse_b: `[B, H, T]` over the second keys; -inf in rows that see none of them.

    Returns:
        `out` and `lse` over both, in max(float32, dtype); new tensors.
    """
    return _merge(out_a, lse_a, out_b, lse_b, in_place=False)


def _merge(
    out_a: torch.Tensor,
    lse_a: torch.Tensor,
    out_b: torch.Tensor,
    lse_b: torch.Tensor,
    *,
    in_place: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    """`merge`; with `in_place`, `out_a` may be overwritten by the result."""
    wide = torch.promote_types(torch.promote_types(out_a.dtype, out_b.dtype), torch.float32)
    # The weight of b is exp(lse_b) / (exp(lse_a) + exp(lse_b)); -inf - -inf would be NaN.
    weight = torch.sigmoid(lse_b - lse_a).masked_fill_(lse_b == -torch.inf, 0.0)
    weight = weight.unsqueeze(-1).to(wide)
    a, b = out_a.to(wide), out_b.to(wide)
    out = a.lerp_(b, weight) if in_place or a is not out_a else torch.lerp(a, b, weight)
    return out, torch.logaddexp(lse_a, lse_b)
