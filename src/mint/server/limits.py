"""What all owners of one service may use together, and how the defaults follow from the machine. Values only."""

from __future__ import annotations

from dataclasses import dataclass

from mint.server.callers import Quotas

MIB = 1 << 20

MODEL_MEMORY_SHARE = 0.5
"""The share of free memory that models may take, by default: the rest is for passes, caches and samplers."""

RESERVE_SHARE, MAX_RESERVE_BYTES = 0.02, 2048 * MIB
"""The room on the disk that is kept free by default: a share of the disk, and at most so much."""

MAX_UNNAMED_SAMPLERS = 64
"""Unnamed samplers of a model that are kept at most, by default."""

SESSIONS_PER_OWNER, MODELS_PER_OWNER = 256, 64
CHECKPOINT_SHARE = 0.25
"""The share of a disk's free room that the checkpoints of one owner may take, by default."""


@dataclass(frozen=True)
class ServerLimits:
    """Limits of one service.

    `model_memory_bytes` None: `MODEL_MEMORY_SHARE` of what is free once a base model is loaded. `disk_reserve_bytes`
    None: `default_reserve` of the disk. `max_unnamed_samplers` holds for each model.
    """

    model_memory_bytes: int | None = None
    disk_reserve_bytes: int | None = None
    max_sessions: int = 4096
    max_models: int = 1024
    max_unnamed_samplers: int = MAX_UNNAMED_SAMPLERS


def default_reserve(disk_bytes: int) -> int:
    """The room that stays free on a disk of this size."""
    return min(int(RESERVE_SHARE * disk_bytes), MAX_RESERVE_BYTES)


def default_quotas(free_disk_bytes: int) -> Quotas:
    """The quotas of an owner of a server with keys, where neither the key nor a setting names others."""
    return Quotas(
        max_sessions=SESSIONS_PER_OWNER,
        max_models=MODELS_PER_OWNER,
        max_checkpoint_bytes=int(CHECKPOINT_SHARE * free_disk_bytes),
    )
