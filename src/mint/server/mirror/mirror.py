"""Keeps a copy of a data directory in object storage while a service writes to it.

A thread of its own takes the state every few seconds if something has changed, sends what is not there yet, and writes
the manifest last. No request and no acknowledgement waits for it: what was accepted after the last state is lost with
the disk. `lag_s` says how much time that is.
"""

from __future__ import annotations

import logging
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from pathlib import Path

from mint.errors import InvalidRequestError
from mint.server.identity import Identity, identity_of, made_identity
from mint.server.mirror.copying import Copy, Source
from mint.server.mirror.manifest import (
    CONTENT,
    MANIFEST,
    MirroredFile,
    MirrorManifest,
    encode_files,
    encode_parts,
    sha256,
)
from mint.server.mirror.objects import Objects
from mint.server.private_files import NAMED_FOLDERS

log = logging.getLogger("mint.mirror")

EVERY_S = 5.0
"""How long after one state the next one is taken, if the journal has changed."""

BUSY_SHARE = 0.05
"""The part of a processor that copies and hashes the journal, at most: a large one is taken less often."""

LATE_S = 120.0
"""A lag from which on an operator is warned."""

LONGEST_PAUSE_S = 60.0
"""Between two attempts while the object storage does not answer."""

MAX_DOUBLINGS = 16
"""How often the pause is doubled: 2 to the power of a thousand failures is no float."""

PART_BYTES = 256 << 10
"""The journal is sent in parts of this size; those that are there already are not sent again."""

SENDERS = 8
"""How many objects are sent at once."""


@dataclass(frozen=True)
class MirrorState:
    """`lag_s`: the state from so long ago is in the mirror. What was sent, in bytes; how many states; what is wrong."""

    lag_s: float
    states: int
    sent_bytes: int
    problem: str | None

    @property
    def warning(self) -> str | None:
        """What an operator should see to. Everybody who reaches the server may read it, so the log has the reason."""
        if self.problem is None and self.lag_s < LATE_S:
            return None
        why = "it falls behind" if self.problem is None else "it cannot be written"
        return f"the mirror has the state of {self.lag_s:.0f} s ago: {why}, and the log says more"


class Mirror:
    """The mirror of one data directory, which one process writes."""

    def __init__(
        self,
        data_dir: Path,
        objects: Objects,
        *,
        address: str,
        every_s: float = EVERY_S,
        clock: Callable[[], float] = time.monotonic,
        cpu_clock: Callable[[], float] = time.thread_time,
    ) -> None:
        """`address` is how people are told of it. `start` begins. `cpu_clock` counts the processor time of a thread."""
        self._data_dir = data_dir
        self._objects = objects
        self._address = address
        self._every_s = every_s
        self._clock = clock
        self._cpu_clock = cpu_clock
        self._writer = uuid.uuid4().hex
        self._identity: Identity | None = None  # once it is known whose mirror is there
        self._found: tuple[str, int] | None = None  # writer and number of the manifest that is there
        self._stored: set[str] = set()  # the contents that are there
        self._needed: frozenset[str] = frozenset()  # by the manifest that is there
        self._version: int | None = None  # of the journal in it
        self._covers = clock()
        self._states = self._sent_bytes = self._failures = 0
        self._problem: str | None = None
        self._is_over = False
        self._source: Source | None = None
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="mint-mirror", daemon=True)

    def start(self) -> None:
        """Begins. If the object storage does not answer now, it is tried again and again.

        Raises:
            InvalidRequestError: the mirror of another data directory is there, or a newer state of this one.
        """
        try:
            self._join()
        except OSError as error:
            self._note_failure(error)
        self._thread.start()

    def close(self, *, within_s: float) -> None:
        """Ends, after one more state if that fits into the time: a service that was stopped in order loses nothing."""
        self._stopping.set()
        self._thread.join(within_s)
        if self._thread.is_alive():
            log.warning(
                "the mirror was left as it was %.0f s ago: it takes too long to send the rest", self.state.lag_s
            )

    @property
    def state(self) -> MirrorState:
        """How it goes. Any thread may ask."""
        return MirrorState(max(0.0, self._clock() - self._covers), self._states, self._sent_bytes, self._problem)

    # --- the thread ----------------------------------------------------------------------------------------------

    def _run(self) -> None:
        pause_s = 0.0
        while not self._stopping.wait(pause_s) and not self._is_over:
            pause_s = self.update()
        if not self._is_over:
            self.update()
        if self._source is not None:
            self._source.close()

    def update(self) -> float:
        """Brings the mirror up to date; how many seconds to wait then. The thread of `start` repeats this."""
        began = self._clock()
        busy_s = 0.0
        try:
            if self._identity is None:
                self._join()
            if self._source is None:
                self._source = Source(self._data_dir)
            if self._source.version() == self._version:
                self._covers = began
            else:
                busy_s = self._send_state(self._source, began)
            self._problem, self._failures = None, 0
        except InvalidRequestError as error:  # somebody else's mirror: nothing more is written there
            self._problem, self._is_over = str(error), True
            log.error("the mirror at %s ends: %s", self._address, error)
            return 0.0
        except Exception as error:  # the boundary: the service goes on whatever this thread meets
            if not isinstance(error, OSError):
                log.exception("a state could not be mirrored")
            self._note_failure(error)
            return min(LONGEST_PAUSE_S, self._every_s * 2 ** min(self._failures, MAX_DOUBLINGS))
        return max(self._every_s - (self._clock() - began), busy_s / BUSY_SHARE - busy_s)

    def _note_failure(self, error: Exception) -> None:
        self._failures += 1
        self._problem = f"{self._address} cannot be written: {error}"
        log.warning("the mirror falls behind: %s", self._problem)

    def _join(self) -> None:
        """Learns whose mirror is there, and what it has.

        Raises:
            InvalidRequestError: as `start`.
            OSError: the object storage does not answer.
        """
        identity = identity_of(self._data_dir)
        there = self._manifest()
        if there is not None and identity is not None and there.incarnation > identity.incarnation:
            raise InvalidRequestError(
                f"has a newer state of this data directory, as of {there.taken}: it was brought back elsewhere",
                field="--mirror",
                value=self._address,
                remedy="End this server, whose data are the old ones; or name an address where nothing is yet",
            )
        if there is not None and (identity is None or identity.data_id != there.data_id):
            raise InvalidRequestError(
                f"has the mirror of another data directory, as of {there.taken}",
                field="--mirror",
                value=self._address,
                remedy="Name an address where nothing is yet; or bring that one back into an empty data directory: "
                "mint recover --from-mirror",
            )
        identity = made_identity(self._data_dir)
        self._stored = {name.removeprefix(CONTENT) for name in self._objects.names() if name.startswith(CONTENT)}
        self._found = None if there is None else (there.writer, there.number)
        self._identity = identity

    def _manifest(self) -> MirrorManifest | None:
        try:
            return MirrorManifest.decode(self._objects.get(MANIFEST))
        except FileNotFoundError:
            return None
        except ValueError as error:
            raise InvalidRequestError(
                f"has no mirror that can be read: {error}",
                field="--mirror",
                value=self._address,
                remedy="Name an address where nothing is yet",
            ) from error

    def _send_state(self, source: Source, began: float) -> float:
        """Sends a state; how many seconds of processor time that took here, without the sending."""
        busy_since = self._cpu_clock()
        with source.copy() as copy, _Sender(self._objects, self._stored) as sender:
            for name in copy.missing:
                log.error("%s is not in the mirror: the journal names it, and it is not there", name)
            parts = [sender.send(content) for content in _read_parts(copy.journal)]
            busy_s = self._cpu_clock() - busy_since
            for name, path in copy.new.items():
                sender.send_file(name, path)
            lists = [sender.send(encode_files(own)) for own in _lists(copy)]
            journal = sender.send(encode_parts(parts))
            sender.finish()
            needed = frozenset({journal, *parts, *lists, *(file.sha256 for file in copy.files)})
            self._write_manifest(copy, journal, lists)
            source.note_sent(copy)
        self._sent_bytes += sender.sent_bytes
        self._states += 1
        self._covers, self._version = began, copy.version
        self._remove_all_but(needed | self._needed)  # who reads the last manifest now still finds its objects
        self._needed = needed
        return busy_s

    def _write_manifest(self, copy: Copy, journal: str, lists: list[str]) -> None:
        assert self._identity is not None, "it is known whose mirror this is"
        there = self._manifest()
        found = None if there is None else (there.writer, there.number)
        if found != self._found:
            raise InvalidRequestError(
                "is written by another process, too: perhaps the data directory was brought back elsewhere",
                field="--mirror",
                value=self._address,
                remedy="End the server that is no longer wanted",
            )
        number = 1 if there is None else there.number + 1
        manifest = MirrorManifest(
            self._identity.data_id,
            self._identity.incarnation,
            self._writer,
            number,
            copy.taken_at,
            copy.journal.stat().st_size,
            journal,
            tuple(lists),
        )
        self._objects.put(MANIFEST, manifest.encode())
        self._found = self._writer, number

    def _remove_all_but(self, needed: frozenset[str]) -> None:
        left = self._stored - needed
        if left:
            self._objects.remove([f"{CONTENT}{name}" for name in left])
            self._stored -= left


class _Sender:
    """Sends contents that are not stored yet, several at once; raises in `finish` what one of them has met."""

    def __init__(self, objects: Objects, stored: set[str]) -> None:
        self._objects = objects
        self._stored = stored
        self._pool = ThreadPoolExecutor(SENDERS, thread_name_prefix="mint-mirror")
        self._sending: dict[Future[None], str] = {}
        self._names: set[str] = set()
        self.sent_bytes = 0

    def __enter__(self) -> _Sender:
        return self

    def __exit__(self, *_error: object) -> None:
        self._pool.shutdown(cancel_futures=True)

    def send(self, content: bytes) -> str:
        """Sends a content; its name."""
        name = sha256(content)
        self._submit(name, content, len(content))
        return name

    def send_file(self, name: str, path: Path) -> None:
        """Sends the content of a file."""
        self._submit(name, path, path.stat().st_size)

    def finish(self) -> None:
        """Returns when all is stored.

        Raises:
            OSError: something could not be.
        """
        while self._sending:
            self._wait()

    def _submit(self, name: str, content: bytes | Path, size_bytes: int) -> None:
        if name in self._stored or name in self._names:
            return
        while len(self._sending) >= 2 * SENDERS:  # their contents are in memory
            self._wait()
        self._names.add(name)
        self.sent_bytes += size_bytes
        self._sending[self._pool.submit(self._objects.put, f"{CONTENT}{name}", content)] = name

    def _wait(self) -> None:
        for done in wait(self._sending, return_when=FIRST_COMPLETED).done:
            name = self._sending.pop(done)
            done.result()
            self._stored.add(name)


def _read_parts(path: Path) -> Iterator[bytes]:
    with path.open("rb") as file:
        while part := file.read(PART_BYTES):
            yield part


def _lists(copy: Copy) -> list[list[MirroredFile]]:
    """The files by folder, each list in order, so that the same files give the same list: a step does not send that of
    100,000 checkpoints again."""
    files = sorted(copy.files, key=lambda file: file.name)
    return [[file for file in files if file.name.startswith(f"{folder}/")] for folder in NAMED_FOLDERS]
