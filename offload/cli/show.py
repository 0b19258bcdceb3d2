"""Prints with rich where it is installed, plainly where it is not."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

_WIDTH_WITHOUT_TERMINAL = 160


def show(value: Any) -> None:
    """Prints what knows how to print itself, prettily if rich is there."""
    try:
        from rich.console import Console
    except ModuleNotFoundError:
        print(value)
        return
    width = None if sys.stdout.isatty() else _WIDTH_WITHOUT_TERMINAL
    Console(width=width, highlight=False).print(value)


def show_table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Prints a table.

    Args:
        columns: titles; numbers stand under all but the first to the right.
        rows: cells.
    """
    try:
        from rich.table import Table
    except ModuleNotFoundError:
        lines = [columns, *rows]
        widths = [max(len(line[at]) for line in lines) for at in range(len(columns))]
        for line in lines:
            cells = zip(line, widths, strict=True)
            print("  ".join(cell.ljust(width) for cell, width in cells).rstrip())
        return
    table = Table()
    for index, column in enumerate(columns):
        table.add_column(column, justify="right" if index and _are_numbers(rows, index) else "left")
    for row in rows:
        table.add_row(*row)
    show(table)


def _are_numbers(rows: Sequence[Sequence[str]], index: int) -> bool:
    return all(row[index][:1].isdigit() for row in rows if row[index])
