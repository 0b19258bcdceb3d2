"""A wrong gradient is found; rounding is not called wrong."""

import math

import pytest
import torch

from bench.compare import compare_gradients, judge

ROW = {"method": "plain", "loss": 2.0}


@pytest.fixture
def differ(tmp_path):
    def run(ours, theirs):
        torch.save(ours, tmp_path / "ours.pt")
        torch.save(theirs, tmp_path / "theirs.pt")
        return compare_gradients(tmp_path / "ours.pt", tmp_path / "theirs.pt")

    return run


def test_equal_gradients_are_bit_equal(differ):
    gradients = {"w": torch.randn(63, 5), "b": torch.zeros(3)}
    difference = differ(gradients, {name: g.clone() for name, g in gradients.items()})
    assert difference.bit_equal
    assert difference.max_relative == 0
    assert judge(ROW, ROW, difference, "float32") == ""


def test_a_wrong_gradient_of_one_parameter_is_named(differ):
    right = {"w": torch.ones(1000), "b": torch.ones(3)}
    difference = differ(right | {"b": torch.tensor([1.0, 1.0, 1.1])}, right)
    assert difference.worst == "b"
    assert not difference.bit_equal
    assert difference.max_relative == pytest.approx(0.1 / 3**0.5, rel=1e-3)
    assert "gradient of b differs" in judge(ROW, ROW, difference, "float32")


def test_rounding_of_a_vanishing_gradient_is_not_wrong(differ):
    right = {"w": torch.ones(1000), "k_bias": torch.full((4,), 1e-9)}
    difference = differ(right | {"k_bias": torch.full((4,), -1e-9)}, right)
    assert judge(ROW, ROW, difference, "float32") == ""


def test_a_missing_gradient_is_wrong(differ):
    difference = differ({"w": torch.ones(3)}, {"w": torch.ones(3), "b": torch.ones(3)})
    assert "gradient on one side only: b" in judge(ROW, ROW, difference, "float32")


def test_nan_is_wrong(differ):
    difference = differ({"w": torch.tensor([math.nan])}, {"w": torch.ones(1)})
    assert judge(ROW, ROW, difference, "bfloat16")
    same = differ({"w": torch.ones(1)}, {"w": torch.ones(1)})
    assert "loss differs" in judge(ROW | {"loss": math.nan}, ROW, same, "float32")
    assert "loss differs" in judge(ROW | {"loss": 2.001}, ROW, same, "float32")
