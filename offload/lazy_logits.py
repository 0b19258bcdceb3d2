"""What a head returns in place of logits while a model computes its loss."""

from __future__ import annotations

import contextlib
import copy
import functools
import inspect
import math
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch.utils import _pytree as pytree

from offload.errors import OffloadError
from offload.ops.linear_cross_entropy import linear_cross_entropy

LARGE_BYTES = 1 << 30
"""From this size on, logits that are computed after all are worth a warning."""

_SKIPPED_FRAMES = (str(Path(torch.__file__).parent), str(Path(__file__).parent))
_warned: set[str] = set()


_Step = tuple[str, Any]
"""What a model did to its logits: "mul", "div" (by a number), "tanh" or "to" (a dtype)."""


def _unless_computed(method: Callable[..., Any]) -> Callable[..., Any]:
    """Once the real logits exist, everything happens to them: they may have been changed."""

    @functools.wraps(method)
    def dispatch(self: LazyLogits, *args: Any, **kwargs: Any) -> Any:
        if self._real is not None:
            return getattr(self._real, method.__name__)(*args, **kwargs)
        return method(self, *args, **kwargs)

    return dispatch


class LazyLogits:
    """Logits that are computed when somebody reads them; the loss does not.

    It holds the head's input and weight and stands for `hidden @ weight.T + bias`. Not a Tensor:
    DDP, FSDP and accelerate leave it alone. What models do between head and loss gives another
    one: `float`, `to`, `detach`, `contiguous`, `*` and `/` by a number, `tanh` once, indexing and
    reshaping of token dimensions. `cross_entropy`, and `torch.nn.functional.cross_entropy` with
    class indices, use the chunked loss. Anything else that a tensor can do computes the real
    logits, once per object, with one warning a calling line from 1 GiB on.

    It keeps the head's input alive; so do not hold on to outputs of a training step.
    Differences to a tensor: a hook or `retain_grad` sees no gradient of a loss that was chunked,
    `is` and `isinstance` tell them apart, and logits that were sliced before an in-place change do
    not see it. Copies by `copy.deepcopy` and pickle are real logits.
    """

    def __init__(
        self,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None = None,
        chunk_tokens: int | None = None,
    ) -> None:
        """Notes the tensors, and whether autocast is on.

        Args:
            hidden: `[..., E]`.
            weight: `[V, E]`.
            bias: `[V]`, or None.
            chunk_tokens: of the loss; None chooses.
        """
        self._chunk_tokens = chunk_tokens
        self._autocast_dtype = _autocast_dtype(hidden, weight)
        self._dtype = self._autocast_dtype or hidden.dtype
        self._device = hidden.device
        self._steps: tuple[_Step, ...] = ()
        self._real: torch.Tensor | None = None
        self._hold(hidden, weight, bias)

    def _hold(self, hidden: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        self._hidden, self._weight, self._bias = hidden, weight, bias
        self._versions = [_version(tensor) for tensor in self._tensors()]

    def _tensors(self) -> list[torch.Tensor]:
        tensors = (self._hidden, self._weight, self._bias)
        return [tensor for tensor in tensors if tensor is not None]

    def _derive(
        self, hidden: torch.Tensor | None = None, step: _Step | None = None, detach: bool = False
    ) -> LazyLogits:
        """Returns lazy logits of other tokens, or with one step more."""
        self._check_unchanged()
        derived = copy.copy(self)
        tensors = [self._hidden if hidden is None else hidden, self._weight, self._bias]
        if detach or not torch.is_grad_enabled():
            tensors = [None if tensor is None else tensor.detach() for tensor in tensors]
        derived._hold(*cast(Any, tensors))
        if step is not None:
            derived._steps = (*self._steps, step)
        return derived

    def _check_unchanged(self) -> None:
        """Refuses to give other logits than those of the forward."""
        for tensor, version in zip(self._tensors(), self._versions, strict=True):
            freed = tensor.untyped_storage().nbytes() < tensor.nbytes  # what FSDP does
            if freed or _version(tensor) != version:
                raise OffloadError(
                    "LazyLogits: expected the head's input and weight as in the forward, but one "
                    f"was {'freed' if freed else 'changed in place'} since. Read logits before "
                    "that, or call the model without labels or without gradients."
                )

    @property
    def computed(self) -> bool:
        """Whether the real logits exist."""
        return self._real is not None

    def materialise(self) -> torch.Tensor:
        """Returns the real logits, with their graph; computed at the first call and then kept.

        Returns:
            A tensor `shape`, `dtype`, on `device`.

        Raises:
            OffloadError: if the weight or the hidden states have changed since the forward.
        """
        if self._real is None:
            self._check_unchanged()
            if self.nbytes >= LARGE_BYTES:
                _warn_of_size(self.nbytes)
            with torch.inference_mode(False), torch.enable_grad(), self._autocast():
                logits = F.linear(self._hidden, self._weight, self._bias)
                for step in self._steps:
                    logits = _take(step, logits)
                self._real = logits.to(self._device)
        return self._real

    def cross_entropy(self, labels: torch.Tensor, **options: Any) -> torch.Tensor:
        """Returns the loss by chunks, without computing logits.

        Args:
            labels: `[...]`, int64, aligned with the logits unless `shift` is given.
            **options: of `linear_cross_entropy`, except `bias`, `softcap` and `logit_scale`.

        Returns:
            The loss, in float32 or wider, on `device`.

        Raises:
            OffloadError: if weight, hidden states or computed logits were changed in place.
        """
        self._check_unchanged()
        if self._real is not None and _version(self._real) > 0:
            raise OffloadError(
                "LazyLogits.cross_entropy: expected logits as the head computed them, but they "
                "were changed in place. Use torch.nn.functional.cross_entropy on them."
            )
        form = _chunked_form(self._steps)
        assert form is not None  # other steps are never kept
        options.setdefault("chunk_tokens", self._chunk_tokens)
        with self._autocast():
            loss = linear_cross_entropy(
                self._hidden,
                self._weight,
                labels.to(self._hidden.device),
                bias=self._bias,
                logit_scale=form[0],
                softcap=form[1],
                **options,
            )
        return loss.to(self._device)

    def _autocast(self) -> AbstractContextManager[Any]:
        """Autocast as it was in the forward."""
        kind = self._hidden.device.type
        if not torch.amp.is_autocast_available(kind):
            return contextlib.nullcontext()
        if self._autocast_dtype is None:
            return torch.autocast(kind, enabled=False)
        return torch.autocast(kind, self._autocast_dtype)

    # What needs no logits; `_OUTLINE` below holds more.

    @property
    def dtype(self) -> torch.dtype:
        """Of the real logits."""
        return self._dtype

    @property
    def device(self) -> torch.device:
        """Of the real logits."""
        return self._device

    @property
    def requires_grad(self) -> bool:
        """Whether the real logits would require a gradient."""
        return any(tensor.requires_grad for tensor in self._tensors())

    def _outline(self) -> torch.Tensor:
        """Returns a tensor like the logits that has no memory."""
        shape = (*self._hidden.shape[:-1], self._weight.shape[0])
        return torch.empty(shape, dtype=self._dtype, device="meta")

    def __len__(self) -> int:
        return len(self._outline())

    def __iter__(self) -> Iterator[Any]:
        return (self[index] for index in range(len(self)))

    def __repr__(self) -> str:
        state = "computed" if self.computed else "not computed"
        return f"LazyLogits(shape={tuple(self.shape)}, dtype={self.dtype}, {state})"

    __hash__ = object.__hash__

    # What stays lazy.

    @_unless_computed
    def to(self, *args: Any, **kwargs: Any) -> Any:
        """Converts to another floating-point dtype or device; as `Tensor.to`."""
        try:
            parsed: Any = torch._C._nn._parse_to(*args, **kwargs)
        except (RuntimeError, TypeError):  # a form that only tensors know, such as copy=True
            return self.materialise().to(*args, **kwargs)
        device, dtype = parsed[0] or self._device, parsed[1] or self._dtype
        if not dtype.is_floating_point or parsed[3] is not None:
            return self.materialise().to(*args, **kwargs)
        if (dtype, device) == (self._dtype, self._device):
            return self
        derived = self._derive(step=("to", dtype) if dtype != self._dtype else None)
        derived._dtype, derived._device = dtype, device
        return derived

    @_unless_computed
    def float(self) -> Any:
        """Converts to float32."""
        return self.to(torch.float32)

    @_unless_computed
    def detach(self) -> Any:
        """Leaves the graph."""
        return self._derive(detach=True)

    @_unless_computed
    def contiguous(self) -> Any:
        """Is contiguous as it is."""
        return self

    @_unless_computed
    def __getitem__(self, index: Any) -> Any:
        tokens = _token_index(index, self.shape)
        if tokens is None:
            return self.materialise()[index]
        return self._derive(self._hidden[tokens])

    # What computes the logits.

    def __getattr__(self, name: str) -> Any:
        if name in _OUTLINE:
            return getattr(self._outline(), name)
        if name.startswith("__") or not hasattr(torch.Tensor, name):
            raise AttributeError(f"'LazyLogits' object has no attribute '{name}'")
        return getattr(self.materialise(), name)

    def __copy__(self) -> LazyLogits:
        copied = object.__new__(type(self))
        copied.__dict__.update(self.__dict__)
        return copied

    def __deepcopy__(self, memo: dict[int, Any]) -> torch.Tensor:
        return copy.deepcopy(self.materialise(), memo)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.materialise().__reduce_ex__(protocol)  # type: ignore[no-untyped-call]

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Takes torch functions that are given lazy logits."""
        kwargs = kwargs or {}
        if func is torch.tanh and not kwargs and isinstance(args[0], LazyLogits):
            return args[0].tanh()
        if func is F.cross_entropy and (loss := _cross_entropy(*args, **kwargs)) is not None:
            return loss
        args, kwargs = pytree.tree_map(_computed, (args, kwargs))
        return func(*args, **kwargs)


_OUTLINE = {"shape", "ndim", "nbytes", "itemsize", "size", "dim", "numel", "element_size"}
"""Attributes that need no values."""

_STEPS = {"tanh": "tanh", "__mul__": "mul", "__rmul__": "mul", "__truediv__": "div"}
"""Lazy while they are a scale and a softcap."""

_RESHAPES = ("view", "reshape", "flatten", "squeeze", "unsqueeze")
"""Lazy as long as the vocabulary stays the last dimension: then they only arrange tokens."""

_OPERATORS = (
    "add radd sub rsub rtruediv floordiv rfloordiv mod pow rpow matmul rmatmul neg pos abs invert "
    "and rand or ror xor rxor lt le gt ge eq ne setitem bool int float complex index contains array"
)
"""Looked up on the type, where `__getattr__` is not asked."""


def _reshape(name: str) -> Callable[..., Any]:
    def reshape(self: LazyLogits, *args: Any, **kwargs: Any) -> Any:
        outline = getattr(self._outline(), name)(*args, **kwargs)
        if outline.dtype != self.dtype or outline.shape[-1:] != self.shape[-1:]:
            return getattr(self.materialise(), name)(*args, **kwargs)
        return self._derive(self._hidden.reshape(*outline.shape[:-1], self._hidden.shape[-1]))

    reshape.__name__ = name
    return _unless_computed(reshape)


def _stepper(name: str, kind: str) -> Callable[..., Any]:
    def step(self: LazyLogits, value: Any = None) -> Any:
        if _chunked_form((*self._steps, (kind, value))) is None:
            return _take((kind, _computed(value)), self.materialise())
        return self._derive(step=(kind, value))

    step.__name__ = name
    return _unless_computed(step)


def _take(step: _Step, logits: torch.Tensor) -> torch.Tensor:
    kind, value = step
    if kind == "to":
        return logits.to(value)
    if kind == "tanh":
        return logits.tanh()
    scaled: torch.Tensor = logits * value if kind == "mul" else logits / value
    return scaled


def _operator(name: str) -> Callable[..., Any]:
    def operator(self: LazyLogits, *args: Any) -> Any:
        return getattr(self.materialise(), name)(*pytree.tree_map(_computed, args))

    operator.__name__ = name
    return operator


for _name, _kind in _STEPS.items():
    setattr(LazyLogits, _name, _stepper(_name, _kind))
for _name in _RESHAPES:
    setattr(LazyLogits, _name, _reshape(_name))
for _name in _OPERATORS.split():
    setattr(LazyLogits, f"__{_name}__", _operator(f"__{_name}__"))


def _computed(value: Any) -> Any:
    return value.materialise() if isinstance(value, LazyLogits) else value


def _version(tensor: torch.Tensor) -> int:
    return -1 if tensor.is_inference() else tensor._version


def _autocast_dtype(hidden: torch.Tensor, weight: torch.Tensor) -> torch.dtype | None:
    """Returns what autocast now makes of a linear of these tensors; None if nothing."""
    kind = hidden.device.type
    if not torch.amp.is_autocast_available(kind) or not torch.is_autocast_enabled(kind):
        return None
    return None if torch.float64 in (hidden.dtype, weight.dtype) else torch.get_autocast_dtype(kind)


def _chunked_form(steps: tuple[_Step, ...]) -> tuple[float, float] | None:
    """Returns logit scale and softcap (0 for none) of some steps; None if they have no such form.

    Any `b * tanh(a * logits)` is the softcap b of the logits scaled by `a * b`. Conversions of the
    dtype only round.
    """
    scale, cap = 1.0, 0.0
    for kind, value in steps:
        if kind == "to":
            continue
        if kind == "tanh":
            if cap:
                return None
            cap = 1.0
            continue
        if not isinstance(value, (int, float)) or isinstance(value, bool):
            return None
        if not math.isfinite(value) or value == 0 or (cap and value < 0):
            return None
        factor = value if kind == "mul" else 1 / value
        scale *= factor
        cap *= factor
    return scale, cap


def _token_index(index: Any, shape: torch.Size) -> Any:
    """Returns the index of the hidden states for one of logits; None if it cuts the vocabulary."""
    tokens, vocab = len(shape) - 1, shape[-1]
    if isinstance(index, torch.Tensor):
        return index if index.dtype == torch.bool and index.dim() <= tokens else None
    parts = list(index) if isinstance(index, tuple) else [index]
    if any(type(part) not in (int, slice, type(...)) for part in parts):
        return None
    if parts.count(...) > 1:
        return None
    if ... in parts:
        place = parts.index(...)
        parts[place : place + 1] = [slice(None)] * (len(shape) - len(parts) + 1)
    if len(parts) > tokens:
        *parts, last = parts
        if len(parts) != tokens or type(last) is int or last.indices(vocab) != (0, vocab, 1):
            return None
    return tuple(parts)


def _cross_entropy(*args: Any, **kwargs: Any) -> torch.Tensor | None:
    """`F.cross_entropy` of lazy logits by chunks; None where it needs the real ones.

    If every target is ignored the mean is 0, where torch gives NaN.
    """
    call = inspect.signature(F.cross_entropy).bind(*args, **kwargs).arguments
    logits, target = call.pop("input"), call.pop("target")
    if not isinstance(logits, LazyLogits) or logits.computed or logits.dim() != 2:
        return None
    if not isinstance(target, torch.Tensor) or target.shape != logits.shape[:1]:
        return None
    if any(call.pop(name, None) is not None for name in ("weight", "size_average", "reduce")):
        return None
    if target.dtype != torch.int64 or target.device != logits.device:
        return None
    loss = logits.cross_entropy(target, **call)
    return loss.to(logits.dtype)


def _warn_of_size(nbytes: int) -> None:
    """Names the first caller outside torch and this package; once a line."""
    frame = sys._getframe(1)
    while frame.f_back is not None and frame.f_code.co_filename.startswith(_SKIPPED_FRAMES):
        frame = frame.f_back
    caller = f"{frame.f_code.co_filename}:{frame.f_lineno}"
    if caller not in _warned:
        _warned.add(caller)
        warnings.warn_explicit(
            f"offload: {caller} uses the logits of a training step as a tensor, so "
            f"{nbytes:,} bytes of them are computed. The loss does not need them: read logits "
            "without gradients, or only of the tokens you need (`logits[:, -1]`).",
            UserWarning,
            frame.f_code.co_filename,
            frame.f_lineno,
        )
