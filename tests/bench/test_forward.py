"""The forward bench: the body alone, without gradients, hidden states compared."""

import pytest
import torch

from bench import tasks
from bench.cli import main
from bench.methods import METHODS
from bench.spec import StepSpec

SPEC = StepSpec("llama", 63, hidden=32, layers=2, heads=4, vocab=128, tile=17)


def test_the_body_runs_without_head_and_gradients(tmp_path):
    task = tasks.prepare_forward(METHODS["plain"], SPEC)
    assert not any("lm_head" in name for name, _ in task.model.named_modules())
    assert not task.model.training
    hidden = task.run()
    assert hidden.shape == (1, 63, 32)
    assert not hidden.requires_grad
    figures = task.save(tmp_path / "out.pt", hidden)
    assert figures["hidden_norm"] == pytest.approx(float(hidden.norm()), rel=1e-6)
    assert torch.equal(torch.load(tmp_path / "out.pt")["last_hidden_state"], hidden)


def test_tiles_give_the_same_hidden_states_in_less_memory(workers_here, run_bench, capsys):
    options = ("--model", "llama", "--methods", "plain,offload-tiled", "--tile", "17")
    status, (plain, tiled) = run_bench("forward", *options, "--tokens", "1000")
    assert status == 0, tiled.get("message")
    for row in (plain, tiled):
        assert row["bench"] == "forward"
        assert row["reference"] == "plain"
        assert row["tokens_per_s"] > 0
        assert row["peak_rss_bytes"] > 0
        assert "loss" not in row
    assert plain["bit_equal"]
    assert 0 < tiled["max_abs_difference"] < 1e-4
    assert 0 < tiled["max_relative_difference"] < 1e-5
    assert tiled["tile_tokens"] == 17
    assert tiled["peak_live_delta_bytes"] < plain["peak_live_delta_bytes"]
    assert "forward only" in capsys.readouterr().out


def test_wrong_hidden_states_are_marked(workers_here, run_bench, monkeypatch):
    prepare = tasks.prepare_forward

    def prepare_wrong(method, spec):
        task = prepare(method, spec)
        if method is METHODS["offload"]:
            with torch.no_grad():
                task.model.norm.weight[3] += 0.01
        return task

    monkeypatch.setitem(tasks.TASKS, "forward", prepare_wrong)
    status, rows = run_bench("forward", "--model", "llama", "--methods", "plain,offload")
    assert status == 1
    assert [row["status"] for row in rows] == ["ok", "wrong"]
    assert "last_hidden_state differs" in rows[1]["message"]


def test_a_pass_above_the_memory_limit_is_told_as_oom(workers_here, run_bench):
    limit = ("--memory-limit", "100KiB")
    status, (row,) = run_bench("forward", "--model", "llama", "--methods", "plain", *limit)
    assert status == 0
    assert row["status"] == "OOM"
    assert "expected at most 102400 live bytes" in row["message"]


def test_methods_that_need_gradients_are_refused(capsys):
    arguments = ["forward", "--model", "llama", "--tokens", "63"]
    assert main([*arguments, "--methods", "checkpoint"]) == 2
    assert "expected some of plain, offload" in capsys.readouterr().err
