"""Measures what the tiers are made of: host allocations, codecs, the disk, copies to a card."""

from __future__ import annotations

import gc
import mmap
import os
import statistics
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch

from offload import _native
from offload.policy import MIN_HOST_BYTES
from offload.store import codec as codecs
from offload.store import default_store, engine

Row = dict[str, Any]

PIECE_BYTES = 8 << 20
DISK_THREADS = 2
"""Both as `csrc/disk_tier.h` has them: the raw loop does the same with nothing around it."""
DISK_TENSOR_BYTES = 16 << 20
ROUNDS = 3
PAGE_BYTES = 4096


def seconds_of(action: Callable[[], Any]) -> float:
    """Runs something once by the clock."""
    begin = time.perf_counter()
    action()
    return time.perf_counter() - begin


def _set_cap(nbytes: int) -> None:
    steps = -(-nbytes // MIN_HOST_BYTES) + 1
    engine.set_host_cap(steps * MIN_HOST_BYTES)


def resident_bytes() -> int:
    """Returns this process's resident memory now, page-locked memory included."""
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * PAGE_BYTES


# -- allocations ---------------------------------------------------------------------------------


def _touched(nbytes: int) -> torch.Tensor:
    tensor = torch.empty(nbytes, dtype=torch.uint8)
    tensor[::PAGE_BYTES] = 0  # until then the system has only promised the memory
    return tensor


def _pinned(nbytes: int) -> torch.Tensor:
    return torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)


def measure_allocations(nbytes: int, count: int, device: torch.device) -> Iterator[Row]:
    """Allocates host memory for some tensors, frees it, and allocates it again.

    All is done `ROUNDS` times, the ways in turn. The best round counts: a virtual machine gets each
    page from its host when it first touches it, ten times slower than the system hands out pages
    that it has, and charges it to whoever comes first.

    Args:
        nbytes: Of one tensor.
        count: How many at once.
        device: A card, for which the arena is page-locked and torch's allocator is measured too.

    Yields:
        A row for the arena, malloc, and torch's pinned allocator: seconds from nothing and after a
        free, and by how much resident memory grew.
    """
    _set_cap(count * (nbytes + PAGE_BYTES))
    if device.type == "cuda":
        engine.request_pinning(device)
    ways: dict[str, Callable[[int], Any]] = {"arena": _native.allocate, "malloc": _touched}
    if device.type == "cuda":
        ways["torch pinned"] = _pinned
    rounds: dict[str, list[Row]] = {name: [] for name in ways}
    for _ in range(ROUNDS):
        for name, allocate in ways.items():
            rounds[name].append(_allocate_twice(allocate, nbytes, count))
            default_store().trim()
    for name, rows in rounds.items():
        best = min(row["seconds"] for row in rows)
        yield {
            "what": "allocation",
            "name": name,
            "tensors": count,
            "asked_bytes": nbytes * count,
            "resident_bytes": max(row["resident_bytes"] for row in rows),
            "seconds": best,
            "seconds_again": min(row["seconds_again"] for row in rows),
            "gb_per_s": nbytes * count / best / 1e9,
            "rounds": rows,
        }


def _allocate_twice(allocate: Callable[[int], Any], nbytes: int, count: int) -> Row:
    before = resident_bytes()
    held: list[Any] = []

    def fill() -> None:
        held.extend(allocate(nbytes) for _ in range(count))

    first = seconds_of(fill)
    grown = resident_bytes() - before
    held.clear()
    gc.collect()
    return {"seconds": first, "resident_bytes": grown, "seconds_again": seconds_of(fill)}


# -- codecs --------------------------------------------------------------------------------------


def measure_codecs(nbytes: int, device: torch.device, rounds: int) -> Iterator[Row]:
    """Encodes and decodes a bfloat16 tensor, on the CPU with one thread and with all.

    Args:
        nbytes: Of the tensor.
        device: Where it lies.
        rounds: Timed runs; the median counts, the best is told as well.

    Yields:
        A row for each codec, direction and number of threads; GB/s are of bfloat16.
    """
    tensor = torch.randn(nbytes // 2048, 1024, device=device).bfloat16()
    on_card = device.type == "cuda"
    threads = torch.get_num_threads()
    for used in [0] if on_card else sorted({1, threads}):
        if used:
            torch.set_num_threads(used)
        for name in ("fp8", "int8"):
            for way, action in _codec_calls(tensor, name).items():
                seconds = [seconds_of(_synchronized(action, device)) for _ in range(rounds)]
                yield {
                    "what": "codec",
                    "name": f"{name} {way}",
                    "threads": used or None,
                    "gb_per_s": tensor.nbytes / statistics.median(seconds) / 1e9,
                    "best_gb_per_s": tensor.nbytes / min(seconds) / 1e9,
                }
    torch.set_num_threads(threads)


def _codec_calls(tensor: torch.Tensor, codec: str) -> dict[str, Callable[[], Any]]:
    """Returns the codec's two directions, into memory that is there already."""
    encoded, decoded = codecs.encode(tensor, codec), torch.empty_like(tensor)
    device = tensor.device.index if tensor.device.type == "cuda" else -1
    layout = (tuple(tensor.shape), tensor.stride())
    stream, threads = engine.compute_stream(tensor.device), torch.get_num_threads()
    common = (device, codec, "bfloat16")
    return {  # they hold the tensors, not addresses alone
        "encode": lambda: _native.encode(
            *common, tensor.data_ptr(), *layout, encoded.data_ptr(), stream, None, threads
        ),
        "decode": lambda: _native.decode(
            *common, encoded.data_ptr(), decoded.data_ptr(), *layout, stream, threads
        ),
    }


def _synchronized(action: Callable[[], Any], device: torch.device) -> Callable[[], None]:
    def run() -> None:
        action()
        if device.type == "cuda":
            torch.cuda.synchronize(device)

    return run


# -- disk ----------------------------------------------------------------------------------------


def measure_disk(directory: str, nbytes: int) -> Iterator[Row]:
    """Writes and reads by a raw loop and by the disk tier, `ROUNDS` times in turn.

    Args:
        directory: Where; the files have no names.
        nbytes: How much.

    Yields:
        A row for the raw loop and one for the tier, with the median of both rates.
    """
    ways = {"raw loop": _raw_disk, "tier": _tier_disk}
    rounds: dict[str, list[Row]] = {name: [] for name in ways}
    for _ in range(ROUNDS):
        for name, measure in ways.items():
            rounds[name].append(measure(directory, nbytes))
    for name, rows in rounds.items():
        direct = rows[-1].get("direct", True)
        yield {
            "what": "disk",
            "name": name if direct else f"{name}, through the page cache",
            "bytes": nbytes,
            **{
                rate: statistics.median(row[rate] for row in rows)
                for rate in ("write_gb_per_s", "read_gb_per_s")
            },
            "rounds": rows,
        }


def _raw_disk(directory: str, nbytes: int) -> Row:
    memory = mmap.mmap(-1, nbytes)
    memory.madvise(mmap.MADV_HUGEPAGE)
    torch.frombuffer(memory, dtype=torch.int64).random_()
    fd = os.open(directory, os.O_TMPFILE | os.O_RDWR | os.O_DIRECT, 0o600)
    try:
        os.posix_fallocate(fd, 0, nbytes)
        view = memoryview(memory)
        rates = {
            "write_gb_per_s": nbytes / _in_pieces(fd, view, os.pwritev) / 1e9,
            "read_gb_per_s": nbytes / _in_pieces(fd, view, os.preadv) / 1e9,
        }
    finally:
        os.close(fd)
    return rates


def _in_pieces(fd: int, memory: memoryview, move: Callable[..., int]) -> float:
    pieces = iter(range(0, len(memory), PIECE_BYTES))  # `next` on it is atomic

    def work() -> None:
        for begin in pieces:
            piece = memory[begin : begin + PIECE_BYTES]
            moved = move(fd, [piece], begin)
            if moved != len(piece):
                raise OSError(f"raw loop: expected {len(piece)} bytes to move, got {moved}.")

    threads = [threading.Thread(target=work) for _ in range(DISK_THREADS)]

    def run() -> None:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    return seconds_of(run)


def _tier_disk(directory: str, nbytes: int) -> Row:
    store = default_store()
    _set_cap(2 * nbytes)
    engine.set_disk(directory, 2 * nbytes)
    before = _native.disk_statistics()
    tensor = torch.empty(DISK_TENSOR_BYTES, dtype=torch.uint8).random_()
    count = nbytes // DISK_TENSOR_BYTES
    # Clones, since tickets of one tensor would share its bytes.
    tickets = [store.offload(tensor.clone(), leaves=True) for _ in range(count)]
    while any(ticket.tier == "host" for ticket in tickets):
        store.synchronize()
    for ticket in reversed(tickets):
        ticket.reload()
    after = _native.disk_statistics()
    tickets.clear()
    store.synchronize()
    written, read = (
        getattr(after, f"{way}_bytes") - getattr(before, f"{way}_bytes")
        for way in ("written", "read")
    )
    return {
        "direct": after.direct,
        "write_gb_per_s": written / (after.write_ms - before.write_ms) / 1e6,
        "read_gb_per_s": read / (after.read_ms - before.read_ms) / 1e6,
    }


# -- copies to and from a card -------------------------------------------------------------------


def measure_copies(nbytes: int, device: torch.device, rounds: int) -> Iterator[Row]:
    """Copies one tensor to the host and back by the store, and by torch with pinned memory.

    Args:
        nbytes: Of the tensor.
        device: A card.
        rounds: Timed runs; the median counts.

    Yields:
        A row for torch and one for the store.
    """
    tensor = torch.empty(nbytes, dtype=torch.uint8, device=device).random_()
    pinned = torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)
    store = default_store()
    _set_cap(2 * nbytes)

    def offload() -> None:
        store.offload(tensor[:]).release()
        store.synchronize()

    ticket = store.offload(tensor)
    ways = {
        "torch pinned": (
            lambda: pinned.copy_(tensor, non_blocking=True),
            lambda: tensor.copy_(pinned, non_blocking=True),
        ),
        "store": (offload, ticket.reload),
    }
    for name, actions in ways.items():
        rates = []
        for action in actions:
            run = _synchronized(action, device)
            run()
            rates.append(nbytes / statistics.median(seconds_of(run) for _ in range(rounds)) / 1e9)
        yield {
            "what": "copy",
            "name": name,
            "bytes": nbytes,
            "d2h_gb_per_s": rates[0],
            "h2d_gb_per_s": rates[1],
        }
