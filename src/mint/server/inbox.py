"""What waits for the engine: accepted requests in memory, and the condition on which the worker sleeps.

Any thread adds; only the worker takes. Holds no rule about what goes first (`scheduler`) and no durability (`journal`).
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Iterable

from mint.errors import OverloadedError
from mint.server.sampling import SampleWork
from mint.server.scheduler import Pending, SampleItem, TrainingItem
from mint.server.training import TrainingJob

MAX_WAITING_SAMPLES = 4096


class Inbox:
    """Requests by model and place, and sample requests in order of arrival."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._next_seq: dict[str, int] = {}
        self._training: dict[tuple[str, int], TrainingJob] = {}
        self._samples: OrderedDict[str, SampleWork] = OrderedDict()
        self._woken = False

    def add_training(self, job: TrainingJob, *, next_seq: int) -> None:
        """A training request; `next_seq` is the model's place, used if the model is not known here yet."""
        with self._changed:
            place = self._next_seq.setdefault(job.model_id, next_seq)
            if job.seq_id >= place:
                self._training.setdefault((job.model_id, job.seq_id), job)
            self._wake()

    def add_sample(self, work: SampleWork) -> None:
        """A sample request.

        Raises:
            OverloadedError: too many wait already.
        """
        with self._changed:
            if len(self._samples) >= MAX_WAITING_SAMPLES:
                raise OverloadedError(
                    f"{len(self._samples)} sample requests wait already", remedy="Send the same request again later"
                )
            self._samples[work.request_id] = work
            self._wake()

    def pending(self) -> Pending:
        """What the scheduler decides on."""
        with self._changed:
            training = [TrainingItem(job.model_id, job.seq_id, job.arrived_at) for job in self._training.values()]
            samples = [
                SampleItem(work.request_id, work.request.num_samples, work.arrived_at)
                for work in self._samples.values()
            ]
            return Pending(dict(self._next_seq), training, samples)

    def job(self, model_id: str, seq_id: int) -> TrainingJob:
        """A waiting training request; it stays until `advance`."""
        with self._changed:
            return self._training[model_id, seq_id]

    def advance(self, model_id: str, seq_id: int) -> None:
        """Everything of a model up to `seq_id` is finished."""
        with self._changed:
            self._next_seq[model_id] = seq_id + 1
            for place in [place for place in self._training if place[0] == model_id and place[1] <= seq_id]:
                del self._training[place]

    def take_samples(self, request_ids: Iterable[str]) -> list[SampleWork]:
        """Sample requests, which wait here no longer."""
        with self._changed:
            return [self._samples.pop(request_id) for request_id in request_ids if request_id in self._samples]

    def drop(self, models: Iterable[str], session_id: str) -> list[str]:
        """Takes out all that waits for a session's models and samplers; the ids of the sample requests."""
        gone = set(models)
        with self._changed:
            for place in [place for place in self._training if place[0] in gone]:
                del self._training[place]
            for model_id in gone:
                self._next_seq.pop(model_id, None)
            samples = [name for name in self._samples if name.startswith(f"{session_id}:")]
            for name in samples:
                del self._samples[name]
            return samples

    def wait(self, timeout_s: float | None) -> None:
        """Until something is added or `wake` is called, or the time has passed."""
        with self._changed:
            if not self._woken:
                self._changed.wait(timeout_s)
            self._woken = False

    def wake(self) -> None:
        """Makes `wait` return."""
        with self._changed:
            self._wake()

    def _wake(self) -> None:
        self._woken = True
        self._changed.notify_all()
