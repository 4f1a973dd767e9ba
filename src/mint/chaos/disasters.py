"""The faults themselves, done to this process: it is killed, its disk fills up, its clock jumps, its memory runs out.

Faults that come from outside the process (SIGSTOP, SIGTERM, a locked database) are struck by `trial`.
"""

from __future__ import annotations

import errno
import os
import resource
import signal
import tempfile
import threading
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager
from functools import wraps
from pathlib import Path
from typing import Any

from mint.chaos.fault_points import file_kind, resolve
from mint.chaos.faults import Fault
from mint.chaos.power_loss import Disk
from mint.server.store.database import Database

DEFAULT_S = 3.0
FREE_BYTES = 8 << 20
ALL_PAGES = 4_294_967_294
ALLOCATIONS = (
    "mint.engine.training_pass:_run",
    "mint.engine.torch_engine:TorchEngine.optim_step",
    "mint.engine.torch_engine:TorchEngine.read_state",
    "mint.engine.torch_engine:TorchEngine.publish",
    "mint.engine.sampling.sampler:Sampler._advance",
    "mint.models.tensor_files:_header",
)
"""Functions of the engine and of its files that take memory: a micro-batch, a step, a copy of a state, a step of
sampling, a file's header."""


class Disasters:
    """Brings faults on this process; its service uses `data_dir`."""

    def __init__(self, data_dir: Path, *, keeps_unsynced_apart: bool) -> None:
        """`keeps_unsynced_apart`: a power loss is to come, so every sync is watched from now on."""
        self._data_dir = data_dir
        self._databases: list[Database] = []
        self._file_error: int | None = None
        self._journal_sync_failures = 0
        self._sync_delay_s = 0.0
        self._allocation_failures = 0
        self._clock_offset_s = 0.0
        self._disk = Disk(data_dir, lambda fsync: setattr(os, "fsync", fsync)) if keeps_unsynced_apart else None
        self._actions: dict[str, Callable[[float], None]] = {
            "kill": lambda _value: _die(),
            "power-loss": lambda _value: self._lose_power(torn=False),
            "torn": lambda _value: self._lose_power(torn=True),
            "disk-full": lambda value: self._for_a_while(value, self._disk_that_is(errno.ENOSPC, "max_page_count", 1)),
            "read-only": lambda value: self._for_a_while(value, self._disk_that_is(errno.EROFS, "query_only", 1)),
            "eio": lambda value: self._for_a_while(value, self._disk_that_is(errno.EIO, None, 0)),
            "eio-journal": lambda value: setattr(self, "_journal_sync_failures", int(value) or 1),
            "slow-disk": lambda value: setattr(self, "_sync_delay_s", value / 1000),
            "clock": lambda value: setattr(self, "_clock_offset_s", value),
            "memory": lambda value: setattr(self, "_allocation_failures", int(value) or 1),
            "address-space": lambda value: self._for_a_while(
                value, _limit(resource.RLIMIT_AS, _used_bytes, FREE_BYTES)
            ),
            "descriptors": lambda value: self._for_a_while(value, _limit(resource.RLIMIT_NOFILE, lambda: 0, 0)),
        }
        self._wrap()

    def strike(self, fault: Fault) -> None:
        """Lets a fault happen, on this thread. A fault that lasts is ended by a thread of its own."""
        self._actions[fault.action](fault.value)

    def _lose_power(self, *, torn: bool) -> None:
        assert self._disk is not None, "the disk is watched from the start of a process that will lose power"
        self._disk.freeze()
        found = self._disk.after_power_loss(self._data_dir.with_name("found.tmp"), torn=torn)
        found.rename(self._data_dir.with_name("found"))
        _die()

    def _for_a_while(self, seconds: float, state: Any) -> None:
        timer = threading.Timer(seconds or DEFAULT_S, state.__exit__, (None, None, None))
        timer.daemon = True
        timer.start()  # before there may be no memory for a thread
        state.__enter__()

    @contextmanager
    def _disk_that_is(self, error: int, pragma: str | None, value: int) -> Generator[None]:
        self._file_error = error
        for database in self._databases if pragma is not None else ():
            _set(database, f"{pragma} = {value}")
        try:
            yield
        finally:
            self._file_error = None
            for database in self._databases if pragma is not None else ():
                _set(database, f"{pragma} = {ALL_PAGES if pragma == 'max_page_count' else 0}")

    def _wrap(self) -> None:
        """Wraps the functions through which the service uses the disk, the clock and memory."""
        fsync = os.fsync
        replace = Path.replace
        mkstemp = tempfile.mkstemp
        now = time.time
        open_database = Database.__init__

        def failing_fsync(handle: int) -> None:
            kind = file_kind(Path(f"/proc/self/fd/{handle}").readlink())
            time.sleep(0.0 if kind is None else self._sync_delay_s)
            if kind == "journal" and self._journal_sync_failures > 0:
                self._journal_sync_failures -= 1
                raise OSError(errno.EIO, os.strerror(errno.EIO))
            if kind != "journal":
                self._require_files(kind)
            fsync(handle)

        def failing_replace(path: Path, target: Path) -> Path:
            self._require_files(file_kind(Path(target)))
            return replace(path, target)

        def failing_mkstemp(*arguments: Any, **named: Any) -> tuple[int, str]:
            self._require_files(file_kind(Path(named.get("dir") or "") / "file"))
            return mkstemp(*arguments, **named)

        def failing(allocate: Callable[..., Any]) -> Callable[..., Any]:
            @wraps(allocate)
            def call(*arguments: Any, **named: Any) -> Any:
                if self._allocation_failures > 0:
                    self._allocation_failures -= 1
                    raise MemoryError("no memory, says mint chaos")
                return allocate(*arguments, **named)

            return call

        def noted_database(database: Database, *arguments: Any, **named: Any) -> None:
            open_database(database, *arguments, **named)
            self._databases.append(database)

        os.fsync = failing_fsync  # ty: ignore[invalid-assignment]
        Path.replace = failing_replace  # ty: ignore[invalid-assignment]
        tempfile.mkstemp = failing_mkstemp  # ty: ignore[invalid-assignment]
        for target in ALLOCATIONS:
            owner, name, allocate = resolve(target)
            setattr(owner, name, failing(allocate))
        time.time = lambda: now() + self._clock_offset_s  # ty: ignore[invalid-assignment]
        Database.__init__ = noted_database

    def _require_files(self, kind: str | None) -> None:
        if self._file_error is not None and kind is not None:
            raise OSError(self._file_error, os.strerror(self._file_error))


def _die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)
    threading.Event().wait()  # the signal may need a moment, in which nothing else may happen


def _set(database: Database, pragma: str) -> None:
    with database._lock:
        database._connection.execute(f"PRAGMA {pragma}")


@contextmanager
def _limit(which: int, used: Callable[[], int], free: int) -> Generator[None]:
    soft, hard = resource.getrlimit(which)
    resource.setrlimit(which, (used() + free, hard))
    try:
        yield
    finally:
        resource.setrlimit(which, (soft, hard))


def _used_bytes() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    return pages * resource.getpagesize()
