"""A real model on a real text: SmolLM2-135M with LoRA and in full, bit for bit the plain model."""

import copy

import pytest
import torch

import offload
from bench.models import build_batch, build_model, convert_smollm2
from bench.spec import StepSpec
from tests.models import FORCED, assert_same_step, calls_of


@pytest.fixture(scope="module")
def directory():
    return str(convert_smollm2())


def whole(model, batch):
    """The language loss, over the vocabulary of 49,152."""
    return model(batch, labels=batch).loss


def body(model, batch):
    """A loss on the last hidden states: bfloat16 over the vocabulary takes minutes on some CPUs."""
    inner = model.get_base_model() if hasattr(model, "get_base_model") else model
    return inner.model(batch).last_hidden_state.float().pow(2).mean()


@pytest.mark.parametrize(
    ("dtype", "lora", "tokens", "loss_of"),
    [
        ("float32", 8, 48, whole),
        ("float32", 0, 48, whole),
        ("bfloat16", 8, 12, body),
    ],
)
def test_loss_and_gradients_equal_the_plain_models(store, directory, dtype, lora, tokens, loss_of):
    spec = StepSpec("smollm2", tokens, dtype=dtype, lora=lora, input_directory=directory)
    plain, batch = build_model(spec), build_batch(spec)
    wrapped = offload.wrap(copy.deepcopy(plain), policy=FORCED)
    assert len(calls_of(wrapped)) == 30
    torch.set_num_threads(2)
    try:
        assert_same_step(plain, wrapped, lambda model: loss_of(model, batch), steps=1)
    finally:
        torch.set_num_threads(1)
    assert all(call.record.offloaded_tensors == 1 for call in calls_of(wrapped)[:-1])
    assert offload.report(wrapped).verdict.startswith("active: 30/30 layers")
