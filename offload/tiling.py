"""Decides for each call of a layer whether it is run tile by tile."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any

import torch
from torch import nn

from offload.adapters import transformers as hf
from offload.adapters.accelerate import weights_are_elsewhere
from offload.adapters.hooks import has_user_hook
from offload.adapters.peft import adapter_state
from offload.devices import is_planned
from offload.errors import LayerRefused, TileRefused
from offload.executor import TiledCall, tiles_of
from offload.installation import Installation
from offload.layer_arguments import LayerArguments
from offload.probe import PROBE_TOKENS, Verdict, prove, verify
from offload.snapshots import LayerSnapshot
from offload.store.statistics import Record
from offload.tape import Tape


class Tiling:
    """The tiled mode of one layer: its refusals, its proofs, its runs.

    Args:
        layer: the layer.
        name: its name, for messages.
        record: where its calls are counted.
        installation: of its model.
        attends: whether it is a layer with attention; else a token-wise module.
        keep_last: whether backward begins with this layer.
    """

    def __init__(
        self,
        layer: nn.Module,
        name: str,
        record: Record,
        installation: Installation,
        *,
        attends: bool,
        keep_last: bool,
    ) -> None:
        self.layer = layer
        self.name = name
        self.record = record
        self.installation = installation
        self.attends = attends
        self.keep_last = keep_last
        self._proofs: dict[Hashable, Verdict] = {}

    def __getstate__(self) -> dict[str, Any]:
        # A copy on another device or with other weights is proved anew.
        return self.__dict__ | {"_proofs": {}}

    def prepare(
        self, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> PreparedCall | None:
        """Makes a call ready to be run by tiles.

        Args:
            forward: the layer's forward.
            args: positional arguments of the call.
            kwargs: keyword arguments.

        Returns:
            The call; None where it is to be run as if the layer were not wrapped, since tiles
            would change nothing.

        Raises:
            TileRefused: says why it cannot.
        """
        if reason := hf.untiled_reason() or weights_are_elsewhere(self.layer):
            raise TileRefused(reason)
        arguments = LayerArguments(forward, args, kwargs)
        if arguments.cache() is not None:
            raise TileRefused("it is given a key-value cache")
        needs_gradients = torch.is_grad_enabled() and (
            arguments.hidden.requires_grad
            or any(parameter.requires_grad for parameter in self.layer.parameters())
        )
        policy = self.installation.policy
        if arguments.tokens < 2 or (not needs_gradients and arguments.tokens <= policy.tile_tokens):
            return None
        if hook := _user_hook_inside(self.layer):
            raise TileRefused(hook)
        if refusal := self._proof(forward, arguments).refusal:
            raise TileRefused(refusal)
        return PreparedCall(self, forward, arguments, needs_gradients=needs_gradients)

    def _proof(self, forward: Callable[..., Any], arguments: LayerArguments) -> Verdict:
        if is_planned():
            return Verdict(arguments.tokens)  # there are no values to prove anything with
        layer, hidden = self.layer, arguments.hidden
        key = (
            tuple(module.training for module in layer.modules()),
            hidden.dtype,
            hidden.device.type,
            arguments.structure,
            tuple((p.requires_grad, p.dtype) for p in layer.parameters()),
            adapter_state(layer),
            torch.is_autocast_enabled(hidden.device.type)
            and torch.get_autocast_dtype(hidden.device.type),
        )
        known = self._proofs.get(key)
        needed = min(PROBE_TOKENS, arguments.tokens)
        if known is None or (known.tokens < needed and not known.refusal):
            known = prove(layer, forward, arguments, hidden, attends=self.attends)
            if self.installation.verify and not known.refusal:
                tiles = tiles_of(arguments.tokens, self.installation.policy.tile_tokens)
                known = verify(layer, forward, arguments, hidden, tiles)
            self._proofs[key] = known
        return known

    def on_recompute(self) -> None:
        """Called once for each backward through a call of this layer."""
        self.record.recomputes += 1
        self.installation.progress.on_recompute()
        self.installation.warn_if_idle()


class PreparedCall:
    """A call that may be run by tiles.

    Args:
        tiling: of the layer.
        forward: the layer's.
        arguments: of the call.
        needs_gradients: whether a backward may follow.
    """

    def __init__(
        self,
        tiling: Tiling,
        forward: Callable[..., Any],
        arguments: LayerArguments,
        *,
        needs_gradients: bool,
    ) -> None:
        self._tiling = tiling
        self._forward = forward
        self._arguments = arguments
        self._needs_gradients = needs_gradients

    def run(self) -> Any:
        """Runs the call.

        Returns:
            What the layer returns, for the whole sequence.

        Raises:
            LayerRefused: if the layer does what it did not do when it was proved.
        """
        tiling, arguments = self._tiling, self._arguments
        installation, layer = tiling.installation, tiling.layer
        hidden = arguments.hidden
        tiles = tiles_of(arguments.tokens, installation.policy.tile_tokens)
        backend = installation.policy.attention
        tiling.record.mode = "tiled"
        if not self._needs_gradients:
            tape = Tape(tiles, None, backend=backend)
            return self._checked(TiledCall(layer, self._forward, arguments), tape)
        if installation.progress.on_forward():
            installation.store.begin_order()
        installation.note_inputs([hidden])
        tiling.record.forwards += 1
        tape = Tape(
            tiles,
            installation.store,
            tiling.record,
            on_host=installation.wants_host(hidden),
            keep_last=tiling.keep_last,
            leaves=installation.policy.tier == "disk",
            codecs=installation.policy.codecs,
            backend=backend,
        )
        snapshot = LayerSnapshot(layer, tiling.name, written=set())
        call = TiledCall(layer, self._forward, arguments, snapshot, tiling.on_recompute)
        del hidden
        output = self._checked(call, tape)
        written, _ = snapshot.check_after_forward()
        if written:
            raise LayerRefused(
                f"offload: expected layer '{tiling.name}' to leave its buffers alone, as it did "
                f"when it was tried, but it wrote {sorted(written)}, once a tile. "
                "Leave it out with layers=, or use Policy(mode='checkpoint')."
            )
        return output

    def _checked(self, call: TiledCall, tape: Tape) -> Any:
        try:
            return call.run(tape)
        except TileRefused as refused:
            if is_planned():
                raise
            raise LayerRefused(
                f"offload: expected layer '{self._tiling.name}' to run tile by tile as it did when "
                f"it was tried, but {refused}. Use Policy(mode='checkpoint')."
            ) from refused


def _user_hook_inside(layer: nn.Module) -> str:
    """Names a module inside a layer whose hooks would see tiles; empty where there is none."""
    for name, module in layer.named_modules():
        if module is not layer and has_user_hook(module):
            return f"its module '{name}' has a hook, which would run once a tile"
    return ""
