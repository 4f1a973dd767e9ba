"""Which commits of the journal survive a loss of power, and who may be told of them. The rule is kept here:

    A request may start before its journal entry is fsynced;
    its acknowledgement and its result are sent only after.

How it is kept:

1. `Journal.add_job` commits a request without an fsync, and the worker may start it. Such a commit survives `kill -9`,
   because the kernel has the data, but not a loss of power.
2. The acknowledgement waits in `wait_durable`. Requests that arrive together share one fsync.
3. The worker commits the result, also without an fsync, and hands it to `call_when_durable` with the commit that
   accepted the request, and with the file that the result names, if there is one. The result of a new model or sampler
   waits for its own commit: the client uses such a row at once, without a place in the order of requests.

Why nothing that was sent is lost:

* SQLite appends each commit to one file, the write-ahead log. So one fsync makes all earlier commits durable, and after
  a loss of power a prefix of the commits is there.
* The process dies: all commits are there. The next process runs what is pending.
* The power fails before the fsync: the request may be gone, but nobody was told of it. Its sender sends it again.
* The power fails after the fsync, before the result is durable: the request is pending again, runs again and gives the
  same bits. The next fsync makes the result durable.
* A commit after which files are deleted, and one that gives a checkpoint its name, must be durable before anything
  else happens: `Database.transaction(durable=True)`.
* An fsync fails: the kernel may have dropped the data, and a second fsync would succeed without it. Therefore this
  process commits nothing more. The next process reads what the disk has.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

from mint.errors import JournalError

log = logging.getLogger("mint.durability")


class Durability:
    """Counts the commits of one database, fsyncs them, and owns the thread that waits for the disk.

    Any thread may call.
    """

    def __init__(self, write_ahead_log: Path) -> None:
        self._path = write_ahead_log
        self._file: int | None = None
        self._syncing = threading.Lock()
        self._durable = 0
        self.newest_commit = 0
        """The number of the newest commit of this process; 0 before the first one."""
        self._has_failed = False
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="mint-disk")

    def add_commit(self) -> int:
        """Counts a commit that was just written, and returns its number. One thread at a time may call this."""
        self.newest_commit += 1
        return self.newest_commit

    def is_durable(self, commit: int) -> bool:
        """Whether a commit, and all before it, survive a loss of power."""
        return self._durable >= commit

    def require_working_disk(self) -> None:
        """Refuses to go on after a failed fsync.

        Raises:
            JournalError: an fsync has failed in this process.
        """
        if self._has_failed:
            raise JournalError(
                "the disk has failed to keep what was written to the journal", remedy="Look at the disk, then restart"
            )

    def wait_durable(self, commit: int) -> None:
        """Returns once a commit, and all before it, survive a loss of power. Threads that wait together share an fsync.

        Raises:
            JournalError: the disk has failed, now or before.
        """
        if self._durable >= commit:
            return
        with self._syncing:
            if self._durable >= commit:
                return
            self.require_working_disk()
            newest = self.newest_commit  # read before the fsync: what is committed during it may not be on the disk
            try:
                if self._file is None:
                    self._file = os.open(self._path, os.O_RDONLY)
                os.fsync(self._file)
            except OSError as error:
                self._has_failed = True
                raise JournalError(
                    f"the journal cannot be used: {error}", remedy="Free disk space, or see the log"
                ) from error
            self._durable = newest

    def call_when_durable(
        self, commit: int, file: Future[None] | None, callback: Callable[[JournalError | None], None]
    ) -> None:
        """Calls `callback(None)` once a commit is durable and a `file` of `submit` is written.

        Calls it at once, on this thread, if both are already true; else later, on the disk's thread. If the disk fails,
        the callback gets the error.
        """
        is_written = file is None or (file.done() and file.exception() is None)
        if is_written and self._durable >= commit:
            callback(None)
        else:
            self.submit(self._wait_and_call, commit, file, callback)

    def submit(self, work: Callable[..., None], *arguments: object) -> Future[None]:
        """Runs `work` on the disk's thread, after all that was submitted before: writing a file, for instance."""
        try:
            return self._thread.submit(work, *arguments)
        except RuntimeError:  # closed, or the interpreter is shutting down and starts no more threads
            done: Future[None] = Future()
            work(*arguments)
            done.set_result(None)
            return done

    def close(self) -> None:
        """Returns once all that was submitted is done."""
        self._thread.shutdown()
        with self._syncing:
            if self._file is not None:
                os.close(self._file)
                self._file = None

    def _wait_and_call(
        self, commit: int, file: Future[None] | None, callback: Callable[[JournalError | None], None]
    ) -> None:
        try:
            if file is not None:
                file.result()
            self.wait_durable(commit)
        except Exception as error:  # the boundary: a request waits for this callback
            log.exception("the disk does not keep a result")
            remedy = "Look at the disk, then restart: what was accepted is run again"
            callback(JournalError(f"the disk has failed to keep the result: {error}", remedy=remedy))
        else:
            callback(None)
