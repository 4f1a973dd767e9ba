"""The quotas of an owner whose key has none of its own, from the settings of a server and its disk. Values only."""

from __future__ import annotations

from mint.config import ServeSettings
from mint.server.callers import Quotas
from mint.server.limits import MIB, default_checkpoint_bytes


def default_quotas(settings: ServeSettings, *, free_bytes: int, stored_bytes: int) -> Quotas:
    """The quotas of a server that starts now, with so much free on its disk, and so much in the checkpoints of all."""
    if settings.owner_checkpoints_mib is None:
        # what is stored already counts as free, so that a restart changes nothing
        most = default_checkpoint_bytes(free_bytes + stored_bytes)
    else:
        most = settings.owner_checkpoints_mib * MIB
    return Quotas(settings.owner_sessions, settings.owner_models, None, most)
