"""Lazy logits: what stays lazy, and that everything else sees the real logits."""

import copy
import math
import pickle
import warnings

import numpy
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils import _pytree as pytree

from offload import lazy_logits
from offload.errors import OffloadError
from offload.lazy_logits import LazyLogits

BATCH, TOKENS, WIDTH, VOCAB = 2, 7, 8, 33


@pytest.fixture
def head():
    torch.manual_seed(0)
    return nn.Linear(WIDTH, VOCAB, dtype=torch.float64)


@pytest.fixture
def hidden():
    generator = torch.Generator().manual_seed(1)
    return torch.randn(
        BATCH, TOKENS, WIDTH, dtype=torch.float64, generator=generator
    ).requires_grad_()


@pytest.fixture
def labels():
    labels = torch.randint(VOCAB, (BATCH, TOKENS), generator=torch.Generator().manual_seed(2))
    labels[0, 2] = -100
    return labels


def lazy_of(hidden, head, chunk_tokens=3):
    return LazyLogits(hidden, head.weight, head.bias, chunk_tokens)


STAYS_LAZY = {
    "nothing": lambda x: x,
    "float": lambda x: x.float(),
    "to dtype": lambda x: x.to(torch.float32).to(dtype=torch.float64),
    "to like": lambda x: x.to(torch.zeros(1, dtype=torch.float32)),
    "to device": lambda x: x.to("cpu", non_blocking=True),
    "detach": lambda x: x.detach(),
    "contiguous": lambda x: x.contiguous(),
    "times": lambda x: x * 0.25,
    "number times": lambda x: 3 * x,
    "over": lambda x: x / -8,
    "softcap": lambda x: torch.tanh(x / 3.0) * 3.0,
    "softcap as a method": lambda x: 5 * (2 * x / 5).tanh(),
    "shifted": lambda x: x[..., :-1, :],
    "shifted, contiguous": lambda x: x[:, :-1].contiguous(),
    "last": lambda x: x[:, -1],
    "last, all of the vocabulary": lambda x: x[:, -1, :],
    "slice of all": lambda x: x[:, slice(0, None), 0:VOCAB],
    "one of the batch": lambda x: x[1],
    "negative step": lambda x: x[::1, 1::2],
    "mask": lambda x: x[torch.arange(BATCH * TOKENS).view(BATCH, TOKENS) % 3 == 0],
    "view": lambda x: x.view(-1, VOCAB),
    "view with a list": lambda x: x.view([BATCH * TOKENS, VOCAB]),
    "view by size": lambda x: x.view(-1, x.size(-1)),
    "reshape": lambda x: x.reshape(BATCH * TOKENS, -1),
    "flatten": lambda x: x.flatten(0, 1),
    "flatten by end": lambda x: x.flatten(end_dim=-2),
    "unsqueeze": lambda x: x.unsqueeze(0).squeeze(0),
    "all at once": lambda x: (torch.tanh(x.float() / 3) * 3)[..., :-1, :].reshape(-1, VOCAB),
}


@pytest.mark.parametrize("name", STAYS_LAZY)
def test_stays_lazy_and_gives_the_real_logits_and_loss(hidden, head, name):
    lazy = STAYS_LAZY[name](lazy_of(hidden, head))
    real = STAYS_LAZY[name](head(hidden))
    assert isinstance(lazy, LazyLogits)
    assert not lazy.computed
    assert (lazy.shape, lazy.dtype, lazy.device) == (real.shape, real.dtype, real.device)
    assert (lazy.ndim, lazy.dim(), lazy.numel()) == (real.ndim, real.dim(), real.numel())
    assert (lazy.size(), lazy.size(-1), len(lazy)) == (real.size(), real.size(-1), len(real))
    assert lazy.requires_grad == real.requires_grad
    targets = torch.arange(lazy.numel() // VOCAB) % VOCAB
    loss = lazy.cross_entropy(targets.view(lazy.shape[:-1]))
    expected = F.cross_entropy(real.reshape(-1, VOCAB), targets)
    torch.testing.assert_close(loss.double(), expected.double(), rtol=0, atol=1e-6)
    assert not lazy.computed
    torch.testing.assert_close(
        lazy.materialise(), real, rtol=0, atol=1e-7 if lazy.dtype == torch.float32 else 1e-14
    )
    if real.requires_grad:
        ours, plain = (torch.autograd.grad(x.sum(), hidden)[0] for x in (lazy, real))
        torch.testing.assert_close(ours, plain, rtol=0, atol=1e-12)


COMPUTES = {
    "argmax": lambda x: x.argmax(-1),
    "torch.argmax": lambda x: torch.argmax(x, dim=-1),
    "softmax": lambda x: F.softmax(x, -1),
    "log_softmax": lambda x: torch.log_softmax(x.float(), dim=-1),
    "plus": lambda x: x + 1,
    "plus tensor": lambda x: torch.ones(VOCAB) + x,
    "minus": lambda x: 1 - x,
    "times tensor": lambda x: x * torch.arange(VOCAB),
    "tensor times": lambda x: torch.arange(VOCAB) * x,
    "over itself": lambda x: x / x,
    "one over": lambda x: 1 / x,
    "power": lambda x: x**2,
    "negated": lambda x: -x,
    "absolute": lambda x: abs(x),
    "matmul": lambda x: x @ x.mT,
    "compared": lambda x: x > 0,
    "equal": lambda x: x == x,
    "cut vocabulary": lambda x: x[..., :5],
    "one of the vocabulary": lambda x: x[..., 3],
    "new axis": lambda x: x[:, None],
    "index tensor": lambda x: x[torch.tensor([1, 0])],
    "two caps": lambda x: x.tanh().tanh(),
    "negative cap": lambda x: x.tanh() * -2,
    "times zero": lambda x: x * 0,
    "transposed": lambda x: x.transpose(1, 2),
    "view across the vocabulary": lambda x: x.view(BATCH, -1),
    "flattened": lambda x: x.flatten(1),
    "half": lambda x: x.half(),
    "to int": lambda x: x.to(torch.int64),
    "to copy": lambda x: x.to(torch.float32, copy=True),
    "clone": lambda x: x.clone(),
    "cat": lambda x: torch.cat([x, x]),
    "where": lambda x: torch.where(x > 0, x, 0.0),
    "max": lambda x: x.max(-1).values,
    "numpy": lambda x: torch.from_numpy(x.detach().cpu().numpy()),
    "numpy by protocol": lambda x: torch.from_numpy(numpy.asarray(x.detach())),
    "topk": lambda x: torch.topk(x, 3).indices,
    "class weights": lambda x: F.cross_entropy(
        x.view(-1, VOCAB),
        torch.arange(BATCH * TOKENS),
        weight=torch.ones(VOCAB, dtype=torch.float64),
    ),
    "class probabilities": lambda x: F.cross_entropy(
        x.view(-1, VOCAB),
        torch.full((BATCH * TOKENS, VOCAB), 1 / VOCAB, dtype=torch.float64),
    ),
    "vocabulary in the middle": lambda x: F.cross_entropy(
        x.transpose(1, 2), torch.zeros(BATCH, TOKENS, dtype=torch.int64)
    ),
}


@pytest.mark.parametrize("name", COMPUTES)
def test_any_other_use_gets_the_real_logits(hidden, head, name):
    lazy, real = lazy_of(hidden, head), head(hidden)
    ours, plain = COMPUTES[name](lazy), COMPUTES[name](real)
    assert isinstance(ours, torch.Tensor)
    torch.testing.assert_close(ours, plain, rtol=1e-12, atol=1e-12)
    if plain.requires_grad:
        grads = [torch.autograd.grad(x.sum(), [hidden, head.weight]) for x in (ours, plain)]
        torch.testing.assert_close(*grads, rtol=1e-12, atol=1e-12)


def test_real_logits_are_computed_once_and_kept(hidden, head, monkeypatch):
    linears = []
    plain_linear = F.linear
    monkeypatch.setattr(F, "linear", lambda *a: linears.append(1) or plain_linear(*a))
    lazy = lazy_of(hidden, head)
    assert torch.equal(lazy.argmax(-1), (lazy + 0).argmax(-1))
    assert lazy[:, 0].shape == (BATCH, VOCAB)
    assert lazy.float().dtype == torch.float32
    assert isinstance(lazy.view(-1, VOCAB), torch.Tensor)
    assert len(linears) == 1


def test_changes_in_place_are_seen_by_later_uses(hidden, head, labels):
    lazy = lazy_of(hidden, head)
    with torch.no_grad():
        lazy[..., :3] = -7.0
        lazy.div_(2)
    assert (lazy[..., :3] == -3.5).all()
    expected = F.cross_entropy(lazy.materialise().view(-1, VOCAB), labels.view(-1))
    assert torch.equal(F.cross_entropy(lazy.view(-1, VOCAB), labels.view(-1)), expected)
    with pytest.raises(OffloadError, match="changed in place"):
        lazy.cross_entropy(labels)
    flat = lazy_of(hidden.view(-1, WIDTH), head)
    flat.detach_().zero_()
    assert F.cross_entropy(flat, labels.view(-1)).item() == pytest.approx(math.log(VOCAB))


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_cross_entropy_of_torch_is_chunked(hidden, head, labels, reduction):
    lazy, real = lazy_of(hidden, head), head(hidden)
    targets = labels[..., 1:].reshape(-1)
    results = []
    for logits in (lazy, real):
        shifted = logits[..., :-1, :].contiguous().view(-1, logits.size(-1))
        loss = nn.CrossEntropyLoss(reduction=reduction, label_smoothing=0.1)(shifted, targets)
        results.append((loss, torch.autograd.grad(loss.sum(), [hidden, head.weight, head.bias])))
        if logits is lazy:
            assert not lazy.computed
            assert not shifted.computed
    torch.testing.assert_close(*results, rtol=0, atol=1e-12)


def test_cross_entropy_of_wrong_targets_fails_as_torchs(hidden, head):
    with pytest.raises(ValueError, match="batch_size"):
        F.cross_entropy(lazy_of(hidden, head).view(-1, VOCAB), torch.zeros(3, dtype=torch.int64))


def test_options_of_the_chunked_loss(hidden, head, labels):
    expected = F.cross_entropy(head(hidden)[:, :-1].reshape(-1, VOCAB), labels[:, 1:].reshape(-1))
    loss = lazy_of(hidden, head).cross_entropy(labels, shift=True, chunk_tokens=1)
    torch.testing.assert_close(loss, expected, rtol=0, atol=1e-12)


def test_logits_read_without_gradients_can_be_used_with_gradients_later(hidden, head):
    lazy = lazy_of(hidden, head)
    with torch.no_grad():
        assert not lazy[:, -1].requires_grad
        assert not lazy.float().requires_grad
        assert not lazy.argmax(-1).requires_grad
    with torch.inference_mode():
        lazy.max()
    (gradient,) = torch.autograd.grad((lazy * torch.ones(VOCAB)).sum(), hidden)
    assert gradient.any()


def test_autocast_is_that_of_the_forward(labels):
    torch.manual_seed(0)
    head, hidden = nn.Linear(WIDTH, VOCAB), torch.randn(BATCH, TOKENS, WIDTH)
    with torch.autocast("cpu", torch.bfloat16):
        lazy, other, real = lazy_of(hidden, head), lazy_of(hidden, head), head(hidden)
    assert lazy.dtype == real.dtype == torch.bfloat16
    loss = lazy.float().cross_entropy(labels)
    expected = F.cross_entropy(real.float().view(-1, VOCAB), labels.view(-1))
    torch.testing.assert_close(loss, expected, rtol=1e-6, atol=1e-6)
    with torch.autocast("cpu", torch.float16):
        assert torch.equal(lazy.materialise(), real)
    outside = lazy_of(hidden, head)
    with torch.autocast("cpu", torch.bfloat16):
        inside = outside.cross_entropy(labels)
        assert outside.materialise().dtype == torch.float32
    assert torch.equal(inside, lazy_of(hidden, head).cross_entropy(labels))
    assert F.cross_entropy(other.view(-1, VOCAB), labels.view(-1)).dtype == torch.bfloat16


def test_another_device_is_where_logits_and_loss_go(hidden, head, labels):
    lazy = lazy_of(hidden, head).to("meta")
    assert isinstance(lazy, LazyLogits)
    assert lazy.device.type == "meta"
    assert lazy.cross_entropy(labels).device.type == "meta"
    assert lazy.argmax(-1).device.type == "meta"


@pytest.mark.parametrize("which", ["weight", "hidden"])
@pytest.mark.parametrize("use", ["argmax", "detach"])
def test_logits_of_changed_tensors_are_refused(hidden, head, labels, which, use):
    lazy = lazy_of(hidden, head)
    with torch.no_grad():
        (head.weight if which == "weight" else hidden).add_(1)
    with pytest.raises(OffloadError, match=r"changed in place since\. Read logits before"):
        getattr(lazy, use)()
    with pytest.raises(OffloadError, match="changed in place"):
        lazy.cross_entropy(labels)


def test_logits_of_a_freed_weight_are_refused(hidden, head):
    lazy = lazy_of(hidden, head)
    head.weight.untyped_storage().resize_(0)  # as FSDP2 does
    with pytest.raises(OffloadError, match="was freed since"):
        lazy.argmax(-1)


def test_large_logits_warn_once_and_name_the_caller(hidden, head, monkeypatch):
    monkeypatch.setattr(lazy_logits, "LARGE_BYTES", 1)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(2):
            F.softmax(lazy_of(hidden, head), -1)
    assert len(caught) == 1
    assert caught[0].filename == __file__
    assert f"{__file__}:{caught[0].lineno} uses the logits" in str(caught[0].message)
    assert f"{BATCH * TOKENS * VOCAB * 8:,} bytes" in str(caught[0].message)


def test_small_logits_do_not_warn(hidden, head):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        lazy_of(hidden, head).argmax(-1)


def test_it_is_one_leaf_and_looking_at_it_computes_nothing(hidden, head):
    lazy = lazy_of(hidden, head)
    assert pytree.tree_leaves({"a": [lazy, 1]}) == [lazy, 1]
    assert not isinstance(lazy, torch.Tensor)
    assert not any(hasattr(lazy, name) for name in ("_hf_hook", "keys", "items", "__fspath__"))
    assert hasattr(lazy, "dtype")
    assert "not computed" in repr(lazy)
    assert lazy in {lazy}
    assert [row.shape for row in lazy] == [(TOKENS, VOCAB)] * BATCH
    assert copy.copy(lazy).shape == lazy.shape
    assert not lazy.computed


def test_copies_and_pickles_are_real_logits(hidden, head):
    real = head(hidden).detach()
    for make in (copy.deepcopy, lambda lazy: pickle.loads(pickle.dumps(lazy))):
        made = make(lazy_of(hidden, head).detach())
        assert type(made) is torch.Tensor
        assert torch.equal(made, real)
    with pytest.raises(RuntimeError, match="deepcopy"):  # as real logits with a graph
        copy.deepcopy(lazy_of(hidden, head))


def test_values_of_single_logits(hidden, head):
    lazy = lazy_of(hidden, head)[0, 0].detach()
    real = head(hidden)[0, 0].detach()
    assert float(lazy[..., 1]) == pytest.approx(float(real[1]), abs=1e-12)
    assert lazy.tolist() == pytest.approx(real.tolist(), abs=1e-12)
    assert bool((lazy != 0).all())
    with pytest.raises(AttributeError, match="no attribute 'nonsense'"):
        lazy.nonsense
