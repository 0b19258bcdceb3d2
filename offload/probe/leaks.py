"""The leak test: whether anything but attention mixes tokens."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from offload.errors import TileRefused
from offload.executor import TiledCall
from offload.layer_arguments import LayerArguments, LayerResult
from offload.ops.key_blocks import KeyBlock
from offload.ops.routing import AttentionCall
from offload.ops.tile_attention import attend
from offload.probe.copies import holds_quantised_weights, in_float32
from offload.probe.gradients import compare_parameters
from offload.tape import TileRecord, intervals_of_tile

PARAMETER_TOLERANCE = 1e-3
"""Of the norm; grouped products of experts differ by 4e-5 in bfloat16, leaks by 0.2 and more."""
ROUNDING_STEPS = 64
"""Differences of a float32 layer that count as rounding, in eps of the largest value."""

Flat = tuple[list[Any], pytree.TreeSpec]


class _ReplayingAttention:
    """Takes attention calls of the leak test: computes the first run's, replays it in the second.

    The output is a constant for autograd, so that gradients show what mixes tokens besides.
    """

    def __init__(self, tokens: int) -> None:
        self.tile = TileRecord(0, tokens)
        self.inputs: list[torch.Tensor] = []
        self.out: torch.Tensor | None = None
        self.calls = 0

    def __call__(self, call: AttentionCall) -> torch.Tensor:
        self.calls += 1
        if self.calls > 1:
            raise TileRefused("it calls attention more than once")
        intervals = intervals_of_tile(self.tile, call)
        self.inputs = [call.q, call.k, call.v]
        if self.out is None:
            self.out, _ = attend(
                call.q.detach(),
                [KeyBlock(call.k.detach(), call.v.detach(), 0)],
                intervals,
                softmax_scale=call.softmax_scale,
                softcap=call.softcap,
            )
        return self.out


@dataclass
class Trial:
    """A layer on trial, and the arguments of its call."""

    layer: nn.Module
    forward: Callable[..., Any]
    arguments: LayerArguments

    def run(
        self, hidden: torch.Tensor, attention: _ReplayingAttention
    ) -> tuple[list[torch.Tensor], torch.Tensor, list[torch.Tensor]]:
        """Returns output, q, k, v; the leaf they were computed from; the parameters' aliases."""
        torch.manual_seed(0)
        attention.calls = 0
        call = TiledCall(self.layer, self.forward, self.arguments)
        leaf = hidden.clone().requires_grad_()
        with call.aliases.replaced() as aliases, call.routed(attention):
            args, kwargs = self.arguments.of_tile(leaf, 0, hidden.shape[1])
            before = pytree.tree_flatten((args, kwargs))
            output = self.forward(*args, **kwargs)
            _check_arguments(before, pytree.tree_flatten((args, kwargs)))
        result = LayerResult(output).hidden_of(output)
        if result.shape[:2] != hidden.shape[:2]:
            raise TileRefused("it returns another number of tokens than it gets")
        outputs = [result, *attention.inputs]
        _check_sources(outputs, [leaf, *aliases])
        return outputs, leaf, aliases


def _check_arguments(before: Flat, after: Flat) -> None:
    if before[1] != after[1] or any(
        one is not other for one, other in zip(before[0], after[0], strict=True)
    ):
        raise TileRefused("it writes to a container among its arguments")


def _check_sources(outputs: list[torch.Tensor], known: list[torch.Tensor]) -> None:
    """Looks for tensors that need gradients and came to the layer by another way."""
    known_ids = {id(tensor) for tensor in known}
    nodes = [output.grad_fn for output in outputs if output.grad_fn is not None]
    seen = set(nodes)
    while nodes:
        node = nodes.pop()
        variable = getattr(node, "variable", None)
        if isinstance(variable, torch.Tensor) and id(variable) not in known_ids:
            raise TileRefused(
                "its output depends on a tensor that requires gradients and is neither an argument "
                "nor a parameter of it"
            )
        for following, _ in node.next_functions:
            if following is not None and following not in seen:
                seen.add(following)
                nodes.append(following)


class _Unequal(TileRefused):
    """Values that are to be equal bit for bit are not; they may still be equal but for rounding."""


def leak_tests(trial: Trial, hidden: torch.Tensor, *, attends: bool) -> None:
    """Asks for equal bits; where there are none, for equality up to float32's rounding.

    Experts get their tokens in groups, and a product of matrices may round a row in another way
    when the group has another size.

    Args:
        trial: the layer and its arguments.
        hidden: `[B, S, E]`.
        attends: whether the layer may call attention.

    Raises:
        TileRefused: if something else mixes tokens.
    """
    try:
        _leak_test(trial, hidden, 0.0, attends=attends)
    except _Unequal:
        if holds_quantised_weights(trial.layer):
            raise
        with in_float32(trial.layer, hidden.dtype) as dtype:
            cast = Trial(
                trial.layer, trial.forward, trial.arguments.part(0, hidden.shape[1], dtype)
            )
            rounding = ROUNDING_STEPS * torch.finfo(dtype).eps
            _leak_test(cast, hidden.to(dtype), rounding, attends=attends)


def _leak_test(trial: Trial, hidden: torch.Tensor, rounding: float, *, attends: bool) -> None:
    batch, tokens, _ = hidden.shape
    generator = torch.Generator().manual_seed(0)
    changed = torch.rand(batch, tokens, generator=generator) < 0.5
    changed[:, 0] = False
    changed[:, -1] = True
    changed = changed.to(hidden.device)
    attention = _ReplayingAttention(tokens)
    outputs, leaf, aliases = trial.run(hidden, attention)
    if attention.calls and not attends:
        raise TileRefused("it calls attention")
    cotangents = [
        torch.randn(o.shape, generator=generator).to(o).masked_fill(_at(changed, o), 0)
        for o in outputs
    ]
    d_hidden, *d_parameters = _gradients(outputs, [leaf, *aliases], cotangents)
    first = [output.detach() for output in outputs]
    del outputs, leaf, aliases

    outputs, leaf, aliases = trial.run(_other_tokens(hidden, changed, generator), attention)
    if len(outputs) != len(first):
        raise TileRefused("whether it calls attention depends on the tokens")
    for name, ours, theirs in zip(("output", "q", "k", "v"), outputs, first, strict=False):
        stayed = ~_at(changed, theirs)
        if not _equal(ours.detach()[stayed], theirs[stayed], rounding):
            raise _Unequal(f"its {_SEEN[name]} at a token depends on other tokens")
        if name == "k" and torch.equal(ours.detach(), theirs):
            raise TileRefused("its keys do not come from its hidden states")
    d_hidden_again, *d_again = _gradients(outputs, [leaf, *aliases], cotangents)
    _compare_gradients(d_hidden, d_hidden_again, changed, rounding)
    compare_parameters(d_parameters, d_again, PARAMETER_TOLERANCE, "depends on other tokens")


def _equal(first: torch.Tensor, second: torch.Tensor, rounding: float) -> bool:
    if rounding == 0:
        return torch.equal(first, second)
    return bool((first - second).abs().max() <= rounding * second.abs().max())


_SEEN = {"output": "output", "q": "query", "k": "key", "v": "value"}


def _at(rows: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """Spreads a mask of tokens `[B, S]` over `[B, S, E]` or `[B, H, S, D]`."""
    mask = rows[:, None, :, None] if like.ndim == 4 else rows[:, :, None]
    return mask.expand(like.shape)


def _other_tokens(
    hidden: torch.Tensor, changed: torch.Tensor, generator: torch.Generator
) -> torch.Tensor:
    noise = torch.randn(hidden.shape, generator=generator).to(hidden)
    other = hidden.roll(1, dims=1) + noise * hidden.std().nan_to_num(1.0)
    return torch.where(_at(changed, hidden), other, hidden)


def _gradients(
    outputs: list[torch.Tensor], inputs: list[torch.Tensor], cotangents: list[torch.Tensor]
) -> list[torch.Tensor | None]:
    pairs = [(o, c) for o, c in zip(outputs, cotangents, strict=True) if o.requires_grad]
    if not pairs:
        return [None] * len(inputs)
    return list(
        torch.autograd.grad(
            [output for output, _ in pairs],
            inputs,
            [cotangent for _, cotangent in pairs],
            allow_unused=True,
        )
    )


def _compare_gradients(
    first: torch.Tensor | None,
    second: torch.Tensor | None,
    changed: torch.Tensor,
    rounding: float,
) -> None:
    if first is None or second is None:
        raise TileRefused("its output does not depend on its hidden states")
    mask = _at(changed, first)
    if bool(first[mask].any()) or bool(second[mask].any()):
        raise TileRefused("its output at a token has a gradient at other tokens")
    if not _equal(first[~mask], second[~mask], rounding):
        raise _Unequal("its gradient at a token depends on other tokens")
