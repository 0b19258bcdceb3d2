"""Puts predictions beside figures that others published: bytes a token, and the longest input."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rich.table import Table

from bench import models, table
from bench.environment import begin_record
from bench.runner import write_json

Row = dict[str, Any]

ALST = {
    "checkpoint, chunked loss": 473,
    "and layer inputs on the host": 205,
    "and layers by tiles": 119,
}
"""KB a token of Llama-3.1-8B on one H200, weights and Adam's state aside (arXiv 2506.13996).

Its tiles are of the MLP alone, and its attention's backward is flash-attention's.
"""
UNSLOTH_8B = {8: 2_972, 12: 21_848, 16: 40_724}
"""Longest input of Llama-3.1-8B, 4-bit LoRA of rank 32, by GiB of the card (its README, 2025)."""
CARDS_GIB = (8, 12, 16)
LORA_RANK = 32
WHOLE_LENGTHS, TILED_LENGTHS = (131_072, 262_144), (524_288, 1_048_576)
"""Of the two steps whose difference is what a token takes: so long that layers, not the head with
its gradient in float32, are where most is taken."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the options of `python -m bench published`."""
    parser.add_argument("--only", help="presets whose name holds this text")
    parser.add_argument("--json", type=Path, help="append one JSON line per figure to this file")


def run(args: argparse.Namespace) -> int:
    """Runs the command.

    Args:
        args: Parsed options.

    Returns:
        0.
    """
    from offload.planner.presets import PRESETS

    models.quiet_transformers()
    names = [name for name in PRESETS if not args.only or args.only in name]
    shared = begin_record("published", "cpu")
    slopes = [shared | row for row in token_bytes()]
    print_slopes(slopes)
    longest = [shared | row for name in names for row in longest_inputs(name)]
    print_longest(longest)
    if args.json:
        write_json(args.json, [*slopes, *longest])
    return 0


def token_bytes() -> Iterator[Row]:
    """Predicts what a token takes of a card in full fine-tuning of Llama-3.1-8B, optimizer aside.

    Yields:
        A row for each way to run it.
    """
    from offload.planner.cards import find_card
    from offload.planner.dry_run import Situation
    from offload.planner.outline import outline_of
    from offload.planner.prediction import Forecast
    from offload.policy import Policy

    chunk = 256
    ways = [
        Policy(mode="checkpoint", tier="device", loss_chunk_tokens=chunk),
        Policy(mode="checkpoint", tier="host", loss_chunk_tokens=chunk),
        Policy(mode="auto", tier="host", loss_chunk_tokens=chunk),
    ]
    situation = Situation(WHOLE_LENGTHS[0], 1, True, find_card("H200").kind, 512)
    forecast = Forecast(outline_of("llama-3.1-8b"), situation)
    for (name, published), policy in zip(ALST.items(), ways, strict=True):
        lengths = WHOLE_LENGTHS if policy.mode == "checkpoint" else TILED_LENGTHS
        parts = _grown(*(forecast.step(policy, tokens) for tokens in lengths), *lengths)
        yield {
            "what": "bytes a token",
            "way": name,
            "predicted_kb": sum(parts.values()),
            "published_kb": published,
            "purposes": parts,
        }


def _grown(short: Any, long: Any, few: int, many: int) -> dict[str, float]:
    """Returns KB a token by purpose, where activations take most.

    Gradients of weights are left out, as they are of the published figures, whose step hands them
    on: they are most at the end of backward, where activations are least.
    """
    from offload.planner.ledger import PURPOSES, Purpose

    of_weights = {Purpose.WEIGHTS, Purpose.GRADIENTS, Purpose.OPTIMIZER}
    kept = [index for index, purpose in enumerate(PURPOSES) if purpose not in of_weights]
    peaks = [
        max(([segment.peak[i] for i in kept] for segment in step.segments), key=sum)
        for step in (short, long)
    ]
    grown = zip((PURPOSES[i].value for i in kept), *peaks, strict=True)
    return {name: round((b - a) / (many - few) / 1e3, 1) for name, a, b in grown if b != a}


def longest_inputs(preset: str) -> Iterator[Row]:
    """Predicts the longest input of a preset on small cards, with LoRA and with 4-bit LoRA.

    Args:
        preset: Its name.

    Yields:
        A row for each of the two.
    """
    from offload.planner.cards import TYPICAL
    from offload.planner.choice import Budget, longest_tokens
    from offload.planner.dry_run import Situation
    from offload.planner.outline import outline_of
    from offload.planner.planning import CARD_ROUNDING
    from offload.planner.prediction import Forecast
    from offload.policy import Policy

    policy = Policy(mode="auto", tier="host", tile_tokens=512, loss_chunk_tokens=64)
    situation = Situation(2048, 1, True, TYPICAL.kind, CARD_ROUNDING)
    for four_bit in (False, True):
        outline = outline_of(preset, lora=LORA_RANK, four_bit=four_bit)
        forecast = Forecast(outline, situation, "adamw")
        row: Row = {"what": "longest input", "preset": preset, "four_bit": four_bit}
        for gib in CARDS_GIB:
            budget = Budget(device=gib << 30)
            tokens = longest_tokens(forecast, policy, budget.device_fits)
            host = forecast.step(policy, tokens).host_bytes if tokens else 0
            row |= {f"tokens_{gib}": tokens, f"host_bytes_{gib}": host}
        yield row


def print_slopes(rows: list[Row]) -> None:
    """Prints what a token takes.

    Args:
        rows: Of `token_bytes`.
    """
    shown = Table(title="Llama-3.1-8B, all weights: KB a token", title_justify="left")
    for column in ("way", "predicted", "published by ALST", "of which"):
        shown.add_column(column)
    for row in rows:
        parts = ", ".join(f"{name} {size:g}" for name, size in row["purposes"].items())
        shown.add_row(row["way"], f"{row['predicted_kb']:.0f}", str(row["published_kb"]), parts)
    table.console().print(shown)


def print_longest(rows: list[Row]) -> None:
    """Prints the longest inputs, with the host memory that they take.

    Args:
        rows: Of `longest_inputs`.
    """
    title = f"longest input predicted, LoRA of rank {LORA_RANK}; in brackets GiB on the host"
    shown = Table(title=title, title_justify="left")
    shown.add_column("model")
    for gib in CARDS_GIB:
        shown.add_column(f"{gib} GiB", justify="right")
    for row in rows:
        name = row["preset"] + (", 4 bits" if row["four_bit"] else "")
        cells = [(row[f"tokens_{gib}"], row[f"host_bytes_{gib}"]) for gib in CARDS_GIB]
        texts = [f"{tokens:,} ({host / 2**30:.0f})" if tokens else "-" for tokens, host in cells]
        shown.add_row(name, *texts)
    published = [f"{UNSLOTH_8B[gib]:,}" for gib in CARDS_GIB]
    shown.add_row("Unsloth, published: Llama-3.1-8B, 4 bits", *published)
    table.console().print(shown)
