"""What a worker runs again and again: a training step, or a forward pass without gradients."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

from bench import models
from bench.methods import Method
from bench.spec import StepSpec

FIRST_TOKENS = 257
"""Tokens of an extra first step of offload's methods, enough for the proof of every layer.

The proof is made once a run, not once a step; its time is a figure of its own (`first_call_s`).
"""


@dataclasses.dataclass(frozen=True)
class Task:
    """One method's prepared model and what to do with it.

    Args:
        model: What the method made of the model.
        ids: Token ids `[1, S]`.
        run: Does it once.
        save: Takes a path and the result of `run`, right after it; writes the tensors that the
            comparison reads, and returns the figures that belong to them.
        first_call: Does once what only a first call does; None where there is nothing.
    """

    model: Any
    ids: torch.Tensor
    run: Callable[[], Any]
    save: Callable[[Path, Any], dict[str, float]]
    first_call: Callable[[], None] | None = None


def train_step(model: Any, ids: torch.Tensor, optimizer: Any = None) -> float:
    """Runs forward and backward from zeroed gradients, and the optimizer when there is one.

    Args:
        model: A causal language model.
        ids: Token ids `[1, S]`, also the labels.
        optimizer: None leaves the weights alone.

    Returns:
        The loss.
    """
    model.zero_grad(set_to_none=True)
    loss = model(input_ids=ids, labels=ids, use_cache=False).loss
    loss.backward()
    if optimizer is not None:
        optimizer.step()
    return loss.item()


def truth_step(model: Any, ids: torch.Tensor) -> float:
    """Runs forward and backward with the loss in the model's own dtype.

    The library computes every loss in float32, whose error over a large vocabulary is larger than
    that of the rest of a float32 step.

    Args:
        model: A causal language model.
        ids: Token ids `[1, S]`, also the labels.

    Returns:
        The loss.
    """
    model.zero_grad(set_to_none=True)
    logits = model(input_ids=ids, use_cache=False).logits
    loss = F.cross_entropy(logits[0, :-1], ids[0, 1:])
    loss.backward()
    return loss.item()


def save_gradients(model: Any, path: Path) -> float:
    """Writes every gradient to a file.

    Args:
        model: A model after its backward.
        path: Where to write.

    Returns:
        The norm of all gradients together.
    """
    gradients = {n: p.grad.cpu() for n, p in model.named_parameters() if p.grad is not None}
    torch.save(gradients, path)
    squares = [gradient.double().square().sum() for gradient in gradients.values()]
    return float(torch.stack(squares).sum().sqrt()) if squares else 0.0


def prepare_step(method: Method, spec: StepSpec) -> Task:
    """Builds a training step.

    Args:
        method: Prepares the model.
        spec: What to build.

    Returns:
        The task; its result is the loss.
    """
    ids = models.build_batch(spec)
    model = method.prepare(models.build_model(spec), spec)
    trainable = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trainable, lr=spec.lr) if spec.lr else None

    def save(path: Path, loss: float) -> dict[str, float]:
        return {"loss": loss, "gradient_norm": save_gradients(model, path)}

    def run() -> float:
        return truth_step(model, ids) if spec.upcast else train_step(model, ids, optimizer)

    def first_call() -> None:
        train_step(model, ids[:, :FIRST_TOKENS])
        model.zero_grad(set_to_none=True)

    proves = method.prepare_baseline is None and ids.shape[1] > FIRST_TOKENS
    return Task(model, ids, run, save, first_call if proves else None)


def prepare_forward(method: Method, spec: StepSpec) -> Task:
    """Builds a forward pass of the model's body: no head, no cache, no gradients.

    Args:
        method: Prepares the body.
        spec: What to build.

    Returns:
        The task; its result is the last hidden state `[1, S, E]`.
    """
    ids = models.build_batch(spec)
    model = method.prepare(models.build_model(spec).base_model.eval(), spec)

    @torch.no_grad()
    def run() -> torch.Tensor:
        return model(input_ids=ids, use_cache=False).last_hidden_state

    def save(path: Path, hidden: torch.Tensor) -> dict[str, float]:
        torch.save({"last_hidden_state": hidden.cpu()}, path)
        return {"hidden_norm": float(hidden.norm(dtype=torch.float64))}

    return Task(model, ids, run, save)


TASKS: dict[str, Callable[[Method, StepSpec], Task]] = {
    "step": prepare_step,
    "forward": prepare_forward,
}
