"""The proof that a layer may run tile by tile: made at its first call, on up to 256 of its tokens.

Two tests. The **leak test** shows that nothing but attention mixes tokens. The layer runs twice
with the same random numbers and the same, recorded, attention output; the second time half of the
tokens are others. For the half that stayed, the output, the queries, keys and values that reach
attention, and the gradient of the input must be equal bit for bit; the gradient of the input must
be exactly zero at the tokens that changed, since no gradient enters there; and the parameters'
gradients must agree, which finds mixing behind a gate that is still zero. The **tile test** then
runs the tokens whole and in ragged tiles, in float32 and evaluation mode, and compares: it finds
arguments cut wrongly, masks that tiles do not understand, and layers that change with length.

What they cannot see: a layer that treats tokens beyond the first 256 in another way, such as a
window or a scale by length inside it. `wrap(..., verify=True)` compares the whole first call.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from offload.ambient import RandomState
from offload.errors import TileRefused
from offload.executor import TiledCall
from offload.layer_arguments import LayerArguments, LayerResult
from offload.ops.attention import KeyBlock, attend
from offload.parameter_aliases import ParameterAliases
from offload.snapshots import BufferSnapshot
from offload.store import default_store
from offload.tape import Tape, TileRecord, intervals_of_tile

PROBE_TOKENS = 256
PARAMETER_TOLERANCE = 1e-3
"""Of the norm; grouped products of experts differ by 4e-5 in bfloat16, leaks by 0.2 and more."""
ROUNDING_STEPS = 64
"""Differences of a float32 layer that count as rounding, in eps of the largest value."""
TILE_TOLERANCE = 1e-3
"""Of the norm, in float32; right layers stay below 1e-5."""
NARROW_TILE_TOLERANCE = 0.1
"""The same for layers that cannot be cast; wrong masks and slices are off by 1."""
VERIFY_TOLERANCE = 0.1
"""The same for a whole call in its own dtype, where bfloat16 sums over many tokens."""


@dataclass(frozen=True)
class Verdict:
    """What the probe found.

    Attributes:
        tokens: how many it ran on; a proof on fewer than 256 holds for sequences as long only.
        refusal: why the layer must not run by tiles; empty where it may.
    """

    tokens: int
    refusal: str = ""


def prove(
    layer: nn.Module,
    forward: Callable[..., Any],
    arguments: LayerArguments,
    hidden: torch.Tensor,
    *,
    attends: bool,
) -> Verdict:
    """Decides whether a layer may run tile by tile.

    Costs about four training steps of the layer on 256 tokens, and while it runs a float32 copy of
    the layer's weights. Random generators, buffers, `.grad` and hooks of parameters are left alone.

    Args:
        layer: the layer about to be called.
        forward: its forward.
        arguments: of the call.
        hidden: `[B, S, E]`, the call's hidden states; only read.
        attends: whether the layer may call attention, once; else it must not.

    Returns:
        The verdict. Whatever the layer raises in the trial is a refusal, but for a lack of memory.
    """
    tokens = min(PROBE_TOKENS, arguments.tokens)
    devices = [hidden.device] if hidden.device.type == "cuda" else []
    before = RandomState(devices)
    try:
        with torch.inference_mode(False), torch.enable_grad(), _buffers_checked(layer):
            part = hidden[:, :tokens].detach().clone()
            head = arguments.first(tokens)
            _leak_tests(_Trial(layer, forward, head), part, attends=attends)
            _tile_test(layer, forward, head, part)
    except TileRefused as refused:
        return Verdict(tokens, str(refused))
    except torch.OutOfMemoryError:
        raise
    except Exception as error:
        return Verdict(tokens, f"its trial run raised {type(error).__name__}: {error}")
    finally:
        before.restore()
        torch.clear_autocast_cache()
    return Verdict(tokens)


# -- leak test
# ------------------------------------------------------------------------------------------


class _ReplayingAttention:
    """Takes attention calls of the leak test: computes the first run's, replays it in the second.

    The output is a constant for autograd, so that gradients show what mixes tokens besides.
    """

    def __init__(self, tokens: int) -> None:
        self.tile = TileRecord(0, tokens)
        self.inputs: list[torch.Tensor] = []
        self.out: torch.Tensor | None = None
        self.calls = 0

    def __call__(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        *,
        intervals: torch.Tensor | None,
        window_size: int | None,
        softmax_scale: float | None,
        softcap: float,
    ) -> torch.Tensor:
        self.calls += 1
        if self.calls > 1:
            raise TileRefused("it calls attention more than once")
        intervals = intervals_of_tile(self.tile, q, k, v, intervals, window_size)
        self.inputs = [q, k, v]
        if self.out is None:
            block = KeyBlock(k.detach(), v.detach(), 0)
            self.out, _ = attend(
                q.detach(), [block], intervals, softmax_scale=softmax_scale, softcap=softcap
            )
        return self.out


@dataclass
class _Trial:
    layer: nn.Module
    forward: Callable[..., Any]
    arguments: LayerArguments

    def run(
        self, hidden: torch.Tensor, attention: _ReplayingAttention
    ) -> tuple[list[torch.Tensor], torch.Tensor, list[torch.Tensor]]:
        """Returns output, q, k, v; the leaf they were computed from; the parameters' aliases."""
        torch.manual_seed(0)
        attention.calls = 0
        call = TiledCall(self.layer, self.forward, self.arguments, [], lambda: None)
        leaf = hidden.clone().requires_grad_()
        with call.aliases.replaced() as aliases, call.routed(attention):
            args, kwargs = self.arguments.of_tile(leaf, 0, hidden.shape[1])
            output = self.forward(*args, **kwargs)
        result = LayerResult(output).hidden_of(output)
        if result.shape[:2] != hidden.shape[:2]:
            raise TileRefused("it returns another number of tokens than it gets")
        return [result, *attention.inputs], leaf, aliases


class _Unequal(TileRefused):
    """Values that are to be equal bit for bit are not; they may still be equal but for rounding."""


def _leak_tests(trial: _Trial, hidden: torch.Tensor, *, attends: bool) -> None:
    """Asks for equal bits; where there are none, for equality up to float32's rounding.

    Experts get their tokens in groups, and a product of matrices may round a row in another way
    when the group has another size.
    """
    try:
        _leak_test(trial, hidden, 0.0, attends=attends)
    except _Unequal:
        if _holds_quantised_weights(trial.layer):
            raise
        with _in_float32(trial.layer, hidden.dtype) as dtype:
            cast = _Trial(trial.layer, trial.forward, trial.arguments.first(hidden.shape[1], dtype))
            rounding = ROUNDING_STEPS * torch.finfo(dtype).eps
            _leak_test(cast, hidden.to(dtype), rounding, attends=attends)


def _leak_test(trial: _Trial, hidden: torch.Tensor, rounding: float, *, attends: bool) -> None:
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
    _compare_parameters(d_parameters, d_again, PARAMETER_TOLERANCE, "depends on other tokens")


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


def _compare_parameters(
    expected: list[torch.Tensor | None],
    actual: list[torch.Tensor | None],
    tolerance: float,
    complaint: str,
) -> None:
    """Compares gradients by their norms; those that are next to nothing by the largest of all."""
    norms = [0.0 if g is None else float(g.double().norm()) for g in expected]
    floor = 1e-4 * max(norms, default=0.0)
    for norm, ours, theirs in zip(norms, expected, actual, strict=True):
        if (ours is None) != (theirs is None):
            raise TileRefused("which of its parameters get gradients depends on other tokens")
        if ours is None or theirs is None:
            continue
        if not float((ours.double() - theirs.double()).norm()) <= tolerance * max(norm, floor):
            raise TileRefused(f"the gradient of a parameter {complaint}")


# -- tile test
# ------------------------------------------------------------------------------------------


def _tile_test(
    layer: nn.Module, forward: Callable[..., Any], arguments: LayerArguments, hidden: torch.Tensor
) -> None:
    tiles = _ragged_tiles(hidden.shape[1])
    if not _holds_quantised_weights(layer):
        with _in_float32(layer, hidden.dtype) as dtype, _evaluating(layer):
            cast = arguments.first(hidden.shape[1], dtype)
            compare_tiles(layer, forward, cast, hidden.to(dtype), tiles, TILE_TOLERANCE)
        return
    with _evaluating(layer):
        compare_tiles(layer, forward, arguments, hidden, tiles, NARROW_TILE_TOLERANCE)


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
    tolerance: float,
) -> None:
    """Runs a layer in one tile and in several, and compares output and gradients.

    Args:
        layer: the layer.
        forward: its forward.
        arguments: of the call, for the tokens of `hidden`.
        hidden: `[B, S, E]`.
        tiles: begin and end of each tile.
        tolerance: largest difference, as a part of the norm of each tensor.

    Raises:
        TileRefused: if they differ.
    """
    generator = torch.Generator().manual_seed(1)
    results = []
    for cut in ([(0, hidden.shape[1])], tiles):
        call = TiledCall(layer, forward, arguments, [], lambda: None)
        with call.aliases.replaced() as aliases:
            call.aliases = ParameterAliases(layer)
            leaf = hidden.detach().clone().requires_grad_()
            output = call.run_hidden(leaf, Tape(cut, default_store()))
            generator.manual_seed(1)
            cotangent = torch.randn(output.shape, generator=generator).to(output)
            grads = torch.autograd.grad(output, [leaf, *aliases], cotangent, allow_unused=True)
            results.append((output.detach(), *grads))
    whole, tiled = results
    if not _close(whole[0], tiled[0], tolerance):
        raise TileRefused("its output changes when the sequence is cut into tiles")
    _compare_parameters(
        list(whole[1:]), list(tiled[1:]), tolerance, "changes when the sequence is cut into tiles"
    )


def _close(expected: torch.Tensor, actual: torch.Tensor, tolerance: float) -> bool:
    difference = (expected.double() - actual.double()).norm()
    return bool(difference <= tolerance * expected.double().norm())


def _holds_quantised_weights(layer: nn.Module) -> bool:
    return any(
        not parameter.is_floating_point() or type(parameter) not in (nn.Parameter, torch.Tensor)
        for parameter in layer.parameters()
    )


@contextmanager
def _evaluating(layer: nn.Module) -> Iterator[None]:
    """Switches dropout off: tiles draw other masks than the whole sequence."""
    flags = [(module, module.training) for module in layer.modules()]
    try:
        for module, _ in flags:
            module.training = False
        yield
    finally:
        for module, flag in flags:
            module.training = flag


@contextmanager
def _in_float32(layer: nn.Module, dtype: torch.dtype) -> Iterator[torch.dtype]:
    """Puts copies of weights and buffers in at least float32 in place, without autocast."""
    wide = torch.promote_types(dtype, torch.float32)
    slots: list[tuple[dict[str, Any], str, Any]] = []
    copies: dict[int, torch.Tensor] = {}
    with contextlib.ExitStack() as stack:
        for kind in {layer_device_type(layer), "cpu"}:
            if torch.amp.is_autocast_available(kind):
                stack.enter_context(torch.autocast(kind, enabled=False))
        try:
            for module in layer.modules():
                for place in (module._parameters, module._buffers):
                    for key, tensor in list(place.items()):
                        if tensor is None or not tensor.is_floating_point():
                            continue
                        slots.append((place, key, tensor))
                        if id(tensor) not in copies:
                            copies[id(tensor)] = _cast(tensor, wide)
                        place[key] = copies[id(tensor)]  # type: ignore[assignment]
            yield wide
        finally:
            for place, key, tensor in slots:
                place[key] = tensor


def _cast(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    values = tensor.detach().to(dtype)
    if isinstance(tensor, nn.Parameter):
        return nn.Parameter(values, requires_grad=tensor.requires_grad)
    return values.requires_grad_(tensor.requires_grad)


def layer_device_type(layer: nn.Module) -> str:
    """Returns where a layer's first parameter is; the CPU where it has none."""
    first = next(layer.parameters(), None)
    return "cpu" if first is None else first.device.type


# -- buffers
# ------------------------------------------------------------------------------------------


@contextmanager
def _buffers_checked(layer: nn.Module) -> Iterator[None]:
    """Gives the layer copies of its buffers, and refuses it if it writes to one.

    A buffer that is written at every call would be written once a tile.
    """
    with BufferSnapshot(layer, None).replayed():
        before = {name: (b, b.detach().clone()) for name, b in layer.named_buffers()}
        yield
        after = dict(layer.named_buffers())
        for name, (buffer, values) in before.items():
            if after.get(name) is not buffer or not _same(buffer, values):
                raise TileRefused(f"it writes to its buffer '{name}'")


def _same(first: torch.Tensor, second: torch.Tensor) -> bool:
    return torch.equal(first.nan_to_num(), second.nan_to_num())
