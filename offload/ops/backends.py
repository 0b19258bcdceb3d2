"""Which kernels compute the attention of a tile."""

from __future__ import annotations

import functools
import importlib.util
from collections.abc import Iterable
from typing import Protocol

import torch

from offload.devices import type_of
from offload.ops import _torch, reference_attention
from offload.ops.key_blocks import SeenKeys
from offload.ops.merging import MergingBackend

NAMES = ("auto", "triton", "torch", "reference")


class Backend(Protocol):
    """Attention of one tile over what its rows see of a sequence of keys."""

    def attend(
        self,
        q: torch.Tensor,
        seen: Iterable[SeenKeys],
        softmax_scale: float,
        softcap: float,
        carry: tuple[torch.Tensor, torch.Tensor] | None,
        out_dtype: torch.dtype,
    ) -> tuple[torch.Tensor, torch.Tensor] | None:
        """Returns out and lse over the keys and the carry, new; None where there is neither."""
        ...

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
        """Adds to the keys' accumulators and returns dq in q's dtype; None where no key is seen.

        `lse` is +inf in rows without keys; `d_out` and `out` have q's dtype. Last strides are 1.
        """
        ...


TORCH = MergingBackend(_torch)
REFERENCE = MergingBackend(reference_attention)


def choose_backend(function: str, name: str, q: torch.Tensor, value_dim: int) -> Backend:
    """The one place where a backend is picked.

    Args:
        function: the caller, for errors.
        name: one of `NAMES`; "auto" is triton on a card that it runs fast on, else torch.
        q: `[B, H, T, D]`.
        value_dim: head dim of the values.

    Returns:
        The backend.

    Raises:
        ValueError: if there is no backend of that name, or it does not take these tensors.
    """
    check_name(function, name)
    if name == "torch":
        return TORCH
    if name == "reference":
        return REFERENCE
    if name == "auto" and type_of(q.device) != "cuda":
        return TORCH
    refusal = _triton_refusal(q, value_dim)
    if not refusal:
        from offload.ops.fused import backend

        return backend.BACKEND
    if name == "auto":
        return TORCH
    raise ValueError(
        f"{function}: expected tensors that backend 'triton' takes, got {refusal}. Use 'auto'."
    )


def check_name(function: str, name: str) -> None:
    """Raises where there is no backend of that name; `function` names the caller."""
    if name not in NAMES:
        raise ValueError(
            f"{function}: expected backend 'auto', 'triton', 'torch' or 'reference', got {name!r}. "
            "Use 'auto'."
        )


def _triton_refusal(q: torch.Tensor, value_dim: int) -> str:
    if not _has_triton():
        return "an environment without the package triton"
    from offload.ops.fused import backend

    return backend.refusal(q, value_dim)


@functools.cache
def _has_triton() -> bool:
    return importlib.util.find_spec("triton") is not None
