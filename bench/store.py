"""Measures the tiers' parts: the arena beside other allocators, codecs, the disk, a card's bus."""

from __future__ import annotations

import argparse
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from rich.table import Table

from bench import rates, table
from bench.environment import begin_record
from bench.methods import spill_directory
from bench.runner import write_json
from offload.policy import parse_bytes

PARTS = ("allocation", "codec", "disk", "copy")

Row = dict[str, Any]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the options of `python -m bench store`."""
    parser.add_argument("--parts", default=",".join(PARTS), help="names with commas between")
    parser.add_argument("--device", default="cpu", help="cpu, cuda or cuda:N")
    parser.add_argument("--tensors", type=int, default=16, help="of the allocation part")
    parser.add_argument("--shape", default="70000x3072", help="of each, in bfloat16")
    parser.add_argument("--codec-bytes", type=parse_bytes, default=64 << 20)
    parser.add_argument("--disk", help="directory on the drive; default: build/bench")
    parser.add_argument("--disk-bytes", type=parse_bytes, default=1 << 30)
    parser.add_argument("--copy-bytes", type=parse_bytes, default=256 << 20)
    parser.add_argument("--rounds", type=int, default=9, help="timed runs of codecs and copies")
    parser.add_argument("--json", type=Path, help="append one JSON line per row to this file")


def run(args: argparse.Namespace) -> int:
    """Runs the command.

    Args:
        args: Parsed options.

    Returns:
        0.

    Raises:
        ValueError: If a part or the shape is not understood.
    """
    parts = args.parts.split(",")
    if unknown := set(parts) - set(PARTS):
        raise ValueError(f"--parts: expected some of {', '.join(PARTS)}, got {sorted(unknown)}.")
    device = torch.device(args.device)
    if device.type == "cuda" and device.index is None:
        device = torch.device("cuda", torch.cuda.current_device())
    shared = begin_record("store", args.device)
    rows = [shared | row for part in parts for row in _measure(part, args, device)]
    for part in parts:
        print_part([row for row in rows if row["what"] == part])
    if args.json:
        write_json(args.json, rows)
    return 0


def _measure(part: str, args: argparse.Namespace, device: torch.device) -> Iterable[Row]:
    if part == "allocation":
        return rates.measure_allocations(_bytes_of(args.shape), args.tensors, device)
    if part == "codec":
        return rates.measure_codecs(args.codec_bytes, device, args.rounds)
    if part == "disk":
        size = max(rates.DISK_TENSOR_BYTES, args.disk_bytes)
        return rates.measure_disk(spill_directory(args.disk), size - size % rates.DISK_TENSOR_BYTES)
    if device.type != "cuda":
        return []  # the host's own copies are memcpy
    return rates.measure_copies(args.copy_bytes, device, args.rounds)


def _bytes_of(shape: str) -> int:
    try:
        sizes = [int(size) for size in shape.split("x")]
    except ValueError:
        sizes = []
    if not sizes or min(sizes) < 1:
        raise ValueError(f"--shape: expected sizes such as 70000x3072, got {shape!r}.")
    return 2 * int(torch.tensor(sizes).prod())


def print_part(rows: list[Row]) -> None:
    """Prints the rows of one part as a table; nothing where it was not measured.

    Args:
        rows: Complete records of one part.
    """
    if not rows:
        return
    figures = [name for name in rows[0] if name in _FORMATS]
    title = f"{rows[0]['what']}: {rows[0]['device']}, {rows[0]['machine']['cores']} cores"
    shown = Table(title=title, title_justify="left")
    shown.add_column("")
    for name in figures:
        shown.add_column(_FORMATS[name][0], justify="right")
    for row in rows:
        cells = ("-" if row[name] is None else _FORMATS[name][1](row[name]) for name in figures)
        shown.add_row(row["name"], *cells)
    table.console().print(shown)


def _gib(size: int) -> str:
    return f"{size / 2**30:.2f}"


_FORMATS: dict[str, tuple[str, Any]] = {
    "tensors": ("tensors", str),
    "threads": ("threads", str),
    "bytes": ("GiB", _gib),
    "asked_bytes": ("asked GiB", _gib),
    "resident_bytes": ("taken GiB", _gib),
    "seconds": ("first s", "{:.3f}".format),
    "seconds_again": ("again s", "{:.4f}".format),
    "gb_per_s": ("GB/s", "{:.2f}".format),
    "best_gb_per_s": ("best GB/s", "{:.2f}".format),
    "write_gb_per_s": ("write GB/s", "{:.2f}".format),
    "read_gb_per_s": ("read GB/s", "{:.2f}".format),
    "d2h_gb_per_s": ("to the host GB/s", "{:.2f}".format),
    "h2d_gb_per_s": ("to the card GB/s", "{:.2f}".format),
}
