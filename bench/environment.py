"""What every result must name: commit, machine, versions."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import re
import subprocess
import time
from pathlib import Path
from typing import Any

from bench.spec import REPOSITORY


def _git(*arguments: str) -> str | None:
    try:
        run = subprocess.run(
            ["git", "-C", str(REPOSITORY), *arguments], capture_output=True, text=True, check=False
        )
    except OSError:
        return None
    return run.stdout.strip() if run.returncode == 0 else None


def _processor() -> str:
    try:
        match = re.search(r"model name\s*:\s*(.+)", Path("/proc/cpuinfo").read_text())
    except OSError:
        match = None
    return match[1].strip() if match else platform.processor() or platform.machine()


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def describe_device(device: str) -> str:
    """Returns the card's name for a CUDA device, the processor's for the CPU."""
    if device.startswith("cuda"):
        import torch

        return torch.cuda.get_device_name(device)
    return _processor()


def begin_record(bench: str, device: str) -> dict[str, Any]:
    """Returns what every record begins with.

    Args:
        bench: Name of the command.
        device: A device name.

    Returns:
        The command, the time, the device's name, and `describe_environment`.
    """
    return {
        "bench": bench,
        "started": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        **describe_environment(),
        "device": describe_device(device),
    }


def describe_environment() -> dict[str, Any]:
    """Returns commit, machine and versions as plain values.

    Returns:
        `commit` is "unknown" outside a git checkout; `dirty` tells of uncommitted changes.
    """
    pages, page_bytes = os.sysconf("SC_PHYS_PAGES"), os.sysconf("SC_PAGE_SIZE")
    return {
        "commit": _git("rev-parse", "HEAD") or "unknown",
        "dirty": bool(_git("status", "--porcelain")),
        "machine": {
            "processor": _processor(),
            "cores": len(os.sched_getaffinity(0)),
            "memory_bytes": pages * page_bytes,
        },
        "python": platform.python_version(),
        "torch": _version("torch"),
        "transformers": _version("transformers"),
        "peft": _version("peft"),
    }
