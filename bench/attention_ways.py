"""Ways to compute causal attention, and how they are measured."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from bench.rates import seconds_of
from offload.ops.attention import attention
from offload.ops.intervals import causal_intervals
from offload.ops.key_blocks import KeyBlock
from offload.ops.tile_attention import attend, attend_backward

Row = dict[str, Any]
Attention = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]

CHECKED_ROWS = 64
"""The last queries, whose output is compared with the formula in float64."""


@dataclass(frozen=True)
class Case:
    """What is computed: causal attention of one sequence, tensors `[1, heads, length, head_dim]`.

    Attributes:
        length: Tokens.
        heads: Of queries.
        kv_heads: Of keys and values.
        head_dim: Of all.
        dtype: A name in torch.
        device: A device name.
    """

    length: int
    heads: int
    kv_heads: int
    head_dim: int
    dtype: str
    device: str

    def tensors(self) -> list[torch.Tensor]:
        """Returns q, k, v and a gradient of the output, views of `[1, length, heads, head_dim]`."""
        generator = torch.Generator(self.device).manual_seed(0)
        options = {"device": self.device, "dtype": getattr(torch, self.dtype)}
        return [
            torch.randn(
                1, self.length, heads, self.head_dim, generator=generator, **options
            ).transpose(1, 2)
            for heads in (self.heads, self.kv_heads, self.kv_heads, self.heads)
        ]

    @property
    def product_flops(self) -> int:
        """FLOPs of one product of all rows with the keys that they see."""
        return self.heads * self.length * (self.length + 1) * self.head_dim


# -- the ways --------------------------------------------------------------------------------------


def _sdpa(case: Case, backend: SDPBackend) -> Attention:
    def attend_whole(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        with sdpa_kernel(backend):
            return F.scaled_dot_product_attention(
                q, k, v, is_causal=True, enable_gqa=case.heads != case.kv_heads
            )

    return attend_whole


def _flex(case: Case) -> Attention:
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    def causal(_b: Any, _h: Any, query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
        return query >= key

    mask = create_block_mask(causal, None, None, case.length, case.length, device=case.device)
    compiled = torch.compile(flex_attention, dynamic=False)
    return functools.partial(compiled, block_mask=mask, enable_gqa=case.heads != case.kv_heads)


def _flash_attn(case: Case) -> Attention:
    from flash_attn import flash_attn_func

    def attend_whole(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        tokens_first = (x.transpose(1, 2) for x in (q, k, v))
        out: torch.Tensor = flash_attn_func(*tokens_first, causal=True)
        return out.transpose(1, 2)

    return attend_whole


WAYS: dict[str, Callable[[Case], Attention]] = {
    "offload": lambda _: attention,
    "offload-torch": lambda _: functools.partial(attention, backend="torch"),
    "sdpa-flash": lambda case: _sdpa(case, SDPBackend.FLASH_ATTENTION),
    "sdpa-efficient": lambda case: _sdpa(case, SDPBackend.EFFICIENT_ATTENTION),
    "flex": _flex,
    "flash-attn": _flash_attn,
}
"""By name. `offload` takes the backend that `auto` takes."""


@dataclass(frozen=True)
class Run:
    """A way on its tensors.

    Attributes:
        forward: Computes and keeps the output.
        backward: Computes gradients from what forward kept, any number of times.
        output: Returns what forward kept.
        forget: Drops it.
    """

    forward: Callable[[], Any]
    backward: Callable[[], Any]
    output: Callable[[], torch.Tensor]
    forget: Callable[[], Any]


# -- measuring -------------------------------------------------------------------------------------


def measure(case: Case, name: str, rounds: int) -> Row:
    """Measures a way on a whole sequence.

    Args:
        case: What is computed.
        name: One of `WAYS`.
        rounds: Timed runs.

    Returns:
        FLOP/s of forward and backward, what they allocate at their peaks, and the error; or a
        status that says why there is none.
    """

    def prepare() -> Run:
        q, k, v, d_out = case.tensors()
        leaves = [x.requires_grad_() for x in (q, k, v)]
        function = WAYS[name](case)
        out: list[torch.Tensor] = []

        def forward() -> None:
            out.append(function(*leaves))

        def backward() -> Any:
            return torch.autograd.grad(out[0], leaves, d_out, retain_graph=True)

        return Run(forward, backward, lambda: out[0], forget=out.clear)

    return _measured(case, name, None, rounds, prepare)


def measure_tiles(case: Case, tile: int, rounds: int) -> Row:
    """Measures ours tile by tile over key blocks of the same length, as a tiled layer does.

    Args:
        case: What is computed.
        tile: Tokens of a tile.
        rounds: Timed runs.

    Returns:
        As `measure`.
    """

    def prepare() -> Run:
        q, k, v, d_out = case.tensors()
        cuts = [slice(at, min(at + tile, case.length)) for at in range(0, case.length, tile)]
        blocks = [KeyBlock(k[:, :, cut], v[:, :, cut], cut.start) for cut in cuts]
        intervals = [causal_intervals(cut.start, cut.stop - cut.start) for cut in cuts]
        results: list[tuple[torch.Tensor, torch.Tensor]] = []

        def forward() -> None:
            for index, cut in enumerate(cuts):
                results.append(attend(q[:, :, cut], blocks[: index + 1], intervals[index]))

        def backward() -> list[torch.Tensor]:
            for block in blocks:
                block.dk = block.dv = None
            return [
                attend_backward(
                    d_out[:, :, cuts[index]],
                    q[:, :, cuts[index]],
                    blocks[: index + 1],
                    *results[index],
                    intervals[index],
                )
                for index in reversed(range(len(cuts)))
            ]

        def output() -> torch.Tensor:
            return torch.cat([out for out, _ in results], 2)

        return Run(forward, backward, output, forget=results.clear)

    return _measured(case, "offload", tile, rounds, prepare)


def _measured(
    case: Case,
    way: str,
    tile: int | None,
    rounds: int,
    prepare: Callable[[], Run],
) -> Row:
    row: Row = {"way": way, "tile": tile, **asdict(case), "status": "ok"}
    try:
        run = prepare()
        run.forward()
        row["error"] = _error(case, run.output())
        run.forget()
        row["forward_peak_bytes"] = peak_bytes(case.device, run.forward)
        run.forget()
        row["forward_seconds"] = seconds(case.device, run.forward, rounds, run.forget)
        run.forward()
        run.backward()
        row["backward_peak_bytes"] = peak_bytes(case.device, run.backward)
        row["backward_seconds"] = seconds(case.device, run.backward, rounds)
    except torch.OutOfMemoryError:
        return row | {"status": "out of memory"}
    except (RuntimeError, ImportError, ValueError) as error:
        return row | {"status": str(error).strip().partition("\n")[0][:100]}
    row["forward_flops_per_s"] = 2 * case.product_flops / row["forward_seconds"]
    # The five products of the formula, however many a way makes.
    row["backward_flops_per_s"] = 5 * case.product_flops / row["backward_seconds"]
    if row["backward_peak_bytes"] is not None:
        row["backward_extra"] = _backward_extra(case, row["backward_peak_bytes"])
    return row


def _backward_extra(case: Case, peak: int) -> float:
    """Memory of a backward besides its results, as a part of all that it reads and writes.

    Its results are dq in its dtype, and dk and dv in float32.
    """
    size = getattr(torch, case.dtype).itemsize
    of_queries, of_keys = (
        case.length * case.head_dim * heads for heads in (case.heads, case.kv_heads)
    )
    results = of_queries * size + 2 * of_keys * 4
    read = (3 * of_queries + 2 * of_keys) * size  # q, out, d_out, k, v
    return (peak - results) / (read + results)


def seconds(
    device: str,
    action: Callable[[], Any],
    rounds: int,
    afterwards: Callable[[], Any] = lambda: None,
) -> float:
    """Runs something several times by the clock of its device.

    Args:
        device: A device name.
        action: What to run; it has run before.
        rounds: How often.
        afterwards: Run after each, on the host alone.

    Returns:
        The median.
    """
    if not device.startswith("cuda"):
        times = []
        for _ in range(rounds):
            times.append(seconds_of(action))
            afterwards()
        return median(times)
    events = [torch.cuda.Event(enable_timing=True) for _ in range(rounds + 1)]
    events[0].record()
    for event in events[1:]:
        action()
        event.record()
        afterwards()
    torch.cuda.synchronize()
    return median(a.elapsed_time(b) for a, b in itertools.pairwise(events)) / 1e3


def peak_bytes(device: str, action: Callable[[], Any]) -> int | None:
    """Returns how much more memory lives at the peak of something than before it; cards only.

    On a CPU nothing sees what is allocated inside an operator.
    """
    if not device.startswith("cuda"):
        action()
        return None
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    action()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before


@torch.no_grad()
def _error(case: Case, out: torch.Tensor) -> float:
    """Returns the largest error of the last queries' output, as a part of its largest entry."""
    q, k, v, _ = case.tensors()
    rows = min(CHECKED_ROWS, case.length)
    worst, largest = 0.0, 0.0
    group = case.heads // case.kv_heads
    seen = torch.arange(case.length, device=q.device) <= torch.arange(
        case.length - rows, case.length, device=q.device
    ).unsqueeze(1)
    for head in range(case.heads):
        keys, values = (x[0, head // group].double() for x in (k, v))
        scores = q[0, head, -rows:].double() @ keys.T * case.head_dim**-0.5
        expected = scores.masked_fill_(~seen, -torch.inf).softmax(-1) @ values
        difference = out[0, head, -rows:].double() - expected
        worst = max(worst, difference.abs().max().item())
        largest = max(largest, expected.abs().max().item())
    return worst / largest
