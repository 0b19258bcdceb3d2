"""One method in one process: `python -m bench.worker METHOD SPEC_FILE GRADIENTS_FILE`.

Prints one JSON line, the last of its standard output.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

import torch

from bench import measure, models
from bench.methods import METHODS
from bench.spec import StepSpec


def train_step(model: Any, ids: torch.Tensor, optimizer: Any = None) -> float:
    """Runs forward and backward from zeroed gradients, and the optimizer when there is one.

    Args:
        model: A causal language model.
        ids: Token ids `[1, S]`, also the labels.
        optimizer: None leaves the weights alone.

    Returns:
        The loss.
    """
    model.zero_grad(set_to_none=True)
    loss = model(input_ids=ids, labels=ids, use_cache=False).loss
    loss.backward()
    if optimizer is not None:
        optimizer.step()
    return loss.item()


def save_gradients(model: Any, path: Path) -> float:
    """Writes every gradient to a file.

    Args:
        model: A model after its backward.
        path: Where to write.

    Returns:
        The norm of all gradients together.
    """
    gradients = {n: p.grad.cpu() for n, p in model.named_parameters() if p.grad is not None}
    torch.save(gradients, path)
    squares = [gradient.double().square().sum() for gradient in gradients.values()]
    return float(torch.stack(squares).sum().sqrt()) if squares else 0.0


def measure_memory(
    step: Any, model: Any, ids: torch.Tensor, spec: StepSpec, row: dict[str, Any]
) -> None:
    """Runs the first step under the storage tracker; it also serves as warm-up.

    Args:
        step: The step to run.
        model: Its model.
        ids: Its input.
        spec: Device and limit.
        row: Receives the figures, also when the step fails.
    """
    device_type = torch.device(spec.device).type
    # On a card the allocator itself keeps the limit, fragmentation included.
    limit_bytes = spec.memory_limit if device_type == "cpu" else None
    tracker = measure.StorageTracker(device_type, limit_bytes)
    row["weights_bytes"] = tracker.watch([*model.parameters(), *model.buffers(), ids])
    tracker.peak_bytes = tracker.live_bytes
    row["peak_rss_is_of_steps"] = measure.reset_peak_rss()
    start = time.perf_counter()
    try:
        with tracker:
            row["loss"] = step()
        row["tracked_step_s"] = time.perf_counter() - start
    finally:
        row["peak_live_bytes"] = tracker.peak_bytes
        row["peak_live_delta_bytes"] = tracker.peak_bytes - row["weights_bytes"]
        row["curve"] = measure.reduce_series(tracker.series)


def measure_time(step: Any, spec: StepSpec, row: dict[str, Any]) -> None:
    """Times further steps without the tracker, with the peaks of the allocator and of RSS.

    With no further steps the first one's time stands, the tracker's share included.

    Args:
        step: The step to run.
        spec: Number of steps and device.
        row: Receives the figures.
    """
    row["timed_under_tracker"] = spec.steps == 0
    if spec.steps == 0:
        row["step_s"] = row["tracked_step_s"]
        row["tokens_per_s"] = spec.tokens / row["step_s"]
        return
    if spec.device.startswith("cuda"):
        torch.cuda.reset_peak_memory_stats(spec.device)
    row["peak_rss_is_of_steps"] = measure.reset_peak_rss()
    figures, losses = measure.time_steps(step, spec.steps, spec.device)
    row |= figures
    row["tokens_per_s"] = spec.tokens / row["step_s"]
    row["losses"] = losses


def run_method(name: str, spec: StepSpec, gradients: Path, row: dict[str, Any]) -> None:
    """Builds, prepares and measures one method.

    Args:
        name: A name of `METHODS`.
        spec: What to run.
        gradients: File for the gradients of the first step.
        row: Receives the figures as they come, so a failure keeps those before it.
    """
    method = METHODS[name]
    measure.limit_device_memory(spec.device, spec.memory_limit)
    ids = models.build_batch(spec)
    model = method.prepare(models.build_model(spec), spec)
    trainable = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trainable, lr=spec.lr) if spec.lr else None

    def step() -> float:
        return train_step(model, ids, optimizer)

    try:
        measure_memory(step, model, ids, spec, row)
        row["gradient_norm"] = save_gradients(model, gradients)
        before = method.totals(model) if spec.steps else dict.fromkeys(method.totals(model), 0.0)
        measure_time(step, spec, row)
        after = method.totals(model)
        row |= {f"{key}_per_step": (after[key] - before[key]) / max(spec.steps, 1) for key in after}
        row["status"] = "ok"
    finally:
        row["peak_rss_bytes"] = measure.read_peak_rss()
        row |= measure.device_peaks(spec.device)
        row |= measure.arena_figures()


def main(arguments: list[str]) -> int:
    """Runs the worker.

    Args:
        arguments: Method, file of the spec as JSON, file for the gradients.

    Returns:
        0 when the method finished or ran out of memory; another failure also ends the process
        with its traceback, after the JSON line.
    """
    name, spec_file, gradients = arguments
    spec = StepSpec(**json.loads(Path(spec_file).read_text()))
    row: dict[str, Any] = {"method": name, "status": "failed"}
    try:
        run_method(name, spec, Path(gradients), row)
    except (measure.MemoryLimitExceeded, torch.OutOfMemoryError) as error:
        row |= {"status": "OOM", "message": str(error).splitlines()[0]}
    finally:
        error = sys.exc_info()[1]
        if error is not None:
            text = " ".join(str(error).split())
            row["message"] = f"{type(error).__name__}: {text[:300]}"
        print(json.dumps(row), flush=True)
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
