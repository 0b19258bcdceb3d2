"""Attention of one tile over one key block after another, by the kernels of this folder.

Unlike the other backends these kernels continue from what earlier keys left: nothing is merged
afterwards, and the gradients of keys are added where they belong.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable
from typing import NamedTuple

import torch

from offload.devices import capability_of, is_planned, type_of
from offload.ops._torch import unit_last_stride
from offload.ops.fused.operators import (
    INTERPRETED,
    backward_keys,
    backward_queries,
    delta_of,
    forward,
)
from offload.ops.intervals import MAX_CAUSAL_POSITION, causal_pattern
from offload.ops.key_blocks import SeenKeys

NO_WINDOW = MAX_CAUSAL_POSITION


def refusal(q: torch.Tensor, value_dim: int) -> str:
    """Says why the kernels do not take some tensors; empty where they do."""
    if q.dtype not in (torch.float32, torch.float16, torch.bfloat16):
        return f"dtype {q.dtype}"
    if max(q.shape[-1], value_dim) > 256:
        return f"a head dim of {max(q.shape[-1], value_dim)}, more than 256"
    if q.device.type == "meta" and not is_planned():
        return ""  # nothing is launched
    if INTERPRETED and q.device.type != "meta":
        return "" if q.dtype != torch.bfloat16 else "bfloat16 in Triton's interpreter"
    if type_of(q.device) != "cuda":
        return f"tensors on {q.device}"
    if torch.version.hip is not None:
        return "a card of AMD"
    major, minor = capability_of(q.device)
    if major < 8:
        return f"a card of compute capability {major}.{minor}, less than 8.0"
    return "" if is_planned() else _failure(q.device)


@functools.cache
def _failure(device: torch.device) -> str:
    """Tries the smallest kernel once: Triton may lack a C compiler or not fit the driver."""
    some = torch.zeros(1, 1, 1, 16, device=device)
    try:
        delta_of(some, some)
    except Exception as error:  # whatever it is, no kernel of ours runs here
        return f"a Triton that fails here ({type(error).__name__}: {error})"
    return ""


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
            if carry is None:
                return None
            return carry[0].to(out_dtype, copy=True), carry[1].to(torch.float32, copy=True)
        if carry is not None:
            carry = unit_last_stride(carry[0]), carry[1].to(torch.float32).contiguous()
        shape = (*q.shape[:3], blocks[0].v.shape[-1])
        lse = q.new_empty(shape[:3], dtype=torch.float32)
        out = q.new_empty(shape, dtype=out_dtype)
        # Between blocks the result is kept as it is computed, in float32.
        whole = out_dtype == torch.float32 or len(blocks) == 1
        between = out if whole else torch.empty_like(out, dtype=torch.float32)
        rows = _Rows.of(q, blocks)
        for keys in blocks:
            target = out if keys is blocks[-1] else between
            forward(
                q,
                keys.k,
                keys.v,
                rows.intervals,
                keys.part.begin,
                rows.first,
                rows.window_size,
                softmax_scale,
                softcap,
                *(carry or (None, None)),
                target,
                lse,
            )
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
        whole = q.dtype == torch.float32 or len(blocks) == 1
        between = dq if whole else torch.empty_like(q, dtype=torch.float32)
        rows = _Rows.of(q, blocks)
        carry = None
        for keys in blocks:
            arguments = (
                *(d_out, q, keys.k, keys.v, lse, delta),
                *(rows.intervals, keys.part.begin, rows.first, rows.window_size),
                *(softmax_scale, softcap),
            )
            backward_keys(*arguments, *keys.accumulators())
            target = dq if keys is blocks[-1] else between
            backward_queries(*arguments, carry, target)
            carry = target
        return dq


BACKEND = TritonBackend()


class _Rows(NamedTuple):
    """What the rows of a tile see, as the operators take it."""

    intervals: torch.Tensor | None
    first: int
    window_size: int

    @classmethod
    def of(cls, q: torch.Tensor, blocks: list[SeenKeys]) -> _Rows:
        intervals = blocks[0].part.intervals
        pattern = causal_pattern(intervals)
        if pattern is None:
            return cls(unit_last_stride(_on_device(intervals, q.device)), 0, NO_WINDOW)
        first, window_size = pattern
        return cls(None, first, NO_WINDOW if window_size is None else window_size)


def _on_device(intervals: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Copies intervals to a card without waiting for what it computes."""
    if intervals.device == device:
        return intervals
    if device.type == "meta":
        return intervals.to(device)
    return intervals.pin_memory().to(device, non_blocking=True)
