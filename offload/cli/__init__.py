"""The command `offload`: plans without a card, and what a machine has and lacks."""

from offload.cli.main import main

__all__ = ["main"]
