"""Each example runs as its docstring says, on a tiny input."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from bench.models import convert_smollm2

EXAMPLES = Path(__file__).resolve().parent.parent / "examples"


def run_example(name, *options):
    """Runs an example in a process of its own; returns its losses and its whole output."""
    command = [sys.executable, str(EXAMPLES / name), *options]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}  # the models here are small
    run = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    assert run.returncode == 0, run.stderr
    losses = [float(loss) for loss in re.findall(r"loss ([\d.]+)", run.stdout)]
    return losses, run.stdout


def test_plain_pytorch_trains_and_reports_its_copies():
    losses, output = run_example("plain_pytorch.py", "--tokens", "63", "--steps", "3")
    assert len(losses) == 3
    assert losses[2] < losses[0]
    assert "blocks.0" in output
    assert "host arena" in output


def test_finetune_lora_trains_on_real_text():
    try:
        model = str(convert_smollm2())  # reading the package itself takes half a minute
    except ModuleNotFoundError as error:
        pytest.skip(str(error))
    options = ("--model", model, "--tokens", "64", "--steps", "2")
    losses, output = run_example("finetune_lora.py", *options)
    assert len(losses) == 2
    assert losses[1] < losses[0] < 10
    assert "host arena" in output
