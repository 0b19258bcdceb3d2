"""The Triton kernels as compiled for cards that need not be there."""

import json
import os
import subprocess
import sys

import pytest

from bench.kernels import CARDS, complaints, narrow_products

pytest.importorskip("triton")

EVERY_RUN = [
    (",".join(map(str, CARDS)), "128", "bfloat16", "causal", "i64"),
    ("80,90,100", "64", "bfloat16", "intervals", "i64"),
    ("86,90", "80,256", "bfloat16", "causal", "i64"),
    ("90", "128", "float16", "intervals", "i32"),
]
"""Cards, head dims, dtype, mask and strides; `python -m bench kernels` compiles all of them."""


@pytest.mark.parametrize("case", EVERY_RUN, ids=lambda case: " ".join(case))
def test_entries_of_the_tile_table_fit_and_do_not_spill(tmp_path, case):
    cards, head_dims, dtype, mask, strides = case
    rows = compiled(
        tmp_path,
        *("--cards", cards, "--head-dims", head_dims, "--dtypes", dtype),
        *("--masks", mask, "--strides", strides),
    )
    assert len(rows) == 3 * len(cards.split(",")) * len(head_dims.split(","))
    assert not [(row["card"], row["kernel"], c) for row in rows for c in complaints(row)]


def compiled(tmp_path, *options):
    """Runs `bench kernels` in a process of its own: here kernels may be interpreted."""
    out = tmp_path / "kernels.jsonl"
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", "bench", "kernels", *options, "--json", str(out)]
    subprocess.run(command, env=environment, check=False, capture_output=True, timeout=280)
    return [json.loads(line) for line in out.read_text().splitlines()]


@pytest.mark.parametrize("options", ["causal softcap i64", "intervals first,one i32"])
def test_every_way_to_launch_them_compiles(tmp_path, options):
    mask, variants, strides = options.split()
    rows = compiled(
        tmp_path,
        *("--cards", "80", "--head-dims", "64", "--dtypes", "bfloat16", "--masks", mask),
        *("--variants", variants, "--strides", strides),
    )
    assert len(rows) == 3 * len(variants.split(","))
    assert not [(row["kernel"], c) for row in rows for c in complaints(row)]


GOOD = {
    "variant": "usual",
    "spilled_bytes": 0,
    "shared_bytes": 100,
    "shared_limit": 100,
    "dots": 4,
    "tensor_core_dots": 4,
    "tensor_core_ptx": 8,
    "narrow_products": [],
}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"spilled_bytes": 8}, "spills 8 B"),
        ({"shared_bytes": 101}, "takes 101 B of 100 B"),
        ({"tensor_core_dots": 3}, "1 products without tensor cores"),
        ({"tensor_core_ptx": 0}, "0 products without tensor cores"),
        ({"narrow_products": ["%x"]}, "32-bit products of strides"),
    ],
)
def test_what_is_wrong_with_an_entry_is_said(change, message):
    assert not complaints(GOOD)
    assert any(message in complaint for complaint in complaints(GOOD | change))


IR = """
  tt.func public @kernel(%q.at: !tt.ptr<bf16> loc("q.at"), %q.row: i32 loc("q.row"), %rows: i32) {
    %a = tt.splat %q.row : i32 -> tensor<64x1xi32> loc(#loc1)
    %b = arith.{first} %rows, %q.row : {type} loc(#loc2)
    %c = arith.muli %a, %d : {tensor} loc(#loc3)
"""


@pytest.mark.parametrize(
    ("first", "type", "tensor", "found"),
    [
        ("muli", "i64", "tensor<64x1xi64>", []),
        ("addi", "i32", "tensor<64x1xi64>", []),
        ("muli", "i32", "tensor<64x1xi64>", ["%b"]),
        ("muli", "i64", "tensor<64x1xi32>", ["%c"]),
    ],
)
def test_narrow_products_of_strides_are_found(first, type, tensor, found):
    text = IR.replace("{first}", first).replace("{type}", type).replace("{tensor}", tensor)
    assert [line.split()[0] for line in narrow_products(text)] == found


def test_a_text_without_strides_is_no_proof():
    with pytest.raises(ValueError, match="expected arguments that are strides"):
        narrow_products("tt.func public @kernel(%x: i32)")
