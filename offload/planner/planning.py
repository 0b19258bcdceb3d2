"""`plan`: numbers in, a `Plan` out, or a refusal that says what would fit."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from offload.adapters import transformers as hf
from offload.discovery import Selection
from offload.planner.calibration import calibrated
from offload.planner.cards import HOST, TYPICAL, Card, card_of_device, find_card
from offload.planner.choice import Budget, Option, longest_tokens, policy_for
from offload.planner.cost import saved_values
from offload.planner.dry_run import Call, Situation
from offload.planner.optimizers import check_optimizer
from offload.planner.placement import Device
from offload.planner.prediction import Forecast
from offload.planner.refusal import refusal
from offload.planner.request import Request
from offload.planner.result import Plan
from offload.policy import Codecs, parse_bytes
from offload.store.budget import free_disk_bytes

HOST_RESERVE_BYTES = 1 << 29
"""Of a process on the CPU: Python, torch and its libraries."""
CARD_ROUNDING = 512
"""To which torch's allocator on a card rounds every tensor up."""

Size = int | str


def plan(
    model: Any,
    *,
    tokens: int,
    batch: int = 1,
    memory: Size | Mapping[str, Size] | None = None,
    card: str | Mapping[str, str] | None = None,
    host: Size | None = None,
    disk: Size | os.PathLike[str] | None = None,
    train: bool = True,
    optimizer: str = "adamw",
    layers: Selection | None = None,
    dtype: torch.dtype | None = None,
    lora: int = 0,
    four_bit: bool = False,
    codec: str | Mapping[str, str | None] | Codecs | None = None,
    call: Call | None = None,
    longest: bool = False,
) -> Plan:
    """Says before a step what it will take, and chooses the fastest way to run it that fits.

    Runs the real executor on meta tensors, some layers of the model and its head, counts every byte
    that lives, and puts the whole step together from that. No weights are allocated and no card is
    touched, except that the device that a model with weights is on is timed for a second.

    Layers are taken to pass the proof that `wrap` makes before it runs them by tiles; one that
    mixes tokens outside of attention is recomputed whole, and takes more than is said here. Not
    counted are autocast, gradients that are kept from one step to the next, and what hooks do.

    Args:
        model: a module with weights anywhere or on meta, a configuration of transformers, a folder
            with one, or the name of a preset such as `"llama-3.1-8b"`.
        tokens: of a sequence.
        batch: sequences.
        memory: of the card, all that it has, in bytes or as `"8GB"`; None takes the card's, or sets
            no limit. A mapping such as `{"cuda:0": "16GB", "cuda:1": "8GB"}` places the model on
            several cards; one that is left out or given 0 gets nothing.
        card: name of the card, or of each, for its speed; `offload cards` lists them.
        host: memory for activations on the host; None sets no limit.
        disk: what a drive may take of them, in bytes or as `"500GB"`, or a directory on it; None
            for no drive.
        train: whether there is a backward.
        optimizer: "adamw", "adam", "sgd", "sgd-momentum", "adamw-8bit", or "none".
        layers: as for `wrap`.
        dtype: of the weights where `model` is no module; None for the configuration's or bfloat16.
        lora: rank of LoRA adapters to put on all linear layers; 0 for none.
        four_bit: whether the layers' frozen weights are held in 4 bits (NF4).
        codec: one that may be used where nothing lossless fits the host, as for `Policy`.
        call: runs a model on ids `[B, S]` and returns the loss; None calls it with labels if it is
            one of transformers, else with the ids alone.
        longest: whether to find the longest sequence that fits as well.

    Returns:
        The plan.

    Raises:
        DoesNotFit: if there is no way; says what each purpose takes and what would help.
        ValueError: if an argument is out of range.
        TypeError: if an argument has the wrong type.
    """
    _check_counts(tokens=(tokens, 2), batch=(batch, 1), lora=(lora, 0))
    check_optimizer("plan", optimizer)
    several = isinstance(memory, Mapping)
    devices = _devices_of(model, memory, card)
    kind = next((d.card.kind for d in devices if d.budget.device != 0), devices[0].card.kind)
    rounding = 1 if kind.type == "cpu" else CARD_ROUNDING
    request = Request(
        model=model,
        situation=Situation(tokens, batch, train, kind, rounding),
        optimizer=optimizer if train else "none",
        devices=tuple(devices),
        several=several,
        host=None if host is None else parse_bytes(host),
        disk=_disk_bytes(disk),
        codec=codec,
        layers=layers,
        dtype=dtype,
        lora=lora,
        four_bit=four_bit,
        call=call,
    )
    return _answer(request, _directory_of(disk), longest=longest)


def _answer(request: Request, directory: str | None, *, longest: bool) -> Plan:
    forecast = request.forecast()
    option = request.choose(forecast)
    if option is None:
        raise refusal(request, forecast)
    budget, situation = request.budget, request.situation
    sizes = forecast.outline.sizes()
    reach = (
        longest_tokens(forecast, request.leanest(forecast), request.step_fits(forecast))
        if longest
        else None
    )
    return Plan(
        model=forecast.outline.name,
        tokens=situation.tokens,
        batch=situation.batch,
        train=situation.train,
        optimizer=request.optimizer,
        card=request.card.name,
        balance=request.card.balance,
        budget=budget,
        policy=policy_for(option, budget, directory),
        step=option.step,
        timing=option.timing,
        spilled_bytes=option.spilled_bytes,
        values=tuple(saved_values(situation.tokens, *sizes)) if sizes else (),
        shares=tuple(request.shares(forecast, option.step) or ()),
        longest_tokens=reach,
        notes=(*_notes(forecast, option, directory), *forecast.notes(option.policy)),
    )


def _notes(forecast: Forecast, option: Option, directory: str | None) -> list[str]:
    notes = []
    known, tokens = hf.positions_of(forecast.outline.model), forecast.situation.tokens
    if known is not None and tokens > known:
        notes.append(
            f"{forecast.outline.name} knows {known:,} positions; {tokens:,} tokens need more"
        )
    if option.spilled_bytes and directory is None:
        notes.append("give disk= a directory, not a size, for a policy that can be run")
    return notes


def _devices_of(
    model: Any, memory: Size | Mapping[str, Size] | None, card: str | Mapping[str, str] | None
) -> list[Device]:
    """Returns the cards that there are, with their memory; at least one."""
    if not isinstance(memory, Mapping):
        if isinstance(card, Mapping):
            raise TypeError(
                "plan: expected the name of one card with one memory, got several. Give memory a "
                "size for each of them."
            )
        found = device_card(card) if card is not None else _card_of(model)
        limit = None if memory is None else _memory_bytes(memory)
        if limit is None and (card is not None or _device_of(model).type == "cuda"):
            limit = found.memory_bytes
        return [Device("device", _budget(found, limit), found)]
    sizes = {_card_name(name): parse_bytes(size) for name, size in memory.items()}
    cards = {_card_name(n): c for n, c in card.items()} if isinstance(card, Mapping) else {}
    if unknown := set(cards) - set(sizes):
        raise ValueError(
            f"plan: expected cards among {sorted(sizes)}, got {sorted(unknown)}. Give memory a "
            "size for each."
        )
    devices = []
    for name, size in sizes.items():
        found = device_card(cards.get(name) if isinstance(card, Mapping) else card)
        devices.append(Device(name, _budget(found, size), found))
    if not any(device.budget.device for device in devices):
        raise ValueError(
            f"plan: expected memory of at least one card, got {dict(memory)}. Give a size such as "
            "{'cuda:0': '16GB'}."
        )
    return devices


def _card_name(name: Any) -> str:
    """Returns the name of a card, `cuda:N`, also where it is given as a number."""
    text = f"cuda:{name}" if isinstance(name, int) and not isinstance(name, bool) else str(name)
    if not re.fullmatch(r"cuda:\d+", text):
        raise ValueError(f"plan: expected the names of cards as 'cuda:0', got {name!r}.")
    return text


def device_card(name: str | None) -> Card:
    """Returns the card of a name, or a typical one."""
    return TYPICAL if name is None else find_card(name)


def _budget(card: Card, limit: int | None) -> Budget:
    if card.kind.type == "cpu":
        return Budget(limit, reserve=HOST_RESERVE_BYTES, fragmentation=0.0, shared=True)
    return Budget(device=limit)


def _memory_bytes(memory: Size) -> int:
    size = parse_bytes(memory)
    if size == 0:
        raise ValueError("plan: expected some memory, got 0. Give all that the card has.")
    return size


def _card_of(model: Any) -> Card:
    """Returns what a model's own device is, timed; a typical card where it has none."""
    device = _device_of(model)
    if device.type == "meta":
        return TYPICAL
    floating = (p.dtype for p in model.parameters() if p.is_floating_point())
    dtype = next(floating, torch.float32)
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        return calibrated(card_of_device(properties, properties.name), device, dtype)
    return calibrated(HOST, device, dtype)


def _device_of(model: Any) -> torch.device:
    """Returns the device of a module's first parameter; meta where there is none."""
    parameter = next(model.parameters(), None) if isinstance(model, nn.Module) else None
    return torch.device("meta") if parameter is None else parameter.device


def _disk_bytes(disk: Size | os.PathLike[str] | None) -> int | None:
    """Returns what a drive may take: 0 without one, most of what is free in a directory."""
    if disk is None:
        return 0
    directory = _directory_of(disk)
    if directory is not None:
        return free_disk_bytes(directory)
    return parse_bytes(disk)  # type: ignore[arg-type]


def _directory_of(disk: Size | os.PathLike[str] | None) -> str | None:
    if disk is None or isinstance(disk, int):
        return None
    text = os.fspath(disk)
    is_path = not isinstance(disk, str) or os.sep in text or os.path.isdir(text)
    return text if is_path else None


def _check_counts(**counts: tuple[Any, int]) -> None:
    for name, (value, least) in counts.items():
        if isinstance(value, bool) or not isinstance(value, int):
            raise TypeError(f"plan: expected an int for {name}, got {value!r}.")
        if value < least:
            raise ValueError(f"plan: expected {name} >= {least}, got {value}.")
