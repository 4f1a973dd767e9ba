"""Where the tokens of a run went, summed over all of its steps, and kept until its logs grow."""

from __future__ import annotations

import threading
from collections import OrderedDict

from mint.dashboard.run_readers import RunReaders

STAGES = ("generated", "graded", "informative", "trained", "gradient")
MAX_LEDGERS = 256

Sums = tuple[dict[str, float], int]
"""The sum of each stage, those of a stage that was never counted left out; and the last of the steps."""


class TokenLedger:
    """The sums of runs. Thread-safe."""

    def __init__(self, readers: RunReaders) -> None:
        self._readers = readers
        self._lock = threading.Lock()
        self._known: OrderedDict[str, tuple[str, Sums]] = OrderedDict()

    def of(self, name: str) -> Sums:
        """The sums of one run.

        Raises:
            NotFoundError: there is no such run.
        """
        reader = self._readers.of(name)
        version = f"{reader.folder} {reader.version()}"
        with self._lock:
            known = self._known.get(name)
        if known is not None and known[0] == version:
            return known[1]
        columns = reader.columns([f"ledger/{stage}" for stage in STAGES])
        counted = {stage: [value for value in columns[f"ledger/{stage}"] if value is not None] for stage in STAGES}
        last_step = int(columns["step"][-1] or 0) if columns["step"] else 0
        sums = {stage: sum(values) for stage, values in counted.items() if values}, last_step
        with self._lock:
            self._known[name] = version, sums
            self._known.move_to_end(name)
            while len(self._known) > MAX_LEDGERS:
                self._known.popitem(last=False)
        return sums
