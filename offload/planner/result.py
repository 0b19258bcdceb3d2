"""`Plan`: a policy with the predicted bytes and time of each device and of the host."""

from __future__ import annotations

import os
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any

from offload.planner.choice import Budget
from offload.planner.composition import Step
from offload.planner.cost import SavedValue, Timing
from offload.planner.ledger import PURPOSES
from offload.planner.placement import Share
from offload.policy import Policy, format_bytes

if TYPE_CHECKING:
    from rich.console import Group


@dataclass(frozen=True)
class Plan:
    """What a step will take, and how it is to be run. Every figure is predicted.

    Attributes:
        model: what was planned, in words.
        tokens, batch, train, optimizer: what is run.
        card: what it runs on.
        balance: FLOPs that the card does while one byte crosses its link.
        budget: what the step may take.
        policy: how to run it.
        step: what it takes, segment by segment; on several cards, as if on one.
        timing: how long.
        spilled_bytes: what of it goes to the disk, each step.
        values: what saved bytes are worth, see `cost.saved_values`.
        shares: what each card gets, if there are several.
        longest_tokens: the longest sequence that fits under the leanest policy; None if not asked.
        notes: what is to be known besides, such as layers that do not run by tiles.
    """

    model: str
    tokens: int
    batch: int
    train: bool
    optimizer: str
    card: str
    balance: float
    budget: Budget
    policy: Policy
    step: Step
    timing: Timing
    spilled_bytes: int
    values: tuple[SavedValue, ...] = ()
    shares: tuple[Share, ...] = ()
    longest_tokens: int | None = None
    notes: tuple[str, ...] = ()

    @property
    def purposes(self) -> dict[str, int]:
        """Bytes by purpose when the device holds most."""
        found = zip(PURPOSES, self.step.peak, strict=True)
        return {purpose.value: size for purpose, size in found if size}

    @property
    def peak_bytes(self) -> int:
        """The most that tensors take of the device."""
        return self.step.peak_bytes

    @property
    def device_bytes(self) -> int:
        """What the device must have: the peak, what is lost between blocks, and the reserve."""
        return self.budget.device_need(self.step)

    @property
    def host_bytes(self) -> int:
        """The most that the arena holds."""
        return self.step.host_bytes - self.spilled_bytes

    def device_map(self) -> dict[str, str | int]:
        """Returns the placement as accelerate takes it.

        Returns:
            For each module the device that it is on, an index where the device is a card.

        Raises:
            ValueError: if the plan is for one device.
        """
        if not self.shares:
            raise ValueError(
                "Plan.device_map: expected a plan for several cards, got one for one. "
                "Give memory={'cuda:0': '16GB', 'cuda:1': '8GB'}."
            )
        return {
            module: _index_of(share.device) for share in self.shares for module in share.modules
        }

    def to_dict(self) -> dict[str, Any]:
        """Returns plain dicts, lists, numbers and strings, fit for JSON."""
        policy = {field.name: getattr(self.policy, field.name) for field in fields(self.policy)}
        policy["codec"] = self.policy.codecs._asdict()
        return {
            "model": self.model,
            "tokens": self.tokens,
            "batch": self.batch,
            "train": self.train,
            "optimizer": self.optimizer,
            "card": self.card,
            "budget": vars(self.budget),
            "policy": policy,
            "purposes": self.purposes,
            "peak_bytes": self.peak_bytes,
            "device_bytes": self.device_bytes,
            "host_bytes": self.host_bytes,
            "disk_bytes_per_step": self.spilled_bytes,
            "copied_bytes_per_step": self.step.copied_bytes,
            "timing": vars(self.timing),
            "balance": self.balance,
            "values": {value.what: value.flops_per_byte for value in self.values},
            "shares": [vars(share) | {"modules": list(share.modules)} for share in self.shares],
            "longest_tokens": self.longest_tokens,
            "notes": list(self.notes),
        }

    @property
    def title(self) -> str:
        """What is planned, in a line."""
        batch = f"{self.batch} x " if self.batch > 1 else ""
        what = f"training with {self.optimizer}" if self.train else "without gradients"
        return f"{self.model}, {batch}{self.tokens:,} tokens, {what}; all figures predicted"

    def lines(self) -> list[str]:
        """Returns all but title and tables, a line each."""
        timing = self.timing
        lines = [f"run as: {describe(self.policy)}"]
        copied = format_bytes(self.step.copied_bytes)
        lines.append(f"host: {format_bytes(self.host_bytes)} held, {copied} copied a step")
        if self.spilled_bytes:
            lines.append(f"disk: {format_bytes(self.spilled_bytes)} written a step")
        rate = self.tokens * self.batch / timing.step_s
        lines.append(
            f"time: {timing.step_s:.3g} s a step, {rate:,.0f} tokens a second on {self.card}: "
            f"computing {timing.compute_s:.3g} s, copying {timing.copy_s:.3g} s beside it"
        )
        worth = ", ".join(f"{value.what} {value.flops_per_byte:,.0f}" for value in self.values)
        if worth and self.train:
            lines.append(
                f"FLOPs that a saved byte spares: {worth}; worth its copy above {self.balance:,.0f}"
            )
        if self.longest_tokens is not None:
            lines.append(f"longest sequence that fits: {self.longest_tokens:,} tokens")
        return [*lines, *self.notes]

    def __str__(self) -> str:
        rows = purpose_rows(self.step, self.budget)
        rows += [share_cells(share)[:3:2] for share in self.shares]
        return "\n".join([self.title, *aligned(rows), *self.lines()])

    def __rich__(self) -> Group:
        from rich.console import Group
        from rich.table import Table

        table = Table()
        table.add_column("device memory at its peak")
        table.add_column("", justify="right")
        for name, size in purpose_rows(self.step, self.budget):
            table.add_row(name, size, style="bold" if name in ("sum", "needed") else None)
        cards = Table(title="cards", title_justify="left")
        for column in ("modules", "device", "needs", "of", "s"):
            cards.add_column(column, justify="left" if column in ("device", "modules") else "right")
        for share in self.shares:
            cards.add_row(*share_cells(share))
        return Group(self.title, table, *([cards] if self.shares else []), *self.lines())


def purpose_rows(step: Step, budget: Budget) -> list[tuple[str, ...]]:
    """Returns what each purpose takes of a device when it holds most.

    Args:
        step: of a whole model.
        budget: gives reserve and limit.

    Returns:
        Names and sizes, down to what is needed and what is there.
    """
    found = zip(PURPOSES, step.peak, strict=True)
    rows: list[tuple[str, ...]] = [
        (purpose.value, format_bytes(size)) for purpose, size in found if size
    ]
    need = budget.device_need(step)
    rows.append(("sum", format_bytes(step.peak_bytes)))
    if budget.shared:
        rows.append(("arena, in the same memory", format_bytes(step.host_bytes)))
    else:
        lost = need - budget.reserve - step.peak_bytes
        rows.append(("lost between blocks", format_bytes(lost)))
    rows.append(("context and workspaces", format_bytes(budget.reserve)))
    rows.append(("needed", format_bytes(need)))
    if budget.device is not None:
        rows.append(("there is", format_bytes(budget.device)))
    return rows


def aligned(rows: list[tuple[str, ...]]) -> list[str]:
    """Returns rows of a name and a size as lines of text."""
    width = max(len(name) for name, *_ in rows)
    return [f"  {name.ljust(width)}  {size.rjust(10)}" for name, size in rows]


def describe(policy: Policy) -> str:
    """Says in words how a policy runs a model."""
    if policy.mode == "keep":
        return "layers as they are, loss by chunks"
    where = "activations on the host" if policy.tier == "host" else "all on the device"
    if policy.disk is not None:
        where += f", what exceeds it in {os.fspath(policy.disk)}"
    if codec := policy.codecs.kv or policy.codecs.input or policy.codecs.attention:
        where += f", encoded ({codec})"
    kept = f", {policy.keep_last} last layers kept" if policy.keep_last > 1 else ""
    if policy.mode == "checkpoint":
        return f"whole layers recomputed, {where}{kept}"
    return f"tiles of {policy.tile_tokens:,} tokens, {where}{kept}"


def share_cells(share: Share) -> tuple[str, ...]:
    """Returns what a card gets: modules, device, bytes that it needs and has, seconds."""
    budget = format_bytes(share.budget_bytes)
    if not share.modules:
        return "nothing", share.device, format_bytes(0), budget, ""
    first, last = share.modules[0], share.modules[-1]
    modules = f"{share.device}: " + (first if first == last else f"{first} ... {last}")
    return modules, share.device, format_bytes(share.need_bytes), budget, f"{share.seconds:.3g}"


def _index_of(device: str) -> str | int:
    kind, _, index = device.partition(":")
    return int(index) if kind == "cuda" and index.isdigit() else device
