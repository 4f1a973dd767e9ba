"""The queue in front of the engine: accepted requests in memory, and the condition on which the worker sleeps.

Any thread adds; only the worker takes. Limits what waits, for each owner and in all. Does not decide what runs next
(`scheduler`), and keeps nothing across a restart (the journal does).
"""

from __future__ import annotations

import threading
from collections import Counter, OrderedDict
from collections.abc import Generator, Iterable, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from mint.errors import OverloadedError
from mint.server.limits import MAX_WAITING_REQUESTS
from mint.server.queue.jobs import QueuedSample, TrainingJob
from mint.server.queue.scheduler import Lane, Pending

BURST_PAUSE_S = 0.001
MAX_BURST_PAUSES = 5
"""How long an idle engine waits for more samples once some have come, and how often: the requests of one loop come one
by one, and computing their prompts together is faster than one after another."""


OWNER_BYTES = 256 * 1024 * 1024

AWAITED_FACTOR = 2
"""How many times an owner's limit on bytes a request may use for which later ones of its model wait."""

RETURN_FACTOR = 2
"""How many times an owner's limits the requests may use with which a suspended session comes back."""

NEXT_SHARE = 2
"""This part of all bytes is kept for the requests that a model runs next: they can always run, and so make room."""


@dataclass(frozen=True)
class QueueLimits:
    """How many requests of one owner may wait, how large they may be together, and those of all owners at the most.

    Without those that a model runs next, all owners together have half of `total_bytes`.
    """

    owner_requests: int = MAX_WAITING_REQUESTS
    owner_bytes: int = OWNER_BYTES
    total_bytes: int = 2 * 1024 * 1024 * 1024


class RequestQueue:
    """Training requests by model and number, and sample requests in order of arrival."""

    def __init__(self, limits: QueueLimits | None = None, *, condition: threading.Condition | None = None) -> None:
        """The lanes of the engine sleep on `condition`, which holds the queue's lock."""
        self._limits = limits or QueueLimits()
        self._changed = condition or threading.Condition()
        self._next_seq: dict[str, int] = {}
        self._training: dict[tuple[str, int], TrainingJob] = {}
        self._samples: OrderedDict[str, QueuedSample] = OrderedDict()
        self._requests: Counter[str] = Counter()  # by owner
        self._bytes: Counter[str] = Counter()
        self._held_models: frozenset[str] = frozenset()
        self._held_prefix: tuple[str, ...] = ()
        self._woken: set[Lane] = set()
        self._pending: Pending | None = None  # made again after a change: the scheduler asks before every step

    # --- adding --------------------------------------------------------------------------------------------------

    def require_capacity(self, owner: str, size_bytes: int, *, max_requests: int | None = None) -> None:
        """Checks that one more request of this size may wait; `max_requests` is the owner's own limit.

        Raises:
            OverloadedError: it may not; names the limit.
        """
        limits = self._limits
        with self._changed:
            most = limits.owner_requests if max_requests is None else min(max_requests, limits.owner_requests)
            _require_at_most("max_waiting_requests", self._requests[owner] + 1, most)
            self._require_owner_bytes(owner, size_bytes, limits.owner_bytes)
            self._require_total_bytes(size_bytes, limits.total_bytes // NEXT_SHARE)

    def require_capacity_for_next(self, model_id: str, owner: str, size_bytes: int) -> None:
        """Checks that the request which a model runs next may wait, although the queue is full.

        A full queue must be able to move on. So the number of requests does not bound this one: there is one for each
        model. Its owner's limit on bytes does not hold while no other training request of its owner can run, and is
        `AWAITED_FACTOR` times as high if later requests of its model wait for it. The bytes of all owners bound it.

        Raises:
            OverloadedError: it may not; names the limit.
        """
        with self._changed:
            self._require_total_bytes(size_bytes, self._limits.total_bytes)
            runnable = (self._training.get(place) for place in self._next_seq.items())
            if not any(job is not None and job.owner == owner for job in runnable):
                return
            is_awaited = any(waiting == model_id for waiting, _ in self._training)
            factor = AWAITED_FACTOR if is_awaited else 1
            self._require_owner_bytes(owner, size_bytes, factor * self._limits.owner_bytes)

    def require_capacity_for_return(self, owner: str, requests: int, size_bytes: int) -> None:
        """Checks that so many requests of a suspended session, which were accepted earlier, may wait again together.

        The owner's limits are `RETURN_FACTOR` times as high for them, because others of the owner may wait by now. They
        may always return while nothing of this owner waits and the bytes of all owners allow it, or nothing waits at
        all.

        Raises:
            OverloadedError: they may not; names the limit.
        """
        limits = self._limits
        with self._changed:
            if self._bytes.total():
                self._require_total_bytes(size_bytes, limits.total_bytes)
            if self._requests[owner]:
                used = self._requests[owner] + requests
                _require_at_most("max_waiting_requests", used, RETURN_FACTOR * limits.owner_requests)
                self._require_owner_bytes(owner, size_bytes, RETURN_FACTOR * limits.owner_bytes)

    def _require_owner_bytes(self, owner: str, size_bytes: int, limit: int) -> None:
        _require_at_most("max_waiting_bytes", self._bytes[owner] + size_bytes, limit)

    def _require_total_bytes(self, size_bytes: int, limit: int) -> None:
        _require_at_most("max_waiting_bytes of this server", self._bytes.total() + size_bytes, limit)

    def is_full(self, owner: str, *, max_requests: int | None = None) -> bool:
        """Whether no further request of an owner may wait."""
        try:
            self.require_capacity(owner, 0, max_requests=max_requests)
        except OverloadedError:
            return True
        return False

    def add_training(self, job: TrainingJob, *, next_seq: int) -> None:
        """Adds a training request; `next_seq` is the number its model waits for, if the queue does not know it yet."""
        with self._changed:
            self._pending = None
            place = (job.model_id, job.seq_id)
            if job.seq_id >= self._next_seq.setdefault(job.model_id, next_seq) and place not in self._training:
                self._training[place] = job
                self._count(job, 1)
            self._wake()

    def next_seq(self, model_id: str) -> int | None:
        """The number that a model waits for; None if it is not known here yet."""
        with self._changed:
            return self._next_seq.get(model_id)

    def add_sample(self, sample: QueuedSample, *, max_requests: int | None = None) -> None:
        """Adds a sample request.

        Raises:
            OverloadedError: as `require_capacity`.
        """
        with self._changed:
            self.require_capacity(sample.owner, sample.size_bytes, max_requests=max_requests)
            is_first = not self._samples
            self._samples[sample.request_id] = sample
            self._count(sample, 1)
            if is_first:  # for the others the worker is awake already
                self._wake()

    def put_back(self, samples: Sequence[QueuedSample]) -> None:
        """Adds sample requests that were taken, in front of those that wait; no limit refuses them."""
        with self._changed:
            for sample in reversed(samples):
                self._samples[sample.request_id] = sample
                self._samples.move_to_end(sample.request_id, last=False)
                self._count(sample, 1)

    # --- taking --------------------------------------------------------------------------------------------------

    def pending(self) -> Pending:
        """What the scheduler decides on."""
        with self._changed:
            if self._pending is None:
                training = [job for job in self._training.values() if job.model_id not in self._held_models]
                samples = [each for each in self._samples.values() if not each.request_id.startswith(self._held_prefix)]
                self._pending = Pending(dict(self._next_seq), training, samples)
            return self._pending

    @contextmanager
    def held(self, models: Iterable[str], session_id: str | None = None) -> Generator[None]:
        """A block during which no waiting request of these models, and no sample request of the session, is started.
        One thread at a time."""
        with self._changed:
            self._held_models = frozenset(models)
            self._held_prefix = () if session_id is None else (f"{session_id}:",)
            self._pending = None
        try:
            yield
        finally:
            with self._changed:
                self._held_models, self._held_prefix = frozenset(), ()
                self._pending = None
                self._wake()

    def advance(self, model_id: str, seq_id: int) -> None:
        """Removes the requests of a model up to `seq_id`, which are finished."""
        with self._changed:
            if model_id not in self._next_seq:
                return
            self._next_seq[model_id] = seq_id + 1
            self._pending = None
            for place in list(self._training):
                if place[0] == model_id and place[1] <= seq_id:
                    self._count(self._training.pop(place), -1)

    def take_samples(self, request_ids: Iterable[str]) -> dict[str, QueuedSample]:
        """Removes and returns sample requests by id; those that are no longer here are left out."""
        taken: dict[str, QueuedSample] = {}
        with self._changed:
            for request_id in request_ids:
                if request_id in self._samples:
                    taken[request_id] = self._samples.pop(request_id)
                    self._count(taken[request_id], -1)
        return taken

    def drop_session(self, session_id: str, models: Iterable[str]) -> None:
        """Drops the waiting requests of a session: those of its models, and its sample requests."""
        self.drop_models(models)
        with self._changed:
            self.take_samples([name for name in self._samples if name.startswith(f"{session_id}:")])

    def drop_models(self, models: Iterable[str]) -> None:
        """Drops the waiting requests of these models."""
        gone = set(models)
        with self._changed:
            self._pending = None
            for place in list(self._training):
                if place[0] in gone:
                    self._count(self._training.pop(place), -1)
            for model_id in gone:
                self._next_seq.pop(model_id, None)

    # --- sleeping ------------------------------------------------------------------------------------------------

    def wait(self, timeout_s: float | None, *, lane: Lane = "all") -> None:
        """Sleeps until something is added, `wake` is called, or the time has passed; one thread of each lane.

        While sample requests keep coming, a lane that samples sleeps on for short pauses, so that they start in one
        batch.
        """
        with self._changed:
            if lane not in self._woken:
                self._changed.wait(timeout_s)
            self._woken.discard(lane)
            for _ in range(MAX_BURST_PAUSES):
                before = len(self._samples)
                if not before or lane == "training" or (lane == "all" and self._training):
                    return
                # later samples of a burst do not notify, so a notification is other news
                if self._changed.wait(BURST_PAUSE_S) or len(self._samples) == before:
                    return

    def wake(self) -> None:
        """Makes `wait` return."""
        with self._changed:
            self._wake()

    def _count(self, request: TrainingJob | QueuedSample, sign: int) -> None:
        self._pending = None
        for counter, amount in ((self._requests, sign), (self._bytes, sign * request.size_bytes)):
            counter[request.owner] += amount
            if not counter[request.owner]:
                del counter[request.owner]

    def _wake(self) -> None:
        self._woken = {"all", "training", "sampling"}  # a lane may be busy: a notification alone would be lost
        self._changed.notify_all()


def _require_at_most(name: str, used: int, limit: int) -> None:
    if used > limit:
        raise OverloadedError(
            f"{limit} may wait at once, and so much waits already",
            field=name,
            value=used,
            remedy="Wait for earlier results, then send the same request again",
        )
