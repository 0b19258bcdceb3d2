"""Tiny runs of the bench, in this process where a process of their own is not what is tested."""

import gc
import io
import json
import warnings
from pathlib import Path

import pytest

from bench import runner
from bench.cli import main
from bench.spec import StepSpec
from bench.worker import Worker, serve
from offload import _native
from offload.store import default_store, engine

TINY = ["--hidden", "32", "--layers", "2", "--heads", "4", "--vocab", "128", "--tokens", "63"]


class WorkerHere:
    """Stands in for `WorkerProcess`: the same commands and JSON lines, no process."""

    def __init__(self, arguments, error_file):
        task, method, spec_file, result = arguments
        spec = StepSpec(**json.loads(Path(spec_file).read_text()))
        self.worker = Worker(task, method, spec, Path(result))

    def __enter__(self):
        return self

    def __exit__(self, *exception):
        pass

    def ask(self, command):
        replies = io.StringIO()
        with warnings.catch_warnings():  # tiny layer inputs stay where they are, and it says so
            warnings.filterwarnings("ignore", message="offload: a training step moved nothing")
            serve(self.worker, [command], replies)
        return json.loads(replies.getvalue())


@pytest.fixture
def workers_here(monkeypatch):
    monkeypatch.setattr(runner, "WorkerProcess", WorkerHere)
    cap = _native.arena_statistics().cap_bytes if _native.started() else None
    yield
    if _native.started():  # a method may have set the disk and the cap of this process
        gc.collect()
        default_store().synchronize()
        engine.end_disk()
        engine.set_host_cap(cap or 1 << 30)


@pytest.fixture
def run_bench(tmp_path):
    def run(command, *options):
        """Returns the exit status and the JSON records of one run."""
        path = tmp_path / "out.jsonl"
        status = main([command, *TINY, "--json", str(path), *options])
        return status, [json.loads(line) for line in path.read_text().splitlines()]

    return run
