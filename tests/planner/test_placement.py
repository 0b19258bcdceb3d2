"""Models placed on unequal cards."""

import itertools

import pytest
import torch
from accelerate.utils import check_device_map
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import offload
from offload.planner.cards import TYPICAL, Card
from offload.planner.choice import Budget
from offload.planner.outline import Unit, outline_of
from offload.planner.placement import Device, Part, place
from tests.planner.cases import Plain, llama

FIVE = {
    "cuda:0": "16GB",
    "cuda:1": "16GB",
    "cuda:2": "16GB",
    "cuda:3": "8GB",
    "cuda:4": "8GB",
}


def test_an_eight_billion_model_is_spread_over_five_unequal_cards():
    made = offload.plan(
        "llama-3.1-8b", tokens=16_384, memory=FIVE, lora=16, optimizer="adamw", host="200GB"
    )
    assert [share.device for share in made.shares] == list(FIVE)
    for share in made.shares:
        assert share.need_bytes <= share.budget_bytes
    used = {index for index, share in enumerate(made.shares) if share.modules}
    assert len(used) >= 2
    outline = outline_of("llama-3.1-8b", lora=16)
    placed = made.device_map()
    check_device_map(outline.model, placed)
    assert set(placed.values()) == used
    layers = [placed[name] for name, _ in outline.named]
    assert len(list(itertools.groupby(layers))) == len(set(layers))  # neighbours stay together
    assert placed[outline.named[0][0]] == placed[next(n for n in placed if "embed_tokens" in n)]
    head = next(n for n in placed if n.endswith("lm_head"))
    assert placed[head] == placed[next(n for n in placed if n.endswith("model.norm"))]


def test_a_card_that_is_given_nothing_gets_nothing():
    memory = {"cuda:0": "3GB", "cuda:1": 0, "cuda:2": "3GB"}
    made = offload.plan(llama(), tokens=256, memory=memory, optimizer="none")
    assert made.shares[1].modules == ()
    assert 1 not in made.device_map().values()


def test_a_head_that_shares_its_weight_stays_with_the_embedding():
    config = llama(tie_word_embeddings=True, vocab_size=8192)
    memory = {"cuda:0": "1200MB", "cuda:1": "1200MB"}
    placed = offload.plan(config, tokens=256, memory=memory, optimizer="none").device_map()
    assert placed["lm_head"] == placed["model.embed_tokens"]
    assert len(set(placed.values())) == 2


def test_cards_too_small_together_are_refused_with_what_fits():
    memory = {"cuda:0": "6GB", "cuda:1": "6GB"}
    with pytest.raises(offload.DoesNotFit) as caught:
        offload.plan("llama-3.1-8b", tokens=1024, memory=memory, lora=8)
    assert "cuda:0 5.6 GiB, cuda:1 5.6 GiB" in str(caught.value)
    assert any("4 bits" in remedy for remedy in caught.value.remedies)


def test_faster_cards_get_more():
    memory = {"cuda:0": "20GB", "cuda:1": "20GB"}
    cards = {"cuda:0": "RTX 3060", "cuda:1": "RTX 4080"}
    slow, fast = offload.plan(
        "llama-3.2-1b", tokens=8192, memory=memory, card=cards, lora=8, host="100GB"
    ).shares
    assert len(fast.modules) > len(slow.modules)
    assert fast.device == "cuda:1"


class WithPositions(Plain):
    def __init__(self):
        super().__init__()
        self.positions = nn.Parameter(torch.zeros(4096, 32))

    def forward(self, ids):
        hidden = self.embedding(ids) + self.positions[: ids.shape[1]]
        for block in self.blocks:
            hidden = block(hidden)
        return self.head(hidden)


def test_parameters_beside_the_layers_have_a_place():
    with torch.device("meta"):
        model = WithPositions()
    memory = {0: "1200MB", 1: "1200MB"}
    placed = offload.plan(model, tokens=256, memory=memory, optimizer="none").device_map()
    check_device_map(model, placed)
    assert placed["positions"] == placed["embedding"]


def test_one_card_has_no_map():
    made = offload.plan(llama(), tokens=64, dtype=torch.float32)
    with pytest.raises(ValueError, match="several cards"):
        made.device_map()


FAST = Card(**{**TYPICAL.__dict__, "name": "fast", "teraflops": 60})


def _parts(sizes):
    return [
        Part((Unit(f"{i}", size, 0),), size, kept, passing, 0, {TYPICAL: work, FAST: work / 2})
        for i, (size, kept, passing, work) in enumerate(sizes)
    ]


def _slowest_of_all(parts, devices):
    """Tries every order of cards and every cut."""
    best = None
    for order in itertools.permutations(devices):
        for cuts in itertools.combinations_with_replacement(range(len(parts) + 1), len(order) - 1):
            edges = [0, *cuts, len(parts)]
            seconds = []
            for device, begin, end in zip(order, edges, edges[1:], strict=False):
                run = parts[begin:end]
                held = sum(part.weight_bytes + part.kept_bytes for part in run)
                need = held + max((part.passing_bytes for part in run), default=0)
                if run and need > device.budget.device:
                    break
                seconds.append(sum(part.card_seconds[device.card] for part in run))
            else:
                best = max(seconds) if best is None else min(best, max(seconds))
    return best


SIZES = st.tuples(st.integers(1, 9), st.integers(0, 3), st.integers(0, 5), st.integers(1, 9))


@given(
    st.lists(SIZES, min_size=1, max_size=6),
    st.lists(st.tuples(st.integers(0, 30), st.booleans()), min_size=1, max_size=3),
)
@settings(max_examples=120, deadline=None)
def test_no_other_placement_is_faster_or_fits_where_this_does_not(sizes, cards):
    parts = _parts(sizes)
    devices = [
        Device(f"cuda:{i}", Budget(memory, reserve=0, fragmentation=0), FAST if fast else TYPICAL)
        for i, (memory, fast) in enumerate(cards)
    ]
    shares, best = place(parts, devices), _slowest_of_all(parts, devices)
    assert (shares is None) == (best is None)
    if shares is not None:
        assert max(share.seconds for share in shares) == best
        assert all(share.need_bytes <= share.budget_bytes for share in shares)
        placed = [name for share in shares for name in share.modules]
        assert sorted(placed) == sorted(part.units[0].name for part in parts)
