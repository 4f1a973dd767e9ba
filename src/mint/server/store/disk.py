"""The thread that waits for the disk, so that the engine need not: it writes and syncs files, one after another.

And whoever may be told of something only once it survives a loss of power is told by it. Knows no request.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor

from mint.errors import JournalError
from mint.server.store.journal import Journal

log = logging.getLogger("mint.disk")


class Disk:
    """The files of one data directory, beside its journal."""

    def __init__(self, journal: Journal) -> None:
        self._journal = journal
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="mint-disk")

    def submit(self, work: Callable[..., None], *arguments: object) -> Future[None]:
        """Does some work later, behind all that was submitted before."""
        try:
            return self._thread.submit(work, *arguments)
        except RuntimeError:  # the interpreter ends, and lets its threads begin nothing more
            done: Future[None] = Future()
            work(*arguments)
            done.set_result(None)
            return done

    def tell_when_kept(
        self, accepted: int, written: Future[None] | None, tell: Callable[[JournalError | None], None]
    ) -> None:
        """Calls `tell` once a file is `written` and what the journal held at `accepted` is synced: at once where both
        are, else on this thread; with an error where the disk has failed."""
        if self._journal.is_synced(accepted) and (written is None or written.done()):
            tell(None)
        else:
            self.submit(self._wait_and_tell, accepted, written, tell)

    def close(self) -> None:
        """Returns once all that was submitted is done."""
        self._thread.shutdown()

    def _wait_and_tell(
        self, accepted: int, written: Future[None] | None, tell: Callable[[JournalError | None], None]
    ) -> None:
        try:
            if written is not None:
                written.result()
            self._journal.sync(accepted)
        except (OSError, JournalError) as error:
            log.exception("the disk does not keep a result")
            remedy = "Look at the disk, then restart: what was accepted is run again"
            tell(JournalError(f"the disk has failed to keep the result: {error}", remedy=remedy))
        else:
            tell(None)
