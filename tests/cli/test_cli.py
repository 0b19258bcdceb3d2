"""The command `offload`."""

import json
import subprocess
import sys

import pytest
import torch

import offload
from offload.cli import doctor, main
from offload.cli.show import show_table
from offload.planner.cards import CARDS
from tests.planner.cases import llama

PLAN = ["plan", "--tokens", "512", "--dtype", "float32", "--optimizer", "sgd"]


@pytest.fixture
def folder(tmp_path):
    llama(architectures=["LlamaForCausalLM"]).save_pretrained(tmp_path)
    return str(tmp_path)


def test_a_folder_is_planned_and_printed(folder, capsys):
    assert main([*PLAN, folder, "--memory", "8GB", "--max-tokens"]) == 0
    printed = capsys.readouterr().out
    for expected in ("weights", "needed", "run as", "tokens a second", "longest sequence"):
        assert expected in printed


def test_json_is_the_plan(folder, capsys):
    options = ["--card", "rtx 4060", "--lora", "4", "--4bit", "--host", "1GB", "--json"]
    assert main([*PLAN, folder, *options]) == 0
    found = json.loads(capsys.readouterr().out)
    expected = offload.plan(
        folder,
        tokens=512,
        card="RTX 4060",
        lora=4,
        four_bit=True,
        host="1GB",
        optimizer="sgd",
        dtype=torch.float32,
    )
    assert found == json.loads(json.dumps(expected.to_dict()))


def test_several_cards_are_given_by_name(folder, capsys):
    memory = "cuda:0=1200MB, cuda:1=1200MB"
    assert main([*PLAN, folder, "--memory", memory, "--json"]) == 0
    shares = json.loads(capsys.readouterr().out)["shares"]
    assert [share["device"] for share in shares] == ["cuda:0", "cuda:1"]


def test_what_does_not_fit_is_said_with_status_one(folder, capsys):
    memory = str((1 << 30) + (5 << 20))  # besides the reserve
    assert main([*PLAN, folder, "--memory", memory]) == 1
    assert "Longest sequence that fits" in capsys.readouterr().err


@pytest.mark.parametrize("options", [["--card", "Voodoo"], ["--memory", "lots"], ["--tokens", "1"]])
def test_wrong_arguments_have_status_two(folder, options, capsys):
    assert main([*PLAN, folder, *options]) == 2
    assert "offload plan: " in capsys.readouterr().err


def test_a_picture_shows_four_ways(folder, tmp_path):
    picture = tmp_path / "memory.png"
    assert main([*PLAN, folder, "--memory", "8GB", "--plot", str(picture)]) == 0
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert picture.stat().st_size > 20_000


def test_cards_are_listed(capsys):
    assert main(["cards"]) == 0
    printed = capsys.readouterr().out
    assert all(card.name in printed for card in CARDS)


def test_tables_need_no_rich(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "rich.table", None)
    show_table(("name", "size"), [("a", "1"), ("longer", "20")])
    assert capsys.readouterr().out.splitlines() == ["name    size", "a       1", "longer  20"]


def test_the_doctor_finds_this_machine(capsys):
    assert main(["doctor"]) == 0
    printed = capsys.readouterr().out
    for expected in ("torch", torch.__version__, "native build", "host memory", "disk tier"):
        assert expected in printed


def test_the_doctor_says_how_to_get_what_is_missing(monkeypatch, tmp_path):
    found = {item.what: item for item in doctor.examine(str(tmp_path / "nowhere"))}
    assert found["disk tier"].advice
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(doctor._native, "built_with_cuda", lambda: False)
    build = doctor._native_build()
    assert build.broken
    assert "OFFLOAD_CUDA=ON" in build.advice
    monkeypatch.setattr(doctor.importlib.metadata, "version", _missing)
    assert "pip install triton" in doctor._package("triton", "kernels").advice


def _missing(name):
    raise doctor.importlib.metadata.PackageNotFoundError(name)


@pytest.mark.parametrize(
    ("line", "found", "advised"),
    [
        ("4, 16, 4, 16", "PCIe 4.0 x16", False),
        ("1, 16, 4, 16", "PCIe 4.0 x16, slower while idle", False),
        ("4, 8, 4, 16", "PCIe 4.0 x8", True),
        ("[N/A], 16, 4, 16", "unknown", False),
    ],
)
def test_the_doctor_reads_the_slot(line, found, advised):
    finding = doctor.link_finding(0, line)
    assert finding.found == found
    assert bool(finding.advice) == advised


def test_the_module_is_the_command():
    done = subprocess.run(
        [sys.executable, "-m", "offload", "cards"], capture_output=True, text=True, check=True
    )
    assert "RTX 4060" in done.stdout
