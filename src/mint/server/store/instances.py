"""The processes that use a data directory: one locked file for each, so that dead ones can be recognised.

A process holds an exclusive `flock` on its own file as long as it lives. The kernel releases the lock however the
process ends. Knows instance ids only; nothing of sessions or models.
"""

from __future__ import annotations

import fcntl
import os
import uuid
from collections.abc import Generator, Iterable
from contextlib import contextmanager
from pathlib import Path

SERVER = "server-"
"""How the ids of instances begin that serve a socket."""


class Instance:
    """This process's place in a data directory."""

    def __init__(self, data_dir: Path, *, is_server: bool = False) -> None:
        """Takes a new id and locks its file."""
        self._folder = data_dir / "instances"
        self._folder.mkdir(parents=True, exist_ok=True)
        self._role = SERVER if is_server else ""
        self.instance_id = f"{self._role}{uuid.uuid4().hex}"
        self._file = os.open(self._path(self.instance_id), os.O_CREAT | os.O_RDWR, 0o600)
        fcntl.flock(self._file, fcntl.LOCK_EX)

    def mark(self, request: str) -> None:
        """Writes which request runs now (or none) into the file, for the process that finds this one dead."""
        os.ftruncate(self._file, 0)
        os.pwrite(self._file, request.encode(), 0)

    def close(self) -> None:
        """Removes the file and releases the lock."""
        self._path(self.instance_id).unlink(missing_ok=True)
        os.close(self._file)

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
            name for name in set(instance_ids) - {self.instance_id} if name.startswith(SERVER) == bool(self._role)
        )
        return {instance_id: self._last_mark(instance_id) for instance_id in others if not self._is_held(instance_id)}

    def remove(self, instance_ids: Iterable[str]) -> None:
        """Removes the files of dead instances, after their sessions were taken over."""
        for instance_id in instance_ids:
            self._path(instance_id).unlink(missing_ok=True)

    def _last_mark(self, instance_id: str) -> str:
        try:
            return self._path(instance_id).read_text()
        except FileNotFoundError:
            return ""

    def _is_held(self, instance_id: str) -> bool:
        try:
            file = os.open(self._path(instance_id), os.O_RDWR)
        except FileNotFoundError:
            return False
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        finally:
            os.close(file)
        return False

    def _path(self, instance_id: str) -> Path:
        return self._folder / f"{instance_id}.lock"
