"""A bug: at its start a server ends the sessions that were silent for a day, though it did not run itself."""

import time

from mint.server.service.service import Service

_adopt_sessions = Service._adopt_sessions


def _adopt_and_end(self: Service) -> None:
    silent = [row.session_id for row in self.journal.live_sessions() if time.time() - row.last_seen > 24 * 3600]
    _adopt_sessions(self)
    for session_id in silent:
        self._end_session(session_id)


Service._adopt_sessions = _adopt_and_end
