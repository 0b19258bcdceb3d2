"""Checks what this machine has, what is missing, and how to get it."""

from __future__ import annotations

import argparse
import importlib.metadata
import platform
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from offload import _native
from offload.cli.show import show_table
from offload.errors import OffloadError
from offload.policy import format_bytes
from offload.store.budget import default_budget, free_disk_bytes, physical_bytes
from offload.store.limits import is_wsl, pinning_limits

_OPTIONAL = {
    "triton": "the fused attention kernels of cards from compute capability 8.0 on",
    "transformers": "its models, and plans from configurations",
    "peft": "plans with lora",
    "accelerate": "its hooks on wrapped models",
    "rich": "prettier tables",
    "matplotlib": "`offload plan --plot`",
    "xxhash": "Policy(debug=True)",
}
_USUAL_PIN = 1 << 30


@dataclass(frozen=True)
class Finding:
    """One thing that was looked at.

    Attributes:
        what: it is.
        found: there.
        advice: what to do; empty where nothing is to be done.
        broken: whether `offload` does not work without it.
    """

    what: str
    found: str
    advice: str = ""
    broken: bool = False


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the options."""
    parser.add_argument("--disk", default=".", help="directory that might become the disk tier")


def run(args: argparse.Namespace) -> int:
    """Prints what was found.

    Args:
        args: parsed options.

    Returns:
        0; 1 where something is broken.
    """
    findings = list(examine(args.disk))
    show_table(("", "found", "to do"), [(item.what, item.found, item.advice) for item in findings])
    return int(any(item.broken for item in findings))


def examine(directory: str) -> Iterator[Finding]:
    """Looks at everything that matters.

    Args:
        directory: that might become the disk tier.

    Yields:
        One finding after the other.
    """
    yield Finding("offload", _native.VERSION)
    yield Finding("Python, system", f"{platform.python_version()}, {_system()}")
    yield Finding("torch", torch.__version__)
    for name, used_for in _OPTIONAL.items():
        yield _package(name, used_for)
    yield _native_build()
    yield from _cards()
    yield from _memory(directory)


def _package(name: str, used_for: str) -> Finding:
    try:
        return Finding(name, importlib.metadata.version(name))
    except importlib.metadata.PackageNotFoundError:
        return Finding(name, "not installed", f"only for {used_for}: pip install {name}")


def _native_build() -> Finding:
    has_card, built = torch.cuda.is_available(), _native.built_with_cuda()
    found = "with CUDA" if built else "for the CPU alone"
    advice = ""
    if has_card and not built:
        advice = "install nvcc and rebuild: OFFLOAD_CUDA=ON pip install -e ."
    return Finding("native build", found, advice, broken=bool(advice))


def _cards() -> Iterator[Finding]:
    if not torch.cuda.is_available():
        built = torch.version.cuda is not None
        advice = "" if built else "torch is built without CUDA: install another build for a card"
        yield Finding("card", "none", advice)
        return
    links = _links()
    for index in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(index)
        size = format_bytes(properties.total_memory)
        capability = f"{properties.major}.{properties.minor}"
        old = "attention by PyTorch's kernels, not ours" if properties.major < 8 else ""
        yield Finding(f"card {index}", f"{properties.name}, {capability}, {size}", old)
        if index < len(links):
            yield links[index]


def _links() -> list[Finding]:
    """Asks the driver's tool for each card's slot; nothing where there is no such tool."""
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return []
    fields = ("gen.gpucurrent", "width.current", "gen.max", "width.max")
    query = ",".join(f"pcie.link.{field}" for field in fields)
    asked = [tool, f"--query-gpu={query}", "--format=csv,noheader,nounits"]
    answer = subprocess.run(asked, capture_output=True, text=True, check=False, timeout=30)
    return [
        link_finding(index, line) for index, line in enumerate(answer.stdout.strip().splitlines())
    ]


def link_finding(index: int, line: str) -> Finding:
    """Reads what the driver says of a slot.

    Args:
        index: of the card.
        line: generation and width now, and at most.

    Returns:
        The finding.
    """
    numbers = [part.strip() for part in line.split(",")]
    if len(numbers) != 4 or not all(number.isdigit() for number in numbers):
        return Finding(f"card {index}, link", "unknown")
    generation, width, most, widest = map(int, numbers)
    advice = ""
    if width < widest:
        advice = f"the slot gives {width} of {widest} lanes: copies are slower; try another slot"
    idle = ", slower while idle" if generation < most else ""
    found = f"PCIe {most}.0 x{width}{idle}"
    return Finding(f"card {index}, link", found, advice)


def _memory(directory: str) -> Iterator[Finding]:
    budget = default_budget()
    found = f"{format_bytes(physical_bytes())}; {format_bytes(budget.cap_bytes)} for activations"
    yield Finding("host memory", found, budget.reason)
    limits = pinning_limits()
    bound = limits.wsl or limits.memlock_bytes is not None
    advice = limits.remedies(_USUAL_PIN) if bound else ""
    yield Finding("limits of page-locking", limits.found(), advice)
    try:
        free = format_bytes(free_disk_bytes(directory))
        yield Finding("disk tier", f"{free} usable in {directory}")
    except OffloadError as error:
        yield Finding("disk tier", "none", str(error))


def _system() -> str:
    return f"{platform.system()} {platform.release()}" + (", WSL2" if is_wsl() else "")
