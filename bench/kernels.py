"""Compiles the Triton kernels for cards that need not be there: registers, spills, memory."""

from __future__ import annotations

import argparse
import itertools
import os
import re
import subprocess
import tempfile
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import torch
from rich.table import Table

from bench import table
from bench.environment import begin_record
from bench.runner import write_json

CARDS = (80, 86, 89, 90, 100, 120)
HEAD_DIMS = (64, 80, 128, 256)
KERNELS = ("forward", "queries", "keys")
MASKS = ("causal", "intervals")
VARIANTS = {
    "usual": {},
    "softcap": {"SOFTCAP": True},
    "first": {"CARRY": False},
    "one": {"CARRY": False, "SOFTCAP": True},
}
"""How kernels are launched: over a further key block, with a softcap, over the first key block, and
for one token of one head, whose sizes of 1 Triton compiles in."""

_TENSOR_CORE_INSTRUCTION = r"\b(?:mma\.sync|wgmma\.mma|tcgen05\.mma)"

Row = dict[str, Any]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the options of `python -m bench kernels`."""

    def listed(values: tuple[object, ...]) -> str:
        return ",".join(map(str, values))

    parser.add_argument("--cards", default=listed(CARDS), help="compute capabilities times ten")
    parser.add_argument("--head-dims", default=listed(HEAD_DIMS))
    parser.add_argument("--dtypes", default="bfloat16,float16")
    parser.add_argument("--masks", default=listed(MASKS))
    parser.add_argument(
        "--variants",
        default="usual",
        help=f"some of {listed(tuple(VARIANTS))}; only usual ones must not spill",
    )
    parser.add_argument(
        "--strides", choices=("i32", "i64"), default="i64", help="how strides are passed"
    )
    parser.add_argument("--jobs", type=int, default=1, help="compilations at once")
    parser.add_argument("--json", type=Path, help="append one JSON line per row to this file")


def run(args: argparse.Namespace) -> int:
    """Runs the command.

    Args:
        args: Parsed options.

    Returns:
        0; 1 where a kernel spills, lacks tensor cores or does not fit.
    """
    os.environ.pop("TRITON_INTERPRET", None)  # read when the kernels are imported
    cases = list(
        itertools.product(
            map(int, args.cards.split(",")),
            map(int, args.head_dims.split(",")),
            args.dtypes.split(","),
            args.masks.split(","),
            KERNELS,
            args.variants.split(","),
            [args.strides],
        )
    )
    shared = begin_record("kernels", "cpu")
    rows = []
    for row in _compiled(cases, args.jobs):
        rows.append(shared | row)
        if args.json:
            write_json(args.json, rows[-1:])
    print_rows(rows)
    return int(any(complaints(row) for row in rows))


def _compiled(cases: list[tuple[Any, ...]], jobs: int) -> Iterator[Row]:
    if jobs == 1:
        yield from itertools.starmap(compile_entry, cases)
        return
    with ProcessPoolExecutor(jobs) as pool:
        yield from pool.map(compile_entry, *zip(*cases, strict=True))


def complaints(row: Row) -> list[str]:
    """Says what is wrong with a compiled entry of the tile table; empty if nothing is."""
    found = []
    if row["spilled_bytes"] and row["variant"] == "usual":
        found.append(f"spills {row['spilled_bytes']} B")
    if row["shared_bytes"] > row["shared_limit"]:
        found.append(f"takes {row['shared_bytes']} B of {row['shared_limit']} B shared memory")
    if row["tensor_core_dots"] != row["dots"] or not row["dots"] or not row["tensor_core_ptx"]:
        found.append(f"{row['dots'] - row['tensor_core_dots']} products without tensor cores")
    if row["narrow_products"]:
        found.append(f"32-bit products of strides: {row['narrow_products']}")
    return found


def compile_entry(
    card: int,
    head_dim: int,
    dtype: str,
    mask: str,
    kernel: str,
    variant: str = "usual",
    strides: str = "i64",
) -> Row:
    """Compiles a kernel with its entry of the tile table.

    Args:
        card: Compute capability times ten.
        head_dim: Of queries, keys and values.
        dtype: A name in torch.
        mask: One of `MASKS`.
        kernel: One of `KERNELS`.
        variant: One of `VARIANTS`.
        strides: Type of strides, "i32" or "i64".

    Returns:
        What was compiled and what came out.
    """
    from offload.ops.fused.tiles import shared_bytes, tiles_for

    capability = divmod(card, 10)
    element = getattr(torch, dtype)
    tile = getattr(tiles_for(capability, head_dim, element), kernel)
    compiled = compile_kernel(
        card, head_dim, element, mask == "causal", kernel, tile, variant, strides
    )
    registers, spilled = resources(compiled.asm["cubin"])
    # After Triton's passes, a product that tensor cores make has a layout of theirs.
    dots = re.findall(r"(?:tt\.dot |warp_group_dot |tc_gen5_mma ).*", compiled.asm["ttgir"])
    on_cores = [dot for dot in dots if "#mma" in dot or "tc_gen5_mma" in dot or "#tmem" in dot]
    return {
        "card": card,
        "kernel": kernel,
        "head_dim": head_dim,
        "dtype": dtype,
        "mask": mask,
        "variant": variant,
        "strides": strides,
        "tile": list(tile),
        "registers": registers,
        "spilled_bytes": spilled,
        "shared_bytes": compiled.metadata.shared,
        "shared_limit": shared_bytes(capability),
        "dots": len(dots),
        "tensor_core_dots": len(on_cores),
        "tensor_core_ptx": len(re.findall(_TENSOR_CORE_INSTRUCTION, compiled.asm["ptx"])),
        "narrow_products": narrow_products(compiled.asm["ttir"]),
    }


def compile_kernel(
    card: int,
    head_dim: int,
    dtype: torch.dtype,
    causal: bool,
    kernel: str,
    tile: Any,
    variant: str = "usual",
    strides: str = "i64",
) -> Any:
    """Compiles a kernel for a card.

    Args:
        card: Compute capability times ten.
        head_dim: Of queries, keys and values.
        dtype: Theirs.
        causal: Whether bounds are computed; else they are read.
        kernel: One of `KERNELS`.
        tile: A `KernelTile`.
        variant: One of `VARIANTS`.
        strides: Type of strides, "i32" or "i64".

    Returns:
        Triton's compiled kernel.
    """
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from offload.ops.fused import backward, forward
    from offload.ops.fused.operators import compiler_options, padded

    function: Any = {
        "forward": forward.forward_kernel,
        "queries": backward.query_backward_kernel,
        "keys": backward.key_backward_kernel,
    }[kernel]
    options = {
        "D": head_dim,
        "DV": head_dim,
        "BLOCK_M": tile.block_m,
        "BLOCK_N": tile.block_n,
        "BLOCK_D": padded(head_dim),
        "BLOCK_DV": padded(head_dim),
        "CAUSAL": causal,
        "CARRY": True,
        "SOFTCAP": False,
        "PRECISION": "ieee",
    } | VARIANTS[variant]
    source = ASTSource(
        function, *_specialized(function.arg_names, options, _types(dtype, strides), variant)
    )
    target = GPUTarget("cuda", card, 32)
    return triton.compile(source, target=target, options=compiler_options(tile))


def _specialized(
    names: list[str], options: Row, types: Row, variant: str
) -> tuple[Row, dict[tuple[int, ...], Any], dict[tuple[int, ...], Any]]:
    """Returns signature, constants and attributes as Triton makes them of a launch."""
    signature: Row = {}
    constants: dict[tuple[int, ...], Any] = {}
    attributes: dict[tuple[int, ...], Any] = {}
    aligned = [["tt.divisibility", 16]]
    for place, name in enumerate(names):
        if name in options:
            signature[name], constants[(place,)] = "constexpr", options[name]
            continue
        signature[name] = types[name]
        if name == "mask":
            attributes[(place, 0)] = aligned
        elif isinstance(types[name], tuple):
            attributes |= {(place, field): aligned for field in range(4)}
        elif types[name].startswith("*"):
            attributes[(place,)] = aligned
        if variant == "one" and name in ("heads", "group"):
            signature[name], constants[(place,)] = "constexpr", 1
        if variant == "one" and name == "mask":
            sizes = ("rows", "keys", "begin", "first", "window")
            signature[name] = types[name]._replace(**dict.fromkeys(sizes, "constexpr"))
            constants |= {(place, types[name]._fields.index(size)): 1 for size in sizes}
    return signature, constants, attributes


def _types(dtype: torch.dtype, strides: str) -> dict[str, Any]:
    """Returns the types of the kernels' arguments by name."""
    from offload.ops.fused.common import Mask, Operand

    element = {torch.bfloat16: "*bf16", torch.float16: "*fp16", torch.float32: "*fp32"}[dtype]
    return {
        **dict.fromkeys(("q", "k", "v", "d_out", "out"), Operand(element, *[strides] * 3)),
        **dict.fromkeys(("carry", "dq", "dk", "dv"), Operand("*fp32", *[strides] * 3)),
        "mask": Mask("*i64", strides, strides, "i32", "i32", "i64", "i32", "i32"),
        **dict.fromkeys(("lse", "delta", "carry_lse"), "*fp32"),
        **dict.fromkeys(("heads", "group"), "i32"),
        **dict.fromkeys(("softmax_scale", "softcap"), "fp32"),
    }


def narrow_products(ttir: str) -> list[str]:
    """Finds 32-bit products of strides in Triton's IR: offsets that overflow in a long sequence.

    Args:
        ttir: Text of the IR; strides are the arguments named `*.batch`, `*.head` and `*.row`.

    Returns:
        The lines.
    """
    strides = set(re.findall(r"(%[\w.]+\.(?:batch|head|row)): i\d+", ttir))
    if not strides:
        raise ValueError("narrow_products: expected arguments that are strides, found none.")
    found = []
    for line in ttir.splitlines():
        match = re.match(r"\s*(%[\w.]+) = ([\w.]+) (.*?) loc\(", line)
        if match is None or not strides & set(re.findall(r"%[\w.]+", match[3])):
            continue
        result, operation, rest = match.groups()
        if operation == "arith.muli" and rest.endswith((": i32", "xi32>")):
            found.append(line.strip())
        if operation in ("tt.splat", "tt.expand_dims", "tt.broadcast", "arith.trunci"):
            strides.add(result)  # the same value still
    return found


def resources(cubin: bytes) -> tuple[int, int]:
    """Returns registers of a thread, and bytes of its stack, which only spills take here."""
    import triton

    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        text = subprocess.run(
            [str(tool), "-res-usage", file.name], capture_output=True, text=True, check=True
        ).stdout
    match = re.search(r"REG:(\d+) STACK:(\d+)", text)
    if match is None:
        raise ValueError(f"cuobjdump: expected a line of resources, got {text!r}.")
    return int(match[1]), int(match[2])


def print_rows(rows: list[Row]) -> None:
    """Prints one line for each entry."""
    shown = Table(title="Triton kernels as compiled; tile: rows, keys, warps, stages")
    for column in (
        "card",
        "kernel",
        "D",
        "dtype",
        "mask",
        "variant",
        "tile",
        "registers",
        "shared",
        "",
    ):
        shown.add_column(column, justify="right" if column in ("D", "registers") else "left")
    for row in rows:
        shown.add_row(
            f"sm_{row['card']}",
            row["kernel"],
            str(row["head_dim"]),
            row["dtype"],
            row["mask"],
            row["variant"],
            ", ".join(map(str, row["tile"])),
            str(row["registers"]),
            f"{row['shared_bytes'] >> 10} of {row['shared_limit'] >> 10} KiB",
            "; ".join(complaints(row)) or "ok",
        )
    table.console().print(shown)
