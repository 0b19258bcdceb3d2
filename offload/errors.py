"""What `offload` raises at run time. Wrong arguments raise ValueError or TypeError instead."""

from __future__ import annotations


class OffloadError(RuntimeError):
    """Base of every run-time error of this package."""


class ArenaFull(OffloadError):
    """The host arena cannot take another tensor without exceeding its cap.

    The step that raises it fails as a whole; its tickets are released with its graph, and the next
    step works.

    Args:
        asked_bytes: size of the tensor that did not fit.
        free_bytes: bytes below the cap that no ticket owns, in all pieces together.
        cap_bytes: the cap, from `Policy.host_bytes` or 70 % of the memory that was available.
        disk_refusal: why nothing could be moved on to the disk; empty where there is none.
    """

    def __init__(
        self, asked_bytes: int, free_bytes: int, cap_bytes: int, disk_refusal: str = ""
    ) -> None:
        disk = f" Nor could the disk take more: {disk_refusal}" if disk_refusal else ""
        remedy = "Raise Policy.host_bytes, name a directory in Policy.disk, or use fewer tokens."
        super().__init__(
            f"store.offload: expected {asked_bytes:,} bytes free in the host arena, got "
            f"{free_bytes:,} of a cap of {cap_bytes:,}.{disk} {'' if disk else remedy}".rstrip()
        )
        self.asked_bytes = asked_bytes
        self.free_bytes = free_bytes
        self.cap_bytes = cap_bytes
        self.disk_refusal = disk_refusal

    def __reduce__(self) -> tuple[type[ArenaFull], tuple[int, int, int, str]]:
        return ArenaFull, (self.asked_bytes, self.free_bytes, self.cap_bytes, self.disk_refusal)


class DoesNotFit(OffloadError):
    """No way to run a step fits the memory there is; nothing was run.

    Args:
        message: what was asked, what each purpose takes, and what would help.
        need_bytes: what the device would have to have for the way that takes the least.
        longest_tokens: the longest sequence that fits; 0 where none does.
        remedies: single changes that make it fit, in words.
    """

    def __init__(
        self, message: str, need_bytes: int, longest_tokens: int, remedies: tuple[str, ...]
    ) -> None:
        super().__init__(message)
        self.need_bytes = need_bytes
        self.longest_tokens = longest_tokens
        self.remedies = remedies

    def __reduce__(self) -> tuple[type[DoesNotFit], tuple[str, int, int, tuple[str, ...]]]:
        return DoesNotFit, (str(self), self.need_bytes, self.longest_tokens, self.remedies)


class TicketPoisoned(OffloadError):
    """A ticket does not hold its tensor: the copy failed, or the tensor was changed in place."""


class LayerRefused(OffloadError):
    """A layer cannot be run as it is, and running it anyway would give wrong gradients."""


class TileRefused(LayerRefused):
    """A layer, or one call of it, cannot be run tile by tile. The message is the reason alone."""
