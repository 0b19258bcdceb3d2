"""The subcommands of `offload`."""

from __future__ import annotations

import sys
from typing import Any

from offload.cli import cards, doctor, plan
from offload.cli.commands import build_parser
from offload.errors import DoesNotFit

COMMANDS: dict[str, Any] = {"plan": plan, "doctor": doctor, "cards": cards}


def main(argv: list[str] | None = None) -> int:
    """Runs one command.

    Args:
        argv: arguments without the program's name; `sys.argv` when None.

    Returns:
        The exit status: 0; 1 where nothing fits, or the doctor finds something broken; 2 for wrong
        arguments, and where a package is missing that they need.
    """
    args = build_parser("offload", __doc__, COMMANDS).parse_args(argv)
    try:
        status: int = COMMANDS[args.command].run(args)
    except DoesNotFit as error:
        print(error, file=sys.stderr)
        return 1
    except (ValueError, TypeError, ModuleNotFoundError) as error:
        print(f"offload {args.command}: {error}", file=sys.stderr)
        return 2
    return status
