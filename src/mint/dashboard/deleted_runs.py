"""Deleting runs, and taking it back: a deleted run lies in a folder beside the others for `KEPT_S`, then it goes.

The checkpoints of a run belong to the service that saved them, and stay.
"""

from __future__ import annotations

import re
import shutil
import time
from collections.abc import Sequence
from pathlib import Path

from mint.dashboard.run_folders import RUNS
from mint.dashboard.run_readers import RunReaders
from mint.errors import InvalidRequestError, NotFoundError

DELETED = ".deleted"
KEPT_S = 7 * 86400.0
"""A deleted run can be brought back for this long. It is removed when the next run is deleted after that."""

ENTRY = re.compile(r"(?P<at>\d{1,12})-(?P<name>[^/]+)")


class DeletedRuns:
    """The deleted runs below some roots."""

    def __init__(self, roots: Sequence[Path], readers: RunReaders) -> None:
        self._roots = tuple(root.expanduser().resolve() for root in roots)
        self._readers = readers

    def delete(self, run: str) -> str:
        """Deletes a run; returns the entry that `restore` takes.

        Raises:
            NotFoundError: there is no such run.
            InvalidRequestError: it is running, or it was named on the command line itself.
        """
        folder = self._readers.folders.folder(run)
        if self._readers.summary(run).state == "running":
            raise InvalidRequestError("is running", field="run", value=run, remedy="Stop it first")
        if folder in self._roots:
            remedy = "Start the dashboard over the folder around it, or remove it yourself"
            raise InvalidRequestError("was named when the dashboard was started", field="run", value=run, remedy=remedy)
        place = folder.parent / DELETED
        place.mkdir(mode=0o700, exist_ok=True)
        self._remove_old(place)
        entry = f"{int(time.time())}-{folder.name}"
        folder.rename(place / entry)
        self._readers.forget(folder)
        return entry

    def restore(self, entry: str) -> str:
        """Brings a deleted run back; returns the name of its folder.

        Raises:
            NotFoundError: there is no such entry, or it was removed.
            InvalidRequestError: another run has its name now.
        """
        found = ENTRY.fullmatch(entry)
        places = [] if found is None else [place / entry for place in self._places() if (place / entry).is_dir()]
        if found is None or not places:
            raise NotFoundError("is not a deleted run", field="entry", value=entry, remedy="It was removed, or is back")
        target = places[0].parent.parent / found["name"]
        if target.exists():
            raise InvalidRequestError("is the name of another run now", field="run", value=found["name"])
        places[0].rename(target)
        self._readers.notice(target)
        return target.name

    def _places(self) -> list[Path]:
        return [place / DELETED for root in self._roots for place in (root / RUNS, root)]

    def _remove_old(self, place: Path) -> None:
        for folder in place.iterdir():
            found = ENTRY.fullmatch(folder.name)
            if found is not None and time.time() - int(found["at"]) > KEPT_S:
                shutil.rmtree(folder, ignore_errors=True)
