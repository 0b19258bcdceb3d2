"""Real workers: a death is a failed row, not a hanging parent."""

import json
import os
import signal

from bench import runner
from bench.processes import WorkerProcess
from bench.runner import Plan, run_plan
from bench.spec import StepSpec


def test_a_worker_that_dies_before_its_answer_is_a_failed_row(tmp_path):
    arguments = ["step", "plain", str(tmp_path / "no-such-spec.json"), str(tmp_path / "out.pt")]
    with WorkerProcess(arguments, tmp_path / "errors") as worker:
        for _ in range(2):
            reply = worker.ask("measure")
            assert reply["status"] == "failed"
            assert "no-such-spec.json" in reply["message"]
            assert "Traceback" in reply["traceback"]


def test_workers_take_turns_and_one_that_is_killed_leaves_the_others_going(monkeypatch):
    class Mortal(WorkerProcess):
        steps = 0

        def ask(self, command):
            self.steps += command == "step"
            if "checkpoint" in self.arguments and self.steps == 2:
                os.kill(self.process.pid, signal.SIGKILL)
            return super().ask(command)

    monkeypatch.setattr(runner, "WorkerProcess", Mortal)
    spec = StepSpec("llama", 63, hidden=32, layers=1, heads=4, vocab=64, steps=3)
    plan = Plan("step", ["checkpoint", "plain"], spec, interleave=True)
    killed, plain = run_plan(plan, ["plain", "checkpoint"])
    assert killed["status"] == "failed"
    assert "killed by signal 9" in killed["message"]
    assert len(killed["step_seconds"]) == 1
    assert killed["peak_live_bytes"] > 0
    assert plain["status"] == "ok"
    assert len(plain["step_seconds"]) == 3
    assert "time_ratio" not in plain  # its base is gone
    json.dumps([killed, plain])
