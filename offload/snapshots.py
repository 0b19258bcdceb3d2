"""A layer as a call found it, for the second run of that call: buffers, parameters, modes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn

from offload.adapters.peft import adapter_state
from offload.errors import LayerRefused, OffloadError
from offload.store.identity import is_plain, nbytes_of
from offload.store.ticket import version_of

SNAPSHOT_BYTES = 256 << 10
"""Buffers up to this size are copied before every call; larger ones (masks) if seen to change."""

Slots = dict[str, torch.Tensor | None]


class BufferSnapshot:
    """A layer's buffers before a call.

    Small buffers are copied whether they change or not: BatchNorm's kernels do not tell autograd's
    version counter, and comparing values would wait for the device. A buffer that did not exist
    yet, or was None, is so again in the replay; one that bears two names stays one.

    Args:
        layer: the layer about to be called.
        written: names of large buffers that earlier calls changed; None before the first call, when
            all buffers are copied.
    """

    def __init__(self, layer: nn.Module, written: set[str] | None) -> None:
        self._before: list[tuple[nn.Module, Slots]] = []
        self._copies: dict[int, torch.Tensor] = {}  # by id of a buffer that `_before` keeps alive
        self._large: dict[str, tuple[nn.Module, str, torch.Tensor, int | None]] = {}
        for path, module in layer.named_modules():
            slots = dict(module._buffers)
            self._before.append((module, slots))
            for key, buffer in slots.items():
                if buffer is None:
                    continue
                name = f"{path}.{key}".lstrip(".")
                large = nbytes_of(buffer) > SNAPSHOT_BYTES
                if large:
                    self._large[name] = module, key, buffer, version_of(buffer)
                if id(buffer) not in self._copies and (
                    not large or written is None or name in written
                ):
                    self._copies[id(buffer)] = buffer.detach().clone()

    def keep_written(self) -> tuple[set[str], set[str]]:
        """Called after forward: forgets the copies of large buffers that it left alone.

        Returns:
            Names of the large buffers that changed, and of those of them that had not been copied.
        """
        written, missing = set(), set()
        for name, (module, key, buffer, version) in self._large.items():
            if module._buffers.get(key) is not buffer or version_of(buffer) != version:
                written.add(name)
                if id(buffer) not in self._copies:
                    missing.add(name)
            else:
                self._copies.pop(id(buffer), None)
        self._large.clear()
        return written, missing

    @contextmanager
    def replayed(self) -> Iterator[None]:
        """Puts copies of the earlier values in place of the buffers, for one replay."""
        real = [(module, dict(module._buffers)) for module, _ in self._before]
        fresh = {key: copy.clone() for key, copy in self._copies.items()}
        try:
            for module, slots in self._before:
                now = module._buffers
                earlier = {
                    key: fresh.get(id(buffer), now.get(key)) if buffer is not None else None
                    for key, buffer in slots.items()
                }
                now.clear()
                now.update(earlier)
            yield
        finally:
            for module, slots in real:
                module._buffers.clear()
                module._buffers.update(slots)


class ParameterSnapshot:
    """Which parameters a call used, and their versions.

    Plain torch raises in backward when a weight was changed after it was saved; a replay would use
    the new values without a word. Values are not copied. One that another tensor stands in for by
    the time of the replay is put back for it, unless its memory was given up (sharding).
    """

    def __init__(self, layer: nn.Module, layer_name: str) -> None:
        self._layer_name = layer_name
        self._used: list[tuple[nn.Module, str, torch.Tensor, int | None, int]] = [
            (module, key, parameter, version_of(parameter), _storage_of(parameter))
            for module in layer.modules()
            for key, parameter in module._parameters.items()
            if parameter is not None
        ]

    def check_after_forward(self) -> None:
        """Refuses a layer that changes its own parameters, since a replay would change them again.

        Raises:
            LayerRefused: names the parameter.
        """
        if changed := self._changed():
            raise LayerRefused(
                f"offload: expected layer '{self._layer_name}' to leave its parameters alone in "
                f"forward, but it changed '{changed}'. Register it as a buffer, or leave the layer "
                "out with layers=."
            )

    @contextmanager
    def replayed(self) -> Iterator[None]:
        """Checks the versions, and puts tensors back that stood in for parameters in forward.

        Raises:
            OffloadError: if a parameter was changed between forward and backward.
        """
        if changed := self._changed():
            raise OffloadError(
                f"offload: expected the parameters of layer '{self._layer_name}' unchanged between "
                f"forward and backward, but '{changed}' was modified in place. Step the optimizer "
                "after the backward of every loss."
            )
        stand_ins = [
            (module, key, used, module._parameters.get(key))
            for module, key, used, *_ in self._used
            if module._parameters.get(key) is not used and _holds_values(used)
        ]
        try:
            for module, key, used, _ in stand_ins:
                module._parameters[key] = used  # type: ignore[assignment]
            yield
        finally:
            for module, key, _, real in stand_ins:
                module._parameters[key] = real

    def _changed(self) -> str:
        for module, key, used, version, storage in self._used:
            if module._parameters.get(key) is used and (
                version_of(used) != version or _storage_of(used) != storage
            ):
                return key
        return ""


def _storage_of(parameter: torch.Tensor) -> int:
    """Identifies the memory behind a parameter, which `parameter.data = other` changes.

    Sharded parameters keep theirs, emptied and filled again.
    """
    return parameter.untyped_storage()._cdata if is_plain(parameter) else 0


def _holds_values(parameter: torch.Tensor) -> bool:
    """Whether a tensor that stood in a module can stand there again; a sharded one is empty now."""
    return not is_plain(parameter) or parameter.untyped_storage().nbytes() > 0


class ModuleState:
    """What else decides how a layer runs: the modules' training flags, and which adapters are on.

    Flags are put back for the second run. Adapters are not: what is trainable hangs on them.

    Args:
        layer: the layer about to be called.
        layer_name: its name, for messages.
    """

    def __init__(self, layer: nn.Module, layer_name: str) -> None:
        self._layer = layer
        self._layer_name = layer_name
        self._training = [(module, module.training) for module in layer.modules()]
        self._adapters = adapter_state(layer)

    @contextmanager
    def replayed(self) -> Iterator[None]:
        """Puts the training flags back as they were, for one replay.

        Raises:
            OffloadError: if adapters were switched between forward and backward.
        """
        if adapter_state(self._layer) != self._adapters:
            raise OffloadError(
                f"offload: expected the adapters of layer '{self._layer_name}' as they were in "
                "forward, but others are active now. Switch adapters after the backward."
            )
        present = [(module, module.training) for module, _ in self._training]
        try:
            for module, flag in self._training:
                module.training = flag
            yield
        finally:
            for module, flag in present:
                module.training = flag


class LayerSnapshot:
    """A layer as a call found it, in all that the second run of that call must find again.

    Args:
        layer: the layer about to be called.
        layer_name: its name, for messages.
        written: as for `BufferSnapshot`.
    """

    def __init__(self, layer: nn.Module, layer_name: str, written: set[str] | None) -> None:
        self._state = ModuleState(layer, layer_name)
        self._buffers = BufferSnapshot(layer, written)
        self._parameters = ParameterSnapshot(layer, layer_name)

    def check_after_forward(self) -> tuple[set[str], set[str]]:
        """Called after forward: refuses a change of parameters, and tells which buffers changed.

        Returns:
            As of `BufferSnapshot.keep_written`.

        Raises:
            LayerRefused: if the layer changed a parameter.
        """
        self._parameters.check_after_forward()
        return self._buffers.keep_written()

    @contextmanager
    def replayed(self) -> Iterator[None]:
        """Puts everything back as it was, for one replay.

        Raises:
            OffloadError: if what cannot be put back has changed.
        """
        with self._state.replayed(), self._buffers.replayed(), self._parameters.replayed():
            yield
