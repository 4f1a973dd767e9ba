"""What the routes of the dashboard share: the runs, who may see them, live streams, and what the root gives.

Knows no route and no request.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import anyio
from starlette.staticfiles import StaticFiles

from mint.dashboard.bisect_jobs import Bisections, Search
from mint.dashboard.diagnosis_view import Diagnoses
from mint.dashboard.events import Streams
from mint.dashboard.folders import RunFolders
from mint.dashboard.login import Door
from mint.dashboard.run_readers import Readers

READING_THREADS = 4
"""How many requests may read files at once; the others wait their turn."""


class Dashboard:
    """One for each process; used in one event loop."""

    def __init__(
        self,
        roots: Sequence[Path],
        *,
        door: Door,
        service: Callable[[], Mapping[str, Any]] | None = None,
        search: Search | None = None,
    ) -> None:
        """`roots` are where runs lie. `service` gives the numbers of the service, None where there is none; `search`
        carries out a bisection, None where nothing can be sampled here."""
        self.readers = Readers(RunFolders(roots))
        self.door = door
        self.service = service
        self.bisections = Bisections(self.readers, search)
        self.diagnoses = Diagnoses(self.readers)
        self.streams = Streams(self.readers)
        self.assets = StaticFiles(directory=Path(__file__).parent / "assets")
        self.threads = anyio.CapacityLimiter(READING_THREADS)

    def close(self) -> None:
        """Ends the streams, so that nobody waits for those who watch. Call it in the event loop."""
        self.streams.close()
