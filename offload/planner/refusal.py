"""What is said where nothing fits: what each purpose takes, what fits, and what would help."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from offload.adapters import transformers as hf
from offload.errors import DoesNotFit
from offload.planner.choice import Option, longest_tokens
from offload.planner.prediction import Forecast
from offload.planner.request import Request
from offload.planner.result import aligned, describe, purpose_rows
from offload.policy import Policy, format_bytes

LORA_RANK = 16
"""Of the adapters that are tried in place of training all weights."""


def refusal(request: Request, forecast: Forecast) -> DoesNotFit:
    """Explains that nothing fits.

    Args:
        request: what was asked for.
        forecast: of the model as it was asked for.

    Returns:
        The error, to be raised.
    """
    policy = request.leanest(forecast)
    option = request.consider(forecast, policy)
    longest = longest_tokens(forecast, policy, request.step_fits(forecast))
    remedies = tuple(_remedies(request, forecast, option))
    situation = request.situation
    there = ", ".join(
        f"{device.name} {format_bytes(device.budget.device or 0)}" for device in request.devices
    )
    lines = [
        f"plan: expected {forecast.outline.name} at {situation.tokens:,} tokens to fit, got no way "
        f"that does. There is: {there}{_host_and_disk(request)}. The way that takes the least of "
        f"the device ({describe(policy)}) would take:",
        *aligned(purpose_rows(option.step, request.budget)),
        f"  on the host: {format_bytes(option.step.host_bytes)}",
        f"Longest sequence that fits: {longest:,} tokens." if longest else "No length fits.",
        *(f"It would fit with {remedy}." for remedy in remedies),
    ]
    need = request.budget.device_need(option.step)
    return DoesNotFit("\n".join(lines), need, longest, remedies)


def _host_and_disk(request: Request) -> str:
    host = "" if request.host is None else f", host {format_bytes(request.host)}"
    return host + (f", disk {format_bytes(request.disk)}" if request.disk else "")


def _remedies(request: Request, forecast: Forecast, option: Option) -> Iterator[str]:
    """Yields single changes after which the leanest way fits."""
    fits = request.device_fits(forecast)
    if fits(option.step):  # what is short is the host
        missing = request.budget.spilled(option.step)
        yield f"host='{_rounded_up(option.step.host_bytes)}'"
        yield f"disk= a directory on a drive with {_rounded_up(missing)} free"
        encoded = request.consider(forecast, _encoded(option))
        if request.budget.host_fits(encoded.step):
            yield "codec='fp8', which is not lossless"
        return
    trained = forecast.outline.trained_bytes
    adaptable = bool(hf.pretrained_modules(forecast.outline.model)) and request.situation.train
    if adaptable and not request.lora and trained > forecast.outline.weight_bytes // 2:
        yield from _if_it_fits(request, option, f"LoRA (lora={LORA_RANK})", lora=LORA_RANK)
    frozen = trained < forecast.outline.weight_bytes // 2
    if frozen and not request.four_bit and not forecast.outline.is_quantised:
        yield from _if_it_fits(request, option, "weights in 4 bits (four_bit=True)", four_bit=True)
    if not request.several:
        need = request.budget.device_need(option.step)
        short = (
            ""
            if request.budget.host_fits(option.step)
            else (f" and host='{_rounded_up(option.step.host_bytes)}'")
        )
        yield f"a card of {_rounded_up(need)}{short}"


def _if_it_fits(
    request: Request, option: Option, what: str, *, lora: int | None = None, four_bit: bool = False
) -> Iterator[str]:
    try:
        changed = request.forecast(lora=lora, four_bit=four_bit or None)
    except ModuleNotFoundError:
        return
    step = changed.step(option.policy)
    if request.step_fits(changed)(step):
        yield f"{what}: {format_bytes(request.budget.device_need(step))}"


def _encoded(option: Option) -> Policy:
    return replace(option.policy, codec={"input": "fp8", "kv": "fp8"})


def _rounded_up(size: int) -> str:
    """Returns a size in whole GB that holds so many bytes."""
    return f"{-(-size // 10**9)}GB"
