"""Predicted bytes: composed from a few layers, extrapolated in length, and as measured."""

import copy
from dataclasses import replace

import pytest
import torch

import offload
from bench.measure import StorageTracker
from offload.planner.composition import Held, compose, needed_layers, stand_ins
from offload.planner.dry_run import call_of, dry_run
from offload.planner.ledger import PURPOSES, Purpose
from offload.planner.optimizers import optimizer_bytes
from offload.planner.prediction import Forecast
from offload.policy import Policy
from tests.planner.cases import CARD, CPU, Plain, forecast, gemma2, llama, opt, qwen2, tiled

RELOADED = PURPOSES.index(Purpose.RELOADED)
POLICIES = {
    "tiled, host": tiled(),
    "tiled, device": tiled(tier="device"),
    "tiled, two kept": tiled(keep_last=2),
    "tiled, encoded": tiled(codec="fp8"),
    "checkpoint, host": Policy(mode="checkpoint", tier="host", min_bytes=0),
    "checkpoint, device": Policy(mode="checkpoint", tier="device"),
    "kept": Policy(mode="keep"),
}


def whole_step(made: Forecast, policy: Policy):
    """Runs every layer instead of a few."""
    outline, situation = made.outline, made.situation
    model, named = outline.shortened(len(outline.named))
    recording = dry_run(model, named, policy, situation, call_of(model, train=situation.train))
    return compose(recording, list(range(len(named))), made.held)


@pytest.mark.parametrize("policy", POLICIES.values(), ids=POLICIES)
@pytest.mark.parametrize("kind", [CPU, CARD], ids=["cpu", "card"])
def test_a_few_layers_tell_of_all(policy, kind):
    made = forecast(llama(num_hidden_layers=8), 200, kind)
    told, whole = made.step(policy), whole_step(made, policy)
    assert [s.name for s in told.segments] == [s.name for s in whole.segments]
    tile_bytes = 64 * 64 * 4
    for a, b in zip(told.segments, whole.segments, strict=True):
        for found, expected in ((a.peak, b.peak), (a.end, b.end)):
            # What was brought back ahead comes in steps of a tile, out of step with the layers.
            assert abs(found.pop(RELOADED) - expected.pop(RELOADED)) <= tile_bytes, a.name
            assert found == expected, a.name
        assert a.host_peak == b.host_peak, a.name
        assert abs(a.back_bytes - b.back_bytes) <= 2 * tile_bytes, a.name
        assert a.out_bytes == b.out_bytes, a.name
        assert a.work.linear_flops == b.work.linear_flops, a.name
        assert a.work.attention_flops == b.work.attention_flops, a.name


def test_inputs_on_the_host_do_not_pile_up_on_the_device():
    # Longer than what is brought back ahead, so that a few layers stand for all.
    made = forecast(llama(hidden_size=1024, num_hidden_layers=12), 16_384, CARD)
    policy = Policy(mode="checkpoint", tier="host", loss_chunk_tokens=256)
    told = made.step(policy)
    direct = whole_step(made, policy)
    assert [sum(s.peak) for s in told.segments] == [sum(s.peak) for s in direct.segments]


def test_layers_of_several_kinds_each_have_one_that_stands_for_them():
    made = forecast(gemma2(num_hidden_layers=8), kind=CARD)
    told, whole = made.step(tiled()), whole_step(made, tiled())
    for a, b in zip(told.segments, whole.segments, strict=True):
        assert sum(a.peak) == pytest.approx(sum(b.peak), rel=5e-3), a.name
    windowed, full = (told.segments[at].work.attention_flops[0] for at in (3, 4))
    assert windowed < full


def test_stand_ins_are_of_the_same_kind_and_at_the_same_end():
    kinds = ["a", "b"] * 5
    count = needed_layers(kinds, 1)
    assert count == 4
    assert stand_ins(kinds, count, 1) == [0, 1, 2, 1, 2, 1, 2, 1, 2, 3]
    assert needed_layers(["a"] * 30, 3) == 5
    assert needed_layers(["a"] * 30, 1, ahead=4) == 6
    assert stand_ins(["a"] * 8, 6, 1) == [0, 1, 2, 3, 4, 4, 4, 5]
    assert needed_layers(["a", "b", "c", "d"], 1) == 4


@pytest.mark.parametrize("lora", [0, 4])
def test_long_steps_are_told_from_shorter_ones(lora):
    made = forecast(llama(num_hidden_layers=3), kind=CARD, lora=lora)
    policy = tiled(tile_tokens=16)
    tokens = 16 * 44 + 5
    told = made.step(policy, tokens)
    direct = whole_step(Forecast(made.outline, replace(made.situation, tokens=tokens)), policy)
    assert told.peak_bytes == pytest.approx(direct.peak_bytes, rel=5e-3)
    assert told.host_bytes == pytest.approx(direct.host_bytes, rel=2e-2)
    for a, b in zip(told.segments, direct.segments, strict=True):
        assert sum(a.work.attention_flops) == pytest.approx(sum(b.work.attention_flops), rel=2e-2)
        assert a.work.linear_flops == pytest.approx(b.work.linear_flops, rel=1e-3)


def test_tiles_count_the_attention_that_a_mask_leaves():
    tokens = 320
    made = forecast(llama(num_hidden_layers=3), tokens, CARD)
    by_tiles, whole = (
        sum(s.work.attention_flops[0] for s in made.step(policy).segments if "forward" in s.name)
        for policy in (tiled(tile_tokens=32), Policy(mode="keep"))
    )
    exact = 3 * 2 * 64 * tokens * tokens  # layers, products, dims, pairs that see each other twice
    assert whole == exact
    assert by_tiles == exact


class Measured:
    """The peaks of a real step on the CPU."""

    def __init__(self, config, policy, tokens, *, lora=0, optimizer=None, steps=1):
        from transformers import AutoModelForCausalLM

        from bench.models import add_lora

        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).train()
        model = add_lora(model, lora) if lora else model
        offload.wrap(model, policy=policy)
        ids = torch.randint(config.vocab_size, (1, tokens))
        self.run(model, ids[:, :257], None)  # the proofs
        used = optimizer(p for p in model.parameters() if p.requires_grad) if optimizer else None
        tracker = StorageTracker("cpu")
        tracker.watch([*model.parameters(), *model.buffers(), ids])
        with tracker:
            for _ in range(steps):
                self.run(model, ids, used)
        self.peak_bytes = tracker.peak_bytes

    @staticmethod
    def run(model, ids, optimizer):
        model.zero_grad(set_to_none=True)
        model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
        if optimizer is not None:
            optimizer.step()


@pytest.mark.parametrize(
    ("config", "policy", "lora"),
    [
        (llama(), tiled(tier="device"), 0),
        (qwen2(), tiled(tier="device"), 4),
        (opt(), Policy(mode="checkpoint", tier="device"), 0),
        (llama(), Policy(mode="checkpoint", tier="device"), 4),
        (opt(), Policy(mode="keep"), 0),
    ],
    ids=["llama tiled", "qwen2 tiled LoRA", "opt checkpoint", "llama checkpoint LoRA", "opt kept"],
)
def test_the_peak_is_the_one_that_is_measured(config, policy, lora, store):
    made = forecast(copy.deepcopy(config), tokens=500, lora=lora).step(policy)
    measured = Measured(config, policy, 500, lora=lora)
    assert made.peak_bytes == pytest.approx(measured.peak_bytes, rel=0.01)


@pytest.mark.parametrize(
    ("name", "make"),
    [
        ("adamw", lambda ps: torch.optim.AdamW(ps, foreach=False)),
        ("sgd", lambda ps: torch.optim.SGD(ps, foreach=False)),
        ("sgd-momentum", lambda ps: torch.optim.SGD(ps, momentum=0.9, foreach=False)),
    ],
)
def test_an_optimizer_holds_and_takes_what_is_measured(name, make, store):
    config = llama(vocab_size=4096)  # so that the optimizer's own step is the peak
    made = forecast(copy.deepcopy(config), tokens=64, optimizer=name).step(Policy(mode="keep"))
    measured = Measured(config, Policy(mode="keep"), 64, optimizer=make, steps=2)
    assert made.segments[-1].name == "update"
    assert made.peak_bytes == pytest.approx(measured.peak_bytes, rel=0.01)


def test_eight_bit_states_have_a_byte_a_value_and_scales():
    large, small = (torch.nn.Parameter(torch.empty(n, device="meta")) for n in (8192, 100))
    used = optimizer_bytes("adamw-8bit", [large, small], on_card=True)
    assert used == (2 * (8192 + 4 * 32) + 2 * 4 * 100, 0)


def test_without_gradients_nothing_but_weights_stays():
    made = forecast(llama(), train=False).step(tiled())
    assert [s.name for s in made.segments] == [
        "before",
        *(f"forward {i}" for i in range(6)),
        "head",
    ]
    assert made.host_bytes == 0
    assert not any("gradients" in name for name in named(made.peak))


def test_models_of_nobodys_library_are_run_by_their_ids():
    model = Plain()
    made = forecast(model, dtype=None)
    told = made.step(tiled())
    assert told.host_bytes > 0
    assert made.held == Held(
        sum(p.nbytes for p in model.parameters()), sum(p.nbytes for p in model.parameters())
    )
    assert [s.peak for s in told.segments] == [s.peak for s in whole_step(made, tiled()).segments]


def test_a_layer_that_tiles_do_not_take_is_planned_whole_and_noted():
    model = Plain()
    model.blocks[0].norm.register_forward_hook(lambda *_: None)
    made = forecast(model, dtype=None)
    assert any("has a hook" in note for note in made.notes(tiled(mode="auto")))


def test_encoded_tapes_take_half_of_the_host():
    made = forecast(llama(), 2048, CARD, dtype=torch.bfloat16)  # slots are 4 KiB at least
    plain, encoded = (made.step(tiled(512, codec=codec)).host_bytes for codec in (None, "fp8"))
    assert 0.5 < encoded / plain < 0.62  # the sums of exponentials are never encoded


def named(purposes):
    return [purpose.value for purpose, size in zip(PURPOSES, purposes, strict=True) if size]
