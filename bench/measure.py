"""The only place that measures: time, resident memory, live tensor storages, arena bytes."""

from __future__ import annotations

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


class StorageTracker(TorchDispatchMode):
    """Counts the bytes of living tensor storages of one device type, op by op.

    Each storage counts once, however many views share it, from the op that returns it until the
    last tensor (or the autograd graph) lets go of it. The mode is thread-local state that autograd
    carries into backward. Not seen: scratch memory that a kernel allocates and frees inside one
    op, and storages that torch did not allocate (views of a host arena or of a numpy array).
    A step under the tracker is slower, so its time is not reported.

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
        self.series: list[tuple[float, int]] = []
        self._sizes: dict[weakref.ref[torch.UntypedStorage], int] = {}

    def watch(self, tensors: Iterable[torch.Tensor]) -> int:
        """Counts tensors that lived before the tracker, such as weights.

        Args:
            tensors: Tensors on any device; views of one storage count once.

        Returns:
            The live bytes afterwards.
        """
        for tensor in tensors:
            self._see(tensor, allocated_by_torch=False)
        return self.live_bytes

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        for leaf in tree_iter(out):
            if isinstance(leaf, torch.Tensor):
                self._see(leaf)
        if self.limit_bytes is not None and self.live_bytes > self.limit_bytes:
            live, limit = self.live_bytes, self.limit_bytes
            del out, leaf
            raise MemoryLimitExceeded(
                f"{func}: expected at most {limit} live bytes, got {live}. "
                "Raise --memory-limit or lower --tokens."
            )
        return out

    def _see(self, tensor: torch.Tensor, allocated_by_torch: bool = True) -> None:
        if tensor.device.type != self.device_type or tensor.layout != torch.strided:
            return
        storage = tensor.untyped_storage()
        reference = weakref.ref(storage, self._forget)
        known = self._sizes.get(reference)
        if known is None and allocated_by_torch and not storage.resizable():
            return
        size = storage.nbytes()
        self._sizes[reference] = size  # of a resized storage the first reference stays the key
        self._count(size - (known or 0))

    def _forget(self, reference: weakref.ref[torch.UntypedStorage]) -> None:
        self._count(-self._sizes.pop(reference, 0))

    def _count(self, change: int) -> None:
        if change:
            self.live_bytes += change
            self.peak_bytes = max(self.peak_bytes, self.live_bytes)
            self.series.append((time.perf_counter(), self.live_bytes))


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
    try:
        status = Path("/proc/self/status").read_text()
    except OSError:
        return None
    match = re.search(r"VmHWM:\s+(\d+) kB", status)
    return int(match[1]) * 1024 if match else None


def time_steps(
    step: Callable[[], Any], steps: int, device: str
) -> tuple[dict[str, float], list[Any]]:
    """Runs a step several times, each measured from an idle device to an idle device.

    Args:
        step: What to run.
        steps: How often.
        device: A device name; a CUDA device is synchronised around each step.

    Returns:
        Median and extremes of the steps in seconds, the median of the process's own processor
        seconds (steadier than the clock on a machine that does other work), and what each step
        returned.
    """
    synchronize = torch.cuda.synchronize if device.startswith("cuda") else lambda: None
    seconds, processor_seconds, results = [], [], []
    for _ in range(steps):
        synchronize()
        start, processor_start = time.perf_counter(), time.process_time()
        results.append(step())
        synchronize()
        seconds.append(time.perf_counter() - start)
        processor_seconds.append(time.process_time() - processor_start)
    figures = {
        "step_s": statistics.median(seconds),
        "step_min_s": min(seconds),
        "step_max_s": max(seconds),
        "step_processor_s": statistics.median(processor_seconds),
    }
    return figures, results


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
