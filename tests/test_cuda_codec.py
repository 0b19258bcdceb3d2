"""The codecs' kernels write what the host writes, bit for bit."""

import pytest
import torch

from offload.errors import OffloadError
from offload.store.codec import decode, encode
from tests.store.test_codec import FLOAT_CODECS, FLOATS, bits_of, every_value, padding_of

pytestmark = pytest.mark.needs_cuda

LAYOUTS = {
    "contiguous": lambda x: x,
    "transposed": lambda x: x.t(),
    "misaligned": lambda x: x.flatten()[1:-1],
    "ragged rows": lambda x: x[:, :997],
    "every second": lambda x: x[:, ::2],
    "expanded": lambda x: x[:, None, :3].expand(-1, 5, -1),
    "column": lambda x: x[:, 3],
    "permuted": lambda x: x[:252, :1000].reshape(4, 63, 8, 125).permute(2, 0, 3, 1),
    "0-dim": lambda x: x[2, 3],
    "empty": lambda x: x[:0],
}


def assert_alike(tensor, codec, seed=None):
    """Encodes on the card and here, and decodes both ways round."""
    host = encode(tensor.cpu(), codec, seed)
    card = encode(tensor, codec, seed).cpu()
    if codec != "bits":
        host[padding_of(tensor)] = card[padding_of(tensor)] = 0
    assert torch.equal(card, host)
    here = decode(card, codec, tensor.dtype, tensor.shape)
    there = decode(host.cuda(), codec, tensor.dtype, tensor.shape)
    assert torch.equal(bits_of(there.cpu()), bits_of(here))


@pytest.mark.parametrize("seed", [None, 3])
@pytest.mark.parametrize("view", LAYOUTS.values(), ids=LAYOUTS.keys())
@pytest.mark.parametrize("codec", FLOAT_CODECS)
def test_kernels_equal_the_host_on_any_layout(codec, view, seed):
    torch.manual_seed(0)
    for dtype in FLOATS:
        whole = torch.randn(300, 1024, device="cuda") * torch.logspace(-9, 3, 300).cuda()[:, None]
        assert_alike(view(whole.to(dtype)), codec, seed)


@pytest.mark.parametrize("view", LAYOUTS.values(), ids=LAYOUTS.keys())
def test_bools_are_packed_as_on_the_host(view):
    assert_alike(view(torch.rand(300, 1024, device="cuda") > 0.4), "bits")


@pytest.mark.parametrize("codec", FLOAT_CODECS)
def test_kernels_equal_the_host_on_every_16_bit_value_and_on_random_bits(codec):
    torch.manual_seed(0)
    bits = torch.randint(-(1 << 31), 1 << 31, (2000, 128)).to(torch.int32)
    for seed in (None, 1):
        for dtype in (torch.bfloat16, torch.float16):
            assert_alike(every_value(dtype).cuda(), codec, seed)
            assert_alike(every_value(dtype)[torch.randperm(1 << 16)].cuda(), codec, seed)
        assert_alike(bits.view(torch.float32).cuda(), codec, seed)


def test_a_destination_with_strides_is_filled():
    tensor = torch.randn(60, 70, device="cuda", dtype=torch.bfloat16)
    encoded = encode(tensor, "int8")
    strided = decode(encoded, "int8", tensor.dtype, tensor.shape, (1, 61))
    assert strided.stride() == (1, 61)
    assert torch.equal(strided, decode(encoded, "int8", tensor.dtype, tensor.shape))
    with pytest.raises(OffloadError, match="expected a destination without overlap"):
        decode(encoded, "int8", tensor.dtype, tensor.shape, (0, 1))


def test_encoding_is_ordered_on_the_current_stream_and_can_be_captured():
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        tensor = torch.zeros(1 << 22, device="cuda")
        torch.cuda._sleep(50_000_000)
        tensor.fill_(3.0)
        encoded = encode(tensor, "fp8")
        back = decode(encoded, "fp8", tensor.dtype, tensor.shape)
    stream.synchronize()
    assert torch.allclose(back, torch.tensor(3.0, device="cuda"))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = encode(tensor, "fp8")
    tensor.copy_(torch.randn_like(tensor))
    graph.replay()
    torch.cuda.synchronize()
    assert torch.equal(captured, encode(tensor, "fp8"))


def test_offsets_beyond_32_bits_are_coded():
    wanted = (1 << 32) + (1 << 20)
    if torch.cuda.mem_get_info()[0] < 4 * wanted:
        pytest.skip("needs 17 GB of free memory on the card")
    tensor = torch.zeros(wanted, device="cuda", dtype=torch.bfloat16)
    tensor[-1000:] = torch.arange(1000, device="cuda")
    encoded = encode(tensor, "int8")
    assert torch.equal(encoded[wanted - 872 : wanted], encode(tensor[-872:].clone(), "int8")[:872])
    back = decode(encoded, "int8", tensor.dtype, tensor.shape)
    assert torch.allclose(back[-1000:], tensor[-1000:], atol=5)
    assert not back[:-1024].any()
