"""The Triton kernels against the plain formula: on a card, or on the CPU by the interpreter."""

import itertools
import types

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from offload.ops.attention import attention
from offload.ops.intervals import causal_intervals, causal_pattern
from offload.ops.key_blocks import KeyBlock
from offload.ops.tile_attention import attend, attend_backward
from tests.ops.attention_cases import (
    LAYOUTS,
    MASKS,
    cut,
    head_dim_first,
    masks,
    tensors,
    through_blocks,
    tokens_first,
    truth,
    within_something_larger,
)

backend = pytest.importorskip("offload.ops.fused.backend")
precision_of = pytest.importorskip("offload.ops.fused.operators").precision_of
DEVICE = "cpu" if backend.INTERPRETED else "cuda"
DTYPES = [torch.float32, torch.float16] + ([] if backend.INTERPRETED else [torch.bfloat16])
TOLERANCES = {torch.float32: 1e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}
pytestmark = pytest.mark.skipif(
    not backend.INTERPRETED and not torch.cuda.is_available(), reason="needs a card or interpreter"
)


def exact(q, k, v, d_out, intervals, *, softmax_scale=None, softcap=0.0):
    """out, lse, dq, dk, dv of the formula in float64."""
    leaves = [x.double().requires_grad_() for x in (q, k, v)]
    out, lse = truth(*leaves, intervals, scale=softmax_scale, softcap=softcap)
    grads = torch.autograd.grad(out, leaves, d_out.double(), allow_unused=True)
    grads = [torch.zeros_like(x) if g is None else g for g, x in zip(grads, leaves, strict=True)]
    return [out.detach(), lse.detach(), *grads]


def assert_right(actual, expected, dtype, tolerance=None):
    tolerance = TOLERANCES[dtype] if tolerance is None else tolerance
    for name, a, e in zip(("out", "lse", "dq", "dk", "dv"), actual, expected, strict=True):
        a = a.double().cpu()
        assert torch.equal(a.isinf(), e.isinf()), name
        scale = max(1.0, e[e.isfinite()].abs().max().item()) if e.isfinite().any() else 1.0
        difference = (a - e)[e.isfinite()].abs().max().item() if e.isfinite().any() else 0.0
        assert difference <= tolerance * scale, f"{name}: {difference:.1e}"


def check(case, intervals, *sizes, dtype=torch.float32, tolerance=None, **options):
    case = [x.to(dtype) for x in case]
    expected = exact(*case, intervals, **options)
    on_device = [x.to(DEVICE) for x in case]
    actual = through_blocks(*on_device, intervals, *sizes, backend="triton", **options)
    assert actual[0].dtype == actual[2].dtype == dtype
    assert actual[1].dtype == torch.float32
    assert_right(actual, expected, dtype, tolerance)


@pytest.mark.parametrize("mask", MASKS)
def test_every_mask_over_several_key_blocks(mask):
    check(tensors(heads=2, kv_heads=1), masks(63, 100)[mask], 30, 34)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("head_dim", [32, 64, 80, 96, 128, 256])
def test_head_dims_and_dtypes(dtype, head_dim):
    case = tensors(batch=1, heads=2, kv_heads=1, rows=33, keys=70, head_dim=head_dim)
    check(case, causal_intervals(37, 33), 37, dtype=dtype)


@pytest.mark.parametrize(("heads", "kv_heads"), [(1, 1), (6, 2), (4, 4), (8, 1)])
def test_heads_that_share_keys(heads, kv_heads):
    case = tensors(batch=1, heads=heads, kv_heads=kv_heads, rows=17, keys=40)
    check(case, masks(17, 40)["left padding"][1:], 23)


@pytest.mark.parametrize("mask", ["causal", "packed documents", "window"])
def test_softcap_and_scale(mask):
    check(tensors(heads=2), masks(63, 100)[mask], 50, softcap=1.5, softmax_scale=0.4)


@pytest.mark.parametrize("softcap", [0.05, 4.0, 50.0, 1e3, 1e5])
def test_a_softcap_is_exact_however_far_away_it_is(softcap):
    case = tensors(batch=1, heads=1, kv_heads=1, rows=9, keys=40)
    check(case, causal_intervals(31, 9), softcap=softcap, tolerance=2e-6)


def test_a_head_dim_of_one_with_any_last_stride():
    q, k, v, d_out = tensors(batch=1, heads=2, rows=5, keys=9, head_dim=1)
    check(
        [head_dim_first(x) for x in (q, k, v)] + [d_out[:1].expand_as(d_out)],
        causal_intervals(4, 5),
    )


def test_more_rows_than_a_program_of_keys_looks_at_at_once():
    case = tensors(batch=1, heads=1, kv_heads=1, rows=530, keys=40)
    bounds = torch.zeros(1, 530, 2, dtype=torch.int64)
    bounds[:, 250:270], bounds[:, 505:525] = torch.tensor([[3, 37]]), torch.tensor([[0, 40]])
    check(case, bounds)


def test_bounds_beyond_32_bits():
    case = tensors(batch=1, heads=1, kv_heads=1, rows=9, keys=40)
    bounds = torch.tensor([0, 2**32]).repeat(1, 9, 1)
    bounds[0, 3] = torch.tensor([2**32, 2**33])  # sees nothing
    bounds[0, 4] = torch.tensor([-(2**32), 7])
    bounds[0, 5] = torch.tensor([torch.iinfo(torch.int64).min, torch.iinfo(torch.int64).max])
    check_wide(case, bounds)


@pytest.mark.parametrize("end", [2**30 - 1, 2**30, 2**31, 2**31 + 100, 2**63 - 1])
@pytest.mark.parametrize("rows", [1, 4])
def test_rows_that_see_all_keys_by_a_bound_that_is_out_of_reach(rows, end):
    case = tensors(batch=1, heads=1, kv_heads=1, rows=rows, keys=24)
    check_wide(case, torch.tensor([0, end]).repeat(1, rows, 1))
    if end < 2**62:  # as a causal tile far behind the keys
        check_wide(case, causal_intervals(end, rows))


def check_wide(case, bounds):
    keys = case[1].shape[2]
    expected = exact(*case, bounds.clamp(0, keys))
    actual = through_blocks(
        *(x.float().to(DEVICE) for x in case), bounds, keys // 2, backend="triton"
    )
    assert_right(actual, expected, torch.float32)


@pytest.mark.parametrize("form", ["causal", "read"])
def test_keys_that_no_row_of_a_program_sees_are_not_read(form):
    sizes = {"batch": 1, "heads": 1, "kv_heads": 1, "rows": 480, "keys": 480}
    case = tensors(**sizes, dtype=torch.float32)
    bounds = causal_intervals(0, 480, window_size=5)
    if form == "read":
        bounds[0, 305, 0] += 1
    expected = exact(*case, bounds)
    for x in case[1:3]:
        x[:, :, 200:260] = torch.nan
    actual = through_blocks(*(x.to(DEVICE) for x in case), bounds, backend="triton")
    for part in (slice(128), slice(384, None)):  # the widest programs take 128 rows or keys
        assert_right(*([x[:, :, part] for x in y] for y in (actual, expected)), torch.float32)


@pytest.mark.parametrize("form", ["causal", "read"])
def test_rows_that_see_no_key_of_a_program_are_not_read(form):
    sizes = {"batch": 1, "heads": 1, "kv_heads": 1, "rows": 480, "keys": 480}
    q, k, v, d_out = tensors(**sizes, dtype=torch.float32)
    bounds = causal_intervals(0, 480, window_size=5)
    if form == "read":
        bounds[0, 305, 0] += 1
    block = KeyBlock(*(x[:, :, 300:309].to(DEVICE) for x in (k, v)), 300)
    expected = exact(q, k, v, d_out, bounds)
    out, lse = (x.float().to(DEVICE) for x in expected[:2])
    for x in (q, d_out):
        x[:, :, :300] = x[:, :, 313:] = torch.nan
    q, d_out = (x.to(DEVICE) for x in (q, d_out))
    attend_backward(d_out, q, [block], out, lse, bounds, backend="triton")
    of_keys = [x[:, :, 300:309] for x in expected[3:]]
    for a, e in zip((block.dk, block.dv), of_keys, strict=True):
        torch.testing.assert_close(a.double().cpu(), e, rtol=0, atol=1e-5)


@pytest.mark.parametrize(("mask", "computed"), [("causal", True), ("window", True), ("all", False)])
def test_bounds_of_causal_tiles_are_computed_not_read(monkeypatch, mask, computed):
    read = []
    for name in ("forward", "backward_keys", "backward_queries"):
        function, index = getattr(backend, name), 3 if name == "forward" else 6

        def launch(*arguments, function=function, index=index):
            read.append(arguments[index])
            function(*arguments)

        monkeypatch.setattr(backend, name, launch)
    case = (x.float().to(DEVICE) for x in tensors(batch=1, rows=9, keys=20))
    through_blocks(*case, masks(9, 20)[mask], backend="triton")
    assert [x is None for x in read] == [computed] * 3


@pytest.mark.parametrize("change", [tokens_first, within_something_larger])
def test_the_layouts_of_transformers_are_not_copied(monkeypatch, change):
    q, k, v, d_out = (change(x.float()).to(DEVICE) for x in tensors(batch=2, rows=20, keys=20))
    read = {"forward": set(), "backward_keys": set(), "backward_queries": set()}

    def reading(function, addresses):
        def launch(*arguments):
            addresses.update(x.data_ptr() for x in arguments if isinstance(x, torch.Tensor))
            function(*arguments)

        return launch

    for name, addresses in read.items():
        monkeypatch.setattr(backend, name, reading(getattr(backend, name), addresses))
    through_blocks(q, k, v, d_out, causal_intervals(0, 20), backend="triton")
    given = {x.data_ptr() for x in (q, k, v)}
    assert given <= read["forward"]
    assert given | {d_out.data_ptr()} <= read["backward_keys"] & read["backward_queries"]


@pytest.mark.parametrize(
    ("setting", "value", "expected"),
    [
        ("fp32_precision", "none", "ieee"),
        ("fp32_precision", "tf32", "tf32"),
        ("allow_tf32", True, "tf32"),
        ("allow_tf32", False, "ieee"),
    ],
)
def test_tf32_is_used_only_where_torch_was_told_so(setting, value, expected):
    matmul = torch.backends.cuda.matmul
    before = matmul.fp32_precision
    try:
        setattr(matmul, setting, value)
        assert precision_of(torch.float32) == expected
        assert precision_of(torch.float16) == "ieee"
    finally:
        matmul.fp32_precision = before


@pytest.mark.parametrize("change", LAYOUTS)
def test_layouts_are_read_where_they_lie(change):
    case = tensors(batch=2, rows=20, keys=45)
    check([change(x) for x in case], causal_intervals(25, 20), 25)


@settings(max_examples=12, deadline=None)
@given(
    rows=st.integers(1, 40),
    past=st.integers(0, 50),
    cuts=st.lists(st.integers(1, 80), max_size=4),
    group=st.sampled_from([1, 2, 3]),
    head_dim=st.sampled_from([16, 24, 64]),
    softcap=st.sampled_from([0.0, 2.0]),
    dtype=st.sampled_from([torch.float32, torch.float16]),
    seed=st.integers(0, 1000),
)
def test_any_intervals_and_any_split_of_the_keys(
    rows, past, cuts, group, head_dim, softcap, dtype, seed
):
    keys = rows + past
    generator = torch.Generator().manual_seed(seed)
    bounds = torch.randint(0, keys + 1, (1, rows, 2), generator=generator)
    case = tensors(batch=1, heads=2 * group, kv_heads=2, rows=rows, keys=keys, head_dim=head_dim)
    ends = sorted({min(c, keys) for c in cuts} - {keys})
    sizes = [b - a for a, b in itertools.pairwise([0, *ends])]
    check(case, bounds, *sizes, dtype=dtype, softcap=softcap)


def test_a_carry_is_continued_and_left_alone():
    q, k, v, _ = (x.float().to(DEVICE) for x in tensors())
    intervals = masks(63, 100)["left padding"]
    first, second = cut(k, v, 60)
    options = {"backend": "triton"}
    whole = attend(q, [first, second], intervals, **options)
    carry = attend(q, [first], intervals, out_dtype=torch.float32, **options)
    kept = [x.clone() for x in carry]
    continued = attend(q, [second], intervals, carry=carry, **options)
    for a, b in zip(whole, continued, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-6)
    assert all(torch.equal(a, b) for a, b in zip(carry, kept, strict=True))


def test_gradients_of_keys_are_added_to_what_is_there():
    q, k, v, d_out = (x.float().to(DEVICE) for x in tensors())
    intervals = masks(63, 100)["causal"]
    blocks = cut(k, v, 60)
    out, lse = attend(q, blocks, intervals, backend="triton")
    once = attend_backward(d_out, q, blocks, out, lse, intervals, backend="triton")
    sums = [(block.dk.clone(), block.dv.clone()) for block in blocks]
    twice = attend_backward(d_out, q, blocks, out, lse, intervals, backend="triton")
    assert torch.equal(once, twice)
    for block, (dk, dv) in zip(blocks, sums, strict=True):
        torch.testing.assert_close(block.dk, 2 * dk)
        torch.testing.assert_close(block.dv, 2 * dv)


@pytest.mark.parametrize("dtype", DTYPES[1:])
def test_between_key_blocks_nothing_is_rounded(dtype):
    q, k, v, d_out = (torch.zeros(1, 1, n, 16, dtype=dtype, device=DEVICE) for n in (1, 9, 9, 1))
    v[:, :, 0] = torch.linspace(1, 2, 16)
    large = 2 / torch.finfo(dtype).eps  # large + 1 is large
    k[..., 0], k[:, :, 0, 0] = 1, large
    blocks, bounds = cut(k, v, *[1] * 8), torch.tensor([[[0, 9]]])
    out, _ = attend(q, blocks, bounds, backend="triton")
    torch.testing.assert_close(
        out.double(), v[:, :, :1].double() / 9, rtol=0.51 * torch.finfo(dtype).eps, atol=0
    )
    d_out[..., 0], v[..., 0] = 1, 1
    nothing = torch.zeros_like(d_out), torch.zeros(1, 1, 1, device=DEVICE)  # each weight is 1
    options = {"softmax_scale": 1.0, "backend": "triton"}
    dq = attend_backward(d_out, q, blocks, *nothing, bounds, **options)
    assert dq[0, 0, 0, 0] == large + 8


def test_a_result_over_no_key_is_a_copy_of_the_carry():
    q, k, v, d_out = (x.float().to(DEVICE) for x in tensors(rows=5, keys=9))
    carry = d_out, torch.zeros(d_out.shape[:3], device=DEVICE)
    unseen = torch.zeros(1, 5, 2, dtype=torch.int64)
    result = attend(q, cut(k, v), unseen, carry=carry, backend="triton")
    for a, b in zip(result, carry, strict=True):
        assert torch.equal(a, b)
        assert a.data_ptr() != b.data_ptr()


def test_two_runs_are_equal_bit_for_bit():
    case = [x.float().to(DEVICE) for x in tensors()]
    runs = [through_blocks(*case, masks(63, 100)["window"], 41, backend="triton") for _ in range(2)]
    assert all(torch.equal(a, b) for a, b in zip(*runs, strict=True))


def test_attention_of_a_whole_sequence_under_autograd():
    q, k, v, d_out = (x.float().to(DEVICE) for x in tensors(rows=50, keys=50, batch=1))
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    out = attention(*leaves, backend="triton")
    grads = torch.autograd.grad(out, leaves, d_out)
    expected = exact(*(x.cpu() for x in (q, k, v, d_out)), causal_intervals(0, 50))
    del expected[1]
    for a, e in zip([out.detach(), *grads], expected, strict=True):
        torch.testing.assert_close(a.double().cpu(), e, rtol=0, atol=1e-5)


FAR = 2**31
"""Elements: a 32-bit offset does not reach the last row."""


@pytest.mark.skipif(not backend.INTERPRETED, reason="reads files where they lie")
@pytest.mark.parametrize("dim", [0, 1, 2])
def test_offsets_beyond_2_to_the_31_elements(tmp_path, dim):
    files = itertools.count()

    def far_apart(x):
        """The same values, those of neighbours in a dim so far apart, in a file that is sparse."""
        strides = list(torch.empty_like(x, memory_format=torch.contiguous_format).stride())
        strides[dim] = FAR // (x.shape[dim] - 1) + 64
        needed = 1 + sum((n - 1) * s for n, s in zip(x.shape, strides, strict=True))
        file = tmp_path / str(next(files))
        size = needed * x.dtype.itemsize
        storage = torch.UntypedStorage.from_file(str(file), shared=True, nbytes=size)
        view = torch.empty(0, dtype=x.dtype).set_(storage, 0, x.shape, strides)
        return view.copy_(x)

    rows, keys = 20, 24
    q, k, v, d_out = tensors(rows=rows, keys=keys, dtype=torch.float16)
    lse = torch.empty(2, 4, rows)
    causal = (None, 0, keys - rows, backend.NO_WINDOW, 0.25, 0.0)

    def results(move):
        out, dq = move(torch.zeros_like(d_out)), move(torch.zeros_like(q))
        dk, dv = move(torch.zeros_like(k).float()), move(torch.zeros_like(v).float())
        inputs = [move(x) for x in (q, k, v)]
        backend.forward(*inputs, *causal, None, None, out, lse)
        delta = backend.delta_of(move(d_out), out)
        arguments = (move(d_out), *inputs, lse, delta, *causal)
        backend.backward_keys(*arguments, dk, dv)
        backend.backward_queries(*arguments, None, dq)
        return [x.clone() for x in (out, lse, dq, dk, dv)]

    near, far = results(torch.clone), results(far_apart)
    assert all(x.any() for x in near)
    assert all(torch.equal(a, b) for a, b in zip(near, far, strict=True))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda x: x.double(), "dtype torch.float64"),
        (lambda x: x.repeat(1, 1, 1, 20).float(), "a head dim of 320, more than 256"),
        pytest.param(
            lambda x: x.bfloat16(),
            "bfloat16 in Triton's interpreter",
            marks=pytest.mark.skipif(not backend.INTERPRETED, reason="cards take it"),
        ),
    ],
)
def test_what_the_kernels_do_not_take_is_refused_when_they_are_asked_for(change, message):
    q, k, v, _ = (change(x).to(DEVICE) for x in tensors(batch=1, rows=4, keys=4))
    with pytest.raises(ValueError, match=f"takes, got {message}. Use 'auto'"):
        attention(q, k, v, backend="triton")
    attention(q, k, v)


@pytest.mark.parametrize(("head_dim", "value_dim"), [(257, 16), (16, 257)])
def test_wide_keys_are_refused_and_so_are_wide_values(head_dim, value_dim):
    q = torch.zeros(1, 1, 1, head_dim, device=DEVICE)
    assert backend.refusal(q, value_dim) == "a head dim of 257, more than 256"


@pytest.mark.parametrize(
    ("hip", "capability", "failure", "message"),
    [
        (None, (9, 0), "", ""),
        ("6.0", (9, 0), "", "a card of AMD"),
        (None, (7, 5), "", "a card of compute capability 7.5, less than 8.0"),
        (None, (9, 0), "a Triton that fails here", "a Triton that fails here"),
    ],
)
def test_cards_that_the_kernels_do_not_run_on(monkeypatch, hip, capability, failure, message):
    monkeypatch.setattr(backend, "INTERPRETED", False)
    monkeypatch.setattr(torch.version, "hip", hip)
    monkeypatch.setattr(backend, "capability_of", lambda device: capability)
    monkeypatch.setattr(backend, "_failure", lambda device: failure)
    q = types.SimpleNamespace(
        dtype=torch.float16, shape=(1, 2, 3, 64), device=torch.device("cuda", 0)
    )
    assert backend.refusal(q, 64) == message


def test_a_triton_that_cannot_compile_says_why(monkeypatch):
    def no_compiler(*tensors):
        raise RuntimeError("Failed to find C compiler.")

    monkeypatch.setattr(backend, "delta_of", no_compiler)
    said = backend._failure.__wrapped__(torch.device(DEVICE))
    assert said == "a Triton that fails here (RuntimeError: Failed to find C compiler.)"


@pytest.mark.parametrize(("start", "window_size"), [(0, None), (7, None), (7, 3), (0, 5), (90, 1)])
def test_causal_intervals_are_recognised(start, window_size):
    intervals = causal_intervals(start, 20, window_size=window_size)
    first, window = causal_pattern(intervals)
    again = causal_intervals(first, 20, window_size=window)
    assert torch.equal(again, intervals)


def test_other_intervals_are_not_taken_for_causal_ones():
    for name, intervals in masks(63, 100).items():
        pattern = causal_pattern(intervals)
        if pattern is None:
            assert name not in ("causal", "window", "window of one")
            continue
        first, window = pattern
        assert torch.equal(
            causal_intervals(first, 63, window_size=window).expand_as(intervals), intervals
        )
