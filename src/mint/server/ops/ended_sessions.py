"""What an operator does about a session in a data directory: end it, whoever owns it.

Where no process serves the session, it ends here. Otherwise its time is set to be over: the process that serves it ends
it when it next keeps house, within a minute, or when its client comes back.
"""

from __future__ import annotations

import time
from enum import StrEnum
from pathlib import Path

from mint.errors import SessionEndedError
from mint.server.service.sessions import SUSPENDED_S
from mint.server.store.instances import visiting
from mint.server.store.journal import Journal
from mint.server.store.obsolete import discard_files
from mint.server.store.session_catalog import require_session


class SessionEnd(StrEnum):
    """What became of a session that an operator has ended."""

    ENDED = "ended"
    ENDING = "ending"
    """A process serves it, and will end it soon."""


def end_session(journal: Journal, data_dir: Path, session_id: str) -> SessionEnd:
    """Ends a session: its models, futures, published weights and snapshots go; named checkpoints stay.

    Raises:
        NotFoundError: there is no such session.
        SessionEndedError: it has ended already.
        JournalError: the journal cannot be written.
    """
    with visiting(data_dir) as instance:
        row = require_session(journal, None, session_id)
        if row.ended_at is not None:
            raise SessionEndedError("has ended already", field="session_id", value=session_id)
        if instance.is_held(row.instance_id):
            journal.expire_session(session_id, limit_s=SUSPENDED_S)
            return SessionEnd.ENDING
        discard_files(journal, data_dir, journal.end_session(session_id, time.time()))
        return SessionEnd.ENDED
