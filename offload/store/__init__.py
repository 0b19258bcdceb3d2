"""Where activations live while they are not in use: tickets over a device and the host arena."""

from offload.store.hooks import OffloadHooks
from offload.store.store import Store, default_store
from offload.store.ticket import Ticket

__all__ = ["OffloadHooks", "Store", "Ticket", "default_store"]
