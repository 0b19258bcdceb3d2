"""How large the tiles of the Triton kernels are, by card, head dim and dtype.

A table rather than autotuning: the first step is not slower than the others, and the same card
always runs the same kernels. Every entry fits the card's shared memory and keeps its sums in
registers; `python -m bench kernels` compiles them all and says so. `python -m bench attention
--tune` measures others on the card at hand.
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


def shared_bytes(capability: tuple[int, int]) -> int:
    """Returns how much shared memory a program may take on a card.

    Args:
        capability: its compute capability.

    Returns:
        Bytes; of a card that is not known, what the smallest have.

    Source:
        CUDA C++ Programming Guide, technical specifications per compute capability.
    """
    if capability[0] in (9, 10):
        return 227 << 10
    return (163 if capability in ((8, 0), (8, 7)) else 99) << 10


def tiles_for(capability: tuple[int, int], head_dim: int, dtype: torch.dtype) -> KernelTiles:
    """Returns the tiles for a card.

    Args:
        capability: the card's compute capability.
        head_dim: the larger one of keys and values, at most 256.
        dtype: of queries, keys and values.

    Returns:
        The tiles.
    """
    size = next(size for size in (64, 128, 256) if head_dim <= size)
    if dtype == torch.float32:
        return _FLOAT32[size]
    if capability[0] in (9, 10):
        return (_HOPPER if capability[0] == 9 else _BLACKWELL)[size]
    if size == 256 and shared_bytes(capability) >= 163 << 10:
        return _AMPERE_256
    return _AMPERE[size]


_AMPERE = {
    64: KernelTiles(
        KernelTile(128, 64, 8, 3), KernelTile(128, 64, 8, 3), KernelTile(32, 128, 8, 2)
    ),
    128: KernelTiles(KernelTile(64, 64, 8, 2), KernelTile(64, 64, 8, 2), KernelTile(32, 64, 8, 2)),
    256: KernelTiles(KernelTile(64, 64, 8, 1), KernelTile(64, 32, 8, 1), KernelTile(32, 32, 8, 1)),
}
"""Of 8.0, and of all cards whose tensor cores are fed the same way: 8.x, 12.x."""

_AMPERE_256 = KernelTiles(
    KernelTile(64, 64, 8, 2), KernelTile(64, 64, 8, 1), KernelTile(32, 32, 8, 1)
)
"""Where there is the shared memory for it: 8.0 and 8.7."""

_HOPPER = {
    64: KernelTiles(
        KernelTile(128, 64, 4, 3), KernelTile(128, 64, 8, 3), KernelTile(32, 128, 8, 2)
    ),
    128: KernelTiles(
        KernelTile(128, 64, 8, 3), KernelTile(128, 64, 8, 2), KernelTile(32, 64, 8, 2)
    ),
    256: KernelTiles(KernelTile(64, 64, 8, 1), KernelTile(32, 64, 8, 1), KernelTile(32, 32, 8, 1)),
}

_BLACKWELL = {
    64: KernelTiles(
        KernelTile(128, 64, 4, 3), KernelTile(128, 64, 8, 3), KernelTile(64, 128, 8, 1)
    ),
    128: KernelTiles(
        KernelTile(128, 64, 8, 3), KernelTile(128, 64, 8, 2), KernelTile(32, 128, 8, 1)
    ),
    256: KernelTiles(KernelTile(64, 64, 8, 2), KernelTile(64, 64, 8, 1), KernelTile(32, 32, 8, 1)),
}
"""Of 10.x; cards of 12.x have Ampere's instructions and shared memory."""

_FLOAT32 = {
    64: KernelTiles(KernelTile(64, 32, 4, 2), KernelTile(32, 32, 4, 2), KernelTile(32, 32, 4, 2)),
    128: KernelTiles(KernelTile(32, 32, 4, 1), KernelTile(32, 16, 4, 1), KernelTile(16, 32, 4, 1)),
    256: KernelTiles(KernelTile(16, 16, 4, 1), KernelTile(16, 16, 4, 1), KernelTile(16, 16, 4, 1)),
}
"""Of float32, which is multiplied without tensor cores unless TF32 was asked for."""
