"""The processes that use a data directory, and the one server that may serve it: locked files, so that the kernel tells
who still lives.

A process holds an exclusive `flock` on its own file as long as it lives; a server holds one more, on `serve.lock`. The
kernel releases a lock however its process ends, and knows it in every container that mounts the same folder. Embedded
processes and one server may use a data directory together: each has sessions of its own, all share the checkpoints.
Knows instance ids only; nothing of sessions or models.
"""

from __future__ import annotations

import fcntl
import json
import os
import socket
import time
import uuid
from collections.abc import Generator, Iterable
from contextlib import closing, contextmanager
from datetime import UTC, datetime
from pathlib import Path

from mint.errors import InvalidRequestError, JournalError
from mint.server.storage_state import reason_of

SERVER = "server-"
"""The ids of instances that serve a socket begin with this."""

SERVER_LOCK_FILE = "serve.lock"
PATIENCE_S = 0.5
"""How long a server tries to get its lock: `require_no_server` takes it for an instant."""

_lock_files: set[int] = set()
"""The lock files of this process. A child that was forked from it shares them, and must not keep them locked."""


def _close_inherited() -> None:
    for file in _lock_files:
        os.close(file)
    _lock_files.clear()


os.register_at_fork(after_in_child=_close_inherited)


class ServerLock:
    """The right to serve a data directory: one process has it, until `close` or until it dies."""

    def __init__(self, data_dir: Path) -> None:
        """Takes the right, and writes into the file who has it.

        Raises:
            InvalidRequestError: another server has it, or the file system has no working locks.
        """
        with _file_errors(data_dir):
            self._file = os.open(data_dir / SERVER_LOCK_FILE, os.O_CREAT | os.O_RDWR, 0o600)
        _lock_files.add(self._file)
        try:
            give_up_at = time.monotonic() + PATIENCE_S
            while not _lock(self._file, data_dir):
                if time.monotonic() > give_up_at:
                    raise _is_served(data_dir, self._file)
                time.sleep(PATIENCE_S / 10)
            _require_exclusion(data_dir)
            started_at = datetime.now(UTC).isoformat(timespec="seconds")
            holder = {"pid": os.getpid(), "host": socket.gethostname(), "started_at": started_at}
            with _file_errors(data_dir):
                os.ftruncate(self._file, 0)
                os.pwrite(self._file, json.dumps(holder).encode(), 0)
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Gives the right back. The file stays: removing it could give two servers two files to lock."""
        _release(self._file)


def require_no_server(data_dir: Path) -> None:
    """Checks that a server could serve a data directory now. Creates nothing.

    Raises:
        InvalidRequestError: a server does already, or the file system has no working locks.
    """
    if not (data_dir / SERVER_LOCK_FILE).is_file():
        return
    with _file_errors(data_dir):
        file = os.open(data_dir / SERVER_LOCK_FILE, os.O_RDWR)
    try:
        if not _lock(file, data_dir):
            raise _is_served(data_dir, file)
    finally:
        os.close(file)


@contextmanager
def _file_errors(data_dir: Path) -> Generator[None]:
    try:
        yield
    except OSError as error:
        remedy = "Choose another one, or free disk space"
        raise InvalidRequestError(
            f"cannot be used: {error}", field="--data-dir", value=data_dir, remedy=remedy
        ) from error


def _is_served(data_dir: Path, file: int) -> InvalidRequestError:
    try:
        holder = json.loads(os.pread(file, 4096, 0))
        who = f"process {holder['pid']} on host {holder['host']}, since {holder['started_at']}"
    except (ValueError, KeyError, TypeError):
        who = "a process that has just started"
    return InvalidRequestError(
        f"is served already, by {who}",
        field="--data-dir",
        value=data_dir,
        remedy="Stop that server, or give this one another data directory",
    )


def _lock(file: int, data_dir: Path) -> bool:
    """Locks an open file; False if another one has locked it.

    Raises:
        InvalidRequestError: the file system has no locks.
    """
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:
        raise _no_locks(data_dir, error.strerror or str(error)) from error
    return True


def _require_exclusion(data_dir: Path) -> None:
    """Checks that the file system refuses a lock that is held: some grant every lock."""
    second = os.open(data_dir / SERVER_LOCK_FILE, os.O_RDWR)
    try:
        if _lock(second, data_dir):
            raise _no_locks(data_dir, "it grants one lock twice")
    finally:
        os.close(second)


def _no_locks(data_dir: Path, why: str) -> InvalidRequestError:
    return InvalidRequestError(
        f"is on a file system without working file locks: {why}",
        field="--data-dir",
        value=data_dir,
        remedy="Use a folder on a local disk, or mount the network file system with locks",
    )


def _release(file: int) -> None:
    """Closes a locked file; in a forked child it is closed already."""
    if file in _lock_files:
        _lock_files.discard(file)
        os.close(file)


class Instance:
    """This process's place in a data directory."""

    def __init__(self, data_dir: Path, *, is_server: bool = False) -> None:
        """Takes a new id and locks its file."""
        self._folder = data_dir / "instances"
        self.is_server = is_server
        self.instance_id = f"{SERVER if is_server else ''}{uuid.uuid4().hex}"
        self._housekeeping: int | None = None
        self._longest = 0  # bytes of the longest mark so far
        self._file = os.open(self._path(self.instance_id), os.O_CREAT | os.O_RDWR, 0o600)
        _lock_files.add(self._file)
        fcntl.flock(self._file, fcntl.LOCK_EX)

    def mark(self, request: str) -> None:
        """Writes which request runs now (or none) into the file, for the process that finds this one dead."""
        mark = request.encode()
        self._longest = max(self._longest, len(mark))
        os.pwrite(self._file, mark.ljust(self._longest), 0)  # over the last mark: to truncate a file takes longer

    def close(self) -> None:
        """Removes the file and releases the lock."""
        self._path(self.instance_id).unlink(missing_ok=True)
        _release(self._file)
        if self._housekeeping is not None:
            _release(self._housekeeping)

    def is_housekeeper(self) -> bool:
        """Whether this process is the one that counts how long what all processes share has expired.

        The first one that asks is, until it ends; then the next one that asks.
        """
        if self._housekeeping is None:
            file = os.open(self._folder / "housekeeping.lock", os.O_CREAT | os.O_RDWR, 0o600)
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                os.close(file)
            else:
                _lock_files.add(file)
                self._housekeeping = file
        return self._housekeeping is not None

    @contextmanager
    def sole_adopter(self) -> Generator[None]:
        """Lets one process at a time look for dead instances."""
        file = os.open(self._folder / "adopt.lock", os.O_CREAT | os.O_RDWR, 0o600)
        try:
            fcntl.flock(file, fcntl.LOCK_EX)
            yield
        finally:
            os.close(file)

    def dead_among(self, instance_ids: Iterable[str]) -> dict[str, str]:
        """The ids of those whose process has ended → the request that each was running. Call inside `sole_adopter`.

        Only instances of this one's kind: the clients of a server come back to a server, and would not find sessions
        that a script in the same data directory had taken over.
        """
        others = sorted(
            name for name in set(instance_ids) - {self.instance_id} if name.startswith(SERVER) == self.is_server
        )
        return {instance_id: self._last_mark(instance_id) for instance_id in others if not self.is_held(instance_id)}

    def remove(self, instance_ids: Iterable[str]) -> None:
        """Removes the files of dead instances, after their sessions were taken over."""
        for instance_id in instance_ids:
            self._path(instance_id).unlink(missing_ok=True)

    def _last_mark(self, instance_id: str) -> str:
        try:
            return self._path(instance_id).read_text().rstrip()
        except FileNotFoundError:
            return ""

    def is_held(self, instance_id: str) -> bool:
        """Whether the process of an instance lives. Call inside `sole_adopter`."""
        try:
            file = os.open(self._path(instance_id), os.O_RDWR)
        except FileNotFoundError:
            return False
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        finally:
            os.close(file)  # which gives our own lock back
        return False

    def _path(self, instance_id: str) -> Path:
        return self._folder / f"{instance_id}.lock"


@contextmanager
def visiting(data_dir: Path) -> Generator[Instance]:
    """An instance for a command that changes what a dead process has left. Meanwhile no process takes sessions over.

    Raises:
        JournalError: the data directory cannot be used.
    """
    try:
        instance = Instance(data_dir)
    except OSError as error:
        raise JournalError(f"{data_dir} cannot be used: {reason_of(error)}", remedy="Free disk space") from error
    with closing(instance), instance.sole_adopter():
        yield instance
