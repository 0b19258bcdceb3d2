"""Who runs when, and what the parent makes of the answers."""

import dataclasses
import io
import json

import pytest
import torch

from bench import runner, table, tasks
from bench.methods import METHODS
from bench.runner import Plan, Runner, run_plan
from bench.spec import StepSpec
from bench.worker import Worker, serve

SPEC = StepSpec("llama", 63, hidden=32, layers=1, heads=4, vocab=64, steps=3)
NAMES = ["plain", "checkpoint", "offload"]
SECONDS = {"plain": [1.0, 2.0, 1.0], "checkpoint": [2.0, 2.0, 3.0], "offload": [3.0, 8.0, 2.0]}


class Scripted:
    """A worker that answers from `SECONDS`, and fails where `failures` says so."""

    log = []
    alive = 0
    failures = {}

    def __init__(self, arguments, error_file):
        self.name = arguments[1]
        self.seconds = list(SECONDS[self.name])

    def __enter__(self):
        type(self).alive += 1
        return self

    def __exit__(self, *exception):
        type(self).alive -= 1

    def ask(self, command):
        self.log.append((command, self.name, self.alive))
        if self.failures.get((command, self.name)) == len(self.seconds):
            return {"status": "failed", "message": "scripted"}
        reply = {"status": "ok"}
        if command == "measure":
            return reply | {"tracked_step_s": 9.0, "loss": 2.0}
        if command == "step":
            return reply | {"seconds": self.seconds.pop(0), "processor_seconds": 1.0, "loss": 2.0}
        return reply


@pytest.fixture
def scripted(monkeypatch, tmp_path):
    def run(plan, failures=()):
        """Returns the rows, and the log of (command, method, living workers)."""
        Scripted.log, Scripted.alive, Scripted.failures = [], 0, dict(failures)
        monkeypatch.setattr(runner, "WorkerProcess", Scripted)
        rows = Runner(plan, tmp_path, lambda name: None).run()
        assert Scripted.alive == 0
        return {row["method"]: row for row in rows}, Scripted.log

    return run


def test_without_interleaving_only_one_worker_lives_at_a_time(scripted):
    rows, log = scripted(Plan("step", NAMES, SPEC))
    assert all(alive == 1 for _, _, alive in log)
    expected = [(name, c) for name in NAMES for c in ("measure", "step", "step", "step", "finish")]
    assert [(name, command) for command, name, _ in log] == expected
    assert not any("time_ratio" in row for row in rows.values())


def test_interleaved_steps_alternate_in_rotating_order_after_every_first_step(scripted):
    rows, log = scripted(Plan("step", NAMES, SPEC, interleave=True))
    assert [name for command, name, _ in log[:3] if command == "measure"] == NAMES
    steps = [name for command, name, _ in log if command == "step"]
    plain, checkpoint, offload = NAMES
    assert steps[:3] == [plain, checkpoint, offload]
    assert steps[3:6] == [checkpoint, offload, plain]
    assert steps[6:] == [offload, plain, checkpoint]
    for name, row in rows.items():
        assert row["step_seconds"] == SECONDS[name]
    assert rows["offload"]["step_s"] == 3.0
    assert rows["offload"]["tokens_per_s"] == 63 / 3.0


def test_ratios_are_paired_with_the_named_base(scripted):
    rows, _ = scripted(Plan("step", NAMES, SPEC, interleave=True))
    assert rows["offload"]["time_ratio"] == {"base": "plain", "median": 3.0, "min": 2.0, "max": 4.0}
    rows, _ = scripted(Plan("step", NAMES, SPEC, interleave=True, base="checkpoint"))
    assert rows["plain"]["time_ratio"]["base"] == "checkpoint"
    assert rows["plain"]["time_ratio"]["median"] == 0.5


def test_a_failing_worker_leaves_the_turns_and_the_others_go_on(scripted):
    plan = Plan("step", NAMES, SPEC, interleave=True)
    rows, log = scripted(plan, {("step", "checkpoint"): 2, ("measure", "offload"): 3})
    assert rows["checkpoint"]["status"] == rows["offload"]["status"] == "failed"
    assert rows["checkpoint"]["step_seconds"] == [2.0]
    assert rows["plain"]["step_seconds"] == SECONDS["plain"]
    assert ("finish", "plain") in {entry[:2] for entry in log}
    assert ("finish", "checkpoint") not in {entry[:2] for entry in log}
    assert "time_ratio" not in rows["checkpoint"]


def test_without_timed_steps_the_first_one_is_timed(scripted):
    rows, _ = scripted(Plan("step", ["plain"], dataclasses.replace(SPEC, steps=0)))
    assert rows["plain"]["step_s"] == 9.0
    assert rows["plain"]["timed_under_tracker"]


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_a_truth_is_a_wider_run_of_the_same_weights(workers_here, dtype):
    spec = dataclasses.replace(SPEC, dtype=dtype, steps=0)
    names = ["plain", "checkpoint+loss", "offload-tiled"]
    rows = run_plan(Plan("step", names, spec, truth="checkpoint"), names)
    assert [row["status"] for row in rows] == ["ok"] * 3, [row.get("message") for row in rows]
    bound = {"bfloat16": 0.1, "float32": 1e-5}[dtype]
    assert all(0 < row["truth_error"] < bound for row in rows)
    (row,) = run_plan(Plan("step", ["plain"], spec), names)
    assert row["status"] == "ok"
    assert "truth_error" not in row


def test_the_truth_takes_its_loss_in_its_own_dtype():
    spec = dataclasses.replace(SPEC, upcast="float64", vocab=50_000)
    task = tasks.prepare_step(METHODS["plain"], spec)
    loss = task.run()
    logits = task.model(input_ids=task.ids, use_cache=False).logits
    assert logits.dtype == torch.float64
    chosen = logits[0, :-1].gather(1, task.ids[0, 1:, None]).squeeze(1)
    assert loss == pytest.approx((logits[0, :-1].logsumexp(1) - chosen).mean().item(), rel=1e-12)


def test_a_worker_answers_a_failure_by_its_figures_so_far_and_ends(tmp_path, capsys):
    spec = dataclasses.replace(SPEC, heads=7)
    replies = io.StringIO()
    worker = Worker("step", "plain", spec, tmp_path / "out.pt")
    serve(worker, ["measure", "step", "finish"], replies)
    (line,) = replies.getvalue().splitlines()
    row = json.loads(line)
    assert row["status"] == "failed"
    assert "heads" in row["message"]
    assert row["peak_rss_bytes"] > 0
    assert "Traceback" in capsys.readouterr().err


def test_a_table_shows_ratios_tiles_and_only_columns_with_figures(workers_here, run_bench, capsys):
    options = ("--model", "llama", "--methods", "plain,offload-tiled", "--interleave")
    status, rows = run_bench("step", *options, "--tile", "17", "--steps", "2")
    assert status == 0, [row.get("message") for row in rows]
    assert rows[1]["spec"]["tile"] == rows[1]["tile_tokens"] == 17
    assert rows[1]["layer_modes"] == {"tiled": 3}  # two layers and the final norm
    assert "tile_tokens" not in rows[0]
    shown = capsys.readouterr().out
    assert f"{rows[1]['time_ratio']['median']:.3f}" in shown
    assert "in turns with plain as base" in " ".join(shown.split())
    assert "tile" in shown
    assert "hidden" not in shown.split("\n", 3)[3]
    assert table.rank_rows(rows)[0]["rank"] == 1
