"""Server-sent events: what is new in a run, or in the list of runs.

One watcher per watched run polls its logs, reads what is new once, and sends it to all listeners. It ends with its last
listener. Files are read in threads; everything else happens in one event loop.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Callable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any

import anyio.to_thread
from starlette.responses import StreamingResponse

from mint.dashboard.response_encoding import json_bytes
from mint.dashboard.run_readers import RunReaders
from mint.errors import MintError, OverloadedError
from mint.runs.reader import RunReader

log = logging.getLogger("mint.dashboard")

POLL_RUN_S = 0.4
POLL_LIST_S = 0.8
POLL_SHARE = 0.1
"""The largest share of a thread's time that polling may take: what takes longer is polled less often."""

HEARTBEAT_S = 15.0
QUEUE_EVENTS = 512
"""A browser that falls this far behind is disconnected; it reconnects and sends its last event id."""

MAX_LISTENERS = 256
CATCH_UP_STEPS = 20_000

STREAM_HEADERS = {"cache-control": "no-store", "x-accel-buffering": "no"}


@dataclass(frozen=True)
class EventCursor:
    """A position in a run's logs: the last step, and the numbers of evaluations and findings. None: the number is not
    known, and earlier rows are not sent.
    """

    step: int
    evaluations: int | None
    findings: int | None

    def __str__(self) -> str:
        if self.evaluations is None or self.findings is None:
            return str(self.step)
        return f"{self.step}-{self.evaluations}-{self.findings}"


@dataclass(frozen=True)
class StreamEvent:
    """`cursor` is the position after the event."""

    name: str
    data: bytes
    cursor: EventCursor | None = None

    def is_within(self, reached: EventCursor) -> bool:
        """Whether a listener at position `reached` has seen this event."""
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
        """The event in the wire format of server-sent events."""
        place = b"" if self.cursor is None else b"id: %s\n" % str(self.cursor).encode()
        return b"%sevent: %s\ndata: %s\n\n" % (place, self.name.encode(), self.data)


class Listener:
    """One open stream. None in its queue ends the stream."""

    def __init__(self) -> None:
        self.queue: asyncio.Queue[StreamEvent | None] = asyncio.Queue(QUEUE_EVENTS)

    def put(self, event: StreamEvent | None) -> None:
        """Adds an event; if the queue is full, ends the stream."""
        try:
            self.queue.put_nowait(event)
        except asyncio.QueueFull:
            self.end()

    def end(self) -> None:
        """Ends the stream and drops the events that wait in it."""
        while not self.queue.empty():
            self.queue.get_nowait()
        self.queue.put_nowait(None)


class _Watcher:
    """Polls one run, or the list, for all its listeners. `poll` is called in a thread and returns the new events."""

    def __init__(self, poll: Callable[[], list[StreamEvent]], every_s: float) -> None:
        self.listeners: set[Listener] = set()
        self.has_polled = asyncio.Event()
        self._poll = poll
        self._every_s = every_s
        self.task = asyncio.create_task(self._watch())

    async def _watch(self) -> None:
        while True:
            began = time.monotonic()
            try:
                for event in await anyio.to_thread.run_sync(self._poll):
                    for listener in list(self.listeners):
                        listener.put(event)
            except (MintError, OSError) as error:  # the run was removed
                log.info("stopped watching a run: %s", error)
                break
            except Exception:  # the boundary of the task: listeners must not wait for ever
                log.exception("watching failed")
                break
            self.has_polled.set()
            await asyncio.sleep(max(self._every_s, (time.monotonic() - began) / POLL_SHARE))
        self.has_polled.set()
        for listener in list(self.listeners):
            listener.put(None)


class EventStreams:
    """All open streams of one application; used in one event loop."""

    def __init__(self, readers: RunReaders) -> None:
        self._readers = readers
        self._watchers: dict[str, _Watcher] = {}
        self._is_closed = False

    def of_run(self, name: str, reader: RunReader, since: EventCursor | None) -> StreamingResponse:
        """The events of a run: `step` (its metrics), `evaluation`, `finding`, `summary`, and `reset`.

        `summary` comes first, and after each of the others. `reset` says that a resume has cut the log, so that the
        page must load the run again.

        Raises:
            OverloadedError: too many streams are open.
        """
        poll = RunPoll(name, reader, self._readers)
        return self._open(f"run {name}", poll, POLL_RUN_S, partial(_catch_up, name, reader, self._readers, since))

    def of_all(self) -> StreamingResponse:
        """The event `runs` with the number of the list's revision, whenever a run changes.

        Raises:
            OverloadedError: too many streams are open.
        """
        poll = ListPoll(self._readers)
        return self._open("all", poll, POLL_LIST_S, list)

    def close(self) -> None:
        """Ends all streams; new ones end at once."""
        self._is_closed = True
        for watcher in self._watchers.values():
            for listener in watcher.listeners:
                listener.end()

    @property
    def watched(self) -> int:
        """How many watchers run: one per watched run, and one for the list."""
        return len(self._watchers)

    def _open(
        self, key: str, poll: Callable[[], list[StreamEvent]], every_s: float, before: Callable[[], list[StreamEvent]]
    ) -> StreamingResponse:
        if sum(len(watcher.listeners) for watcher in self._watchers.values()) >= MAX_LISTENERS:
            raise OverloadedError(f"{MAX_LISTENERS} streams are open already", remedy="Close some pages")
        events = self._events(key, poll, every_s, before)
        return StreamingResponse(events, media_type="text/event-stream", headers=STREAM_HEADERS)

    async def _events(
        self, key: str, poll: Callable[[], list[StreamEvent]], every_s: float, before: Callable[[], list[StreamEvent]]
    ) -> AsyncIterator[bytes]:
        """First the earlier events, then those of the watcher.

        The earlier ones are read after the watcher's first poll, so that no event is missed between the two. An event
        that both have seen is sent once.
        """
        listener = Listener()
        watcher = self._watchers.get(key)
        if watcher is None or watcher.task.done():  # it ends when its run is removed, and the run may be back
            watcher = self._watchers[key] = _Watcher(poll, every_s)
        watcher.listeners.add(listener)
        try:
            yield b"retry: 1000\n\n"
            await watcher.has_polled.wait()
            reached = EventCursor(0, 0, 0)
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
                    reached = EventCursor(0, 0, 0)
                if not event.is_within(reached):
                    yield event.encoded()
        finally:
            watcher.listeners.discard(listener)
            if not watcher.listeners:
                watcher.task.cancel()
                if self._watchers.get(key) is watcher:
                    del self._watchers[key]


def cursor_of(reader: RunReader) -> EventCursor:
    """The position at the end of a run's logs."""
    return EventCursor(reader.last_step(), len(reader.evaluations()), len(reader.findings()))


class RunPoll:
    """The new events of a run since the last call; none on the first call."""

    def __init__(self, name: str, reader: RunReader, readers: RunReaders) -> None:
        self._name = name
        self._reader = reader
        self._readers = readers
        self._version: str | None = None
        self._cursor: EventCursor | None = None
        self._state: str | None = None

    def __call__(self) -> list[StreamEvent]:
        version = self._reader.version()
        if version == self._version:
            return []
        self._version = version
        summary = self._readers.summary(self._name)
        before, self._cursor = self._cursor, cursor_of(self._reader)
        is_changed, self._state = summary.state != self._state, summary.state
        if before is None:
            return []
        if _was_cut(self._cursor, before):
            return [_event("reset", {}, self._cursor), _event("summary", summary, self._cursor)]
        events = _events_since(self._reader, before)
        if events or is_changed:
            events.append(_event("summary", summary, self._cursor))
        return events


class ListPoll:
    """Says that the list of runs has changed since the last call; nothing on the first call."""

    def __init__(self, readers: RunReaders) -> None:
        self._readers = readers
        self._known: int | None = None

    def __call__(self) -> list[StreamEvent]:
        self._readers.summaries()
        before, self._known = self._known, self._readers.revision
        if before is None or before == self._known:
            return []
        return [StreamEvent("runs", json_bytes({"revision": self._known}))]


def _catch_up(name: str, reader: RunReader, readers: RunReaders, since: EventCursor | None) -> list[StreamEvent]:
    """The events that a new listener has missed, and the summary."""
    end = cursor_of(reader)
    summary = _event("summary", readers.summary(name), end)
    if since is None:
        return [summary]
    since = EventCursor(
        since.step,
        end.evaluations if since.evaluations is None else since.evaluations,
        end.findings if since.findings is None else since.findings,
    )
    if _was_cut(end, since):
        return [_event("reset", {}, end), summary]
    return [*_events_since(reader, since), summary]


def _was_cut(now: EventCursor, before: EventCursor) -> bool:
    """Whether the log became shorter: a resumed run drops what came after its last checkpoint."""
    return (
        now.step < before.step
        or (now.evaluations or 0) < (before.evaluations or 0)
        or (now.findings or 0) < (before.findings or 0)
    )


def _events_since(reader: RunReader, since: EventCursor) -> list[StreamEvent]:
    """The events after a position: steps, then evaluations, then findings, each with its own position."""
    rows = reader.metrics(since.step)[-CATCH_UP_STEPS:]
    evaluations = since.evaluations or 0
    findings = since.findings or 0
    events: list[StreamEvent] = []
    step = since.step
    for row in rows:
        step = int(row["step"])
        events.append(_event("step", {"metrics": row}, EventCursor(step, evaluations, findings)))
    for place, row in _numbered(reader.evaluations(), evaluations):
        evaluations = place
        events.append(_event("evaluation", row, EventCursor(step, evaluations, findings)))
    for place, row in _numbered(reader.findings(), findings):
        findings = place
        events.append(_event("finding", row, EventCursor(step, evaluations, findings)))
    return events


def _numbered(rows: list[dict[str, Any]], since: int) -> Iterable[tuple[int, dict[str, Any]]]:
    return enumerate(rows[since:], start=since + 1)


def _event(name: str, data: object, cursor: EventCursor) -> StreamEvent:
    return StreamEvent(name, json_bytes(data), cursor)
