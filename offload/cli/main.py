"""The subcommands of `offload`."""

from __future__ import annotations

import argparse
import sys
from typing import Any

from offload.cli import cards, doctor, plan
from offload.errors import DoesNotFit

COMMANDS: dict[str, Any] = {"plan": plan, "doctor": doctor, "cards": cards}


def build_parser() -> argparse.ArgumentParser:
    """Returns the parser with one subparser for each command."""
    parser = argparse.ArgumentParser(prog="offload", description=__doc__)
    subparsers = parser.add_subparsers(dest="command", required=True)
    for name, module in COMMANDS.items():
        summary = (module.__doc__ or "").strip().splitlines()[0]
        subparser = subparsers.add_parser(name, help=summary, description=summary)
        module.add_arguments(subparser)
    return parser


def main(argv: list[str] | None = None) -> int:
    """Runs one command.

    Args:
        argv: arguments without the program's name; `sys.argv` when None.

    Returns:
        The exit status: 0; 1 where nothing fits, or the doctor finds something broken; 2 for wrong
        arguments, and where a package is missing that they need.
    """
    args = build_parser().parse_args(argv)
    try:
        status: int = COMMANDS[args.command].run(args)
    except DoesNotFit as error:
        print(error, file=sys.stderr)
        return 1
    except (ValueError, TypeError, ModuleNotFoundError) as error:
        print(f"offload {args.command}: {error}", file=sys.stderr)
        return 2
    return status
