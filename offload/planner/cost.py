"""How long a step takes: work over speed, copies beside it, segment by segment."""

from __future__ import annotations

from dataclasses import dataclass

from offload.planner.cards import Card
from offload.planner.composition import Step
from offload.planner.ledger import Segment

LAUNCH_S = 8e-6
"""Of one operator: below that the host, not the card, sets the pace."""
DISK_GBPS = 3.0
"""Of a drive where nothing else is known."""


@dataclass(frozen=True)
class Timing:
    """Predicted seconds of a step.

    Attributes:
        compute_s: of products, attention and everything between them.
        copy_s: of copies between device and host, both ways.
        disk_s: of writing and reading the disk.
        step_s: of the step: copies run beside the computation and count where they are longer.
    """

    compute_s: float
    copy_s: float
    disk_s: float
    step_s: float


def time_of(step: Step, card: Card, disk_bytes: int = 0) -> Timing:
    """Predicts the time of a step.

    Args:
        step: of a whole model.
        card: what it runs on.
        disk_bytes: written to the disk in the step, and read again.

    Returns:
        The times.
    """
    disk_s = disk_bytes / DISK_GBPS / 1e9
    phases: dict[bool, list[float]] = {False: [0.0, 0.0], True: [0.0, 0.0]}
    for segment in step.segments:
        phase = phases[segment.name.startswith("backward")]
        phase[0] += compute_seconds(segment, card)
        phase[1] += (segment.out_bytes + segment.back_bytes) / card.link_gbps / 1e9
    # What is copied in a layer overlaps with the layers beside it, so a phase counts as a whole.
    step_s = sum(max(compute, copy, disk_s) for compute, copy in phases.values())
    return Timing(
        sum(compute for compute, _ in phases.values()),
        sum(copy for _, copy in phases.values()),
        2 * disk_s,
        step_s,
    )


def compute_seconds(segment: Segment, card: Card) -> float:
    """Returns how long a segment computes, copies aside."""
    work = segment.work
    linear, forward, backward = (share * card.teraflops * 1e12 for share in card.efficiency)
    computing = (
        work.linear_flops / linear
        + work.attention_flops[0] / forward
        + work.attention_flops[1] / backward
        + work.touched_bytes / card.memory_gbps / 1e9
    )
    return max(computing, work.operators * LAUNCH_S)


@dataclass(frozen=True)
class SavedValue:
    """What it is worth to keep one byte of something instead of computing it again.

    Attributes:
        what: is kept.
        flops_per_byte: that recomputing it would cost.
    """

    what: str
    flops_per_byte: float


def saved_values(tokens: int, hidden: int, element_bytes: int) -> list[SavedValue]:
    """Returns what saved bytes are worth: those beyond a card's balance are worth their copy.

    Args:
        tokens: S.
        hidden: E, the inner dim of the projections.
        element_bytes: of an activation.

    Returns:
        Attention outputs (causal: two products over half of the sequence for each value), and
        outputs of linear layers (one product over E).
    """
    return [
        SavedValue("attention output", 2.0 * tokens / element_bytes),
        SavedValue("output of a linear layer", 2.0 * hidden / element_bytes),
    ]
