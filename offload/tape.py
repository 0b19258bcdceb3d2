"""What one layer's call keeps for backward, tile by tile, and what backward makes of it.

Legend: `B` batch, `T` rows of a tile, `H` heads, `Hk` KV heads, `D` head dim.

The order in which backward needs things is the reverse of the order in which they are linked for
prefetch: first the keys and values of all tiles, then output, LSE and input of one tile after the
other, last tile first. So tiles are linked as they come, and the keys behind them at the end.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch.autograd.function import once_differentiable

from offload.ambient import RandomState
from offload.errors import OffloadError, TileRefused
from offload.ops.intervals import causal_intervals, host_copy
from offload.ops.key_blocks import KeyBlock
from offload.ops.routing import AttentionCall
from offload.ops.tile_attention import attend, attend_backward
from offload.policy import NO_CODECS, Codecs
from offload.store import Store, Ticket
from offload.store.layout import compact
from offload.store.statistics import Record

INPUTS_AHEAD = 4
"""Reloads started ahead of use, in inputs of a tile: what about two tiles need.

Copies overlap as soon as one tile's are ahead; what is brought back earlier only takes memory.
"""


@dataclass
class TileRecord:
    """The tickets of one tile. Those of attention are None where the layer has none.

    Attributes:
        begin, end: positions of the tile in the sequence.
        hidden: the layer's input, `[B, T, E]`.
        k, v: `[B, Hk, T, D]`.
        out: attention's output, `[B, H, T, D]`.
        lse: `[B, H, T]` in max(float32, dtype).
        random: the random generators as the tile met them.
    """

    begin: int
    end: int
    hidden: Ticket | None = None
    k: Ticket | None = None
    v: Ticket | None = None
    out: Ticket | None = None
    lse: Ticket | None = None
    random: RandomState | None = None


class Tape:
    """The tickets of one call of a layer; belongs to the call's autograd node.

    After forward it is not changed any more, so that a graph that is kept can be walked again.

    Args:
        tiles: begin and end of each tile, in order.
        store: where tensors go; None keeps nothing, for a forward without backward.
        record: where to count.
        on_host: whether tensors leave the device. The last tile's never do with `keep_last`.
        keep_last: whether backward begins with this layer.
        leaves: whether what leaves the device goes on to the disk at once.
        codecs: of what leaves it.
        backend: of attention.
    """

    def __init__(
        self,
        tiles: list[tuple[int, int]],
        store: Store | None,
        record: Record | None = None,
        *,
        on_host: bool = False,
        keep_last: bool = False,
        leaves: bool = False,
        codecs: Codecs = NO_CODECS,
        backend: str = "auto",
    ) -> None:
        self.tiles = [TileRecord(begin, end) for begin, end in tiles]
        self.backend = backend
        self.store = store
        self._record = record
        self._on_host = on_host
        self._keep_last = keep_last
        self._leaves = leaves
        self._codecs = codecs
        self._ahead_bytes: int | None = None
        self.blocks: list[KeyBlock] = []

    def put(
        self, tile: TileRecord, tensor: torch.Tensor, role: str = "", *, in_order: bool = True
    ) -> Ticket:
        """Stores one tensor of a tile where the policy wants it.

        Args:
            tile: the tile it belongs to.
            tensor: must not be written to from now on.
            role: a field of `Codecs`, whose codec it is stored with; empty for none.
            in_order: whether to link it for prefetch.

        Returns:
            The ticket.
        """
        assert self.store is not None
        stays = self._keep_last and tile is self.tiles[-1]
        if self._ahead_bytes is None:
            self._ahead_bytes = INPUTS_AHEAD * tensor.nbytes
        options: Any = {"in_order": in_order, "ahead_bytes": self._ahead_bytes, "role": role}
        if self._on_host and not stays:
            codec = getattr(self._codecs, role) if role else None
            options |= {"leaves": self._leaves, "codec": codec}
            return self.store.offload(tensor, self._record, **options)
        if self._on_host and tensor.untyped_storage().nbytes() > tensor.nbytes:
            tensor = tensor.clone()  # the rest of what it is a part of may go
        return self.store.keep(tensor, self._record, **options)

    def end_forward(self) -> None:
        """Lets the device's key blocks go, and links their tickets where backward begins."""
        self.blocks.clear()
        if self.store is not None:
            for tile in self.tiles:
                for ticket in (tile.k, tile.v):
                    if ticket is not None:
                        self.store.link(ticket)


class ForwardAttention:
    """Takes the attention call of a tile in forward: computes it over the tape's keys.

    Args:
        tape: gets the tile's keys and values, and what backward needs.
        tile: the tile that runs.
    """

    def __init__(self, tape: Tape, tile: TileRecord) -> None:
        self._tape = tape
        self._tile = tile
        self._called = False

    def __call__(self, call: AttentionCall) -> torch.Tensor:
        """Returns the tile's attention output, `[B, H, T, D]`."""
        if self._called:
            raise TileRefused("it calls attention more than once")
        self._called = True
        tape, tile = self._tape, self._tile
        intervals = intervals_of_tile(tile, call)
        # A copy where keys are a part of a larger tensor, such as a fused projection's output.
        block = KeyBlock(compact(call.k.detach())[0], compact(call.v.detach())[0], tile.begin)
        last = len(tape.blocks)
        tape.blocks.append(block)
        with torch._C.DisableTorchFunction():  # what looks for torch's attention is not needed here
            out, lse = attend(
                call.q,
                [tape.blocks[i] for i in seen_tiles(tape.tiles, last, intervals)],
                intervals,
                softmax_scale=call.softmax_scale,
                softcap=call.softcap,
                backend=tape.backend,
            )
        if tape.store is not None:
            tile.k = tape.put(tile, block.k, "kv", in_order=False)
            tile.v = tape.put(tile, block.v, "kv", in_order=False)
            tile.out = tape.put(tile, out, "attention")
            tile.lse = tape.put(tile, lse)
        return out


class BackwardKeys:
    """The key blocks of one backward pass, with the accumulators of their gradients.

    Blocks come back from the tape where a tile first needs them and die one by one as the tiles are
    finished, so that their memory serves what is prefetched for the layer before.

    Args:
        tape: the tape of the call.
    """

    def __init__(self, tape: Tape) -> None:
        self.tape = tape
        self._blocks: dict[int, KeyBlock] = {}

    def up_to(self, index: int, intervals: torch.Tensor) -> list[KeyBlock]:
        """Returns the blocks of the tiles up to `index` that a row may see, reloaded if need be."""
        seen = seen_tiles(self.tape.tiles, index, intervals)
        for i in reversed(seen):
            if i not in self._blocks:
                tile = self.tape.tiles[i]
                assert tile.k is not None  # `TiledCall.forward_all` saw to it
                assert tile.v is not None
                v = tile.v.reload()
                self._blocks[i] = KeyBlock(tile.k.reload(), v, tile.begin)
        return [self._blocks[i] for i in seen]

    def pop(self, index: int) -> KeyBlock | None:
        """Forgets the block of a finished tile and hands it out; None where it was not needed."""
        return self._blocks.pop(index, None)


class BackwardAttention:
    """Takes the attention call of a tile in the recompute: replays the output from the tape.

    Args:
        keys: the key blocks of this backward pass.
        index: which tile runs.
    """

    def __init__(self, keys: BackwardKeys, index: int) -> None:
        self.keys = keys
        self.index = index
        self.tile = keys.tape.tiles[index]

    def __call__(self, call: AttentionCall) -> torch.Tensor:
        """Returns the recorded output, `[B, H, T, D]`, differentiable."""
        intervals = intervals_of_tile(self.tile, call)
        settings = {
            "softmax_scale": call.softmax_scale,
            "softcap": call.softcap,
            "backend": self.keys.tape.backend,
        }
        output: torch.Tensor = _ReplayedAttention.apply(  # type: ignore[no-untyped-call]
            call.q, call.k, call.v, self, intervals, settings
        )
        return output


class _ReplayedAttention(torch.autograd.Function):
    """Attention whose forward is the tape's record and whose backward is computed from it."""

    @staticmethod
    def forward(
        ctx: Any,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        route: BackwardAttention,
        intervals: torch.Tensor,
        settings: dict[str, Any],
    ) -> torch.Tensor:
        tile = route.tile
        if tile.out is None or tile.lse is None:
            raise OffloadError(
                "offload: expected a layer that calls attention in backward as it did in forward, "
                "but it called none there. Leave the layer out with layers=."
            )
        ctx.lse = tile.lse.reload()
        ctx.out = tile.out.reload()
        ctx.save_for_backward(q)
        ctx.route, ctx.intervals, ctx.settings = route, intervals, settings
        ctx.dtypes = k.dtype, v.dtype
        out: torch.Tensor = ctx.out.detach()  # autograd marks what is returned as made here
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_out: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        (q,) = ctx.saved_tensors
        keys, index = ctx.route.keys, ctx.route.index
        blocks = keys.up_to(index, ctx.intervals)
        dq = attend_backward(d_out, q, blocks, ctx.out, ctx.lse, ctx.intervals, **ctx.settings)
        ctx.out = ctx.lse = None
        own = keys.pop(index)
        dk = torch.zeros_like(own.k) if own.dk is None else own.dk.to(ctx.dtypes[0])
        dv = torch.zeros_like(own.v) if own.dv is None else own.dv.to(ctx.dtypes[1])
        return dq, dk, dv, None, None, None


def intervals_of_tile(tile: TileRecord, call: AttentionCall) -> torch.Tensor:
    """Returns the intervals of a tile's rows, after a check that the tile can serve the call.

    Args:
        tile: the tile that runs.
        call: what its layer asks for.

    Returns:
        `[B or 1, T, 2]` int64.

    Raises:
        TileRefused: if queries or keys are not the tile's own, or a row sees keys behind the tile.
    """
    rows = tile.end - tile.begin
    if not call.q.shape[2] == call.k.shape[2] == call.v.shape[2] == rows:
        raise TileRefused("attention gets keys or queries of other tokens than the layer's input")
    if call.v.shape[-1] != call.q.shape[-1]:
        raise TileRefused("its values have another head dim than its keys")
    if call.intervals is None:
        return causal_intervals(tile.begin, rows, window_size=call.window_size)
    if call.window_size is not None:
        raise TileRefused("attention gets intervals and a window as well")
    if int(host_copy(call.intervals)[..., 1].max()) > tile.end:
        raise TileRefused("a token attends to tokens after its tile")
    return call.intervals


def first_seen_key(intervals: torch.Tensor) -> int:
    """Returns the first key that a row may see, from the intervals' host copy."""
    lo, hi = host_copy(intervals).unbind(-1)
    seeing = lo < hi
    return int(lo[seeing].min()) if bool(seeing.any()) else int(hi.max())


def seen_tiles(tiles: list[TileRecord], index: int, intervals: torch.Tensor) -> list[int]:
    """Returns which tiles hold keys that a row of tile `index` may see; its own is always last."""
    first = first_seen_key(intervals)
    return [*(i for i in range(index) if tiles[i].end > first), index]
