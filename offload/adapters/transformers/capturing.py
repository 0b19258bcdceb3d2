"""The library's collection of hidden states and attentions."""

from __future__ import annotations

import sys


def stop_collecting_outputs() -> None:
    """Empties the collector of hidden states and attentions in the current context.

    The library's forward hooks on modules inside a layer would record a replay as a second call.
    """
    collector = getattr(
        sys.modules.get("transformers.utils.output_capturing"), "_active_collector", None
    )
    if collector is not None:
        collector.set(None)
