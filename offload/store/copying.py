"""What the store asks of whoever moves bytes: `offload.store.engine` in earnest."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Protocol

import torch

if TYPE_CHECKING:
    from offload import _native


class Engine(Protocol):
    """Moves tensors between a device and the host. See `offload.store.engine` for each function.

    A planner puts another in its place, which counts bytes and moves none.
    """

    def native_errors(self) -> AbstractContextManager[None]: ...  # noqa: D102

    def compute_stream(self, device: torch.device) -> int: ...  # noqa: D102

    def offload(  # noqa: D102
        self, source: torch.Tensor, nbytes: int, *, leaves: bool = False
    ) -> _native.Ticket: ...

    def reload(  # noqa: D102
        self, ticket: _native.Ticket, buffer: torch.Tensor, stream: int
    ) -> _native.Copy: ...

    def try_reload(  # noqa: D102
        self, ticket: _native.Ticket, buffer: torch.Tensor, stream: int
    ) -> _native.Copy | None: ...

    def put_last(self, ticket: _native.Ticket) -> None: ...  # noqa: D102

    def retire(self) -> None: ...  # noqa: D102

    def drain(self) -> None: ...  # noqa: D102

    def trim(self) -> None: ...  # noqa: D102

    def set_poisoning(self, on: bool) -> None: ...  # noqa: D102
