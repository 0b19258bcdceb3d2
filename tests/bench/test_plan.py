"""`python -m bench plan`: what the planner says is what a step takes."""

import pytest

from bench import plan
from bench.cli import build_parser


@pytest.mark.parametrize("case", plan.QUICK_CASES, ids=lambda case: f"{case.method}-{case.name}")
def test_predictions_are_within_five_percent_of_the_measured_peak(case):
    (row,) = plan.compare([case])
    assert row["status"] == "ok", row
    assert row["device_ratio"] == pytest.approx(1, abs=0.05)
    if case.spec.tier == "host":
        assert row["host_ratio"] == pytest.approx(1, abs=0.01)
    assert row["rss_growth_bytes"] > 0


def test_a_failure_is_a_row_and_a_status(monkeypatch, capsys, tmp_path):
    failed = {"status": "failed", "message": "killed"}
    monkeypatch.setattr(plan, "measure", lambda method, spec: failed)
    monkeypatch.setattr(plan, "predict", lambda method, spec: {"predicted_bytes": 1})
    args = build_parser().parse_args(["plan", "--only", "opt", "--json", str(tmp_path / "rows")])
    assert plan.run(args) == 1
    assert "killed" in capsys.readouterr().out
    assert len((tmp_path / "rows").read_text().splitlines()) == 3


def test_the_cases_cover_families_lengths_modes_and_dtypes():
    specs = [case.spec for case in plan.CASES]
    assert len(specs) >= 12
    assert {spec.model for spec in specs} == {"llama", "opt", "qwen2", "smollm2"}
    assert {spec.dtype for spec in specs} == {"float32", "bfloat16"}
    assert {bool(spec.lora) for spec in specs} == {True, False}
    assert min(spec.tokens for spec in specs) == 2048
    assert max(spec.tokens for spec in specs) == 16384
    assert {case.method for case in plan.CASES} == {"offload-tiled", "offload-checkpoint", "plain"}
