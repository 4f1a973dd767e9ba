"""A bug: at its start a server ends the sessions that were silent for a day, though it did not run itself."""

import time

from mint.server.service.session_lifetime import SessionLifetime

_adopt = SessionLifetime.adopt


def _adopt_and_end(self: SessionLifetime) -> None:
    silent = [row.session_id for row in self._journal.live_sessions() if time.time() - row.last_seen > 24 * 3600]
    _adopt(self)
    for session_id in silent:
        self._end(session_id)


SessionLifetime.adopt = _adopt_and_end
