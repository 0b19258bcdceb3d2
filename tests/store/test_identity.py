import torch
from torch import nn

from offload.store.identity import (
    is_held_by_its_owner,
    is_plain,
    storage_reference,
    tensor_key,
)


def test_a_matrix_and_its_transpose_differ():
    matrix = torch.randn(64, 64)
    assert tensor_key(matrix) != tensor_key(matrix.t())
    assert tensor_key(matrix) == tensor_key(matrix.view(64, 64))


def test_an_in_place_change_makes_another_tensor():
    tensor = torch.randn(4)
    before = tensor_key(tensor)
    tensor.add_(1)
    assert tensor_key(tensor) != before


def test_shape_dtype_and_offset_tell_views_apart():
    tensor = torch.zeros(8)
    views = [tensor, tensor[:4], tensor[4:], tensor.view(2, 4), tensor.view(torch.int32)]
    assert len({tensor_key(view) for view in views}) == len(views)


def test_a_reserved_storage_address_is_not_used_again():
    tensor = torch.randn(1000)
    key, reference = tensor_key(tensor), storage_reference(tensor)
    del tensor
    assert reference.expired()
    later = [torch.randn(1000) for _ in range(100)]
    assert all(tensor_key(t).storage != key.storage for t in later)


def test_parameters_and_views_of_them_are_held_by_their_owner():
    linear = nn.Linear(4, 4)
    assert is_held_by_its_owner(linear.weight)
    assert is_held_by_its_owner(linear.weight.t())
    assert not is_held_by_its_owner(linear(torch.randn(2, 4)))
    assert not is_held_by_its_owner(torch.randn(2, 4))


def test_subclasses_and_unusual_tensors_are_not_plain():
    class Subclass(torch.Tensor):
        pass

    assert is_plain(torch.randn(3))
    assert is_plain(nn.Parameter(torch.randn(3)))
    assert not is_plain(torch.randn(3).as_subclass(Subclass))
    assert not is_plain(torch.randn(3, device="meta"))
    assert not is_plain(torch.randn(3, 3).to_sparse())
    assert not is_plain(torch.randn(3, dtype=torch.complex64).conj())
