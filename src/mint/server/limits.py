"""What all owners of one service may use together, and how the defaults follow from the machine. Values only."""

from __future__ import annotations

from dataclasses import dataclass

from mint.errors import OverloadedError

MIB = 1 << 20

MODEL_MEMORY_SHARE = 0.5
"""The share of free memory that models may take, by default: the rest is for passes, caches and samplers."""

RESERVE_SHARE = 0.02
MAX_RESERVE_BYTES = 2048 * MIB
"""The space on the disk that is kept free by default: a share of the disk, and at most so much."""

MAX_UNNAMED_SAMPLERS = 64
"""Unnamed samplers of a model that are kept at most, by default."""

PUBLISHED_SHARE = 0.25
"""The share of a disk's free room that the unnamed samplers of all models may take together, by default."""

CHECKPOINT_SHARE = 0.25
"""The share of a disk's free space that the checkpoints of one owner may take, by default."""

JOURNAL_SHARE = 0.25
"""The share of a disk's free space that the journal may take for one owner, by default."""

SNAPSHOT_SHARE = 0.25
"""The share of a disk's free space that the snapshots of one owner's models may take, by default."""

MAX_SNAPSHOTS = 3
"""Snapshots of a model that are kept: the older ones are for the case that the newest cannot be read."""

ROW_BYTES = 512
"""What a row of the journal counts beside its payload, result and metadata: about what it takes in the file."""

MAX_WAITING_REQUESTS = 4096
"""Requests of one owner that may wait; a quota can only lower it."""

WAITING_SHARE = 0.125
MAX_WAITING_BYTES = 2048 * MIB
"""What waiting requests may take of the machine's memory by default, and at most."""


@dataclass(frozen=True)
class ServerLimits:
    """Limits of one service.

    `model_memory_bytes` None: `MODEL_MEMORY_SHARE` of what is free once a base model is loaded. `disk_reserve_bytes`
    None: `default_reserve` of the disk. `max_unnamed_samplers` holds for each model, `published_bytes` for those of all
    models together; None: `default_published_bytes` of the room that is free at the start. `lora_cache_bytes` is the
    memory for LoRAs to sample from; None is a share of what is free.
    """

    model_memory_bytes: int | None = None
    disk_reserve_bytes: int | None = None
    max_sessions: int = 4096
    max_models: int = 1024
    waiting_bytes: int = MAX_WAITING_BYTES
    max_unnamed_samplers: int = MAX_UNNAMED_SAMPLERS
    published_bytes: int | None = None
    lora_cache_bytes: int | None = None

    def require_below(self, name: str, used: int) -> None:
        """Checks that all owners together may have one more; `name` is `max_sessions` or `max_models`.

        Raises:
            OverloadedError: the limit is reached.
        """
        limit: int = getattr(self, name)
        if used >= limit:
            raise OverloadedError(
                f"the limit of {limit} {name.removeprefix('max_')} on this server is reached",
                field=f"{name} of this server",
                value=used + 1,
                remedy=f"Try again later; the operator can raise MINT_SERVE_{name.upper()}",
            )


def default_waiting_bytes(memory_bytes: int | None) -> int:
    """The memory for waiting requests on a machine with so much; None is unknown."""
    return MAX_WAITING_BYTES if memory_bytes is None else min(int(WAITING_SHARE * memory_bytes), MAX_WAITING_BYTES)


def default_reserve(disk_bytes: int) -> int:
    """The space that stays free on a disk of this size."""
    return min(int(RESERVE_SHARE * disk_bytes), MAX_RESERVE_BYTES)


def default_published_bytes(free_disk_bytes: int) -> int:
    """The room for the weights of all unnamed samplers."""
    return int(PUBLISHED_SHARE * free_disk_bytes)


def default_checkpoint_bytes(free_disk_bytes: int) -> int:
    """The space for the checkpoints of one owner of a server with keys."""
    return int(CHECKPOINT_SHARE * free_disk_bytes)


def default_snapshot_bytes(free_disk_bytes: int) -> int:
    """The space for the snapshots of one owner's models, on a server with keys."""
    return int(SNAPSHOT_SHARE * free_disk_bytes)


def default_journal_bytes(free_disk_bytes: int) -> int:
    """The space in the journal for one owner of a server with keys."""
    return int(JOURNAL_SHARE * free_disk_bytes)
