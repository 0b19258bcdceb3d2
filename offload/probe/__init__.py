"""The proof that a layer may run tile by tile: made at its first call, on up to 256 of its tokens.

Two tests. The **leak test** (`leaks.py`) shows that nothing but attention mixes tokens. The layer
runs twice with the same random numbers and the same, recorded, attention output; the second time
half of the tokens are others. For the half that stayed, the output, the queries, keys and values
that reach attention, and the gradient of the input must be equal bit for bit; the gradient of the
input must be exactly zero at the tokens that changed, since no gradient enters there; and the
parameters' gradients must agree, which finds mixing behind a gate that is still zero. The **tile
test** (`tiles.py`) then runs the tokens whole and in ragged tiles, in float32 and evaluation mode,
and compares what reaches attention, the output and the gradients: it finds arguments cut wrongly,
masks that tiles do not understand, positions counted inside, and layers that change with length.

Both are run on a layer that must leave no other trace (`traces.py`): tiles would leave one each.

What they cannot see: a layer that treats tokens beyond the first 256 in another way, such as a
window or a scale by length inside it. `wrap(..., verify=True)` compares the whole first call.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from offload.ambient import RandomState
from offload.errors import TileRefused
from offload.layer_arguments import LayerArguments
from offload.probe.copies import evaluating
from offload.probe.leaks import Trial, leak_tests
from offload.probe.tiles import compare_tiles, tile_test, tolerances_of
from offload.probe.traces import without_traces

PROBE_TOKENS = 256


@dataclass(frozen=True)
class Verdict:
    """What the probe found.

    Attributes:
        tokens: how many it ran on; a proof on fewer than 256 holds for sequences as long only.
        refusal: why the layer must not run by tiles; empty where it may.
    """

    tokens: int
    refusal: str = ""


def prove(
    layer: nn.Module,
    forward: Callable[..., Any],
    arguments: LayerArguments,
    hidden: torch.Tensor,
    *,
    attends: bool,
) -> Verdict:
    """Decides whether a layer may run tile by tile.

    Costs about four training steps of the layer on 256 tokens, and while it runs a float32 copy of
    the layer's weights. Random generators, buffers, `.grad` and hooks of parameters are left alone.

    Args:
        layer: the layer about to be called.
        forward: its forward.
        arguments: of the call.
        hidden: `[B, S, E]`, the call's hidden states; only read.
        attends: whether the layer may call attention, once; else it must not.

    Returns:
        The verdict. Whatever the layer raises in the trial is a refusal, but for a lack of memory.
    """
    tokens = min(PROBE_TOKENS, arguments.tokens)
    begin = min(arguments.first_seeing_token(), arguments.tokens - tokens)

    def trial() -> None:
        part = arguments.part(begin, begin + tokens)
        some = hidden[:, begin : begin + tokens].detach().clone()
        leak_tests(Trial(layer, forward, part), some, attends=attends)
        tile_test(layer, forward, part, some)

    return Verdict(tokens, _refusal(trial, layer, hidden.device))


def verify(
    layer: nn.Module,
    forward: Callable[..., Any],
    arguments: LayerArguments,
    hidden: torch.Tensor,
    tiles: list[tuple[int, int]],
) -> Verdict:
    """Compares a whole call, run in one piece and in its tiles, in its own dtype without dropout.

    Args:
        layer: a layer that was proved.
        forward: its forward.
        arguments: of the call.
        hidden: `[B, S, E]`, the call's hidden states; only read.
        tiles: begin and end of each tile.

    Returns:
        The verdict on all tokens.
    """

    def trial() -> None:
        whole = arguments.part(0, arguments.tokens)
        with evaluating(layer):
            compare_tiles(layer, forward, whole, hidden, tiles, tolerances_of(hidden.dtype))

    reason = _refusal(trial, layer, hidden.device)
    return Verdict(arguments.tokens, f"verify: {reason}" if reason else "")


def _refusal(trial: Callable[[], None], layer: nn.Module, device: torch.device) -> str:
    """Runs a trial of a layer apart from the program around it; says why it failed."""
    before = RandomState([device] if device.type == "cuda" else [])
    try:
        with (
            torch.inference_mode(False),
            torch.enable_grad(),
            # An outer checkpoint of the user's must not count what the trial saves.
            torch.autograd.graph.saved_tensors_hooks(_itself, _itself),
            without_traces(layer),
        ):
            trial()
    except TileRefused as refused:
        return str(refused)
    except torch.OutOfMemoryError:
        raise
    except Exception as error:
        return f"its trial run raised {type(error).__name__}: {error}"
    finally:
        before.restore()
        torch.clear_autocast_cache()
    return ""


def _itself(tensor: torch.Tensor) -> torch.Tensor:
    return tensor
