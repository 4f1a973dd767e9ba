"""What the routes of the dashboard share: readers of runs, access, caches, jobs and live streams."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import anyio
from starlette.staticfiles import StaticFiles

from mint.dashboard.deleted_runs import DeletedRuns
from mint.dashboard.diagnosis_cache import DiagnosisCache
from mint.dashboard.event_streams import EventStreams
from mint.dashboard.jobs.bisect_jobs import BisectJobs, Search
from mint.dashboard.jobs.launches import Launches, PageCommands
from mint.dashboard.login import AccessCheck
from mint.dashboard.run_folders import RunFolders
from mint.dashboard.run_list import RunList
from mint.dashboard.run_readers import RunReaders
from mint.dashboard.token_ledger import TokenLedger

READING_THREADS = 4
"""How many requests may read files at once; the others wait."""


class DashboardState:
    """One per process; used in one event loop."""

    def __init__(
        self,
        roots: Sequence[Path],
        *,
        access: AccessCheck,
        service: Callable[[], Mapping[str, Any]] | None = None,
        search: Search | None = None,
        commands: PageCommands | None = None,
        environment: Callable[[], Mapping[str, str]] = dict,
    ) -> None:
        """`roots` are the folders with runs. `service` returns the numbers of the service; None if none runs here.
        `search` runs a bisection; None if nothing can be sampled here. `commands` makes the command lines of what
        pages start, as processes with `environment`; None if they may start nothing."""
        self.readers = RunReaders(RunFolders(roots))
        self.runs = RunList(self.readers)
        self.deleted = DeletedRuns(roots, self.readers)
        self.access = access
        self.service = service
        self.bisections = BisectJobs(self.readers, search)
        self.launches = Launches(self.readers, commands, environment=environment)
        self.diagnoses = DiagnosisCache(self.readers)
        self.ledger = TokenLedger(self.readers)
        self.streams = EventStreams(self.readers)
        self.assets = StaticFiles(directory=Path(__file__).parent / "assets")
        self.threads = anyio.CapacityLimiter(READING_THREADS)

    def close(self) -> None:
        """Ends the streams, so that the server can stop. Call it in the event loop."""
        self.streams.close()
