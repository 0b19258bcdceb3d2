"""Says what a model takes at a length, how to run it, and what fits, without a card."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import torch

from offload.cli.show import show
from offload.planner import plan
from offload.planner.optimizers import NAMES
from offload.planner.presets import PRESETS
from offload.policy import CODECS

_DTYPES = ("bfloat16", "float16", "float32")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the options."""
    parser.add_argument(
        "model", help=f"a folder with a config.json of transformers, or {', '.join(PRESETS)}"
    )
    parser.add_argument("--tokens", type=int, required=True, help="of the one sequence")
    parser.add_argument("--batch", type=int, default=1, help="sequences")
    parser.add_argument("--card", help="by name, see `offload cards`")
    parser.add_argument(
        "--memory",
        help="of the card, as 8GB; or of several, as cuda:0=16GB,cuda:1=8GB",
    )
    parser.add_argument("--host", help="memory for activations on the host, as 24GB")
    parser.add_argument("--disk", help="what a drive may take of them, as 500GB")
    parser.add_argument("--lora", type=int, default=0, metavar="R", help="rank of LoRA adapters")
    parser.add_argument(
        "--4bit", dest="four_bit", action="store_true", help="hold frozen weights in 4 bits"
    )
    parser.add_argument("--codec", choices=CODECS, help="may be used where the host is too small")
    parser.add_argument("--optimizer", choices=NAMES, default="adamw")
    parser.add_argument("--dtype", choices=_DTYPES, help="of the weights")
    parser.add_argument("--no-train", action="store_true", help="a forward pass alone")
    parser.add_argument(
        "--max-tokens", action="store_true", help="find the longest sequence that fits as well"
    )
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("--plot", type=Path, metavar="PNG", help="draw memory over the step")


def run(args: argparse.Namespace) -> int:
    """Plans and prints.

    Args:
        args: parsed options.

    Returns:
        0.
    """
    made = plan(
        args.model,
        tokens=args.tokens,
        batch=args.batch,
        memory=_memory_of(args.memory),
        card=args.card,
        host=args.host,
        disk=args.disk,
        train=not args.no_train,
        optimizer=args.optimizer,
        dtype=getattr(torch, args.dtype) if args.dtype else None,
        lora=args.lora,
        four_bit=args.four_bit,
        codec=args.codec,
        longest=args.max_tokens,
    )
    if args.json:
        print(json.dumps(made.to_dict()))
    else:
        show(made)
    if args.plot is not None:
        from offload.cli.plot import draw

        draw(args, made)
    return 0


def _memory_of(text: str | None) -> str | dict[str, str | int] | None:
    """Reads one size, or a size for each of several cards."""
    if text is None or "=" not in text:
        return text
    pairs = [part.partition("=") for part in text.split(",")]
    return {name.strip(): size.strip() for name, _, size in pairs}
