"""A command line of subcommands, each a module with `add_arguments` and `run`."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from typing import Any


def build_parser(
    program: str, description: str | None, commands: Mapping[str, Any]
) -> argparse.ArgumentParser:
    """Returns a parser with one subparser for each command.

    Args:
        program: as it is called.
        description: of the program.
        commands: modules by name; the first line of a module's docstring is its summary.

    Returns:
        The parser; it leaves the command's name in `command`.
    """
    parser = argparse.ArgumentParser(prog=program, description=description)
    subparsers = parser.add_subparsers(dest="command", required=True)
    for name, module in commands.items():
        summary = (module.__doc__ or "").strip().splitlines()[0]
        subparser = subparsers.add_parser(name, help=summary, description=summary)
        module.add_arguments(subparser)
    return parser
