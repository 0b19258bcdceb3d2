"""What the wrapped layers of one model share."""

from __future__ import annotations

import warnings

import torch

from offload import _native
from offload.devices import type_of
from offload.policy import Policy
from offload.store import Store, default_store
from offload.store.identity import nbytes_of
from offload.store.statistics import Progress, Record


class Installation:
    """The policy of a wrapped model, its counters, and what it has warned of.

    Args:
        policy: how layers are run.
        layer_count: how many layers were wrapped.
        verify: whether each layer's first call is compared whole.
        store: where activations go; None for the process's own.
    """

    def __init__(
        self,
        policy: Policy,
        layer_count: int,
        *,
        verify: bool = False,
        store: Store | None = None,
    ) -> None:
        self.policy = policy
        self.layer_count = layer_count
        self.verify = verify
        self._store = store
        self.progress = Progress()
        self.records: list[Record] = []
        self.written_before = _native.disk_statistics().written_bytes if _native.started() else 0
        self.largest_input_bytes = 0
        self.input_device_type = ""
        self.warned: set[str] = set()

    @property
    def store(self) -> Store:
        """Where activations go."""
        return default_store() if self._store is None else self._store

    def note_inputs(self, tensors: list[torch.Tensor]) -> None:
        """Remembers the largest layer input, for the report."""
        largest = max(tensors, key=nbytes_of, default=None)
        if largest is not None and nbytes_of(largest) > self.largest_input_bytes:
            self.largest_input_bytes = nbytes_of(largest)
            self.input_device_type = type_of(largest.device)

    def wants_host(self, tensor: torch.Tensor) -> bool:
        """Whether what backward needs of a layer with this input leaves the device."""
        large = nbytes_of(tensor) >= int(self.policy.min_bytes)
        return large and not self._stays_on_device(tensor)

    def tier_of(self, tensor: torch.Tensor, from_end: int) -> str:
        """Returns where the input of a layer in checkpoint mode goes, as `OffloadHooks` wants."""
        if self._stays_on_device(tensor) or from_end <= self.policy.keep_last:
            return "ordered"
        if not self.wants_host(tensor):
            return "device"
        return "disk" if self.policy.tier == "disk" else "host"

    def _stays_on_device(self, tensor: torch.Tensor) -> bool:
        tier = self.policy.tier
        return tier == "device" or (tier == "auto" and type_of(tensor.device) == "cpu")

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
        if self.largest_input_bytes >= int(policy.min_bytes):
            return (
                f"all {self.layer_count} layers are among the last {policy.keep_last} that are kept"
            )
        return (
            f"the largest layer input has {self.largest_input_bytes:,} bytes, below min_bytes "
            f"{policy.min_bytes:,}"
        )

    def warn_if_idle(self) -> None:
        """Warns once when a step that was to move something moved nothing."""
        wants_host = self.policy.tier in ("host", "disk") or (
            self.policy.tier == "auto" and self.input_device_type != "cpu"
        )
        if wants_host and (reason := self.idle_reason()):
            self.warn_once("idle", f"offload: a training step moved nothing to the host: {reason}.")

    def warn_once(self, topic: str, message: str) -> None:
        """Warns once per topic and model."""
        if topic not in self.warned:
            self.warned.add(topic)
            warnings.warn(message, stacklevel=3)
