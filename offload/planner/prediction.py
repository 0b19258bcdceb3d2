"""What steps of a model take under a policy: dry runs of a few layers, composed and remembered."""

from __future__ import annotations

import functools
from collections.abc import Hashable
from dataclasses import dataclass, replace

from offload.planner.composition import Held, Step, compose, needed_layers, stand_ins
from offload.planner.dry_run import (
    Call,
    Recording,
    Situation,
    call_of,
    called_after_layers,
    dry_run,
)
from offload.planner.ledger import Bytes, Segment, Work
from offload.planner.optimizers import optimizer_bytes
from offload.planner.outline import Outline
from offload.policy import Policy
from offload.store.store import PREFETCH_BYTES
from offload.tape import INPUTS_AHEAD

SHORT_TILES, LONG_TILES = 16, 24
"""Tiles of the two dry runs that tell of a longer one.

With that many the peak of every segment is where it is in longer runs: with few, the key block that
a tile frees weighs more than the gradient of the whole input that the next one has besides.
"""

LONG_RUN_TILES = SHORT_TILES + LONG_TILES
"""A run of more tiles is told from those two, which are cheaper together."""


class Forecast:
    """Predicts steps of one model; what was run once is remembered.

    Args:
        outline: of the model.
        situation: what is run, and where; its `tokens` are those of a call that names none.
        optimizer: a name of `optimizers.NAMES`.
        call: runs the model; None calls it as usual.
    """

    def __init__(
        self,
        outline: Outline,
        situation: Situation,
        optimizer: str = "none",
        call: Call | None = None,
    ) -> None:
        self.outline = outline
        self.situation = situation
        self.held = held_by(outline, optimizer, situation)
        self._call = call or call_of(outline.model, train=situation.train)
        self._kinds = outline.kinds()
        self._recordings: dict[Hashable, Recording] = {}

    def step(self, policy: Policy, tokens: int | None = None) -> Step:
        """Predicts a step.

        Args:
            policy: how it is run.
            tokens: of a sequence; None takes the situation's.

        Returns:
            The step. Beyond `LONG_RUN_TILES` tiles it is extrapolated from two shorter ones: every
            peak of a segment grows by the same bytes with each tile.
        """
        tokens = self.situation.tokens if tokens is None else tokens
        lengths = _run_lengths(policy, tokens)
        recordings = [self._recorded(policy, length) for length in lengths]
        recording = recordings[0]
        if len(recordings) == 2:
            recording = extrapolated(
                recording, recordings[1], _Lengths(lengths[0], lengths[1], tokens)
            )
        layers = stand_ins(self._kinds, len(recording.forward), policy.keep_last)
        return compose(recording, layers, self.held)

    def layer_input_bytes(self, tokens: int | None = None) -> int:
        """Returns the bytes of a layer's input; 0 where the model does not tell its dim."""
        sizes = self.outline.sizes()
        if sizes is None:
            return 0
        tokens = self.situation.tokens if tokens is None else tokens
        return self.situation.batch * tokens * sizes[0] * sizes[1]

    def notes(self, policy: Policy) -> tuple[str, ...]:
        """Returns what the step warns of."""
        run = _run_lengths(policy, self.situation.tokens)[0]
        return self._recorded(policy, run).notes

    @functools.cached_property
    def after_layers(self) -> set[str]:
        """Names of the modules that are called after the layers."""
        model, named = self.outline.shortened(1)
        return called_after_layers(model, named, self._call)

    def _layers_ahead(self, policy: Policy, tokens: int) -> int:
        """Returns how many layers' inputs backward may bring back before it reaches them."""
        if policy.tier == "device" or policy.mode == "keep":
            return 1
        input_bytes = self.layer_input_bytes(tokens)
        if not input_bytes:
            return len(self._kinds)
        if policy.mode == "checkpoint":
            # The first layer's input is the embedding's output, which its caller holds as well.
            return 2 + PREFETCH_BYTES // input_bytes
        # A tile's attention output and its keys and values are about another input.
        return 1 + INPUTS_AHEAD * policy.tile_tokens // (2 * tokens)

    def _recorded(self, policy: Policy, tokens: int) -> Recording:
        key: Hashable = (
            *(policy.mode, policy.tier, policy.tile_tokens, policy.keep_last, policy.codecs),
            *(policy.loss_chunk_tokens, policy.attention, tokens),
        )
        if key not in self._recordings:
            ahead = self._layers_ahead(policy, tokens)
            count = needed_layers(self._kinds, policy.keep_last, ahead)
            model, named = self.outline.shortened(count)
            situation = replace(self.situation, tokens=tokens)
            self._recordings[key] = dry_run(model, named, policy, situation, self._call)
        return self._recordings[key]


def _run_lengths(policy: Policy, tokens: int) -> list[int]:
    """Returns the tokens of the dry runs that tell of a step: its own, or those of two shorter."""
    tile = policy.tile_tokens
    if policy.mode in ("auto", "tiled") and tokens > LONG_RUN_TILES * tile:
        return [SHORT_TILES * tile, LONG_TILES * tile]
    return [tokens]


def held_by(outline: Outline, optimizer: str, situation: Situation) -> Held:
    """Counts what a model and its optimizer hold whatever is run.

    Args:
        outline: of the model.
        optimizer: a name of `optimizers.NAMES`.
        situation: where.

    Returns:
        Weights, gradients, and of the optimizer its state and what its step takes.
    """
    if not situation.train:
        return Held(outline.weight_bytes, 0)
    used = optimizer_bytes(
        optimizer,
        outline.model.parameters(),
        on_card=situation.kind.type == "cuda",
        rounding=situation.rounding,
    )
    return Held(outline.weight_bytes, outline.trained_bytes, used.state, used.step)


@dataclass(frozen=True)
class _Lengths:
    """Tokens of two recordings, and of the one wanted."""

    short: int
    long: int
    wanted: int

    def line(self, short: int, long: int) -> int:
        """Returns what grows evenly with the tokens."""
        slope = (long - short) / (self.long - self.short)
        return round(short + slope * (self.wanted - self.short))

    def parabola(self, short: int, long: int) -> int:
        """Returns what grows with the tokens and their square, from nothing."""
        square = (long / self.long - short / self.short) / (self.long - self.short)
        slope = short / self.short - square * self.short
        return round((slope + square * self.wanted) * self.wanted)

    def lines(self, short: Bytes, long: Bytes) -> Bytes:
        """Returns `line` for each purpose."""
        return [self.line(a, b) for a, b in zip(short, long, strict=True)]


def extrapolated(short: Recording, long: Recording, lengths: _Lengths) -> Recording:
    """Tells what happens in a long step from two shorter ones.

    Args:
        short: of fewer tokens.
        long: of more.
        lengths: theirs and the one wanted.

    Returns:
        The recording of the wanted length.
    """

    def between(a: Segment, b: Segment) -> Segment:
        forward, backward = (
            lengths.parabola(*pair)
            for pair in zip(a.work.attention_flops, b.work.attention_flops, strict=True)
        )
        work = Work(
            lengths.line(a.work.linear_flops, b.work.linear_flops),
            [forward, backward],
            lengths.parabola(a.work.touched_bytes, b.work.touched_bytes),
            lengths.parabola(a.work.operators, b.work.operators),
        )
        return Segment(
            a.name,
            lengths.lines(a.peak, b.peak),
            lengths.lines(a.end, b.end),
            work,
            lengths.line(a.out_bytes, b.out_bytes),
            lengths.line(a.back_bytes, b.back_bytes),
            lengths.line(a.host_peak, b.host_peak),
            lengths.line(a.host_bytes, b.host_bytes),
        )

    return Recording(
        between(short.before, long.before),
        [between(a, b) for a, b in zip(short.forward, long.forward, strict=True)],
        between(short.head, long.head),
        [
            None if a is None or b is None else between(a, b)
            for a, b in zip(short.backward, long.backward, strict=True)
        ],
        short.notes,
    )
