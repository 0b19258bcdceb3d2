"""A whole step of all layers, put together from the recording of a few.

Layers of one kind leave the same behind and take the same, so a step of three layers tells that of
thirty-two: each segment's peak is what is new in it, on top of what the segments before it left.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field

from offload.planner.dry_run import Recording
from offload.planner.ledger import PURPOSES, Bytes, Purpose, Segment, Work

_WEIGHTS = PURPOSES.index(Purpose.WEIGHTS)
_OPTIMIZER = PURPOSES.index(Purpose.OPTIMIZER)
_GRADIENTS = PURPOSES.index(Purpose.GRADIENTS)
_WORKING = PURPOSES.index(Purpose.WORKING)
_RELOADED = PURPOSES.index(Purpose.RELOADED)


@dataclass(frozen=True)
class Step:
    """A step of a whole model.

    Attributes:
        segments: in order; `peak` and `end` are of the whole device, `host_bytes` of the host.
        peak: bytes by purpose when the device holds most.
    """

    segments: list[Segment] = field(default_factory=list)

    @property
    def peak(self) -> Bytes:
        """Bytes by purpose when the device holds most."""
        return max((segment.peak for segment in self.segments), key=sum)

    @property
    def peak_bytes(self) -> int:
        """The most that the device holds."""
        return sum(self.peak)

    @property
    def host_bytes(self) -> int:
        """The most that the host holds."""
        return max(segment.host_peak for segment in self.segments)

    @property
    def copied_bytes(self) -> int:
        """Bytes copied to the host and back."""
        return sum(segment.out_bytes + segment.back_bytes for segment in self.segments)


@dataclass(frozen=True)
class Held:
    """What a model holds whatever is run, and what its optimizer takes.

    Attributes:
        weights: bytes.
        trained: bytes of the gradients of all weights.
        state: bytes of the optimizer's state.
        update: bytes that its step takes besides.
    """

    weights: int
    trained: int
    state: int = 0
    update: int = 0


def needed_layers(kinds: Sequence[Hashable], keep_last: int, ahead: int = 1) -> int:
    """Returns how many of the first layers stand for all.

    Args:
        kinds: of each layer.
        keep_last: layers at the end that are run otherwise.
        ahead: layers that are brought back before backward reaches them.

    Returns:
        The count: as many as are brought back ahead, of each kind one behind these, and at the end
        `_at_the_end` layers of the same kinds as the real ones.
    """
    end = _at_the_end(keep_last)
    between = set(kinds[ahead : len(kinds) - end])
    for count in range(ahead + 1 + end, len(kinds)):
        same_end = list(kinds[count - end : count]) == list(kinds[len(kinds) - end :])
        if same_end and set(kinds[ahead : count - end]) >= between:
            return count
    return len(kinds)


def stand_ins(kinds: Sequence[Hashable], recorded: int, keep_last: int) -> list[int]:
    """Returns for each layer the recorded one that stands for it."""
    total, end = len(kinds), _at_the_end(keep_last)
    if recorded == total:
        return list(range(total))
    rest = recorded - end
    last_of = {kinds[index]: index for index in range(rest)}
    front = [index if index < rest else last_of[kinds[index]] for index in range(total - end)]
    return [*front, *range(rest, recorded)]


def _at_the_end(keep_last: int) -> int:
    """Returns how many layers at the end stand for themselves."""
    return max(1, keep_last)


def compose(recording: Recording, layers: list[int], held: Held) -> Step:
    """Puts a step together.

    Args:
        recording: of a model with the first layers.
        layers: for each layer of the whole model, the recorded one that stands for it.
        held: of the whole model.

    Returns:
        The step, the optimizer's included.
    """
    composer = _Composer(held)
    forward, backward = recording.forward, recording.backward
    composer.add(recording.before, composer.zero, 0)
    for index, layer in enumerate(layers):
        before = forward[layer - 1] if layer else recording.before
        composer.add(forward[layer], before.end, before.host_bytes, f"forward {index}")
    composer.add(recording.head, forward[-1].end, forward[-1].host_bytes)
    for index in range(len(layers) - 1, -1, -1):
        layer = layers[index]
        segment = backward[layer]
        if segment is not None:
            following = (s for s in backward[layer + 1 :] if s is not None)
            before = next(following, recording.head)
            composer.add(segment, before.end, before.host_bytes, f"backward {index}")
    if held.trained:
        composer.add_update()
    return Step(composer.segments)


class _Composer:
    """Adds segments one after the other, each as a change of what the one before left."""

    def __init__(self, held: Held) -> None:
        self.zero: Bytes = [0] * len(PURPOSES)
        self.segments: list[Segment] = []
        self._held = held
        self._now = list(self.zero)
        self._host = 0

    def add(self, segment: Segment, before: Bytes, host: int, name: str = "") -> None:
        """Adds a segment that was recorded after `before` had been left."""
        gap = [now - was for now, was in zip(self._now, before, strict=True)]
        gap[_RELOADED] = 0  # comes and goes; no layer leaves any behind
        peak = [at + more for at, more in zip(segment.peak, gap, strict=True)]
        end = [at + more for at, more in zip(segment.end, gap, strict=True)]
        host_peak = self._host + segment.host_peak - host
        self._host += segment.host_bytes - host
        self._now = end
        self.segments.append(
            Segment(
                name or segment.name,
                self._with_held(peak),
                self._with_held(end),
                segment.work,
                segment.out_bytes,
                segment.back_bytes,
                host_peak,
                self._host,
            )
        )

    def add_update(self) -> None:
        """Adds the optimizer's step."""
        held = self._held
        peak = self._with_held(self.zero)
        peak[_GRADIENTS], peak[_WORKING] = held.trained, held.update
        end = self._with_held(self.zero)
        # Reads weights, gradients and state, and writes all but gradients.
        touched = 3 * held.trained + 2 * held.state
        self.segments.append(Segment("update", peak, end, Work(touched_bytes=touched)))

    def _with_held(self, found: Bytes) -> Bytes:
        whole = list(found)
        whole[_WEIGHTS], whole[_OPTIMIZER] = self._held.weights, self._held.state
        return whole
