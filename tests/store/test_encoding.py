"""Which tensors are encoded, in which order, and that they come back as they were laid out."""

import pytest
import torch

from offload.store.encoding import PACKED_BOOL_BYTES, encoding_of

DENSE = {
    "rows": torch.randn(7, 300),
    "a scalar": torch.randn(()),
    "keys of heads of 64": torch.randn(1, 4, 100, 64),
    "keys as a projection gives them": torch.randn(1, 100, 4, 64).transpose(1, 2),
    "transposed": torch.randn(300, 7).T,
    "a part that is whole rows": torch.randn(30, 128)[7:19],
    "with dimensions of one": torch.randn(1, 300, 1).as_strided((1, 300, 1), (999, 1, 999)),
}
SPARSE = {
    "every other column": torch.randn(30, 300)[:, ::2],
    "some columns": torch.randn(30, 300)[:, 10:200],
}


def round_trip(store, tensor, codec):
    ticket = store.offload(tensor, codec=codec)
    back = ticket.reload()
    assert (back.shape, back.stride(), back.dtype) == (tensor.shape, tensor.stride(), tensor.dtype)
    return ticket, back


@pytest.mark.parametrize("codec", ["fp8", "int8"])
@pytest.mark.parametrize("tensor", DENSE.values(), ids=DENSE.keys())
def test_dense_tensors_share_a_scale_between_128_values_whatever_their_shape(store, tensor, codec):
    ticket, back = round_trip(store, tensor, codec)
    count = tensor.numel()
    assert ticket.nbytes == (count + 15) // 16 * 16 + 4 * ((count + 127) // 128)
    assert (back - tensor).norm() < 0.05 * tensor.norm()


@pytest.mark.parametrize("codec", ["fp8", "int8"])
@pytest.mark.parametrize("tensor", SPARSE.values(), ids=SPARSE.keys())
def test_tensors_with_holes_are_encoded_row_by_row(store, tensor, codec):
    ticket, back = round_trip(store, tensor, codec)
    assert ticket.nbytes < tensor.numel() * 1.1
    assert (back - tensor).norm() < 0.05 * tensor.norm()


@pytest.mark.parametrize(
    "tensor", [torch.randn(64).expand(100, 64), torch.arange(300), torch.randn(50).double()]
)
def test_what_a_codec_does_not_take_is_copied(store, tensor):
    assert encoding_of(tensor, "fp8") is None
    _, back = round_trip(store, tensor, "fp8")
    assert torch.equal(back, tensor)


@pytest.mark.parametrize("codec", [None, "fp8"])
def test_large_masks_are_packed_without_being_asked(store, codec):
    mask = torch.rand(1, 1, 301, 302) > 0.3
    ticket, back = round_trip(store, mask, codec)
    assert ticket.nbytes == (mask.numel() + 7) // 8
    assert torch.equal(back, mask)
    assert encoding_of(mask[:, :, :5], codec) is None
    assert encoding_of(torch.ones(PACKED_BOOL_BYTES, dtype=torch.bool), codec).loses is False
    assert encoding_of(mask.expand(4, 3, 301, 302), codec) is None
