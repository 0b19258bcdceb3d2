"""The process's native copy engine and host arena, with this package's errors."""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from offload import _native
from offload.errors import ArenaFull, OffloadError, TicketPoisoned
from offload.store.budget import default_cap_bytes, free_disk_bytes, physical_bytes

_pinning = {"requested": False, "warned": False}


@contextmanager
def native_errors() -> Iterator[None]:
    """Turns the native module's errors into public ones."""
    try:
        yield
    except _native.ArenaFull as error:
        raise ArenaFull(
            error.asked_bytes,
            error.free_bytes,
            error.cap_bytes,
            _native.residency_statistics().write_refusal if _native.started() else "",
        ) from None
    except _native.CopyFailed as error:
        raise TicketPoisoned(str(error)) from error
    except _native.Error as error:
        raise OffloadError(str(error)) from error


def compute_stream(device: torch.device) -> int:
    """Returns the handle of the stream that the caller computes on now; 0 for the CPU's thread."""
    if device.type == "cuda":
        return torch.cuda.current_stream(device).cuda_stream
    return 0


def offload(source: torch.Tensor, nbytes: int, *, leaves: bool = False) -> _native.Ticket:
    """Starts the copy of `nbytes` at a tensor's first element; see `Store.offload`."""
    _ensure_started(source.device)
    stream = compute_stream(source.device)
    with native_errors():
        return _native.offload(_index_of(source.device), source.data_ptr(), nbytes, stream, leaves)


def reload(ticket: _native.Ticket, buffer: torch.Tensor, stream: int) -> _native.Copy:
    """Starts the copy of a ticket's bytes into a buffer that was allocated on `stream`."""
    with native_errors():
        return _native.reload(ticket, buffer.data_ptr(), stream)


def try_reload(ticket: _native.Ticket, buffer: torch.Tensor, stream: int) -> _native.Copy | None:
    """As `reload`, but None where that would wait for room in the arena."""
    with native_errors():
        return _native.try_reload(ticket, buffer.data_ptr(), stream)


def put_last(ticket: _native.Ticket) -> None:
    """Makes a ticket the last that goes to the disk."""
    with native_errors():
        _native.put_last(ticket)


def retire() -> None:
    """Frees the slots of tickets that are gone and whose copies have finished. Never blocks."""
    if _native.started():
        with native_errors():
            _native.retire()
        _warn_if_not_pinned()


def drain() -> None:
    """Blocks until no copy is in flight."""
    if _native.started():
        with native_errors():
            _native.drain()


def trim() -> None:
    """Gives the arena's unused memory back to the system."""
    if _native.started():
        with native_errors():
            _native.trim()


def set_host_cap(cap_bytes: int) -> None:
    """Sets the arena's cap for the whole process; the last call wins.

    Args:
        cap_bytes: more than the machine has counts as all it has.

    Raises:
        OffloadError: if more than that is in use.
    """
    cap_bytes = min(cap_bytes, physical_bytes())
    with native_errors():
        if _native.started():
            _native.set_cap(cap_bytes)
        else:
            _native.start(physical_bytes(), cap_bytes)


def set_disk(directory: str, cap_bytes: int | None) -> None:
    """Names the directory that spills go to, for the whole process; the last call wins.

    Args:
        directory: on a fast drive.
        cap_bytes: of what lies there at once; None takes 90 % of what is free.

    Raises:
        OffloadError: if no file can be made there, or tickets lie in another directory now.
    """
    if not _native.started():
        set_host_cap(default_cap_bytes())
    present = _native.disk_statistics()
    wanted = os.path.realpath(directory)
    if present.directory == wanted and cap_bytes in (None, present.cap_bytes):
        return
    with native_errors():
        _native.set_disk(wanted, free_disk_bytes(wanted) if cap_bytes is None else cap_bytes)


def request_pinning(device: torch.device) -> None:
    """Page-locks the arena's memory from now on; warns once if the system refuses."""
    if not _native.started():
        set_host_cap(default_cap_bytes())
    with native_errors():
        _native.enable_pinning(_index_of(device))
    _pinning["requested"] = True


def _ensure_started(device: torch.device) -> None:
    if not _native.started():
        set_host_cap(default_cap_bytes())
    if device.type == "cuda" and not _pinning["requested"]:
        request_pinning(device)


def _warn_if_not_pinned() -> None:
    if not _pinning["requested"] or _pinning["warned"]:
        return
    if refusal := _native.arena_statistics().pin_refusal:
        _pinning["warned"] = True
        warnings.warn(
            f"offload: the system refused to page-lock (pin) host memory: {refusal}. "
            "Copies use pageable memory and are slower. Raise `ulimit -l`, or lower "
            "Policy.host_bytes.",
            stacklevel=2,
        )


def _index_of(device: torch.device) -> int:
    """Returns the native index: a card's own, or -1 for the CPU."""
    return device.index if device.type == "cuda" else -1
