"""Compares methods on one training step: speed, memory, host traffic and correctness together."""

from __future__ import annotations

import argparse
from pathlib import Path

from bench import options, plot, runner
from bench.methods import METHODS, select_methods


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the options of `python -m bench step`."""
    options.add_run_arguments(parser, METHODS, steps=2)
    parser.add_argument("--lora", type=int, default=0, help="LoRA rank; 0 trains all weights")
    parser.add_argument("--lr", type=float, default=0.0, help="AdamW rate; 0 leaves weights alone")
    parser.add_argument("--plot", type=Path, help="write memory over the step as a PNG")


def run(args: argparse.Namespace) -> int:
    """Runs the command.

    Args:
        args: Parsed options.

    Returns:
        0 if every method finished right or ran out of memory, 1 if one failed or was wrong.
    """
    # The truth needs no speed, and recomputation takes less memory for the same numbers.
    plan = options.build_plan("step", args, select_methods(args.methods), truth="checkpoint")
    rows = runner.run_bench(plan, args, reference_order=list(METHODS))
    if args.plot:
        plot.draw_curves(rows, args.plot)
    return runner.exit_status(rows)
