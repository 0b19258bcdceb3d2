"""Interval masks: what each query row sees, as two numbers.

Row `i` sees the keys `lo[i] <= k < hi[i]`, in positions of the whole sequence; `lo >= hi` is a row
that sees nothing. Causal attention with any offset, sliding windows, padding on either side and
packed documents are all of this form, at 16 bytes a row instead of a byte a row and key.

Legend: `B` batch, or 1 where every sequence of the batch has the same mask; `T` rows; `N` keys.
Intervals are int64 `[B or 1, T, 2]`, `[..., 0]` is `lo` and `[..., 1]` is `hi`.

Decisions are made from a copy on the CPU, so that a loop over tiles never waits on the device. The
copy is remembered on the tensor: do not write into intervals in place.
"""

from __future__ import annotations

import enum
from collections.abc import Callable
from dataclasses import dataclass

import torch

MAX_CAUSAL_POSITION = 1 << 30
"""Positions that `causal_pattern` vouches for: sums of two of them fit into 32 bits."""


class Visibility(enum.Enum):
    """What the rows of a tile see of a range of keys."""

    NONE = "none"
    ALL = "all"
    SQUARE_CAUSAL = "square causal"
    """As many keys as rows, and row `i` sees exactly the first `i + 1` of them."""
    PARTIAL = "partial"


@dataclass(frozen=True, eq=False)
class Part:
    """The keys `begin <= k < end` as the rows of a tile see them.

    Made by `Rows.part`, which leaves out keys on either side that no row sees.
    """

    intervals: torch.Tensor
    begin: int
    end: int
    visibility: Visibility
    has_blind_rows: bool
    """Whether a row sees none of these keys."""

    def slice_rows(self, begin: int, end: int) -> Part:
        """Returns the same keys for the rows `begin` to `end`, without asking what they see."""
        intervals = slice_rows(self.intervals, begin, end)
        return Part(intervals, self.begin, self.end, Visibility.PARTIAL, self.has_blind_rows)

    def dense(self, device: torch.device) -> torch.Tensor:
        """Returns `[B or 1, 1, T, N]` bool on `device`, true where a row sees a key."""
        return dense_mask(self.intervals.to(device), self.begin, self.end)

    def blind_rows(self, device: torch.device) -> torch.Tensor:
        """Returns `[B or 1, 1, T]` bool on `device`, true where a row sees none of these keys."""
        lo, hi = self.intervals.to(device).clamp(self.begin, self.end).unbind(-1)
        return (hi <= lo).unsqueeze(1)


class Rows:
    """The rows of a tile, asked about one range of keys after another.

    Reads the host copy once for the bounds over all rows; a range that lies clear of the edges of
    the mask then costs a few comparisons of Python integers.

    Args:
        intervals: `[B or 1, T, 2]` int64, on any device.
    """

    def __init__(self, intervals: torch.Tensor) -> None:
        self.intervals = intervals
        self._host = host_copy(intervals)
        lo, hi = self._host.unbind(-1)
        seeing = lo < hi
        self._seen = bool(seeing.any())
        if self._seen:
            self._all_see = bool(seeing.all())
            self._lo_min, self._lo_max = _extremes(lo if self._all_see else lo[seeing])
            self._hi_min, self._hi_max = _extremes(hi if self._all_see else hi[seeing])

    def part(self, k0: int, k1: int) -> Part:
        """Returns what the rows see of the keys `k0 <= k < k1`.

        Args:
            k0: position of the first key.
            k1: position behind the last key.

        Returns:
            The range narrowed to keys that some row may see, and what the rows see of it; an empty
            range where no row sees any.
        """
        if not self._seen:
            return Part(self.intervals, k0, k0, Visibility.NONE, True)
        begin, end = max(k0, self._lo_min), min(k1, self._hi_max)
        if begin >= end:
            return Part(self.intervals, k0, k0, Visibility.NONE, True)
        if self._all_see and self._lo_max <= begin and self._hi_min >= end:
            return Part(self.intervals, begin, end, Visibility.ALL, False)
        visibility, blind = _compare(self._host, begin, end)
        return Part(self.intervals, begin, end, visibility, blind)


def causal_intervals(
    start: int,
    rows: int,
    *,
    window_size: int | None = None,
    device: torch.device | str | None = None,
) -> torch.Tensor:
    """Makes the intervals of causal attention.

    Args:
        start: position of the first row in the sequence.
        rows: number of rows.
        window_size: number of keys a row sees at most, itself included; None for all before it.
        device: where the intervals shall be; the CPU by default.

    Returns:
        `[1, rows, 2]` int64; a device tensor remembers its host copy.

    Raises:
        ValueError: if `window_size` is not positive.
    """
    _check_window_size("causal_intervals", window_size)
    hi = torch.arange(start + 1, start + rows + 1, device="cpu")
    lo = torch.zeros_like(hi) if window_size is None else (hi - window_size).clamp_(min=0)
    return _placed(torch.stack((lo, hi), dim=-1).unsqueeze(0), device)


def full_intervals(
    rows: int, keys: int, *, device: torch.device | str | None = None
) -> torch.Tensor:
    """Makes the intervals, `[1, rows, 2]`, of rows that each see the keys from 0 to `keys`."""
    return _placed(torch.tensor([0, keys], device="cpu").expand(1, rows, 2).contiguous(), device)


def limit_window(intervals: torch.Tensor, window_size: int | None) -> torch.Tensor:
    """Lets each row see the last `window_size` of its keys only; None changes nothing.

    Args:
        intervals: `[B or 1, T, 2]`.
        window_size: number of keys a row sees at most.

    Returns:
        `[B or 1, T, 2]` on the device of `intervals`; carries the host copy along.

    Raises:
        ValueError: if `window_size` is not positive.
    """
    _check_window_size("limit_window", window_size)
    if window_size is None:
        return intervals

    def limited(bounds: torch.Tensor) -> torch.Tensor:
        lo, hi = bounds.unbind(-1)
        return torch.stack((torch.maximum(lo, hi - window_size), hi), dim=-1)

    return _on_both(intervals, limited)


def host_copy(intervals: torch.Tensor) -> torch.Tensor:
    """Returns the same values on the CPU; a CPU tensor is its own copy.

    The copy of a device tensor is remembered on it. Only where none is remembered yet does this
    wait for the device.
    """
    if intervals.device.type == "cpu":
        return intervals
    remembered: torch.Tensor | None = getattr(intervals, "_offload_host", None)
    if remembered is None:
        remembered = intervals.cpu()
        with_host_copy(intervals, remembered)
    return remembered


def with_host_copy(device_tensor: torch.Tensor, host_tensor: torch.Tensor) -> torch.Tensor:
    """Remembers `host_tensor` as the host copy of `device_tensor`, and returns the latter."""
    device_tensor._offload_host = host_tensor  # type: ignore[attr-defined]
    return device_tensor


def causal_pattern(intervals: torch.Tensor) -> tuple[int, int | None] | None:
    """Recognises the intervals of causal attention, from their host copy.

    Args:
        intervals: `[B or 1, T, 2]` with at least one row.

    Returns:
        The position of the first row, and the number of keys that a row sees at most or None for
        all before it, as `causal_intervals` takes them; None for any other intervals, and for
        positions beyond `MAX_CAUSAL_POSITION`.
    """
    lo, hi = host_copy(intervals).unbind(-1)
    start = int(hi[0, 0]) - 1
    if abs(start) + hi.shape[1] > MAX_CAUSAL_POSITION:
        return None
    if not bool((hi == torch.arange(start + 1, start + 1 + hi.shape[1])).all()):
        return None
    if not bool(lo.any()):
        return start, None
    window_size = int(hi[0, -1] - lo[0, -1])
    if window_size < 1 or not bool((lo == (hi - window_size).clamp_(min=0)).all()):
        return None
    return start, window_size


def slice_rows(intervals: torch.Tensor, begin: int, end: int) -> torch.Tensor:
    """Returns the rows `begin` to `end` of the intervals, a view; carries the host copy along."""
    return _on_both(intervals, lambda bounds: bounds[:, begin:end])


def shift(intervals: torch.Tensor, offset: int) -> torch.Tensor:
    """Subtracts `offset` from both bounds, not below 0; carries the host copy along."""
    return _on_both(intervals, lambda bounds: (bounds - offset).clamp_(min=0))


def dense_mask(intervals: torch.Tensor, k0: int, k1: int) -> torch.Tensor:
    """Writes intervals out as a mask over the keys `k0 <= k < k1`.

    Args:
        intervals: `[B or 1, T, 2]`.
        k0: position of the first key.
        k1: position behind the last key.

    Returns:
        `[B or 1, 1, T, N]` bool on the intervals' device, true where the row sees the key.
    """
    keys = torch.arange(k0, k1, device=intervals.device)
    lo, hi = intervals.unsqueeze(1).unbind(-1)
    return (lo.unsqueeze(-1) <= keys) & (keys < hi.unsqueeze(-1))


def check_intervals(function: str, q: torch.Tensor, intervals: torch.Tensor) -> None:
    """Raises where intervals do not fit queries `[B, H, T, D]`; `function` names the caller."""
    if intervals.dtype != torch.int64:
        raise TypeError(
            f"{function}: expected int64 intervals, got {intervals.dtype}. "
            "Make them with causal_intervals, or from lo and hi of each row."
        )
    batch, _, rows, _ = q.shape
    if intervals.shape not in ((batch, rows, 2), (1, rows, 2)):
        raise ValueError(
            f"{function}: expected intervals of shape {(batch, rows, 2)} or {(1, rows, 2)}, got "
            f"{tuple(intervals.shape)}. Give lo and hi of each of q's rows."
        )
    if intervals.device.type != "cpu" and intervals.device != q.device:
        raise ValueError(
            f"{function}: expected intervals on {q.device} or the CPU, got {intervals.device}. "
            "Move them."
        )


def _compare(host: torch.Tensor, k0: int, k1: int) -> tuple[Visibility, bool]:
    """Returns what the rows see of a range, and whether a row sees none of it."""
    lo, hi = host.clamp(k0, k1).unbind(-1)
    counts = hi - lo
    fewest, most = _extremes(counts)
    blind = fewest <= 0
    if most <= 0:
        return Visibility.NONE, blind
    if fewest == k1 - k0:
        return Visibility.ALL, blind
    rows = host.shape[1]
    if k1 - k0 == rows and bool((lo == k0).all()):
        staircase = torch.arange(1, rows + 1)
        if bool((counts == staircase).all()):
            return Visibility.SQUARE_CAUSAL, blind
    return Visibility.PARTIAL, blind


def _extremes(values: torch.Tensor) -> tuple[int, int]:
    smallest, largest = torch.aminmax(values)
    return int(smallest), int(largest)


def _on_both(
    intervals: torch.Tensor, change: Callable[[torch.Tensor], torch.Tensor]
) -> torch.Tensor:
    """Applies `change` to the intervals and to the host copy that they remember, if any."""
    changed = change(intervals)
    remembered: torch.Tensor | None = getattr(intervals, "_offload_host", None)
    return changed if remembered is None else with_host_copy(changed, change(remembered))


def _placed(host: torch.Tensor, device: torch.device | str | None) -> torch.Tensor:
    if device is None or torch.device(device).type == "cpu":
        return host
    return with_host_copy(host.to(device), host)


def _check_window_size(function: str, window_size: int | None) -> None:
    if window_size is not None and window_size < 1:
        raise ValueError(
            f"{function}: expected window_size of at least 1, got {window_size}. "
            "Pass None for no window."
        )
