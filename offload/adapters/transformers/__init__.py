"""Everything that knows transformers.

Nothing here imports transformers; where the program has not, there is nothing to adapt to.
"""

from offload.adapters.transformers.caches import cannot_replay, is_cache, snapshot_caches
from offload.adapters.transformers.capturing import stop_collecting_outputs
from offload.adapters.transformers.checkpointing import install, is_wrapped, uninstall
from offload.adapters.transformers.library import find_layers

__all__ = [
    "cannot_replay",
    "find_layers",
    "install",
    "is_cache",
    "is_wrapped",
    "snapshot_caches",
    "stop_collecting_outputs",
    "uninstall",
]
