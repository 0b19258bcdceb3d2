"""Makes causal language models compute their loss by chunks, without all logits.

While a model's forward runs with labels and gradients, its head returns `LazyLogits`; the model's
loss function recognises them. Everything else gets real logits.
"""

from __future__ import annotations

import inspect
import math
import warnings
from collections.abc import Callable
from contextvars import ContextVar
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from offload.adapters.accelerate import weights_are_elsewhere
from offload.adapters.transformers.library import pretrained_modules
from offload.lazy_logits import LazyLogits
from offload.stand_in import ForwardStandIn, stand_in_of


class HeadState:
    """What the three calls of one model share. Copies and pickles with them."""

    def __init__(self, chunk_tokens: int | None) -> None:
        self.chunk_tokens = chunk_tokens
        self.active = True
        self.warned = False

    def warn_once(self, reason: str) -> None:
        """Says once why a model computes all logits."""
        if not self.warned:
            self.warned = True
            warnings.warn(
                f"offload: the loss is computed from all logits at once: {reason}.", stacklevel=4
            )


_running: ContextVar[HeadState | None] = ContextVar("offload_running_head", default=None)
"""The model whose forward now computes a loss."""


class _HeadStandIn(ForwardStandIn):
    """A stand-in that knows the state its model shares."""

    def __init__(self, module: nn.Module, state: HeadState) -> None:
        super().__init__(module)
        self.state = state


class CausalCall(_HeadStandIn):
    """Stands in for the forward of a causal language model and tells its head to be lazy."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Runs the model with the arguments of its own forward."""
        forward = self.__wrapped__
        if not self.state.active:
            return forward(*args, **kwargs)
        token = _running.set(self.state if self._computes_loss(forward, args, kwargs) else None)
        try:
            return forward(*args, **kwargs)
        finally:
            _running.reset(token)

    def _computes_loss(
        self, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> bool:
        """Whether this call gets labels and needs gradients, and the model is as it was."""
        if not torch.is_grad_enabled() or torch.compiler.is_compiling():
            return False
        if torch._C._functorch.peek_interpreter_stack() is not None:
            return False  # torch.func does not take the loss's autograd function
        labels = kwargs.get("labels")
        if labels is None and args:
            try:
                labels = inspect.signature(forward).bind_partial(*args).arguments.get("labels")
            except TypeError:  # the forward will say so
                return False
        if labels is None or not isinstance(self.module.__dict__.get("_loss_function"), HeadLoss):
            return False
        head = _head_of(self.module)
        if stand_in_of(head, HeadCall) is None:
            self.state.warn_once("the head was replaced after offload took it over; wrap again")
            return False
        if reason := _unsuited(head):
            self.state.warn_once(reason)
        return not reason


class HeadCall(_HeadStandIn):
    """Stands in for the forward of a head, a plain `nn.Linear`."""

    def __call__(self, hidden: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        """Returns lazy logits while the model computes its loss, else real ones."""
        forward = self.__wrapped__
        if _running.get() is not self.state or args or kwargs:
            return forward(hidden, *args, **kwargs)
        head: Any = self.module
        weight, bias = head.weight, head.bias  # FSDP changes them between calls
        reason = _unsuited_tensors(hidden, weight, bias)
        if reason:
            self.state.warn_once(reason)
            return forward(hidden)
        return LazyLogits(hidden, weight, bias, self.state.chunk_tokens)


class HeadLoss:
    """Stands in for transformers' `ForCausalLMLoss` as a model's `loss_function`.

    Like it, except that the loss of float64 logits is computed in float64, and that the mean is 0
    instead of NaN where every label is ignored.
    """

    def __init__(self, original: Callable[..., Any], state: HeadState, previous: Any) -> None:
        self.original = original
        self.state = state
        self.previous = previous  # the instance's own attribute, if it had one

    @property
    def __wrapped__(self) -> Callable[..., Any]:
        """The library's function."""
        return self.original

    def __call__(
        self,
        logits: Any,
        labels: Any,
        vocab_size: int | None = None,
        num_items_in_batch: int | torch.Tensor | None = None,
        ignore_index: int = -100,
        shift_labels: torch.Tensor | None = None,
        **kwargs: Any,
    ) -> Any:
        """Computes the loss of lazy logits by chunks; hands others to the library."""
        if not isinstance(logits, LazyLogits) or logits.computed or vocab_size != logits.shape[-1]:
            targets = None
        elif shift_labels is None:
            targets = F.pad(labels, (0, 1), value=ignore_index)[..., 1:]
        else:
            targets = shift_labels
        if targets is None or targets.numel() != math.prod(logits.shape[:-1]):
            return self.original(
                logits=logits,
                labels=labels,
                vocab_size=vocab_size,
                num_items_in_batch=num_items_in_batch,
                ignore_index=ignore_index,
                shift_labels=shift_labels,
                **kwargs,
            )
        return logits.view(-1, vocab_size).cross_entropy(
            targets.reshape(-1), ignore_index=ignore_index, num_items_in_batch=num_items_in_batch
        )


def install_head(model: nn.Module, chunk_tokens: int | None) -> None:
    """Makes the causal language models in a model compute their loss by chunks.

    Models whose loss is not transformers' own, and those without a head, are left alone. So are
    heads that are not a plain `nn.Linear`, with a warning. Installing twice replaces.

    Args:
        model: changed in place: instance attributes only, its `state_dict` stays as it is.
        chunk_tokens: tokens of a chunk of logits; None chooses, 0 installs nothing.
    """
    uninstall_head(model)
    if chunk_tokens == 0:
        return
    for module in pretrained_modules(model):
        head = _head_of(module)
        loss: Any = None if head is None else module.loss_function
        if not _is_causal_loss(loss):
            continue
        state = HeadState(chunk_tokens)
        if reason := _unsuited(head):
            state.warn_once(reason)
            continue
        assert head is not None
        HeadCall(head, state).put()
        previous = module.__dict__.get("_loss_function")
        module.loss_function = HeadLoss(loss, state, previous)  # type: ignore[assignment]
        CausalCall(module, state).put()


def uninstall_head(model: nn.Module) -> None:
    """Undoes `install_head`; a model without it is left alone."""
    for module in model.modules():
        while (call := stand_in_of(module, _HeadStandIn)) is not None:
            call.remove()
        loss = module.__dict__.get("_loss_function")
        if isinstance(loss, HeadLoss):
            loss.state.active = False  # for a call that somebody has put another forward on
            module.__dict__.pop("_loss_function")
            if loss.previous is not None:
                module.__dict__["_loss_function"] = loss.previous


def _head_of(module: nn.Module) -> nn.Module | None:
    head: Any = module.get_output_embeddings()  # type: ignore[operator]
    return head if isinstance(head, nn.Module) else None


def _is_causal_loss(loss: Any) -> bool:
    """Whether a loss is the one that `HeadLoss` knows, not a user's or another library's."""
    module = getattr(loss, "__module__", "")
    name = getattr(loss, "__qualname__", "")
    return (module, name) == ("transformers.loss.loss_utils", "ForCausalLMLoss")


def _unsuited(head: nn.Module | None) -> str:
    """Says why a head must return real logits; empty if it need not."""
    if type(head) is not nn.Linear:
        return f"the head is a {type(head).__name__}, not a plain nn.Linear"
    hooks = (
        head._forward_hooks,
        head._forward_pre_hooks,
        head._backward_hooks,
        head._backward_pre_hooks,
    )
    if any(hooks):
        return "a hook sits on the head"
    if reason := weights_are_elsewhere(head):
        return f"the head's weight is not at hand ({reason})"
    forward = head.__dict__.get("forward")
    if forward is not None and not isinstance(forward, HeadCall) and not hasattr(head, "_hf_hook"):
        return "the head's forward has been replaced"
    return ""


def _unsuited_tensors(hidden: Any, weight: torch.Tensor, bias: torch.Tensor | None) -> str:
    """Says why these tensors need the head's own forward; empty if they do not."""
    tensors = [tensor for tensor in (hidden, weight, bias) if tensor is not None]
    if any(type(tensor) not in (torch.Tensor, nn.Parameter) for tensor in tensors):
        kinds = ", ".join(type(tensor).__name__ for tensor in tensors)
        return f"the head's input, weight and bias are {kinds}, not all plain tensors"
    if not all(tensor.is_floating_point() for tensor in tensors):
        return f"the head's weight is {weight.dtype}"
    autocast = torch.amp.is_autocast_available(hidden.device.type) and torch.is_autocast_enabled(
        hidden.device.type
    )
    if hidden.device != weight.device or (hidden.dtype != weight.dtype and not autocast):
        return f"the head's input is {hidden.dtype} on {hidden.device}, its weight {weight.dtype}"
    return ""
