"""Lists the cards that plans know by name."""

from __future__ import annotations

import argparse

from offload.cli.show import show_table
from offload.planner.cards import CARDS

_COLUMNS = (
    "card",
    "capability",
    "GiB",
    "memory GB/s",
    "TFLOP/s",
    "products, attention, its backward",
    "link",
    "GB/s",
    "FLOPs a byte",
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares no options."""


def run(args: argparse.Namespace) -> int:
    """Prints the table.

    Args:
        args: nothing.

    Returns:
        0.
    """
    rows = [
        (
            card.name,
            ".".join(map(str, card.capability)),
            f"{card.memory_gib:g}",
            f"{card.memory_gbps:g}",
            f"{card.teraflops:g}",
            ", ".join(f"{share:.0%}" for share in card.efficiency),
            card.link,
            f"{card.link_gbps:g}",
            f"{card.balance:,.0f}",
        )
        for card in CARDS
    ]
    show_table(_COLUMNS, rows)
    return 0
