"""Books of what lives in memory while a step runs on meta tensors: bytes by purpose, and work."""

from __future__ import annotations

import enum
import sys
import types
import weakref
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from offload.executor import TiledCall, accumulate
from offload.lazy_logits import LazyLogits
from offload.ops.key_blocks import KeyBlock
from offload.ops.linear_cross_entropy import functions_on_chunks
from offload.planner.attention_work import OPERATORS, AttentionOperator
from offload.planner.shape_cache import ShapeCache
from offload.store.layout import Layout


class Purpose(enum.Enum):
    """What device memory is for, as plans name it."""

    WEIGHTS = "weights"
    GRADIENTS = "gradients"
    OPTIMIZER = "optimizer state"
    HIDDEN = "hidden states"
    KEYS = "keys and values"
    KEY_GRADIENTS = "gradients of keys and values"
    SAVED = "other kept for backward"
    WORKING = "working set"
    LOGITS = "chunk of logits"
    RELOADED = "reload buffers"


PURPOSES = tuple(Purpose)
_INDEX = {purpose: index for index, purpose in enumerate(PURPOSES)}

_UNREAL = -1
"""Of tensors that no device would hold."""

_MADE_BY: dict[types.CodeType, int] = {
    TiledCall.forward_all.__code__: _INDEX[Purpose.HIDDEN],
    TiledCall.backward_all.__code__: _INDEX[Purpose.HIDDEN],
    KeyBlock.accumulators.__code__: _INDEX[Purpose.KEY_GRADIENTS],
    Layout.new_buffer.__code__: _INDEX[Purpose.RELOADED],
    accumulate.__code__: _INDEX[Purpose.GRADIENTS],
    **dict.fromkeys(functions_on_chunks(), _INDEX[Purpose.LOGITS]),
    LazyLogits._outline.__code__: _UNREAL,
}
"""What the tensors are for that a function itself makes; those of others are working set."""

_BETWEEN = ("__torch_function__", "<listcomp>", "<genexpr>")
"""Frames between a function and its operators: modes, and comprehensions before Python 3.12."""

_UNNAMED = (_INDEX[Purpose.WORKING], _INDEX[Purpose.SAVED], _INDEX[Purpose.RELOADED])

_ITEM = torch.ops.aten._local_scalar_dense.default

Bytes = list[int]
"""Bytes by purpose, in the order of `PURPOSES`."""


@dataclass
class Work:
    """What a part of a step computes.

    Attributes:
        linear_flops: of matrix products.
        attention_flops: of attention kernels, forward and backward apart.
        touched_bytes: that all other operators read and write.
        operators: how many do anything.
    """

    linear_flops: int = 0
    attention_flops: list[int] = field(default_factory=lambda: [0, 0])
    touched_bytes: int = 0
    operators: int = 0


@dataclass
class Segment:
    """A part of a step: one layer forward or backward, or what lies between.

    Attributes:
        name: such as `"forward 3"`.
        peak: bytes by purpose at its highest total.
        end: bytes by purpose at its end.
        work: what it computes.
        out_bytes, back_bytes: copied to the host and back in it.
        host_peak: the most on the host in it.
        host_bytes: on the host at its end.
    """

    name: str
    peak: Bytes = field(default_factory=lambda: [0] * len(PURPOSES))
    end: Bytes = field(default_factory=lambda: [0] * len(PURPOSES))
    work: Work = field(default_factory=Work)
    out_bytes: int = 0
    back_bytes: int = 0
    host_peak: int = 0
    host_bytes: int = 0


class Ledger(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts the bytes of living meta storages by purpose, op by op, and the work of the ops.

    A storage counts once, from the op that returns it until the last tensor lets go of it. Scratch
    memory inside a kernel is not seen.

    Args:
        rounding: bytes that the device's allocator rounds each storage up to.

    Attributes:
        segments: the parts of the step so far.
        at_end: called when a segment ends.
    """

    def __init__(self, rounding: int = 1) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.segments: list[Segment] = []
        self.at_end: Callable[[Segment], None] = lambda segment: None
        self._rounding = rounding
        self._live: Bytes = [0] * len(PURPOSES)
        self._total = 0
        self._highest = 0
        self._storages: dict[weakref.ref[torch.UntypedStorage], tuple[int, int]] = {}
        self._formulas = flop_formulas()
        self._shapes = ShapeCache()
        self._operators: dict[Any, tuple[AttentionOperator | None, Any, bool]] = {}

    def begin(self, name: str) -> None:
        """Ends the present segment and begins another.

        Args:
            name: of the one that begins.
        """
        self.finish()
        self.segments.append(Segment(name, peak=list(self._live)))
        self._highest = self._total

    def finish(self) -> None:
        """Ends the present segment; what it made and still lives is kept for a later one."""
        if not self.segments:
            return
        working, saved = _INDEX[Purpose.WORKING], _INDEX[Purpose.SAVED]
        for reference, (size, purpose) in list(self._storages.items()):
            if purpose == working:
                self._storages[reference] = size, saved
        self._live[saved] += self._live[working]
        self._live[working] = 0
        self.segments[-1].end = list(self._live)
        self.at_end(self.segments[-1])

    def watch(self, tensors: Iterable[torch.Tensor], purpose: Purpose) -> None:
        """Says what tensors are for, whether they were known before or not."""
        for tensor in tensors:
            if tensor.is_meta:
                self._see(tensor, _INDEX[purpose], known=True)

    def name(self, tensor: torch.Tensor, purpose: Purpose) -> None:
        """Says what a tensor is for that nobody has spoken for yet."""
        if tensor.is_meta:
            known = self._storages.get(weakref.ref(tensor.untyped_storage()))
            if known is not None and known[1] in _UNNAMED:
                self._see(tensor, _INDEX[purpose], known=True)

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # else torch puts two frames and its compiler around every operator

    def __torch_dispatch__(
        self, func: Any, kinds: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Runs an operator and enters what it made."""
        if func is _ITEM and args[0].is_meta and args[0].dtype == torch.bool:
            return True  # of one sequence without padding: are all tokens real, all in a row?
        kwargs = kwargs or {}
        out = self._shapes.run(func, args, kwargs)
        made = 0
        if isinstance(out, torch.Tensor):
            made = self._see_new(out, sys._getframe(1))
        elif isinstance(out, (tuple, list)):
            frame = sys._getframe(1)
            made = sum(self._see_new(leaf, frame) for leaf in out if isinstance(leaf, torch.Tensor))
        if self.segments:
            self._count_work(func, args, kwargs, out, made)
        return out

    def _count_work(self, func: Any, args: Any, kwargs: Any, out: Any, made: int) -> None:
        work = self.segments[-1].work
        attention, formula, writes = self._described(func)
        if attention is not None:
            work.attention_flops[attention.is_backward] += attention.flops(args)
        elif formula is not None:
            work.linear_flops += formula(*args, **kwargs, out_val=out)
        elif made or writes:
            read = 0
            for arg in args:
                if isinstance(arg, torch.Tensor) and arg.is_meta:
                    read += arg.nbytes
            work.touched_bytes += made + read
        else:
            return
        work.operators += 1

    def _described(self, func: Any) -> tuple[AttentionOperator | None, Any, bool]:
        """Returns how an operator's work is counted, and whether it writes to an argument."""
        known = self._operators.get(func)
        if known is None:
            formula = self._formulas.get(func._overloadpacket)
            known = OPERATORS.get(func._schema.name), formula, func._schema.is_mutable
            self._operators[func] = known
        return known

    def _see_new(self, tensor: torch.Tensor, frame: types.FrameType | None) -> int:
        """Enters what an operator returned to `frame`; returns its bytes where it is new."""
        if not tensor.is_meta or self._storages.get(weakref.ref(tensor.untyped_storage())):
            return 0
        return self._see(tensor, _purpose_of(frame))

    def _see(self, tensor: torch.Tensor, purpose: int, *, known: bool = False) -> int:
        """Enters a tensor's storage; returns its bytes where it is new."""
        storage = tensor.untyped_storage()
        reference = weakref.ref(storage, self._forget)
        before = self._storages.get(reference)
        if before is not None and not known:
            return 0
        size = -(-storage.nbytes() // self._rounding) * self._rounding
        if purpose == _UNREAL:
            size, purpose = 0, _INDEX[Purpose.WORKING]
        if before is not None:
            self._count(-before[0], before[1])
        # The first reference to a storage stays the key.
        self._storages[reference] = size, purpose
        self._count(size, purpose)
        return size

    def _forget(self, reference: weakref.ref[torch.UntypedStorage]) -> None:
        size, purpose = self._storages.pop(reference, (0, 0))
        self._count(-size, purpose)

    def _count(self, change: int, purpose: int) -> None:
        self._live[purpose] += change
        self._total += change
        if self._total > self._highest:
            self._highest = self._total
            if self.segments:
                self.segments[-1].peak = list(self._live)


def _purpose_of(frame: types.FrameType | None) -> int:
    """Returns what the function that runs in a frame makes tensors for."""
    while frame is not None and frame.f_code.co_name in _BETWEEN:
        frame = frame.f_back
    return _MADE_BY.get(frame.f_code, _INDEX[Purpose.WORKING]) if frame is not None else _UNREAL


def flop_formulas() -> dict[Any, Callable[..., int]]:
    """Returns torch's own formulas; that module is slow to import and not needed before."""
    from torch.utils.flop_counter import flop_registry

    return flop_registry
