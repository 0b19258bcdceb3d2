"""The only place that measures: time, resident memory, live tensor storages, arena bytes."""

from __future__ import annotations

import dataclasses
import re
import statistics
import sys
import time
import weakref
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter


class MemoryLimitExceeded(RuntimeError):
    """The live storages passed the limit that the measurement was given."""


@dataclasses.dataclass
class _Storage:
    """A living storage: its size, and which of the tracker's sums it belongs to."""

    size_bytes: int
    kind: str


class StorageTracker(TorchDispatchMode):
    """Counts the bytes of living tensor storages of one device type, op by op.

    Each storage counts once, however many views share it, from the op that returns it until the
    last tensor (or the autograd graph) lets go of it. The mode is thread-local state that autograd
    carries into backward. Not seen: scratch memory that a kernel allocates and frees inside one
    op, and storages that torch did not allocate (views of a host arena or of a numpy array).
    A step under the tracker is slower, so its time is not reported.

    `activation_bytes` is what lives besides the tensors that `watch` was given and, after
    `follow_gradients`, besides the parameters' gradients; `peak_activation_bytes` is the highest
    value that it had at any op, not a difference of two peaks. A gradient is one from the moment
    that autograd has put it into a parameter's `.grad`. Until then, on its way through the graph or
    waiting for the other use of a shared weight, it counts as activation, and so does the
    temporary that is about to be added to a `.grad`. It stays a gradient until its storage dies,
    also where `.grad` was set to None before and somebody else holds it. A `.grad` that is
    assigned without autograd is not recognised.

    A storage is known by a weak reference to its Python object, which torch keeps for as long as
    the C++ storage lives; the reference's callback takes it out, so a recycled address is new.

    Args:
        device_type: `"cpu"` or `"cuda"`: only storages there are counted.
        limit_bytes: Live bytes above which the op that passed it raises; None for no limit.
    """

    def __init__(self, device_type: str = "cpu", limit_bytes: int | None = None) -> None:
        super().__init__()
        self.device_type = device_type
        self.limit_bytes = limit_bytes
        self.live_bytes = 0
        self.peak_bytes = 0
        self.activation_bytes = 0
        self.peak_activation_bytes = 0
        self.series: list[tuple[float, int]] = []
        self._storages: dict[weakref.ref[torch.UntypedStorage], _Storage] = {}
        self._hooks: list[Any] = []

    def watch(self, tensors: Iterable[torch.Tensor]) -> int:
        """Counts tensors that lived before the tracker, such as weights.

        Args:
            tensors: Tensors on any device; views of one storage count once.

        Returns:
            The live bytes afterwards.
        """
        for tensor in tensors:
            self._see(tensor, "watched")
        return self.live_bytes

    def follow_gradients(self, parameters: Iterable[torch.nn.Parameter]) -> None:
        """Tells gradients from activations, by hooks on the parameters until the mode is left.

        Args:
            parameters: Their `.grad`, now and as autograd sets it, is no activation.
        """
        for parameter in parameters:
            if parameter.grad is not None:
                self._see(parameter.grad, "gradient")
            if parameter.requires_grad:
                hook = parameter.register_post_accumulate_grad_hook(self._take_gradient)
                self._hooks.append(hook)

    def __exit__(self, *exception: Any) -> None:
        super().__exit__(*exception)
        while self._hooks:
            self._hooks.pop().remove()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        for leaf in tree_iter(out):
            if isinstance(leaf, torch.Tensor):
                self._see(leaf, "activation")
        if self.limit_bytes is not None and self.live_bytes > self.limit_bytes:
            live, limit = self.live_bytes, self.limit_bytes
            del out, leaf
            raise MemoryLimitExceeded(
                f"{func}: expected at most {limit} live bytes, got {live}. "
                "Raise --memory-limit or lower --tokens."
            )
        return out

    def _take_gradient(self, parameter: torch.Tensor) -> None:
        assert parameter.grad is not None
        self._see(parameter.grad, "gradient")

    def _see(self, tensor: torch.Tensor, kind: str) -> None:
        if tensor.device.type != self.device_type or tensor.layout != torch.strided:
            return
        storage = tensor.untyped_storage()
        reference = weakref.ref(storage, self._forget)
        known = self._storages.get(reference)
        size = storage.nbytes()
        if known is None:
            if kind != "watched" and not storage.resizable():
                return  # torch did not allocate it
            self._storages[reference] = _Storage(size, kind)
            self._count(size, kind)
            return
        # Of a known storage the first reference stays the key.
        self._count(size - known.size_bytes, known.kind)
        known.size_bytes = size
        if kind == "gradient" and known.kind == "activation":
            known.kind = kind
            self.activation_bytes -= size

    def _forget(self, reference: weakref.ref[torch.UntypedStorage]) -> None:
        storage = self._storages.pop(reference, None)
        if storage is not None:
            self._count(-storage.size_bytes, storage.kind)

    def _count(self, change: int, kind: str) -> None:
        if not change:
            return
        self.live_bytes += change
        self.peak_bytes = max(self.peak_bytes, self.live_bytes)
        self.series.append((time.perf_counter(), self.live_bytes))
        if kind == "activation":
            self.activation_bytes += change
            self.peak_activation_bytes = max(self.peak_activation_bytes, self.activation_bytes)


def reduce_series(series: list[tuple[float, int]], points: int = 400) -> list[list[float]]:
    """Thins a memory curve without losing its peaks.

    Args:
        series: `(seconds, bytes)` in time order.
        points: Number of equal time bins.

    Returns:
        `[seconds since the first point, highest bytes in the bin]` for each bin that has a point.
    """
    if not series:
        return []
    start, span = series[0][0], max(series[-1][0] - series[0][0], 1e-9)
    bins: dict[int, list[float]] = {}
    for at, size in series:
        index = min(int((at - start) / span * points), points - 1)
        if index not in bins or bins[index][1] < size:
            bins[index] = [round(at - start, 6), size]
    return list(bins.values())


def reset_peak_rss() -> bool:
    """Sets the kernel's high-water mark of resident memory to the present value.

    Returns:
        False where the system has no such switch; `read_peak_rss` then covers the whole process.
    """
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:
        return False
    return True


def read_peak_rss() -> int | None:
    """Returns the high-water mark of resident memory in bytes, None where /proc has none."""
    return _read_status("VmHWM")


def read_rss() -> int | None:
    """Returns resident memory in bytes as it is now, None where /proc has none."""
    return _read_status("VmRSS")


def _read_status(key: str) -> int | None:
    try:
        status = Path("/proc/self/status").read_text()
    except OSError:
        return None
    match = re.search(rf"{key}:\s+(\d+) kB", status)
    return int(match[1]) * 1024 if match else None


def time_step(step: Callable[[], Any], device: str) -> tuple[dict[str, float], Any]:
    """Runs a step once, from an idle device to an idle device.

    Args:
        step: What to run.
        device: A device name; a CUDA device is synchronised before and after.

    Returns:
        Seconds of the clock and of the process's own processors, and what the step returned.
    """
    synchronize = torch.cuda.synchronize if device.startswith("cuda") else lambda: None
    synchronize()
    start, processor_start = time.perf_counter(), time.process_time()
    result = step()
    synchronize()
    return {
        "seconds": time.perf_counter() - start,
        "processor_seconds": time.process_time() - processor_start,
    }, result


def summarize_times(times: list[dict[str, float]]) -> dict[str, Any]:
    """Returns the figures of one method's timed steps.

    Args:
        times: Of `time_step`, one a step, at least one.

    Returns:
        All seconds, their median and extremes, and the median of the processor seconds, which is
        steadier than the clock on a machine that does other work.
    """
    seconds = [time["seconds"] for time in times]
    return {
        "step_seconds": seconds,
        "step_s": statistics.median(seconds),
        "step_min_s": min(seconds),
        "step_max_s": max(seconds),
        "step_processor_s": statistics.median(time["processor_seconds"] for time in times),
    }


def pair_ratios(seconds: list[float], base_seconds: list[float]) -> dict[str, float]:
    """Compares two methods whose steps alternated, round by round.

    Args:
        seconds: Of one method, one a round.
        base_seconds: Of the other in the same rounds.

    Returns:
        Median, minimum and maximum of the rounds' ratios; above 1 is slower than the base.
    """
    ratios = [a / b for a, b in zip(seconds, base_seconds, strict=True)]
    return {"median": statistics.median(ratios), "min": min(ratios), "max": max(ratios)}


def limit_device_memory(device: str, limit_bytes: int | None) -> None:
    """Caps what torch's allocator may take on a CUDA device; nothing to do on the CPU.

    Args:
        device: A device name.
        limit_bytes: The cap, None for none.
    """
    if limit_bytes is not None and device.startswith("cuda"):
        index = torch.device(device).index or 0
        total = torch.cuda.get_device_properties(index).total_memory
        torch.cuda.set_per_process_memory_fraction(min(1.0, limit_bytes / total), index)


def device_peaks(device: str) -> dict[str, int]:
    """Returns torch's allocated and reserved peaks on a CUDA device, nothing for the CPU."""
    if not device.startswith("cuda"):
        return {}
    return {
        "peak_allocated_bytes": torch.cuda.max_memory_allocated(device),
        "peak_reserved_bytes": torch.cuda.max_memory_reserved(device),
    }


def arena_figures() -> dict[str, int]:
    """Returns the peaks of offload's host arena in this process, nothing when it has none."""
    native = sys.modules.get("offload._native")  # not imported: the method did not use it
    if native is None or not native.started():
        return {}
    arena = native.arena_statistics()
    return {
        "arena_peak_live_bytes": arena.peak_live_bytes,
        "arena_peak_committed_bytes": arena.peak_committed_bytes,
    }
