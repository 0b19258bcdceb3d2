"""Debug mode: memory that shows when it is read too early or too late, and checksums of what moves.

It makes every copy wait, so that it is for finding out why numbers are wrong, not for training.
"""

from __future__ import annotations

import importlib.util

import torch

from offload.errors import OffloadError

POISON = 0xFF
"""Each byte of poisoned memory: NaN in every float dtype, -1 in every int; `Arena::kPoison`."""


def require_xxhash() -> None:
    """Raises OffloadError where the package that computes checksums is missing."""
    if importlib.util.find_spec("xxhash") is None:
        raise OffloadError(
            "Policy.debug: expected the package xxhash, which computes checksums, got none. "
            "Install it with `pip install xxhash`."
        )


def poison(buffer: torch.Tensor) -> None:
    """Overwrites a contiguous buffer, on the current stream of its device."""
    buffer.view(torch.uint8).fill_(POISON)


def checksum(tensor: torch.Tensor, nbytes: int) -> int:
    """Computes XXH3, 64 bits, of the bytes from a tensor's first element on; waits for its device.

    Args:
        tensor: on any device.
        nbytes: how many; its storage holds so many.

    Returns:
        The checksum.
    """
    import xxhash

    storage, begin = tensor.untyped_storage(), tensor.storage_offset() * tensor.element_size()
    raw = torch.tensor([], dtype=torch.uint8, device=tensor.device)
    raw = raw.set_(storage, begin, (nbytes,), (1,))
    return xxhash.xxh3_64_intdigest(raw.cpu().numpy().tobytes())


def describe_difference(expected: int, got: int, nbytes: int) -> str:
    """Returns the message for bytes that came back other than they were stored."""
    return (
        f"Ticket: expected the {nbytes:,} bytes that were stored (checksum {expected:016x}), got "
        f"others ({got:016x}). Host memory or the disk changed them, or something wrote to memory "
        "that it does not own any more."
    )
