"""The handle on one saved tensor: it owns the bytes until it is released."""

from __future__ import annotations

import weakref
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from offload import _native
from offload.errors import TicketPoisoned
from offload.store import debug
from offload.store.encoding import Encoding
from offload.store.identity import nbytes_of
from offload.store.layout import Layout

if TYPE_CHECKING:
    from offload.store.statistics import Record
    from offload.store.store import Store


@dataclass(eq=False)
class Prefetched:
    """A reload that was started before anybody asked for it."""

    buffer: torch.Tensor
    copy: _native.Copy
    stream: int


class Ticket:
    """What `Store.offload` returns. It belongs to the autograd node (or caller) that holds it.

    Dropping the last reference releases it, on any thread and also when backward never ran: the
    native ticket only marks its slot, and the store frees it with its next call. Reloading does not
    use a ticket up, so a graph kept with `retain_graph=True` can be walked again.

    A ticket of tier `device` holds its tensor by reference and costs nothing.
    """

    def __init__(
        self,
        store: Store,
        tensor: torch.Tensor,
        record: Record | None,
        ahead_bytes: int | None,
        native: _native.Ticket | None = None,
        layout: Layout | None = None,
        encoding: Encoding | None = None,
    ) -> None:
        self.device = tensor.device
        self.nbytes = layout.nbytes if layout is not None else nbytes_of(tensor)
        self.record = record
        self.ahead_bytes = ahead_bytes
        self.poison: str | None = None
        self.native = native
        self.layout = layout
        self.encoding = encoding
        self.prefetched: Prefetched | None = None
        self.previous: weakref.ref[Ticket] | None = None
        self.checksum: int | None = None  # of the stored bytes, in debug mode
        self._store = store
        self._kept = tensor if native is None else None
        self._kept_version = version_of(tensor)

    @property
    def tier(self) -> str:
        """Where the bytes are: `"device"`, `"host"`, `"disk"`, or `"released"`."""
        if self._kept is not None:
            return "device"
        return "released" if self.native is None else _native.tier_of(self.native)

    def prefetch(self) -> None:
        """Starts the reload on the current stream, unless it is under way; only a hint."""
        self._store.prefetch(self)

    def reload(self) -> torch.Tensor:
        """Brings the tensor back.

        The current stream of the tensor's device waits for the copy; on a CPU the call blocks for
        it. The reloads of the tickets stored before this one are started as well.

        Returns:
            A tensor equal to the saved one in values, shape, strides, dtype and device; in values
            only nearly so after a lossy codec.

        Raises:
            TicketPoisoned: if a copy failed, or the saved tensor was changed in place.
            OffloadError: if the ticket was released.
        """
        return self._store.reload(self)

    def release(self) -> None:
        """Gives the bytes back; does not wait for a copy in flight. Twice is harmless."""
        self._kept = None
        self.native = None
        self.prefetched = None

    def host_view(self) -> torch.Tensor:
        """Shows the stored bytes on the host, once they have arrived; blocks until then.

        The view owns the slot: it stays valid after the ticket was released. Do not write to it.

        Returns:
            `[nbytes]` uint8 on the CPU.

        Raises:
            TicketPoisoned: if the copy to the host or the read from the disk failed.
            ValueError: if the ticket's bytes never left the device.
        """
        if self.native is None:
            raise ValueError(
                f"Ticket.host_view: expected a ticket of tier 'host', got '{self.tier}'."
            )
        try:
            slot = _native.host_slot(self.native)
        except _native.CopyFailed as error:
            raise TicketPoisoned(str(error)) from error
        view = torch.frombuffer(slot, dtype=torch.uint8)
        self.check_bytes(view)
        return view

    def check_bytes(self, buffer: torch.Tensor) -> None:
        """In debug mode, raises TicketPoisoned unless a buffer holds the bytes that were stored."""
        if self.checksum is None:
            return
        nbytes = nbytes_of(buffer)
        got = debug.checksum(buffer, nbytes)
        if got != self.checksum:
            raise TicketPoisoned(debug.describe_difference(self.checksum, got, nbytes))

    def kept_tensor(self) -> torch.Tensor | None:
        """Hands out what a ticket of tier `device` holds.

        Returns:
            The tensor itself; None for another tier.

        Raises:
            TicketPoisoned: if the tensor was changed in place since it was saved.
        """
        if self._kept is not None and version_of(self._kept) != self._kept_version:
            self.poison = changed_in_place(self._kept)
            raise TicketPoisoned(self.poison)
        return self._kept


def version_of(tensor: torch.Tensor) -> int | None:
    """Returns autograd's count of in-place changes; inference tensors have none."""
    return None if tensor.is_inference() else tensor._version


def changed_in_place(tensor: torch.Tensor) -> str:
    """Returns the message for a saved tensor that was written to."""
    return (
        f"Ticket.reload: expected the saved tensor of shape {tuple(tensor.shape)} and dtype "
        f"{tensor.dtype} unchanged, but it was modified in place after it was saved for backward. "
        "Clone it before the in-place operation."
    )
