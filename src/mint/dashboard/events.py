"""What happens, as it happens: server-sent events for those who watch a run, or the list of runs.

One watcher for each run that somebody watches: it looks whether the logs have grown, reads what is new once, and hands
it to everybody. It ends when nobody watches. Files are read in threads; everything else is in one event loop.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any

import anyio.to_thread
from starlette.responses import StreamingResponse

from mint.dashboard.json_values import json_bytes
from mint.dashboard.run_readers import Readers
from mint.errors import MintError, OverloadedError
from mint.runs.reader import RunReader

log = logging.getLogger("mint.dashboard")

LOOK_EVERY_S = 0.4
LIST_EVERY_S = 0.8
HEARTBEAT_S = 15.0
QUEUE_EVENTS = 512
"""A browser that takes its events slower than this is let go; it comes back by itself, and says where it was."""

MAX_LISTENERS = 256
CATCH_UP_STEPS = 20_000

STREAM_HEADERS = {"cache-control": "no-store", "x-accel-buffering": "no"}


@dataclass(frozen=True)
class Cursor:
    """A place in a run: the last step, and how many evaluations and findings there were; None where that is not known,
    and what is there already is not sent."""

    step: int
    evaluations: int | None
    findings: int | None

    def __str__(self) -> str:
        if self.evaluations is None or self.findings is None:
            return str(self.step)
        return f"{self.step}-{self.evaluations}-{self.findings}"


@dataclass(frozen=True)
class _Event:
    """`cursor` is the place after it."""

    name: str
    data: bytes
    cursor: Cursor | None = None

    def is_within(self, reached: Cursor) -> bool:
        """Whether it is one of those that led to a place."""
        if self.cursor is None:
            return False
        counts = {
            "step": (self.cursor.step, reached.step),
            "evaluation": (self.cursor.evaluations, reached.evaluations),
            "finding": (self.cursor.findings, reached.findings),
        }
        own, known = counts.get(self.name, (None, None))
        return own is not None and known is not None and own <= known

    def encoded(self) -> bytes:
        """As it is sent."""
        place = b"" if self.cursor is None else b"id: %s\n" % str(self.cursor).encode()
        return b"%sevent: %s\ndata: %s\n\n" % (place, self.name.encode(), self.data)


class _Listener:
    """One open stream. None in its queue ends it."""

    def __init__(self) -> None:
        self.queue: asyncio.Queue[_Event | None] = asyncio.Queue(QUEUE_EVENTS)

    def put(self, event: _Event | None) -> None:
        """Adds an event; where there is no room left, ends the stream."""
        try:
            self.queue.put_nowait(event)
        except asyncio.QueueFull:
            self.end()

    def end(self) -> None:
        """Ends the stream, whatever still waits in it."""
        while not self.queue.empty():
            self.queue.get_nowait()
        self.queue.put_nowait(None)


class _Watcher:
    """Looks at one thing for all who watch it. `look` is called in a thread, and gives what is new."""

    def __init__(self, look: Callable[[], list[_Event]], every_s: float) -> None:
        self.listeners: set[_Listener] = set()
        self.has_looked = asyncio.Event()
        self._look = look
        self._every_s = every_s
        self.task = asyncio.create_task(self._watch())

    async def _watch(self) -> None:
        while True:
            try:
                for event in await anyio.to_thread.run_sync(self._look):
                    for listener in list(self.listeners):
                        listener.put(event)
            except (MintError, OSError) as error:  # the run was taken away
                log.info("a run is watched no longer: %s", error)
                break
            except Exception:  # the boundary: those who watch must not wait for ever
                log.exception("watching failed")
                break
            self.has_looked.set()
            await asyncio.sleep(self._every_s)
        self.has_looked.set()
        for listener in list(self.listeners):
            listener.put(None)


class Streams:
    """All open streams of one application; used in one event loop."""

    def __init__(self, readers: Readers) -> None:
        self._readers = readers
        self._watchers: dict[str, _Watcher] = {}
        self._is_closed = False

    def of_run(self, name: str, reader: RunReader, since: Cursor | None) -> StreamingResponse:
        """The events of a run: `step` (its `metrics`), `evaluation`, `finding`, `summary` (at the beginning, and after
        these), and `reset` when the log was cut back, so that what is known of it no longer holds.

        Raises:
            OverloadedError: too many streams are open.
        """
        look = _RunLook(name, reader, self._readers)
        return self._open(f"run {name}", look, LOOK_EVERY_S, partial(_catch_up, name, reader, self._readers, since))

    def of_all(self) -> StreamingResponse:
        """The list of runs, whenever one changes: `runs`, as the API has it.

        Raises:
            OverloadedError: too many streams are open.
        """
        look = _ListLook(self._readers)
        return self._open("all", look, LIST_EVERY_S, list)

    def close(self) -> None:
        """Ends all streams, now and from now on."""
        self._is_closed = True
        for watcher in self._watchers.values():
            for listener in watcher.listeners:
                listener.end()

    @property
    def watched(self) -> int:
        """How many things somebody watches."""
        return len(self._watchers)

    def _open(
        self, key: str, look: Callable[[], list[_Event]], every_s: float, before: Callable[[], list[_Event]]
    ) -> StreamingResponse:
        if sum(len(watcher.listeners) for watcher in self._watchers.values()) >= MAX_LISTENERS:
            raise OverloadedError(f"{MAX_LISTENERS} streams are open already", remedy="Close some pages")
        events = self._events(key, look, every_s, before)
        return StreamingResponse(events, media_type="text/event-stream", headers=STREAM_HEADERS)

    async def _events(
        self, key: str, look: Callable[[], list[_Event]], every_s: float, before: Callable[[], list[_Event]]
    ) -> AsyncIterator[bytes]:
        """What was there before comes first: read once the watcher has looked, so that nothing falls between the two.
        What both have seen is sent once."""
        listener = _Listener()
        watcher = self._watchers.get(key)
        if watcher is None or watcher.task.done():
            watcher = self._watchers[key] = _Watcher(look, every_s)
        watcher.listeners.add(listener)
        try:
            yield b"retry: 1000\n\n"
            await watcher.has_looked.wait()
            reached = Cursor(0, 0, 0)
            for event in await anyio.to_thread.run_sync(before):
                reached = event.cursor or reached
                yield event.encoded()
            while not self._is_closed:
                try:
                    event = await asyncio.wait_for(listener.queue.get(), HEARTBEAT_S)
                except TimeoutError:
                    yield b": still here\n\n"
                    continue
                if event is None:
                    return
                if event.name == "reset":
                    reached = Cursor(0, 0, 0)
                if not event.is_within(reached):
                    yield event.encoded()
        finally:
            watcher.listeners.discard(listener)
            if not watcher.listeners:
                watcher.task.cancel()
                if self._watchers.get(key) is watcher:
                    del self._watchers[key]


def cursor_of(reader: RunReader) -> Cursor:
    """The end of a run's log."""
    steps = reader.columns(["step"])["step"]
    return Cursor(int(steps[-1] or 0) if steps else 0, len(reader.evaluations()), len(reader.findings()))


class _RunLook:
    """What is new in a run since the last look; at the first, nothing."""

    def __init__(self, name: str, reader: RunReader, readers: Readers) -> None:
        self._name, self._reader, self._readers = name, reader, readers
        self._version: str | None = None
        self._cursor: Cursor | None = None
        self._state: str | None = None

    def __call__(self) -> list[_Event]:
        version = self._reader.version()
        if version == self._version:
            return []
        self._version = version
        summary = self._readers.summary(self._name)
        before, self._cursor = self._cursor, cursor_of(self._reader)
        is_changed, self._state = summary.state != self._state, summary.state
        if before is None:
            return []
        if _is_behind(self._cursor, before):
            return [_event("reset", {}, self._cursor), _event("summary", summary, self._cursor)]
        events = _news(self._reader, before)
        if events or is_changed:
            events.append(_event("summary", summary, self._cursor))
        return events


class _ListLook:
    """The list of runs, if it is another than at the last look; at the first, nothing."""

    def __init__(self, readers: Readers) -> None:
        self._readers = readers
        self._known: bytes | None = None

    def __call__(self) -> list[_Event]:
        body = json_bytes({"runs": list(self._readers.summaries().values())})
        before, self._known = self._known, body
        return [] if before is None or before == body else [_Event("runs", body)]


def _catch_up(name: str, reader: RunReader, readers: Readers, since: Cursor | None) -> list[_Event]:
    """What a new listener has missed, and how the run stands."""
    end = cursor_of(reader)
    summary = _event("summary", readers.summary(name), end)
    if since is None:
        return [summary]
    since = Cursor(
        since.step,
        end.evaluations if since.evaluations is None else since.evaluations,
        end.findings if since.findings is None else since.findings,
    )
    if _is_behind(end, since):
        return [_event("reset", {}, end), summary]
    return [*_news(reader, since), summary]


def _is_behind(now: Cursor, before: Cursor) -> bool:
    """Whether something is gone: a run that goes on after a death drops what came after its last checkpoint."""
    return (
        now.step < before.step
        or (now.evaluations or 0) < (before.evaluations or 0)
        or (now.findings or 0) < (before.findings or 0)
    )


def _news(reader: RunReader, since: Cursor) -> list[_Event]:
    """What came after a place, in this order: steps, evaluations, findings. The place goes along."""
    rows = reader.metrics(since.step)[-CATCH_UP_STEPS:]
    evaluations, findings = since.evaluations or 0, since.findings or 0
    events: list[_Event] = []
    step = since.step
    for row in rows:
        step = int(row["step"])
        events.append(_event("step", {"metrics": row}, Cursor(step, evaluations, findings)))
    for place, row in _numbered(reader.evaluations(), evaluations):
        evaluations = place
        events.append(_event("evaluation", row, Cursor(step, evaluations, findings)))
    for place, row in _numbered(reader.findings(), findings):
        findings = place
        events.append(_event("finding", row, Cursor(step, evaluations, findings)))
    return events


def _numbered(rows: list[dict[str, Any]], since: int) -> Iterable[tuple[int, dict[str, Any]]]:
    return enumerate(rows[since:], start=since + 1)


def _event(name: str, data: object, cursor: Cursor) -> _Event:
    return _Event(name, json_bytes(data), cursor)
