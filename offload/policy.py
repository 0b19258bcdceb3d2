"""How a model is run: the one place where defaults live."""

from __future__ import annotations

import re
from dataclasses import dataclass

MODES = ("auto", "checkpoint", "keep")
TIERS = ("auto", "device", "host")
MIN_HOST_BYTES = 64 << 20
"""The arena commits and page-locks memory in steps of this size."""

_UNITS = {
    "": 1,
    "B": 1,
    "KB": 10**3,
    "MB": 10**6,
    "GB": 10**9,
    "TB": 10**12,
    "KIB": 1 << 10,
    "MIB": 1 << 20,
    "GIB": 1 << 30,
    "TIB": 1 << 40,
}


def parse_bytes(size: int | str) -> int:
    """Reads a size such as `8_000_000`, `"8GB"` or `"7.5GiB"`.

    Args:
        size: bytes, or a number with a unit; GB is 10**9, GiB is 2**30.

    Returns:
        Bytes, rounded down.

    Raises:
        ValueError: if the text is not a size, or the size is negative.
        TypeError: if it is neither an int nor a str.
    """
    if isinstance(size, bool) or not isinstance(size, (int, str)):
        raise TypeError(f"parse_bytes: expected an int or a str, got {size!r}.")
    if isinstance(size, str):
        match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*", size)
        if match is None or match[2].upper() not in _UNITS:
            raise ValueError(f"parse_bytes: expected a size like '8GB' or '7.5GiB', got {size!r}.")
        return int(float(match[1]) * _UNITS[match[2].upper()])
    if size < 0:
        raise ValueError(f"parse_bytes: expected a size >= 0, got {size}.")
    return size


@dataclass(frozen=True)
class Policy:
    """How layers are run and where their activations live. The defaults suit a card.

    Attributes:
        mode: `"checkpoint"` recomputes each layer in backward from its offloaded input; `"keep"`
            leaves layers untouched; `"auto"` takes the best mode that is right for the layer.
        tier: `"host"` copies layer inputs to page-locked host memory, `"device"` keeps them where
            they are, `"auto"` is host for a model on a card and device for one on the CPU, whose
            memory is the host's already.
        host_bytes: cap of the host arena, which all models of the process share; the policy that
            set it last wins; at least 64 MiB. None: 70 % of the memory available when the arena is
            made.
        keep_last: layers at the end whose inputs stay on the device, since backward needs them
            first.
        min_bytes: smaller tensors stay where they are; a copy of one costs more than it frees.

    Raises:
        ValueError: if a value is out of range.
        TypeError: if a value has the wrong type.
    """

    mode: str = "auto"
    tier: str = "auto"
    host_bytes: int | str | None = None
    keep_last: int = 1
    min_bytes: int | str = 1 << 20

    def __post_init__(self) -> None:
        if self.mode not in MODES:
            raise ValueError(f"Policy: expected mode in {MODES}, got {self.mode!r}.")
        if self.tier not in TIERS:
            raise ValueError(f"Policy: expected tier in {TIERS}, got {self.tier!r}.")
        if isinstance(self.keep_last, bool) or not isinstance(self.keep_last, int):
            raise TypeError(f"Policy: expected an int for keep_last, got {self.keep_last!r}.")
        if self.keep_last < 0:
            raise ValueError(f"Policy: expected keep_last >= 0, got {self.keep_last}.")
        object.__setattr__(self, "min_bytes", parse_bytes(self.min_bytes))
        if self.host_bytes is not None:
            object.__setattr__(self, "host_bytes", parse_bytes(self.host_bytes))
            if int(self.host_bytes) < MIN_HOST_BYTES:
                raise ValueError(
                    f"Policy: expected host_bytes >= 64 MiB, got {self.host_bytes}. Use "
                    "tier='device' to stay off the host."
                )
