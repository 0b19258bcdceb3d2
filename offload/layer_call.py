"""What stands in for a wrapped layer's `forward`."""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch import nn

from offload.adapters import transformers as hf
from offload.adapters.accelerate import weights_are_elsewhere
from offload.checkpoint import CheckpointRegion, activations_among, run_checkpointed
from offload.devices import is_planned
from offload.errors import LayerRefused, OffloadError, TileRefused
from offload.installation import Installation
from offload.snapshots import LayerSnapshot
from offload.stand_in import ForwardStandIn
from offload.store.identity import tensor_key
from offload.store.statistics import Record
from offload.tiling import Tiling


class LayerCall(ForwardStandIn):
    """Stands in for one layer's `forward`: runs it by tiles, or checkpointed, or untouched.

    Args:
        layer: the layer.
        name: its name in the model.
        from_end: 1 for the last layer; 0 for what backward meets before any layer.
        installation: what the model's layers share.
    """

    stands_for_layer = True
    attends = True

    def __init__(
        self, layer: nn.Module, name: str, from_end: int, installation: Installation
    ) -> None:
        super().__init__(layer)
        self.name = name
        self.from_end = from_end
        self.installation = installation
        self.record = Record(name)
        self.written_buffers: set[str] | None = None
        self.tiling = Tiling(
            layer,
            name,
            self.record,
            installation,
            attends=self.attends,
            keep_last=from_end <= installation.policy.keep_last,
        )
        installation.records.append(self.record)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Runs the layer with the arguments of its own forward."""
        forward = self.__wrapped__
        mode, grad = self.installation.policy.mode, torch.is_grad_enabled()
        if mode == "keep" or (mode == "checkpoint" and not grad):
            return forward(*args, **kwargs)
        if "torch._dynamo" in sys.modules and (reason := compilation_reason()):
            if not grad:
                return forward(*args, **kwargs)
            raise OffloadError(_refusal(self.name, reason))
        if torch._C._functorch.peek_interpreter_stack() is not None:
            return forward(*args, **kwargs)  # torch.func allows no saved-tensor hooks
        if mode != "checkpoint":
            try:
                call = self.tiling.prepare(forward, args, kwargs)
                if call is not None and is_planned():
                    return call.run()  # not proved: what it refuses now, a proof would have refused
            except TileRefused as refused:
                self._note_refusal(str(refused))
            else:
                return self._untiled(args, kwargs, grad=False) if call is None else call.run()
        return self._untiled(args, kwargs, grad=grad)

    def _untiled(self, args: tuple[Any, ...], kwargs: dict[str, Any], *, grad: bool) -> Any:
        """Runs the layer with its own attention and masks; recomputed in backward with `grad`."""
        with hf.attention_as_before(self.module):
            args, kwargs = hf.with_own_masks((args, kwargs))
            return self._checkpointed(args, kwargs) if grad else self.__wrapped__(*args, **kwargs)

    def _note_refusal(self, reason: str) -> None:
        if not torch.is_grad_enabled():
            return  # an untouched forward is right, only larger
        if self.installation.policy.mode == "tiled":
            raise LayerRefused(
                f"offload: expected layer '{self.name}' to run tile by tile, but {reason}. "
                "Use Policy(mode='auto'), which runs such layers in checkpoint mode."
            )
        self.installation.warn_once(
            f"untiled: {reason}",
            f"offload: layer '{self.name}' runs in checkpoint mode, not tile by tile: {reason}.",
        )

    def _checkpointed(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        forward = self.__wrapped__
        if reason := weights_are_elsewhere(self.module):
            raise LayerRefused(_refusal(self.name, reason))
        region = CheckpointRegion(forward, args, kwargs, self.tiling.on_recompute)
        if not self._needs_gradients(region):
            return forward(*args, **kwargs)
        if reason := region.cannot_replay:
            self.installation.warn_once(
                "replay", f"offload: layer '{self.name}' is run untouched: {reason}, in place."
            )
            return forward(*args, **kwargs)
        return self._run(region)

    def _needs_gradients(self, region: CheckpointRegion) -> bool:
        return any(t.requires_grad for t in region.tensors) or any(
            parameter.requires_grad for parameter in self.module.parameters()
        )

    def _run(self, region: CheckpointRegion) -> Any:
        installation = self.installation
        if installation.progress.on_forward():
            installation.store.begin_order()
        installation.note_inputs(region.tensors)
        self.record.forwards += 1
        self.record.mode = "checkpoint"
        activations = activations_among(region.tensors)

        def tier_of(tensor: torch.Tensor) -> str:
            if tensor_key(tensor) not in activations:
                return "device"
            return installation.tier_of(tensor, self.from_end)

        # Of what has no gradient (a mask with -inf, say) nothing may be lost.
        lossy = {tensor_key(tensor) for tensor in region.tensors if tensor.requires_grad}

        def codec_of(tensor: torch.Tensor) -> str | None:
            return installation.policy.codecs.input if tensor_key(tensor) in lossy else None

        snapshot = LayerSnapshot(self.module, self.name, self.written_buffers)
        region.snapshot = snapshot
        output = run_checkpointed(region, installation.store, tier_of, self.record, codec_of)
        written, missing = snapshot.check_after_forward()
        self.written_buffers = written | (self.written_buffers or set())
        if missing:
            raise LayerRefused(
                f"offload: expected layer '{self.name}' to write the buffers it wrote before, but "
                f"it changed {sorted(missing)} as well, whose earlier values are gone. "
                "Run the step again: they are kept from now on."
            )
        return output


class TokenwiseCall(LayerCall):
    """Stands in for the forward of a module between layers and loss, such as the final norm.

    Run whole, such a module would be the step's peak. It is run by tiles or, where that is refused,
    untouched: to recompute it alone would free nothing.
    """

    attends = False

    def _note_refusal(self, reason: str) -> None:
        """Says nothing: the module is as it was."""

    def _checkpointed(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return self.__wrapped__(*args, **kwargs)


def compilation_reason() -> str:
    """Says so when a call comes from inside a compiled region; else empty.

    Tracing would run the saved-tensor hooks once, on fake tensors, and build their result into the
    graph.
    """
    from torch._C._dynamo.eval_frame import get_eval_frame_callback

    if torch.compiler.is_compiling() or get_eval_frame_callback() not in (None, False):
        return "it is called from a model or layer under torch.compile"
    return ""


def _refusal(name: str, reason: str) -> str:
    remedy = (
        "Compile modules inside the layer instead, such as `layer.mlp.compile()`."
        if "torch.compile" in reason
        else "Load the weights onto a device before the first training step."
    )
    expected = "to hold its weights and run eagerly"
    return f"offload: expected layer '{name}' {expected}, but {reason}. {remedy}"
