"""Chooses how a model is run: the fastest way that fits the device, the host and the disk."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

from offload.planner.cards import FRAGMENTATION, RESERVE_BYTES, Card
from offload.planner.composition import Step
from offload.planner.cost import Timing, time_of
from offload.planner.prediction import LONG_RUN_TILES, Forecast
from offload.policy import MIN_HOST_BYTES, Policy

LEANEST_TILE = 512
"""Shorter tiles save little and leave a card idle."""
_STEP_TOKENS = 256
"""To which the longest sequence is rounded down."""
_LONGEST = 1 << 23


@dataclass(frozen=True)
class Budget:
    """What a step may take; None is no limit.

    Attributes:
        device: bytes of the card, all that it has.
        host: bytes of the arena.
        disk: bytes on the drive; 0 for none.
        reserve: bytes of the device that are not torch's tensors.
        fragmentation: share of what is allocated that is lost between blocks.
        shared: whether the host's memory is the device's, as it is for a model on the CPU.
    """

    device: int | None = None
    host: int | None = None
    disk: int | None = 0
    reserve: int = RESERVE_BYTES
    fragmentation: float = FRAGMENTATION
    shared: bool = False

    def device_need(self, step: Step) -> int:
        """Returns what a device must have for a step."""
        beside = step.host_bytes - self.spilled(step) if self.shared else 0
        return int(step.peak_bytes * (1 + self.fragmentation)) + self.reserve + beside

    def spilled(self, step: Step) -> int:
        """Returns what of a step goes to the disk."""
        return 0 if self.host is None else max(0, step.host_bytes - self.host)

    def device_fits(self, step: Step) -> bool:
        """Whether the device takes a step."""
        return self.device is None or self.device_need(step) <= self.device

    def host_fits(self, step: Step) -> bool:
        """Whether host and disk take what a step stores."""
        return self.disk is None or self.spilled(step) <= self.disk


@dataclass(frozen=True)
class Option:
    """One way to run the step.

    Attributes:
        policy: that way.
        step: what it takes.
        timing: how long.
        spilled_bytes: what of it goes to the disk.
    """

    policy: Policy
    step: Step
    timing: Timing
    spilled_bytes: int


def candidates(base: Policy, *, train: bool) -> list[list[Policy]]:
    """Returns policies in groups: what a later group does costs more time than an earlier one.

    Args:
        base: gives everything that is not chosen.
        train: whether there is a backward.

    Returns:
        First everything kept; then recomputed, all on the device; then activations on the host,
        with ever shorter tiles, whose kernels start more often.
    """

    def tiles(tier: str, *lengths: int) -> list[Policy]:
        return [replace(base, mode="auto", tier=tier, tile_tokens=length) for length in lengths]

    kept = replace(base, mode="keep")
    if not train:
        return [[kept], *([p] for p in tiles("device", 8192, 4096, 2048, 1024, LEANEST_TILE))]
    whole = replace(base, mode="checkpoint", tier="device")
    on_device = tiles("device", 4096, 2048)
    on_host = tiles("host", 8192, 4096, 2048, 1024, LEANEST_TILE)
    return [
        [kept],
        [whole, on_device[0]],
        on_device[1:],
        [replace(whole, tier="host"), on_host[0]],
        *([policy] for policy in on_host[1:]),
        [with_small_chunks(on_host[-1])],
    ]


def with_small_chunks(policy: Policy) -> Policy:
    """Returns the policy with an eighth of the logits at once, where it says how many."""
    chunk = policy.loss_chunk_tokens
    return policy if chunk is None else replace(policy, loss_chunk_tokens=max(1, chunk // 8))


def choose(
    forecast: Forecast,
    budget: Budget,
    card: Card,
    groups: list[list[Policy]],
    fits: Callable[[Step], bool],
) -> Option | None:
    """Finds the fastest option of the first group in which one fits.

    Args:
        forecast: predicts steps.
        budget: what they may take.
        card: what they run on.
        groups: of `candidates`.
        fits: whether the devices take a step.

    Returns:
        The option; None where nothing fits.
    """
    for group in groups:
        fitting = []
        for policy in _worth_trying(group, forecast, budget):
            option = consider(forecast, budget, card, policy)
            if fits(option.step) and budget.host_fits(option.step):
                fitting += [option, *_with_more_kept(forecast, budget, card, option, fits)]
        if fitting:
            return min(fitting, key=lambda option: option.timing.step_s)
    return None


def consider(forecast: Forecast, budget: Budget, card: Card, policy: Policy) -> Option:
    """Predicts one option.

    Args:
        forecast: predicts steps.
        budget: says what goes to the disk.
        card: what it runs on.
        policy: how it is run.

    Returns:
        The option, whether it fits or not.
    """
    step = forecast.step(policy)
    spilled = budget.spilled(step)
    return Option(policy, step, time_of(step, card, spilled), spilled)


def _worth_trying(group: list[Policy], forecast: Forecast, budget: Budget) -> Iterator[Policy]:
    """Leaves out what cannot fit, and tiles so long that half as long ones are no shorter."""
    tokens, inputs = forecast.situation.tokens, forecast.layer_input_bytes()
    held = forecast.held.weights + inputs * len(forecast.outline.named)
    for policy in group:
        keeps_inputs = policy.tier == "device" and policy.mode != "keep"
        if keeps_inputs and budget.device is not None and held > budget.device:
            continue
        by_tiles = policy.mode == "auto"
        if not by_tiles or policy.tile_tokens < 2 * tokens or policy.tile_tokens <= LEANEST_TILE:
            yield policy


def _with_more_kept(
    forecast: Forecast, budget: Budget, card: Card, option: Option, fits: Callable[[Step], bool]
) -> Iterator[Option]:
    """Where copies set the pace, keeps the inputs of more layers at the end on the device."""
    timing, layers = option.timing, len(forecast.outline.named)
    if option.policy.tier != "host" or timing.step_s <= timing.compute_s * 1.001:
        return
    for kept in (2, 4, 8):
        if kept < layers:
            policy = replace(option.policy, keep_last=kept)
            more = consider(forecast, budget, card, policy)
            if not fits(more.step):
                return
            yield more


def with_codec(groups: list[list[Policy]], codec: Any) -> list[list[Policy]]:
    """Returns the policies that store on the host, with a codec."""
    encoded = [[replace(p, codec=codec) for p in group if p.tier == "host"] for group in groups]
    return [group for group in encoded if group]


def leanest(groups: list[list[Policy]]) -> Policy:
    """Returns the policy that takes the least of the device."""
    return groups[-1][-1]


def longest_tokens(forecast: Forecast, policy: Policy, fits: Callable[[Step], bool]) -> int:
    """Finds the longest sequence that fits.

    Args:
        forecast: predicts steps.
        policy: how they are run.
        fits: whether one fits.

    Returns:
        Tokens, a multiple of 256, up to a 64th less than it is; 0 where not even 256 fit.
    """

    def reaches(tokens: int) -> bool:
        return fits(forecast.step(policy, tokens))

    # From here on a length is told from two that are run once, so asking costs nothing.
    low, high = 0, LONG_RUN_TILES * policy.tile_tokens + _STEP_TOKENS
    while high <= _LONGEST and reaches(high):
        low, high = high, 2 * high
    while high - low > max(_STEP_TOKENS, low // 64):
        middle = (low + high) // 2 // _STEP_TOKENS * _STEP_TOKENS
        low, high = (middle, high) if reaches(middle) else (low, middle)
    return low


def policy_for(option: Option, budget: Budget, disk: str | None) -> Policy:
    """Returns the policy that `wrap` takes: with the host's cap and the disk where they matter.

    Args:
        option: what was chosen.
        budget: what it was chosen for.
        disk: directory on the drive, or None.

    Returns:
        The policy.
    """
    policy = option.policy
    if policy.tier != "host" or policy.mode == "keep":
        return policy
    if budget.host is not None:
        policy = replace(policy, host_bytes=max(MIN_HOST_BYTES, budget.host))
    if option.spilled_bytes and disk is not None:
        policy = replace(policy, disk=disk)
    return policy
