"""The process's native copy engine and host arena, with this package's errors."""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from offload import _native
from offload.errors import ArenaFull, OffloadError, TicketPoisoned
from offload.policy import MIN_HOST_BYTES, format_bytes
from offload.store.budget import (
    HostBudget,
    default_budget,
    free_disk_bytes,
    named_budget,
    reservable,
)
from offload.store.limits import pinning_limits

_pinning = {"requested": False, "warned": False}


@dataclass
class _Limits:
    """How large the arena may be: what was reserved when it was made, and its cap now."""

    reserved: HostBudget | None = None
    cap: HostBudget | None = None


_limits = _Limits()


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
        cap_bytes: more than the machine has, or `ulimit -v` leaves, counts as all of that.

    Raises:
        OffloadError: if more than that is in use, or less than 64 MiB can be had.
    """
    reserved = _limits.reserved or reservable()
    with native_errors():
        started = _native.started()
        committed_bytes = _native.arena_statistics().committed_bytes if started else 0
    _set_cap(named_budget(cap_bytes, reserved, committed_bytes), reserved)


def set_poisoning(on: bool) -> None:
    """Overwrites arena memory as it is handed out and as it goes free; for debugging."""
    if on:
        _ensure_arena()
    if _native.started():
        with native_errors():
            _native.set_poisoning(on)


def cap_reason() -> str:
    """Says where the arena's cap comes from; empty before the arena was made."""
    return _limits.cap.reason if _limits.cap else ""


def pin_refusal() -> str:
    """Says why, and beyond which size, the arena is pageable; empty where it is not."""
    arena = _native.arena_statistics()
    if not arena.pin_refusal:
        return ""
    return (
        f"{arena.pin_refusal} (asked for {format_bytes(MIN_HOST_BYTES)} beyond "
        f"{format_bytes(arena.pinnable_bytes)} page-locked; limits here: "
        f"{pinning_limits().found()})"
    )


def set_disk(directory: str, cap_bytes: int | None) -> None:
    """Names the directory that spills go to, for the whole process; the last call wins.

    Args:
        directory: on a fast drive.
        cap_bytes: of what lies there at once; None takes 90 % of what is free.

    Raises:
        OffloadError: if no file can be made there, or tickets lie in another directory now.
    """
    _ensure_arena()
    present = _native.disk_statistics()
    wanted = os.path.realpath(directory)
    if present.directory == wanted and cap_bytes in (None, present.cap_bytes):
        return
    with native_errors():
        _native.set_disk(wanted, free_disk_bytes(wanted) if cap_bytes is None else cap_bytes)


def end_disk() -> None:
    """Ends spilling for the whole process; raises while tickets are on the disk."""
    with native_errors():
        _native.set_disk("", 0)


def request_pinning(device: torch.device) -> None:
    """Page-locks the arena's memory from now on; warns once if the system refuses."""
    _ensure_arena()
    with native_errors():
        _native.enable_pinning(_index_of(device))
    _pinning["requested"] = True


def _ensure_started(device: torch.device) -> None:
    _ensure_arena()
    if device.type == "cuda" and not _pinning["requested"]:
        request_pinning(device)


def _ensure_arena() -> None:
    if not _native.started():
        _set_cap(default_budget(), reservable())


def _set_cap(cap: HostBudget, reserved: HostBudget) -> None:
    cap_bytes = min(cap.cap_bytes, reserved.cap_bytes)
    if cap_bytes < MIN_HOST_BYTES:
        raise OffloadError(
            f"host arena: expected {format_bytes(MIN_HOST_BYTES)} of host memory or more, got "
            f"{format_bytes(cap_bytes)}, {cap.reason}. Raise that limit, or use "
            "Policy(tier='device')."
        )
    with native_errors():
        if _native.started():
            _native.set_cap(cap_bytes)
        else:
            _native.start(reserved.cap_bytes, cap_bytes)
    _limits.reserved, _limits.cap = reserved, cap


def _warn_if_not_pinned() -> None:
    if not _pinning["requested"] or _pinning["warned"]:
        return
    if refusal := pin_refusal():
        _pinning["warned"] = True
        remedies = pinning_limits().remedies(_native.arena_statistics().pinnable_bytes)
        warnings.warn(
            f"offload: pinned host memory was refused: {refusal}. What lies beyond is pageable, "
            f"and its copies are slower. {remedies}",
            stacklevel=2,
        )


def _index_of(device: torch.device) -> int:
    """Returns the native index: a card's own, or -1 for the CPU."""
    return device.index if device.type == "cuda" else -1
