import io
import json
import warnings

import pytest
import torch
from rich.console import Console

import offload
from offload.store import engine
from tests.models import FORCED, blocks, step


def loss_of(model):
    return model(torch.ones(2, 63, 32)).pow(2).mean()


def test_a_report_counts_what_moved(store):
    wrapped = offload.wrap(blocks(4), policy=FORCED)
    for seed in range(3):
        step(wrapped, loss_of, seed)
    store.synchronize()
    report = offload.report(wrapped)
    input_bytes = 2 * 63 * 32 * 4
    assert [layer.offloaded_bytes for layer in report.layers] == [3 * input_bytes] * 3 + [0]
    assert [layer.reloaded_bytes for layer in report.layers] == [3 * input_bytes] * 3 + [0]
    assert report.layers[3].kept_bytes == 3 * input_bytes
    assert report.moved_bytes == 2 * 9 * input_bytes
    assert report.steps == 3
    assert report.elapsed_ms > 0
    assert all(layer.d2h_ms > 0 and layer.h2d_ms > 0 for layer in report.layers[:3])
    assert report.verdict.startswith("active: 4/4 layers, 283.5 KiB moved, ")
    assert report.verdict.endswith(" % stalled")


def test_a_report_shows_where_the_bytes_are_now(store):
    wrapped = offload.wrap(blocks(3), policy=FORCED)
    loss = loss_of(wrapped)
    report = offload.report(wrapped)
    assert [layer.host_bytes for layer in report.layers] == [16128, 16128, 0]
    assert [layer.device_bytes for layer in report.layers] == [0, 0, 16128]
    assert report.arena.live_bytes == 2 * 16384
    loss.backward()
    del loss
    assert [layer.host_bytes for layer in offload.report(wrapped).layers] == [0, 0, 0]


@pytest.mark.parametrize(
    ("policy", "verdict"),
    [
        (offload.Policy(), "recomputing only: 3/3 layers.*kept by reference"),
        (offload.Policy(mode="keep"), "not active: 0/3 layers.*'keep'"),
        (offload.Policy(tier="device"), "recomputing only.*tier is 'device'"),
    ],
)
def test_a_verdict_says_why_nothing_moved(store, policy, verdict):
    wrapped = offload.wrap(blocks(3), policy=policy)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        step(wrapped, loss_of)
    assert __import__("re").match(verdict, offload.report(wrapped).verdict)


@pytest.mark.parametrize(
    ("policy", "reason"),
    [
        (offload.Policy(tier="host"), "largest layer input has 16,128 bytes, below min_bytes"),
        (offload.Policy(tier="host", min_bytes=0, keep_last=9), "among the last 9"),
    ],
)
def test_a_step_that_was_to_move_something_and_did_not_warns_once(store, policy, reason):
    wrapped = offload.wrap(blocks(3), policy=policy)
    with pytest.warns(UserWarning, match=f"moved nothing.*{reason}") as caught:  # noqa: PT031
        step(wrapped, loss_of)
        step(wrapped, loss_of)
    assert len([w for w in caught if "moved nothing" in str(w.message)]) == 1
    assert "moved nothing" not in offload.report(wrapped).verdict


def test_reports_of_models_that_did_not_run_or_are_not_wrapped(store):
    assert "not wrapped" in str(offload.report(blocks(2)))
    assert "no layer has run" in offload.report(offload.wrap(blocks(2))).verdict


def test_a_report_prints_as_text_dict_and_rich_table(store):
    wrapped = offload.wrap(blocks(3), policy=FORCED)
    step(wrapped, loss_of)
    report = offload.report(wrapped)
    text = str(report)
    assert text.splitlines()[0] == report.verdict
    assert all(f"layers.{index}" in text for index in range(3))
    assert "host arena: " in text
    restored = json.loads(json.dumps(report.to_dict()))
    assert restored["moved_bytes"] == report.moved_bytes
    assert restored["layers"][0]["name"] == "layers.0"
    console = Console(file=io.StringIO(), width=160)
    console.print(report)
    assert "layers.2" in console.file.getvalue()


def test_a_report_of_the_disk_names_bytes_and_rates(store, tmp_path):
    policy = offload.Policy(mode="checkpoint", min_bytes=0, tier="disk", disk=tmp_path)
    wrapped = offload.wrap(blocks(4), policy=policy)
    assert "not used" not in str(offload.report(wrapped))
    try:
        for seed in range(2):
            step(wrapped, loss_of, seed)
            store.synchronize()
        report = offload.report(wrapped)
        input_bytes = 2 * 63 * 32 * 4
        assert report.disk.directory == str(tmp_path)
        assert report.disk.live_bytes == 0
        assert report.disk.peak_live_bytes >= 16384
        assert report.written_bytes_per_step in (3 * 16384, 2 * 16384, 16384)
        assert report.written_bytes_per_step >= input_bytes
        text = str(report)
        assert "disk: 0 B live (peak " in text
        assert "written a step" in text
        restored = json.loads(json.dumps(report.to_dict()))
        assert restored["disk"]["written_bytes"] == report.disk.written_bytes
    finally:
        del report
        store.synchronize()
        engine.end_disk()
    assert offload.report(wrapped).disk is None
    assert "disk:" not in str(offload.report(wrapped))
