"""Cards as a plan needs them: memory, speed, and how fast the host is behind them.

Figures are those of the makers where they state them, and measurements of others where they do not;
speeds of GeForce cards are with 32-bit sums, half of what the boxes say. Bandwidths are one way, in
the card's own slot. What of a card's peak a kernel reaches is an estimate.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from offload.devices import DeviceKind

GIB = 1 << 30
RESERVE_BYTES = 1 << 30
"""Of a card: CUDA's context, the libraries' workspaces, what a desktop takes."""
FRAGMENTATION = 0.04
"""Share of what is allocated that the allocator cannot use again."""


@dataclass(frozen=True)
class Card:
    """One card.

    Attributes:
        name: as people call it.
        capability: its compute capability.
        memory_gib: what CUDA can hand out.
        memory_gbps: bandwidth of its memory.
        teraflops: of dense 16-bit products with 32-bit sums.
        efficiency: share of that which products, attention and attention's backward reach.
        link: its slot.
        link_gbps: of copies to and from page-locked host memory, one way.
    """

    name: str
    capability: tuple[int, int]
    memory_gib: float
    memory_gbps: float
    teraflops: float
    efficiency: tuple[float, float, float]
    link: str
    link_gbps: float

    @property
    def memory_bytes(self) -> int:
        """What CUDA can hand out."""
        return int(self.memory_gib * GIB)

    @property
    def kind(self) -> DeviceKind:
        """What code asks about it."""
        return DeviceKind("cuda" if self.capability > (0, 0) else "cpu", self.capability)

    @property
    def balance(self) -> float:
        """FLOPs that the card does while one byte crosses the link."""
        return self.teraflops * self.efficiency[0] * 1e3 / self.link_gbps


_AMPERE = (0.85, 0.80, 0.65)
_BLACKWELL = (0.85, 0.85, 0.65)

CARDS = (
    Card("T4", (7, 5), 14.8, 320, 65, (0.37, 0.33, 0.25), "PCIe 3.0 x16", 12),
    Card("RTX 3060", (8, 6), 11.76, 360, 25.5, _AMPERE, "PCIe 4.0 x16", 25),
    Card("RTX 3070", (8, 6), 8.0, 448, 40.6, _AMPERE, "PCIe 4.0 x16", 25),
    Card("RTX 4060", (8, 9), 7.96, 272, 30.2, _AMPERE, "PCIe 4.0 x8", 12.8),
    Card("RTX 4060 Ti 16GB", (8, 9), 15.57, 288, 44.1, _AMPERE, "PCIe 4.0 x8", 12.8),
    Card("RTX 4070", (8, 9), 11.99, 504, 58.3, _AMPERE, "PCIe 4.0 x16", 25),
    Card("RTX 4080", (8, 9), 15.99, 717, 97.5, _AMPERE, "PCIe 4.0 x16", 25),
    Card("RTX 5060 Ti 16GB", (12, 0), 15.93, 448, 47.4, _BLACKWELL, "PCIe 5.0 x8", 27),
    Card("RTX 5070 Ti", (12, 0), 15.93, 896, 87.9, _BLACKWELL, "PCIe 5.0 x16", 55),
    Card("RTX 5080", (12, 0), 15.93, 960, 112.6, _BLACKWELL, "PCIe 5.0 x16", 55),
    Card("RTX A2000 12GB", (8, 6), 11.8, 288, 31.9, (0.75, 0.70, 0.60), "PCIe 4.0 x16", 25),
    Card("RTX A4000", (8, 6), 15.7, 448, 76.7, (0.75, 0.70, 0.60), "PCIe 4.0 x16", 25),
    Card("L4", (8, 9), 22.5, 300, 121, (0.60, 0.50, 0.40), "PCIe 4.0 x16", 25),
    Card("H200", (9, 0), 139, 4800, 989, (0.70, 0.37, 0.32), "PCIe 5.0 x16", 55),
)
"""Those whose figures are known here; `--memory` plans for any other."""

TYPICAL = Card("a card of the RTX 4060 class", (8, 9), 8.0, 272, 30.2, _AMPERE, "PCIe 4.0 x8", 12.8)
"""What times are predicted for where only a size is given."""

HOST = Card("the CPU", (0, 0), 0.0, 20, 0.1, (0.6, 0.5, 0.4), "memory", 10)
"""A processor of few cores, for models that run there: times are orders of magnitude."""


def find_card(name: str) -> Card:
    """Looks a card up.

    Args:
        name: as in `CARDS`; case, spaces, hyphens and maker's names do not matter, and a name that
            begins only one card's is enough.

    Returns:
        The card.

    Raises:
        ValueError: if there is none, or several.
    """
    wanted = _bare(name)
    exact = [card for card in CARDS if _bare(card.name) == wanted]
    found = exact or [card for card in CARDS if wanted and wanted in _bare(card.name)]
    if len(found) != 1:
        which = ", ".join(card.name for card in found or CARDS)
        raise ValueError(
            f"plan: expected one card, got {name!r}, which fits {'several' if found else 'none'}: "
            f"{which}. Name one of these, or give memory='8GB'."
        )
    return found[0]


def _bare(name: str) -> str:
    return re.sub(r"[^a-z0-9]|nvidia|geforce", "", name.lower())


def card_of_device(properties: Any, name: str) -> Card:
    """Describes a card that is here: by its name if that is known, else by its size.

    Args:
        properties: of `torch.cuda.get_device_properties`.
        name: its name.

    Returns:
        The card, with the memory that it really has.
    """
    known = next((card for card in CARDS if _bare(card.name) in _bare(name)), TYPICAL)
    fields = {**known.__dict__, "name": name, "memory_gib": properties.total_memory / GIB}
    fields["capability"] = (properties.major, properties.minor)
    return Card(**fields)
