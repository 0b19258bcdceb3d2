"""Tickets, copies in flight and prefetch order, on top of the native copy engine."""

from __future__ import annotations

import itertools
import os
import threading
import weakref
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from offload import _native
from offload.errors import OffloadError, TicketPoisoned
from offload.store import debug, engine
from offload.store.copying import Engine
from offload.store.encoding import encoding_of
from offload.store.identity import TensorKey, nbytes_of, storage_reference, tensor_key
from offload.store.layout import compact
from offload.store.statistics import Record
from offload.store.ticket import Prefetched, Ticket, changed_in_place, version_of

PREFETCH_BYTES = 128 << 20
"""Bound of the reloads started ahead of use, a device; one ticket is always allowed.

Whoever stores a ticket may name a smaller one."""

SWEEP_ENTRIES = 256
"""Tickets known for sharing before those that are gone are looked for."""
CHAIN_STEPS = 64
"""How far back a reload looks for something to start; tickets kept on the device cost a step."""


@dataclass
class _Source:
    """A tensor that a copy to the host still reads (rule 2), and the ticket to tell of it."""

    copy: _native.Copy
    tensor: torch.Tensor
    version: int | None
    ticket: weakref.ref[Ticket]


class Store:
    """Moves tensors between a device and the host arena. One a process: `default_store()`.

    The ordering rules are the numbered NOTE in `csrc/copy_engine.h`; this class keeps those that
    concern tensors: sources and dropped buffers stay referenced until their copy is done (2, 6), a
    foreign tensor that was changed in place poisons its ticket (5), a prefetched buffer is used
    only on the stream it was allocated for (7). Thread-safe. Finalizers of tickets never enter it
    (9).

    Args:
        engine: moves the bytes; the process's own unless a step is only planned.
    """

    def __init__(self, engine: Engine = engine) -> None:
        self._engine = engine
        self._lock = threading.Lock()
        self._sources: dict[torch.device, deque[_Source]] = {}
        self._buffers: list[Prefetched] = []
        self._last: dict[torch.device, weakref.ref[Ticket]] = {}
        self._prefetched: weakref.WeakSet[Ticket] = weakref.WeakSet()
        self._shared: dict[
            tuple[TensorKey, str | None], tuple[weakref.ref[Ticket], StorageWeakRef]
        ] = {}
        self._sweep_at = SWEEP_ENTRIES  # doubles with what lives, so that sweeps cost a constant
        self._untimed: deque[tuple[_native.Copy, Record, bool]] = deque()
        self._debug = False

    def set_debug(self, on: bool) -> None:
        """Switches the debug mode (`offload.store.debug`).

        Args:
            on: for what is stored from now on.

        Raises:
            OffloadError: if the package `xxhash` is missing.
        """
        if on:
            debug.require_xxhash()
        self._engine.set_poisoning(on)
        self._debug = on

    # -- storing ---------------------------------------------------------------------------------

    def keep(
        self,
        tensor: torch.Tensor,
        record: Record | None = None,
        *,
        in_order: bool = False,
        ahead_bytes: int | None = None,
        role: str = "",
    ) -> Ticket:
        """Stores a tensor by reference; with `in_order`, its reload starts those before it.

        `role` is for stores that count: nothing is encoded.
        """
        if in_order:
            self.retire()  # the last chance to let sources go before a loss is computed
        ticket = Ticket(self, tensor, record, ahead_bytes)
        if record is not None:
            record.kept_tensors += 1
            record.kept_bytes += nbytes_of(tensor)
            record.tickets.add(ticket)
        if in_order:
            with self._lock:
                self._link(ticket)
        return ticket

    def offload(
        self,
        tensor: torch.Tensor,
        record: Record | None = None,
        *,
        in_order: bool = True,
        ahead_bytes: int | None = None,
        leaves: bool = False,
        codec: str | None = None,
        role: str = "",
    ) -> Ticket:
        """Starts the copy of a tensor to the host and returns the ticket that owns the bytes.

        The copy is ordered after what the current stream of the tensor's device has queued. The
        call returns at once, unless copies in flight exceed the engine's bound; then it waits for
        the oldest. An identical view that is stored already shares its ticket.

        Args:
            tensor: a plain strided tensor (`identity.is_plain`) on the CPU or a CUDA device.
                Tensors without elements are kept by reference.
            record: where to count it.
            in_order: whether reloads of later tickets start this one's; `link` does it later.
            ahead_bytes: how much of what was stored before it its reload starts ahead.
            leaves: whether it goes on to the disk at once, and not only when the arena is full.
            codec: encodes it on its device first, where it takes such a tensor (`encoding_of`);
                None copies the bytes, and packs those of bool.
            role: what the record counts the codec's error under.

        Returns:
            A ticket of tier `host`; with no elements, of tier `device`.

        Raises:
            ArenaFull: if neither the host arena nor the disk can take it below their caps.
            OffloadError: in a forked child, while a CUDA graph is captured, or after the exit
                began.
        """
        if tensor.numel() == 0:
            return self.keep(tensor, record, ahead_bytes=ahead_bytes)
        self.retire()
        key = tensor_key(tensor), codec
        shared = self._find_shared(key)
        if shared is not None:
            return shared
        encoding = encoding_of(tensor, codec)
        source, layout = compact(tensor if encoding is None else encoding.encode(tensor))
        version = version_of(source) if source is tensor else None
        native = self._engine.offload(source, layout.nbytes, leaves=leaves)
        if record is not None and encoding is not None and encoding.loses and not tensor.is_meta:
            record.note_error(role, tensor, lambda: encoding.decode(source))
        ticket = Ticket(self, tensor, record, ahead_bytes, native, layout, encoding)
        if self._debug:
            ticket.checksum = debug.checksum(source, layout.nbytes)
        entry = _Source(native.offload_copy, source, version, weakref.ref(ticket))
        with self._lock:
            self._sources.setdefault(tensor.device, deque()).append(entry)
            self._shared[key] = (weakref.ref(ticket), storage_reference(tensor))
            if in_order:
                self._link(ticket)
            if record is not None:
                record.offloaded_tensors += 1
                record.offloaded_bytes += layout.nbytes
                record.tickets.add(ticket)
                self._untimed.append((native.offload_copy, record, False))
        self.retire()
        return ticket

    def _find_shared(self, key: tuple[TensorKey, str | None]) -> Ticket | None:
        with self._lock:
            if len(self._shared) >= self._sweep_at:
                for stale in [k for k, (ticket, _) in self._shared.items() if ticket() is None]:
                    del self._shared[stale]
                self._sweep_at = max(SWEEP_ENTRIES, 2 * len(self._shared))
            found = self._shared.get(key)
        ticket = found[0]() if found is not None else None
        return ticket if ticket is not None and ticket.native is not None else None

    def link(self, ticket: Ticket) -> None:
        """Puts a ticket that was stored out of order behind those stored so far."""
        with self._lock:
            self._link(ticket)
        if ticket.native is not None:
            self._engine.put_last(ticket.native)

    def _link(self, ticket: Ticket) -> None:
        ticket.previous = self._last.get(ticket.device)
        self._last[ticket.device] = weakref.ref(ticket)

    def begin_order(self) -> None:
        """Ends the order chain: later tickets do not prefetch those of earlier graphs."""
        with self._lock:
            self._last.clear()

    # -- reloading -------------------------------------------------------------------------------

    def prefetch(self, ticket: Ticket) -> None:
        """Starts a ticket's reload; see `Ticket.prefetch`."""
        with self._lock:
            if ticket.native is None or ticket.prefetched is not None or ticket.poison is not None:
                return
            try:
                self._begin_reload(ticket, hint=True)
            except (OffloadError, torch.OutOfMemoryError):
                return  # whoever needs the tensor meets the error

    def reload(self, ticket: Ticket) -> torch.Tensor:
        """Brings a ticket's tensor back; see `Ticket.reload`."""
        self.retire()
        self._check_source(ticket)
        kept = ticket.kept_tensor()
        if kept is not None:
            self._prefetch_before(ticket)
            return kept
        if ticket.native is None or ticket.layout is None:
            raise OffloadError(
                "Ticket.reload: expected a live ticket, got a released one. Reload it first."
            )
        stored = ticket.layout.restore(self._reloaded_buffer(ticket))
        return stored if ticket.encoding is None else ticket.encoding.decode(stored)

    def _reloaded_buffer(self, ticket: Ticket) -> torch.Tensor:
        stream = self._engine.compute_stream(ticket.device)
        with self._lock:
            if ticket.prefetched is not None and ticket.prefetched.stream != stream:
                ticket.prefetched = (
                    None  # rule 7; the buffer stays referenced until its copy is done
                )
            if ticket.prefetched is None:
                self._begin_reload(ticket)
            reload = ticket.prefetched
            assert reload is not None
            ticket.prefetched = None
            self._prefetched.discard(ticket)
        self._prefetch_before(ticket)
        try:
            with self._engine.native_errors():
                reload.copy.wait(stream)
            ticket.check_bytes(reload.buffer)
        except TicketPoisoned as error:
            ticket.poison = str(error)
            raise
        finally:
            with self._lock:
                # From here on the stream's own order protects the buffer, also when it is freed.
                self._buffers = [buffer for buffer in self._buffers if buffer is not reload]
                if ticket.record is not None:
                    self._untimed.append((reload.copy, ticket.record, True))
        return reload.buffer

    def _check_source(self, ticket: Ticket) -> None:
        """Raises when the copy out failed, or a change of the tensor may overtake it (rule 5)."""
        with self._lock:
            for source in self._sources.get(ticket.device, ()):
                if source.ticket() is ticket:
                    self._poison_if_changed(source)
        if ticket.poison is not None:
            raise TicketPoisoned(ticket.poison)

    def _begin_reload(self, ticket: Ticket, *, hint: bool = False) -> None:
        """Allocates the buffer on the current stream and starts the copy. Requires the lock.

        As a hint it does nothing where the copy would have to wait for room in the arena.
        """
        assert ticket.native is not None
        assert ticket.layout is not None
        stream = self._engine.compute_stream(ticket.device)
        buffer = ticket.layout.new_buffer(ticket.device)
        if self._debug:
            debug.poison(buffer)
        try:
            start = self._engine.try_reload if hint else self._engine.reload
            copy = start(ticket.native, buffer, stream)
        except TicketPoisoned as error:
            ticket.poison = str(error)
            raise
        if copy is None:
            return
        ticket.prefetched = Prefetched(buffer, copy, stream)
        self._buffers.append(ticket.prefetched)
        self._prefetched.add(ticket)
        if ticket.record is not None:
            ticket.record.reloaded_bytes += ticket.nbytes

    def _prefetch_before(self, ticket: Ticket) -> None:
        """Starts the reloads of the tickets stored before this one, within the bound.

        Nothing depends on it: a wrong guess costs time and, until the ticket goes, one buffer.
        """
        bound = PREFETCH_BYTES if ticket.ahead_bytes is None else ticket.ahead_bytes
        with self._lock:
            ahead = sum(t.nbytes for t in self._prefetched if t.device == ticket.device)
        for before in itertools.islice(_chain(ticket), CHAIN_STEPS):
            if before.native is None:
                continue
            if before.prefetched is None:
                if ahead > 0 and ahead + before.nbytes > bound:
                    return
                self.prefetch(before)
                ahead += before.nbytes

    # -- housekeeping ----------------------------------------------------------------------------

    def retire(self) -> None:
        """Lets go of what finished copies held, and counts their times. Never blocks."""
        with self._lock, self._engine.native_errors():
            for sources in self._sources.values():
                while sources and sources[0].copy.done():
                    self._poison_if_changed(sources.popleft())
            self._buffers = [reload for reload in self._buffers if not reload.copy.done()]
            for _ in range(len(self._untimed)):
                copy, record, is_reload = self._untimed.popleft()
                if not copy.settled():
                    self._untimed.append((copy, record, is_reload))
                elif is_reload:
                    record.h2d_ms += copy.copy_ms
                    record.stall_ms += copy.stall_ms
                else:
                    record.d2h_ms += copy.copy_ms
        self._engine.retire()

    @staticmethod
    def _poison_if_changed(source: _Source) -> None:
        ticket = source.ticket()
        if ticket is None:
            return
        if error := source.copy.error():
            ticket.poison = error
        elif source.version is not None and version_of(source.tensor) != source.version:
            ticket.poison = changed_in_place(source.tensor)

    def synchronize(self) -> None:
        """Blocks until no copy is in flight, then retires. For measurements and tests."""
        self._engine.drain()
        self.retire()

    def trim(self) -> None:
        """Gives arena memory that no ticket uses back to the system."""
        self.synchronize()
        self._engine.trim()

    def held_bytes(self) -> int:
        """Returns the device bytes that copies in flight keep alive now."""
        with self._lock:
            sources = sum(s.tensor.nbytes for queue in self._sources.values() for s in queue)
            return sources + sum(reload.buffer.nbytes for reload in self._buffers)

    def reset_lock_after_fork(self) -> None:
        """Makes the lock anew in a forked child, where another thread may have held it."""
        self._lock = threading.Lock()


_STORE = Store()
os.register_at_fork(after_in_child=_STORE.reset_lock_after_fork)


def default_store() -> Store:
    """Returns the process's store."""
    return _STORE


def _chain(ticket: Ticket) -> Iterator[Ticket]:
    while ticket.previous is not None and (before := ticket.previous()) is not None:
        yield before
        ticket = before
