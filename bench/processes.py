"""Worker processes as the parent sees them: a question, an answer, and what a death looks like."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
from pathlib import Path
from types import TracebackType
from typing import Any

from bench.spec import REPOSITORY

_SECONDS_TO_END = 30


class WorkerProcess:
    """One `bench.worker`, ended when the context is left.

    Args:
        arguments: Task, method, file of the spec, file for the result.
        error_file: Gets the worker's standard error; a pipe that nobody reads could fill up.
    """

    def __init__(self, arguments: list[str], error_file: Path) -> None:
        self.arguments = arguments
        self.error_file = error_file
        self.process: subprocess.Popen[str] | None = None

    def __enter__(self) -> WorkerProcess:
        environment = os.environ | {
            "PYTHONPATH": os.pathsep.join([str(REPOSITORY), os.environ.get("PYTHONPATH", "")]),
            "HF_HUB_OFFLINE": "1",
            "TOKENIZERS_PARALLELISM": "false",
        }
        with self.error_file.open("w") as errors:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "bench.worker", *self.arguments],
                env=environment,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
            )
        return self

    def ask(self, command: str) -> dict[str, Any]:
        """Sends a command and waits for the answer.

        The worker alone holds the other end of the pipe, so its death ends the wait.

        Args:
            command: A command of `bench.worker`.

        Returns:
            The answer, with a `status`; "failed" with a message if the worker died instead. A
            failure carries the `traceback`.
        """
        assert self.process is not None
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        try:
            self.process.stdin.write(command + "\n")
            self.process.stdin.flush()
            line = self.process.stdout.readline()
        except BrokenPipeError:
            line = ""
        if line.endswith("\n"):
            reply = json.loads(line)
        else:
            reply = {"status": "failed", "message": self._death()}
        if reply["status"] == "failed":
            reply["traceback"] = self.error_file.read_text()[-4000:]
        return reply

    def _death(self) -> str:
        code = self._wait()
        if code == -9:
            return "killed by signal 9, mostly by a system out of memory"
        last = self.error_file.read_text().strip().splitlines()[-1:] or ["no output"]
        return f"exit status {code}: {last[0]}"

    def _wait(self) -> int:
        assert self.process is not None
        try:
            return self.process.wait(_SECONDS_TO_END)
        except subprocess.TimeoutExpired:
            self.process.kill()
            return self.process.wait()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        assert self.process is not None
        if kind is not None:
            self.process.kill()
        for pipe in (self.process.stdin, self.process.stdout):
            assert pipe is not None
            with contextlib.suppress(BrokenPipeError):
                pipe.close()
        self._wait()
