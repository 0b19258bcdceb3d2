"""Tiled mode: a layer over the tiles of a sequence, forward and back, one autograd node a call.

Legend: `B` batch, `S` sequence, `T` rows of a tile, `E` model dim.

Work is cells of a grid (layer, tile): `TiledCall.forward_cell` runs one without gradients,
`TiledCall.backward_cell` recomputes one and differentiates it. Each cell needs its own layer's tape
and the hidden states of its tile, nothing else, and its graph is gone when it returns. Here they
are walked layer by layer, which needs the least memory.

NOTE [Who holds the layer input]
Nothing here may keep the whole input, or a view of it, past forward: not the autograd context, not
the arguments, not the tape. A tile's input is a ticket; a view kept by reference is one only where
the policy keeps inputs on the device. So the input's memory is free as soon as the caller's own
variable moves on and the copies of its tiles have finished. Likewise in backward: input, output and
gradients of a tile are dropped before the next tile is recomputed, else two graphs would overlap.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import nn
from torch.autograd.function import once_differentiable

from offload.adapters import transformers as hf
from offload.ambient import Ambient, RandomState
from offload.errors import OffloadError, TileRefused
from offload.interception import RouteScaledDotProduct
from offload.layer_arguments import LayerArguments, LayerResult
from offload.ops.routing import AttentionCall, AttentionRoute, routed
from offload.parameter_aliases import ParameterAliases
from offload.saved_object import SavedObject
from offload.snapshots import LayerSnapshot
from offload.tape import BackwardAttention, BackwardKeys, ForwardAttention, Tape, TileRecord


def tiles_of(tokens: int, tile_tokens: int) -> list[tuple[int, int]]:
    """Cuts a sequence into tiles; the last one may be shorter.

    Args:
        tokens: S.
        tile_tokens: length of a tile.

    Returns:
        Begin and end of each tile, in order.
    """
    return [(begin, min(begin + tile_tokens, tokens)) for begin in range(0, tokens, tile_tokens)]


class TiledCall:
    """One call of a layer, run tile by tile.

    Args:
        layer: the layer.
        forward: its forward.
        arguments: of the call; the hidden states are taken out when it runs.
        snapshot: of the layer, for the recompute; None where its state cannot have changed.
        on_recompute: called once a backward.

    Attributes:
        watch: shown each attention call of a tile before it is answered; None in earnest.
    """

    def __init__(
        self,
        layer: nn.Module,
        forward: Callable[..., Any],
        arguments: LayerArguments,
        snapshot: LayerSnapshot | None = None,
        on_recompute: Callable[[], None] = lambda: None,
    ) -> None:
        self.layer = layer
        self.forward = forward
        self.arguments = arguments
        self.snapshot = snapshot
        self.on_recompute = on_recompute
        self.aliases = ParameterAliases(layer)
        self.result: LayerResult | None = None
        self.watch: Callable[[AttentionCall], None] | None = None
        self._configs = hf.configs_of(layer)

    def run(self, tape: Tape) -> Any:
        """Runs the call; where the tape keeps something, autograd can go back through it.

        Args:
            tape: an unused one, for the call's tiles.

        Returns:
            What the layer returns, for the whole sequence.

        Raises:
            TileRefused: if the layer turns out not to be runnable by tiles.
        """
        output = self.run_hidden(self.arguments.take_hidden(), tape)
        assert self.result is not None
        return self.result.wrap(output)

    def run_hidden(self, hidden: torch.Tensor, tape: Tape) -> torch.Tensor:
        """The same for hidden states given here.

        Args:
            hidden: `[B, S, E]`.
            tape: an unused one.

        Returns:
            `[B, S, E]`, the hidden states in what the layer returns.
        """
        self.ambient = Ambient(hidden.device.type)
        if tape.store is None:
            with torch.no_grad():
                return self.forward_all(hidden, tape)
        saved = SavedObject((self, tape))
        with saved:
            output: torch.Tensor = _TiledLayer.apply(  # type: ignore[no-untyped-call]
                saved, hidden, *self.aliases.parameters
            )
        return output

    # -- forward ---------------------------------------------------------------------------------

    def forward_all(self, hidden: torch.Tensor, tape: Tape) -> torch.Tensor:
        """Runs all tiles without gradients.

        Args:
            hidden: `[B, S, E]`.
            tape: gets what backward needs.

        Returns:
            `[B, S, E]`, the layer's output.
        """
        output: torch.Tensor | None = None
        random: RandomState | None = None
        devices = [hidden.device] if hidden.device.type == "cuda" else []
        for index, tile in enumerate(tape.tiles):
            part = hidden[:, tile.begin : tile.end]
            if tape.store is not None:
                tile.random = random = RandomState(devices, earlier=random)
                tile.hidden = tape.put(tile, part, "input")
            result = self.ambient.run(self.forward_cell, part, tape, tile)
            if output is None:
                shape = (hidden.shape[0], hidden.shape[1], *result.shape[2:])
                output = result.new_empty(shape)
            output[:, tile.begin : tile.end] = result
            del part, result
            if len(tape.blocks) not in (0, index + 1):
                raise TileRefused("it calls attention for some tokens and not for others")
        assert output is not None
        tape.end_forward()
        if self.ambient.autocast_is_on:
            # Casts made without gradients must not serve whoever needs them with gradients.
            torch.clear_autocast_cache()
        return output

    def forward_cell(self, hidden: torch.Tensor, tape: Tape, tile: TileRecord) -> torch.Tensor:
        """Runs the layer on one tile.

        Args:
            hidden: `[B, T, E]`.
            tape: the layer's.
            tile: which tile.

        Returns:
            `[B, T, E]`.
        """
        with self.routed(ForwardAttention(tape, tile)):
            args, kwargs = self.arguments.of_tile(hidden, tile.begin, tile.end)
            output = self.forward(*args, **kwargs)
        result = LayerResult(output)
        if self.result is None:
            self.result = result
        return result.hidden_of(output)

    # -- backward --------------------------------------------------------------------------------

    def backward_all(
        self, d_output: torch.Tensor, tape: Tape, *, needs_input: bool
    ) -> tuple[torch.Tensor | None, list[torch.Tensor | None]]:
        """Recomputes the tiles in reverse and differentiates each.

        Args:
            d_output: `[B, S, E]`, gradient of the output.
            tape: as forward left it; not changed.
            needs_input: whether the gradient of the layer's input is wanted.

        Returns:
            Gradient of the input `[B, S, E]` or None, and of each parameter or None, accumulated
            over the tiles in max(float32, dtype) and cast once.
        """
        self.on_recompute()
        self.arguments.check_unchanged()
        keys = BackwardKeys(tape)
        d_hidden: torch.Tensor | None = None
        totals: list[torch.Tensor | None] = [None] * len(self.aliases.parameters)
        devices = tape.tiles[0].random.devices if tape.tiles[0].random is not None else []
        present = RandomState(devices)
        try:
            for index in reversed(range(len(tape.tiles))):
                tile = tape.tiles[index]
                part = d_output[:, tile.begin : tile.end]
                d_part, *grads = self.backward_cell(part, keys, index, needs_input=needs_input)
                accumulate(totals, grads)
                if d_part is not None:
                    if d_hidden is None:
                        d_hidden = d_part.new_empty(self.arguments.shape)
                    d_hidden[:, tile.begin : tile.end] = d_part
                if (block := keys.pop(index)) is not None and block.dk is not None:
                    raise OffloadError(
                        "offload: expected the output of a layer to depend on its attention for "
                        "all tokens or for none; it does for later ones and not for a tile before "
                        "them, by chance or by their values. Use Policy(mode='checkpoint')."
                    )
                del part, d_part, grads
        finally:
            present.restore()
        parameters = self.aliases.parameters
        return d_hidden, [
            None if total is None else total.to(parameter.dtype)
            for total, parameter in zip(totals, parameters, strict=True)
        ]

    def backward_cell(
        self, d_output: torch.Tensor, keys: BackwardKeys, index: int, *, needs_input: bool
    ) -> tuple[torch.Tensor | None, ...]:
        """Recomputes the layer on one tile with gradients, and goes back through it.

        Args:
            d_output: `[B, T, E]`, gradient of the tile's output.
            keys: the layer's key blocks; those of later tiles are finished.
            index: which tile.
            needs_input: whether the gradient of the tile's input is wanted.

        Returns:
            Gradients of the tile's input and of each parameter; None where there is none.
        """
        hidden, output, aliases = self.ambient.run(self._recompute, keys, index, needs_input)
        if not output.requires_grad:
            return (None,) * (1 + len(aliases))
        inputs = [hidden, *aliases] if needs_input else aliases
        # Outside of the ambient: autocast would narrow the backward's own products.
        grads = torch.autograd.grad(output, inputs, d_output, allow_unused=True)
        return grads if needs_input else (None, *grads)

    def _recompute(
        self, keys: BackwardKeys, index: int, needs_input: bool
    ) -> tuple[torch.Tensor, torch.Tensor, list[torch.Tensor]]:
        tile = keys.tape.tiles[index]
        assert tile.hidden is not None
        assert tile.random is not None
        assert self.result is not None
        hidden = tile.hidden.reload().detach().requires_grad_(needs_input)
        tile.random.restore()
        with self._recomputing() as aliases, self.routed(BackwardAttention(keys, index)):
            args, kwargs = self.arguments.of_tile(hidden, tile.begin, tile.end)
            output = self.result.hidden_of(self.forward(*args, **kwargs))
        return hidden, output, aliases

    @contextmanager
    def _recomputing(self) -> Iterator[list[torch.Tensor]]:
        with ExitStack() as stack:
            if self.snapshot is not None:
                stack.enter_context(self.snapshot.replayed())
            aliases = stack.enter_context(self.aliases.replaced())
            stack.enter_context(torch.enable_grad())
            yield aliases
        if self.ambient.autocast_is_on:
            torch.clear_autocast_cache()

    @contextmanager
    def routed(self, route: AttentionRoute) -> Iterator[None]:
        """Sends the layer's attention to a route, by whichever of the three ways it calls it.

        Args:
            route: takes the call.

        Yields:
            Nothing.
        """
        watch = self.watch
        if watch is not None:
            answer = route

            def route(call: AttentionCall) -> torch.Tensor:
                watch(call)
                return answer(call)

        with hf.attention_routed(self._configs), routed(route), RouteScaledDotProduct():
            yield


class _TiledLayer(torch.autograd.Function):
    """A layer's call as one node: its inputs are the hidden states and the layer's parameters."""

    @staticmethod
    def forward(
        ctx: Any, saved: SavedObject, hidden: torch.Tensor, *_parameters: torch.Tensor
    ) -> torch.Tensor:
        call, tape = saved.value
        ctx.save_for_backward(saved.carrier)
        ctx.set_materialize_grads(False)
        output: torch.Tensor = call.forward_all(hidden, tape)
        return output

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_output: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        if d_output is None:
            return (None,) * len(ctx.needs_input_grad)
        call, tape = SavedObject.of(ctx)
        d_hidden, grads = call.backward_all(d_output, tape, needs_input=ctx.needs_input_grad[1])
        return None, d_hidden, *grads


def accumulate(totals: list[torch.Tensor | None], grads: list[torch.Tensor | None]) -> None:
    """Adds gradients of a tile to the totals, in max(float32, dtype)."""
    for i, grad in enumerate(grads):
        if grad is None:
            continue
        wide = torch.promote_types(grad.dtype, torch.float32)
        total = totals[i]
        # The first is autograd's own tensor, which another name may hold; sums are ours.
        totals[i] = grad.to(wide, copy=True) if total is None else total.add_(grad)
