"""The tile test: a layer whole against the same layer in ragged tiles."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from offload.errors import TileRefused
from offload.executor import TiledCall
from offload.layer_arguments import LayerArguments
from offload.ops.routing import AttentionCall
from offload.parameter_aliases import ParameterAliases
from offload.probe.copies import evaluating, holds_quantised_weights, in_float32
from offload.probe.gradients import compare_parameters
from offload.store import default_store
from offload.tape import Tape


@dataclass(frozen=True)
class Tolerances:
    """Largest differences between whole and tiled.

    Attributes:
        attention: of queries, keys and values, as a part of the largest value.
        output: of what the layer adds to its input, as a part of the norm.
        gradients: as a part of the norm of each tensor.
    """

    attention: float
    output: float
    gradients: float


FLOAT32_TOLERANCES = Tolerances(64 * 2.0**-23, 1e-4, 1e-3)
"""Right layers stay below a tenth of each; one that counts its own positions is off by 1 in its
queries, however little it adds to its input."""
NARROW_TOLERANCES = Tolerances(0.05, 0.1, 0.1)
"""For narrow dtypes, where the layer cannot be cast; wrong masks and slices are off by 1."""


def tolerances_of(dtype: torch.dtype) -> Tolerances:
    """Returns what may differ in a comparison in some dtype."""
    return NARROW_TOLERANCES if dtype.itemsize < 4 else FLOAT32_TOLERANCES


def tile_test(
    layer: nn.Module, forward: Callable[..., Any], arguments: LayerArguments, hidden: torch.Tensor
) -> None:
    """Runs a layer in one tile and in ragged ones, in float32 where it can be cast.

    Args:
        layer: the layer.
        forward: its forward.
        arguments: of a call with the tokens of `hidden`.
        hidden: `[B, S, E]`.

    Raises:
        TileRefused: if they differ.
    """
    tiles = _ragged_tiles(hidden.shape[1])
    if holds_quantised_weights(layer):
        with evaluating(layer):
            compare_tiles(layer, forward, arguments, hidden, tiles, tolerances_of(hidden.dtype))
        return
    with in_float32(layer, hidden.dtype) as dtype, evaluating(layer):
        cast = arguments.part(0, hidden.shape[1], dtype)
        compare_tiles(layer, forward, cast, hidden.to(dtype), tiles, FLOAT32_TOLERANCES)


def _ragged_tiles(tokens: int) -> list[tuple[int, int]]:
    """Tiles of 1, 6, a quarter and the rest: shorter than any length at which a layer changes."""
    ends = sorted({min(end, tokens) for end in (1, 7, 7 + tokens // 4, tokens)})
    return list(zip([0, *ends[:-1]], ends, strict=True))


def compare_tiles(
    layer: nn.Module,
    forward: Callable[..., Any],
    arguments: LayerArguments,
    hidden: torch.Tensor,
    tiles: list[tuple[int, int]],
    tolerances: Tolerances,
) -> None:
    """Runs a layer in one tile and in several, and compares what it computes.

    Args:
        layer: the layer.
        forward: its forward.
        arguments: of the call, for the tokens of `hidden`.
        hidden: `[B, S, E]`.
        tiles: begin and end of each tile.
        tolerances: how much may differ.

    Raises:
        TileRefused: if more does.
    """
    whole, tiled = (
        _run(layer, forward, arguments, hidden, cut) for cut in ([(0, hidden.shape[1])], tiles)
    )
    _compare_attention(whole.calls, tiled.calls, tolerances.attention)
    added = whole.output.double()
    if added.shape == hidden.shape:
        added = added - hidden.double()
    difference = (whole.output.double() - tiled.output.double()).norm()
    if not bool(difference <= tolerances.output * added.norm()):
        raise TileRefused("its output changes when the sequence is cut into tiles")
    compare_parameters(
        whole.gradients,
        tiled.gradients,
        tolerances.gradients,
        "changes when the sequence is cut into tiles",
    )


@dataclass
class _Run:
    output: torch.Tensor
    gradients: list[torch.Tensor | None]
    calls: list[AttentionCall]


def _run(
    layer: nn.Module,
    forward: Callable[..., Any],
    arguments: LayerArguments,
    hidden: torch.Tensor,
    tiles: list[tuple[int, int]],
) -> _Run:
    calls: list[AttentionCall] = []
    with ParameterAliases(layer).replaced() as aliases:
        call = TiledCall(layer, forward, arguments)
        call.watch = calls.append
        leaf = hidden.detach().clone().requires_grad_()
        output = call.run_hidden(leaf, Tape(tiles, default_store()))
        call.watch = None
        generator = torch.Generator().manual_seed(1)
        cotangent = torch.randn(output.shape, generator=generator).to(output)
        gradients = torch.autograd.grad(output, [leaf, *aliases], cotangent, allow_unused=True)
    return _Run(output.detach(), list(gradients), calls)


def _compare_attention(
    whole: list[AttentionCall], tiled: list[AttentionCall], tolerance: float
) -> None:
    """Compares what reaches attention, which the residual stream does not drown."""
    for call in whole:
        for name in ("q", "k", "v"):
            expected = getattr(call, name)
            actual = torch.cat([getattr(part, name) for part in tiled], dim=2)
            difference = (expected - actual).abs().max()
            if not bool(difference <= tolerance * expected.abs().max()):
                raise TileRefused("what it gives to attention changes with the length of a tile")
        if any(
            (part.softmax_scale, part.softcap) != (call.softmax_scale, call.softcap)
            for part in tiled
        ):
            raise TileRefused("its attention is scaled by the length of a tile")
