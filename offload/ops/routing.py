"""Where attention goes while a tile runs.

A layer calls `offload.attention` (or what an adapter or a function mode turns into it) with the
queries, keys and values of the tokens it was given. Outside the executor that is ordinary attention
over them. While the executor runs a tile, the call belongs to a longer sequence and goes to the
tile instead.
"""

from __future__ import annotations

import contextlib
import contextvars
from collections.abc import Iterator
from typing import Protocol

import torch


class AttentionRoute(Protocol):
    """Takes the attention call of a tile.

    Args of the call: `q` `[B, H, T, D]`, `k` and `v` `[B, Hk, T, D]`, of the tile's own tokens;
    `intervals` `[B or 1, T, 2]` of the tile's rows in positions of the whole sequence, or None for
    causal attention; `window_size` the number of keys a row sees at most, itself included, or None;
    `softmax_scale`, or None for `D ** -0.5`; `softcap` of the logits, 0 for none. Returns
    `[B, H, T, D]`.
    """

    def __call__(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        *,
        intervals: torch.Tensor | None,
        window_size: int | None,
        softmax_scale: float | None,
        softcap: float,
    ) -> torch.Tensor:
        """Computes the tile's attention output."""
        ...


_route: contextvars.ContextVar[AttentionRoute | None] = contextvars.ContextVar(
    "offload_attention_route", default=None
)


def current_route() -> AttentionRoute | None:
    """Returns what takes attention calls now; None outside a tile."""
    return _route.get()


@contextlib.contextmanager
def routed(route: AttentionRoute | None) -> Iterator[None]:
    """Sends the attention calls of this thread to `route`; None sends them nowhere special."""
    token = _route.set(route)
    try:
        yield
    finally:
        _route.reset(token)
