"""API keys: created, verified, listed and revoked. The database has their SHA-256, never the keys themselves.

A server may run on the same data directory at the same time: it sees a change within `FRESH_S`.
"""

from __future__ import annotations

import hashlib
import hmac
import logging
import secrets
import threading
import time
import uuid
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from mint.errors import ConflictError, DamagedDataError, InvalidRequestError, JournalError, NotFoundError
from mint.server.callers import LOCAL_OWNER, Caller, Quotas
from mint.server.store.database import Database, insert, read_only
from mint.server.store.journal import JOURNAL_FILE, record_bytes, request_bytes, snapshot_bytes
from mint.types.sampling import LogprobsMode

log = logging.getLogger("mint.keys")

PREFIX = "tml-mint-"
"""Public clients refuse keys that do not begin with `tml-` before they send anything."""

SECRET_BYTES = 32
HINT_CHARS = len(PREFIX) + 4
MIN_KEY_CHARS, MAX_KEY_CHARS = 24, 512
MIN_DISTINCT_CHARS = 12
"""A key that the operator chose must be this long and varied, so that nobody can guess it."""

FRESH_S = 0.5
"""How long the result of a verification is cached, and so how long a revoked key may still work."""

LOGPROBS_MODE = "logprobs_mode"
"""A field of `KeyRow`, and the name under which a key's row has it beside its quotas."""

CACHED_KEYS = 4096
USE_NOTED_S = 60.0


@dataclass(frozen=True)
class KeyRow:
    """A key without its secret. `hint` is its beginning; times are seconds since the epoch."""

    key_id: str
    owner: str
    hint: str
    created_at: float
    last_used_at: float | None
    revoked_at: float | None
    quotas: Quotas
    logprobs_mode: LogprobsMode | None = None


@dataclass(frozen=True)
class _StoredKey:
    """A row of the database. Its column `quotas` holds the quotas and `logprobs_mode`."""

    key_id: str
    sha256: str
    owner: str
    hint: str
    created_at: float
    last_used_at: float | None
    revoked_at: float | None
    quotas: dict[str, Any] | None

    @property
    def row(self) -> KeyRow:
        stored = dict(self.quotas or {})
        mode = stored.pop(LOGPROBS_MODE, None)
        times = (self.created_at, self.last_used_at, self.revoked_at)
        return KeyRow(self.key_id, self.owner, self.hint, *times, Quotas(**stored), mode)


@dataclass(frozen=True)
class _Verification:
    caller: Caller | None
    read_at: float


@dataclass(frozen=True)
class KeyCount:
    """How many keys a data directory has: ever made, and of those not revoked."""

    ever: int = 0
    active: int = 0


def count_keys(data_dir: Path) -> KeyCount:
    """The keys of a data directory, read without changing anything; none where there is no database yet.

    Raises:
        InvalidRequestError: there is one, and it cannot be read.
    """
    file = data_dir / JOURNAL_FILE
    if not file.is_file():
        return KeyCount()
    with read_only(file) as queries:
        if not queries.value("SELECT count(*) FROM sqlite_master WHERE name = 'keys'"):  # an older schema
            return KeyCount()
        return KeyCount(*queries.execute("SELECT count(*), count(*) - count(revoked_at) FROM keys").fetchone())


class ApiKeys:
    """The keys of one data directory. Any thread may call."""

    def __init__(
        self, database: Database, *, defaults: Quotas | None = None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """`defaults` are the quotas of a caller whose key has none of its own."""
        self._database = database
        self._defaults = defaults or Quotas()
        self._clock = clock
        self._lock = threading.Lock()
        self._verified: OrderedDict[str, _Verification] = OrderedDict()
        self._noted_at: dict[str, float] = {}

    def create(
        self,
        owner: str,
        quotas: Quotas | None = None,
        *,
        key: str | None = None,
        logprobs_mode: LogprobsMode | None = None,
    ) -> tuple[str, KeyRow]:
        """Creates a key, or registers `key`. Returns it, for it cannot be shown again, and its row.

        Raises:
            InvalidRequestError: the owner's name is empty or has odd characters, a quota is out of range, or `key` is
                too easy to guess.
            ConflictError: `key` is registered already.
        """
        if not (owner.isprintable() and owner.strip() == owner and 0 < len(owner) <= 128) or owner == LOCAL_OWNER:
            raise InvalidRequestError(
                f"is not a name for an owner ({LOCAL_OWNER!r} is taken by servers without keys)",
                field="owner",
                value=owner,
                remedy="Give 1 to 128 printable characters",
            )
        quotas = quotas or Quotas()
        quotas.require_sensible()
        if key is None:
            key = PREFIX + secrets.token_urlsafe(SECRET_BYTES)
        else:
            _require_strength(key)
        # the beginning of a short key that the operator chose would reveal too much
        hint = key[:HINT_CHARS] if key.startswith(PREFIX) else key[:4]
        row = KeyRow(uuid.uuid4().hex[:12], owner, f"{hint}…", time.time(), None, None, quotas, logprobs_mode)
        columns = asdict(row)
        columns["quotas"][LOGPROBS_MODE] = columns.pop(LOGPROBS_MODE)
        stored = _StoredKey(**columns, sha256=_digest(key))
        with self._database.transaction() as transaction:
            if transaction.value("SELECT key_id FROM keys WHERE sha256 = :sha256", sha256=stored.sha256) is not None:
                raise ConflictError("this key is registered already", remedy="Choose another one")
            transaction.execute(insert(_StoredKey, "keys"), **vars(stored))
        return key, row

    def verify(self, key: str) -> Caller | None:
        """The holder of a key; None if there is no such key, or it was revoked.

        Raises:
            JournalError: the database cannot be read, so nothing is known of the key.
        """
        digest = _digest(key)
        return self._known(f"key {digest}", lambda: self._read("sha256 = :value", digest, sha256=digest))

    def recall(self, key: str) -> Caller | None:
        """The holder of a key that was verified in the last `FRESH_S`; None if `verify` has to say. Reads no database,
        so an event loop may ask."""
        with self._lock:
            known = self._verified.get(f"key {_digest(key)}")
            return known.caller if known is not None and self._clock() - known.read_at < FRESH_S else None

    def holder(self, key_id: str) -> Caller | None:
        """The holder of the key of this id, for a caller who has shown the key before; None as for `verify`.

        Raises:
            JournalError: as `verify`.
        """
        return self._known(f"id {key_id}", lambda: self._read("key_id = :value", key_id))

    def quotas_of(self, owner: str) -> Quotas:
        """The quotas of an owner, whichever key a request came with: the most that one of the owner's keys allows.

        Revoked keys count where there is no other. An owner without a key has no quotas.
        """
        stored = self._database.rows(_StoredKey, "SELECT * FROM keys WHERE owner = :owner", owner=owner)
        keys = [key for key in stored if key.revoked_at is None] or stored
        allowed = [asdict(key.row.quotas.with_defaults(self._defaults)) for key in keys]
        return Quotas(**{name: _most([quotas[name] for quotas in allowed]) for name in asdict(Quotas())})

    def active_owners(self) -> frozenset[str]:
        """The owners who have a key that was not revoked.

        Raises:
            JournalError: as `verify`.
        """
        return frozenset(self._database.values("SELECT DISTINCT owner FROM keys WHERE revoked_at IS NULL"))

    def revoke(self, key_id: str) -> KeyRow:
        """Revokes a key; no error if it is revoked already. Its owner's work and checkpoints stay.

        Raises:
            NotFoundError: there is no such key.
        """
        self._database.write(
            "UPDATE keys SET revoked_at = :now WHERE key_id = :key_id AND revoked_at IS NULL",
            key_id=key_id,
            now=time.time(),
        )
        with self._lock:  # other processes notice within `FRESH_S`
            self._verified.clear()
        return self.row(key_id)

    def update(self, key_id: str, quotas: Quotas, logprobs_mode: LogprobsMode | None) -> KeyRow:
        """Replaces the settings of a key; None is the server's default. Nothing that is above a new quota is removed.

        Raises:
            NotFoundError: there is no such key.
            InvalidRequestError: the key was revoked, or a quota is out of range.
        """
        quotas.require_sensible()
        row = self.row(key_id)
        if row.revoked_at is not None:
            remedy = f"Make another one: mint keys create --owner {row.owner}"
            raise InvalidRequestError("was revoked, and is used by nobody", field="key_id", value=key_id, remedy=remedy)
        row = replace(row, quotas=quotas, logprobs_mode=logprobs_mode)
        settings = {**asdict(quotas), LOGPROBS_MODE: logprobs_mode}
        self._database.write(
            "UPDATE keys SET quotas = :settings WHERE key_id = :key_id", key_id=key_id, settings=settings
        )
        with self._lock:
            self._verified.clear()
        return row

    def row(self, key_id: str) -> KeyRow:
        """One key, revoked or not.

        Raises:
            NotFoundError: there is no such key.
        """
        stored = self._database.row(_StoredKey, "SELECT * FROM keys WHERE key_id = :key_id", key_id=key_id)
        if stored is None:
            raise NotFoundError("is not a key here", field="key_id", value=key_id, remedy="See mint keys list")
        return stored.row

    def use_of(self, owner: str) -> Quotas:
        """How much an owner uses of each quota now; of waiting requests nothing is known here."""
        with self._database.transaction(write=False) as transaction:
            live = (
                "session_id IN (SELECT session_id FROM sessions "
                "WHERE owner = :owner AND ended_at IS NULL AND suspended_s IS NULL)"
            )
            sessions = transaction.value(f"SELECT count(*) FROM sessions WHERE {live}", owner=owner)
            models = transaction.value(f"SELECT count(*) FROM models WHERE {live}", owner=owner)
            stored = transaction.value(
                "SELECT coalesce(sum(size_bytes), 0) FROM checkpoints WHERE owner = :owner", owner=owner
            )
        in_journal = request_bytes(self._database, owner) + record_bytes(self._database, owner)
        return Quotas(
            max_sessions=sessions,
            max_models=models,
            max_checkpoint_bytes=stored,
            max_journal_bytes=in_journal,
            max_snapshot_bytes=snapshot_bytes(self._database, owner),
        )

    def stored_bytes(self) -> int:
        """The bytes that the checkpoints of all owners take."""
        return self._database.value("SELECT coalesce(sum(size_bytes), 0) FROM checkpoints")

    def list(self) -> Sequence[KeyRow]:
        """All keys ever created, oldest first."""
        return [stored.row for stored in self._database.rows(_StoredKey, "SELECT * FROM keys ORDER BY created_at")]

    def _known(self, name: str, read: Callable[[], Caller | None]) -> Caller | None:
        """The cached result of a verification, read again after `FRESH_S`."""
        now = self._clock()
        with self._lock:
            known = self._verified.get(name)
            if known is not None and now - known.read_at < FRESH_S:
                return known.caller
        caller = read()
        with self._lock:
            self._verified[name] = _Verification(caller, now)  # None, too: a wrong key does not read the file each time
            self._verified.move_to_end(name)
            if len(self._verified) > CACHED_KEYS:
                self._verified.popitem(last=False)
        if caller is not None:
            self._note_use(caller.key_id or "", now)
        return caller

    def _read(self, condition: str, value: str, *, sha256: str | None = None) -> Caller | None:
        stored = self._database.row(_StoredKey, f"SELECT * FROM keys WHERE {condition}", value=value)
        if stored is None or stored.revoked_at is not None:
            return None
        # the index has compared the hashes already; its time tells of a hash, which nobody can choose byte by byte
        if sha256 is not None and not hmac.compare_digest(stored.sha256, sha256):
            return None
        row = stored.row
        return Caller(row.owner, row.key_id, row.quotas.with_defaults(self._defaults), row.logprobs_mode)

    def _note_use(self, key_id: str, now: float) -> None:
        with self._lock:
            if now - self._noted_at.get(key_id, float("-inf")) < USE_NOTED_S:
                return
            self._noted_at[key_id] = now
        self._database.durability.submit(self._write_use, key_id)  # the request of this key does not wait for the disk

    def _write_use(self, key_id: str) -> None:
        try:
            self._database.write(
                "UPDATE keys SET last_used_at = :now WHERE key_id = :key_id", key_id=key_id, now=time.time()
            )
        except (JournalError, DamagedDataError) as error:
            log.warning("when a key was last used could not be noted: %s", error)


def _most(limits: Sequence[int | None]) -> int | None:
    numbers = [limit for limit in limits if limit is not None]
    return max(numbers) if numbers and len(numbers) == len(limits) else None


def _require_strength(key: str) -> None:
    """Refuses a key that could be guessed, or that a header cannot carry. The error does not show it."""
    problem = None
    if not (key.isascii() and key.isprintable() and " " not in key):
        problem = "has characters that a header cannot carry"
    elif not MIN_KEY_CHARS <= len(key) <= MAX_KEY_CHARS:
        problem = f"has {len(key)} characters instead of {MIN_KEY_CHARS} to {MAX_KEY_CHARS}"
    elif len(set(key)) < MIN_DISTINCT_CHARS:
        problem = f"has only {len(set(key))} different characters"
    if problem is not None:
        remedy = "Take the output of: openssl rand -base64 32"
        raise InvalidRequestError(problem, field="key", value="(not shown)", remedy=remedy)


def _digest(key: str) -> str:
    # Without a salt: a key is found by its hash, and is too random to be guessed from it.
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).hexdigest()
