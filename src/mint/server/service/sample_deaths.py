"""How often the process has lost its device while it ran a sample request: the next process runs that request alone,
and fails it after some deaths.

Sample requests are not journaled; their clients send them again after a restart, under the same ids. Of training
requests the journal counts all deaths (`takeover`).
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterable
from pathlib import Path

from mint.errors import MintError, RequestFailedError
from mint.models.tensor_files import write_file
from mint.server.service.takeover import MAX_ATTEMPTS

log = logging.getLogger("mint.service")

KEPT_REQUESTS = 10_000


class SampleDeaths:
    """The counts of a data directory; one server writes them."""

    def __init__(self, file: Path) -> None:
        self._file = file
        self._counts = _read(file)

    def add(self, request_ids: Iterable[str]) -> None:
        """Counts a death for these requests. Never raises: the process is about to end."""
        for name in request_ids:
            self._counts[name] = self._counts.pop(name, 0) + 1
        newest = dict(list(self._counts.items())[-KEPT_REQUESTS:])
        try:
            write_file(self._file, [json.dumps(newest).encode()])
        except (OSError, MintError) as error:
            log.error("deaths of sample requests are not counted: %s", error)

    def has(self, request_id: str) -> bool:
        """Whether the process has died while it ran this request."""
        return request_id in self._counts

    def failure(self, request_id: str) -> RequestFailedError | None:
        """The error of a request in which the process has died too often."""
        count = self._counts.get(request_id, 0)
        if count < MAX_ATTEMPTS:
            return None
        return RequestFailedError(
            f"the process died {count} times while it ran this request", remedy="See the server's log"
        )


def _read(file: Path) -> dict[str, int]:
    try:
        found = json.loads(file.read_bytes())
        return {str(name): int(count) for name, count in found.items()}
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, TypeError, AttributeError) as error:
        log.warning("deaths of sample requests cannot be read from %s: %s", file, error)
        return {}
