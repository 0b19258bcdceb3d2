"""What a plan is asked for, and what fits it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch

from offload.adapters import transformers as hf
from offload.discovery import Selection
from offload.ops.linear_cross_entropy import chunk_tokens_for
from offload.planner.cards import Card
from offload.planner.choice import (
    Budget,
    Option,
    candidates,
    choose,
    consider,
    leanest,
    with_codec,
)
from offload.planner.composition import Step
from offload.planner.dry_run import Call, Situation
from offload.planner.outline import outline_of
from offload.planner.placement import Device, Share, parts_of, place
from offload.planner.prediction import Forecast
from offload.policy import Codecs, Policy


@dataclass(frozen=True)
class Request:
    """The arguments of `plan`, read.

    Attributes:
        model: as given.
        situation: what is run.
        optimizer: its name.
        devices: the cards.
        several: whether the model is placed on them part by part.
        host, disk: bytes there; None for no limit.
        codec: that may be used.
        layers, dtype, lora, four_bit, call: as given.
    """

    model: Any
    situation: Situation
    optimizer: str
    devices: tuple[Device, ...]
    several: bool
    host: int | None
    disk: int | None
    codec: str | Mapping[str, str | None] | Codecs | None
    layers: Selection | None
    dtype: torch.dtype | None
    lora: int
    four_bit: bool
    call: Call | None

    @property
    def card(self) -> Card:
        """The card that code is run for and times are told of: the first that has memory."""
        used = (device.card for device in self.devices if device.budget.device != 0)
        return next(used, self.devices[0].card)

    @property
    def budget(self) -> Budget:
        """What the step may take of one device, the host and the disk."""
        budget = replace(self.devices[0].budget, host=self.host, disk=self.disk)
        return replace(budget, device=None) if self.several else budget

    def forecast(self, *, lora: int | None = None, four_bit: bool | None = None) -> Forecast:
        """Makes the outline of the model and what predicts its steps.

        Args:
            lora: in place of the one asked for.
            four_bit: in place of the one asked for.

        Returns:
            The forecast.
        """
        outline = outline_of(
            self.model,
            layers=self.layers,
            dtype=self.dtype,
            lora=self.lora if lora is None else lora,
            four_bit=self.four_bit if four_bit is None else four_bit,
            train=self.situation.train,
        )
        return Forecast(outline, self.situation, self.optimizer, self.call)

    def choose(self, forecast: Forecast) -> Option | None:
        """Returns the fastest way that fits; lossless if there is one, else with the codec."""
        groups = self._groups(forecast)
        fits = self.device_fits(forecast)
        option = choose(forecast, self.budget, self.card, groups, fits)
        if option is None and self.codec is not None:
            groups = with_codec(groups, self.codec)
            option = choose(forecast, self.budget, self.card, groups, fits)
        return option

    def leanest(self, forecast: Forecast) -> Policy:
        """Returns the policy that takes the least of the device."""
        return leanest(self._groups(forecast))

    def consider(self, forecast: Forecast, policy: Policy) -> Option:
        """Returns what a policy takes, whether it fits or not."""
        return consider(forecast, self.budget, self.card, policy)

    def device_fits(self, forecast: Forecast) -> Callable[[Step], bool]:
        """Returns what decides whether the devices take a step."""
        if not self.several:
            return self.budget.device_fits
        return lambda step: self.shares(forecast, step) is not None

    def step_fits(self, forecast: Forecast) -> Callable[[Step], bool]:
        """Returns what decides whether devices, host and disk take a step."""
        fits = self.device_fits(forecast)
        return lambda step: fits(step) and self.budget.host_fits(step)

    def shares(self, forecast: Forecast, step: Step) -> list[Share] | None:
        """Places a step on the cards; None where there is one card, or it does not fit."""
        if not self.several:
            return None
        cards = [device.card for device in self.devices]
        return place(parts_of(forecast, step, cards), self.devices)

    def _groups(self, forecast: Forecast) -> list[list[Policy]]:
        vocabulary = hf.vocabulary_of(forecast.outline.model)
        chunk = chunk_tokens_for(vocabulary) if vocabulary else None
        return candidates(Policy(loss_chunk_tokens=chunk), train=self.situation.train)
