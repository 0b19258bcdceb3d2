"""Measures other tiles than the table's for the Triton kernels, on the card at hand."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

import torch

from bench.attention_ways import Case, seconds
from bench.kernels import KERNELS, compile_kernel, resources

Row = dict[str, Any]

ROWS = {"forward": (64, 128), "queries": (32, 64, 128), "keys": (16, 32, 64)}
KEYS = {"forward": (32, 64, 128), "queries": (32, 64), "keys": (32, 64, 128)}


def tune(case: Case, rounds: int) -> Iterator[Row]:
    """Compiles and times the kernels with every tile that fits the card and does not spill.

    Args:
        case: On what; one key block, causal.
        rounds: Timed runs of each.

    Yields:
        A row for each kernel and tile; seconds None where it was not run.
    """
    from offload.devices import capability_of
    from offload.ops.fused.tiles import KernelTile, shared_bytes, tiles_for

    capability = capability_of(torch.device("cuda", torch.cuda.current_device()))
    dtype = getattr(torch, case.dtype)
    table = tiles_for(capability, case.head_dim, dtype)
    runs = _runs(case)
    for kernel in KERNELS:
        tried = itertools.product(ROWS[kernel], KEYS[kernel], (4, 8), (1, 2, 3))
        present = getattr(table, kernel)
        for tile in dict.fromkeys([present, *(KernelTile(*sizes) for sizes in tried)]):
            row = {**asdict(case), "kernel": kernel, "tile": list(tile), "seconds": None}
            row |= {"in_table": tile == present, "status": "ok"}
            try:
                card = 10 * capability[0] + capability[1]
                compiled = compile_kernel(card, case.head_dim, dtype, True, kernel, tile)
                row["spilled_bytes"] = resources(compiled.asm["cubin"])[1]
                row["shared_bytes"] = compiled.metadata.shared
                if not row["spilled_bytes"] and row["shared_bytes"] <= shared_bytes(capability):
                    with _tile_of(kernel, tile):
                        runs[kernel]()  # compiled anew, for the strides that these tensors have
                        row["seconds"] = seconds(case.device, runs[kernel], rounds)
            except Exception as error:  # Triton has its own for what does not compile or fit
                row["status"] = f"{type(error).__name__}: {error}"[:200]
            yield row


def _runs(case: Case) -> dict[str, Any]:
    """One launch of each kernel over the whole sequence."""
    from offload.ops.fused import operators
    from offload.ops.fused.backend import NO_WINDOW

    q, k, v, d_out = case.tensors()
    out = torch.empty_like(q)
    lse = q.new_empty(q.shape[:3], dtype=torch.float32)
    settings = (None, 0, 0, NO_WINDOW, case.head_dim**-0.5, 0.0)
    operators.forward(q, k, v, *settings, None, None, out, lse)
    delta = operators.delta_of(d_out, out)
    dq = torch.empty_like(q)
    dk, dv = (torch.zeros_like(x, dtype=torch.float32) for x in (k, v))
    backward = (d_out, q, k, v, lse, delta, *settings)
    return {
        "forward": lambda: operators.forward(q, k, v, *settings, None, None, out, lse),
        "queries": lambda: operators.backward_queries(*backward, None, dq),
        "keys": lambda: operators.backward_keys(*backward, dk, dv),
    }


@contextlib.contextmanager
def _tile_of(kernel: str, tile: Any) -> Iterator[None]:
    """Lets a kernel run with another tile than the table's."""
    from offload.ops.fused import operators

    original = operators.kernel_tiles
    operators.kernel_tiles = lambda q, v: original(q, v)._replace(**{kernel: tile})
    try:
        yield
    finally:
        operators.kernel_tiles = original
