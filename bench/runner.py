"""Runs the methods of one bench in processes of their own and puts their figures together."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from bench import compare, models, table
from bench.environment import begin_record
from bench.measure import pair_ratios, summarize_times
from bench.processes import WorkerProcess
from bench.spec import StepSpec

Row = dict[str, Any]

_NOT_SHOWN = ("input_directory", "upcast", "disk")
"""Of a spec in a row: where things lie on this machine, and what is no choice of the caller."""


@dataclasses.dataclass(frozen=True)
class Plan:
    """What the parent has its workers do.

    Args:
        task: A name of `tasks.TASKS`.
        methods: Names of methods.
        spec: What every worker runs.
        interleave: Let the timed runs of all methods alternate.
        base: The method that `interleave` compares the others with; the first one when None.
        truth: Method of the truth's run; None for fixed limits.
    """

    task: str
    methods: list[str]
    spec: StepSpec
    interleave: bool = False
    base: str | None = None
    truth: str | None = None


class Runner:
    """Carries out a plan inside a temporary directory.

    Args:
        plan: What to run.
        directory: For specs, results and the workers' standard error.
        advance: Is told what starts now.
    """

    def __init__(self, plan: Plan, directory: Path, advance: Callable[[str], None]) -> None:
        self.plan = plan
        self.directory = directory
        self.advance = advance
        self.files = {name: directory / f"{name}.pt" for name in (*plan.methods, "truth")}

    def prepare(self, name: str, spec: StepSpec, result: Path) -> WorkerProcess:
        """Prepares a worker process.

        Args:
            name: Its method.
            spec: What it runs.
            result: Where its tensors go.

        Returns:
            The worker, which starts as its context is entered.
        """
        spec_file = result.with_suffix(".json")
        spec_file.write_text(json.dumps(spec.to_dict()))
        arguments = [self.plan.task, name, str(spec_file), str(result)]
        return WorkerProcess(arguments, result.with_suffix(".err"))

    def run_group(self, names: list[str]) -> list[Row]:
        """Measures methods whose workers are alive together, each alone, then times them in turn.

        A worker that fails or dies leaves the turns, and the others go on.

        Args:
            names: The methods.

        Returns:
            One row for each, in the same order.
        """
        rows = {name: {"method": name} for name in names}
        times: dict[str, list[Row]] = {name: [] for name in names}
        with contextlib.ExitStack() as stack:
            workers = {}
            for name in names:
                self.advance(name)
                worker = self.prepare(name, self.plan.spec, self.files[name])
                workers[name] = stack.enter_context(worker)
                rows[name] |= workers[name].ask("measure")
            for round_index in range(self.plan.spec.steps):
                for name in rotate(names, round_index):
                    if rows[name]["status"] == "ok":
                        self.advance(name)
                        reply = workers[name].ask("step")
                        if reply["status"] == "ok":
                            times[name].append(reply)
                        else:
                            rows[name] |= reply
            for name, row in rows.items():
                if row["status"] == "ok":
                    row |= workers[name].ask("finish")
        for name, row in rows.items():
            row |= summarize_steps(times[name], row, self.plan.spec.tokens)
        return list(rows.values())

    def run_truth(self) -> Row | None:
        """Runs the truth, without a memory limit and without timing.

        Returns:
            Its figures; None where the plan asks for none, or where it failed.
        """
        if self.plan.truth is None:
            return None
        self.advance("truth")
        wider = compare.TRUTH_DTYPE[self.plan.spec.dtype]
        spec = dataclasses.replace(self.plan.spec, upcast=wider, memory_limit=None)
        with self.prepare(self.plan.truth, spec, self.files["truth"]) as worker:
            row = worker.ask("measure")
        return row if row["status"] == "ok" else None

    def run(self) -> list[Row]:
        """Runs the plan's methods.

        Returns:
            One row for each, in the plan's order.
        """
        names = self.plan.methods
        groups = [names] if self.plan.interleave else [[name] for name in names]
        rows = [row for group in groups for row in self.run_group(group)]
        if self.plan.interleave:
            add_ratios(rows, self.plan.base or names[0])
        return rows


def rotate(names: list[str], turn: int) -> list[str]:
    """Returns the names from another one on, so that none always follows the same pause."""
    turn %= len(names)
    return names[turn:] + names[:turn]


def summarize_steps(times: list[Row], row: Row, tokens: int) -> Row:
    """Sums up the timed runs, or the first one where there were none.

    Args:
        times: The worker's replies.
        row: The method's figures.
        tokens: Of one run.

    Returns:
        The figures of time.
    """
    if row["status"] != "ok":
        return {"step_seconds": [time["seconds"] for time in times]}
    figures: Row = {"timed_under_tracker": not times}
    if times:
        figures |= summarize_times(times)
        if "loss" in times[0]:
            figures["losses"] = [time["loss"] for time in times]
    else:
        figures["step_s"] = row["tracked_step_s"]
    return figures | {"tokens_per_s": tokens / figures["step_s"]}


def add_ratios(rows: list[Row], base: str) -> None:
    """Adds `time_ratio` to rows of methods that took turns, unless the base did not finish.

    Args:
        rows: Figures of each method, changed in place.
        base: The method to compare with.
    """
    finished = {row["method"]: row for row in rows if row["status"] == "ok"}
    if base not in finished or not finished[base].get("step_seconds"):
        return
    for row in finished.values():
        ratios = pair_ratios(row["step_seconds"], finished[base]["step_seconds"])
        row["time_ratio"] = {"base": base, **ratios}


def run_plan(plan: Plan, reference_order: list[str]) -> list[Row]:
    """Runs all methods and compares their results.

    Args:
        plan: What to run.
        reference_order: The first of these that finished is the reference of the comparison.

    Returns:
        One row of figures for each method, in the plan's order.
    """
    with tempfile.TemporaryDirectory(prefix="bench-") as directory:
        runs = len(plan.methods) * (1 + plan.spec.steps)
        with table.show_progress(runs) as advance:
            runner = Runner(plan, Path(directory), advance)
            rows = runner.run()
            finished = any(row["status"] == "ok" for row in rows)
            truth = runner.run_truth() if finished else None
        compare.mark_wrong(
            sorted(rows, key=lambda row: reference_order.index(row["method"])),
            runner.files,
            compare.LIMITS[plan.task][plan.spec.dtype],
            plan.spec.device,
            truth,
            plan.spec.dtype,
        )
    return rows


def run_bench(plan: Plan, args: argparse.Namespace, reference_order: list[str]) -> list[Row]:
    """Runs a plan, prints its table and writes its JSON lines.

    Args:
        plan: What to run.
        args: `json` is the file to append to, or None.
        reference_order: See `run_plan`.

    Returns:
        The complete records.
    """
    spec = plan.spec
    shown = {k: v for k, v in spec.to_dict().items() if k not in _NOT_SHOWN}
    if spec.model != "smollm2":
        shown |= {k: shown[k] or v for k, v in models.SHAPES[spec.model].items()}
    shared = {
        **begin_record(plan.task, spec.device),
        "spec": shown,
        "interleave": plan.interleave,
    }
    rows = [shared | row for row in run_plan(plan, reference_order)]
    table.print_rows(rows)
    if args.json:
        write_json(args.json, rows)
    return rows


def exit_status(rows: list[Row]) -> int:
    """Returns 0 if every method finished right or ran out of memory, else 1."""
    return int(any(row["status"] in ("failed", "wrong") for row in rows))


def write_json(path: Path, rows: list[Row]) -> None:
    """Appends one JSON line per row.

    Args:
        path: File to append to.
        rows: Complete records.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a") as file:
        for row in rows:
            file.write(json.dumps(row) + "\n")
