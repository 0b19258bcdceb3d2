"""A store that moves no bytes and keeps books: what the host would hold, and what came and went."""

from __future__ import annotations

import contextlib
import weakref
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch

from offload.planner.ledger import Ledger, Purpose, Segment
from offload.store import Store, Ticket

SLOT_BYTES = 4096
"""The arena hands out memory in multiples of this (`csrc/slot_allocator.h`)."""

PURPOSE_OF_ROLE = {"kv": Purpose.KEYS, "input": Purpose.HIDDEN}
"""What a stored tensor is for, by the role that it is stored under; others are saved."""


@dataclass(eq=False)
class PaperCopy:
    """A copy that is under way until the store is next called, which frees its source or buffer."""

    engine: PaperEngine
    begun_at: int
    copy_ms: float = 0.0
    stall_ms: float = 0.0

    def done(self) -> bool:
        """Whether the store was called since."""
        return self.engine.calls > self.begun_at

    settled = done

    def error(self) -> str:
        """Returns nothing: no copy fails."""
        return ""

    def wait(self, stream: int) -> None:
        """Returns at once."""


@dataclass(eq=False)
class PaperTicket:
    """Stands for the bytes of one tensor on the host, until it is dropped."""

    nbytes: int
    offload_copy: PaperCopy


class PaperEngine:
    """Counts what is copied out, what is copied back, and what the host holds.

    Used in place of `offload.store.engine` on meta tensors, whose copies have nothing to move. A
    copy counts as finished when the store is next called: as in a step whose copies keep up.

    Attributes:
        calls: how often the store has looked for finished copies.
        host_bytes: what the host holds now, rounded as the arena rounds.
        host_peak: the most it held.
        out_bytes, back_bytes: copied since the beginning.
    """

    def __init__(self) -> None:
        self.calls = 0
        self.host_bytes = 0
        self.host_peak = 0
        self.out_bytes = 0
        self.back_bytes = 0

    def native_errors(self) -> AbstractContextManager[None]:
        """Returns a context that does nothing."""
        return contextlib.nullcontext()

    def compute_stream(self, device: torch.device) -> int:
        """Returns the one stream there is."""
        return 0

    def offload(self, source: torch.Tensor, nbytes: int, *, leaves: bool = False) -> Any:
        """Books a tensor's bytes on the host."""
        size = -(-nbytes // SLOT_BYTES) * SLOT_BYTES
        self.host_bytes += size
        self.host_peak = max(self.host_peak, self.host_bytes)
        self.out_bytes += nbytes
        ticket = PaperTicket(nbytes, self._begin())
        weakref.finalize(ticket, self._release, size).atexit = False
        return ticket

    def reload(self, ticket: Any, buffer: torch.Tensor, stream: int) -> Any:
        """Books the way back."""
        self.back_bytes += ticket.nbytes
        return self._begin()

    def try_reload(self, ticket: Any, buffer: torch.Tensor, stream: int) -> Any:
        """Books the way back: there is always room."""
        return self.reload(ticket, buffer, stream)

    def put_last(self, ticket: Any) -> None:
        """Does nothing: the order on the disk costs no bytes."""

    def retire(self) -> None:
        """Notes that the store was called; tickets tell of their end themselves."""
        self.calls += 1

    def drain(self) -> None:
        """Does nothing: nothing is under way."""

    def trim(self) -> None:
        """Does nothing: no memory is held."""

    def set_poisoning(self, on: bool) -> None:
        """Does nothing: there is no memory to poison."""

    def _begin(self) -> PaperCopy:
        return PaperCopy(self, self.calls)

    def _release(self, size: int) -> None:
        self.host_bytes -= size


class PaperStore(Store):
    """The store of a step on meta tensors; it tells the ledger what the stored tensors are for.

    Args:
        ledger: the step's.
    """

    def __init__(self, ledger: Ledger) -> None:
        self.engine = PaperEngine()
        super().__init__(self.engine)
        self._ledger = ledger
        self._roles: weakref.WeakKeyDictionary[Ticket, str] = weakref.WeakKeyDictionary()

    def keep(self, tensor: torch.Tensor, *args: Any, role: str = "", **options: Any) -> Ticket:
        """As `Store.keep`."""
        self._ledger.name(tensor, PURPOSE_OF_ROLE.get(role, Purpose.SAVED))
        return super().keep(tensor, *args, role=role, **options)

    def offload(self, tensor: torch.Tensor, *args: Any, role: str = "", **options: Any) -> Ticket:
        """As `Store.offload`."""
        self._ledger.name(tensor, PURPOSE_OF_ROLE.get(role, Purpose.SAVED))
        ticket = super().offload(tensor, *args, role=role, **options)
        self._roles[ticket] = role
        return ticket

    def reload(self, ticket: Ticket) -> torch.Tensor:
        """As `Store.reload`."""
        tensor = super().reload(ticket)
        if self._roles.get(ticket) == "kv":
            self._ledger.name(tensor, Purpose.KEYS)
        return tensor

    def enter(self, segment: Segment) -> None:
        """Writes into a segment that ends what was copied in it, and what the host held.

        Args:
            segment: the one that ends.
        """
        engine = self.engine
        segment.out_bytes, segment.back_bytes = engine.out_bytes, engine.back_bytes
        segment.host_peak, segment.host_bytes = engine.host_peak, engine.host_bytes
        engine.out_bytes = engine.back_bytes = 0
        engine.host_peak = engine.host_bytes
