"""Places the layers, the embedding and the head of a model on cards that may differ."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from offload.planner.cards import Card
from offload.planner.choice import Budget
from offload.planner.composition import Step
from offload.planner.cost import compute_seconds
from offload.planner.dry_run import outside_modules
from offload.planner.ledger import PURPOSES, Bytes, Purpose
from offload.planner.outline import Outline, Unit
from offload.planner.prediction import Forecast

_MOST_ORDERS = 5040
_BY_WEIGHT = tuple(
    PURPOSES.index(purpose) for purpose in (Purpose.WEIGHTS, Purpose.GRADIENTS, Purpose.OPTIMIZER)
)


@dataclass(frozen=True)
class Device:
    """A card that parts may be placed on.

    Attributes:
        name: such as `"cuda:0"`.
        budget: its memory.
        card: its speed.
    """

    name: str
    budget: Budget
    card: Card


@dataclass(frozen=True)
class Part:
    """What is placed as one: a layer, or everything before or after the layers.

    Attributes:
        units: its modules.
        weight_bytes: of weights, gradients, and the optimizer's state.
        kept_bytes: that it leaves on the device between forward and backward.
        passing_bytes: the most that it takes beside these while it runs.
        update_bytes: that the optimizer's step takes for it.
        card_seconds: what it computes, by card.
    """

    units: tuple[Unit, ...]
    weight_bytes: int
    kept_bytes: int
    passing_bytes: int
    update_bytes: int
    card_seconds: dict[Card, float]


@dataclass(frozen=True)
class Share:
    """What one card gets.

    Attributes:
        device: its name.
        modules: names of the modules on it, in order.
        need_bytes: that it must have.
        budget_bytes: that it has.
        seconds: that it computes in a step.
    """

    device: str
    modules: tuple[str, ...]
    need_bytes: int
    budget_bytes: int
    seconds: float


@dataclass
class _Load:
    """What a run of neighbouring parts takes on one card."""

    device: Device
    held: int = 0
    update: int = 0
    passing: int = 0
    seconds: float = 0.0
    parts: list[Part] = field(default_factory=list)

    def add(self, part: Part) -> None:
        self.parts.append(part)
        self.held += part.weight_bytes + part.kept_bytes
        self.update += part.update_bytes
        self.passing = max(self.passing, part.passing_bytes)
        self.seconds += part.card_seconds[self.device.card]

    @property
    def need(self) -> int:
        if not self.parts:
            return 0
        budget = self.device.budget
        live = self.held + max(self.passing, self.update)
        return int(live * (1 + budget.fragmentation)) + budget.reserve

    @property
    def fits(self) -> bool:
        limit = self.device.budget.device
        return limit is None or self.need <= limit


def parts_of(forecast: Forecast, step: Step, cards: Sequence[Card]) -> list[Part]:
    """Cuts a model into parts, first to last.

    Args:
        forecast: of the model.
        step: of the whole model on one device.
        cards: that there are.

    Returns:
        What comes before the layers, each layer, and what comes after them. Where embedding and
        head share their weight, the head belongs to the first part.
    """
    outline = forecast.outline
    first, last = _outside_units(outline, forecast.after_layers)
    tied = _are_tied(outline, first, last)
    segments = {segment.name: segment for segment in step.segments}
    kept = _kept_by_layer(step, len(outline.named))

    def part(units: Sequence[Unit], names: Sequence[str], own: int, before: int) -> Part:
        ran = [segments[name] for name in names if name in segments]
        weights = sum(unit.weight_bytes for unit in units)
        trained = sum(unit.trained_bytes for unit in units)
        share = trained / forecast.held.trained if forecast.held.trained else 0.0
        passing = max((_passing(segment.peak) for segment in ran), default=0) - before - own
        return Part(
            tuple(units),
            weights + trained + int(share * forecast.held.state),
            own,
            max(0, passing),
            int(share * forecast.held.update),
            {card: sum(compute_seconds(segment, card) for segment in ran) for card in cards},
        )

    layers = []
    for index, (name, _) in enumerate(outline.named):
        names = (f"forward {index}", f"backward {index}")
        layers.append(part([outline.unit(name)], names, kept[index], sum(kept[:index])))
    everything = sum(kept)
    if tied:
        weighed = [Unit(unit.name, 0, 0) for unit in last if unit.name in tied]
        others = [unit for unit in last if unit.name not in tied]
        start = part([*first, *others, *weighed], ("before", "head"), 0, everything)
        return [start, *layers]
    return [
        part(first, ("before",), 0, 0),
        *layers,
        part(last, ("head",), 0, everything),
    ]


def place(parts: Sequence[Part], devices: Sequence[Device]) -> list[Share] | None:
    """Gives each card neighbouring parts so that all fit and the slowest is as fast as can be.

    Args:
        parts: first to last.
        devices: the cards; those without memory get nothing.

    Returns:
        What each card gets, in the order of `devices`; None where they do not fit.
    """
    used = [device for device in devices if device.budget.device != 0]
    best: tuple[float, list[_Load]] | None = None
    for order in _orders(used):
        found = _split(parts, order)
        slowest = max((load.seconds for load in found), default=0.0) if found else 0.0
        if found and (best is None or slowest < best[0]):
            best = slowest, found
    if best is None:
        return None
    loads = {load.device.name: load for load in best[1]}
    return [_share(device, loads.get(device.name)) for device in devices]


def _share(device: Device, load: _Load | None) -> Share:
    budget = device.budget.device or 0
    if load is None:
        return Share(device.name, (), 0, budget, 0.0)
    modules = tuple(unit.name for part in load.parts for unit in part.units)
    return Share(device.name, modules, load.need, budget, load.seconds)


def _orders(devices: Sequence[Device]) -> Iterator[tuple[Device, ...]]:
    """Yields the orders of cards that differ in more than names; the given one first."""
    seen = set()
    for order in itertools.islice(itertools.permutations(devices), _MOST_ORDERS):
        kinds = tuple((device.budget, device.card) for device in order)
        if kinds not in seen:
            seen.add(kinds)
            yield order


def _split(parts: Sequence[Part], order: Sequence[Device]) -> list[_Load] | None:
    """Cuts the parts into one run for each card, by dynamic programming over (card, parts)."""
    best: list[tuple[float, list[_Load]] | None] = [None] * (len(parts) + 1)
    best[0] = 0.0, []
    for device in order:
        following = list(best)  # a card may get nothing
        for start, known in enumerate(best):
            if known is None:
                continue
            load = _Load(device)
            for end in range(start + 1, len(parts) + 1):
                load.add(parts[end - 1])
                if not load.fits:
                    break
                slowest = max(known[0], load.seconds)
                present = following[end]
                if present is None or slowest < present[0]:
                    copied = _Load(**{**vars(load), "parts": list(load.parts)})
                    following[end] = slowest, [*known[1], copied]
        best = following
    return None if best[-1] is None else best[-1][1]


def _outside_units(outline: Outline, after: set[str]) -> tuple[list[Unit], list[Unit]]:
    """Returns the modules before and after the layers; those never called count as before."""
    first: list[Unit] = []
    last: list[Unit] = []
    for name, _ in outside_modules(outline.model, outline.named):
        (last if name in after else first).append(outline.unit(name))
    layers = [name for name, _ in outline.named]
    for path, module in outline.model.named_modules():
        if any(layer.startswith(f"{path}." if path else "") for layer in layers):
            own = [*module.named_parameters(path, False), *module.named_buffers(path, False)]
            first += [Unit(name, t.nbytes, t.nbytes * t.requires_grad) for name, t in own]
    return first, last


def _are_tied(outline: Outline, first: list[Unit], last: list[Unit]) -> set[str]:
    """Returns the names of modules after the layers that share a weight with one before them."""
    modules = dict(outline.model.named_modules())
    before = [modules[unit.name] for unit in first if unit.name in modules]
    shared = {id(p) for module in before for p in module.parameters()}
    return {
        unit.name
        for unit in last
        if any(id(p) in shared for p in outline.model.get_submodule(unit.name).parameters())
    }


def _kept_by_layer(step: Step, layers: int) -> list[int]:
    """Returns what each layer leaves on the device when its forward ends."""
    ends = [_passing(segment.end) for segment in step.segments[: layers + 1]]
    return [max(0, after - before) for before, after in itertools.pairwise(ends)]


def _passing(purposes: Bytes) -> int:
    """Returns the bytes that do not belong to weights."""
    return sum(purposes) - sum(purposes[index] for index in _BY_WEIGHT)
