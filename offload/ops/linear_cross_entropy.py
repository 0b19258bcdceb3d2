"""Cross entropy from hidden states, by chunks of tokens: no `tokens x vocab` tensor ever exists.

Shapes: `N` tokens, `C` tokens of a chunk, `E` model dim, `V` vocab.
"""

from __future__ import annotations

import contextlib
import types
from collections.abc import Iterable
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F

from offload.devices import type_of

_PIECE_BYTES = 1 << 20
"""Of a gradient that is scaled at once: more would show beside the hidden states."""
_CHUNK_BYTES = 128 << 20
"""Of a chunk of logits in float32."""

Rows = slice | torch.Tensor


class _Options(NamedTuple):
    ignore_index: int
    label_smoothing: float
    softcap: float
    logit_scale: float
    z_loss: float
    reduction: str
    chunk_tokens: int
    dtype: torch.dtype  # of the matrix products

    @property
    def wide(self) -> torch.dtype:
        """The dtype of softmax, loss and accumulators."""
        return torch.promote_types(self.dtype, torch.float32)


class _Gradients:
    """Gradients of the inputs that need one, filled chunk by chunk. None stands for the others."""

    def __init__(
        self,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        needs: tuple[bool, bool, bool],
        options: _Options,
    ) -> None:
        self.dtype = options.dtype
        self.block = max(1, _CHUNK_BYTES // (4 * max(1, weight.shape[1])))
        self.hidden = torch.zeros_like(hidden, dtype=options.dtype) if needs[0] else None
        self.weight = torch.zeros_like(weight, dtype=options.wide) if needs[1] else None
        self.bias = (
            torch.zeros_like(bias, dtype=options.wide) if bias is not None and needs[2] else None
        )

    def add(
        self, rows: Rows, d_logits: torch.Tensor, hidden: torch.Tensor, weight: torch.Tensor
    ) -> None:
        """Adds the share of a chunk.

        Args:
            rows: of the chunk's tokens.
            d_logits: `[C, V]`, the gradient of its logits, wide.
            hidden: `[C, E]`, its hidden states in the products' dtype.
            weight: `[V, E]`, in the products' dtype.
        """
        narrow = d_logits.to(self.dtype)
        if self.hidden is not None:
            self.hidden[rows] = narrow @ weight
        if self.bias is not None:
            self.bias += d_logits.sum(0)
        if self.weight is None:
            return
        kind = type_of(d_logits.device)
        if narrow is d_logits or kind == "cpu":  # wide products, no [V, E] besides
            self.weight.addmm_(d_logits.t(), hidden.to(d_logits.dtype))
            return
        wide_product: dict[str, Any] = (
            {"out_dtype": self.weight.dtype} if kind == "cuda" else {}
        )  # other devices round a chunk's product once, and still add in float32
        for start in range(0, self.weight.shape[0], self.block):
            columns = slice(start, start + self.block)
            self.weight[columns] += torch.mm(narrow[:, columns].t(), hidden, **wide_product)


def _without_autocast(device: torch.device) -> AbstractContextManager[Any]:
    """The dtypes here are chosen by hand."""
    if torch.amp.is_autocast_available(device.type):
        return torch.autocast(device.type, enabled=False)
    return contextlib.nullcontext()


def _chunk_loss(
    logits: torch.Tensor, labels: torch.Tensor, options: _Options, upstream: torch.Tensor | None
) -> torch.Tensor:
    """Computes the losses of a chunk, and turns its logits into their gradient, in place.

    Args:
        logits: `[C, V]`, wide, straight from the matrix product; overwritten.
        labels: `[C]`, all within the vocabulary.
        options: of the call.
        upstream: `[C]`, gradients of the losses; None leaves rubbish in `logits`.

    Returns:
        `[C]`, wide.
    """
    smoothing, vocab = options.label_smoothing, logits.shape[1]
    slope = None
    if options.logit_scale != 1:
        logits.mul_(options.logit_scale)
    if options.softcap:
        logits.div_(options.softcap).tanh_()
        if upstream is not None:
            slope = logits.square().neg_().add_(1)  # of the cap at these logits
        logits.mul_(options.softcap)
    loss = logits.gather(1, labels[:, None])[:, 0].mul_(smoothing - 1)
    if smoothing:
        loss.sub_(logits.mean(1), alpha=smoothing)
    peak = logits.amax(1, keepdim=True)
    total = logits.sub_(peak).exp_().sum(1)
    lse = total.log().add_(peak[:, 0])
    loss.add_(lse)
    if options.z_loss:
        loss.add_(lse.square(), alpha=options.z_loss)
    if upstream is None:
        return loss
    upstream = upstream * options.logit_scale
    logits.mul_((upstream * (1 + 2 * options.z_loss * lse) / total)[:, None])
    if smoothing:
        logits.sub_(upstream[:, None], alpha=smoothing / vocab)
    logits.scatter_add_(1, labels[:, None], (upstream * (smoothing - 1))[:, None])
    if slope is not None:
        logits.mul_(slope)
    return loss


def _by_chunks(
    inputs: tuple[torch.Tensor, torch.Tensor, torch.Tensor | None, torch.Tensor],
    options: _Options,
    gradients: _Gradients | None,
    upstream: torch.Tensor | None = None,
) -> torch.Tensor:
    """Computes the losses, and fills `gradients` if there are any.

    Args:
        inputs: hidden `[N, E]`, weight `[V, E]`, bias `[V]` or None, labels `[N]`.
        options: of the call.
        gradients: to fill, or None.
        upstream: `[N]`, gradients of the losses; None for ones.

    Returns:
        `[N]`, wide, 0 where ignored.
    """
    hidden, weight, bias, labels = inputs
    weight = weight.to(options.dtype)
    bias = None if bias is None else bias.to(options.dtype)
    valid = labels != options.ignore_index
    targets = labels.where(valid, 0)
    weights = valid.to(options.wide) if upstream is None else upstream.where(valid, 0)
    losses = torch.zeros_like(targets, dtype=options.wide)
    for rows in _chunks_of(valid, options.chunk_tokens):
        part = hidden[rows].to(options.dtype)
        logits = F.linear(part, weight, bias).to(options.wide)  # [C, V], ours to overwrite
        chunk_upstream = None if gradients is None else weights[rows]
        losses[rows] = _chunk_loss(logits, targets[rows], options, chunk_upstream)
        if gradients is not None:
            gradients.add(rows, logits, part, weight)
        del logits  # before the next chunk's
    return losses.where(valid, 0)


def _chunks_of(valid: torch.Tensor, chunk_tokens: int) -> Iterable[Rows]:
    """Returns the rows of each chunk; ignored tokens are left out where that does not block."""
    if type_of(valid.device) == "cpu" and (valid.is_meta or not valid.all()):
        # A planned step scores all but the last token of each sequence.
        rows = torch.arange(len(valid), device="meta") if valid.is_meta else valid.nonzero()[:, 0]
        return torch.split(rows, chunk_tokens)
    starts = range(0, valid.shape[0], chunk_tokens)
    return [slice(start, start + chunk_tokens) for start in starts]


def functions_on_chunks() -> list[types.CodeType]:
    """Returns the functions whose own tensors are a chunk of logits, for who counts bytes."""
    return [function.__code__ for function in (_by_chunks, _chunk_loss, _Gradients.add)]


def _scaled(gradient: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Returns `gradient * scale` in `dtype`, multiplied in the dtype of `scale`."""
    if gradient.dtype == dtype == scale.dtype:
        return gradient * scale
    scaled = torch.empty_like(gradient, dtype=dtype)
    rows = max(1, _PIECE_BYTES // (4 * max(1, gradient[:1].numel())))
    for source, target in zip(torch.split(gradient, rows), torch.split(scaled, rows), strict=True):
        target.copy_(source.to(scale.dtype) * scale)
    return scaled


class _LinearCrossEntropy(torch.autograd.Function):
    """Loss over flat tokens.

    For "mean" and "sum", forward computes the gradients of the sum and keeps them instead of the
    hidden states; backward multiplies them by the upstream gradient. They are not divided by the
    number of tokens before that: in float16 they would underflow where a loss scale saves them.
    For "none" the upstream gradients are known only in backward, which computes the chunks again.
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        labels: torch.Tensor,
        options: _Options,
        needs: tuple[bool, bool, bool],
    ) -> torch.Tensor:
        inputs = (hidden, weight, bias, labels)
        ctx.options, ctx.needs = options, needs
        ctx.dtypes = [None if tensor is None else tensor.dtype for tensor in inputs[:3]]
        with _without_autocast(hidden.device):
            if options.reduction == "none":
                ctx.save_for_backward(*inputs)
                return _by_chunks(inputs, options, None)
            gradients = _Gradients(hidden, weight, bias, needs, options) if any(needs) else None
            loss = _by_chunks(inputs, options, gradients).sum()
            scale = torch.ones_like(loss)
            if options.reduction == "mean":
                scale /= (labels != options.ignore_index).sum().clamp(min=1)
        if gradients is not None:
            ctx.save_for_backward(gradients.hidden, gradients.weight, gradients.bias, scale)
        return loss * scale

    @staticmethod
    def backward(ctx: Any, grad_loss: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        if torch.is_grad_enabled():
            raise NotImplementedError(
                "linear_cross_entropy: expected first-order gradients, got create_graph=True. Use "
                "torch.nn.functional.cross_entropy for gradients of gradients."
            )
        options: _Options = ctx.options
        kept: Iterable[torch.Tensor | None]
        if options.reduction == "none":
            hidden, weight, bias, labels = ctx.saved_tensors
            gradients = _Gradients(hidden, weight, bias, ctx.needs, options)
            with _without_autocast(hidden.device):
                _by_chunks((hidden, weight, bias, labels), options, gradients, grad_loss)
            kept = (gradients.hidden, gradients.weight, gradients.bias)
            scaled = [
                None if gradient is None else gradient.to(dtype)
                for gradient, dtype in zip(kept, ctx.dtypes, strict=True)
            ]
        else:
            *kept, scale = ctx.saved_tensors
            scale = grad_loss * scale
            scaled = [
                None if gradient is None else _scaled(gradient, scale, dtype)
                for gradient, dtype in zip(kept, ctx.dtypes, strict=True)
            ]
        return *scaled, None, None, None


def linear_cross_entropy(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    labels: torch.Tensor,
    *,
    bias: torch.Tensor | None = None,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    softcap: float = 0.0,
    logit_scale: float = 1.0,
    z_loss: float = 0.0,
    reduction: str = "mean",
    num_items_in_batch: int | torch.Tensor | None = None,
    shift: bool = False,
    chunk_tokens: int | None = None,
) -> torch.Tensor:
    """Cross entropy of `hidden @ weight.T + bias` without ever holding all logits.

    Use it where a long sequence meets a large vocabulary: it needs one or two chunks of logits
    instead of several `tokens x vocab` tensors. Matrix products run in the tensors' dtype (or that
    of autocast), softmax and loss in float32 (float64 stays float64).

    For "mean" and "sum" the gradients are computed in forward: a gradient of `hidden` is kept until
    backward instead of `hidden`, and one of `weight` in float32. For "none" backward computes the
    logits a second time. Nothing blocks the host on a device; on the CPU, ignored tokens cost
    nothing. Arguments are never written.

    The logits go through `logit_scale`, then `softcap`: `cap * tanh(scale * logits / cap)`.
    Cohere's `logit_scale` is this factor, Granite's `logits_scaling` is its inverse.

    Args:
        hidden: `[..., E]`, floating point.
        weight: `[V, E]`, dtype and device of `hidden` (under autocast any dtype).
        labels: `[...]`, int64, the target of each hidden state, or `ignore_index`.
        bias: `[V]`, or None.
        ignore_index: label of tokens without a loss.
        label_smoothing: as in `torch.nn.functional.cross_entropy`.
        softcap: cap of the logits; 0 for none.
        logit_scale: factor of the logits.
        z_loss: weight of the squared log-sum-exp of the logits, added to each token's loss.
        reduction: "mean" over the tokens that are not ignored (0 if all are, where torch gives
            NaN), "sum", or "none".
        num_items_in_batch: divides the sum instead of the number of tokens, as transformers does
            for accumulated gradients; a number or a 0-dim tensor on any device.
        shift: labels are the input ids: hidden state t is scored with label t + 1 of the last
            dimension, the last one is ignored. "none" keeps the shape of `labels`.
        chunk_tokens: tokens of a chunk; None for about 128 MiB of float32 logits.

    Returns:
        The loss in float32 (float64 for float64): a 0-dim tensor, or the shape of `labels`.

    Raises:
        ValueError: if shapes, devices or options do not fit.
        TypeError: if dtypes do not fit.
        IndexError: if a label is outside the vocabulary. On a device, the kernel asserts instead.
        NotImplementedError: from backward with `create_graph=True`.

    Source:
        Gradients in forward follow Liger-Kernel's fused linear cross entropy; here nothing is
        written into the arguments, and several backwards through one graph are right.
    """
    options = _options_of(
        hidden,
        weight,
        _Options(
            ignore_index,
            label_smoothing,
            softcap,
            logit_scale,
            z_loss,
            reduction if num_items_in_batch is None else "sum",
            chunk_tokens_for(weight.shape[0]) if chunk_tokens is None else chunk_tokens,
            hidden.dtype,
        ),
    )
    if num_items_in_batch is not None and reduction == "none":
        raise ValueError(
            "linear_cross_entropy: expected reduction 'mean' or 'sum' with num_items_in_batch, got "
            "'none'. Leave num_items_in_batch out."
        )
    if shift:
        labels = F.pad(labels, (0, 1), value=ignore_index)[..., 1:]
    _check_tensors(hidden, weight, bias, labels, options)
    enabled = torch.is_grad_enabled()
    needs = tuple(enabled and t is not None and t.requires_grad for t in (hidden, weight, bias))
    loss: torch.Tensor = _LinearCrossEntropy.apply(
        hidden.reshape(-1, hidden.shape[-1]), weight, bias, labels.reshape(-1), options, needs
    )  # type: ignore[no-untyped-call]
    if num_items_in_batch is None:
        return loss.view(labels.shape) if reduction == "none" else loss
    if isinstance(num_items_in_batch, torch.Tensor):
        items = num_items_in_batch.to(loss.device)
        return loss / items.where(items != 0, 1)
    return loss / (num_items_in_batch or 1)


def chunk_tokens_for(vocabulary: int) -> int:
    """Returns how many tokens' logits, in float32, make a chunk of the usual size."""
    return max(1, _CHUNK_BYTES // (4 * max(1, vocabulary)))


def _options_of(hidden: torch.Tensor, weight: torch.Tensor, options: _Options) -> _Options:
    """Checks the options and settles the dtype of the matrix products."""
    for name, value, fits in (
        ("reduction", options.reduction, options.reduction in ("mean", "sum", "none")),
        ("chunk_tokens", options.chunk_tokens, options.chunk_tokens >= 1),
        ("softcap", options.softcap, options.softcap >= 0),
        ("label_smoothing", options.label_smoothing, 0 <= options.label_smoothing <= 1),
    ):
        if not fits:
            raise ValueError(
                f"linear_cross_entropy: expected another {name}, got {value!r}. Give reduction as "
                "'mean', 'sum' or 'none', chunk_tokens from 1, softcap from 0, label_smoothing "
                "from 0 to 1."
            )
    kind = hidden.device.type
    if (
        torch.amp.is_autocast_available(kind)
        and torch.is_autocast_enabled(kind)
        and torch.float64 not in (hidden.dtype, weight.dtype)  # which autocast leaves alone
    ):
        return options._replace(dtype=torch.get_autocast_dtype(kind))
    if hidden.dtype != weight.dtype or not hidden.is_floating_point():
        raise TypeError(
            "linear_cross_entropy: expected hidden and weight of one floating-point dtype, got "
            f"{hidden.dtype} and {weight.dtype}. Cast one of them, or use autocast."
        )
    return options


def _check_tensors(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    labels: torch.Tensor,
    options: _Options,
) -> None:
    vocab = weight.shape[0]
    if weight.dim() != 2 or hidden.dim() < 1 or hidden.shape[-1] != weight.shape[1]:
        wrong, got = "hidden [..., E] and weight [V, E]", (hidden.shape, weight.shape)
    elif labels.shape != hidden.shape[:-1]:
        wrong, got = "one label a hidden state", (labels.shape, hidden.shape)
    elif bias is not None and bias.shape != (vocab,):
        wrong, got = "bias [V]", (bias.shape, weight.shape)
    else:
        wrong, got = "", (labels.shape, hidden.shape)
    if wrong:
        shapes = " and ".join(str(tuple(shape)) for shape in got)
        raise ValueError(f"linear_cross_entropy: expected {wrong}, got {shapes}. Mend the shapes.")
    if labels.dtype != torch.int64:
        raise TypeError(
            f"linear_cross_entropy: expected labels in int64, got {labels.dtype}. Cast them."
        )
    if not (hidden.device == weight.device == labels.device):
        raise ValueError(
            "linear_cross_entropy: expected hidden, weight and labels on one device, got "
            f"{hidden.device}, {weight.device} and {labels.device}. Move them."
        )
    if labels.device.type == "cpu":
        outside = ((labels < 0) | (labels >= vocab)) & (labels != options.ignore_index)
        if outside.any():
            raise IndexError(
                f"linear_cross_entropy: expected labels from 0 to {vocab - 1} or "
                f"{options.ignore_index}, got {labels[outside][0].item()}. Mend the labels."
            )
