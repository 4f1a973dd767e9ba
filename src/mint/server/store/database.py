"""The SQLite database of a data directory: opens it, migrates it, and reads and writes it in one way.

Statements are SQL with named parameters; rows come back as the dataclasses of `rows`. Dicts and lists among the
parameters are stored as JSON, so a list can be searched in with `IN (SELECT value FROM json_each(:names))`. The driver
keeps compiled statements by their text, so a hot statement is a constant. Any thread may use the database. Writers of
other processes on the same file are waited for.
"""

from __future__ import annotations

import ctypes
import json
import logging
import os
import secrets
import sqlite3
import tempfile
import threading
from collections.abc import Callable, Generator, Mapping
from contextlib import closing, contextmanager
from dataclasses import fields
from enum import Enum
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

from mint.errors import DamagedDataError, InvalidRequestError, JournalError
from mint.models.tensor_files import sync_file
from mint.server.private_files import open_private
from mint.server.spare_space import SpareSpace
from mint.server.storage_state import DAMAGE_REMEDY, REMEDY, StorageState, reason_of, starting
from mint.server.store.durability import Durability
from mint.server.store.schema import MIGRATIONS, SCHEMA_VERSION, TABLES, statements

Row = TypeVar("Row")
log = logging.getLogger("mint.storage")

OPEN_TIMEOUT_S = 30.0
"""How long opening the file waits for others who use it: one may be migrating it."""

READ_TIMEOUT_S = 5.0
"""How long a command that only reads waits for others."""

BUSY_TIMEOUT_S = 2.0
"""How long a write waits for another process's lock. The engine's thread and those of requests wait with it."""

CACHED_STATEMENTS = 256
"""Twice sqlite3's default: listings are queried in many forms, and the statements of a step should stay compiled."""

LOG_PAGES = 2000
"""How long the write-ahead log gets before its pages are moved to the database."""

LOG_BYTES = 16 << 20
"""What the file of the write-ahead log keeps once its pages are in the database; a large commit makes it larger."""

PROBED_FOLDER = "snapshots"
"""Where `probe` writes its file; what a killed process leaves there is swept later."""

STORAGE_FAULTS = frozenset(
    {
        sqlite3.SQLITE_FULL,
        sqlite3.SQLITE_IOERR,
        sqlite3.SQLITE_READONLY,
        sqlite3.SQLITE_CANTOPEN,
        sqlite3.SQLITE_BUSY,
        sqlite3.SQLITE_NOMEM,
    }
)
"""SQLite's primary codes that say something of the disk, not of a statement."""

NOT_UTF8 = -1
"""The driver's own error for a text that is not UTF-8 has no code."""

DAMAGE = frozenset({sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB, NOT_UTF8})
"""The codes for a page that is not what was written."""

VACUUM_PAGES = 2000
"""How many free pages are given back at once: about 8 MB, in 0.1 s."""


class OpenFor(Enum):
    """The purpose for which a database is opened."""

    SERVICE = "service"
    """To serve requests, or to store something new. On a full disk that waits or fails; only a deletion uses the spare
    space."""

    COMMAND = "command"
    """For a small change by the operator, which uses the spare space on a full disk."""

    READING = "reading"
    """For questions: nothing is written, also on a full disk, unless the schema is an older one."""


class Transaction:
    """Reads and writes within one transaction; valid inside its `with` block only."""

    def __init__(self, connection: sqlite3.Connection) -> None:
        self._connection = connection

    def execute(self, sql: str, /, **parameters: Any) -> sqlite3.Cursor:
        """Executes one statement."""
        for name, value in parameters.items():
            if isinstance(value, dict | list):
                parameters[name] = json.dumps(value)
        return self._connection.execute(sql, parameters)

    def row(self, kind: type[Row], sql: str, /, **parameters: Any) -> Row | None:
        """The first row that a query finds, or None."""
        found = self.execute(sql, **parameters).fetchone()
        return None if found is None else decode(kind, found)

    def rows(self, kind: type[Row], sql: str, /, **parameters: Any) -> list[Row]:
        """The rows that a query finds."""
        return [decode(kind, found) for found in self.execute(sql, **parameters)]

    def value(self, sql: str, /, **parameters: Any) -> Any:
        """The first column of the first row that a query finds, or None."""
        found = self.execute(sql, **parameters).fetchone()
        return None if found is None else found[0]

    def values(self, sql: str, /, **parameters: Any) -> list[Any]:
        """The first column of what a query finds."""
        return [found[0] for found in self.execute(sql, **parameters)]


class Database:
    """One file, with one connection that writes and one that reads.

    Readers wait for no writer: neither for one of this process, which may be waiting for the file's lock, nor for one
    of another process, whatever it locks. A write fails after `BUSY_TIMEOUT_S` of waiting for the lock; then the
    storage is out of work, and until it works again writes do not wait.
    """

    def __init__(self, path: Path, opened_for: OpenFor = OpenFor.SERVICE) -> None:
        """Opens or creates the file. An older schema is copied to a file beside it, and then brought forward.

        Raises:
            JournalError: it cannot be opened, or a newer mint wrote it.
            DamagedDataError: it is damaged.
        """
        open_private(path)
        self.spare = SpareSpace(path)
        self._opened_for = opened_for
        self.storage = StorageState(self.probe)
        self.durability = Durability(path.with_name(f"{path.name}-wal"), self.storage)
        self._folder = path.parent
        self._lock = threading.RLock()  # of the connection that writes
        self._reading = threading.RLock()  # of the other one
        self._is_patient = True
        if opened_for is OpenFor.READING and self._open_reader(path):
            return
        if opened_for is not OpenFor.SERVICE:
            self.spare.release_if_short()
        with starting(), self._errors():
            self._connection, self._reader = _connect(path), _connect(path)
        self._statements, self._queries = Transaction(self._connection), Transaction(self._reader)
        try:
            with starting():
                self._begin(path)
        except BaseException:
            self.close()
            raise
        self.spare.take()

    def _open_reader(self, path: Path) -> bool:
        """Opens a file of this schema for reading; False if that needs writing first."""
        try:
            connection = _connect_reader(path)
        except sqlite3.Error:
            return False
        self._connection = self._reader = connection
        self._statements = self._queries = Transaction(connection)
        try:
            if self._version() == SCHEMA_VERSION:
                return True
        except (JournalError, DamagedDataError) as error:  # a log without its index, which must be made; or no database
            log.debug("%s cannot be read without writing: %s", path, error)
        connection.close()
        return False

    def close(self) -> None:
        """Closes the file; the database cannot be used afterwards."""
        self.storage.close()
        self.durability.close()
        with self._reading:
            self._reader.close()
        with self._lock:
            if self.durability.must_write_again:
                # Closing would move pages of the log, which nobody has checked, into the database. The end of the
                # process does not; this keeps the interpreter from closing it before that.
                ctypes.pythonapi.Py_IncRef(ctypes.py_object(self._connection))
            else:
                self._connection.close()

    @contextmanager
    def transaction(
        self, *, write: bool = True, durable: bool = True, frees_space: bool = False
    ) -> Generator[Transaction]:
        """One transaction: all of its statements take effect, or none if the block raises.

        What it wrote survives a loss of power when this returns; if not `durable`, it survives the end of the process,
        and a loss of power only after `durability.wait_durable`. On a full disk, one that `frees_space` uses the spare
        space. Transactions cannot be nested.

        Raises:
            JournalError: disk full, or file locked for too long. If it was to write, the storage is out of work from
                then on.
            DamagedDataError: a page that this needs is damaged; others may be sound.
        """
        if not write:
            with self._reading, self._errors():
                self._reader.execute("BEGIN")
                try:
                    yield self._queries
                finally:
                    self._reader.rollback()
            return
        if frees_space or self._opened_for is not OpenFor.SERVICE:
            self.spare.release_if_short()
        with self._lock, self._errors(is_write=True):
            self.durability.require_working_disk()
            self._wait_for_the_lock_if(self.storage.problem is None)
            # A writer takes the file's lock at once: a transaction that upgrades later can fail instead of waiting.
            self._connection.execute("BEGIN IMMEDIATE")
            try:
                yield self._statements
                self._connection.commit()
            except BaseException:
                self._connection.rollback()
                raise
            commit = self.durability.add_commit()
        if durable:
            self.durability.wait_durable(commit)

    def row(self, kind: type[Row], sql: str, /, **parameters: Any) -> Row | None:
        """The first row that one query finds, or None.

        Raises:
            JournalError: as `transaction`; for the next methods, too.
        """
        with self._reading, self._errors():
            return self._queries.row(kind, sql, **parameters)

    def rows(self, kind: type[Row], sql: str, /, **parameters: Any) -> list[Row]:
        """The rows that one query finds."""
        with self._reading, self._errors():
            return self._queries.rows(kind, sql, **parameters)

    def value(self, sql: str, /, **parameters: Any) -> Any:
        """The first column of the first row that one query finds, or None."""
        with self._reading, self._errors():
            return self._queries.value(sql, **parameters)

    def values(self, sql: str, /, **parameters: Any) -> list[Any]:
        """The first column of what one query finds."""
        with self._reading, self._errors():
            return self._queries.values(sql, **parameters)

    def write(self, sql: str, /, frees_space: bool = False, **parameters: Any) -> int:
        """A durable transaction of one statement; how many rows it changed. `frees_space` is as in `transaction`."""
        with self.transaction(frees_space=frees_space) as transaction:
            return transaction.execute(sql, **parameters).rowcount

    def probe(self, free_bytes: int = 0) -> None:
        """Writes something that changes nothing: to a file of so many bytes beside the database, and to the database.

        After a failed fsync it first writes again what that was to keep; `Durability` says why.

        Raises:
            JournalError: nothing can be written.
            OSError: there is no space, or no file can be written.
        """
        if free_bytes:
            _require_free_space(self._folder / PROBED_FOLDER, free_bytes)
        if self.durability.must_write_again:
            self.write_log_again()
        self.write(f"PRAGMA user_version = {SCHEMA_VERSION}")
        self.spare.take()

    def write_log_again(self) -> None:
        """Makes all commits durable, also those of which the kernel wrongly believes that they are on the disk.

        Raises:
            JournalError: the log is no longer whole, or cannot be written.
        """
        marker = secrets.randbits(31)
        with self.storage.writing("the journal"), self._lock, self._errors():
            self._connection.execute("PRAGMA wal_autocheckpoint = 0")  # nothing leaves the log unchecked
            try:
                self._connection.execute(f"PRAGMA application_id = {marker}")  # a commit that can be recognized
                self._connection.execute("BEGIN IMMEDIATE")  # nobody writes to the log until this ends
                try:
                    content = self.durability.read_log()
                    page_bytes = self._statements.value("PRAGMA page_size")
                    if _newest_application_id(content, page_bytes) != marker:
                        raise JournalError("the journal has lost what was not durable yet", remedy="Restart the server")
                    self.durability.write_again(content)
                finally:
                    self._connection.rollback()
            finally:
                self._connection.execute(f"PRAGMA wal_autocheckpoint = {LOG_PAGES}")
        log.info("the journal's log was written again: %d bytes", len(content))

    def give_back_log(self) -> None:
        """Gives the space of a large write-ahead log back to the file system, if nobody reads from the log just now.

        Without this a log that nobody writes to keeps the size of its largest commit.
        """
        if self.durability.log_bytes() <= LOG_BYTES:
            return
        with self._lock, self._errors(is_write=True):
            self.durability.require_working_disk()
            self._wait_for_the_lock_if(False)
            self._connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")

    def give_back_pages(self) -> bool:
        """Gives up to `VACUUM_PAGES` pages that are free back to the file system; False if none were free."""
        if self.value("PRAGMA freelist_count") == 0:
            return False
        with self._lock, self._errors(is_write=True):
            self.durability.require_working_disk()
            # `executescript` runs the statement to its end; `execute` would stop after the first page
            self._connection.executescript(f"PRAGMA incremental_vacuum({VACUUM_PAGES})")
            self.durability.add_commit()
        return True

    @contextmanager
    def _errors(self, *, is_write: bool = False) -> Generator[None]:
        """Turns SQLite's errors into those of mint. After a write, the storage is out of work if the error is its."""
        try:
            yield
        except sqlite3.Error as error:
            code = _code_of(error)
            if code in DAMAGE:
                reason = str(error) if code != NOT_UTF8 else "a text is not UTF-8"  # not with the text
                self.storage.note_damage(reason)
                raise DamagedDataError(f"the journal is damaged: {reason}", remedy=DAMAGE_REMEDY) from error
            if is_write and code in STORAGE_FAULTS:
                self.storage.note_failure("the journal", error)
            raise JournalError(f"the journal cannot be used: {reason_of(error)}", remedy=REMEDY) from error

    def _begin(self, path: Path) -> None:
        with self._errors():
            for setting in (
                "auto_vacuum = INCREMENTAL",  # takes effect in new files only, before the first table is made
                "journal_mode = WAL",
                "foreign_keys = OFF",
                f"wal_autocheckpoint = {LOG_PAGES}",
                f"journal_size_limit = {LOG_BYTES}",
                # Some builds of SQLite overwrite all that is deleted with zeros: then a deletion writes as many bytes
                # as it frees, to the log and again to the file. FAST does so only where that writes no further page.
                "secure_delete = FAST",
                "synchronous = NORMAL",  # `Durability` fsyncs the commits
            ):
                self._connection.execute(f"PRAGMA {setting}")
        self._migrate(path)
        with self._errors():
            self._reader.execute("PRAGMA query_only = 1")
            self._set_busy_timeout(BUSY_TIMEOUT_S)

    def _migrate(self, path: Path) -> None:
        if self._version() == SCHEMA_VERSION:
            return
        with self.transaction() as transaction:
            version = self._version()  # read again: another process may have been first
            if version > SCHEMA_VERSION:
                raise JournalError(
                    f"{path} was written by a newer mint (schema {version}, this one reads {SCHEMA_VERSION})",
                    remedy="Upgrade mint, or use another MINT_HOME",
                )
            if 0 < version < SCHEMA_VERSION:
                _copy(path, path.with_name(f"{path.stem}.schema{version}{path.suffix}"))
                for number in range(version + 1, SCHEMA_VERSION + 1):
                    for statement in statements(MIGRATIONS[number]):
                        transaction.execute(statement)
            for statement in statements(TABLES):
                transaction.execute(statement)
            transaction.execute(f"PRAGMA user_version = {SCHEMA_VERSION}")

    def _wait_for_the_lock_if(self, is_patient: bool) -> None:
        if is_patient != self._is_patient:
            self._set_busy_timeout(BUSY_TIMEOUT_S if is_patient else 0.0)
            self._is_patient = is_patient

    def _set_busy_timeout(self, seconds: float) -> None:
        self._connection.execute(f"PRAGMA busy_timeout = {int(seconds * 1000)}")

    def _version(self) -> int:
        return self.value("PRAGMA user_version")


def _connect(path: Path) -> sqlite3.Connection:
    connection = sqlite3.connect(
        path,
        timeout=OPEN_TIMEOUT_S,
        isolation_level=None,  # the driver begins no transactions by itself
        check_same_thread=False,  # locks keep threads apart
        cached_statements=CACHED_STATEMENTS,
    )
    connection.row_factory = sqlite3.Row
    return connection


def _connect_reader(path: Path) -> sqlite3.Connection:
    """A connection that cannot write. It makes no file beside one that nobody has open, for which there may be no room.

    Without a log nobody has the file open, and so nobody changes it.
    """
    address = f"{path.absolute().as_uri()}?mode=ro"
    if not path.with_name(f"{path.name}-wal").exists():
        address += "&immutable=1"
    connection = sqlite3.connect(
        address, uri=True, timeout=READ_TIMEOUT_S, isolation_level=None, check_same_thread=False
    )
    connection.row_factory = sqlite3.Row
    return connection


@contextmanager
def read_only(path: Path) -> Generator[Transaction]:
    """Queries on a file that is neither changed nor migrated.

    Raises:
        InvalidRequestError: it cannot be read, or is no database.
    """
    try:
        with closing(_connect_reader(path)) as connection:
            yield Transaction(connection)
    except sqlite3.DatabaseError as error:
        remedy = "Name a data directory of mint; or restore the file from a backup"
        raise InvalidRequestError(f"cannot be read: {error}", field="database", value=path, remedy=remedy) from error


def check_file(path: Path) -> tuple[int, str]:
    """The version of a file's schema, and what SQLite's own check found: "ok", or the damage.

    Raises:
        InvalidRequestError: as `read_only`.
    """
    with read_only(path) as queries:
        return queries.value("PRAGMA user_version"), queries.value("PRAGMA quick_check(1)")


def insert(kind: type[Any], table: str, *, on_conflict: str = "ABORT") -> str:
    """The statement that adds a row of this dataclass to a table; its parameters are `vars` of the row."""
    names = [field.name for field in fields(kind)]
    values = ", ".join(f":{name}" for name in names)
    return f"INSERT OR {on_conflict} INTO {table} ({', '.join(names)}) VALUES ({values})"


def decode(kind: type[Row], found: sqlite3.Row) -> Row:
    """A row of a table as its dataclass."""
    columns = dict(zip(found.keys(), found, strict=True))
    for name, decoder in _decoders(kind).items():
        if columns[name] is not None:
            try:
                columns[name] = decoder(columns[name])
            except ValueError as error:
                raise DamagedDataError(f"a {kind.__name__} in the journal is damaged: {name} is not JSON") from error
    return kind(**columns)


@cache
def _decoders(kind: type[Any]) -> Mapping[str, Callable[[Any], Any]]:
    """The fields whose values SQLite stores as something else: JSON as text, booleans as 0 and 1."""
    decoders = {"dict": json.loads, "bool": bool}
    return {
        field.name: decoder
        for field in fields(kind)
        for start, decoder in decoders.items()
        if str(field.type).startswith(start)
    }


def _copy(source: Path, target: Path) -> None:
    """Copies the database as it was last committed: the file beside it is about to change.

    The copy is whole, or is not there, after a kill or a loss of power, too.
    """
    unfinished = target.with_name(f"{target.name}.tmp")
    for left in (unfinished, unfinished.with_name(f"{unfinished.name}-journal")):  # by a process that was killed
        left.unlink(missing_ok=True)
    open_private(unfinished)
    with closing(sqlite3.connect(source)) as old, closing(sqlite3.connect(unfinished)) as copy:
        old.backup(copy)
    unfinished.replace(target)
    sync_file(target)


def _require_free_space(folder: Path, size_bytes: int) -> None:
    """Writes a file of this size, durably, and removes it."""
    folder.mkdir(mode=0o700, exist_ok=True)
    handle, name = tempfile.mkstemp(prefix=".probe.", suffix=".tmp", dir=folder)
    try:
        if hasattr(os, "posix_fallocate"):
            os.posix_fallocate(handle, 0, size_bytes)
        else:
            os.truncate(handle, size_bytes)
        os.fsync(handle)
    finally:
        os.close(handle)
        Path(name).unlink()


def _newest_application_id(log_content: bytes, page_bytes: int) -> int:
    """The application id after all commits of a write-ahead log that SQLite's recovery finds whole.

    SQLite reads no checksums while it runs, only when it opens a log that nobody has open: so this opens a copy.
    """
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "log.sqlite3"
        with closing(sqlite3.connect(path, isolation_level=None)) as empty:
            for statement in (f"PRAGMA page_size = {page_bytes}", "PRAGMA journal_mode = WAL", "CREATE TABLE t (x)"):
                empty.execute(statement)
        path.with_name(f"{path.name}-wal").write_bytes(log_content)
        with closing(sqlite3.connect(path)) as copy:
            return copy.execute("PRAGMA application_id").fetchone()[0]


def _code_of(error: sqlite3.Error) -> int:
    """The primary code of an error; the driver's own errors have none."""
    if "decode to UTF-8" in str(error):
        return NOT_UTF8
    return getattr(error, "sqlite_errorcode", sqlite3.SQLITE_OK) & 0xFF
