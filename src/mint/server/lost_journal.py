"""Notices that the journal of a data directory is lost: it is new or empty, and files of its models are there.

A service that began anew would take these files for orphans, and would ask for no keys.
"""

from __future__ import annotations

from pathlib import Path

from mint.errors import JournalError
from mint.server.private_files import NAMED_FOLDERS
from mint.server.store.database import read_only
from mint.server.store.journal import JOURNAL_FILE, Journal

_IS_USED = "SELECT EXISTS (SELECT 1 FROM sessions) OR EXISTS (SELECT 1 FROM checkpoints)"


def open_journal(data_dir: Path) -> Journal:
    """Opens the journal of a data directory for a service.

    Raises:
        JournalError: it is lost, cannot be opened, or a newer mint wrote it.
    """
    # before the rows: another process that begins now commits its session before it writes a file
    stored = _stored_files(data_dir)
    if stored and not _has_content(data_dir / JOURNAL_FILE):
        raise _lost(data_dir, stored)
    journal = Journal(data_dir / JOURNAL_FILE)
    if stored and not journal.database.value(_IS_USED):
        journal.close()
        raise _lost(data_dir, stored)
    return journal


def require_journal(data_dir: Path) -> None:
    """Checks that the journal is not lost. Changes nothing.

    Raises:
        JournalError: it is.
        InvalidRequestError: it cannot be read.
    """
    stored = _stored_files(data_dir)
    file = data_dir / JOURNAL_FILE
    if not stored:
        return
    if _has_content(file):
        with read_only(file) as queries:
            if queries.value("PRAGMA user_version") and queries.value(_IS_USED):
                return
    raise _lost(data_dir, stored)


def _has_content(file: Path) -> bool:
    return file.is_file() and file.stat().st_size > 0


def _stored_files(data_dir: Path) -> dict[str, int]:
    """How many files or folders lie in each folder, without unfinished ones."""
    counts = {
        name: sum(not path.name.startswith(".") for path in (data_dir / name).glob("*")) for name in NAMED_FOLDERS
    }
    return {name: count for name, count in counts.items() if count}


def _lost(data_dir: Path, stored: dict[str, int]) -> JournalError:
    content = ", ".join(f"{count} in {name}/" for name, count in stored.items())
    return JournalError(
        f"the journal of {data_dir} is lost: {JOURNAL_FILE} is missing or empty, but there are files that it must name "
        f"({content})",
        remedy=f"Restore {JOURNAL_FILE} from a backup; or, to begin anew without them, move the folders "
        f"{', '.join(stored)} out of the data directory",
    )
