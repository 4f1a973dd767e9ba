"""The server's log: one line for each event on standard error, as JSON for machines or in colour for people.

Lines of Python's own `logging` are part of it. Text that looks like a key is redacted everywhere, also in tracebacks.
Prompts, bodies and query strings are given to no logger; an engine's error may repeat token ids, so long rows of
numbers are redacted, too.
"""

from __future__ import annotations

import logging
import logging.handlers
import re
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, MutableMapping
from queue import SimpleQueue
from typing import Any, TextIO

import structlog

from mint.server.http.access_log import AccessRecord, request_id

access_log = logging.getLogger("mint.access")

_KEY = re.compile(r"\b(tml-|sk-|eyJ)[A-Za-z0-9_.~+/=-]{6,}|(?i:\b(bearer)\s+)[A-Za-z0-9_.~+/=-]{6,}")

_NUMBER = r"[\d.]++(?:e[-+]?\d++)?+"
_ROW_OF_NUMBERS = re.compile(rf"(?<![\d.]){_NUMBER}(?:[\s,]++[-+]?+{_NUMBER}){{4,}}+")
"""Five numbers and more, as in lists and arrays; shapes are shorter."""

_CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f\u2028\u2029]")
MAX_CHARS, MAX_TRACEBACK_CHARS = 1_000, 16_000

RARE_S = 60.0
"""How often a warning of uvicorn's is written at most: a client without a key can cause any number of them."""

Event = MutableMapping[str, Any]


class RareWarnings(logging.Filter):
    """Lets a logger's warnings of one kind pass once in `RARE_S`; the next one says how many were left out.

    For warnings that strangers cause, as often as they like. Errors and other levels pass. A kind is a line of code.
    """

    def __init__(self, *, clock: Callable[[], float] = time.monotonic) -> None:
        """`clock` returns seconds and does not jump."""
        super().__init__()
        self._clock = clock
        self._lock = threading.Lock()
        self._passed_at: dict[tuple[str, int], float] = {}
        self._left_out: Counter[tuple[str, int]] = Counter()

    def filter(self, record: logging.LogRecord) -> bool:
        """Whether the record passes; one that does may get a longer message."""
        if record.levelno != logging.WARNING:
            return True
        kind = (record.pathname, record.lineno)
        now = self._clock()
        with self._lock:
            if now - self._passed_at.get(kind, float("-inf")) < RARE_S:
                self._left_out[kind] += 1
                return False
            self._passed_at[kind] = now
            left_out = self._left_out.pop(kind, 0)
        if left_out:
            record.msg = f"{record.getMessage()} ({left_out} more like this since the last such line)"
            record.args = None
        return True


class _OnThread(logging.handlers.QueueHandler):
    """Passes records to a handler on a thread of its own: to format a line takes the time of a small request."""

    def __init__(self, handler: logging.Handler) -> None:
        records: SimpleQueue[logging.LogRecord] = SimpleQueue()
        super().__init__(records)
        self._listener: logging.handlers.QueueListener | None = logging.handlers.QueueListener(records, handler)
        self._listener.start()

    def prepare(self, record: logging.LogRecord) -> logging.LogRecord:
        """Adds the id of the request, which the other thread cannot read. The record is formatted there."""
        current = request_id.get()
        if current is not None and not hasattr(record, "request_id"):
            record.request_id = current
        return record

    def close(self) -> None:
        """Returns once all records are written."""
        listener, self._listener = self._listener, None
        if listener is not None:
            listener.stop()
        super().close()


def configure_logs(*, format: str, level: str, stream: TextIO | None = None, on_thread: bool = False) -> None:
    """Sends every logger's lines to `stream` (None: standard error); `format` is console or json.

    `on_thread`: a thread writes them; the last ones are written when the interpreter exits.
    """
    stream = stream or sys.stderr
    before: list[Any] = [
        structlog.stdlib.add_logger_name,
        structlog.stdlib.add_log_level,
        structlog.stdlib.ExtraAdder(),
        _drop_copies,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
        _add_request_id,
    ]
    renderer: list[Any]
    if format == "json":
        renderer = [structlog.processors.format_exc_info, _clean, structlog.processors.JSONRenderer(default=str)]
    else:
        renderer = [
            structlog.processors.format_exc_info,
            _clean,
            structlog.dev.ConsoleRenderer(colors=stream.isatty()),
        ]
    handler = logging.StreamHandler(stream)
    handler.setFormatter(
        structlog.stdlib.ProcessorFormatter(
            foreign_pre_chain=before, processors=[structlog.stdlib.ProcessorFormatter.remove_processors_meta, *renderer]
        )
    )
    root = logging.getLogger()
    root.handlers[:] = [_OnThread(handler) if on_thread else handler]
    root.setLevel(level.upper())
    is_debug = root.level <= logging.DEBUG  # httpx has a line for each request to a sampler
    logging.getLogger("httpx").setLevel(logging.NOTSET if is_debug else logging.WARNING)
    for name in ("uvicorn", "uvicorn.error", "uvicorn.access"):
        logger = logging.getLogger(name)
        logger.handlers.clear()
        logger.propagate = True
        logger.filters[:] = [RareWarnings()]


def log_access(record: AccessRecord) -> None:
    """One line for a request and its response; probes are logged at level debug unless they fail."""
    level = logging.DEBUG if record.route in _ROUTINE and record.status < 400 else logging.INFO
    access_log.log(
        level,
        "request",
        extra={
            "request_id": record.request_id,
            "method": record.method,
            "route": record.route,
            "status": record.status,
            "ms": round(record.seconds * 1000, 2),
            "received_bytes": record.received_bytes,
            "sent_bytes": record.sent_bytes,
            "owner": record.owner,
        },
    )


_ROUTINE = frozenset(
    {
        *("/healthz", "/health", "/api/v1/healthz", "/readyz", "/metrics"),
        *("/api/v1/session_heartbeat", "/api/v1/samplers"),
    }
)


def _add_request_id(_logger: Any, _method: str, event: Event) -> Event:
    current = request_id.get()
    if current is not None:
        event.setdefault("request_id", current)
    return event


def _drop_copies(_logger: Any, _method: str, event: Event) -> Event:
    """Removes the coloured copy that uvicorn adds to each of its messages."""
    event.pop("color_message", None)
    return event


def _clean(_logger: Any, _method: str, event: Event) -> Event:
    """Removes keys, control characters that could fake other lines, and long texts, which strangers may have sent."""
    for name, value in event.items():
        if name == "exception":
            event[name] = "\n".join(_clean_line(line) for line in _cut(value, MAX_TRACEBACK_CHARS).split("\n"))
        elif isinstance(value, str):
            event[name] = _clean_line(_cut(value, MAX_CHARS))
    return event


def _cut(text: str, limit: int) -> str:
    return text if len(text) <= limit else f"{text[:limit]}… ({len(text)} characters)"


def _clean_line(text: str) -> str:
    text = _KEY.sub(lambda found: f"{found[1] or found[2] + ' '}[redacted]", text)
    text = _ROW_OF_NUMBERS.sub("[numbers]", text)
    return _CONTROL.sub(lambda found: repr(found[0])[1:-1], text)
