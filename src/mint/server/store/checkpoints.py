"""Named checkpoints: their paths, and the row that a path leads to.

A path is `tinker://{model_id}/weights/{name}` (with optimizer) or `…/sampler_weights/{name}` (without); `mint://` is
the same. Who may read a checkpoint is decided here.
"""

from __future__ import annotations

import re
import time
import uuid
from pathlib import Path

import numpy as np

from mint.errors import InvalidRequestError, NotFoundError
from mint.server.store.checkpoint_folders import Manifest, read_checkpoint
from mint.server.store.database import OpenFor
from mint.server.store.journal import JOURNAL_FILE, Journal
from mint.server.store.rows import CheckpointRow
from mint.types.checkpoint_path import CheckpointPath

NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}", re.ASCII)
_ALIAS = re.compile(r"ckpt_[0-9a-f]{32}", re.ASCII)

TRAINING = "weights"
SAMPLER = "sampler_weights"
EXTERNAL = "external_weights"
MIN_TTL_S = 1
MAX_TTL_S = 10 * 366 * 24 * 3600


def check_name(name: str) -> str:
    """Returns the name.

    Raises:
        InvalidRequestError: a checkpoint cannot have that name.
    """
    if not NAME.fullmatch(name):
        raise InvalidRequestError(
            "cannot name a checkpoint",
            field="name",
            value=name,
            remedy="Use 1 to 128 letters, digits, dots, dashes and underscores, starting with a letter or digit",
        )
    return name


def check_ttl(seconds: int | None) -> int | None:
    """Returns the seconds after which a checkpoint expires; None is never.

    Raises:
        InvalidRequestError: not between a second and ten years.
    """
    if seconds is not None and not MIN_TTL_S <= seconds <= MAX_TTL_S:
        remedy = f"Pass {MIN_TTL_S} to {MAX_TTL_S} seconds, or nothing to keep it for good"
        raise InvalidRequestError("is out of range", field="ttl_seconds", value=seconds, remedy=remedy)
    return seconds


def alias_of(folder: str) -> str:
    """The `ckpt_…` id of the checkpoint in a folder, which MinT's clients use instead of its path."""
    return f"ckpt_{folder.rpartition('/')[2].replace('-', '')}"


def find_checkpoint(journal: Journal, path: str, *, reader: str | None, now: float | None = None) -> CheckpointRow:
    """The row of a path or `ckpt_…` id, if `reader` owns it or it is public. None may read everything.

    Raises:
        InvalidRequestError: `path` is neither.
        NotFoundError: there is no such checkpoint that `reader` may read.
    """
    if _ALIAS.fullmatch(path):
        row = journal.checkpoint_in(f"checkpoints/{uuid.UUID(path.removeprefix('ckpt_'))}")
    else:
        parsed = CheckpointPath.parse(path)
        row = journal.checkpoint(parsed.model_id, parsed.kind, parsed.name)
    if row is None or is_expired(row, time.time() if now is None else now):
        raise no_checkpoint(path)
    if reader is not None and reader != row.owner and not row.public:
        raise no_checkpoint(path)
    return row


def is_expired(row: CheckpointRow, now: float) -> bool:
    """Whether a checkpoint has expired; its files are removed some time later."""
    return row.expires_at is not None and row.expires_at <= now


def no_checkpoint(path: str) -> NotFoundError:
    """The error for a path without a checkpoint; a checkpoint of another owner gives the same one."""
    return NotFoundError("is not a checkpoint here", field="path", value=path, remedy="See `mint checkpoints list`")


def open_checkpoint(data_dir: Path, path: str) -> tuple[Manifest, dict[str, np.ndarray]]:
    """The manifest and the weights (mint's names, float32) of a path, without a running service.

    Raises:
        InvalidRequestError: `path` is no checkpoint path.
        NotFoundError: `data_dir` has no such checkpoint.
        CheckpointError: the checkpoint is damaged.
    """
    if not (data_dir / JOURNAL_FILE).is_file():
        raise NotFoundError("holds no journal", field="data_dir", value=str(data_dir), remedy="Set MINT_HOME")
    journal = Journal(data_dir / JOURNAL_FILE, OpenFor.READING)
    try:
        row = find_checkpoint(journal, path, reader=None)
    finally:
        journal.close()
    manifest, state = read_checkpoint(data_dir / row.folder, optimizer=False)
    return manifest, dict(state.weights)
