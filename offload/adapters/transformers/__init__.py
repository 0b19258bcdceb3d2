"""Everything that knows transformers.

Nothing here imports transformers; where the program has not, there is nothing to adapt to.
"""

from offload.adapters.transformers.attention import (
    attention_as_before,
    attention_routed,
    configs_of,
)
from offload.adapters.transformers.body import (
    CAPTURE_SWITCHES,
    install_bodies,
    uninstall_bodies,
    untiled_reason,
)
from offload.adapters.transformers.caches import cannot_replay, is_cache, snapshot_caches
from offload.adapters.transformers.capturing import stop_collecting_outputs
from offload.adapters.transformers.checkpointing import install, uninstall
from offload.adapters.transformers.head import install_head, uninstall_head
from offload.adapters.transformers.library import find_layers, pretrained_modules
from offload.adapters.transformers.making import (
    build_config,
    build_on_meta,
    hidden_size_of,
    is_config,
    load_config,
    positions_of,
    vocabulary_of,
)
from offload.adapters.transformers.masks import is_interval_mask, with_own_masks

__all__ = [
    "CAPTURE_SWITCHES",
    "attention_as_before",
    "attention_routed",
    "build_config",
    "build_on_meta",
    "cannot_replay",
    "configs_of",
    "find_layers",
    "hidden_size_of",
    "install",
    "install_bodies",
    "install_head",
    "is_cache",
    "is_config",
    "is_interval_mask",
    "load_config",
    "positions_of",
    "pretrained_modules",
    "snapshot_caches",
    "stop_collecting_outputs",
    "uninstall",
    "uninstall_bodies",
    "uninstall_head",
    "untiled_reason",
    "vocabulary_of",
    "with_own_masks",
]
