"""Command line: one registry of subcommands, each a module with `add_arguments` and `run`."""

from __future__ import annotations

import argparse
import sys

from bench import attention, codec, forward, kernels, plan, plot, published, step, store

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
    parser = argparse.ArgumentParser(prog="python -m bench", description=__doc__)
    subparsers = parser.add_subparsers(dest="command", required=True)
    for name, module in COMMANDS.items():
        summary = (module.__doc__ or "").strip().splitlines()[0]
        subparser = subparsers.add_parser(name, help=summary, description=summary)
        module.add_arguments(subparser)
    return parser


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
