"""Makes the folders and the database of a data directory for their owner alone, whatever the umask.

What an older version, another tool or a copy left readable for others is tightened when it is opened. The data
directory itself is not, if somebody else made it: it may hold other things.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

log = logging.getLogger("mint.store")

NAMED_FOLDERS = ("snapshots", "published", "checkpoints")
"""The folders whose files the journal names."""

FOLDERS = ("instances", *NAMED_FOLDERS, "set_aside", "tmp")
"""Made when a data directory is opened. What is written into them later cannot be reached by others, whatever its own
mode is."""

OTHERS = ("runs", "url_secret", "serve.lock")
"""What else lies in a data directory, if it was needed: the folders of RL runs, the secret of signed links, a lock."""

_OF_OTHERS = 0o077


def open_data_dir(data_dir: Path) -> None:
    """Makes a data directory and its folders; tightens those that are there.

    Raises:
        OSError: one of them cannot be made.
    """
    data_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
    folders = [data_dir / name for name in FOLDERS]
    made = [folder for folder in folders if not folder.is_dir()]
    for folder in made:
        folder.mkdir(mode=0o700, exist_ok=True)
    if made:
        _sync(data_dir)  # without their names, a loss of power takes every file in them
    tighten([*folders, *(data_dir / name for name in OTHERS)])


def open_private(file: Path) -> None:
    """Makes an empty database file; tightens one that is there, its write-ahead log, and copies beside it."""
    # One that is there must not be opened: closing it would release SQLite's locks. SQLite reports other errors.
    with suppress(OSError):
        os.close(os.open(file, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600))
    tighten(file.parent.glob(f"{file.stem}*"))


def _sync(folder: Path) -> None:
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def tighten(paths: Iterable[Path]) -> None:
    """Takes the rights of others on files and folders away, and logs which had any."""
    tightened = []
    for path in paths:
        try:
            mode = path.stat().st_mode
            if mode & _OF_OTHERS:
                path.chmod(mode & 0o700)
                tightened.append(path)
        except FileNotFoundError:
            continue
        except OSError as error:
            log.warning("others can read %s, and that cannot be changed: %s", path, error)
    if tightened:
        log.warning(
            "others could read %s in %s; now only its owner can. The folder itself was left as it is",
            ", ".join(sorted(path.name for path in tightened)),
            tightened[0].parent,
        )
