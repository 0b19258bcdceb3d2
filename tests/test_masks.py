"""Masks of transformers become intervals where each row sees one range of earlier keys."""

import inspect

import pytest
import torch

pytest.importorskip("transformers")
from transformers import masking_utils as library

from offload.adapters.transformers import masks
from offload.ops.intervals import dense_mask, host_copy

TAKES_POSITIONS = "cache_position" in inspect.signature(library.sdpa_mask).parameters
"""transformers 4 passes the positions of the queries, 5 their number and the first one."""

ROWS = 23


def call(mask_function, keys=ROWS, rows=ROWS, offset=0, batch=2, **options):
    where = (
        {"cache_position": torch.arange(offset, offset + rows)}
        if TAKES_POSITIONS
        else {"q_length": rows, "q_offset": offset, "device": torch.device("cpu")}
    )
    return {
        "batch_size": batch,
        "kv_length": keys,
        "kv_offset": 0,
        "mask_function": mask_function,
        "attention_mask": None,
        "allow_is_causal_skip": False,
        "dtype": torch.float32,
        **where,
        **options,
    }


def left_padded() -> torch.Tensor:
    mask = torch.ones(2, ROWS, dtype=torch.bool)
    mask[1, :9] = False
    return mask


def right_padded() -> torch.Tensor:
    mask = torch.ones(2, ROWS, dtype=torch.bool)
    mask[0, 17:] = False
    return mask


def packed():
    documents = torch.tensor([[0] * 5 + [1] * 11 + [2] * 7, [0] * 23])
    inner = library.packed_sequence_mask_function(documents)
    return library.and_masks(library.causal_mask_function, inner)


INTERVALS = {
    "causal": (library.causal_mask_function, {}),
    "left padding": (library.causal_mask_function, {"attention_mask": left_padded()}),
    "right padding": (library.causal_mask_function, {"attention_mask": right_padded()}),
    "window": (library.sliding_window_causal_mask_function(6), {}),
    "padded window": (
        library.sliding_window_causal_mask_function(6),
        {"attention_mask": left_padded()},
    ),
    "packed": (packed(), {}),
    "continued": (library.causal_mask_function, {"keys": 31, "offset": 8}),
    "continued window": (
        library.sliding_window_causal_mask_function(6),
        {"keys": 31, "offset": 8},
    ),
}


@pytest.mark.parametrize("name", INTERVALS)
@pytest.mark.parametrize("block", [1, 1 << 24], ids=["row by row", "at once"])
def test_intervals_show_what_the_librarys_own_mask_shows(name, block, monkeypatch):
    monkeypatch.setattr(masks, "BLOCK_ELEMENTS", block)
    mask_function, options = INTERVALS[name]
    arguments = call(mask_function, **options)
    intervals = masks.interval_mask(**arguments)
    assert masks.is_interval_mask(intervals)
    dense = dense_mask(intervals, 0, arguments["kv_length"]).expand(2, 1, -1, -1)
    assert torch.equal(dense, library.sdpa_mask(**arguments).expand(2, 1, -1, -1))
    assert torch.equal(host_copy(intervals), intervals)


def test_a_plain_causal_mask_is_not_evaluated():
    def counted(*indices):
        raise AssertionError("evaluated")

    assert masks.interval_mask(**call(None)).shape == (1, ROWS, 2)
    ones = torch.ones(2, ROWS, dtype=torch.bool)
    arguments = call(library.causal_mask_function, attention_mask=ones)
    assert masks.interval_mask(**arguments).shape == (1, ROWS, 2)


def holes() -> torch.Tensor:
    mask = torch.ones(2, ROWS, dtype=torch.bool)
    mask[1, 4:7] = False
    return mask


def every_other(batch, head, q, k):
    return (k <= q) & ((q - k) % 2 == 0)


def image_block(batch, head, q, k):
    return (k <= q) | ((q >= 4) & (q < 9) & (k >= 4) & (k < 9))


@pytest.mark.parametrize(
    ("mask_function", "options"),
    [
        (library.causal_mask_function, {"attention_mask": holes()}),
        (every_other, {}),
        (image_block, {}),
        (library.bidirectional_mask_function, {})
        if hasattr(library, "bidirectional_mask_function")
        else (lambda batch, head, q, k: (k >= 0) & (q >= 0), {}),
    ],
    ids=["holes", "every other", "forward in a block", "bidirectional"],
)
def test_what_is_no_interval_of_earlier_keys_is_left_to_the_model(mask_function, options):
    assert masks.interval_mask(**call(mask_function, **options)) is None
