"""What knows accelerate: layers whose weights it brings in for each call."""

from __future__ import annotations

from torch import nn

from offload.devices import is_planned


def weights_are_elsewhere(layer: nn.Module) -> str:
    """Says why a layer's weights are not there between calls; empty where they are.

    accelerate's CPU and disk offload load a layer's weights before its forward and drop them after
    it. They would be gone when the layer is replayed in backward, and its gradients with them.
    """
    for module in layer.modules():
        hook = getattr(module, "_hf_hook", None)
        hooks = getattr(hook, "hooks", (hook,))
        if any(getattr(part, "offload", False) for part in hooks):
            return "accelerate loads its weights for each call and drops them after it"
    if not is_planned() and any(parameter.is_meta for parameter in layer.parameters()):
        return "it has parameters on the meta device, which hold no values"
    return ""
