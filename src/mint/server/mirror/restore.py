"""Brings a data directory back from its mirror."""

from __future__ import annotations

import hashlib
import logging
import shutil
import sqlite3
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

from mint.errors import InvalidRequestError
from mint.models.tensor_files import sync_file
from mint.server.identity import Identity
from mint.server.mirror.manifest import (
    CONTENT,
    MANIFEST,
    MirroredFile,
    MirrorManifest,
    decode_files,
    decode_parts,
    sha256,
)
from mint.server.mirror.objects import Objects, without_secrets
from mint.server.private_files import NAMED_FOLDERS, open_data_dir
from mint.server.store.instances import ServerLock
from mint.server.store.journal import JOURNAL_FILE

log = logging.getLogger("mint.mirror")

UNFINISHED = "restoring"
"""A folder of this name says that what lies beside it is not all: bringing it back begins anew."""

FIELD = "--from-mirror"
FETCHERS = 8


@dataclass(frozen=True)
class Restored:
    """What was brought back: how many files, how many bytes with the journal, and the time of that state, in UTC."""

    files: int
    size_bytes: int
    taken: str
    age_s: float


def restore(objects: Objects, data_dir: Path, *, url: str) -> Restored:
    """Writes the state that a mirror has into a data directory without data. What was cut off begins anew.

    Raises:
        InvalidRequestError: there is no mirror, an object of it is missing or damaged, or the directory has data.
    """
    try:
        open_data_dir(data_dir)
        with closing(ServerLock(data_dir)):
            return _restore(objects, data_dir, url)
    except (OSError, ValueError, sqlite3.DatabaseError) as error:
        raise InvalidRequestError(
            f"cannot be brought back: {error}",
            field=FIELD,
            value=without_secrets(url),
            remedy="Try again; what is in the data directory by now is no obstacle",
        ) from error


def _restore(objects: Objects, data_dir: Path, url: str) -> Restored:
    unfinished = data_dir / UNFINISHED
    _require_no_data(data_dir, has_begun=unfinished.is_dir())
    manifest = _manifest(objects, url)
    unfinished.mkdir(mode=0o700, exist_ok=True)
    _remove_left(data_dir)
    sync_file(unfinished)
    files = [file for own in manifest.files for file in decode_files(_content(objects, own))]
    with ThreadPoolExecutor(FETCHERS) as pool:
        for _ in pool.map(lambda file: _fetch(objects, file, data_dir), files):
            pass
    journal = unfinished / JOURNAL_FILE
    with journal.open("wb") as target:
        for part in decode_parts(_content(objects, manifest.journal)):
            target.write(_content(objects, part))
    journal.chmod(0o600)
    if journal.stat().st_size != manifest.journal_bytes:
        raise ValueError("the journal has another size than the manifest says")
    _check(journal)
    sync_file(journal)
    Identity(manifest.data_id, manifest.incarnation + 1, manifest.taken_at).write(data_dir)
    journal.replace(data_dir / JOURNAL_FILE)
    sync_file(data_dir / JOURNAL_FILE)
    shutil.rmtree(unfinished)
    size_bytes = manifest.journal_bytes + sum(file.size_bytes for file in files)
    return Restored(len(files), size_bytes, manifest.taken, max(0.0, time.time() - manifest.taken_at))


def _require_no_data(data_dir: Path, *, has_begun: bool) -> None:
    """The journal comes last: where it is, nothing is unfinished."""
    found = [] if has_begun else [name for name in NAMED_FOLDERS if any((data_dir / name).glob("*"))]
    if (data_dir / JOURNAL_FILE).exists():
        found.append(JOURNAL_FILE)
    if found:
        raise InvalidRequestError(
            f"has data already ({', '.join(found)}), and nothing is written over it",
            field="--data-dir",
            value=data_dir,
            remedy="Name an empty directory, or move what is there",
        )


def _remove_left(data_dir: Path) -> None:
    """Removes what an attempt before this one has left."""
    for name in (*NAMED_FOLDERS, UNFINISHED):
        for path in (data_dir / name).iterdir():
            shutil.rmtree(path) if path.is_dir() else path.unlink()


def _manifest(objects: Objects, url: str) -> MirrorManifest:
    try:
        return MirrorManifest.decode(objects.get(MANIFEST))
    except FileNotFoundError as error:
        raise InvalidRequestError(
            "has no mirror",
            field=FIELD,
            value=without_secrets(url),
            remedy="Give the address that mint serve --mirror had",
        ) from error


def _content(objects: Objects, name: str) -> bytes:
    content = objects.get(f"{CONTENT}{name}")
    if sha256(content) != name:
        raise ValueError(f"the object {CONTENT}{name} is damaged")
    return content


def _fetch(objects: Objects, file: MirroredFile, data_dir: Path) -> None:
    path = data_dir / file.name
    if not path.resolve().is_relative_to(data_dir.resolve()) or file.name.partition("/")[0] not in NAMED_FOLDERS:
        raise ValueError(f"the mirror names a file outside of the data directory: {file.name}")
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    objects.fetch(f"{CONTENT}{file.sha256}", path)
    path.chmod(0o600)
    with path.open("rb") as written:
        if hashlib.file_digest(written, "sha256").hexdigest() != file.sha256:
            raise ValueError(f"{file.name} is damaged")
    sync_file(path)


def _check(journal: Path) -> None:
    with closing(sqlite3.connect(f"{journal.as_uri()}?mode=ro&immutable=1", uri=True)) as database:
        found = database.execute("PRAGMA quick_check(1)").fetchone()[0]
    if found != "ok":
        raise ValueError(f"the journal is damaged: {found}")
