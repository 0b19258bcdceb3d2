import pytest
import torch

from offload.ops.intervals import (
    Rows,
    Visibility,
    causal_intervals,
    dense_mask,
    full_intervals,
    host_copy,
    limit_window,
    shift,
    slice_rows,
    with_host_copy,
)


def by_hand(intervals, k0, k1):
    """The definition, one row and key at a time."""
    batch, rows, _ = intervals.shape
    mask = torch.zeros(batch, 1, rows, k1 - k0, dtype=torch.bool)
    for b in range(batch):
        for i in range(rows):
            for k in range(k0, k1):
                mask[b, 0, i, k - k0] = bool(intervals[b, i, 0] <= k < intervals[b, i, 1])
    return mask


def random_intervals(seed, batch=2, rows=5, keys=12):
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, keys + 1, (batch, rows, 2), generator=generator)


def on_a_device(host):
    """Stands for a device tensor: any attempt to read its values raises."""
    return with_host_copy(host.to("meta"), host)


def test_a_causal_row_sees_itself_and_what_is_before_it():
    assert causal_intervals(3, 4).tolist() == [[[0, 4], [0, 5], [0, 6], [0, 7]]]


def test_a_window_counts_the_row_itself():
    rows = causal_intervals(0, 5, window_size=2)
    assert rows.tolist() == [[[0, 1], [0, 2], [1, 3], [2, 4], [3, 5]]]
    assert rows.dtype == torch.int64


def test_full_intervals_see_every_key():
    assert full_intervals(2, 7).tolist() == [[[0, 7], [0, 7]]]


def test_limiting_the_window_keeps_the_last_keys_of_each_row():
    documents = torch.tensor([[[0, 1], [0, 2], [0, 3], [3, 4], [3, 5]]])
    assert limit_window(documents, 2).tolist() == [[[0, 1], [0, 2], [1, 3], [3, 4], [3, 5]]]
    assert limit_window(documents, None) is documents


@pytest.mark.parametrize("size", [0, -1])
def test_a_window_without_room_for_the_row_itself_is_refused(size):
    with pytest.raises(ValueError, match="causal_intervals: expected window_size of at least 1"):
        causal_intervals(0, 4, window_size=size)
    with pytest.raises(ValueError, match="limit_window: expected window_size of at least 1"):
        limit_window(causal_intervals(0, 4), size)


def test_a_cpu_tensor_is_its_own_host_copy():
    rows = causal_intervals(0, 4)
    assert host_copy(rows) is rows


def test_the_host_copy_is_remembered_and_not_read_again():
    host = causal_intervals(0, 4)
    device = on_a_device(host)
    assert host_copy(device) is host
    assert causal_intervals(2, 4, device="meta").device.type == "meta"
    assert torch.equal(host_copy(causal_intervals(2, 4, device="meta")), causal_intervals(2, 4))


@pytest.mark.parametrize(
    "change",
    [lambda x: slice_rows(x, 1, 3), lambda x: shift(x, 2), lambda x: limit_window(x, 2)],
)
def test_what_is_made_from_device_intervals_knows_its_host_copy(change):
    host = causal_intervals(1, 5)
    changed = change(on_a_device(host))
    assert changed.device.type == "meta"
    assert changed.shape == change(host).shape
    assert torch.equal(host_copy(changed), change(host))


def test_slicing_rows_shares_memory():
    rows = causal_intervals(0, 8)
    part = slice_rows(rows, 2, 5)
    assert part.tolist() == [[[0, 3], [0, 4], [0, 5]]]
    assert part.untyped_storage().data_ptr() == rows.untyped_storage().data_ptr()


def test_shifting_moves_the_origin_and_stops_at_zero():
    rows = torch.tensor([[[0, 3], [2, 6], [5, 9]]])
    assert shift(rows, 4).tolist() == [[[0, 0], [0, 2], [1, 5]]]
    assert rows.tolist() == [[[0, 3], [2, 6], [5, 9]]]


@pytest.mark.parametrize("seed", range(5))
def test_the_dense_mask_is_the_definition(seed):
    rows = random_intervals(seed)
    assert torch.equal(dense_mask(rows, 3, 9), by_hand(rows, 3, 9))


@pytest.mark.parametrize(
    ("rows", "k0", "k1", "expected"),
    [
        (causal_intervals(4, 4), 0, 4, Visibility.ALL),
        (causal_intervals(4, 4), 4, 8, Visibility.SQUARE_CAUSAL),
        (causal_intervals(4, 4), 8, 12, Visibility.NONE),
        (causal_intervals(4, 4), 4, 7, Visibility.PARTIAL),
        (causal_intervals(4, 4), 3, 7, Visibility.PARTIAL),
        (causal_intervals(4, 4), 5, 9, Visibility.PARTIAL),
        (causal_intervals(4, 4, window_size=4), 4, 8, Visibility.SQUARE_CAUSAL),
        (causal_intervals(4, 4, window_size=3), 4, 8, Visibility.PARTIAL),
        (causal_intervals(4, 4, window_size=8), 1, 4, Visibility.ALL),
        (causal_intervals(4, 4, window_size=7), 1, 4, Visibility.ALL),
        (causal_intervals(4, 4, window_size=6), 1, 4, Visibility.PARTIAL),
        (causal_intervals(4, 1), 4, 5, Visibility.ALL),
        (torch.tensor([[[0, 4], [9, 3]]]), 0, 4, Visibility.PARTIAL),
        (torch.tensor([[[1, 2], [0, 2]]]), 0, 2, Visibility.PARTIAL),
        (torch.tensor([[[0, 0], [0, 2]]]), 0, 2, Visibility.PARTIAL),
        (torch.tensor([[[7, 7], [9, 3]]]), 0, 4, Visibility.NONE),
    ],
)
def test_what_a_tile_sees_of_a_range(rows, k0, k1, expected):
    assert Rows(rows).part(k0, k1).visibility is expected


def test_one_batch_row_that_differs_makes_a_range_partial():
    padded = causal_intervals(4, 4).repeat(2, 1, 1)
    padded[1, :, 0] = 5
    assert Rows(padded[:1]).part(4, 8).visibility is Visibility.SQUARE_CAUSAL
    assert Rows(padded).part(4, 8).visibility is Visibility.PARTIAL
    assert Rows(padded).part(0, 4).visibility is Visibility.PARTIAL


@pytest.mark.parametrize("seed", range(40))
def test_a_part_leaves_out_no_visible_key_and_says_what_rows_see(seed):
    rows = random_intervals(seed, batch=1 + seed % 2, rows=1 + seed % 4)
    if seed % 3 == 0:
        rows = causal_intervals(seed % 7, rows.shape[1], window_size=1 + seed % 5)
    k0, k1 = sorted(torch.randperm(13, generator=torch.Generator().manual_seed(seed))[:2].tolist())
    part = Rows(rows).part(k0, k1)
    whole = by_hand(rows, k0, k1)
    cpu = torch.device("cpu")
    assert k0 <= part.begin <= part.end <= k1
    assert torch.equal(whole[..., part.begin - k0 : part.end - k0], part.dense(cpu))
    assert int(whole.sum()) == int(part.dense(cpu).sum())
    assert torch.equal(part.blind_rows(cpu), ~whole.any(-1))
    assert part.has_blind_rows == bool((~whole.any(-1)).any())
    if part.visibility is Visibility.ALL:
        assert bool(part.dense(cpu).all())
    elif part.visibility is Visibility.SQUARE_CAUSAL:
        square = torch.ones(rows.shape[1], rows.shape[1]).tril().bool()
        assert torch.equal(part.dense(cpu), square.expand_as(part.dense(cpu)))
    else:
        assert not bool(part.dense(cpu).all()) or part.begin == part.end


def test_asking_about_ranges_never_reads_the_device():
    rows = Rows(on_a_device(causal_intervals(4, 4, window_size=6)))
    assert rows.part(0, 4).visibility is Visibility.PARTIAL
    assert rows.part(4, 8).visibility is Visibility.SQUARE_CAUSAL
    assert rows.part(8, 12).visibility is Visibility.NONE


def test_keys_before_a_window_are_left_out():
    part = Rows(causal_intervals(8, 4, window_size=3)).part(0, 8)
    assert (part.begin, part.end) == (6, 8)


def test_blind_rows_do_not_widen_the_range():
    rows = torch.tensor([[[0, 0], [6, 9], [100, 2]]])
    part = Rows(rows).part(0, 12)
    assert (part.begin, part.end) == (6, 9)
    assert part.visibility is Visibility.PARTIAL
    assert part.has_blind_rows
