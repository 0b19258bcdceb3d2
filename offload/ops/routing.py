"""Where attention goes while a tile runs.

A layer calls `offload.attention` (or what an adapter or a function mode turns into it) with the
queries, keys and values of the tokens it was given. Outside the executor that is ordinary attention
over them. While the executor runs a tile, the call belongs to a longer sequence and goes to the
tile instead.
"""

from __future__ import annotations

import contextlib
import contextvars
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch


@dataclass(frozen=True, eq=False)
class AttentionCall:
    """What a layer asks of attention, for the tokens of a tile.

    Attributes:
        q: `[B, H, T, D]`.
        k: `[B, Hk, T, D]`.
        v: `[B, Hk, T, Dv]`.
        intervals: `[B or 1, T, 2]` in positions of the whole sequence; None for causal attention.
        window_size: number of keys a row sees at most, itself included, or None.
        softmax_scale: factor of the logits; None for `D ** -0.5`.
        softcap: bound of the logits; 0 for none.
    """

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    intervals: torch.Tensor | None = None
    window_size: int | None = None
    softmax_scale: float | None = None
    softcap: float = 0.0


AttentionRoute = Callable[[AttentionCall], torch.Tensor]
"""Takes the attention call of a tile and returns its output, `[B, H, T, Dv]`."""

_route: contextvars.ContextVar[AttentionRoute | None] = contextvars.ContextVar(
    "offload_attention_route", default=None
)


_lock = threading.Lock()
_in_use = 0
"""Routes set in any thread. Compilers cannot read a context variable, but they can this number."""


def current_route() -> AttentionRoute | None:
    """Returns what takes attention calls now; None outside a tile."""
    return _route.get() if _in_use else None


@contextlib.contextmanager
def routed(route: AttentionRoute | None) -> Iterator[None]:
    """Sends the attention calls of this thread to `route`; None sends them nowhere special."""
    token = _route.set(route)
    _count(1)
    try:
        yield
    finally:
        _count(-1)
        _route.reset(token)


def _count(change: int) -> None:
    global _in_use
    with _lock:
        _in_use += change
