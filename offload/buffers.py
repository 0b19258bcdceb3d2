"""Keeps buffers that a layer writes in forward, as BatchNorm does, from being written twice."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn

from offload.errors import LayerRefused
from offload.store.ticket import version_of

SNAPSHOT_BYTES = 256 << 10
"""Buffers up to this size are copied before every call; larger ones (masks) if seen to change."""


class BufferSnapshot:
    """A layer's buffers before a call, for the replay of that call.

    Small buffers are copied whether they change or not: BatchNorm's kernels write statistics
        without
    telling autograd's version counter, and comparing values would wait for the device.

    Args:
        layer: the layer about to be called.
        written: names of large buffers that earlier calls changed; None before the first call, when
            all buffers are copied.
    """

    def __init__(self, layer: nn.Module, written: set[str] | None) -> None:
        self._owners: dict[str, tuple[nn.Module, str]] = {}
        self._values: dict[str, torch.Tensor] = {}
        self._large: dict[str, tuple[torch.Tensor, int | None]] = {}
        for path, module in layer.named_modules():
            for key, buffer in module._buffers.items():
                if buffer is None:
                    continue
                name = f"{path}.{key}".lstrip(".")
                self._owners[name] = module, key
                large = buffer.nbytes > SNAPSHOT_BYTES
                if large:
                    self._large[name] = buffer, version_of(buffer)
                if not large or written is None or name in written:
                    self._values[name] = buffer.detach().clone()

    def keep_written(self) -> set[str]:
        """Called after forward: forgets large buffers that it left alone, and names the others."""
        written = {
            name
            for name, (buffer, version) in self._large.items()
            if self._buffer(name) is not buffer or version_of(buffer) != version
        }
        for name in self._large.keys() - written:
            self._values.pop(name, None)
        self._large.clear()
        return written

    def check_complete(self, written: set[str], layer_name: str) -> None:
        """Raises where a changed buffer was not copied before the call.

        Args:
            written: names of the buffers that the call changed.
            layer_name: for the message.

        Raises:
            LayerRefused: if a large buffer changed that no earlier call had changed.
        """
        missing = sorted(written - self._values.keys())
        if missing:
            raise LayerRefused(
                f"offload: expected layer '{layer_name}' to write the buffers it wrote before, but "
                f"it changed {missing} as well, whose earlier values are gone. "
                "Run the step again: they are kept from now on."
            )

    @contextmanager
    def replayed(self) -> Iterator[None]:
        """Puts copies of the earlier values in place of the written buffers, for one replay."""
        real = {name: self._buffer(name) for name in self._values}
        try:
            for name, value in self._values.items():
                self._set(name, value.clone())
            yield
        finally:
            for name, buffer in real.items():
                self._set(name, buffer)

    def _buffer(self, name: str) -> torch.Tensor | None:
        module, key = self._owners[name]
        return module._buffers[key]

    def _set(self, name: str, buffer: torch.Tensor | None) -> None:
        module, key = self._owners[name]
        module._buffers[key] = buffer
