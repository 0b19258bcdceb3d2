"""Measures attention alone beside other kernels: FLOP/s and memory, whole sequences and tiles."""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from rich.table import Table

from bench import table
from bench.attention_ways import WAYS, Case, measure, measure_tiles
from bench.environment import begin_record
from bench.kernels import KERNELS
from bench.runner import write_json
from bench.tune import tune

Row = dict[str, Any]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the options of `python -m bench attention`."""
    parser.add_argument("--lengths", default="4096,16384,65536,131072", help="tokens")
    parser.add_argument(
        "--tiles", default="1024,4096,8192", help="lengths of tiles, ours only; empty for none"
    )
    parser.add_argument("--ways", default=",".join(WAYS), help="names with commas between")
    parser.add_argument("--head-dims", default="64,128")
    parser.add_argument("--heads", type=int, default=32)
    parser.add_argument("--groups", default="1,4", help="query heads for each KV head")
    parser.add_argument("--dtype", default="bfloat16", choices=("bfloat16", "float16", "float32"))
    parser.add_argument("--device", default="cuda", help="cpu, cuda or cuda:N")
    parser.add_argument("--rounds", type=int, default=5, help="timed runs; the median counts")
    parser.add_argument(
        "--tune",
        action="store_true",
        help="measure tiles for the Triton kernels on this card instead, and print the best; takes "
        "minutes a case, so name one length, head dim and group",
    )
    parser.add_argument("--json", type=Path, help="append one JSON line per row to this file")


def run(args: argparse.Namespace) -> int:
    """Runs the command.

    Args:
        args: Parsed options.

    Returns:
        0.

    Raises:
        ValueError: If a way is not known, or tiles are to be tuned without a card.
    """
    ways = args.ways.split(",")
    if unknown := set(ways) - set(WAYS):
        raise ValueError(f"--ways: expected some of {', '.join(WAYS)}, got {sorted(unknown)}.")
    shared = begin_record("attention", args.device)
    if torch.device(args.device).type == "cuda":
        torch.cuda.set_device(args.device)  # the clock and the counters are those of this card
    measured: list[Row] = []
    for row in _tuned(args) if args.tune else _measured(args, ways):
        measured.append(row | shared)  # whose device is the card's name
        if args.json:
            write_json(args.json, measured[-1:])
    (print_tuned if args.tune else print_rows)(measured)
    return 0


def _cases(args: argparse.Namespace) -> Iterator[Case]:
    sizes = (map(int, text.split(",")) for text in (args.head_dims, args.groups, args.lengths))
    for head_dim, group, length in itertools.product(*sizes):
        if args.heads % group:
            raise ValueError(f"--groups: expected divisors of {args.heads} heads, got {group}.")
        yield Case(
            length=length,
            heads=args.heads,
            kv_heads=args.heads // group,
            head_dim=head_dim,
            dtype=args.dtype,
            device=args.device,
        )


def _measured(args: argparse.Namespace, ways: list[str]) -> Iterator[Row]:
    tiles = [int(tile) for tile in args.tiles.split(",") if tile]
    for case in _cases(args):
        for name in ways:
            yield measure(case, name, args.rounds)
        for tile in tiles:
            if tile < case.length:
                yield measure_tiles(case, tile, args.rounds)


def _tuned(args: argparse.Namespace) -> Iterator[Row]:
    if not torch.device(args.device).type == "cuda" or not torch.cuda.is_available():
        raise ValueError(f"--tune: expected a card to measure on, got --device {args.device}.")
    for case in _cases(args):
        yield from tune(case, args.rounds)


def _cell(row: Row, name: str, form: str, unit: float) -> str:
    return "-" if row.get(name) is None else format(row[name] / unit, form)


def print_rows(rows: list[Row]) -> None:
    """Prints a table of what was measured.

    Args:
        rows: Complete records.
    """
    shown = Table(title=f"attention, causal, {rows[0]['device']}, {rows[0]['dtype']}")
    for column in ("tokens", "D", "heads", "way", "tile"):
        shown.add_column(column, justify="left" if column == "way" else "right")
    figures = {
        "forward TFLOP/s": ("forward_flops_per_s", ".3g", 1e12),
        "backward TFLOP/s": ("backward_flops_per_s", ".3g", 1e12),
        "forward MiB": ("forward_peak_bytes", ".1f", 2**20),
        "backward MiB": ("backward_peak_bytes", ".1f", 2**20),
        "besides": ("backward_extra", ".1%", 1),
        "error": ("error", ".1e", 1),
    }
    for column in (*figures, ""):
        shown.add_column(column, justify="right" if column else "left")
    for row in rows:
        shown.add_row(
            str(row["length"]),
            str(row["head_dim"]),
            f"{row['heads']}/{row['kv_heads']}",
            row["way"],
            str(row["tile"] or "-"),
            *(_cell(row, *figure) for figure in figures.values()),
            row["status"],
        )
    table.console().print(shown)


def print_tuned(rows: list[Row]) -> None:
    """Prints, for each case, the fastest tile of each kernel beside that of the table.

    Args:
        rows: Complete records of `tune`.
    """
    cases = itertools.groupby(rows, lambda row: (row["head_dim"], row["kv_heads"], row["length"]))
    for (head_dim, kv_heads, length), group in cases:
        found = list(group)
        for kernel in KERNELS:
            runs = [row for row in found if row["kernel"] == kernel and row["seconds"]]
            if not runs:
                continue
            best = min(runs, key=lambda row: row["seconds"])
            present = next((row for row in runs if row["in_table"]), None)
            ratio = "" if present is None else f", {best['seconds'] / present['seconds']:.2f} of"
            table.console().print(
                f"D {head_dim}, {kv_heads} KV heads, {length} tokens, {kernel}: {best['tile']}"
                f"{ratio} the time of the table's"
            )
