"""Times a device that is here for about a second, so that predicted times are its own."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace

import torch

from offload.planner.cards import Card

SECONDS = 0.4
"""Of each of the two measurements."""
_SIDE = {"cuda": 4096, "cpu": 512}
_COPY_BYTES = 64 << 20


def calibrated(card: Card, device: torch.device, dtype: torch.dtype) -> Card:
    """Measures how fast a device multiplies, and how fast memory is copied to it.

    Args:
        card: what is known of it; its efficiencies stay.
        device: that is here.
        dtype: of the products.

    Returns:
        The card with the speeds that were measured.
    """
    side = _SIDE.get(device.type, 1024)
    a = torch.ones(side, side, dtype=dtype, device=device)
    product = torch.empty_like(a)
    per_product = _seconds_of(lambda: torch.mm(a, a, out=product), device)
    rate = 2 * side**3 / per_product / 1e12
    source = torch.empty(_COPY_BYTES, dtype=torch.uint8, pin_memory=device.type == "cuda")
    target = torch.empty(_COPY_BYTES, dtype=torch.uint8, device=device)
    per_copy = _seconds_of(lambda: target.copy_(source, non_blocking=True), device)
    return replace(
        card, teraflops=rate / card.efficiency[0], link_gbps=_COPY_BYTES / per_copy / 1e9
    )


def _seconds_of(action: Callable[[], object], device: torch.device) -> float:
    """Repeats an action for a while; returns the seconds of one."""
    _run(action, device, 1)
    once = _run(action, device, 1)
    count = max(1, min(1000, int(SECONDS / max(once, 1e-9))))
    return _run(action, device, count) / count


def _run(action: Callable[[], object], device: torch.device, count: int) -> float:
    synchronize = torch.cuda.synchronize if device.type == "cuda" else lambda _: None
    synchronize(device)
    begin = time.perf_counter()
    for _ in range(count):
        action()
    synchronize(device)
    return time.perf_counter() - begin
