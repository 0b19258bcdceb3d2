"""The codecs against plain torch, bit for bit, and what they promise about odd values."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from offload import _native
from offload.errors import OffloadError
from offload.store import codec as codecs
from offload.store import reference_codec
from offload.store.codec import decode, encode, encoded_bytes, relative_error

FLOAT_CODECS = ["fp8", "int8"]
FLOATS = [torch.float32, torch.float16, torch.bfloat16]
INTEGERS = {4: torch.int32, 2: torch.int16, 1: torch.uint8}
INF, NAN = math.inf, math.nan


def bits_of(tensor):
    """The bits of a tensor's values, those of a NaN made equal."""
    bits = tensor.contiguous().view(INTEGERS[tensor.element_size()])
    return torch.where(tensor.isnan(), -1, bits) if tensor.is_floating_point() else bits


def padding_of(tensor):
    return slice(tensor.numel(), tensor.numel() + -tensor.numel() % 16)


def assert_like_reference(tensor, codec):
    """Compares codes, scales and decoded values; the padding holds anything."""
    encoded = encode(tensor, codec)
    expected = reference_codec.encode(tensor, codec)
    assert encoded.shape == expected.shape
    if codec != "bits":
        encoded = encoded.clone()
        encoded[padding_of(tensor)] = 0
    assert torch.equal(encoded, expected)
    decoded = decode(encoded, codec, tensor.dtype, tensor.shape)
    assert decoded.dtype == tensor.dtype
    plain = reference_codec.decode(expected, codec, tensor.dtype, tensor.shape)
    assert torch.equal(bits_of(decoded), bits_of(plain))
    return decoded


def every_value(dtype):
    return torch.arange(-(1 << 15), 1 << 15, dtype=torch.int16).view(dtype)


def block(*values, dtype=torch.float32):
    """A block of 128 values that starts with these and goes on with zeros."""
    return torch.nn.functional.pad(torch.tensor(values, dtype=dtype), (0, 128 - len(values)))


def round_trip(tensor, codec, seed=None):
    return decode(encode(tensor, codec, seed), codec, tensor.dtype, tensor.shape)


@pytest.mark.parametrize("length", [128, 1, 65536, 1000, 62])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("codec", FLOAT_CODECS)
def test_every_16_bit_value_is_coded_as_torch_does(codec, dtype, length):
    values = every_value(dtype)
    values = values[: values.numel() // length * length].reshape(-1, length)
    assert_like_reference(values, codec)
    assert_like_reference(values[:, torch.randperm(length)], codec)
    assert_like_reference(values.t(), codec)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("codec", FLOAT_CODECS)
@pytest.mark.parametrize("amax", [448.0, 127.0, 1.0, 0.33, 60000.0])
def test_every_finite_value_below_an_amax_is_rounded_as_torch_does(codec, dtype, amax):
    values = every_value(dtype)
    values = values[values.float().abs() <= amax]
    values = values[: values.numel() // 127 * 127].reshape(-1, 127)
    assert_like_reference(torch.cat([values, torch.full_like(values[:, :1], amax)], 1), codec)


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("codec", FLOAT_CODECS)
def test_every_code_decodes_as_torch_does(codec, dtype):
    codes = torch.arange(256, dtype=torch.uint8).repeat(64)
    top = float.fromhex("0x1.fffffcp127") / 448
    scales = torch.logspace(-38, 38, 128).clamp(2.0**-109, top)
    scales[:8] = torch.tensor([1.0, 2.0**-109, top, NAN, 0.0, 2.0**-120, 1e-40, 1e-9])
    without_nan = codes.clone()
    without_nan[(codes == 0x80 if codec == "int8" else codes & 0x7F == 0x7F)] = 5
    for some in (codes, without_nan):
        encoded = torch.cat([some, scales.view(torch.uint8)])
        for shape in [(128, 128), (16384,)]:
            decoded = decode(encoded, codec, dtype, shape)
            plain = reference_codec.decode(encoded, codec, dtype, shape)
            assert torch.equal(bits_of(decoded), bits_of(plain))


@pytest.mark.parametrize("codec", FLOAT_CODECS)
def test_float32_ties_denormals_and_random_bits_are_coded_as_torch_does(codec):
    torch.manual_seed(0)
    ties = torch.arange(-512, 513).float() * 0.5
    neighbours = torch.stack([ties.nextafter(ties - 1), ties, ties.nextafter(ties + 1)])
    assert_like_reference(torch.nn.functional.pad(neighbours, (0, 127), value=448.0), codec)
    for limit in (448.0, 127.0):
        exact = torch.cat([neighbours.flatten().clamp(-limit, limit), torch.tensor([limit])])
        assert_like_reference(exact.repeat(128, 1).t().contiguous().roll(1, 1), codec)
        assert_like_reference(exact, codec)
    bits = torch.randint(-(1 << 31), 1 << 31, (2000, 128), dtype=torch.int64).to(torch.int32)
    assert_like_reference(bits.view(torch.float32), codec)
    magnitudes = torch.randn(2000, 128) * torch.logspace(-44, 38, 2000)[:, None]
    assert_like_reference(magnitudes, codec)
    assert_like_reference(torch.randn(2000, 128) * torch.logspace(-9, 0, 128), codec)


@st.composite
def strided(draw, dtypes=FLOATS):
    """A tensor of odd sizes with any layout: permuted, sliced, offset, expanded."""
    dims = draw(st.integers(0, 5))
    few, many = st.sampled_from([0, 1, 1, 2, 3, 4]), st.integers(0, 300)
    long = draw(st.integers(0, 4))  # which of the dimensions may be
    shape = [draw(many if dims < 3 or d == long else few) for d in range(dims)]
    order = draw(st.permutations(range(dims)))
    sparse = draw(st.integers(0, 9))
    steps = [draw(st.sampled_from([2, 3])) if d == sparse else 1 for d in range(dims)]
    offset = draw(st.integers(0, 3))
    whole = torch.empty([shape[d] * steps[d] for d in order] + [1]).numel() + offset
    generator = torch.Generator().manual_seed(draw(st.integers(0, 99)))
    values = torch.randn(whole, generator=generator) * 10 ** draw(st.integers(-6, 4))
    dtype = draw(st.sampled_from(dtypes))
    values = values > 0 if dtype == torch.bool else values.to(dtype)
    tensor = values[offset:].reshape([shape[d] * steps[d] for d in order])
    for dim, original in enumerate(order):
        index = [slice(None)] * dims
        index[dim] = slice(None, None, steps[original])
        tensor = tensor[tuple(index)]
    tensor = tensor.permute([order.index(d) for d in range(dims)])
    if draw(st.booleans()):
        expanded = [draw(st.sampled_from([-1, 4])) if s == 1 else -1 for s in tensor.shape]
        tensor = tensor.expand(expanded)
    return tensor


@settings(max_examples=150, deadline=None)
@given(tensor=strided(), codec=st.sampled_from(FLOAT_CODECS))
def test_any_layout_is_coded_like_its_contiguous_copy(tensor, codec):
    decoded = assert_like_reference(tensor, codec)
    assert decoded.is_contiguous()


@settings(max_examples=100, deadline=None)
@given(tensor=strided([torch.bool]))
def test_bools_come_back_equal(tensor):
    assert torch.equal(assert_like_reference(tensor, "bits"), tensor)
    assert encode(tensor, "bits").numel() == -(-tensor.numel() // 8)


@settings(max_examples=100, deadline=None)
@given(tensor=strided([*FLOATS, torch.bool]), name=st.sampled_from(FLOAT_CODECS))
def test_decoding_fills_any_layout_and_nothing_beside_it(tensor, name):
    codec = "bits" if tensor.dtype == torch.bool else name
    expanded = any(s == 0 and n > 1 for s, n in zip(tensor.stride(), tensor.shape, strict=True))
    span = 1 + sum(s * (n - 1) for s, n in zip(tensor.stride(), tensor.shape, strict=True))
    span = span if tensor.numel() else 0
    encoded = encode(tensor, codec)
    if expanded and tensor.numel():
        with pytest.raises(OffloadError, match="expected a destination without overlap"):
            decode(encoded, codec, tensor.dtype, tensor.shape, tensor.stride())
        return
    memory = torch.full((span + 32,), 3).to(tensor.dtype)
    target = memory[16:].as_strided(tensor.shape, tensor.stride(), 16)
    arguments = (encoded.data_ptr(), target.data_ptr(), target.shape, target.stride(), 0)
    _native.decode(-1, codec, str(tensor.dtype).removeprefix("torch."), *arguments)
    expected = torch.full((span + 32,), 3).to(tensor.dtype)
    expected.as_strided(tensor.shape, tensor.stride(), 16).copy_(round_trip(tensor, codec))
    assert torch.equal(memory, expected)


def test_inf_saturates_and_nan_stays_nan():
    for dtype in FLOATS:
        values = block(1.0, INF, -INF, NAN, -2.0, dtype=dtype)
        for codec in FLOAT_CODECS:
            decoded = round_trip(values, codec)
            assert decoded[:5].tolist()[:3] == [1.0, 2.0, -2.0] or codec == "int8"
            assert decoded[1:3].tolist() == [2.0, -2.0]
            assert decoded[3].isnan()
            assert decoded[4] == -2.0
            assert not decoded[4:].isnan().any()


def test_nan_and_inf_do_not_change_their_neighbours():
    torch.manual_seed(0)
    values = torch.randn(50, 128)
    spoilt = values.clone()
    spoilt[:, 7], spoilt[:, 90], spoilt[:, 127] = NAN, INF, -INF
    values[:, [7, 90, 127]] = 0
    for codec in FLOAT_CODECS:
        kept = [i for i in range(128) if i not in (7, 90, 127)]
        assert torch.equal(round_trip(spoilt, codec)[:, kept], round_trip(values, codec)[:, kept])


def test_fp8_keeps_the_sign_of_zero_and_of_nan():
    values = block(-0.0, 0.0, NAN, 3.0).copysign(block(-1.0, 1.0, -1.0, 1.0))
    for tensor in (values, block(-0.0)):
        assert torch.equal(round_trip(tensor, "fp8").signbit(), tensor.signbit())


@pytest.mark.parametrize("codec", FLOAT_CODECS)
def test_a_block_without_finite_values_decodes_to_tiny_numbers_and_nan(codec):
    assert torch.equal(round_trip(torch.zeros(300), codec), torch.zeros(300))
    assert round_trip(torch.full((300,), NAN), codec).isnan().all()
    infinite = round_trip(torch.full((128,), -INF), codec)
    assert torch.allclose(infinite, torch.tensor(-(2.0**-100)), rtol=1e-6, atol=0)


@pytest.mark.parametrize("codec", FLOAT_CODECS)
def test_finite_values_stay_finite(codec):
    for dtype in FLOATS:
        top = torch.finfo(dtype).max
        extremes = block(top, -top, top / 3, torch.finfo(dtype).tiny, dtype=dtype)
        assert round_trip(extremes, codec).isfinite().all()
        assert torch.allclose(round_trip(extremes, codec)[:2].float(), extremes[:2].float())


@pytest.mark.parametrize("dtype", FLOATS)
def test_flushing_denormals_changes_no_byte(dtype):
    scales = torch.logspace(-45, -30, 400, dtype=torch.float64)[:, None]
    tensor = (torch.randn(400, 130, dtype=torch.float64) * scales).to(dtype)
    for codec in FLOAT_CODECS:
        plain = encode(tensor, codec)
        decoded = decode(plain, codec, dtype, tensor.shape)
        assert torch.set_flush_denormal(True)
        try:
            assert torch.equal(encode(tensor, codec)[: tensor.numel()], plain[: tensor.numel()])
            assert torch.equal(decode(plain, codec, dtype, tensor.shape), decoded)
        finally:
            torch.set_flush_denormal(False)


@pytest.mark.parametrize("dtype", FLOATS)
def test_the_error_of_a_normal_tensor_is_what_the_codes_allow(dtype):
    torch.manual_seed(0)
    tensor = torch.randn(64, 1000).to(dtype)
    assert 0.02 < relative_error(tensor, "fp8") < 0.03
    assert 0.005 < relative_error(tensor, "int8") < 0.008
    assert relative_error(torch.zeros(3, dtype=dtype), "int8") == 0


def test_a_short_last_block_has_a_scale_of_its_own():
    tensor = torch.cat([torch.full((2, 128), 1000.0), torch.full((2, 3), 0.001)], 1)
    for codec in FLOAT_CODECS:
        assert torch.allclose(round_trip(tensor, codec), tensor, rtol=1e-6)
        assert encode(tensor, codec).numel() == 272 + 4 * 4


def test_bytes_may_be_decoded_into_another_dtype():
    tensor = torch.randn(5, 200)
    encoded = encode(tensor, "fp8")
    wide = decode(encoded, "fp8", torch.float32, tensor.shape)
    for dtype in FLOATS:
        assert torch.equal(decode(encoded, "fp8", dtype, tensor.shape), wide.to(dtype))


@pytest.mark.parametrize("codec", FLOAT_CODECS)
def test_stochastic_rounding_is_unbiased(codec):
    """The mean over n draws lies within 5 standard errors of the value, for nearly every value."""
    draws = 2000
    values = torch.linspace(-1, 1, 126).double()
    limit = reference_codec.LIMITS[codec]
    exact = torch.cat([values, torch.tensor([1.0, -1.0])]).float()
    rounded = round_trip(exact.repeat(draws, 1), codec, seed=1).double()
    mean, spread = rounded.mean(0), rounded.std(0)
    errors = (mean - exact.double()).abs()
    assert (errors <= 5 * spread / draws**0.5 + 2 / limit * 1e-5).all()
    assert (spread > 0).sum() > 100  # not round to nearest
    assert (rounded.unique(dim=0).shape[0]) > draws - 5


@pytest.mark.parametrize("codec", FLOAT_CODECS)
def test_stochastic_rounding_takes_one_of_the_two_neighbours(codec):
    torch.manual_seed(0)
    tensor = torch.randn(40, 128)
    tensor[:, 0] = 1 / 1024  # fp8 denormals
    near = round_trip(tensor, codec)
    step = (tensor.abs() / 8).clamp(min=2**-9) if codec == "fp8" else torch.ones(())
    scale = tensor.abs().amax(-1, keepdim=True) / reference_codec.LIMITS[codec]
    step = step * scale if codec == "int8" else torch.maximum(tensor.abs() / 8, scale * 2**-9)
    for seed in range(4):
        drawn = round_trip(tensor, codec, seed)
        assert ((drawn - tensor).abs() <= step * 1.0001).all()
        assert not torch.equal(drawn, near)


@pytest.mark.parametrize("codec", FLOAT_CODECS)
def test_a_seed_gives_the_same_bytes_and_another_seed_others(codec):
    tensor = torch.randn(300, 2000)
    first = encode(tensor, codec, seed=7)
    assert torch.equal(encode(tensor, codec, seed=7), first)
    assert torch.equal(encode(tensor.t().contiguous().t(), codec, seed=7), first)
    other = encode(tensor, codec, seed=8)
    codes = tensor.numel()
    assert 0.3 < (first[:codes] != other[:codes]).float().mean() < 0.6
    assert torch.equal(first[codes:], other[codes:])  # the scales
    assert torch.equal(encode(tensor, codec, seed=-1), encode(tensor, codec, seed=2**64 - 1))


def test_stochastic_rounding_keeps_what_a_code_represents_exactly_and_odd_values():
    values = block(448.0, -448.0, 1.0, 0.0, -0.0, 2**-9, NAN, INF, -INF)
    for seed in range(5):
        decoded = round_trip(values, "fp8", seed)
        assert decoded[:6].tolist() == values[:6].tolist()
        assert decoded[6].isnan()
        assert decoded[7:9].tolist() == [448.0, -448.0]
        decoded = round_trip(block(127.0, -5.0, NAN, INF, -INF), "int8", seed)
        assert decoded[:2].tolist() == [127.0, -5.0]
        assert decoded[2].isnan()
        assert decoded[3:5].tolist() == [127.0, -127.0]


def test_large_tensors_are_coded_alike_by_helpers_and_alone():
    tensor = torch.randn(3000, 1000).bfloat16()
    for codec in FLOAT_CODECS:
        whole = encode(tensor, codec)
        alone = torch.cat([encode(part, codec)[: part.numel()] for part in tensor.split(60)])
        assert torch.equal(whole[: tensor.numel()], alone)
        assert_like_reference(tensor, codec)
    assert torch.equal(assert_like_reference(tensor > 0, "bits"), tensor > 0)


def test_wrong_arguments_are_named():
    tensor = torch.ones(4)
    with pytest.raises(ValueError, match="encode: expected codec fp8, int8, bits, got 'x'"):
        encode(tensor, "x")
    with pytest.raises(TypeError, match=r"expected bool for codec bits, got float32. Choose"):
        encode(tensor, "bits")
    with pytest.raises(TypeError, match=r"expected float32, float16, bfloat16 .* got int64"):
        encoded_bytes("int8", torch.int64, (3,))
    with pytest.raises(TypeError, match=r"encode: expected .* for codec fp8, got bool"):
        encode(tensor > 0, "fp8")
    with pytest.raises(ValueError, match="expected no seed for codec bits"):
        encode(tensor > 0, "bits", seed=1)
    with pytest.raises(OffloadError, match=r"expected at most 8 dimensions, got 9. Flatten"):
        encode(torch.ones([1] * 9), "int8")
    encoded = encode(tensor, "int8")
    with pytest.raises(ValueError, match=r"decode: expected 36 contiguous uint8 for shape \(20,\)"):
        decode(torch.zeros(20, dtype=torch.uint8), "int8", torch.float32, (20,))
    with pytest.raises(OffloadError, match=r"without overlap, got a stride of 0 .* Decode into"):
        decode(encoded, "int8", torch.float32, (4,), (0,))


def test_the_native_calls_name_wrong_arguments():
    tensor, encoded = torch.ones(4, 4), torch.zeros(64, dtype=torch.uint8)
    arguments = (tensor.data_ptr(), (4, 4), (4, 1), encoded.data_ptr(), 0)
    with pytest.raises(_native.Error, match=r"encode: expected codec .*, got 'zip'. Choose"):
        _native.encode(-1, "zip", "float32", *arguments)
    with pytest.raises(_native.Error, match=r"encode: expected dtype .*, got 'float64'. Store"):
        _native.encode(-1, "int8", "float64", *arguments)
    with pytest.raises(_native.Error, match="expected a CUDA index or -1 for the CPU, got -2"):
        _native.encode(-2, "int8", "float32", *arguments)
    with pytest.raises(_native.Error, match="expected stream 0 on the CPU, got 5"):
        _native.encode(-1, "int8", "float32", *arguments[:4], 5)
    with pytest.raises(_native.Error, match="expected no seed for codec bits, got 3"):
        _native.encode(-1, "bits", "bool", *arguments, seed=3)
    with pytest.raises(_native.Error, match="expected a stride for each of 2 dimensions, got 1"):
        _native.encode(
            -1, "int8", "float32", tensor.data_ptr(), (4, 4), (4,), encoded.data_ptr(), 0
        )
    with pytest.raises(_native.Error, match="expected sizes of 0 or more, got -4 in dimension 1"):
        _native.encoded_bytes("int8", "float32", (4, -4))
    with pytest.raises(_native.Error, match="expected a size that 64 bits can count"):
        _native.encoded_bytes("int8", "float32", (1 << 40, 1 << 40))
    with pytest.raises(_native.Error, match="expected an encoded buffer aligned to 16 bytes"):
        _native.encode(-1, "int8", "float32", *arguments[:3], encoded.data_ptr() + 4, 0)


def test_encoded_bytes_follow_the_format():
    assert encoded_bytes("fp8", torch.bfloat16, (3, 300)) == 912 + 3 * 3 * 4
    assert encoded_bytes("int8", torch.float32, ()) == 16 + 4
    assert encoded_bytes("int8", torch.float32, (5, 0, 3)) == 0
    assert encoded_bytes("bits", torch.bool, (3, 3)) == 2
    assert set(codecs._DTYPES) == {*FLOAT_CODECS, "bits"}
