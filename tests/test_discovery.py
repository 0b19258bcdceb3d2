import pytest
import torch
from torch import nn

from offload.discovery import find_layers
from tests.models import Block, Stack, blocks


def names(model, layers=None):
    return [name for name, _ in find_layers(model, layers)]


def test_the_module_list_with_most_parameters_is_found():
    model = nn.Module()
    model.small = nn.ModuleList([Block(8) for _ in range(9)])
    model.large = nn.ModuleList([Block(64) for _ in range(2)])
    assert names(model) == ["large.0", "large.1"]


def test_the_same_typed_children_of_a_sequential_are_found():
    model = nn.Sequential(nn.Embedding(10, 32), Block(), Block(), Block(), nn.Linear(32, 10))
    assert names(model) == ["1", "2", "3"]


def test_blocks_are_found_rather_than_what_is_inside_them():
    assert names(nn.Sequential(*[Stack([Block(), Block()]) for _ in range(3)])) == ["0", "1", "2"]


@pytest.mark.parametrize(
    "layers",
    [
        Block,
        "layers.?",
        "layers.*",
        ["layers.0", "layers.1", "layers.2"],
        lambda name, module: isinstance(module, Block),
    ],
    ids=["class", "pattern", "pattern that matches inside too", "names", "predicate"],
)
def test_layers_are_selected_by(layers):
    assert names(blocks(3), layers) == ["layers.0", "layers.1", "layers.2"]


def test_layers_are_selected_by_a_list_of_modules_or_a_module_list():
    model = blocks(3)
    assert names(model, [model.layers[2], model.layers[0]]) == ["layers.0", "layers.2"]
    assert names(model, model.layers) == ["layers.0", "layers.1", "layers.2"]


@pytest.mark.parametrize(
    ("layers", "error", "message"),
    [
        (nn.Conv2d, ValueError, "matches none"),
        ("decoder.*", ValueError, r"named_modules\(\)"),
        (["layers.0", "layers.9"], ValueError, "expected all 2 listed layers.*found 1"),
        ([], ValueError, "matches none"),
        (torch.Tensor, TypeError, "expected a module class"),
        (nn.Linear(2, 2), TypeError, "expected a list of modules"),
        (7, TypeError, "expected a class, a pattern, a list or a predicate"),
    ],
)
def test_a_wrong_selection_is_an_error(layers, error, message):
    with pytest.raises(error, match=message):
        find_layers(blocks(2), layers)


def test_a_model_without_repeated_layers_is_an_error():
    with pytest.raises(ValueError, match=r"expected repeated layers.*Pass layers="):
        find_layers(nn.Sequential(nn.Linear(2, 2), nn.ReLU()))


def test_a_module_dict_of_layers_is_found_and_the_container_itself_is_refused():
    model = nn.Module()
    model.layers = nn.ModuleDict({str(i): Stack([Block(), Block()]) for i in range(3)})
    assert names(model) == ["layers.0", "layers.1", "layers.2"]
    with pytest.raises(ValueError, match=r"got the ModuleDict 'layers'.*'layers\.\*'"):
        find_layers(model, "layers")
