"""The native module: pointers, byte counts, device indices and stream handles cross, no tensors."""

from collections.abc import Sequence
from typing import final

BUILD_VERSION: str
SOURCE_HASH: str

class Error(RuntimeError): ...

class ArenaFull(Error):
    asked_bytes: int
    free_bytes: int
    cap_bytes: int

class CopyFailed(Error): ...
class EngineUnusable(Error): ...

def built_with_cuda() -> bool: ...

@final
class Slot:
    """Arena memory, through the buffer protocol. Every view keeps the slot from being reused."""

    @property
    def nbytes(self) -> int: ...
    @property
    def address(self) -> int: ...
    def __buffer__(self, flags: int, /) -> memoryview: ...

@final
class Copy:
    def done(self) -> bool: ...
    def settled(self) -> bool: ...
    def synchronize(self) -> None: ...
    def wait(self, stream: int) -> None: ...
    def error(self) -> str: ...
    @property
    def nbytes(self) -> int: ...
    @property
    def copy_ms(self) -> float: ...
    @property
    def stall_ms(self) -> float: ...

@final
class Ticket:
    @property
    def nbytes(self) -> int: ...
    @property
    def offload_copy(self) -> Copy: ...

class ArenaStatistics:
    cap_bytes: int
    committed_bytes: int
    pinned_bytes: int
    live_bytes: int
    live_slots: int
    peak_live_bytes: int
    peak_committed_bytes: int
    pin_refusal: str
    pinnable_bytes: int
    numa_node: int

class DiskStatistics:
    """Of an unnamed tier with a cap of 0 where there is no disk."""

    directory: str
    direct: bool
    cap_bytes: int
    file_bytes: int
    live_bytes: int
    live_extents: int
    peak_live_bytes: int
    @property
    def written_bytes(self) -> int: ...
    @property
    def read_bytes(self) -> int: ...
    @property
    def write_ms(self) -> float: ...
    @property
    def read_ms(self) -> float: ...
    @property
    def failed_transfers(self) -> int: ...

class ResidencyStatistics:
    spilled_tickets: int
    fetched_tickets: int
    evicted_tickets: int
    write_refusal: str

class EngineStatistics:
    offloads: int
    reloads: int
    offloaded_bytes: int
    reloaded_bytes: int
    failed_copies: int
    in_flight_bytes: int
    peak_in_flight_bytes: int
    back_pressure_ms: float

# One engine and one arena a process, made by the first call to `start` and closed at exit.
# `device` is a CUDA index, or -1 - i for host device i (so -1 is the CPU).

def start(reserve_bytes: int, cap_bytes: int) -> None: ...
def started() -> bool: ...
def enable_pinning(device: int) -> None: ...
def set_cap(cap_bytes: int) -> None: ...
def set_poisoning(on: bool) -> None:
    """Whether slots are overwritten with 0xff as they are handed out and as they go free."""

def set_max_in_flight_bytes(nbytes: int) -> None: ...
def offload(
    device: int, address: int, nbytes: int, compute_stream: int, leaves: bool = False
) -> Ticket: ...
def reload(ticket: Ticket, address: int, compute_stream: int) -> Copy: ...
def try_reload(ticket: Ticket, address: int, compute_stream: int) -> Copy | None:
    """As `reload`; None where that would block."""

def host_slot(ticket: Ticket) -> Slot:
    """Blocks until the bytes are in the arena."""

def tier_of(ticket: Ticket) -> str:
    """`"host"` or `"disk"`."""

def put_last(ticket: Ticket) -> None:
    """Makes it the last that is written to the disk."""

def set_disk(directory: str, cap_bytes: int) -> None:
    """An empty directory ends spilling. Raises while tickets are on the disk."""

def allocate(nbytes: int) -> Slot:
    """A slot of the arena with nothing in it, for measurements."""

def retire() -> None: ...
def drain() -> None: ...
def trim() -> None: ...
def close() -> None: ...
def arena_statistics() -> ArenaStatistics: ...
def disk_statistics() -> DiskStatistics: ...
def residency_statistics() -> ResidencyStatistics: ...
def engine_statistics() -> EngineStatistics: ...

# Codecs: `codec` is fp8, int8 or bits, `dtype` float32, float16, bfloat16 or bool. `device`
# is a CUDA index, whose `stream` the work is queued on, or -1: the CPU works before the call
# returns, on at most that many `threads` (0: all cores). The format is in csrc/codec.h.

def encoded_bytes(codec: str, dtype: str, shape: Sequence[int]) -> int: ...
def encode(
    device: int,
    codec: str,
    dtype: str,
    address: int,
    shape: Sequence[int],
    strides: Sequence[int],
    encoded_address: int,
    stream: int,
    seed: int | None = None,
    threads: int = 0,
) -> None: ...
def decode(
    device: int,
    codec: str,
    dtype: str,
    encoded_address: int,
    address: int,
    shape: Sequence[int],
    strides: Sequence[int],
    stream: int,
    threads: int = 0,
) -> None: ...

class SlotAllocator:
    """The arena's placement logic alone, for simulations: it touches no memory."""

    def __init__(self, cap_bytes: int, step_bytes: int) -> None: ...
    def allocate(self, nbytes: int) -> int: ...
    def release(self, offset: int) -> int: ...
    def trim(self) -> int: ...
    @property
    def committed_bytes(self) -> int: ...
    @property
    def live_bytes(self) -> int: ...

# Fault injection on host devices; nothing here exists for CUDA.

@final
class HostGate:
    """A task on a host stream that blocks it until `open`; `reached` tells that it stands there."""

    def __init__(self, device: int, stream: int) -> None: ...
    def open(self) -> None: ...
    def reached(self) -> bool: ...

def host_create_stream(device: int) -> int: ...
def host_destroy_stream(device: int, stream: int) -> None: ...
def host_queues(device: int) -> tuple[int, int]:
    """The engine's (D2H, H2D) streams of a host device."""

def host_fail_next_copies(device: int, count: int) -> None: ...
def host_refuse_pinning(device: int, reason: str, above_bytes: int = 0) -> None:
    """Refuses to pin more than `above_bytes` from now on; an empty reason allows it again."""
