"""Compares methods on a forward pass without gradients: the model's body, no head, no cache."""

from __future__ import annotations

import argparse

from bench import options, runner
from bench.methods import METHODS, select_methods

FORWARD_METHODS = [name for name, method in METHODS.items() if method.runs_forward]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the options of `python -m bench forward`."""
    options.add_run_arguments(parser, FORWARD_METHODS, steps=1)


def run(args: argparse.Namespace) -> int:
    """Runs the command; the first method's last hidden state is the others' reference.

    Args:
        args: Parsed options.

    Returns:
        0 if every method finished right or ran out of memory, 1 if one failed or was wrong.
    """
    names = select_methods(args.methods, FORWARD_METHODS)
    plan = options.build_plan("forward", args, names, truth="plain")
    return runner.exit_status(runner.run_bench(plan, args, reference_order=names))
