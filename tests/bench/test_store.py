"""The benches of the tiers' parts and of codecs, on tiny sizes."""

import json
import subprocess
import sys

import pytest
import torch

from bench import codec, page_cache, store
from bench.cli import main
from bench.page_cache import PageCacheGrowth, read_page_cache
from bench.spec import REPOSITORY, StepSpec


def run_store(tmp_path, *options):
    """Runs the bench in a process of its own: it sets the arena's cap and the disk of its."""
    path = tmp_path / "out.jsonl"
    command = [sys.executable, "-m", "bench", "store", "--json", str(path), *options]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout, [json.loads(line) for line in path.read_text().splitlines()]


def test_every_part_is_measured_and_recorded(tmp_path):
    sizes = ["--tensors", "3", "--shape", "2000x512", "--codec-bytes", "1MiB", "--rounds", "2"]
    printed, rows = run_store(tmp_path, *sizes, "--disk", str(tmp_path), "--disk-bytes", "70MiB")
    assert [row["name"] for row in rows if row["what"] == "allocation"] == ["arena", "malloc"]
    assert {row["name"] for row in rows if row["what"] == "codec"} == {
        f"{name} {way}" for name in ("fp8", "int8") for way in ("encode", "decode")
    }
    disk = [row for row in rows if row["what"] == "disk"]
    assert disk[0]["name"] == "raw loop"
    assert disk[1]["name"].startswith("tier")
    for row in rows:
        assert {"commit", "dirty", "machine", "torch", "started", "device"} <= row.keys()
        rates = [value for key, value in row.items() if key.endswith("gb_per_s")]
        assert rates
        assert min(rates) > 0
    for row in rows[:2]:
        asked = 3 * 2000 * 512 * 2
        assert row["asked_bytes"] == asked
        # The arena takes whole steps of 64 MiB.
        assert asked * 0.9 < row["resident_bytes"] < asked + (80 << 20)
    for row in disk:
        assert row["bytes"] == 64 << 20
    assert all(title in printed for title in ("allocation: ", "codec: ", "disk: "))


@pytest.mark.parametrize(
    ("options", "message"),
    [(["--parts", "arena"], "expected some of allocation"), (["--shape", "12x"], "such as 70000x")],
)
def test_what_is_not_understood_is_said(options, message, capsys):
    assert main(["store", *options]) == 2
    assert message in capsys.readouterr().err


def test_the_page_cache_is_watched_while_something_runs(monkeypatch):
    sizes = iter([100, 700, 250])
    monkeypatch.setattr(page_cache, "read_page_cache", lambda: next(sizes, 150))
    monkeypatch.setattr(page_cache, "_SAMPLE_SECONDS", 0.001)
    with PageCacheGrowth() as growth:
        while growth.grown_bytes < 600:
            pass
    assert growth.grown_bytes == 600


def test_a_system_without_proc_has_no_page_cache_to_watch(monkeypatch):
    assert read_page_cache() > 0
    monkeypatch.setattr(page_cache, "read_page_cache", lambda: None)
    with PageCacheGrowth() as growth:
        pass
    assert growth.grown_bytes is None


def test_gradients_with_a_codec_are_compared_layer_by_layer(store):
    spec = StepSpec("llama", 200, hidden=128, layers=3, heads=2, kv_heads=2, mlp=128, vocab=64)
    figures = codec.compare_gradients(spec, {"input": "fp8", "kv": "fp8"}, tile=64)
    assert len(figures["gradient_cosines"]) == 3
    assert all(0.99 < cosine < 1 - 1e-9 for cosine in figures["gradient_cosines"])
    *layers, norm = figures["codec_errors"]
    assert [layer.keys() for layer in layers] == [{"input", "kv"}] * 3
    assert norm.keys() == {"input"}
    exact, lossy = figures["offloaded_bytes"]
    assert 0.3 < lossy / exact < 0.6
    assert figures["losses_of_one_step"][0] == pytest.approx(figures["losses_of_one_step"][1])


def test_losses_are_of_the_text_piece_by_piece(monkeypatch):
    seen = []
    monkeypatch.setattr(
        codec.tasks, "train_step", lambda model, ids, optimizer: float(seen.append(ids) or 1)
    )
    spec = StepSpec("llama", 90, vocab=64)
    assert list(codec.train(torch.nn.Linear(1, 1), spec, 30, 0.1)) == [1.0] * 3
    assert [ids.shape for ids in seen] == [(1, 30)] * 3
    assert torch.equal(torch.cat(seen, dim=1), codec.models.build_batch(spec))


def test_a_record_can_be_printed(capsys):
    codec.print_row(
        {
            "codec": {"kv": "fp8"},
            "device": "a processor",
            "commit": "0123456789abcdef",
            "gradient_cosines": [0.5, 0.75, 1.0],
            "codec_errors": [{"input": 0.03, "kv": 0.02}, {"input": 0.03}],
            "offloaded_bytes": [1000, 515],
            "loss_curves": {"lossless": [3.0, 2.0], "lossy": [3.0, 2.5]},
        }
    )
    printed = capsys.readouterr().out
    assert "0.500000" in printed
    assert "relative error of kv, %" in printed
    assert "515 of 1,000 bytes, 0.515" in printed
    assert "loss at step 2: 2.0000 lossless, 2.5000 lossy" in printed
    store.print_part([])
    assert capsys.readouterr().out == ""
