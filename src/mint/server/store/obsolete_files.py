"""Removes files of the data directory that no row of the journal names (any more)."""

from __future__ import annotations

import logging
import shutil
import time
from collections.abc import Iterable
from pathlib import Path

from mint.server.store.journal import Journal

log = logging.getLogger("mint.store")

ORPHAN_AGE_S = 3600.0
FOLDERS = ("snapshots", "published", "checkpoints")


def discard_files(journal: Journal, data_dir: Path, names: Iterable[str]) -> None:
    """Removes files and folders, given relative to the data directory, unless a row names them.

    A sampler may still read a snapshot, or the folder of a checkpoint that was replaced: such a file goes with its last
    user, or at the next start.
    """
    candidates = {name for name in names if name}  # never the data directory itself
    if not candidates:
        return
    for name in candidates - journal.named_files():
        _remove(data_dir / name)


def sweep_orphans(journal: Journal, data_dir: Path) -> None:
    """Removes what a killed process wrote and never committed; young files may still be in the making."""
    named = journal.named_files()
    limit = time.time() - ORPHAN_AGE_S
    for folder in FOLDERS:
        for path in (data_dir / folder).glob("*"):
            if str(path.relative_to(data_dir)) not in named and path.stat().st_mtime < limit:
                log.info("orphan %s removed", path)
                _remove(path)


def _remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)
