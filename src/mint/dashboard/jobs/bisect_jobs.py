"""Searches for the checkpoint where a metric fell: one search at a time, in its own thread, with progress.

The composition root passes in the callable that evaluates checkpoints.
"""

from __future__ import annotations

import logging
import threading
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from mint.dashboard.login import Visitor
from mint.dashboard.run_readers import RunReaders
from mint.errors import MintError, OverloadedError, RequestFailedError
from mint.rl.analysis.bisect import Regression

log = logging.getLogger("mint.dashboard")

MAX_JOBS = 64

Search = Callable[[Path, str, Visitor | None, Callable[[str], None]], Regression]
"""(run folder, metric, visitor, callback with each checkpoint before it is evaluated) → what was found."""


@dataclass
class _State:
    metric: str
    status: str = "running"
    evaluated: list[str] = field(default_factory=list)
    result: dict[str, Any] | None = None
    error: dict[str, Any] | None = None


class BisectJobs:
    """The searches of this process, by run. Thread-safe."""

    def __init__(self, readers: RunReaders, search: Search | None) -> None:
        """`search` is None if nothing can be sampled here."""
        self._readers = readers
        self._search = search
        self._lock = threading.Lock()
        self._states: OrderedDict[str, _State] = OrderedDict()
        self._is_busy = False

    @property
    def can_search(self) -> bool:
        """Whether a search can be started."""
        return self._search is not None

    def begin(self, run: str, metric: str, visitor: Visitor | None) -> dict[str, Any]:
        """Starts a search and returns its state.

        Raises:
            NotFoundError: there is no such run.
            OverloadedError: another search is running.
            RequestFailedError: nothing can be sampled here.
        """
        folder = self._readers.folders.folder(run)
        search = self._search
        if search is None:
            raise RequestFailedError("nothing can be sampled here", remedy=f"Run: mint bisect RUN --metric {metric}")
        with self._lock:
            if self._is_busy:
                raise OverloadedError("another search is running", remedy="Wait until it ends, then try again")
            self._is_busy = True
            state = self._states[run] = _State(metric)
            self._states.move_to_end(run)
            while len(self._states) > MAX_JOBS:
                self._states.popitem(last=False)
        work = threading.Thread(
            target=self._run, args=(search, folder, state, visitor), name="mint-dashboard-bisect", daemon=True
        )
        work.start()
        return self.state(run)

    def state(self, run: str) -> dict[str, Any]:
        """`status` is none, running, done or failed. `evaluated` lists the checkpoints so far; the last one is
        in progress. `result` is what was found."""
        with self._lock:
            state = self._states.get(run)
            return {"status": "none"} if state is None else {**asdict(state), "evaluated": list(state.evaluated)}

    def _run(self, search: Search, folder: Path, state: _State, visitor: Visitor | None) -> None:
        try:
            regression = search(folder, state.metric, visitor, state.evaluated.append)
            state.result = asdict(regression)
            state.status = "done"
        except MintError as error:
            state.error = error.to_wire()
            state.status = "failed"
        except Exception as error:  # the boundary of the thread: the visitor and the log must learn of it
            log.exception("a search in %s failed", folder)
            state.error = RequestFailedError(f"{type(error).__name__}: {error}").to_wire()
            state.status = "failed"
        finally:
            with self._lock:
                self._is_busy = False
