"""Which commits of the journal survive a loss of power, and when a result may be sent. The rule is kept here:

    A request may start before its journal entry is fsynced;
    its acknowledgement and its result are sent only after.

How it is kept:

1. `Journal.add_job` commits a request without an fsync, and the worker may start it. Such a commit survives `kill -9`,
   because the kernel has the data, but not a loss of power.
2. The acknowledgement waits in `wait_durable`. Requests that arrive together share one fsync.
3. The worker commits the result, also without an fsync, and hands it to `call_when_durable` with the commit that
   accepted the request. The result of a new model, sampler or checkpoint waits for its own commit: it is read at once,
   without a place in the order of requests. Weights that a row names are durable before the row is committed.

Why nothing that was sent is lost:

* SQLite appends each commit to one file, the write-ahead log. So one fsync makes all earlier commits durable, and after
  a loss of power a prefix of the commits is there.
* The process dies: all commits are there. The next process runs what is pending.
* The power fails before the fsync: the request may be gone, but nobody was told of it. Its sender sends it again.
* The power fails after the fsync, before the result is durable: the request is pending again, runs again and gives the
  same bits. The next fsync makes the result durable.
* A commit after which files are deleted must be durable before they are: `call_when_durable`, or
  `Database.transaction(durable=True)`.
* The file is deleted, or its folder is moved, while the process runs: commits would go on to a file that the next
  process does not find. So each fsync first looks whether the file is still in its place; if not, the storage is out of
  work until it is back.
* An fsync fails: the kernel may have marked the data as written although it was not, so that a second fsync would
  succeed and say nothing (PostgreSQL's lesson). Therefore nothing that came after the last good fsync is told to
  anybody, and nothing is committed, until all of it was written again. `Database.probe` does that: it holds the
  writers' lock, reads the log, lets SQLite's own recovery check by its checksums that the log is whole up to the newest
  commit, writes the same bytes to the same place (they are new to the kernel then), and fsyncs them. If the log is no
  longer whole, this process writes no more. The next one, after SQLite's recovery, begins with the commits that are
  whole, and writes the log again before it serves anybody: it cannot know of what the last one died.

Knows no tables and no requests.
"""

from __future__ import annotations

import errno
import logging
import os
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

from mint.errors import JournalError
from mint.server.storage_state import REMEDY, StorageState, reason_of

log = logging.getLogger("mint.durability")


class Durability:
    """Counts the commits of one database, fsyncs them, and owns the thread that waits for the disk.

    Any thread may call.
    """

    def __init__(self, write_ahead_log: Path, storage: StorageState) -> None:
        self._path = write_ahead_log
        self._storage = storage
        self._file: int | None = None
        self._syncing = threading.Lock()
        self._durable = 0
        self.newest_commit = 0
        """The number of the newest commit of this process; 0 before the first one."""
        self.must_write_again = False
        """Whether an fsync has failed, and what it was to keep was not written again yet."""
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="mint-disk")

    def add_commit(self) -> int:
        """Counts a commit that was just written, and returns its number. One thread at a time may call this."""
        self.newest_commit += 1
        return self.newest_commit

    def require_working_disk(self) -> None:
        """Refuses to go on after a failed fsync.

        Raises:
            JournalError: an fsync has failed, and what it was to keep was not written again yet.
        """
        if self.must_write_again:
            raise JournalError("the disk has failed to keep what was written to the journal", remedy=REMEDY)

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
                file = self._opened()
                try:
                    os.fsync(file)
                except OSError:
                    self.must_write_again = True
                    raise
            except OSError as error:
                self._storage.note_failure("the journal", error)
                raise JournalError(f"the journal cannot be used: {reason_of(error)}", remedy=REMEDY) from error
            self._durable = newest

    def log_bytes(self) -> int:
        """The size of the log's file."""
        try:
            return self._path.stat().st_size
        except FileNotFoundError:
            return 0

    def read_log(self) -> bytes:
        """The log as the kernel gives it back. Call while no other process can write to it."""
        with self._syncing:
            file = self._opened()
            return os.pread(file, os.fstat(file).st_size, 0)

    def write_again(self, content: bytes) -> None:
        """Writes the whole log once more, with the bytes that it has, and fsyncs it: all commits so far are durable.

        Raises:
            OSError: it still cannot be kept.
        """
        with self._syncing:
            file = self._opened()
            newest = self.newest_commit
            written = 0
            while written < len(content):
                written += os.pwrite(file, content[written:], written)
            os.fsync(file)
            self._durable = newest
            self.must_write_again = False

    def _opened(self) -> int:
        """The file, which is opened once.

        Raises:
            OSError: it cannot be opened, or is not in its place any more.
        """
        if self._file is None:
            self._file = os.open(self._path, os.O_RDWR)
        if not os.path.samestat(os.fstat(self._file), self._path.stat()):
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), self._path)
        return self._file

    def call_when_durable(self, commit: int, callback: Callable[[], None]) -> None:
        """Calls `callback` once a commit is durable.

        Calls it at once, on this thread, if it is already; else later, on the disk's thread. If the disk fails, it is
        called once the disk works again; never, if that is not before `close`: the next process has the result again.
        """
        if self._durable >= commit:
            callback()
        else:
            self.submit(self._wait_and_call, commit, callback)

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

    def _wait_and_call(self, commit: int, callback: Callable[[], None]) -> None:
        try:
            self._storage.keep_trying("the journal", lambda: self.wait_durable(commit))
        except JournalError as error:
            log.warning("a result is not sent, because the service stops: %s", error)
        else:
            callback()
