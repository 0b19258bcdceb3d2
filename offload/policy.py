"""How a model is run: the one place where defaults live."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

MODES = ("auto", "tiled", "checkpoint", "keep")
TIERS = ("auto", "device", "host", "disk")
ATTENTION = ("auto", "triton", "torch", "reference")
CODECS = ("fp8", "int8")
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


class Codecs(NamedTuple):
    """Codecs of a layer's input, of its keys and values, and of its attention output."""

    input: str | None = None
    kv: str | None = None
    attention: str | None = None


NO_CODECS = Codecs()


def format_bytes(nbytes: int) -> str:
    """Writes a size for people, such as "7.5 GiB"; `parse_bytes` reads it back, rounded."""
    value = float(nbytes)
    for unit in ("B", "KiB", "MiB"):
        if value < 1024:
            return f"{value:.0f} {unit}" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1024
    return f"{value:.1f} GiB"


@dataclass(frozen=True)
class Policy:
    """How layers are run and where their activations live. The defaults suit a card.

    Attributes:
        mode: `"tiled"` runs layers tile by tile along the sequence, without ever recomputing
            attention; `"checkpoint"` recomputes each layer whole in backward from its offloaded
            input; `"keep"` leaves layers untouched. `"auto"` runs those by tiles that are proved to
            give the same gradients so, the others in checkpoint mode; `"tiled"` raises for those.
        tile_tokens: length of a tile. Shorter ones need less memory; those below some hundred
            tokens leave the device idle.
        tier: `"host"` copies what backward needs to page-locked host memory, `"device"` keeps it
            where it is, `"auto"` is host for a model on a card and device for one on the CPU, whose
            memory is the host's already. `"disk"` passes through the host and leaves it at once.
        host_bytes: cap of the host arena, which all models of the process share; the policy that
            set it last wins; at least 64 MiB. None: 70 % of what the machine, the cgroups around
            the process and `ulimit` leave when the arena is made; `report` says which it was.
        disk: directory on a fast drive that what exceeds `host_bytes` goes to, needed last first;
            also of all the process. None: no disk, unless tier is `"disk"`. Nothing is left there,
            however the process ends.
        disk_bytes: cap of what lies in `disk` at once. None: 90 % of what is free there.
        codec: None copies bytes as they are. `"fp8"` and `"int8"` halve 16-bit activations on the
            way, at a loss that `report` shows; a mapping such as `{"input": None, "kv": "fp8"}`
            says it for layer inputs, keys and values, and the output of `"attention"` apart.
        keep_last: layers at the end of which the input (tiled: what the last tile needs) stays on
            the device, since backward needs it first.
        min_bytes: smaller layer inputs stay where they are; a copy costs more than it frees.
        attention: kernels of tiled layers: `"triton"` takes our own, for cards from compute
            capability 8.0 on, `"torch"` those of PyTorch, `"reference"` a plain formula that is
            slow and easy to trust; `"auto"` is triton where it runs, else torch.
        loss_chunk_tokens: tokens whose logits exist at once where a transformers model computes its
            loss. None: as many as make 128 MiB; 0 leaves the model's loss alone.
        debug: finds out why numbers are wrong. Whatever leaves the device gets a checksum that is
            compared when it comes back, and memory that holds nothing valid yet, or nothing any
            more, is filled with NaN. Slow, since every copy is waited for; on for all of the
            process from the first policy that asks for it. Needs the package xxhash.

    Raises:
        ValueError: if a value is out of range.
        TypeError: if a value has the wrong type.
    """

    mode: str = "auto"
    tile_tokens: int = 2048
    tier: str = "auto"
    host_bytes: int | str | None = None
    disk: str | os.PathLike[str] | None = None
    disk_bytes: int | str | None = None
    codec: str | Mapping[str, str | None] | Codecs | None = None
    keep_last: int = 1
    min_bytes: int | str = 1 << 20
    attention: str = "auto"
    loss_chunk_tokens: int | None = None
    debug: bool = False

    def __post_init__(self) -> None:
        if self.mode not in MODES:
            raise ValueError(f"Policy: expected mode in {MODES}, got {self.mode!r}.")
        if self.tier not in TIERS:
            raise ValueError(f"Policy: expected tier in {TIERS}, got {self.tier!r}.")
        if self.attention not in ATTENTION:
            raise ValueError(f"Policy: expected attention in {ATTENTION}, got {self.attention!r}.")
        _check_count("keep_last", self.keep_last, 0)
        _check_count("tile_tokens", self.tile_tokens, 1)
        if self.loss_chunk_tokens is not None:
            _check_count("loss_chunk_tokens", self.loss_chunk_tokens, 0)
        object.__setattr__(self, "min_bytes", parse_bytes(self.min_bytes))
        if self.host_bytes is not None:
            object.__setattr__(self, "host_bytes", parse_bytes(self.host_bytes))
            if int(self.host_bytes) < MIN_HOST_BYTES:
                raise ValueError(
                    f"Policy: expected host_bytes >= 64 MiB, got {self.host_bytes}. Use "
                    "tier='device' to stay off the host."
                )
        if not isinstance(self.debug, bool):
            raise TypeError(f"Policy: expected a bool for debug, got {self.debug!r}.")
        self._check_disk()
        object.__setattr__(self, "codec", _codecs(self.codec))

    def _check_disk(self) -> None:
        if self.disk is not None:
            object.__setattr__(self, "disk", os.fspath(self.disk))
        elif self.tier == "disk" or self.disk_bytes is not None:
            raise ValueError(
                "Policy: expected disk='/a/directory' with tier='disk' and with disk_bytes, got "
                "none. Name a directory on a fast drive."
            )
        if self.disk_bytes is not None:
            object.__setattr__(self, "disk_bytes", parse_bytes(self.disk_bytes))

    @property
    def codecs(self) -> Codecs:
        """The codec of each role, which is what `codec` was turned into."""
        assert isinstance(self.codec, Codecs)
        return self.codec


def _codecs(codec: object) -> Codecs:
    if codec is None or isinstance(codec, str):
        codecs = Codecs(codec, codec, codec)
    elif isinstance(codec, Codecs):
        codecs = codec
    elif isinstance(codec, Mapping):
        if unknown := set(codec) - set(Codecs._fields):
            raise ValueError(
                f"Policy: expected codec for {Codecs._fields}, got one for {sorted(unknown)}."
            )
        codecs = Codecs(**codec)
    else:
        raise TypeError(
            f"Policy: expected codec as None, a name in {CODECS} or a mapping, got {codec!r}."
        )
    for name in codecs:
        if name is not None and name not in CODECS:
            raise ValueError(f"Policy: expected codec in {CODECS} or None, got {name!r}.")
    return codecs


def _check_count(name: str, value: object, least: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"Policy: expected an int for {name}, got {value!r}.")
    if value < least:
        raise ValueError(f"Policy: expected {name} >= {least}, got {value}.")
