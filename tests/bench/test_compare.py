"""A wrong gradient is found; rounding is not called wrong."""

import math

import pytest
import torch

from bench import compare
from bench.compare import DTYPES, LIMITS, Limits, compare_tensors, judge, judge_by_truth, mark_wrong
from bench.tasks import TASKS

ROW = {"method": "plain", "loss": 2.0}
FLOAT32, BFLOAT16 = (LIMITS["step"][dtype] for dtype in ("float32", "bfloat16"))


@pytest.fixture
def differ(tmp_path):
    def run(ours, theirs):
        torch.save(ours, tmp_path / "ours.pt")
        torch.save(theirs, tmp_path / "theirs.pt")
        return compare_tensors(tmp_path / "ours.pt", tmp_path / "theirs.pt")

    return run


@pytest.fixture
def mark(tmp_path):
    def run(tensors, limits=FLOAT32, device="cpu", **options):
        """Returns the rows of methods whose gradients are given, the reference first."""
        files = {name: tmp_path / f"{name}.pt" for name in tensors}
        for name, value in tensors.items():
            torch.save({"w": value}, files[name])
        rows = [{"method": m, "status": "ok", "loss": 2.0} for m in tensors if m != "truth"]
        mark_wrong(rows, files, limits, device, **options)
        return rows

    return run


def test_equal_gradients_are_bit_equal(differ):
    gradients = {"w": torch.randn(63, 5), "b": torch.zeros(3)}
    difference = differ(gradients, {name: g.clone() for name, g in gradients.items()})
    assert difference.bit_equal
    assert difference.max_relative == difference.max_abs == 0
    assert judge(ROW, ROW, difference, FLOAT32) == ""


def test_a_wrong_gradient_of_one_parameter_is_named(differ):
    right = {"w": torch.ones(1000), "b": torch.ones(3)}
    difference = differ(right | {"b": torch.tensor([1.0, 1.0, 1.1])}, right)
    assert difference.worst == "b"
    assert not difference.bit_equal
    assert difference.max_relative == pytest.approx(0.1 / 3**0.5, rel=1e-3)
    assert difference.max_abs == pytest.approx(0.1, rel=1e-5)
    assert "b differs" in judge(ROW, ROW, difference, FLOAT32)


def test_a_comparison_in_blocks_sees_every_element(differ, monkeypatch):
    monkeypatch.setattr(compare, "_BLOCK_ELEMENTS", 7)
    right = torch.randn(3, 21)
    for index in (0, 6, 7, 62):
        wrong = right.clone()
        wrong.view(-1)[index] += 1
        difference = differ({"h": wrong}, {"h": right})
        assert difference.max_abs == pytest.approx(1, rel=1e-6)
        assert difference.max_relative == pytest.approx(1 / float(right.norm()), rel=1e-5)


def test_rounding_of_a_vanishing_gradient_is_not_wrong(differ):
    right = {"w": torch.ones(1000), "k_bias": torch.full((4,), 1e-9)}
    difference = differ(right | {"k_bias": torch.full((4,), -1e-9)}, right)
    assert judge(ROW, ROW, difference, FLOAT32) == ""


def test_a_missing_gradient_and_another_shape_are_wrong(differ):
    difference = differ({"w": torch.ones(3)}, {"w": torch.ones(3), "b": torch.ones(3)})
    assert "tensor on one side only: b" in judge(ROW, ROW, difference, FLOAT32)
    assert "w differs by inf" in judge(
        ROW, ROW, differ({"w": torch.ones(3, 1)}, {"w": torch.ones(3)}), FLOAT32
    )


def test_nan_is_wrong(differ):
    difference = differ({"w": torch.tensor([1.0, math.nan, 1.0])}, {"w": torch.ones(3)})
    assert not difference.bit_equal
    assert difference.max_abs == math.inf
    assert judge(ROW, ROW, difference, BFLOAT16)
    same = differ({"w": torch.ones(1)}, {"w": torch.ones(1)})
    assert "loss differs" in judge(ROW | {"loss": math.nan}, ROW, same, FLOAT32)
    assert "loss differs" in judge(ROW | {"loss": 2.001}, ROW, same, FLOAT32)


def test_a_method_may_be_twice_as_far_from_the_truth_as_the_reference_and_no_farther(mark):
    truth = torch.ones(1000)
    options = {"truth": {"loss": 2.0}, "dtype": "bfloat16"}
    tensors = {"plain": truth * 1.02, "offload-tiled": truth * 0.96, "truth": truth}
    reference, row = mark(tensors, BFLOAT16, **options)
    assert reference["status"] == row["status"] == "ok"
    assert row["truth_error"] == pytest.approx(0.04, rel=1e-3)
    tensors["offload-tiled"] = truth * 1.05  # nearer to the reference than before
    assert mark(tensors, BFLOAT16, **options)[1]["status"] == "wrong"
    tensors["offload-tiled"] = truth * math.nan
    assert mark(tensors, BFLOAT16, **options)[1]["status"] == "wrong"


def test_a_loss_far_from_the_truth_is_wrong(differ):
    same = differ({"w": torch.ones(1)}, {"w": torch.ones(1)})
    rounding, limits = 2**-7, Limits(tensors=0.0, loss=1e-4)

    def judged(loss):
        row = ROW | {"loss": loss}
        return judge_by_truth(row, ROW, same, same, {"loss": 2.002}, limits, rounding)

    assert judged(2.002) == judged(1.9999) == ""
    assert "loss is off" in judged(1.99)
    assert "loss is off" in judged(math.nan)


def test_equal_bits_are_demanded_only_where_both_methods_promise_them(mark):
    right = torch.ones(1000)
    almost = right * (1 + 1e-6)
    for name, status in (("offload-checkpoint", "wrong"), ("offload-tiled", "ok")):
        row = mark({"plain": right, name: almost})[1]
        assert not row["bit_equal"]
        assert row["status"] == status
    assert mark({"offload-tiled": right, "offload-checkpoint": almost})[1]["status"] == "ok"
    on_card = mark({"plain": right, "offload-checkpoint": almost}, device="cuda")
    assert on_card[1]["status"] == "ok"


def test_every_task_has_limits_for_every_dtype():
    assert LIMITS.keys() == TASKS.keys()
    assert all(tuple(limits) == DTYPES for limits in LIMITS.values())
