"""Readers of runs by name: the latest `MAX_READERS` stay open, and the summary of every run is cached.

Reads files, so call it in a thread.
"""

from __future__ import annotations

import contextlib
import threading
import time
from array import array
from collections import OrderedDict
from collections.abc import Sequence, Set
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path

from mint.dashboard.run_folders import RunFolders, Stamp, stamp_of
from mint.errors import InvalidRequestError, MintError
from mint.runs.reader import RunReader, RunSummary, unreadable_summary

MAX_READERS = 16
"""Each holds the metrics and the index of its run: about ten megabytes for a run of thousands of steps."""

LONG_LOG_BYTES = 8 << 20

CURVE_POINTS = 64
"""A line of a hundred pixels shows no more."""

STATE_FRESH_S = 2.0
"""How long a summary that says `running` is used before the process is checked again."""


@dataclass(frozen=True)
class _CachedSummary:
    stamp: Stamp
    read_at: float
    summary: RunSummary
    curve: array[float]


class RunReaders:
    """Readers of runs by name. Thread-safe."""

    def __init__(self, folders: RunFolders) -> None:
        self.folders = folders
        self._lock = threading.Lock()
        self._pass = threading.Lock()
        self._readers: OrderedDict[Path, RunReader] = OrderedDict()
        self._summaries: dict[Path, _CachedSummary] = {}
        self._revision = 0
        self._count = 0

    def of(self, name: str) -> RunReader:
        """The reader of a run.

        Raises:
            NotFoundError: there is no such run.
            InvalidRequestError: its config.json is damaged.
        """
        folder = self.folders.folder(name)
        with self._lock:
            reader = self._readers.get(folder)
            if reader is None:
                reader = self._readers[folder] = RunReader(folder)
            self._readers.move_to_end(folder)
            while len(self._readers) > MAX_READERS:
                self._readers.popitem(last=False)
            return reader

    def summary(self, name: str) -> RunSummary:
        """The summary of one run.

        Raises:
            NotFoundError: there is no such run.
            InvalidRequestError: its folder is damaged.
        """
        summary = self._summary(name, self.folders.folder(name))
        return self.of(name).summary() if summary.state == "unreadable" else summary

    def summaries(self) -> dict[str, RunSummary]:
        """The summaries of all runs by name, newest first; one with a damaged folder is `unreadable`. An unchanged run
        is not read again."""
        with self._pass:
            return self._all_summaries()

    def _all_summaries(self) -> dict[str, RunSummary]:
        found = self.folders.find()
        with self._lock:
            self._count = len(found)
            unread = {folder for folder in found.values() if folder not in self._summaries}
        summaries: dict[str, RunSummary] = {}
        for name, folder in sorted(found.items(), key=lambda run: _place_in_line(run[1], unread)):
            try:
                summaries[name] = self._summary(name, folder)
            except (MintError, OSError):  # the run was removed meanwhile
                continue
        with self._lock:
            gone = self._summaries.keys() - set(found.values())
        for folder in gone:
            self.forget(folder)
        return dict(sorted(summaries.items(), key=lambda named: (-named[1].began_at, named[0])))

    def forget(self, folder: Path) -> None:
        """Drops what is known of a run whose folder has gone."""
        with self._lock:
            self._readers.pop(folder, None)
            self._revision += self._summaries.pop(folder, None) is not None

    def notice(self, folder: Path) -> None:
        """Reads a run whose folder has just appeared, so that the list has it at once."""
        names = {place: name for name, place in self.folders.find().items()}
        with contextlib.suppress(MintError, OSError):  # it was removed meanwhile
            if folder in names:
                self._summary(names[folder], folder)

    def known(self) -> list[RunSummary]:
        """The summaries that were read so far, in no order."""
        with self._lock:
            return [cached.summary for cached in self._summaries.values()]

    def curve(self, folder: Path) -> list[float]:
        """The mean rewards of a run as they were when its summary was read: means of at most `CURVE_POINTS` equal
        stretches."""
        with self._lock:
            cached = self._summaries.get(folder)
        return [] if cached is None else cached.curve.tolist()

    def count(self) -> int:
        """How many runs the last look at all folders has found."""
        with self._lock:
            return max(self._count, len(self._summaries))

    @property
    def revision(self) -> int:
        """Grows whenever a summary has changed, appeared or gone."""
        return self._revision

    def _summary(self, name: str, folder: Path) -> RunSummary:
        stamp = stamp_of(folder)
        now = time.monotonic()
        with self._lock:
            known = self._summaries.get(folder)
            reader = self._readers.get(folder)
        if known is not None and known.stamp == stamp and known.summary.name == name:
            is_over = known.summary.state != "running"
            if is_over or now - known.read_at < STATE_FRESH_S:
                return known.summary
        curve = array("f")
        try:
            reader = reader or RunReader(folder)
            summary = reader.summary()
            curve.extend(_curve_of(reader))
        except InvalidRequestError as error:
            summary = unreadable_summary(folder, str(error))
        if summary.name != name:
            summary = replace(summary, name=name)
        with self._lock:
            self._revision += known is None or known.summary != summary
            self._summaries[folder] = _CachedSummary(stamp, now, summary, curve)
        return summary


def _curve_of(reader: RunReader) -> Sequence[float]:
    rewards = reader.columns(["reward/mean"], most=4 * CURVE_POINTS)["reward/mean"]
    values = [reward for reward in rewards if reward is not None]
    if len(values) <= CURVE_POINTS:
        return values
    ends = [round(place * len(values) / CURVE_POINTS) for place in range(CURVE_POINTS + 1)]
    return [sum(values[start:end]) / (end - start) for start, end in pairwise(ends)]


def _place_in_line(folder: Path, unread: Set[Path]) -> tuple[bool, float]:
    """Newest first, because that is what a list shows first; those with long logs last, because they take seconds."""
    if folder not in unread:
        return False, 0.0
    try:
        began_at = (folder / "config.json").stat().st_mtime
        return (folder / "metrics.jsonl").stat().st_size > LONG_LOG_BYTES, -began_at
    except OSError:
        return False, 0.0
