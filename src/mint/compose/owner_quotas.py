"""The quotas of an owner whose key has none of its own, from the settings of a server and its disk. Values only."""

from __future__ import annotations

from mint.config import ServeSettings
from mint.server.callers import Quotas
from mint.server.limits import MIB, default_checkpoint_bytes, default_journal_bytes, default_snapshot_bytes


def default_quotas(settings: ServeSettings, *, free_bytes: int, stored_bytes: int) -> Quotas:
    """The quotas of a server that starts now, with so much free on its disk, and so much in the checkpoints and
    snapshots of all."""
    room = free_bytes + stored_bytes  # what is stored already counts as free, so that a restart changes nothing
    checkpoints, journal = settings.owner_checkpoints_mib, settings.owner_journal_mib
    snapshots = settings.owner_snapshots_mib
    return Quotas(
        max_sessions=settings.owner_sessions,
        max_models=settings.owner_models,
        max_checkpoint_bytes=default_checkpoint_bytes(room) if checkpoints is None else checkpoints * MIB,
        max_journal_bytes=default_journal_bytes(room) if journal is None else journal * MIB,
        max_snapshot_bytes=default_snapshot_bytes(room) if snapshots is None else snapshots * MIB,
    )
