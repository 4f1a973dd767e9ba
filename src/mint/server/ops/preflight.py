"""Checks before a server starts: who can reach it, its data directory, its models. Changes nothing.

Each check gives a sentence, and whether the server can start.
"""

from __future__ import annotations

import os
import shutil
import socket
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from mint.errors import InvalidRequestError, MintError
from mint.models import registry
from mint.server.http.auth import is_loopback
from mint.server.lost_journal import require_journal
from mint.server.ops.open_files import require_open_files
from mint.server.store.database import check_file
from mint.server.store.instances import require_no_server
from mint.server.store.journal import JOURNAL_FILE
from mint.server.store.keys import KeyCount, count_keys
from mint.server.store.schema import SCHEMA_VERSION

START_BYTES = 256 * 1024
"""What a start writes on an empty disk: folders, locks, and a database with its first tables."""


@dataclass(frozen=True)
class CheckResult:
    """One check: its name, whether it passed, and a sentence about it."""

    check: str
    ok: bool
    text: str


@dataclass(frozen=True)
class Access:
    """Who can use a server: whether it asks for keys, and whether only this machine can reach it."""

    asks_keys: bool
    is_local: bool


def decide_access(host: str, *, api_keys: bool | None, insecure: bool, keys: KeyCount) -> Access:
    """Whether to ask for keys (`api_keys` None: if any was ever made).

    Raises:
        InvalidRequestError: others could reach the server, and no key would keep them out.
    """
    asks_keys = keys.ever > 0 if api_keys is None else api_keys
    is_local = is_loopback(host)
    if is_local or insecure:
        return Access(asks_keys, is_local)
    where = host or "(every address)"
    if asks_keys and keys.active:
        return Access(asks_keys, is_local)
    if api_keys is False:
        problem, remedy = "others can reach this address, and --no-api-keys would let them all in", "Leave it out"
    else:
        problem = "others can reach this address, and no key has been made that would keep them out"
        remedy = "Make one first: mint keys create --owner NAME"
    raise InvalidRequestError(problem, field="--host", value=where, remedy=f"{remedy}; or use 127.0.0.1")


def open_socket(host: str, port: int) -> socket.socket:
    """A socket that is bound to the address, and not listening yet.

    Raises:
        InvalidRequestError: the address is none of this machine, or taken, or not allowed.
    """
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        bound = socket.socket(family, kind, protocol)
    except (OSError, UnicodeError) as error:
        remedy = "Give a name or an address of this machine, such as 127.0.0.1; 0.0.0.0 is all of them"
        raise InvalidRequestError(f"is no address: {error}", field="--host", value=host, remedy=remedy) from error
    try:
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.bind(address)
        # a second server with this option could bind too: only `listen` shows that the port is free
        bound.listen(2048)
    except OSError as error:
        bound.close()
        raise InvalidRequestError(
            f"cannot be listened on: {error.strerror or error}",
            field="--port",
            value=f"{host}:{port}",
            remedy="Choose another one, or 0 for any that is free",
        ) from error
    return bound


def examine(
    *,
    data_dir: Path,
    host: str,
    port: int,
    api_keys: bool | None,
    insecure: bool,
    offered: Mapping[str, str],
    aliases: Mapping[str, str],
) -> list[CheckResult]:
    """All checks, in the order of a start; an empty `offered` stands for every registered name."""

    def access() -> str:
        decided = decide_access(host, api_keys=api_keys, insecure=insecure, keys=count_keys(data_dir))
        reach = "this machine only" if decided.is_local else "other machines too"
        return f"{host} is reached from {reach}; keys are {'asked for' if decided.asks_keys else 'not asked for'}"

    def free_port() -> str:
        open_socket(host, port).close()
        return f"{host}:{port} is free"

    names = {**aliases, **{name: target for name, target in offered.items() if target != name}}
    return [
        _check_result("data directory", lambda: _data_dir(data_dir)),
        _check_result("schema", lambda: _schema(data_dir)),
        _check_result("address", access),
        _check_result("port", free_port),
        _check_result("open files", lambda: f"{require_open_files()} may be open"),
        *(
            _check_result("model", lambda name=name: f"{name} is {registry.resolve(name, names)}")
            for name in offered or registry.available(aliases)
        ),
    ]


def _check_result(check: str, look: Callable[[], str]) -> CheckResult:
    try:
        return CheckResult(check, True, look())
    except MintError as error:
        return CheckResult(check, False, str(error))


def _data_dir(folder: Path) -> str:
    existing = next(parent for parent in (folder, *folder.parents) if parent.exists())
    if not existing.is_dir() or not os.access(existing, os.W_OK | os.X_OK):
        raise InvalidRequestError("cannot be written", field="--data-dir", value=existing, remedy="Choose another one")
    free_bytes = shutil.disk_usage(existing).free
    if free_bytes < START_BYTES:
        raise InvalidRequestError(
            f"has {free_bytes} bytes free on its disk, and a start needs {START_BYTES}",
            field="--data-dir",
            value=folder,
            remedy="Free disk space, or choose another data directory (--data-dir, MINT_HOME)",
        )
    require_no_server(folder)
    return f"{folder} can be written" if existing == folder else f"{folder} will be made"


def _schema(data_dir: Path) -> str:
    require_journal(data_dir)
    file = data_dir / JOURNAL_FILE
    if not file.is_file():
        return "no database yet; it will be made"
    version, found = check_file(file)
    if found != "ok":
        raise InvalidRequestError(f"is damaged: {found}", field="database", value=file, remedy="Restore a backup")
    if version > SCHEMA_VERSION:
        raise InvalidRequestError(
            f"was written by a newer mint (schema {version}, this one reads {SCHEMA_VERSION})",
            field="database",
            value=file,
            remedy="Upgrade mint",
        )
    if version < SCHEMA_VERSION:
        return f"schema {version} will be brought to {SCHEMA_VERSION}; a copy is kept beside it"
    return f"schema {version}, sound"
