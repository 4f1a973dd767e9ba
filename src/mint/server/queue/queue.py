"""What waits for the engine: accepted requests in memory, and the condition on which the worker sleeps.

Any thread adds; only the worker takes. Bounds what waits, for each owner and in all. Holds no rule about what goes
first (`scheduler`) and no durability (`journal`).
"""

from __future__ import annotations

import threading
from collections import Counter, OrderedDict
from collections.abc import Hashable, Iterable
from dataclasses import dataclass

from mint.errors import OverloadedError
from mint.server.queue.scheduler import Pending, SampleItem, TrainingItem
from mint.server.worker.samplers import SampleWork
from mint.server.worker.trainer import TrainingJob

MOMENT_S, MOST_MOMENTS = 0.001, 5
"""How long an idle engine waits for more samples once some have come, and how often: the requests of one loop come one
by one, and their prompts are computed together faster than one after another."""


@dataclass(frozen=True)
class Bounds:
    """How many requests of one owner may wait, how large they may be together, and those of everybody."""

    owner_requests: int = 4096
    owner_bytes: int = 256 * 1024 * 1024
    total_bytes: int = 2 * 1024 * 1024 * 1024


class Inbox:
    """Requests by model and place, and sample requests in order of arrival."""

    def __init__(self, bounds: Bounds | None = None) -> None:
        self._bounds = bounds or Bounds()
        self._changed = threading.Condition()
        self._next_seq: dict[str, int] = {}
        self._training: dict[tuple[str, int], TrainingJob] = {}
        self._samples: OrderedDict[str, SampleWork] = OrderedDict()
        self._charged: dict[Hashable, tuple[str, int]] = {}  # waiting request → owner, bytes
        self._requests: Counter[str] = Counter()
        self._bytes: Counter[str] = Counter()
        self._woken = False
        self._pending: Pending | None = None  # made again after a change: the scheduler asks before every step

    def require_room(self, owner: str, size_bytes: int, *, max_requests: int | None = None) -> None:
        """That one more request of this size may wait; `max_requests` is the owner's own bound.

        Raises:
            OverloadedError: it may not; names the bound.
        """
        bounds = self._bounds
        with self._changed:
            most = bounds.owner_requests if max_requests is None else min(max_requests, bounds.owner_requests)
            for name, used, limit in (
                ("max_waiting_requests", self._requests[owner] + 1, most),
                ("max_waiting_bytes", self._bytes[owner] + size_bytes, bounds.owner_bytes),
                ("max_waiting_bytes of this server", self._bytes.total() + size_bytes, bounds.total_bytes),
            ):
                if used > limit:
                    raise OverloadedError(
                        f"{limit} may wait at once, and so much waits already",
                        field=name,
                        value=used,
                        remedy="Wait for earlier results, then send the same request again",
                    )

    def is_full(self, owner: str, *, max_requests: int | None = None) -> bool:
        """Whether no further request of an owner may wait."""
        try:
            self.require_room(owner, 0, max_requests=max_requests)
        except OverloadedError:
            return True
        return False

    def add_training(self, job: TrainingJob, *, next_seq: int, owner: str = "", size_bytes: int = 0) -> None:
        """A training request; `next_seq` is the model's place, used if the model is not known here yet."""
        with self._changed:
            self._pending = None
            place = self._next_seq.setdefault(job.model_id, next_seq)
            key = (job.model_id, job.seq_id)
            if job.seq_id >= place and key not in self._training:
                self._training[key] = job
                self._charge(key, owner, size_bytes)
            self._wake()

    def next_seq(self, model_id: str) -> int | None:
        """The number that a model waits for; None if it is not known here yet."""
        with self._changed:
            return self._next_seq.get(model_id)

    def add_sample(
        self, work: SampleWork, *, owner: str = "", size_bytes: int = 0, max_requests: int | None = None
    ) -> None:
        """A sample request.

        Raises:
            OverloadedError: as `require_room`.
        """
        with self._changed:
            self.require_room(owner, size_bytes, max_requests=max_requests)
            is_first = not self._samples
            self._samples[work.request_id] = work
            self._charge(work.request_id, owner, size_bytes)
            if is_first:  # whoever has been woken for one comes back by himself
                self._wake()

    def owner_of(self, job: TrainingJob) -> str:
        """Who sent a training request that waits."""
        with self._changed:
            return self._charged.get((job.model_id, job.seq_id), ("", 0))[0]

    def pending(self) -> Pending:
        """What the scheduler decides on."""
        with self._changed:
            if self._pending is None:
                training = [
                    TrainingItem(job.model_id, job.seq_id, job.arrived_at, job.kind, self._charged[place][0])
                    for place, job in self._training.items()
                ]
                samples = [
                    SampleItem(name, work.request.num_samples, work.arrived_at, self._charged[name][0])
                    for name, work in self._samples.items()
                ]
                self._pending = Pending(dict(self._next_seq), training, samples)
            return self._pending

    def job(self, model_id: str, seq_id: int) -> TrainingJob | None:
        """A waiting training request, which stays until `advance`; None if it was dropped meanwhile."""
        with self._changed:
            return self._training.get((model_id, seq_id))

    def advance(self, model_id: str, seq_id: int) -> None:
        """Everything of a model up to `seq_id` is finished."""
        with self._changed:
            if model_id not in self._next_seq:
                return
            self._pending = None
            self._next_seq[model_id] = seq_id + 1
            self._drop_training(place for place in self._training if place[0] == model_id and place[1] <= seq_id)

    def take_samples(self, request_ids: Iterable[str]) -> list[SampleWork]:
        """Sample requests, which wait here no longer; those that are gone are left out."""
        with self._changed:
            works = [self._samples.pop(request_id) for request_id in request_ids if request_id in self._samples]
            for work in works:
                self._discharge(work.request_id)
            return works

    def drop(self, models: Iterable[str], session_id: str) -> None:
        """Takes out all that waits for a session's models and samplers."""
        self.drop_models(models)
        with self._changed:
            names = [name for name in self._samples if name.startswith(f"{session_id}:")]
        self.take_samples(names)

    def drop_models(self, models: Iterable[str]) -> None:
        """Takes out all that waits for these models."""
        gone = set(models)
        with self._changed:
            self._drop_training(place for place in self._training if place[0] in gone)
            self._pending = None
            for model_id in gone:
                self._next_seq.pop(model_id, None)

    def wait(self, timeout_s: float | None) -> None:
        """Until something is added or `wake` is called, or the time has passed; where samples come, until a moment has
        passed without another."""
        with self._changed:
            if not self._woken:
                self._changed.wait(timeout_s)
            self._woken = False
            for _ in range(MOST_MOMENTS):
                before = len(self._samples)
                if not before or self._training:
                    return
                # whoever comes with others wakes nobody: this is true for other news alone
                if self._changed.wait(MOMENT_S) or len(self._samples) == before:
                    return

    def wake(self) -> None:
        """Makes `wait` return."""
        with self._changed:
            self._wake()

    def _drop_training(self, places: Iterable[tuple[str, int]]) -> None:
        for place in list(places):
            del self._training[place]
            self._discharge(place)

    def _charge(self, key: Hashable, owner: str, size_bytes: int) -> None:
        self._pending = None
        self._charged[key] = (owner, size_bytes)
        self._requests[owner] += 1
        self._bytes[owner] += size_bytes

    def _discharge(self, key: Hashable) -> None:
        self._pending = None
        owner, size_bytes = self._charged.pop(key)
        for counter, amount in ((self._requests, 1), (self._bytes, size_bytes)):
            counter[owner] -= amount
            if not counter[owner]:
                del counter[owner]

    def _wake(self) -> None:
        self._woken = True
        self._changed.notify_all()
