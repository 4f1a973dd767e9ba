"""The database of a data directory: its tables, its schema's history, and one transaction at a time. SQLite.

Knows no query but those that open it and bring an older schema forward. Any thread may use it; writers of other
processes on the same file are waited for.
"""

from __future__ import annotations

import sqlite3
import threading
from collections.abc import Generator
from contextlib import closing, contextmanager
from pathlib import Path

import sqlalchemy as sa
from sqlalchemy import event
from sqlalchemy.exc import SQLAlchemyError
from sqlalchemy.pool import StaticPool

from mint.errors import JournalError
from mint.server.store.durability import Durability

SCHEMA_VERSION = 2
BUSY_TIMEOUT_S = 30.0
LOCAL_OWNER = "local"
"""Who owns what is made without keys: in this process, or by a server that asks for none."""

meta = sa.MetaData()
sessions = sa.Table(
    "sessions",
    meta,
    sa.Column("session_id", sa.String, primary_key=True),
    sa.Column("instance_id", sa.String, nullable=False, index=True),
    sa.Column("user_metadata", sa.JSON),
    sa.Column("last_seen", sa.Float, nullable=False),
    sa.Column("ended_at", sa.Float),
    sa.Column("owner", sa.String, nullable=False, server_default=LOCAL_OWNER, index=True),
    sa.Column("details", sa.JSON),
    sa.Column("created_at", sa.Float),
)
models = sa.Table(
    "models",
    meta,
    sa.Column("model_id", sa.String, primary_key=True),
    sa.Column("session_id", sa.String, nullable=False, index=True),
    sa.Column("base_model", sa.String),
    sa.Column("lora", sa.JSON),
    sa.Column("seed_given", sa.Boolean),
    sa.Column("effective", sa.JSON),
    sa.Column("applied_seq", sa.Integer, nullable=False),
    sa.Column("diverged", sa.String),
)
jobs = sa.Table(
    "jobs",
    meta,
    sa.Column("model_id", sa.String, primary_key=True),
    sa.Column("seq_id", sa.Integer, primary_key=True),
    sa.Column("kind", sa.String, nullable=False),
    sa.Column("payload", sa.LargeBinary),
    sa.Column("sha256", sa.String, nullable=False),
    sa.Column("status", sa.String, nullable=False),
    sa.Column("result", sa.LargeBinary),
    sa.Column("digest", sa.String),
    sa.Column("attempts", sa.Integer, nullable=False, default=0),
    sa.Column("encoding", sa.String, nullable=False, server_default="application/json"),
)
snapshots = sa.Table(
    "snapshots",
    meta,
    sa.Column("model_id", sa.String, primary_key=True),
    sa.Column("seq_id", sa.Integer, primary_key=True),
    sa.Column("file", sa.String, nullable=False),
    sa.Column("digest", sa.String, nullable=False),
)
checkpoints = sa.Table(
    "checkpoints",
    meta,
    sa.Column("model_id", sa.String, primary_key=True),
    sa.Column("kind", sa.String, primary_key=True),
    sa.Column("name", sa.String, primary_key=True),
    sa.Column("folder", sa.String, nullable=False),
    sa.Column("created_at", sa.Float, nullable=False),
    sa.Column("owner", sa.String, nullable=False, server_default=LOCAL_OWNER, index=True),
    sa.Column("public", sa.Boolean, nullable=False, server_default=sa.false()),
    sa.Column("expires_at", sa.Float),
    sa.Column("size_bytes", sa.Integer),
    sa.Column("user_metadata", sa.JSON),
)
samplers = sa.Table(
    "samplers",
    meta,
    sa.Column("sampler_id", sa.String, primary_key=True),
    sa.Column("session_id", sa.String, nullable=False, index=True),
    sa.Column("base_model", sa.String, nullable=False),
    sa.Column("model_path", sa.String),
    sa.Column("weights_id", sa.String),
    sa.Column("file", sa.String),
    sa.Column("lora", sa.JSON),
    sa.Column("seed_root", sa.String, nullable=False),
)


runs = sa.Table(
    "runs",
    meta,
    sa.Column("run_id", sa.String, primary_key=True),
    sa.Column("session_id", sa.String, nullable=False, index=True),
    sa.Column("owner", sa.String, nullable=False, index=True),
    sa.Column("base_model", sa.String),
    sa.Column("lora", sa.JSON),
    sa.Column("user_metadata", sa.JSON),
    sa.Column("created_at", sa.Float, nullable=False),
    sa.Column("last_request_at", sa.Float, nullable=False),
    sa.Column("ended_at", sa.Float),
)
keys = sa.Table(
    "keys",
    meta,
    sa.Column("key_id", sa.String, primary_key=True),
    sa.Column("sha256", sa.String, nullable=False, unique=True),
    sa.Column("owner", sa.String, nullable=False, index=True),
    sa.Column("hint", sa.String, nullable=False),
    sa.Column("created_at", sa.Float, nullable=False),
    sa.Column("last_used_at", sa.Float),
    sa.Column("revoked_at", sa.Float),
    sa.Column("quotas", sa.JSON),
)

_STEPS: dict[int, tuple[str, ...]] = {
    2: (
        f"ALTER TABLE sessions ADD COLUMN owner VARCHAR NOT NULL DEFAULT '{LOCAL_OWNER}'",
        "ALTER TABLE sessions ADD COLUMN details JSON",
        "ALTER TABLE sessions ADD COLUMN created_at FLOAT",
        "ALTER TABLE jobs ADD COLUMN encoding VARCHAR NOT NULL DEFAULT 'application/json'",
        f"ALTER TABLE checkpoints ADD COLUMN owner VARCHAR NOT NULL DEFAULT '{LOCAL_OWNER}'",
        "ALTER TABLE checkpoints ADD COLUMN public BOOLEAN NOT NULL DEFAULT 0",
        "ALTER TABLE checkpoints ADD COLUMN expires_at FLOAT",
        "ALTER TABLE checkpoints ADD COLUMN size_bytes INTEGER",
        "ALTER TABLE checkpoints ADD COLUMN user_metadata JSON",
        "CREATE INDEX ix_sessions_owner ON sessions (owner)",
        "CREATE INDEX ix_checkpoints_owner ON checkpoints (owner)",
        "CREATE TABLE runs (run_id VARCHAR PRIMARY KEY, session_id VARCHAR NOT NULL, owner VARCHAR NOT NULL, "
        "base_model VARCHAR, lora JSON, user_metadata JSON, created_at FLOAT NOT NULL, "
        "last_request_at FLOAT NOT NULL, ended_at FLOAT)",
        "CREATE INDEX ix_runs_session_id ON runs (session_id)",
        "CREATE INDEX ix_runs_owner ON runs (owner)",
        f"INSERT INTO runs SELECT m.model_id, m.session_id, '{LOCAL_OWNER}', m.base_model, m.lora, NULL, "
        "s.last_seen, s.last_seen, s.ended_at FROM models m JOIN sessions s ON s.session_id = m.session_id",
        f"INSERT OR IGNORE INTO runs SELECT c.model_id, substr(c.model_id, 1, instr(c.model_id || ':', ':') - 1), "
        f"'{LOCAL_OWNER}', NULL, NULL, NULL, min(c.created_at), max(c.created_at), max(c.created_at) "
        "FROM checkpoints c GROUP BY c.model_id",
    ),
}
"""Schema → the statements that lead to it from the one before. Tables that are new and empty are made afterwards."""


class Database:
    """The tables of one data directory."""

    def __init__(self, path: Path) -> None:
        """Opens or creates the file; an older schema is copied to a file beside it, then brought forward.

        Raises:
            JournalError: it cannot be opened, or a newer mint wrote it.
        """
        self._lock = threading.RLock()
        self.durability = Durability(path.with_name(f"{path.name}-wal"))
        self._driver: sqlite3.Connection
        self._sa = sa.create_engine(
            f"sqlite:///{path}",
            poolclass=StaticPool,
            connect_args={"check_same_thread": False, "timeout": BUSY_TIMEOUT_S},
        )
        event.listen(self._sa, "connect", self._configure)
        event.listen(self._sa, "begin", self._begin)
        with self.transaction() as connection:
            version = connection.exec_driver_sql("PRAGMA user_version").scalar_one()
            if version > SCHEMA_VERSION:
                raise JournalError(
                    f"{path} was written by a newer mint (schema {version}, this one reads {SCHEMA_VERSION})",
                    remedy="Upgrade mint, or use another MINT_HOME",
                )
            if 0 < version < SCHEMA_VERSION:
                _copy(path, path.with_name(f"{path.stem}.schema{version}{path.suffix}"))
                for number in range(version + 1, SCHEMA_VERSION + 1):
                    for statement in _STEPS[number]:
                        connection.exec_driver_sql(statement)
            meta.create_all(connection)
            connection.exec_driver_sql(f"PRAGMA user_version = {SCHEMA_VERSION}")

    def close(self) -> None:
        """Closes the file; the database cannot be used afterwards."""
        self.durability.close()
        with self._lock:
            self._sa.dispose()

    def probe(self) -> None:
        """Writes something that changes nothing.

        Raises:
            JournalError: nothing can be written.
        """
        with self.transaction() as connection:
            connection.exec_driver_sql(f"PRAGMA user_version = {SCHEMA_VERSION}")

    @contextmanager
    def transaction(self, *, write: bool = True, durable: bool = True) -> Generator[sa.Connection]:
        """One transaction on the one connection.

        A transaction that writes survives a loss of power once this returns; if not `durable`, only once
        `durability.wait_durable` has returned.

        Raises:
            JournalError: disk full, file locked for too long, or damaged.
        """
        try:
            with self._lock, self._sa.connect().execution_options(mint_write=write) as connection:
                with connection.begin():
                    yield connection
                commit = self.durability.add_commit() if write else 0
        except SQLAlchemyError as error:
            raise _unusable(error) from error
        if durable:
            self.durability.wait_durable(commit)

    @contextmanager
    def statements(self, *, durable: bool) -> Generator[sqlite3.Connection]:
        """As a `transaction` that writes, on the driver's own connection: several times as fast where statements are
        few and prepared.

        Raises:
            JournalError: as `transaction`.
        """
        with self._lock:
            try:
                self.durability.require_working_disk()
                self._driver.execute("BEGIN IMMEDIATE")
                try:
                    yield self._driver
                    self._driver.commit()
                except BaseException:
                    self._driver.rollback()
                    raise
                commit = self.durability.add_commit()
            except sqlite3.Error as error:
                raise _unusable(error) from error
        if durable:
            self.durability.wait_durable(commit)

    def _configure(self, connection: sqlite3.Connection, _record: object) -> None:
        # SQLAlchemy's own recipe: the driver must not begin transactions by itself
        connection.isolation_level = None
        for pragma in (
            "auto_vacuum = INCREMENTAL",
            "journal_mode = WAL",
            "foreign_keys = OFF",
            "wal_autocheckpoint = 2000",
            "synchronous = NORMAL",  # commits are fsynced by `Durability`
        ):
            connection.execute(f"PRAGMA {pragma}")
        self._driver = connection

    def _begin(self, connection: sa.Connection) -> None:
        write = connection.get_execution_options().get("mint_write", True)
        if write:
            self.durability.require_working_disk()
        # a writer takes the file's lock at once: a transaction that upgrades later can fail instead of waiting
        connection.exec_driver_sql("BEGIN IMMEDIATE" if write else "BEGIN")


def _copy(source: Path, target: Path) -> None:
    """The database as it was last committed, whole, beside the file that is about to change."""
    with closing(sqlite3.connect(source)) as old, closing(sqlite3.connect(target)) as copy:
        old.backup(copy)


def _unusable(error: Exception) -> JournalError:
    return JournalError(f"the journal cannot be used: {error}", remedy="Free disk space, or see the log")
