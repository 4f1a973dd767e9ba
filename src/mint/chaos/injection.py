"""Arms faults in this process: wraps the functions of the fault points, counts how often each is reached, and strikes.

Called once, before the service is opened, in a process that `mint chaos` has started. Cannot be undone.
"""

from __future__ import annotations

import inspect
import os
import threading
from collections import Counter
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import wraps
from pathlib import Path
from typing import Any

from mint.chaos.disasters import Disasters
from mint.chaos.fault_points import FAULT_POINTS, OPERATIONS, FaultPoint, resolve
from mint.chaos.faults import Fault
from mint.server.worker import snapshot_policy

OTHER = "other"
"""The kind of work of a thread that is at no operation."""


class Injection:
    """The faults of one life of a process, and the points that it has reached."""

    def __init__(self, faults: Sequence[Fault], disasters: Disasters, hits_file: Path) -> None:
        """Every reached point is a line of `hits_file`, which survives the process."""
        self._disasters = disasters
        self._armed = [fault for fault in faults if fault.point is not None]
        self._timed = [fault for fault in faults if fault.at_s is not None]
        self._lock = threading.Lock()
        self._counts: Counter[tuple[str, str | None]] = Counter()  # None: of any kind
        self._hits = os.open(hits_file, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        self._here = threading.local()

    def install(self) -> None:
        """Wraps all fault points. Small states are saved after every step, however fast this machine is."""
        snapshot_policy.MAX_SHARE = 1e9
        for point in FAULT_POINTS:
            owner, name, function = resolve(point.target)
            setattr(owner, name, self._at_point(point, function))
        for operation in OPERATIONS:
            owner, name, function = resolve(operation.target)
            setattr(owner, name, self._within(operation.kind_of, function))

    def start_clock(self) -> None:
        """Starts the time after which timed faults strike."""
        for fault in self._timed:
            timer = threading.Timer(fault.at_s or 0.0, self._disasters.strike, (fault,))
            timer.daemon = True
            timer.start()

    def hit(self, point: FaultPoint, kind: str | None) -> None:
        """Counts that this thread has reached a point with a kind of work, and strikes if a fault is due.

        Kind None is a file that no fault concerns: nothing is counted.
        """
        if kind is None or getattr(self._here, "is_striking", False):
            return  # a fault's own files and syncs are no places for a fault
        with self._lock:
            os.write(self._hits, f"{point.name} {kind}\n".encode())
            for place in {(point.name, kind), (point.name, None)}:
                self._counts[place] += 1
            due = [
                fault
                for fault in self._armed
                if fault.point == point.name
                and fault.kind in (kind, None)
                and self._counts[point.name, fault.kind] == fault.hit
            ]
        self._here.is_striking = True
        try:
            for fault in due:
                self._disasters.strike(fault)
        finally:
            self._here.is_striking = False

    def _kind(self, point: FaultPoint, arguments: Sequence[Any]) -> str | None:
        return point.kind_of(*arguments) if point.kind_of is not None else getattr(self._here, "operation", OTHER)

    def _at_point(self, point: FaultPoint, function: Callable[..., Any]) -> Callable[..., Any]:
        if inspect.iscoroutinefunction(function):

            @wraps(function)
            async def call_async(*arguments: Any, **named: Any) -> Any:
                if point.when == "before":
                    self.hit(point, self._kind(point, arguments))
                result = await function(*arguments, **named)
                if point.when == "after":
                    self.hit(point, self._kind(point, arguments))
                return result

            return call_async

        @wraps(function)
        def call(*arguments: Any, **named: Any) -> Any:
            if point.when == "before":
                self.hit(point, self._kind(point, arguments))
            result = function(*arguments, **named)
            if point.when == "after":
                self.hit(point, self._kind(point, arguments))
            return self._midway(point, arguments, result) if point.when == "midway" else result

        return call

    def _midway(self, point: FaultPoint, arguments: Sequence[Any], items: Iterable[Any]) -> Iterator[Any]:
        """Is at the point after the third item: after the start of a file, and before its end."""
        kind = self._kind(point, arguments)  # it may be read on another thread

        def through() -> Generator[Any]:
            for number, item in enumerate(items, start=1):
                yield item
                if number == 3:
                    self.hit(point, kind)

        return through()

    def _within(self, kind_of: Callable[..., str], function: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(function)
        def call(*arguments: Any, **named: Any) -> Any:
            with self._operation(kind_of(*arguments)):
                return function(*arguments, **named)

        return call

    @contextmanager
    def _operation(self, kind: str) -> Generator[None]:
        before = getattr(self._here, "operation", OTHER)
        self._here.operation = kind
        try:
            yield
        finally:
            self._here.operation = before
