"""`offload.plan`: choices, refusals, several cards, errors."""

import io
import json
import pickle
import subprocess
import sys

import pytest
import torch

import offload
from offload.planner import planning
from offload.planner.cards import CARDS, HOST, find_card
from offload.planner.choice import Budget
from offload.planner.ledger import PURPOSES
from offload.policy import Policy
from tests.planner.cases import Plain, llama

WIDE = {"hidden_size": 256, "intermediate_size": 688, "num_hidden_layers": 8, "vocab_size": 4096}
RESERVE = Budget().reserve


def wide(**others):
    return llama(**{**WIDE, **others})


def plan(memory=None, *, tokens=8192, **options):
    """Plans for a card that has `memory` MiB besides the reserve."""
    if memory is not None:
        options["memory"] = RESERVE + (memory << 20)
    options.setdefault("optimizer", "sgd")
    options.setdefault("dtype", torch.float32)
    return offload.plan(wide(), tokens=tokens, **options)


def test_the_less_memory_the_more_is_recomputed_and_moved():
    roomy, middling, tight = plan(16_000), plan(420), plan(230)
    assert roomy.policy.mode == "keep"
    assert (middling.policy.mode, middling.policy.tier) in {
        ("checkpoint", "device"),
        ("auto", "device"),
    }
    assert (tight.policy.mode, tight.policy.tier) == ("auto", "host")
    assert roomy.timing.step_s < middling.timing.step_s <= tight.timing.step_s
    for made in (roomy, middling, tight):
        assert made.device_bytes <= made.budget.device
        assert sum(made.purposes.values()) == made.peak_bytes
    assert roomy.host_bytes == middling.host_bytes == 0 < tight.host_bytes


def test_without_a_limit_nothing_is_given_up():
    assert plan().policy.mode == "keep"


def test_shorter_tiles_are_taken_only_where_longer_ones_do_not_fit():
    tiles = [plan(memory).policy.tile_tokens for memory in (320, 216, 209)]
    assert tiles == sorted(tiles, reverse=True)
    assert len(set(tiles)) > 1


def test_what_the_host_cannot_hold_goes_to_the_disk(tmp_path):
    made = plan(230, host=64 << 20, disk=tmp_path)
    assert made.policy.disk == str(tmp_path)
    assert made.policy.host_bytes == 64 << 20
    assert made.spilled_bytes == made.step.host_bytes - (64 << 20) > 0
    assert made.host_bytes == 64 << 20
    sized = plan(230, host="64MiB", disk="1GB")
    assert sized.policy.disk is None
    assert sized.spilled_bytes == made.spilled_bytes


def test_a_codec_is_used_only_if_nothing_lossless_fits():
    needed = plan(230).host_bytes
    assert plan(230, host=needed, codec="fp8").policy.codecs == (None, None, None)
    made = plan(230, host=int(0.5 * needed), codec="fp8")
    assert made.policy.codecs == ("fp8", "fp8", "fp8")
    assert made.host_bytes <= int(0.5 * needed)


def test_a_refusal_names_what_is_taken_what_fits_and_what_helps():
    with pytest.raises(offload.DoesNotFit) as caught:
        plan(120, tokens=24_576)
    error = caught.value
    text = str(error)
    assert "at 24,576 tokens to fit" in text
    for name in ("weights", "hidden states", "keys and values", "needed", "there is"):
        assert f"  {name}" in text
    assert 0 < error.longest_tokens < 24_576
    assert f"Longest sequence that fits: {error.longest_tokens:,} tokens" in text
    assert plan(120, tokens=error.longest_tokens)
    with pytest.raises(offload.DoesNotFit):
        plan(120, tokens=error.longest_tokens + 512)
    assert any("a card of" in remedy for remedy in error.remedies)
    assert pickle.loads(pickle.dumps(error)).remedies == error.remedies


def test_a_refusal_offers_adapters_where_they_are_what_is_missing():
    options = {"tokens": 1024, "optimizer": "adamw"}
    with pytest.raises(offload.DoesNotFit) as caught:
        plan(100, **options)
    assert any(remedy.startswith("LoRA") for remedy in caught.value.remedies)
    assert plan(100, lora=16, **options)


def test_a_refusal_offers_host_and_disk_where_the_card_is_enough():
    with pytest.raises(offload.DoesNotFit) as caught:
        plan(230, host=100 << 20)
    assert [remedy.split("=")[0] for remedy in caught.value.remedies] == ["host", "disk", "codec"]
    remedy = caught.value.remedies[0]
    assert plan(230, host=remedy.split("'")[1])


def test_the_longest_sequence_is_found_and_fits():
    made = plan(230, longest=True)
    assert made.longest_tokens >= 8192
    assert f"{made.longest_tokens:,} tokens" in str(made)
    assert plan(230, tokens=made.longest_tokens)


def test_four_bits_and_adapters_weigh_what_is_stored():
    plain, adapted, packed = (
        offload.plan(wide(), tokens=64, dtype=torch.bfloat16, **options)
        for options in ({}, {"lora": 8}, {"lora": 8, "four_bit": True})
    )
    layers = 8 * (256 * 256 * 2 + 2 * 256 * 128 + 3 * 256 * 688)
    assert adapted.purposes["weights"] > plain.purposes["weights"]
    saved = adapted.purposes["weights"] - packed.purposes["weights"]
    assert saved == pytest.approx(layers * (2 - 0.516), rel=0.01)
    assert adapted.step.segments[-1].peak[PURPOSES.index(offload_purpose("gradients"))] < 2 << 20


def offload_purpose(name):
    return next(purpose for purpose in PURPOSES if purpose.value == name)


def test_the_same_question_has_the_same_answer():
    devices = {"cuda:0": "1400MB", "cuda:1": "1300MB", "cuda:2": 0}
    asked = {"memory": devices, "optimizer": "sgd", "dtype": torch.float32}
    first, second = (offload.plan(wide(), tokens=4096, **asked).to_dict() for _ in range(2))
    assert first == second
    assert json.loads(json.dumps(first)) == first


def test_a_model_with_weights_is_planned_for_its_own_device_and_left_alone():
    model = Plain()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    made = offload.plan(model, tokens=512, memory="4GB", optimizer="none")
    assert made.card == HOST.name
    assert made.purposes["weights"] == sum(p.nbytes for p in model.parameters())
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert all("forward" not in vars(module) for module in model.modules())
    assert all(parameter.grad is None for parameter in model.parameters())


def test_a_step_of_the_callers_own_is_planned():
    def call(model, ids):
        return model(ids).float().logsumexp(-1).mean()

    with torch.device("meta"):
        model = Plain()
    assert offload.plan(model, tokens=512, call=call).peak_bytes > 0


def test_the_arena_of_a_model_on_the_cpu_is_in_the_same_memory():
    model = Plain(width=64, layers=6)
    made = offload.plan(model, tokens=8192, memory=planning.HOST_RESERVE_BYTES + (36 << 20))
    assert made.policy.tier == "device"
    with pytest.raises(offload.DoesNotFit, match="arena, in the same memory"):
        offload.plan(model, tokens=8192, memory=planning.HOST_RESERVE_BYTES + (24 << 20))


def test_first_layers_that_are_frozen_have_no_backward():
    model = Plain(layers=6)
    for part in (model.embedding, *model.blocks[:3]):
        part.requires_grad_(False)
    made = offload.plan(model, tokens=512)
    names = [segment.name for segment in made.step.segments]
    assert [name for name in names if "backward" in name] == [f"backward {i}" for i in (5, 4, 3)]
    assert names[-1] == "update"


def test_a_model_as_it_is_loaded_is_planned_as_it_will_train():
    from transformers import GPT2Config, GPT2LMHeadModel

    with torch.device("meta"):
        model = GPT2LMHeadModel(GPT2Config(n_embd=64, n_layer=4, n_head=4, vocab_size=512))
    loaded, trained = (
        offload.plan(model.train(mode), tokens=2048, memory=RESERVE + (60 << 20))
        for mode in (False, True)
    )
    assert loaded.purposes == trained.purposes
    # Dropout in its attention keeps its layers from tiles.
    assert loaded.policy.mode == "checkpoint" or any("dropout" in note for note in loaded.notes)


def test_layers_are_named_as_for_wrap():
    model = Plain(layers=6)
    by_module = offload.plan(model, tokens=256, layers=list(model.blocks)[:4])
    by_name = offload.plan(model, tokens=256, layers=[f"blocks.{i}" for i in range(4)])
    assert by_module.purposes == by_name.purposes


def test_plans_at_the_same_time_leave_torch_as_it_was():
    from concurrent.futures import ThreadPoolExecutor

    before = torch.nn.functional.scaled_dot_product_attention
    with ThreadPoolExecutor(2) as pool:
        plans = list(pool.map(lambda _: plan(16_000, tokens=512).peak_bytes, range(4)))
    assert len(set(plans)) == 1
    assert torch.nn.functional.scaled_dot_product_attention is before


def test_positions_that_a_model_does_not_know_are_noted():
    made = offload.plan("opt-1.3b", tokens=4096, memory="24GB", lora=8)
    assert any("knows 2,048 positions" in line for line in made.lines())


def test_a_plan_prints_itself_plainly_and_with_rich():
    from rich.console import Console

    made = plan(230)
    console = Console(width=120, record=True, file=io.StringIO())
    console.print(made)
    for text in (str(made), console.export_text()):
        for expected in ("hidden states", "needed", "tiles of", "tokens a second", "predicted"):
            assert expected in text


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"tokens": 1}, ValueError, "tokens >= 2"),
        ({"tokens": "8192"}, TypeError, "int for tokens"),
        ({"tokens": True}, TypeError, "int for tokens"),
        ({"batch": 0}, ValueError, "batch >= 1"),
        ({"lora": -1}, ValueError, "lora >= 0"),
        ({"optimizer": "lion"}, ValueError, "optimizer in"),
        ({"memory": "eight"}, ValueError, "a size like"),
        ({"memory": 0}, ValueError, "some memory"),
        ({"memory": {"cuda:0": 0}}, ValueError, "at least one card"),
        ({"memory": {}}, ValueError, "at least one card"),
        ({"card": "RTX 9999"}, ValueError, "fits none"),
        ({"card": "RTX"}, ValueError, "fits several"),
        ({"card": {"cuda:0": "L4"}}, TypeError, "one card with one memory"),
        ({"memory": {"cpu": "8GB"}}, ValueError, "names of cards"),
        ({"memory": {0: "8GB"}, "card": {"cuda:1": "L4"}}, ValueError, "cards among"),
        ({"host": "much"}, ValueError, "a size like"),
        ({"disk": "much"}, ValueError, "a size like"),
        ({"model": "llama-5"}, ValueError, "one of opt-1.3b"),
        ({"model": 7}, TypeError, "a module, a transformers configuration"),
        ({"model": "/"}, ValueError, "config.json"),
        ({"model": torch.nn.Linear(2, 2), "dtype": torch.float16}, ValueError, "no dtype"),
        ({"model": torch.nn.Linear(2, 2)}, ValueError, "repeated layers"),
    ],
)
def test_wrong_arguments_are_refused(arguments, error, message):
    with pytest.raises(error, match=message):
        offload.plan(**{"model": wide(), "tokens": 512, **arguments})


def test_cards_are_found_by_part_of_their_name():
    assert find_card("NVIDIA GeForce RTX 4060").name == "RTX 4060"
    assert find_card("rtx-4060 ti").name == "RTX 4060 Ti 16GB"
    assert [find_card(card.name) for card in CARDS] == list(CARDS)


def test_planning_allocates_no_weights_and_starts_no_cuda():
    script = """
import resource, torch, offload
made = offload.plan("llama-3.1-8b", tokens=16384, memory="24GB", lora=8, host="64GB")
assert made.purposes["weights"] > 15 << 30
assert not torch.cuda.is_initialized()
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)
"""
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", script], capture_output=True, text=True, check=True
    )
    assert int(done.stdout) < 2 << 20  # KiB


class TestWrap:
    def test_memory_and_tokens_make_the_policy(self, store):
        model = Plain(width=64, layers=6)
        offload.wrap(model, memory=planning.HOST_RESERVE_BYTES + (36 << 20), tokens=8192)
        policy = model.blocks[0].forward.installation.policy
        assert (policy.mode, policy.tier) == ("checkpoint", "device")
        model(torch.zeros(1, 8192, dtype=torch.int64)).sum().backward()
        assert all(layer.recomputes == 1 for layer in offload.report(model).layers)

    def test_what_does_not_fit_leaves_the_model_as_it_was(self):
        model = Plain()
        with pytest.raises(offload.DoesNotFit):
            offload.wrap(model, memory=planning.HOST_RESERVE_BYTES + 1000, tokens=2048)
        assert all("forward" not in vars(module) for module in model.modules())

    @pytest.mark.parametrize(
        ("arguments", "error", "message"),
        [
            ({"memory": "8GB"}, ValueError, "memory and tokens together"),
            ({"tokens": 4096}, ValueError, "memory and tokens together"),
            ({"policy": Policy(), "memory": "8GB", "tokens": 64}, ValueError, "a policy or limits"),
            ({"policy": Policy(), "host": "1GB"}, ValueError, "a policy or limits"),
            ({"memory": {"cuda:0": "8GB"}, "tokens": 64}, NotImplementedError, "of one card"),
            ({"disk": "500GB"}, ValueError, "a directory for disk"),
        ],
    )
    def test_arguments_that_exclude_each_other_are_refused(self, arguments, error, message):
        with pytest.raises(error, match=message):
            offload.wrap(Plain(), **arguments)

    def test_host_and_disk_are_taken_without_planning(self, store, tmp_path):
        model = offload.wrap(Plain(), host="80MiB")
        policy = model.blocks[0].forward.installation.policy
        assert (policy.host_bytes, policy.mode) == (80 << 20, "auto")
