"""What a layer's call depends on besides its arguments and weights, kept for a second run."""

from __future__ import annotations

import contextvars
import random
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from typing import Any, TypeVar

import torch

from offload.adapters import transformers as hf

T = TypeVar("T")


class Ambient:
    """Context variables, autocast and attention backends as they are when it is made.

    The library's collector of outputs is emptied in it: hooks on modules inside a layer would
    record a second run as another call, and the collector holds outputs, which hold the graph that
    holds this object: a cycle through autograd, which no garbage collector sees.

    Args:
        device_type: of the layer's inputs, such as `"cuda"`; autocast of the CPU is kept as well.
    """

    def __init__(self, device_type: str) -> None:
        self._context = contextvars.copy_context()
        self._context.run(hf.stop_collecting_outputs)
        self._backends = _attention_backends()
        self._autocast = [
            (
                kind,
                torch.get_autocast_dtype(kind),
                torch.is_autocast_enabled(kind),
                torch.is_autocast_cache_enabled(),
            )
            for kind in sorted({device_type, "cpu"})
            if torch.amp.is_autocast_available(kind)
        ]

    @property
    def autocast_is_on(self) -> bool:
        """Whether operations of either device type are autocast."""
        return any(enabled for _, _, enabled, _ in self._autocast)

    def run(self, function: Callable[..., T], *args: Any, **kwargs: Any) -> T:
        """Calls a function with everything as it was; puts the present back afterwards."""
        # A context can be entered once at a time, and layers of one call share theirs.
        return self._context.copy().run(self._entered, function, args, kwargs)

    def _entered(self, function: Callable[..., T], args: Any, kwargs: Any) -> T:
        with ExitStack() as stack:
            stack.callback(_set_attention_backends, _attention_backends())
            _set_attention_backends(self._backends)
            for kind, dtype, enabled, cached in self._autocast:
                stack.enter_context(
                    torch.autocast(kind, dtype=dtype, enabled=enabled, cache_enabled=cached)
                )
            return function(*args, **kwargs)


_BACKENDS = ("flash", "mem_efficient", "math", "cudnn")


def _attention_backends() -> tuple[bool, ...]:
    """Returns which kernels `scaled_dot_product_attention` may take; `sdpa_kernel` sets them."""
    return tuple(getattr(torch.backends.cuda, f"{name}_sdp_enabled")() for name in _BACKENDS)


def _set_attention_backends(enabled: tuple[bool, ...]) -> None:
    if enabled != _attention_backends():
        for name, value in zip(_BACKENDS, enabled, strict=True):
            getattr(torch.backends.cuda, f"enable_{name}_sdp")(value)


class RandomState:
    """The random generators of the CPU, of some cards and of Python, as they are now.

    Args:
        devices: cards whose generators count; the CPU's always does.
        earlier: a state to share memory with where nothing was drawn since.
    """

    def __init__(
        self, devices: Iterable[torch.device] = (), earlier: RandomState | None = None
    ) -> None:
        self._states = {device: torch.cuda.get_rng_state(device) for device in devices}
        self._states[torch.device("cpu")] = torch.get_rng_state()
        self._python = random.getstate()
        if earlier is not None:
            for device, state in self._states.items():
                if torch.equal(state, earlier._states[device]):
                    self._states[device] = earlier._states[device]
            if self._python == earlier._python:
                self._python = earlier._python

    @property
    def devices(self) -> list[torch.device]:
        """The cards among the devices."""
        return [device for device in self._states if device.type == "cuda"]

    def restore(self) -> None:
        """Puts the generators back to this state."""
        for device, state in self._states.items():
            if device.type == "cuda":
                torch.cuda.set_rng_state(state, device)
            else:
                torch.set_rng_state(state)
        random.setstate(self._python)
