"""How large the tiles of the Triton kernels are, by card, head dim and dtype.

A table rather than autotuning: the first step is not slower than the others, and the same card
always runs the same kernels. `python -m bench attention --tune` measures another table.
"""

from __future__ import annotations

from typing import NamedTuple

import torch


class KernelTile(NamedTuple):
    """Rows and keys that a program works on at once, and how the compiler may lay it out."""

    block_m: int
    block_n: int
    warps: int
    stages: int


class KernelTiles(NamedTuple):
    """The tiles of the three kernels."""

    forward: KernelTile
    queries: KernelTile
    keys: KernelTile


SHARED_BYTES = {(8, 0): 163 << 10, (8, 6): 99 << 10, (8, 7): 163 << 10, (8, 9): 99 << 10}
"""Shared memory that a program may take, by compute capability; see also `shared_bytes`."""


def shared_bytes(capability: tuple[int, int]) -> int:
    """Returns how much shared memory a program may take on a card.

    Args:
        capability: its compute capability.

    Returns:
        Bytes.
    """
    if capability[0] in (9, 10, 11):
        return 227 << 10
    return SHARED_BYTES.get(capability, 99 << 10)


def tiles_for(capability: tuple[int, int], head_dim: int, dtype: torch.dtype) -> KernelTiles:
    """Returns the tiles for a card.

    Args:
        capability: the card's compute capability.
        head_dim: the larger one of keys and values.
        dtype: of queries, keys and values.

    Returns:
        The tiles.
    """
    if dtype == torch.float32:
        return _FLOAT32[_size(head_dim)]
    large = shared_bytes(capability) > 150 << 10
    return (_LARGE if large else _SMALL)[_size(head_dim)]


def _size(head_dim: int) -> int:
    return next(size for size in (64, 128, 256) if head_dim <= size)


_LARGE = {
    64: KernelTiles(
        KernelTile(128, 64, 4, 3), KernelTile(128, 64, 4, 3), KernelTile(64, 128, 4, 3)
    ),
    128: KernelTiles(
        KernelTile(128, 64, 8, 3), KernelTile(128, 64, 8, 2), KernelTile(64, 128, 8, 2)
    ),
    256: KernelTiles(KernelTile(64, 64, 8, 2), KernelTile(64, 32, 8, 2), KernelTile(32, 64, 8, 1)),
}
_SMALL = {
    64: KernelTiles(KernelTile(128, 64, 4, 3), KernelTile(64, 64, 4, 3), KernelTile(64, 64, 4, 2)),
    128: KernelTiles(KernelTile(64, 64, 4, 2), KernelTile(64, 32, 4, 2), KernelTile(32, 64, 4, 2)),
    256: KernelTiles(KernelTile(64, 32, 8, 1), KernelTile(32, 32, 4, 1), KernelTile(32, 32, 4, 1)),
}
_FLOAT32 = {
    64: KernelTiles(KernelTile(64, 32, 4, 2), KernelTile(32, 32, 4, 2), KernelTile(32, 32, 4, 2)),
    128: KernelTiles(KernelTile(32, 32, 4, 1), KernelTile(32, 16, 4, 1), KernelTile(16, 32, 4, 1)),
    256: KernelTiles(KernelTile(16, 16, 4, 1), KernelTile(16, 16, 4, 1), KernelTile(16, 16, 4, 1)),
}
