"""The only importer of the compiled `offload._C`: refuses a stale build, closes it at exit."""

from __future__ import annotations

import atexit
from importlib import metadata
from pathlib import Path

from offload._source_hash import source_hash

_REBUILD = "Rebuild it with `pip install --no-build-isolation -e .` (or `make build`)."


def _check_build(built_version: str, built_hash: str, version: str, csrc: Path) -> None:
    """Raises ImportError when the module was built from another version or other sources.

    The sources are only compared where they lie beside the package, as in a checkout.
    """
    if built_version != version:
        raise ImportError(
            f"offload._C: expected version {version}, got {built_version}. {_REBUILD}"
        )
    if csrc.is_dir() and (current := source_hash(csrc)) != built_hash:
        raise ImportError(
            f"offload._C: expected a build of sources {current}, got {built_hash}. {_REBUILD}"
        )


VERSION = metadata.version("torch-offload")

try:
    from offload import _C
except ImportError as error:
    raise ImportError(f"offload._C: the compiled module is missing: {error}. {_REBUILD}") from error

_check_build(_C.BUILD_VERSION, _C.SOURCE_HASH, VERSION, Path(__file__).parents[1] / "csrc")

from offload._C import (  # noqa: E402  (the build is checked before its names are used)
    ArenaFull,
    ArenaStatistics,
    Copy,
    CopyFailed,
    DiskStatistics,
    EngineStatistics,
    EngineUnusable,
    Error,
    HostGate,
    ResidencyStatistics,
    Slot,
    SlotAllocator,
    Ticket,
    allocate,
    arena_statistics,
    built_with_cuda,
    close,
    decode,
    disk_statistics,
    drain,
    enable_pinning,
    encode,
    encoded_bytes,
    engine_statistics,
    host_create_stream,
    host_destroy_stream,
    host_fail_next_copies,
    host_queues,
    host_refuse_pinning,
    host_slot,
    offload,
    put_last,
    reload,
    residency_statistics,
    retire,
    set_cap,
    set_disk,
    set_max_in_flight_bytes,
    set_poisoning,
    start,
    started,
    tier_of,
    trim,
    try_reload,
)

atexit.register(close)

__all__ = [
    "VERSION",
    "ArenaFull",
    "ArenaStatistics",
    "Copy",
    "CopyFailed",
    "DiskStatistics",
    "EngineStatistics",
    "EngineUnusable",
    "Error",
    "HostGate",
    "ResidencyStatistics",
    "Slot",
    "SlotAllocator",
    "Ticket",
    "allocate",
    "arena_statistics",
    "built_with_cuda",
    "close",
    "decode",
    "disk_statistics",
    "drain",
    "enable_pinning",
    "encode",
    "encoded_bytes",
    "engine_statistics",
    "host_create_stream",
    "host_destroy_stream",
    "host_fail_next_copies",
    "host_queues",
    "host_refuse_pinning",
    "host_slot",
    "offload",
    "put_last",
    "reload",
    "residency_statistics",
    "retire",
    "set_cap",
    "set_disk",
    "set_max_in_flight_bytes",
    "set_poisoning",
    "start",
    "started",
    "tier_of",
    "trim",
    "try_reload",
]
