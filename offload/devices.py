"""What kind of device tensors are on; meta tensors can stand for one while a step is planned."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class DeviceKind:
    """What decides which way a computation takes on a device.

    Attributes:
        type: `"cuda"` or `"cpu"`.
        capability: compute capability of a card; (0, 0) for the CPU.
    """

    type: str
    capability: tuple[int, int] = (0, 0)


_stand_in: ContextVar[DeviceKind | None] = ContextVar("offload_stand_in", default=None)


def type_of(device: torch.device) -> str:
    """Returns the type of a device; for meta that of the device it stands for, if any."""
    stand_in = _stand_in.get() if device.type == "meta" else None
    return device.type if stand_in is None else stand_in.type


def capability_of(device: torch.device) -> tuple[int, int]:
    """Returns the compute capability of a card, or of the one that meta stands for."""
    stand_in = _stand_in.get() if device.type == "meta" else None
    return _capability(device) if stand_in is None else stand_in.capability


def is_planned() -> bool:
    """Whether meta tensors stand for a device now, so that code runs as it would there."""
    return _stand_in.get() is not None


@contextmanager
def meta_stands_for(kind: DeviceKind) -> Iterator[None]:
    """Makes code take, on meta tensors, the way it would take on a device.

    Args:
        kind: of that device.

    Yields:
        Nothing.
    """
    token = _stand_in.set(kind)
    try:
        yield
    finally:
        _stand_in.reset(token)


@functools.cache
def _capability(device: torch.device) -> tuple[int, int]:
    return torch.cuda.get_device_capability(device)
