import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from offload.store.layout import compact


def round_trip(tensor):
    source, layout = compact(tensor)
    buffer = layout.new_buffer(tensor.device)
    span = torch.as_strided(source, (layout.elements,), (1,), source.storage_offset())
    buffer.copy_(span)
    return layout, layout.restore(buffer)


VIEWS = {
    "offset": lambda x: x[1:],
    "column": lambda x: x[:, 3],
    "every second column": lambda x: x[:, ::2],
    "transposed": lambda x: x.t(),
    "expanded": lambda x: x[:1].expand(50, -1),
    "expanded column with holes": lambda x: x[:, ::2][:, :1].expand(-1, 9),
    "sliding window": lambda x: x.flatten().unfold(0, 8, 1),
    "0-dim": lambda x: x[2, 3],
    "size-1 dims": lambda x: x[None, :, None],
    "channels last": lambda x: x.reshape(1, 2, 4, 16).to(memory_format=torch.channels_last),
}


@pytest.mark.parametrize("view", VIEWS.values(), ids=VIEWS.keys())
@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.complex64]
)
def test_a_view_comes_back_equal(view, dtype):
    tensor = view(torch.arange(128).reshape(8, 16).to(dtype))
    _, restored = round_trip(tensor)
    assert torch.equal(restored, tensor)
    assert restored.dtype == tensor.dtype
    assert restored.stride() == tensor.stride()


def test_an_expanded_tensor_costs_its_base():
    layout, _ = round_trip(torch.randn(1, 1000).expand(64, -1))
    assert layout.nbytes == 4000


def test_a_sliding_window_costs_what_it_spans():
    layout, _ = round_trip(torch.randn(1000).unfold(0, 100, 1))
    assert layout.nbytes == 4000


def test_a_view_with_holes_costs_its_values_not_its_base():
    tensor = torch.randn(1 << 20)[:: 1 << 16]
    layout, _ = round_trip(tensor)
    assert layout.nbytes == 64
    source, _ = compact(tensor)
    assert source.untyped_storage().nbytes() == 64


def test_a_dense_tensor_is_not_gathered():
    for tensor in (torch.randn(7, 9), torch.randn(7, 9).t(), torch.randn(7, 9)[2:5]):
        source, layout = compact(tensor)
        assert source is tensor
        assert layout.nbytes == tensor.nbytes


@settings(max_examples=200, deadline=None)
@given(
    sizes=st.lists(st.integers(1, 5), min_size=0, max_size=4),
    order=st.randoms(use_true_random=False),
    slices=st.lists(st.tuples(st.integers(0, 2), st.integers(1, 3)), min_size=4, max_size=4),
)
def test_any_view_comes_back_equal_and_never_costs_more_than_a_copy(sizes, order, slices):
    base = torch.arange(int(torch.tensor([*sizes, 1]).prod())).reshape(sizes)
    dims = list(range(base.dim()))
    order.shuffle(dims)
    view = base.permute(dims)
    for dim in range(view.dim()):
        start, stride = slices[dim]
        view = view[(slice(None),) * dim + (slice(min(start, view.shape[dim] - 1), None, stride),)]
    layout, restored = round_trip(view)
    assert torch.equal(restored, view)
    assert layout.nbytes <= view.nbytes
