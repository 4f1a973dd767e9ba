"""What looks wrong in a run: what was found while it ran, and, once it is over, what its whole log shows.

Bounded: the rollouts of a few steps are held at a time, and a log of very many steps is not diagnosed again.
"""

from __future__ import annotations

import logging
import threading
from collections import OrderedDict
from dataclasses import dataclass, field
from typing import Any

from mint.dashboard.run_readers import Readers
from mint.rl.analysis.run_analysis import diagnose_run
from mint.runs.reader import RunReader

log = logging.getLogger("mint.dashboard")

KEPT = 32

MAX_STEPS = 1_000
"""A longer run was diagnosed while it ran. Every step looks back at those before it: of thousands, that takes long."""

PATIENCE_S = 1.0
"""How long somebody waits for a diagnosis. A longer one goes on behind, and is asked for again."""


@dataclass
class _Diagnosis:
    version: str
    rows: list[dict[str, Any]]
    error: Exception | None = None
    is_over: threading.Event = field(default_factory=threading.Event)


class Diagnoses:
    """The findings of runs, kept until a log grows. Any thread may call; one log is diagnosed at a time, in a thread of
    its own."""

    def __init__(self, readers: Readers) -> None:
        self._readers = readers
        self._lock = threading.Lock()
        self._turn = threading.Lock()
        self._known: OrderedDict[str, _Diagnosis] = OrderedDict()

    def at_hand(self, name: str) -> list[dict[str, Any]]:
        """The findings of a run as far as they are known without reading its rollouts; `of` may know more.

        Raises:
            NotFoundError: there is no such run.
        """
        reader = self._readers.of(name)
        with self._lock:
            known = self._known.get(name)
        return known.rows if known is not None and known.version == reader.version() else _latest(reader.findings())

    def of(self, name: str) -> tuple[list[dict[str, Any]], bool]:
        """The findings of a run, by the step where they were first seen; and whether that is all, or the log is still
        being diagnosed.

        Raises:
            NotFoundError: there is no such run.
        """
        reader = self._readers.of(name)
        if self._readers.summary(name).state == "running":
            return _latest(reader.findings()), True
        diagnosis = self._diagnosis(name, reader)
        is_over = diagnosis.is_over.wait(PATIENCE_S)
        if diagnosis.error is not None:
            raise diagnosis.error
        return diagnosis.rows, is_over

    def _diagnosis(self, name: str, reader: RunReader) -> _Diagnosis:
        """The one of the log as it is now; begun where there is none."""
        version = reader.version()
        with self._lock:
            known = self._known.get(name)
            if known is None or known.version != version:
                known = self._known[name] = _Diagnosis(version, _latest(reader.findings()))
                work = threading.Thread(
                    target=self._carry_out, args=(known, reader), name="mint-dashboard-diagnosis", daemon=True
                )
                work.start()
            self._known.move_to_end(name)
            while len(self._known) > KEPT:
                self._known.popitem(last=False)
            return known

    def _carry_out(self, diagnosis: _Diagnosis, reader: RunReader) -> None:
        try:
            with self._turn:
                if len(reader.metrics()) <= MAX_STEPS:
                    diagnosis.rows = _latest([finding.to_dict() for finding in diagnose_run(reader.folder)])
        except Exception as error:  # the boundary of the thread: who asked is told, and the log must know why
            log.exception("the diagnosis of %s failed", reader.folder)
            diagnosis.error = error
        finally:
            diagnosis.is_over.set()


def _latest(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """One of each code: what became more severe was noted again, and the later one says more."""
    return list({row["code"]: row for row in rows}.values())
