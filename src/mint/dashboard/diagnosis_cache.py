"""The findings of runs: those noted while a run ran, and after its end those of a diagnosis of the whole log.

A diagnosis holds the rollouts of a few steps at a time. A log of more than `MAX_STEPS` steps is not diagnosed again.
"""

from __future__ import annotations

import logging
import threading
from collections import OrderedDict
from dataclasses import dataclass, field
from typing import Any

from mint.dashboard.run_readers import RunReaders
from mint.rl.analysis.run_analysis import diagnose_run
from mint.runs.reader import RunReader, latest_findings

log = logging.getLogger("mint.dashboard")

MAX_DIAGNOSES = 32

MAX_STEPS = 1_000
"""The findings of a longer run are those noted while it ran: the rules look back from every step, which takes long."""

WAIT_S = 1.0
"""How long a request waits for a diagnosis. A longer one continues in the background, and the page asks again."""


@dataclass
class _Diagnosis:
    version: str
    rows: list[dict[str, Any]]
    error: Exception | None = None
    is_over: threading.Event = field(default_factory=threading.Event)


class DiagnosisCache:
    """The findings of runs, cached until a log grows. Thread-safe; diagnoses one log at a time, in its own thread."""

    def __init__(self, readers: RunReaders) -> None:
        self._readers = readers
        self._lock = threading.Lock()
        self._turn = threading.Lock()
        self._known: OrderedDict[str, _Diagnosis] = OrderedDict()

    def known(self, name: str) -> list[dict[str, Any]]:
        """The findings of a run that are known without reading its rollouts; `of` may return more.

        Raises:
            NotFoundError: there is no such run.
        """
        reader = self._readers.of(name)
        with self._lock:
            known = self._known.get(name)
        if known is not None and known.version == reader.version():
            return known.rows
        return latest_findings(reader.findings())

    def of(self, name: str) -> tuple[list[dict[str, Any]], bool]:
        """The findings of a run, ordered by the step where they were first seen, and whether the diagnosis is complete.

        Raises:
            NotFoundError: there is no such run.
        """
        reader = self._readers.of(name)
        if self._readers.summary(name).state == "running":
            return latest_findings(reader.findings()), True
        diagnosis = self._diagnosis(name, reader)
        is_over = diagnosis.is_over.wait(WAIT_S)
        if diagnosis.error is not None:
            raise diagnosis.error
        return diagnosis.rows, is_over

    def _diagnosis(self, name: str, reader: RunReader) -> _Diagnosis:
        """The diagnosis of the log's present version; started if there is none."""
        version = reader.version()
        with self._lock:
            known = self._known.get(name)
            if known is None or known.version != version:
                known = self._known[name] = _Diagnosis(version, latest_findings(reader.findings()))
                work = threading.Thread(
                    target=self._carry_out, args=(known, reader), name="mint-dashboard-diagnosis", daemon=True
                )
                work.start()
            self._known.move_to_end(name)
            while len(self._known) > MAX_DIAGNOSES:
                self._known.popitem(last=False)
            return known

    def _carry_out(self, diagnosis: _Diagnosis, reader: RunReader) -> None:
        try:
            with self._turn:
                if reader.step_count() <= MAX_STEPS:
                    diagnosis.rows = latest_findings([finding.to_dict() for finding in diagnose_run(reader.folder)])
        except Exception as error:  # the boundary of the thread: the visitor and the log must learn of it
            log.exception("the diagnosis of %s failed", reader.folder)
            diagnosis.error = error
        finally:
            diagnosis.is_over.set()
