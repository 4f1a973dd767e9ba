"""What looks wrong in a run: what was found while it ran, and, once it is over, what its whole log shows.

Bounded: the rollouts of a few steps are held at a time, and a log of very many steps is not diagnosed again.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from typing import Any

from mint.dashboard.readers import Readers
from mint.rl.afterwards import diagnose_run
from mint.rl.run_reader import RunReader

KEPT = 32

MAX_STEPS = 2_500
"""A longer run was diagnosed while it ran. Every step looks back at those before it: of thousands, that takes long."""


class Diagnoses:
    """The findings of runs, kept until a log grows. Any thread may call; one diagnosis is made at a time."""

    def __init__(self, readers: Readers) -> None:
        self._readers = readers
        self._lock = threading.Lock()
        self._known: OrderedDict[str, tuple[str, list[dict[str, Any]]]] = OrderedDict()

    def at_hand(self, name: str) -> list[dict[str, Any]]:
        """The findings of a run as far as they are known without reading its rollouts; `of` may know more.

        Raises:
            NotFoundError: there is no such run.
        """
        reader = self._readers.of(name)
        # the lock is held while a log is diagnosed, and nobody is to wait for that here
        known = self._known.get(name)
        return known[1] if known is not None and known[0] == reader.version() else reader.findings()

    def of(self, name: str) -> list[dict[str, Any]]:
        """The findings of a run, by the step where they were first seen.

        Raises:
            NotFoundError: there is no such run.
        """
        reader = self._readers.of(name)
        noted = reader.findings()
        if self._readers.summary(name).state == "running":
            return noted
        with self._lock:
            version = reader.version()
            known = self._known.get(name)
            if known is None or known[0] != version:
                known = self._known[name] = (version, _all_of(reader, noted))
            self._known.move_to_end(name)
            while len(self._known) > KEPT:
                self._known.popitem(last=False)
            return known[1]


def _all_of(reader: RunReader, noted: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Those of the log, and those that were noted and that the log alone does not show."""
    if len(reader.metrics()) > MAX_STEPS:
        return noted
    return [finding.to_dict() for finding in diagnose_run(reader.folder)]
