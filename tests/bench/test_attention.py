"""`python -m bench attention` on a CPU: rows, figures and errors."""

import json

import pytest
import torch

from bench import attention_ways
from bench.attention_ways import Case, measure, measure_tiles
from bench.cli import main

CASE = Case(length=64, heads=4, kv_heads=2, head_dim=16, dtype="float32", device="cpu")


def test_rows_have_figures_or_say_why_not(tmp_path):
    out = tmp_path / "attention.jsonl"
    options = "--device cpu --dtype float32 --heads 4 --head-dims 16 --rounds 1 --lengths 96,160"
    ways = "offload,sdpa-flash,sdpa-efficient"
    assert main(["attention", *options.split(), "--tiles", "128", "--ways", ways]) == 0
    arguments = ["--tiles", "32", "--ways", ways, "--json", str(out)]
    assert main(["attention", *options.split(), *arguments]) == 0
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    assert len(rows) == 2 * 2 * 4  # lengths, groups; three ways and the tiled one
    for row in rows:
        if row["way"] == "sdpa-efficient":
            assert "backend" in row["status"]  # not on a CPU
            continue
        assert row["status"] == "ok"
        assert row["error"] < 1e-5
        assert row["forward_flops_per_s"] > 0
        assert row["backward_flops_per_s"] > 0


@pytest.mark.parametrize("tile", [None, 24])
def test_a_wrong_result_shows_as_an_error(monkeypatch, tile):
    def wrong(q, *arguments, **options):
        out = torch.zeros_like(q)
        return out if tile is None else (out, torch.zeros(q.shape[:3]))

    monkeypatch.setattr(attention_ways, "attention" if tile is None else "attend", wrong)
    monkeypatch.setattr(attention_ways, "seconds", lambda *_: 1.0)
    monkeypatch.setattr(attention_ways, "peak_bytes", lambda *_: 1)
    row = measure_tiles(CASE, tile, 1) if tile else measure(CASE, "offload", 1)
    assert row.get("error", 1.0) > 0.5


def test_memory_of_a_backward_is_what_it_takes_besides_its_results(monkeypatch):
    results = 64 * 16 * (4 * 4 + 2 * 2 * 4)  # dq, dk and dv
    read = 64 * 16 * 4 * (3 * 4 + 2 * 2)  # q, out, d_out, k and v
    monkeypatch.setattr(attention_ways, "peak_bytes", lambda *_: results + (results + read) // 4)
    assert measure(CASE, "offload-torch", 1)["backward_extra"] == 0.25


def test_memory_is_not_claimed_where_it_cannot_be_seen():
    row = measure_tiles(CASE, 24, 1)
    assert row["status"] == "ok"
    assert row["backward_peak_bytes"] is None
    assert "backward_extra" not in row


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--ways", "offload,paged"], "--ways: expected some of"),
        (["--groups", "3", "--heads", "4"], "--groups: expected divisors of 4 heads, got 3"),
        (["--tune"], "--tune: expected a card to measure on"),
    ],
)
def test_arguments_that_make_no_sense_are_named(capsys, arguments, message):
    assert main(["attention", "--device", "cpu", *arguments]) == 2
    assert message in capsys.readouterr().err
