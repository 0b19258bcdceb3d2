"""Command line: one registry of subcommands, each a module with `add_arguments` and `run`."""

from __future__ import annotations

import argparse
import sys

from bench import attention, codec, forward, kernels, plan, plot, published, step, store
from offload.cli import commands

COMMANDS = {
    "step": step,
    "forward": forward,
    "store": store,
    "attention": attention,
    "codec": codec,
    "kernels": kernels,
    "plan": plan,
    "published": published,
    "plot": plot,
}


def build_parser() -> argparse.ArgumentParser:
    """Returns the parser with one subparser for each registered command."""
    return commands.build_parser("python -m bench", __doc__, COMMANDS)


def main(argv: list[str] | None = None) -> int:
    """Runs one subcommand.

    Args:
        argv: Arguments without the program's name; `sys.argv` when None.

    Returns:
        The exit status: 0, or 2 when the arguments or the input packages are at fault.
    """
    parser = build_parser()
    args = parser.parse_args(argv)
    try:
        return COMMANDS[args.command].run(args)
    except (ValueError, ModuleNotFoundError) as error:
        print(f"bench {args.command}: {error}", file=sys.stderr)
        return 2
