"""One method in one process: `python -m bench.worker TASK METHOD SPEC_FILE RESULT_FILE`.

Takes one command a line from standard input and answers each with one JSON line:

    measure   build, run once under the storage tracker, write the result file; -> figures
    step      run once more, timed; -> its times, and its loss when it has one
    finish    -> the figures that are known at the end; ends the process

A failure is answered by the figures so far, a status other than "ok" and a message, and also ends
the process; so does the end of the input. Everything that libraries print goes to standard error.
"""

from __future__ import annotations

import json
import os
import sys
import time
import traceback
from collections.abc import Iterable
from pathlib import Path
from typing import Any, TextIO

import torch

from bench import measure
from bench.methods import METHODS
from bench.page_cache import PageCacheGrowth
from bench.spec import StepSpec
from bench.tasks import TASKS, Task


class Worker:
    """Builds and measures one method, command by command.

    Args:
        task: A name of `TASKS`.
        method: A name of `METHODS`.
        spec: What to run.
        result: File for the tensors of the first run.
    """

    def __init__(self, task: str, method: str, spec: StepSpec, result: Path) -> None:
        self.task_name = task
        self.method = METHODS[method]
        self.spec = spec
        self.result = result
        self.figures: dict[str, Any] = {}
        self.task: Task | None = None
        self.before: dict[str, float] = {}
        self.steps = 0

    def measure(self) -> dict[str, Any]:
        """Builds the model, and runs it once under the tracker, which also is its warm-up.

        Returns:
            The figures so far.
        """
        measure.limit_device_memory(self.spec.device, self.spec.memory_limit)
        self.task = TASKS[self.task_name](self.method, self.spec)
        if self.task.first_call is not None:
            start = time.perf_counter()
            self.task.first_call()
            self.figures["first_call_s"] = time.perf_counter() - start
        result = self._track(self.task)
        self.figures |= self.task.save(self.result, result)
        return self.figures

    def _track(self, task: Task) -> Any:
        device_type = torch.device(self.spec.device).type
        # On a card the allocator itself keeps the limit, fragmentation included.
        limit_bytes = self.spec.memory_limit if device_type == "cpu" else None
        tracker = measure.StorageTracker(device_type, limit_bytes)
        weights_bytes = tracker.watch([*task.model.parameters(), *task.model.buffers(), task.ids])
        tracker.follow_gradients(task.model.parameters())
        self.figures |= {
            "weights_bytes": weights_bytes,
            "peak_rss_is_of_steps": measure.reset_peak_rss(),
            "rss_before_bytes": measure.read_rss(),
        }
        start = time.perf_counter()
        try:
            with tracker, PageCacheGrowth() as cache:
                result = task.run()
            self.figures["tracked_step_s"] = time.perf_counter() - start
            self.figures["page_cache_growth_bytes"] = cache.grown_bytes
            return result
        finally:
            self.figures |= {
                "peak_live_bytes": tracker.peak_bytes,
                "peak_live_delta_bytes": tracker.peak_bytes - weights_bytes,
                "peak_activation_bytes": tracker.peak_activation_bytes,
                "curve": measure.reduce_series(tracker.series),
            }

    def step(self) -> dict[str, Any]:
        """Runs once without the tracker; the peaks of the allocator and of RSS begin with it.

        Returns:
            The times, and `loss` where there is one.
        """
        assert self.task is not None
        if self.steps == 0:
            self.before = self.method.totals(self.task.model)
            if self.spec.device.startswith("cuda"):
                torch.cuda.reset_peak_memory_stats(self.spec.device)
            self.figures["peak_rss_is_of_steps"] = measure.reset_peak_rss()
        self.steps += 1
        times, result = measure.time_step(self.task.run, self.spec.device)
        return times | ({"loss": result} if isinstance(result, float) else {})

    def finish(self) -> dict[str, Any]:
        """Returns what is known at the end."""
        assert self.task is not None
        totals = self.method.totals(self.task.model)
        self.figures |= {
            f"{key}_per_step": (value - self.before.get(key, 0.0)) / max(self.steps, 1)
            for key, value in totals.items()
        }
        self.figures |= self.method.describe(self.task.model, self.spec)
        return self.peaks()

    def peaks(self) -> dict[str, Any]:
        """Returns all figures with the peaks that the system, the card and the arena know."""
        self.figures["peak_rss_bytes"] = measure.read_peak_rss()
        self.figures |= measure.device_peaks(self.spec.device)
        self.figures |= measure.arena_figures()
        return self.figures


def _describe_failure(error: BaseException) -> dict[str, Any]:
    if isinstance(error, (measure.MemoryLimitExceeded, torch.OutOfMemoryError)):
        return {"status": "OOM", "message": str(error).splitlines()[0]}
    text = " ".join(str(error).split())
    return {"status": "failed", "message": f"{type(error).__name__}: {text[:300]}"}


def serve(worker: Worker, commands: Iterable[str], replies: TextIO) -> None:
    """Answers commands until one fails, the last one was answered, or there are no more.

    Args:
        worker: What they are about.
        commands: Lines, each the name of a command.
        replies: Gets one JSON line for each.
    """
    for line in commands:
        command = line.strip()
        try:
            reply = {"status": "ok"} | getattr(worker, command)()
        except Exception as error:
            traceback.print_exc()
            reply = worker.peaks() | _describe_failure(error)
        replies.write(json.dumps(reply) + "\n")
        replies.flush()
        if command == "finish" or reply["status"] != "ok":
            return


def main(arguments: list[str]) -> int:
    """Runs the worker.

    Args:
        arguments: Task, method, file of the spec as JSON, file for the result.

    Returns:
        0; a failure was told in its reply.
    """
    replies = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    task, method, spec_file, result = arguments
    spec = StepSpec(**json.loads(Path(spec_file).read_text()))
    serve(Worker(task, method, spec, Path(result)), sys.stdin, replies)
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
