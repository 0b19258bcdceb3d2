"""What was moved, for how long, and who waited: one record a layer."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any
from weakref import WeakSet

import torch

if TYPE_CHECKING:
    from offload.store.ticket import Ticket


ERROR_SAMPLES = 4
"""Tensors of a layer and role whose error is measured: enough to see it, at no cost to speak of."""


@dataclass(eq=False)
class Record:
    """Counters of one layer, summed over all steps, and its tickets that are alive now.

    Attributes:
        mode: how the last call was run: `"tiled"`, `"checkpoint"`, or `""` if neither ever was.
        forwards: calls that will be recomputed.
        recomputes: recomputes in backward; equal to `forwards` when every forward had one backward.
        offloaded_tensors, offloaded_bytes: copies to the host that were started.
        kept_tensors, kept_bytes: saved tensors that stayed on the device, by reference.
        reloaded_bytes: copies back to the device that were started.
        d2h_ms, h2d_ms: time that finished copies took on their queues.
        stall_ms: time that the consumer stood still for a reload.
        errors: what codecs lost of the first tensors of each role, see `note_error`.
    """

    name: str
    mode: str = ""
    forwards: int = 0
    recomputes: int = 0
    offloaded_tensors: int = 0
    offloaded_bytes: int = 0
    kept_tensors: int = 0
    kept_bytes: int = 0
    reloaded_bytes: int = 0
    d2h_ms: float = 0.0
    h2d_ms: float = 0.0
    stall_ms: float = 0.0
    tickets: WeakSet[Ticket] = field(default_factory=WeakSet, repr=False)
    errors: dict[str, list[torch.Tensor]] = field(default_factory=dict, repr=False)

    def note_error(
        self, role: str, tensor: torch.Tensor, decoded: Callable[[], torch.Tensor]
    ) -> None:
        """Measures what a codec lost, for the first `ERROR_SAMPLES` tensors of a role.

        Does not wait for the device.

        Args:
            role: what the tensor is to the layer.
            tensor: as it was.
            decoded: makes it as it will come back; the result is overwritten.
        """
        samples = self.errors.setdefault(role, [])
        if len(samples) < ERROR_SAMPLES:
            with torch.no_grad():
                exact = tensor.detach()
                lost = decoded().sub_(exact)
                norms = [torch.linalg.vector_norm(x, dtype=torch.float32) for x in (lost, exact)]
                samples.append(torch.stack(norms))

    def relative_errors(self) -> dict[str, float]:
        """Returns `||x - decoded|| / ||x||` of each role over what was measured; waits for it."""
        totals = {role: torch.stack(s).double().square().sum(0) for role, s in self.errors.items()}
        return {
            role: (lost / exact).sqrt().item() if exact > 0 else 0.0
            for role, (lost, exact) in totals.items()
        }

    def live_bytes(self, tier: str) -> int:
        """Returns the bytes of this layer's tickets that are alive in a tier now."""
        return sum(ticket.nbytes for ticket in list(self.tickets) if ticket.tier == tier)

    def __deepcopy__(self, memo: dict[int, Any]) -> Record:
        # A copied model starts counting anew: the tickets belong to the original's graphs.
        return Record(self.name)

    def __reduce__(self) -> tuple[type[Record], tuple[str]]:
        return Record, (self.name,)


@dataclass
class Progress:
    """Wall-clock time of steps, from a step's first forward to its last recompute."""

    steps: int = 0
    elapsed_ms: float = 0.0
    _begin: float = 0.0
    _elapsed_before: float = 0.0
    _in_backward: bool = True

    def on_forward(self) -> bool:
        """Notes a layer's forward; true where it begins a step, as the first after a backward."""
        begins = self._in_backward
        if begins:
            self._in_backward = False
            self._begin = time.perf_counter()
            self._elapsed_before = self.elapsed_ms
        return begins

    def on_recompute(self) -> None:
        """Notes a layer's replay; the first one after a forward counts the step."""
        if not self._in_backward:
            self._in_backward = True
            self.steps += 1
        self.elapsed_ms = self._elapsed_before + (time.perf_counter() - self._begin) * 1e3

    def __deepcopy__(self, memo: dict[int, Any]) -> Progress:
        return Progress()
