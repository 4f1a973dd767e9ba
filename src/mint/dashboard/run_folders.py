"""Finds runs below folders and gives each a name for URLs. Knows that a run has a `config.json`, not its content."""

from __future__ import annotations

import hashlib
import os
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from mint.errors import NotFoundError
from mint.runs.interrupt import STOP_REQUEST
from mint.runs.labels import LABELS

CONFIG = "config.json"
RUNS = "runs"
"""The folder of runs inside a data directory."""

RESERVED = frozenset({"events"})
"""Names that the URLs of the API use themselves."""

SETTLED_NS = 2_000_000_000
"""File systems have coarse clocks: a folder's modification time proves that nothing changed only if it is this old."""

WATCHED = (
    CONFIG,
    "process.json",
    "metrics.jsonl",
    "evaluations.jsonl",
    "findings.jsonl",
    "checkpoints.jsonl",
    "rollouts.index",
    LABELS,
    STOP_REQUEST,
)
"""A run's summary is still right if size and modification time of these files are unchanged."""

Stamp = tuple[tuple[int, int], ...]


@dataclass
class _Listing:
    """The folders inside one folder, at one modification time."""

    changed_ns: int = -1
    children: tuple[Path, ...] = ()


class RunFolders:
    """The runs below some roots: in `ROOT/runs`, in `ROOT`, and `ROOT` itself. Thread-safe."""

    def __init__(self, roots: Sequence[Path]) -> None:
        """Roots need not exist yet. If two runs have the same name, the one of the later root gets a suffix."""
        self.roots = tuple(dict.fromkeys(root.expanduser().resolve() for root in roots))
        self._listings: dict[Path, _Listing] = {}
        self._lock = threading.Lock()
        self._found: dict[str, Path] = {}

    def find(self) -> dict[str, Path]:
        """All runs by name. A run keeps its name while runs of other names appear and disappear."""
        with self._lock:
            found: dict[str, Path] = {}
            seen: set[Path] = set()
            for root in self.roots:
                for folder in (*self._children(root / RUNS), root, *self._children(root)):
                    if folder not in seen and os.path.isfile(f"{folder}/{CONFIG}"):  # noqa: PTH113
                        seen.add(folder)
                        found[_name_of(folder, found)] = folder
            self._found = found
            return found

    def folder(self, name: str) -> Path:
        """The folder of one run.

        Raises:
            NotFoundError: there is no such run.
        """
        # With thousands of runs, looking for all of them takes longer than the rest of a request.
        known = self._found.get(name) if self._found else self._first_of_name(name)
        folder = known if known is not None and (known / CONFIG).is_file() else self.find().get(name)
        if folder is None:
            raise NotFoundError("is not a run here", field="run", value=name, remedy="See the list of runs")
        return folder

    def _first_of_name(self, name: str) -> Path | None:
        """The folder that `find` gives this name because it is the first one that has it."""
        if name in RESERVED or name in ("", ".", "..") or Path(name).name != name:
            return None
        for root in self.roots:
            for folder in (root / RUNS / name, *([root] if root.name == name else []), root / name):
                if (folder / CONFIG).is_file():
                    return folder
        return None

    def _children(self, folder: Path) -> tuple[Path, ...]:
        """The folders inside `folder`; read again only if it has changed: that is slow with hundreds of runs."""
        try:
            changed_ns = folder.stat().st_mtime_ns
            listing = self._listings.setdefault(folder, _Listing())
            if changed_ns != listing.changed_ns:
                listing.children = tuple(sorted(child for child in folder.iterdir() if child.is_dir()))
                listing.changed_ns = changed_ns if time.time_ns() - changed_ns > SETTLED_NS else -1
        except OSError:  # missing, or without permission to read
            self._listings.pop(folder, None)
            return ()
        return listing.children


def stamp_of(folder: Path) -> Stamp:
    """Size and modification time of a run's files; another stamp means that something was written."""
    stamps = []
    place = str(folder)  # with thousands of runs, paths as objects take longer than the files
    for name in WATCHED:
        try:
            state = os.stat(f"{place}/{name}")  # noqa: PTH116
            stamps.append((state.st_size, state.st_mtime_ns))
        except OSError:
            stamps.append((-1, -1))
    return tuple(stamps)


def _name_of(folder: Path, taken: dict[str, Path]) -> str:
    # A folder may have a name that neither a URL nor JSON can hold.
    name = folder.name.encode("utf-8", "replace").decode()
    if name != folder.name or name in RESERVED or name in taken:
        name = f"{name}~{hashlib.sha256(str(folder).encode('utf-8', 'surrogatepass')).hexdigest()[:8]}"
    return name
