"""Removes what nothing needs any more: files that no row of the journal names, and jobs of models that have ended."""

from __future__ import annotations

import json
import logging
import os
import shutil
import threading
import time
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

from mint.errors import DamagedDataError, JournalError
from mint.server.store.checkpoint_folders import MANIFEST_FILE
from mint.server.store.journal import Journal

log = logging.getLogger("mint.store")

SET_ASIDE = "set_aside"
ORPHAN_AGES_S = {"snapshots": 3600.0, "published": 3600.0, "checkpoints": 3600.0, SET_ASIDE: 7 * 86_400.0}
"""How old an orphan in each folder gets."""

SEEN_FILE = Path("tmp", "orphans.json")

SWEEP_SHARE = 0.001
"""The share of the time that looking for orphans may take: with 100,000 checkpoints it takes 0.2 s."""

REMOVAL_PAUSE_S = 0.01
"""Between two batches of jobs, so that others write to the journal, too."""


def discard_files(journal: Journal, data_dir: Path, names: Iterable[str]) -> None:
    """Removes files and folders, given relative to the data directory, unless a row names them.

    A sampler may still read a snapshot, or the folder of a checkpoint that was replaced: such a file goes with its last
    user, or as an orphan.
    """
    candidates = {name for name in names if name}  # never the data directory itself
    if not candidates:
        return
    for name in candidates - journal.named_among(candidates):
        _remove(data_dir / name)


class OrphanSweep:
    """Removes what a killed process wrote and never committed.

    A file that no row names may still be in the making, by this or another process. So it must have been seen there,
    unchanged, for an hour in which a service ran. No time of day counts, because a clock that jumps would delete files
    in use. One process at a time may sweep.

    A checkpoint with a manifest is set aside for a week of service first: somebody may have restored the wrong journal.
    """

    def __init__(self, journal: Journal, data_dir: Path) -> None:
        self._journal = journal
        self._data_dir = data_dir
        self._file = data_dir / SEEN_FILE  # so that the hour may be that of several short processes
        self._running_s = 0.0  # since the last look
        self._rest_s = 0.0  # until the next one

    def advance(self, running_s: float) -> None:
        """Looks again, after a service has run for so long, and removes what is old enough. If looking takes long, it
        looks less often."""
        self._running_s += running_s
        if self._running_s < self._rest_s:
            return
        started_at = time.monotonic()
        self._look(self._running_s)
        self._running_s, self._rest_s = 0.0, (time.monotonic() - started_at) / SWEEP_SHARE

    def _look(self, running_s: float) -> None:
        before = self._seen()
        now: dict[str, tuple[str, float]] = {}
        named = self._journal.named_files()
        for folder, limit_s in ORPHAN_AGES_S.items():
            for name in (f"{folder}/{entry}" for entry in _entries(self._data_dir / folder)):
                if name in named:
                    continue
                path = self._data_dir / name
                state = _state_of(path)
                known, seen_s = before.get(name, (state, 0.0))
                age_s = seen_s + running_s if name in before and known == state else 0.0
                if age_s >= limit_s:
                    self._take_away(path)
                else:
                    now[name] = state, age_s
        if now != before:
            self._file.write_text(json.dumps(now))

    def _take_away(self, path: Path) -> None:
        target = self._data_dir / SET_ASIDE / path.name
        if path.parent.name == "checkpoints" and (path / MANIFEST_FILE).is_file() and not target.exists():
            path.rename(target)
            log.warning("checkpoint %s, which the journal does not name, was moved to %s", path, target)
        else:
            _remove(path)
            log.info("orphan %s removed", path)

    def _seen(self) -> dict[str, tuple[str, float]]:
        try:
            seen = json.loads(self._file.read_text())
            return {name: (str(state), float(age_s)) for name, (state, age_s) in seen.items()}
        except (OSError, ValueError, TypeError, AttributeError):  # not there yet, or cut by a crash: begin again
            return {}


class JobRemoval:
    """Removes the jobs of models that have ended, on its thread, in many short transactions instead of a long one.

    A session may have gigabytes of jobs, or a million of them. Ending it makes them unreachable in one transaction;
    here they go, a batch at a time. What is left when the process ends, the next one removes. Any thread may call.
    """

    def __init__(self, journal: Journal) -> None:
        self._journal = journal
        self._is_closed = threading.Event()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="mint-removal")

    def start(self) -> None:
        """Begins to remove what is there now; does not wait for it."""
        with suppress(RuntimeError):  # closed, or the interpreter is shutting down: the next process begins with it
            self._thread.submit(self._remove)

    def close(self) -> None:
        """Returns after the batch that is being removed."""
        self._is_closed.set()
        self._thread.shutdown()

    def _remove(self) -> None:
        try:
            models = self._journal.ended_models()
            while models and not self._is_closed.wait(REMOVAL_PAUSE_S) and self._journal.remove_jobs(models):
                pass
        except (JournalError, DamagedDataError) as error:
            log.warning("the jobs of ended models are removed later: %s", error)


def _entries(folder: Path) -> list[str]:
    try:
        with os.scandir(folder) as entries:  # names alone: there may be 100,000
            return [entry.name for entry in entries]
    except FileNotFoundError:
        return []


def _state_of(path: Path) -> str:
    """A value that changes when the file changes."""
    try:
        status = path.stat()
    except OSError:  # removed just now
        return ""
    return f"{status.st_ino} {status.st_size} {status.st_mtime_ns}"


def _remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)
