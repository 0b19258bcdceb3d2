"""Key blocks: the keys and values of a tile, and which of them the rows of a tile see.

Legend: `B` batch, `T` rows of a tile, `N` keys of a block, `Hk` KV heads, `D` head dim, `Dv` head
dim of the values.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from offload.ops._torch import unit_last_stride
from offload.ops.intervals import Part, Rows
from offload.ops.reference_attention import wide_dtype


@dataclass(eq=False)
class KeyBlock:
    """Keys and values of neighbouring tokens, and the accumulators of their gradients.

    Holds the tensors it is given, by reference; only keys or values whose last stride is not 1 are
    copied, once, since no kernel reads them. `attend_backward` allocates `dk` and `dv` when a row
    first sees the block. They stay None for a block that no row sees: its gradients are 0.

    Args:
        k: `[B, Hk, N, D]`.
        v: `[B, Hk, N, Dv]`.
        start: position of the first key in the sequence.
        dk: `[B, Hk, N, D]`, max(float32, dtype of k), or None.
        dv: `[B, Hk, N, Dv]`, max(float32, dtype of v), or None.
    """

    k: torch.Tensor
    v: torch.Tensor
    start: int
    dk: torch.Tensor | None = None
    dv: torch.Tensor | None = None

    def __post_init__(self) -> None:
        self.k, self.v = unit_last_stride(self.k), unit_last_stride(self.v)

    @property
    def end(self) -> int:
        """Position behind the last key."""
        return self.start + self.k.shape[2]

    def accumulators(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns `dk` and `dv`, made of zeros where they are None."""
        if self.dk is None:
            self.dk = self.k.new_zeros(self.k.shape, dtype=wide_dtype(self.k))
        if self.dv is None:
            self.dv = self.v.new_zeros(self.v.shape, dtype=wide_dtype(self.v))
        return self.dk, self.dv


class SeenKeys(NamedTuple):
    """The keys of a block that some row of a tile may see.

    Attributes:
        block: the block.
        part: what the rows see of them.
        k: `[B, Hk, N, D]`, of these keys alone; last stride 1.
        v: `[B, Hk, N, Dv]`.
    """

    block: KeyBlock
    part: Part
    k: torch.Tensor
    v: torch.Tensor

    def accumulators(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns the accumulators of these keys, views of the block's."""
        begin, end = self.part.begin - self.block.start, self.part.end - self.block.start
        dk, dv = self.block.accumulators()
        return dk[:, :, begin:end], dv[:, :, begin:end]


def seen_keys(blocks: Sequence[KeyBlock], intervals: torch.Tensor) -> Iterator[SeenKeys]:
    """Yields of each block the keys that a row sees; nothing of a block that no row sees.

    Args:
        blocks: disjoint blocks of keys, in any order.
        intervals: `[B or 1, T, 2]`.

    Yields:
        The keys, block by block.
    """
    rows = Rows(intervals)
    for block in blocks:
        part = rows.part(block.start, block.end)
        if part.begin < part.end:
            seen = slice(part.begin - block.start, part.end - block.start)
            k, v = (unit_last_stride(x[:, :, seen]) for x in (block.k, block.v))
            yield SeenKeys(block, part, k, v)
