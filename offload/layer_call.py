"""What stands in for a wrapped layer's `forward`."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from offload.adapters.accelerate import weights_are_elsewhere
from offload.checkpoint import CheckpointRegion, activations_among, run_checkpointed
from offload.errors import LayerRefused, OffloadError
from offload.policy import Policy
from offload.snapshots import BufferSnapshot, ParameterSnapshot
from offload.store import default_store
from offload.store.identity import nbytes_of, tensor_key
from offload.store.statistics import Progress, Record


class Installation:
    """What the wrapped layers of one model share."""

    def __init__(self, policy: Policy, layer_count: int) -> None:
        self.policy = policy
        self.layer_count = layer_count
        self.progress = Progress()
        self.records: list[Record] = []
        self.largest_input_bytes = 0
        self.input_device_type = ""
        self.warned: set[str] = set()

    def note_inputs(self, tensors: list[torch.Tensor]) -> None:
        """Remembers the largest layer input, for the report."""
        largest = max(tensors, key=nbytes_of, default=None)
        if largest is not None and nbytes_of(largest) > self.largest_input_bytes:
            self.largest_input_bytes = nbytes_of(largest)
            self.input_device_type = largest.device.type

    def tier_of(self, tensor: torch.Tensor, from_end: int) -> str:
        """Returns where the input of a layer goes, as `OffloadHooks` wants it."""
        policy = self.policy
        on_device = policy.tier == "device" or (
            policy.tier == "auto" and tensor.device.type == "cpu"
        )
        if on_device or from_end <= policy.keep_last:
            return "ordered"
        return "host" if tensor.nbytes >= int(policy.min_bytes) else "device"

    def idle_reason(self) -> str:
        """Says why nothing was moved to the host so far; empty when something was."""
        policy = self.policy
        if any(record.offloaded_tensors for record in self.records):
            return ""
        if policy.mode == "keep":
            return "mode is 'keep'"
        if not any(record.forwards for record in self.records):
            return "no layer has run with gradients yet"
        if policy.tier == "device":
            return "tier is 'device'"
        if policy.tier == "auto" and self.input_device_type == "cpu":
            return (
                "the model is on the CPU, whose memory is the host's: inputs are kept by reference"
            )
        if self.layer_count <= policy.keep_last:
            return (
                f"all {self.layer_count} layers are among the last {policy.keep_last} that are kept"
            )
        return (
            f"the largest layer input has {self.largest_input_bytes:,} bytes, below min_bytes "
            f"{policy.min_bytes:,}"
        )

    def warn_if_idle(self) -> None:
        """Warns once when a step that was to move something moved nothing."""
        wants_host = self.policy.tier == "host" or (
            self.policy.tier == "auto" and self.input_device_type != "cpu"
        )
        if wants_host and (reason := self.idle_reason()):
            self.warn_once("idle", f"offload: a training step moved nothing to the host: {reason}.")

    def warn_once(self, topic: str, message: str) -> None:
        """Warns once per topic and model."""
        if topic not in self.warned:
            self.warned.add(topic)
            warnings.warn(message, stacklevel=3)


class LayerCall:
    """Stands in for one layer's `forward`: runs it checkpointed where gradients are needed.

    It is an attribute of the layer instance, so module hooks, names and the class stay as they are.
    The forward behind it is looked up at every call, since others (FSDP2) swap a module's class; a
    forward that stood on the instance before is kept and called instead. Copies and pickles with
    its layer.
    """

    is_offload_layer_call = True

    def __init__(
        self, layer: nn.Module, name: str, from_end: int, installation: Installation
    ) -> None:
        self.layer = layer
        self.name = name
        self.from_end = from_end  # 1 for the last layer
        self.installation = installation
        self.instance_forward: Callable[..., Any] | None = layer.__dict__.get("forward")
        self.record = Record(name)
        self.written_buffers: set[str] | None = None
        installation.records.append(self.record)

    @property
    def __wrapped__(self) -> Callable[..., Any]:
        """The layer's own forward, bound; `inspect.signature` finds it here."""
        if self.instance_forward is not None:
            return self.instance_forward
        forward: Callable[..., Any] = type(self.layer).forward.__get__(self.layer)
        return forward

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Runs the layer with the arguments of its own forward."""
        forward = self.__wrapped__
        if not torch.is_grad_enabled() or self.installation.policy.mode == "keep":
            return forward(*args, **kwargs)
        if "torch._dynamo" in sys.modules:
            refuse_compilation(self.name)
        if torch._C._functorch.peek_interpreter_stack() is not None:
            return forward(*args, **kwargs)  # torch.func allows no saved-tensor hooks
        if reason := weights_are_elsewhere(self.layer):
            raise LayerRefused(_refusal(self.name, reason))
        region = CheckpointRegion(forward, args, kwargs, self.on_replay)
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
            parameter.requires_grad for parameter in self.layer.parameters()
        )

    def _run(self, region: CheckpointRegion) -> Any:
        installation = self.installation
        if installation.progress.on_forward():
            default_store().begin_order()
        installation.note_inputs(region.tensors)
        self.record.forwards += 1
        activations = activations_among(region.tensors)

        def tier_of(tensor: torch.Tensor) -> str:
            if tensor_key(tensor) not in activations:
                return "device"
            return installation.tier_of(tensor, self.from_end)

        buffers = BufferSnapshot(self.layer, self.written_buffers)
        parameters = ParameterSnapshot(self.layer, self.name)
        region.snapshots = [buffers, parameters]
        output = run_checkpointed(region, tier_of, self.record)
        parameters.check_after_forward()
        written, missing = buffers.keep_written()
        self.written_buffers = written | (self.written_buffers or set())
        if missing:
            raise LayerRefused(
                f"offload: expected layer '{self.name}' to write the buffers it wrote before, but "
                f"it changed {sorted(missing)} as well, whose earlier values are gone. "
                "Run the step again: they are kept from now on."
            )
        return output

    def on_replay(self) -> None:
        """Called when backward replays a call of this layer."""
        self.record.recomputes += 1
        self.installation.progress.on_recompute()
        self.installation.warn_if_idle()


def refuse_compilation(name: str) -> None:
    """Raises when the call comes from inside a compiled region.

    Tracing would run the saved-tensor hooks once, on fake tensors, and build their result into the
    graph.

    Args:
        name: the layer's, for the message.

    Raises:
        OffloadError: while `torch.compile` traces or runs the caller.
    """
    from torch._C._dynamo.eval_frame import get_eval_frame_callback

    if torch.compiler.is_compiling() or get_eval_frame_callback() not in (None, False):
        raise OffloadError(_refusal(name, "it is called from a model or layer under torch.compile"))


def _refusal(name: str, reason: str) -> str:
    remedy = (
        "Compile modules inside the layer instead, such as `layer.mlp.compile()`."
        if "torch.compile" in reason
        else "Load the weights onto a device before the first training step."
    )
    expected = "to hold its weights and run eagerly"
    return f"offload: expected layer '{name}' {expected}, but {reason}. {remedy}"
