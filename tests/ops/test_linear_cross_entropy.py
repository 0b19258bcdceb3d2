"""The chunked loss against the plain one: values, gradients, memory, and what it must not touch."""

import weakref

import pytest
import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from offload.ops import linear_cross_entropy as op
from offload.ops.linear_cross_entropy import linear_cross_entropy
from offload.ops.reference_loss import reference_linear_cross_entropy

TOKENS, WIDTH, VOCAB = 63, 16, 1000
OPTIONS = [
    {},
    {"label_smoothing": 0.1},
    {"softcap": 3.0},
    {"logit_scale": 0.3},
    {"z_loss": 0.01},
    {"ignore_index": 7},
    {"shift": True},
    {"label_smoothing": 0.2, "softcap": 3.0, "logit_scale": 1.7, "z_loss": 0.1, "shift": True},
]
OPTION_IDS = ["-".join(options) or "plain" for options in OPTIONS]


def inputs(dtype=torch.float64, shape=(3, 21), vocab=VOCAB, width=WIDTH, ignored=9):
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(*shape, width, dtype=torch.float64, generator=generator)
    weight = torch.randn(vocab, width, dtype=torch.float64, generator=generator)
    bias = torch.randn(vocab, dtype=torch.float64, generator=generator)
    labels = torch.randint(vocab, shape, generator=generator)
    labels.view(-1)[4 : 4 + ignored] = -100
    leaves = (tensor.to(dtype).requires_grad_() for tensor in (hidden, weight, bias))
    return *leaves, labels


def loss_and_gradients(function, tensors, labels, upstream_seed=None, **options):
    hidden, weight, bias = tensors
    loss = function(hidden, weight, labels, bias=bias, **options)
    upstream = torch.ones_like(loss)
    if upstream_seed is not None:
        generator = torch.Generator().manual_seed(upstream_seed)
        upstream = torch.randn(loss.shape, generator=generator).to(loss)
    wanted = [tensor for tensor in tensors if tensor is not None and tensor.requires_grad]
    return loss.detach(), torch.autograd.grad(loss, wanted, upstream)


def assert_equal_to_reference(tensors, labels, tolerance=1e-12, upstream_seed=3, **options):
    loss, grads = loss_and_gradients(
        linear_cross_entropy, tensors, labels, upstream_seed, **options
    )
    options.pop("chunk_tokens", None)
    expected, expected_grads = loss_and_gradients(
        reference_linear_cross_entropy, tensors, labels, upstream_seed, **options
    )
    torch.testing.assert_close(loss, expected, rtol=0, atol=tolerance * 10)
    for grad, expected_grad in zip(grads, expected_grads, strict=True):
        torch.testing.assert_close(grad, expected_grad, rtol=0, atol=tolerance)


@pytest.mark.parametrize("chunk_tokens", [1, 7, None])
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("options", OPTIONS, ids=OPTION_IDS)
def test_loss_and_gradients_equal_the_reference(options, reduction, chunk_tokens):
    *tensors, labels = inputs()
    labels = labels.clamp(min=7) if options.get("ignore_index") == 7 else labels
    assert_equal_to_reference(
        tensors, labels, reduction=reduction, chunk_tokens=chunk_tokens, **options
    )


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_reference_and_chunked_loss_equal_torch(reduction, smoothing):
    hidden, weight, bias, labels = inputs()
    expected = F.cross_entropy(
        F.linear(hidden, weight, bias).view(-1, VOCAB),
        labels.view(-1),
        reduction=reduction,
        label_smoothing=smoothing,
    )
    for function in (reference_linear_cross_entropy, linear_cross_entropy):
        loss = function(
            hidden, weight, labels, bias=bias, reduction=reduction, label_smoothing=smoothing
        )
        torch.testing.assert_close(loss.view(expected.shape), expected, rtol=1e-13, atol=1e-13)


def test_gradcheck():
    hidden, weight, bias, labels = inputs(shape=(5,), vocab=6, width=3, ignored=1)
    options = {"softcap": 2.0, "label_smoothing": 0.1, "z_loss": 0.1, "logit_scale": 0.5}
    for reduction in ("mean", "none"):
        assert torch.autograd.gradcheck(
            lambda *leaves, reduction=reduction: linear_cross_entropy(
                *leaves[:2],
                labels,
                bias=leaves[2],
                reduction=reduction,
                chunk_tokens=2,
                **options,
            ),
            (hidden, weight, bias),
        )


def test_second_order_is_refused():
    hidden, weight, _, labels = inputs()
    loss = linear_cross_entropy(hidden, weight, labels)
    with pytest.raises(NotImplementedError, match="got create_graph=True"):
        torch.autograd.grad(loss, hidden, create_graph=True)


@pytest.mark.parametrize("items", [17, torch.tensor(17), torch.tensor(17.0)])
def test_num_items_in_batch_divides_the_sum(items):
    *tensors, labels = inputs()
    assert_equal_to_reference(tensors, labels, num_items_in_batch=items)


def test_accumulated_steps_equal_one_big_batch():
    hidden, weight, bias, _ = inputs(shape=(4, 40))
    labels = torch.full((4, 40), -100)
    for row, count in enumerate((3, 17, 0, 40)):
        labels[row, :count] = row
    whole = linear_cross_entropy(hidden, weight, labels, bias=bias)
    expected = torch.autograd.grad(whole, weight)[0]
    total = (labels != -100).sum()
    for row in range(4):
        linear_cross_entropy(
            hidden[row], weight, labels[row], bias=bias, num_items_in_batch=total
        ).backward()
    torch.testing.assert_close(weight.grad, expected, rtol=0, atol=1e-13)


@pytest.mark.parametrize("options", [{}, {"num_items_in_batch": 0}, {"reduction": "sum"}])
def test_all_labels_ignored_gives_zero_and_zero_gradients(options):
    *tensors, labels = inputs()
    loss, grads = loss_and_gradients(
        linear_cross_entropy, tensors, torch.full_like(labels, -100), **options
    )
    assert loss.item() == 0
    assert all(not grad.any() for grad in grads)


def test_a_chunk_without_targets_adds_nothing():
    *tensors, labels = inputs(ignored=30)
    assert_equal_to_reference(tensors, labels, chunk_tokens=7, z_loss=0.1)


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("options", [OPTIONS[0], OPTIONS[-1]], ids=["plain", "all"])
def test_ignored_tokens_count_nothing_where_they_are_computed(monkeypatch, options, reduction):
    """As on a device, where leaving them out would block."""
    rows = [slice(start, start + 7) for start in range(0, TOKENS, 7)]
    monkeypatch.setattr(op, "_chunks_of", lambda valid, chunk_tokens: rows)
    *tensors, labels = inputs(ignored=30)
    assert_equal_to_reference(tensors, labels, reduction=reduction, **options)


@pytest.mark.parametrize("vocab", [1, 97, 1009])
def test_peaked_logits_of_any_vocabulary(vocab):
    hidden, weight, bias, labels = inputs(vocab=vocab)
    bias = (bias.detach() - 500).requires_grad_()
    assert_equal_to_reference([hidden, weight, bias], labels, 1e-11, chunk_tokens=8)


def test_unweighted_and_ignored_tokens_of_a_weighted_loss():
    hidden, weight, _, labels = inputs()
    labels.view(-1)[0] = -100
    factors = torch.tensor([0, 1, 2, 0.5] * 16, dtype=torch.float64)[:TOKENS].view(3, 21)
    grads = [
        torch.autograd.grad((function(hidden, weight, labels, reduction="none") * factors).sum(), w)
        for function in (linear_cross_entropy, reference_linear_cross_entropy)
        for w in [(hidden, weight)]
    ]
    for ours, expected in zip(*grads, strict=True):
        torch.testing.assert_close(ours, expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_two_backwards_with_different_upstream_gradients(reduction):
    *tensors, labels = inputs()
    hidden, weight, bias = tensors
    loss = linear_cross_entropy(hidden, weight, labels, bias=bias, reduction=reduction)
    first = torch.autograd.grad(loss, tensors, torch.ones_like(loss), retain_graph=True)
    kept = [gradient.clone() for gradient in first]
    second = torch.autograd.grad(loss, tensors, torch.full_like(loss, 3.0), retain_graph=True)
    third = torch.autograd.grad(loss, tensors, torch.ones_like(loss))
    for before, now, tripled, again in zip(kept, first, second, third, strict=True):
        assert torch.equal(before, now)
        assert torch.equal(before, again)
        torch.testing.assert_close(tripled, 3 * before, rtol=0, atol=1e-13)


def test_gradients_add_to_those_already_there():
    hidden, weight, bias, labels = inputs()
    weight.grad = torch.ones_like(weight)
    filled = weight.grad
    loss = linear_cross_entropy(hidden, weight, labels, bias=bias)
    (expected,) = torch.autograd.grad(loss, weight, retain_graph=True)
    loss.backward()
    assert weight.grad is filled
    torch.testing.assert_close(weight.grad, 1 + expected, rtol=0, atol=1e-14)


@pytest.mark.parametrize("reduction", ["mean", "none"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_arguments_are_not_written(dtype, reduction):
    hidden, weight, bias, labels = arguments = inputs(dtype)
    copies = [(tensor.detach().clone(), tensor._version) for tensor in arguments]
    options = {"softcap": 3.0, "logit_scale": 2.0, "label_smoothing": 0.1, "shift": True}
    loss = linear_cross_entropy(hidden, weight, labels, bias=bias, reduction=reduction, **options)
    loss.sum().backward()
    for tensor, (values, version) in zip(arguments, copies, strict=True):
        assert torch.equal(tensor.detach(), values)
        assert tensor._version == version


@pytest.mark.parametrize("reduction", ["mean", "none"])
@pytest.mark.parametrize("trained", ["hidden", "weight", "bias", "none"])
def test_only_needed_gradients_are_computed(trained, reduction):
    *tensors, labels = inputs()
    for name, tensor in zip(("hidden", "weight", "bias"), tensors, strict=True):
        tensor.requires_grad_(name == trained)
    with Allocations() as allocations:
        loss = linear_cross_entropy(
            tensors[0], tensors[1], labels, bias=tensors[2], reduction=reduction, chunk_tokens=7
        )
        assert loss.requires_grad == (trained != "none")
        if trained != "none":
            loss.sum().backward()
    if trained != "weight":
        assert (VOCAB, WIDTH) not in allocations.shapes
    if trained != "hidden":
        assert (TOKENS, WIDTH) not in allocations.shapes
    if trained != "none":
        assert_equal_to_reference(tensors, labels, reduction=reduction)


@pytest.mark.parametrize("context", [torch.no_grad, torch.inference_mode])
def test_without_gradients_the_loss_is_the_same_and_no_gradient_is_made(context):
    hidden, weight, bias, labels = inputs()
    expected = reference_linear_cross_entropy(hidden, weight, labels, bias=bias).detach()
    with context(), Allocations() as allocations:
        loss = linear_cross_entropy(hidden, weight, labels, bias=bias, chunk_tokens=7)
    torch.testing.assert_close(loss, expected, rtol=1e-13, atol=0)
    assert not loss.requires_grad
    assert not {(VOCAB, WIDTH), (TOKENS, WIDTH)} & allocations.shapes


def test_non_contiguous_arguments():
    hidden, weight, bias, labels = inputs()
    tensors = [
        hidden.detach().transpose(0, 1).contiguous().transpose(0, 1).requires_grad_(),
        weight.detach().t().contiguous().t().requires_grad_(),
        bias,
    ]
    assert not tensors[0].is_contiguous()
    assert not tensors[1].is_contiguous()
    assert_equal_to_reference(tensors, labels.t().contiguous().t(), chunk_tokens=10)
    assert_equal_to_reference(tensors, labels, reduction="none", chunk_tokens=10)


@pytest.mark.parametrize("reduction", ["mean", "none"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_error_at_half_precision_is_at_most_twice_torchs(dtype, reduction):
    *tensors, labels = inputs(dtype, shape=(2, 20), vocab=257, width=8)
    exact = [tensor.detach().float().requires_grad_() for tensor in tensors]
    truth = loss_and_gradients(
        reference_linear_cross_entropy, exact, labels, 3, reduction=reduction
    )
    plain = loss_and_gradients(
        reference_linear_cross_entropy, tensors, labels, 3, reduction=reduction
    )
    ours = loss_and_gradients(
        linear_cross_entropy, tensors, labels, 3, reduction=reduction, chunk_tokens=7
    )
    assert ours[0].dtype == torch.float32
    assert [gradient.dtype for gradient in ours[1]] == [dtype] * 3
    for our, torchs, true in zip(
        (ours[0], *ours[1]), (plain[0], *plain[1]), (truth[0], *truth[1]), strict=True
    ):
        assert distance(our, true) <= 2 * distance(torchs, true) + 1e-6


def distance(tensor, truth):
    return ((tensor.double() - truth.double()).norm() / truth.double().norm()).item()


def test_weight_gradient_error_does_not_grow_with_the_number_of_chunks():
    *tensors, labels = inputs(torch.bfloat16, shape=(512,), vocab=64, width=8)
    exact = [tensor.detach().double().requires_grad_() for tensor in tensors]
    truth = loss_and_gradients(reference_linear_cross_entropy, exact, labels)[1][1]
    errors = [
        distance(
            loss_and_gradients(linear_cross_entropy, tensors, labels, chunk_tokens=chunk)[1][1],
            truth,
        )
        for chunk in (512, 32, 2)
    ]
    assert max(errors) <= 1.5 * errors[0]


def test_float16_gradients_survive_where_a_loss_scale_saves_them():
    """Divided by the number of tokens first, most of them would be 0 in float16."""
    hidden, weight, _, labels = inputs(torch.float16, shape=(256,), vocab=257, width=8)
    scale = 4096.0
    loss = linear_cross_entropy(hidden, weight, labels)
    (ours,) = torch.autograd.grad(loss * scale, hidden)
    exact = [tensor.detach().double().requires_grad_() for tensor in (hidden, weight)]
    (true,) = torch.autograd.grad(reference_linear_cross_entropy(*exact, labels) * scale, exact[0])
    assert distance(ours, true) < 2e-3


@pytest.mark.parametrize("reduction", ["mean", "none"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_autocast_is_that_of_linear_and_cross_entropy(dtype, reduction):
    *tensors, labels = inputs(dtype, shape=(2, 9), vocab=65, width=8)
    with torch.autocast("cpu", torch.bfloat16):
        expected, expected_grads = loss_and_gradients(
            reference_linear_cross_entropy, tensors, labels, reduction=reduction
        )
        loss, grads = loss_and_gradients(
            linear_cross_entropy, tensors, labels, reduction=reduction, chunk_tokens=5
        )
    assert loss.dtype == expected.dtype
    torch.testing.assert_close(loss, expected, rtol=1e-6, atol=1e-6)
    for grad, expected_grad, tensor in zip(grads, expected_grads, tensors, strict=True):
        assert grad.dtype == tensor.dtype
        assert distance(grad, expected_grad) < (1e-12 if dtype == torch.float64 else 1e-2)


class Allocations(TorchDispatchMode):
    """Notes shapes and bytes of what operations return, and how much of the large is alive."""

    def __init__(self, large=1 << 62):
        super().__init__()
        self.shapes, self.largest = set(), 0
        self.large, self.alive, self.most_alive = large, [], 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        if func._schema.name.split("::")[1] in VIEWS:
            return result
        for tensor in result if isinstance(result, (tuple, list)) else (result,):
            if isinstance(tensor, torch.Tensor):
                self.shapes.add(tuple(tensor.shape))
                self.largest = max(self.largest, tensor.nbytes)
                if tensor.nbytes >= self.large:
                    self.alive.append(weakref.ref(tensor))
        tensors = [tensor for ref in self.alive if (tensor := ref()) is not None]
        living = {tensor.data_ptr(): tensor.nbytes for tensor in tensors}
        self.most_alive = max(self.most_alive, sum(living.values()))
        return result


VIEWS = {"view", "reshape", "to", "t", "_unsafe_view", "detach", "slice", "split", "unsqueeze"}


@pytest.mark.parametrize("reduction", ["mean", "none"])
@pytest.mark.parametrize(("options", "chunks"), [(OPTIONS[0], 1), (OPTIONS[-1], 2)])
def test_no_tensor_of_tokens_times_vocabulary_exists(options, chunks, reduction):
    hidden, weight, bias, labels = inputs(torch.float32, shape=(4, 64), vocab=1024)
    with Allocations(32 * 1024 * 4) as allocations:
        linear_cross_entropy(
            hidden, weight, labels, bias=bias, reduction=reduction, chunk_tokens=32, **options
        ).sum().backward()
    assert allocations.largest == 32 * 1024 * 4  # one chunk
    assert allocations.most_alive == chunks * 32 * 1024 * 4


def test_only_the_gradients_are_saved_and_hidden_is_not():
    hidden, weight, bias, labels = inputs(torch.float32)
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        loss = linear_cross_entropy(hidden, weight, labels, bias=bias)
    assert sorted(tuple(tensor.shape) for tensor in saved) == sorted(
        [(TOKENS, WIDTH), (VOCAB, WIDTH), (VOCAB,), ()]
    )
    assert all(tensor.data_ptr() != hidden.data_ptr() for tensor in saved)
    loss.backward()


def test_default_chunk_is_about_128_mib():
    weight = torch.empty(49_152, 576, device="meta", requires_grad=True)
    hidden = torch.empty(1, 5000, 576, device="meta", requires_grad=True)
    labels = torch.zeros(1, 5000, dtype=torch.int64, device="meta")
    with Allocations() as allocations:
        loss = linear_cross_entropy(hidden, weight, labels, shift=True)
        loss.backward()
    assert loss.shape == ()
    assert (682, 49_152) in allocations.shapes
    assert allocations.largest <= 128 << 20
    assert weight.grad.shape == weight.shape
    none = linear_cross_entropy(hidden, weight, labels, reduction="none")
    assert none.shape == (1, 5000)


def test_no_tokens_at_all():
    hidden, weight, _, _ = inputs()
    loss = linear_cross_entropy(hidden[:0], weight, torch.empty(0, 21, dtype=torch.int64))
    loss.backward()
    assert loss.item() == 0
    assert not weight.grad.any()


@pytest.mark.parametrize("label", [VOCAB, -1])
def test_a_label_outside_the_vocabulary_is_named(label):
    hidden, weight, _, labels = inputs()
    labels[1, 1] = label
    with pytest.raises(IndexError, match=f"labels from 0 to 999 or -100, got {label}"):
        linear_cross_entropy(hidden, weight, labels)


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"reduction": "avg"}, ValueError, "another reduction, got 'avg'"),
        ({"chunk_tokens": 0}, ValueError, "another chunk_tokens, got 0"),
        ({"softcap": -1.0}, ValueError, "another softcap"),
        ({"label_smoothing": 2.0}, ValueError, "another label_smoothing"),
        ({"reduction": "none", "num_items_in_batch": 3}, ValueError, "num_items_in_batch"),
        ({"labels": torch.zeros(3, 20, dtype=torch.int64)}, ValueError, "one label a hidden"),
        ({"labels": torch.zeros(3, 21, dtype=torch.int32)}, TypeError, "int64"),
        ({"weight": torch.zeros(VOCAB, 15, dtype=torch.float64)}, ValueError, "weight .V, E."),
        ({"weight": torch.zeros(VOCAB, WIDTH)}, TypeError, "one floating-point dtype"),
        ({"bias": torch.zeros(3, dtype=torch.float64)}, ValueError, "bias .V."),
        ({"labels": torch.zeros(3, 21, dtype=torch.int64, device="meta")}, ValueError, "device"),
    ],
)
def test_wrong_arguments_are_named(change, error, message):
    hidden, weight, _, labels = inputs()
    arguments = {"weight": weight, "labels": labels, **change}
    with pytest.raises(error, match=message):
        linear_cross_entropy(hidden, **arguments)


@pytest.mark.needs_cuda
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_cuda_error_is_at_most_twice_torchs(dtype, reduction):
    *tensors, labels = inputs(dtype, shape=(2, 500), vocab=5003, width=64)
    tensors = [tensor.detach().cuda().requires_grad_() for tensor in tensors]
    labels = labels.cuda()
    exact = [tensor.detach().double().requires_grad_() for tensor in tensors]
    results = [
        loss_and_gradients(function, leaves, labels, reduction=reduction)
        for function, leaves in (
            (reference_linear_cross_entropy, exact),
            (reference_linear_cross_entropy, tensors),
            (linear_cross_entropy, tensors),
        )
    ]
    true, plain, ours = ((loss, *grads) for loss, grads in results)
    for our, torchs, truth in zip(ours, plain, true, strict=True):
        assert distance(our, truth) <= 2 * distance(torchs, truth) + 1e-6


@pytest.mark.needs_cuda
def test_cuda_is_not_waited_for():
    hidden, weight, bias, labels = (
        tensor.detach().cuda() for tensor in inputs(torch.bfloat16, shape=(2, 50))
    )
    weight.requires_grad_()
    items = torch.tensor(17, device="cuda")
    torch.cuda.set_sync_debug_mode("error")
    try:
        for options in ({}, {"num_items_in_batch": items, "shift": True}, {"reduction": "none"}):
            linear_cross_entropy(hidden, weight, labels, bias=bias, **options).sum().backward()
    finally:
        torch.cuda.set_sync_debug_mode("default")
