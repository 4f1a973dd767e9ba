"""The list of runs in pages: filtered, sorted, and answered in time however many runs there are.

A pass over all runs takes longer the more there are; the first one, which reads every folder, takes seconds for
thousands. A request waits `WAIT_S` for a pass that runs in a thread, and then answers with what is known so far. With
more than `MANY_RUNS`, only the first pass is waited for, and the next one rests in between: the list is as old as the
last pass, and the stream of events tells an open page what a later one has found.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from mint.dashboard.run_readers import RunReaders
from mint.errors import InvalidRequestError
from mint.runs.reader import RunSummary

log = logging.getLogger("mint.dashboard")

WAIT_S = 0.1
MANY_RUNS = 1000
"""From here on a pass takes longer than a page may wait for it."""

REST_SHARE = 4.0
"""A pass over many runs is followed by a rest this many times as long."""

PAGE_RUNS = 50
MAX_PAGE_RUNS = 200

ARCHIVED = "archived"
SEVERITIES = ("error", "warning", "info")


def _most_severe(run: RunSummary) -> tuple[int, ...]:
    return tuple(run.findings.get(severity, 0) for severity in SEVERITIES)


SORT_BY: dict[str, Callable[[RunSummary], Any]] = {
    "name": lambda run: run.name.casefold(),
    "state": lambda run: run.state,
    "task": lambda run: run.task.casefold(),
    "model": lambda run: run.base_model.casefold(),
    "step": lambda run: run.step,
    "reward": lambda run: run.reward,
    "best": lambda run: run.best_reward,
    "heldout": lambda run: None if run.heldout is None else run.heldout["mean"],
    "success": lambda run: run.success,
    "rate": lambda run: run.tokens_per_s,
    "findings": _most_severe,
    "age": lambda run: -run.began_at,
}
"""The value of a run by which a column sorts. A run without this value comes last in both directions."""


@dataclass(frozen=True)
class RunQuery:
    """`sort` is a column of `SORT_BY`, descending with a `-` before it; `words` must all occur in name, title, tags,
    task, model or state. Archived runs are only in the state `archived`."""

    words: tuple[str, ...] = ()
    state: str = ""
    sort: str = "age"
    offset: int = 0
    limit: int = PAGE_RUNS


@dataclass(frozen=True)
class RunPage:
    """`found` is how many runs fit the query, `total` how many there are. Not `is_whole`: some were never read yet.
    `curves` has the rewards of each run of the page, by its name (`RunReaders.curve`)."""

    runs: list[RunSummary]
    curves: dict[str, list[float]]
    found: int
    total: int
    offset: int
    is_whole: bool


def parse_sort(text: str) -> str:
    """A sort order of a request; the newest first for an empty text.

    Raises:
        InvalidRequestError: it names no column.
    """
    if text.removeprefix("-") not in SORT_BY and text:
        raise InvalidRequestError("is not a column", field="sort", value=text, remedy=f"Use {', '.join(SORT_BY)}")
    return text or "age"


def select_runs(runs: Iterable[RunSummary], query: RunQuery) -> list[RunSummary]:
    """The runs that fit a query, in its order; `offset` and `limit` are not applied."""
    found = [run for run in runs if _fits(run, query)]
    value = SORT_BY[query.sort.removeprefix("-")]
    present = [(value(run), run) for run in found]
    known = [(key, run) for key, run in present if key is not None]
    known.sort(key=lambda pair: pair[1].name)
    known.sort(key=lambda pair: pair[0], reverse=query.sort.startswith("-"))
    return [run for _, run in known] + [run for key, run in present if key is None]


def _fits(run: RunSummary, query: RunQuery) -> bool:
    state = "stale" if run.is_stale else run.state
    if run.is_archived != (query.state == ARCHIVED) or query.state not in ("", ARCHIVED, state):
        return False
    text = " ".join((run.name, run.title, *run.tags, run.task, run.base_model, state)).casefold()
    return all(word in text for word in query.words)


class RunList:
    """All runs as they were last read. Thread-safe."""

    def __init__(self, readers: RunReaders) -> None:
        self._readers = readers
        self._lock = threading.Lock()
        self._pass: _Pass | None = None
        self._has_read_all = False
        self._selected: tuple[tuple[int, RunQuery], tuple[list[RunSummary], int]] | None = None

    def page(self, query: RunQuery) -> RunPage:
        """A page of the runs that fit a query."""
        self.refresh()
        is_whole = self._has_read_all  # a later pass that takes long finds changes, and no page waits for those
        found, known = self._select(query)
        total = known if is_whole else self._readers.count()
        rows = found[query.offset : query.offset + query.limit]
        curves = {run.name: self._readers.curve(Path(run.folder)) for run in rows}
        return RunPage(rows, curves, len(found), total, query.offset, is_whole)

    def _select(self, query: RunQuery) -> tuple[list[RunSummary], int]:
        """The runs that fit a query, and how many are known; the last answer again if no run has changed."""
        asked = (self._readers.revision, replace(query, offset=0, limit=0))
        last = self._selected
        if last is None or last[0] != asked:
            known = self._readers.known()
            last = self._selected = (asked, (select_runs(known, query), len(known)))
        return last[1]

    def refresh(self, wait_s: float = WAIT_S) -> bool:
        """Begins a pass over all runs, unless one is under way, and waits for it. Returns whether it is done."""
        with self._lock:
            current = self._pass
            self._has_read_all |= current is not None and current.is_over.is_set()
            are_many = self._readers.count() > MANY_RUNS
            if current is None or (current.is_over.is_set() and (not are_many or current.has_rested())):
                current = self._pass = _Pass(self._readers)
        is_over = current.is_over.wait(0.0 if are_many and self._has_read_all else wait_s)
        with self._lock:
            self._has_read_all |= is_over
        return is_over


class _Pass:
    """One look at every run, in a thread of its own."""

    def __init__(self, readers: RunReaders) -> None:
        self.is_over = threading.Event()
        self.began_at = time.monotonic()
        self.ended_at = self.began_at
        self._readers = readers
        threading.Thread(target=self._work, name="mint-dashboard-runs", daemon=True).start()

    def has_rested(self) -> bool:
        """Whether it has been over for so long that the next one may begin."""
        return time.monotonic() - self.ended_at >= REST_SHARE * (self.ended_at - self.began_at)

    def _work(self) -> None:
        try:
            self._readers.summaries()
        except Exception:  # the boundary of the thread: those who wait must go on, and the log must say why
            log.exception("the list of runs could not be read")
        finally:
            self.ended_at = time.monotonic()
            self.is_over.set()
