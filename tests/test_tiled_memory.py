"""Tiled mode: memory of a step does not grow with depth, and with length by few hidden states."""

import gc
import importlib

import pytest
import torch

pytest.importorskip("transformers")
from transformers import LlamaConfig, LlamaForCausalLM

import offload
from bench.measure import StorageTracker
from offload import _native
from tests.models import blocks
from tests.test_memory import INPUT_BYTES, TOKENS, WIDTH, Watched

linear_cross_entropy = importlib.import_module("offload.ops.linear_cross_entropy")

TILE = 64


def llama(layers: int, hidden: int, heads: int, kv_heads: int, dtype=torch.float32):
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=hidden,
        intermediate_size=2 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        vocab_size=128,
        max_position_embeddings=1 << 14,
        use_cache=False,
    )
    return LlamaForCausalLM(config).to(dtype)


def peak_bytes(model, tokens: int, *, tier: str = "host") -> int:
    """Returns the peak of a step above weights and the gradients that live at that moment."""
    policy = offload.Policy(
        mode="tiled", tile_tokens=TILE, tier=tier, min_bytes=0, loss_chunk_tokens=TILE
    )
    offload.wrap(model, policy=policy)
    warm = torch.randint(0, 128, (1, 300))
    model(warm, labels=warm).loss.backward()  # the proof runs here
    for parameter in model.parameters():
        parameter.grad = None
    ids = torch.randint(0, 128, (1, tokens))
    tracker = StorageTracker("cpu")
    tracker.watch([*model.parameters(), *model.buffers(), ids])
    tracker.follow_gradients(model.parameters())
    gc.collect()
    with tracker:
        outputs = model(ids, labels=ids)  # held through backward, as a caller's variable is
        outputs.loss.backward()
    assert {layer.mode for layer in offload.report(model).layers} == {"tiled"}
    return tracker.peak_activation_bytes


def slope(build, hidden_bytes: int) -> float:
    """Returns by how many hidden states a token more raises the peak."""
    few, many = (peak_bytes(build(), tokens) for tokens in (768, 1536))
    return (many - few) / (768 * hidden_bytes)


def test_a_token_costs_at_most_nine_hidden_states_in_float32():
    assert 5 < slope(lambda: llama(2, 64, 4, 4), 64 * 4) <= 9


def test_a_token_costs_at_most_six_hidden_states_in_bfloat16_with_few_heads_and_lora(monkeypatch):
    peft = pytest.importorskip("peft")
    # Constants shrink with the model, or they are larger than what grows with the tokens.
    monkeypatch.setattr(linear_cross_entropy, "_PIECE_BYTES", 1 << 14)

    def build():
        base = llama(2, 128, 8, 2, torch.bfloat16)
        return peft.get_peft_model(base, peft.LoraConfig(r=2, target_modules=["q_proj", "v_proj"]))

    assert 3 < slope(build, 128 * 2) <= 6


def test_four_times_the_layers_cost_at_most_five_percent_more():
    shallow, deep = (peak_bytes(llama(layers, 64, 4, 4), 512) for layers in (2, 8))
    assert deep <= 1.05 * shallow


def test_by_reference_on_the_device_memory_grows_with_depth():
    """Guards the test above: the same count sees what stays on the device."""
    shallow, deep = (peak_bytes(llama(layers, 64, 4, 4), 512, tier="device") for layers in (2, 8))
    assert deep > 2 * shallow


@pytest.mark.parametrize("depth", [4, 16])
def test_after_forward_no_layer_input_lives_but_the_callers(store, depth):
    stack = blocks(depth, WIDTH)
    watched = Watched(list(stack.layers))
    policy = offload.Policy(mode="tiled", tile_tokens=100, tier="host", min_bytes=0)
    offload.wrap(watched, policy=policy)
    watched(torch.randn(1, 300, WIDTH)).sum().backward()
    watched.inputs.clear()
    hidden = torch.randn(1, TOKENS, WIDTH)
    loss = watched(hidden).sum()
    store.synchronize()
    assert watched.live_inputs() == 1  # the caller's own
    kept = 24 * WIDTH * 4  # the last tile of the last layer stays on the device
    arena = _native.arena_statistics()
    waste = arena.live_bytes - (depth * INPUT_BYTES - kept)
    assert 0 <= waste <= 4096 * arena.live_slots
    loss.backward()


def test_step_60_uses_as_many_bytes_as_step_10(store):
    model = llama(2, 32, 2, 2)
    offload.wrap(
        model, policy=offload.Policy(mode="tiled", tile_tokens=32, tier="host", min_bytes=0)
    )
    seen = {}
    for number in range(60):
        ids = torch.randint(0, 128, (1, 100))
        outputs = model(ids, labels=ids)
        if number % 3:
            outputs.loss.backward()
        del outputs
        store.synchronize()
        if number in (9, 59):
            gc.collect()
            arena = _native.arena_statistics()
            live = sum(1 for item in gc.get_objects() if isinstance(item, torch.Tensor))
            seen[number] = (arena.live_bytes, arena.committed_bytes, live)
    assert seen[9] == seen[59]
