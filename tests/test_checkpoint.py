"""Checkpoint mode gives the loss and gradients of the plain model, bit for bit, for any layer."""

from dataclasses import dataclass

import pytest
import torch
from torch import nn

import offload
from tests.models import (
    FORCED,
    Adapted,
    Block,
    Stack,
    assert_same_step,
    blocks,
    calls_of,
    on,
    step,
    twins,
)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_loss_and_gradients_equal_the_plain_models(policy, dtype):
    plain, wrapped = twins(blocks(5).to(dtype), policy)
    assert_same_step(plain, wrapped, on(torch.randn(2, 63, 32, dtype=dtype)))


def test_a_plain_sequential_of_custom_layers(policy):
    torch.manual_seed(0)
    plain, wrapped = twins(nn.Sequential(*[Block() for _ in range(4)]), policy)
    assert_same_step(plain, wrapped, on(torch.randn(2, 63, 32)))


def test_hidden_states_by_keyword(policy):
    plain, wrapped = twins(Stack([Block() for _ in range(4)], keyword="hidden"), policy)
    assert_same_step(plain, wrapped, on(torch.randn(3, 17, 32)))
    if policy is FORCED:
        assert all(call.record.offloaded_tensors == 2 for call in calls_of(wrapped)[:-1])


def test_each_layer_runs_exactly_twice_a_step(policy):
    wrapped = offload.wrap(blocks(4), policy=policy)
    counts = [0] * 4
    for index, layer in enumerate(wrapped.layers):
        layer.up.register_forward_hook(
            lambda *_, index=index: counts.__setitem__(index, counts[index] + 1)
        )
    step(wrapped, on(torch.randn(2, 9, 32)))
    assert counts == [2] * 4


def test_dropout_draws_the_same_masks_and_leaves_the_same_random_state(policy):
    plain, wrapped = twins(blocks(4, dropout=0.3), policy)
    assert_same_step(plain, wrapped, on(torch.randn(2, 33, 32)), steps=3)


class Mixed(nn.Module):
    """Takes None, an int mask between floats and a flag; returns a nest of things."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(32, 32)

    def forward(self, x, nothing, mask, y, flag=False):
        assert nothing is None
        assert flag
        h = self.linear(x) * mask + y
        return h, None, (h * 2, h.detach()), 3, {"a": h.exp()}


class Nest(nn.Module):
    def __init__(self, layer_class) -> None:
        super().__init__()
        self.layers = nn.ModuleList([layer_class() for _ in range(3)])

    def forward(self, x):
        mask = torch.ones(x.shape[1], 1, dtype=torch.long)
        total = 0.0
        for layer in self.layers:
            x, none, (k, v), three, rest = layer(x, None, mask, x * 0.5, flag=True)
            assert none is None
            assert three == 3
            assert not v.requires_grad
            total = total + k.sum() + rest["a"].mean()
        return x + total


def test_any_arguments_and_outputs(policy):
    plain, wrapped = twins(Nest(Mixed), policy)
    assert_same_step(plain, wrapped, on(torch.randn(2, 17, 32)))


@dataclass
class Result:
    hidden: torch.Tensor
    extra: torch.Tensor


class Boxed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(32, 32)

    def forward(self, box, *, context_fn, extras):
        return Result(self.linear(box.hidden) * context_fn + extras["p"][0], box.hidden.sin())


class BoxedStack(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Boxed() for _ in range(3)])
        self.bias = nn.Parameter(torch.zeros(32))

    def forward(self, x):
        box = Result(x, x)
        for layer in self.layers:
            box = layer(box, context_fn=2.0, extras={"p": [self.bias * 1.5]})
            assert box.hidden.requires_grad
        return box.hidden + box.extra


def test_dataclasses_nested_keyword_tensors_and_keywords_named_like_torchs(policy):
    torch.manual_seed(0)
    plain, wrapped = twins(BoxedStack(), policy)
    assert_same_step(plain, wrapped, on(torch.randn(2, 17, 32)))


class Appends(nn.Module):
    """Writes into a list that its caller passes along."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(32, 32)

    def forward(self, x, seen):
        seen.append(len(seen))
        return self.linear(x) * len(seen)


def test_a_container_that_layers_change_is_seen_as_it_was(policy):
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList([Appends() for _ in range(3)])

        def forward(self, x):
            seen: list[int] = []
            for layer in self.layers:
                x = layer(x, seen)
            assert seen == [0, 1, 2]
            return x

    torch.manual_seed(0)
    plain, wrapped = twins(Model(), policy)
    assert_same_step(plain, wrapped, on(torch.randn(2, 17, 32)))


def test_frozen_inputs_with_trainable_adapters(policy):
    torch.manual_seed(0)
    embedding = nn.Embedding(97, 32).requires_grad_(False)
    plain, wrapped = twins(nn.Sequential(embedding, *[Adapted() for _ in range(3)]), policy)
    assert_same_step(plain, wrapped, on(torch.randint(97, (2, 17))))
    assert all(p.grad.abs().sum() > 0 for p in wrapped.parameters() if p.requires_grad)


def test_layers_below_the_first_trainable_one_are_not_run_twice(policy):
    model = blocks(4)
    model.layers[0].requires_grad_(False)
    model.layers[1].requires_grad_(False)
    wrapped = offload.wrap(model, policy=policy)
    step(wrapped, on(torch.randn(2, 17, 32)))
    assert [call.record.recomputes for call in calls_of(wrapped)] == [0, 0, 1, 1]


def test_a_matrix_and_its_transpose_as_inputs_of_one_layer(policy):
    class Product(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.ones(()))

        def forward(self, a, b, c):
            return (a @ b + c @ b) * self.scale

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList([Product() for _ in range(3)])

        def forward(self, a):
            a = a * self.layers[0].scale
            for layer in self.layers:
                a = layer(a, a, a.t()) / 64
            return a

    plain, wrapped = twins(Model(), policy)
    assert_same_step(plain, wrapped, on(torch.randn(64, 64)))


def test_one_tensor_passed_twice_is_one_tensor_in_the_replay(policy):
    class Branches(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(32, 32)

        def forward(self, q, k):
            return torch.tanh(self.linear(q) * (2.0 if q is k else 1.0)) + k

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList([Branches() for _ in range(3)])

        def forward(self, h):
            for layer in self.layers:
                h = layer(h, h)
            return h

    plain, wrapped = twins(Model(), policy)
    assert_same_step(plain, wrapped, on(torch.randn(2, 9, 32)))


def test_a_strided_view_between_layers_keeps_its_strides(policy):
    class Half(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(32, 64)

        def forward(self, h):
            scale = 1.0 if h.is_contiguous() else 2.0
            return torch.tanh(self.linear(h) * scale).chunk(2, -1)[0]

    plain, wrapped = twins(Stack([Half() for _ in range(3)]), policy)
    assert_same_step(plain, wrapped, on(torch.randn(2, 9, 32)))


def test_generators_as_arguments_and_pythons_random_draw_the_same_again(policy):
    import random

    class Draws(Block):
        def forward(self, hidden, generator):
            mask = torch.rand(hidden.shape, generator=generator) > 0.5
            return torch.tanh(super().forward(hidden) * mask * (1 + random.random()))

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList([Draws() for _ in range(3)])

        def forward(self, x):
            random.seed(3)
            generator = torch.Generator().manual_seed(5)
            for layer in self.layers:
                x = layer(x, generator)
            self.next = random.random(), torch.rand(1, generator=generator)
            return x

    plain, wrapped = twins(Model(), policy)
    assert_same_step(plain, wrapped, on(torch.randn(2, 9, 32)))
    assert plain.next == wrapped.next


def test_sparse_arguments_and_inference_tensors(policy):
    class Graph(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(32, 32)

        def forward(self, hidden, adjacency, bias):
            return torch.relu(torch.sparse.mm(adjacency, self.linear(hidden)) + bias)

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList([Graph() for _ in range(3)])

        def forward(self, x):
            adjacency = torch.eye(9).to_sparse()
            with torch.inference_mode():
                bias = torch.ones(32)
            for layer in self.layers:
                x = layer(x, adjacency, bias)
            return x

    plain, wrapped = twins(Model(), policy)
    assert_same_step(plain, wrapped, on(torch.randn(9, 32)))
