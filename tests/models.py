"""Small models and the comparison that most tests make."""

import copy
from collections.abc import Callable

import torch
from torch import nn

import offload
from offload.layer_call import LayerCall

FORCED = offload.Policy(mode="checkpoint", tier="host", min_bytes=0)
"""Checkpoint mode that copies every layer input to the arena and back, also on a CPU."""


class Block(nn.Module):
    """A residual MLP with dropout."""

    def __init__(self, width: int = 32, dropout: float = 0.0) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 2 * width)
        self.down = nn.Linear(2 * width, width)
        self.dropout = nn.Dropout(dropout)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden + self.dropout(self.down(nn.functional.gelu(self.up(self.norm(hidden)))))


class Stack(nn.Module):
    """Calls any layers one after the other, hidden states positional or by keyword."""

    def __init__(self, layers: list[nn.Module], keyword: str | None = None) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers)
        self.keyword = keyword

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            hidden = layer(**{self.keyword: hidden}) if self.keyword else layer(hidden)
        return hidden


class Adapted(nn.Module):
    """A frozen layer with a trainable adapter of rank 2."""

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(32, 32).requires_grad_(False)
        self.a = nn.Linear(32, 2, bias=False)
        self.b = nn.Linear(2, 32, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.base(x) + self.b(self.a(x)))


def blocks(count: int = 4, width: int = 32, dropout: float = 0.0) -> Stack:
    torch.manual_seed(0)
    return Stack([Block(width, dropout) for _ in range(count)])


def twins(model: nn.Module, policy: offload.Policy, **options) -> tuple[nn.Module, nn.Module]:
    """A plain model and a wrapped copy of it."""
    return model, offload.wrap(copy.deepcopy(model), policy=policy, **options)


def on(inputs: torch.Tensor) -> Callable[[nn.Module], torch.Tensor]:
    """A loss on some inputs, as a function of the model."""
    return lambda model: model(inputs).pow(2).mean()


def gradients(model: nn.Module) -> dict[str, torch.Tensor | None]:
    return {
        name: None if parameter.grad is None else parameter.grad.clone()
        for name, parameter in model.named_parameters()
    }


def step(model: nn.Module, loss_of: Callable[[nn.Module], torch.Tensor], seed: int = 7):
    """Runs one training step; returns its loss, its gradients and the next random number."""
    model.zero_grad()
    torch.manual_seed(seed)
    loss = loss_of(model)
    loss.backward()
    return loss.detach(), gradients(model), torch.rand(1)


def assert_same_step(plain: nn.Module, wrapped: nn.Module, loss_of, steps: int = 2) -> None:
    """Loss, gradients and the next random number are equal bit for bit, in each of some steps."""
    for seed in range(steps):
        expected, expected_grads, expected_next = step(plain, loss_of, seed)
        loss, grads, following = step(wrapped, loss_of, seed)
        assert torch.equal(loss, expected)
        assert grads.keys() == expected_grads.keys()
        for name, expected_grad in expected_grads.items():
            if expected_grad is None:
                assert grads[name] is None, name
            else:
                assert torch.equal(grads[name], expected_grad), name
        assert torch.equal(following, expected_next)


def calls_of(model: nn.Module) -> list[LayerCall]:
    return [
        m.__dict__["forward"]
        for m in model.modules()
        if isinstance(m.__dict__.get("forward"), LayerCall)
    ]
