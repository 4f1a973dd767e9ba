"""The threads of the engine: plan → run → finish, until they are told to stop.

All calls to the engine happen here, one at a time in each of its lanes. An engine with one lane has one thread. With
two lanes, one thread trains and one samples: the second uses the sampling batch and what `Samplers` has in the engine,
the first everything else. They meet in published weights, and the one that samples never waits for the other.

An error becomes the failed future of its request, and the loop goes on. Does not know HTTP, nor what makes a request
valid.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Collection
from dataclasses import replace
from functools import partial
from pathlib import Path

from mint.engine.protocol import ModelsLostError
from mint.errors import DamagedDataError, JournalError, OutOfMemoryError, RequestFailedError
from mint.server.ids import RequestId, request_id
from mint.server.queue.eta import SAMPLE, Eta
from mint.server.queue.fairness import Fairness
from mint.server.queue.futures import FutureResult, Futures
from mint.server.queue.jobs import TrainingJob
from mint.server.queue.lane_thread import LaneThread
from mint.server.queue.queue import RequestQueue
from mint.server.queue.scheduler import GAP_TIMEOUT_S, NO_LOAD, GiveUp, Lane, RunTraining, StepSamples, plan
from mint.server.store.journal import Finish, Journal
from mint.server.store.obsolete import discard_files
from mint.server.worker.samplers import Samplers
from mint.server.worker.sampling_batch import SamplingBatch
from mint.server.worker.trainer import JobOutcome, Trainer

log = logging.getLogger("mint.worker")

HOUSEKEEPING_S = 60.0
JOURNAL_RETRY_S = 1.0
ARRIVAL_S = 0.01
MEMORY_RETRY_S = 0.5
LOST_S = 60.0


class Worker:
    """One engine, and a thread for each of its lanes."""

    def __init__(
        self,
        queue: RequestQueue,
        futures: Futures,
        trainer: Trainer,
        samplers: Samplers,
        journal: Journal,
        data_dir: Path,
        *,
        housekeeping: Callable[[], None],
        note_running: Callable[[str], None],
        note_result: Callable[[str, int], None],
        gap_timeout_s: float = GAP_TIMEOUT_S,
        loss: str = "",
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`housekeeping` is called every minute; `note_running` is told which training request runs ("" for none), so
        that the next process can count a death in it; `note_result` is told the owner and the size of each result that
        was stored. `loss` says why requests may never arrive that were accepted before; they are not waited for long.
        """
        self._queue = queue
        self._futures = futures
        self._trainer = trainer
        self._samplers = samplers
        self._journal = journal
        self._data_dir = data_dir
        self._housekeeping = housekeeping
        self._note_running = note_running
        self._note_result = note_result
        self._gap_timeout_s = gap_timeout_s
        self._loss = loss
        self._clock = clock
        self._began_at = clock()
        self._gaps_since = float("-inf")
        self._batch = SamplingBatch(trainer.models.engine, samplers)
        self._fairness = Fairness()
        self.eta = Eta(clock=clock)
        self._is_training = False
        self._save_until = 0.0
        journal.storage.on_recovery = queue.wake
        self._has_two_lanes = trainer.models.engine.lanes == 2
        first: Lane = "training" if self._has_two_lanes else "all"
        self._trains = LaneThread("mint-worker", partial(self._loop, first), wake=queue.wake)
        self._samples = self._trains
        if self._has_two_lanes:
            self._samples = LaneThread("mint-sampling", partial(self._loop, "sampling"), wake=queue.wake)

    def start(self) -> None:
        self._trains.start()
        if self._has_two_lanes:
            self._samples.start()

    def stop(self, *, save_within_s: float = 0.0) -> None:
        """Returns after the request that is running; what waits stays in the journal.

        Saves the models whose state no snapshot holds, as far as that fits into the time, so that the next process need
        not replay their requests.
        """
        self._save_until = time.monotonic() + save_within_s
        self._trains.stop()
        if self._has_two_lanes:
            self._samples.stop()  # second: the other one may wait for a call here

    @property
    def is_alive(self) -> bool:
        """Whether requests are being worked on."""
        return self._trains.is_alive and self._samples.is_alive

    @property
    def sampling_now(self) -> list[str]:
        """The requests in the step of sampling that this thread of the engine is at; none where it trains."""
        is_sampling = self._samples.is_current if self._has_two_lanes else not self._is_training
        return self._batch.running if is_sampling else []

    @property
    def sampled_sequences(self) -> int:
        """Sequences that are being sampled."""
        return self._batch.sequences

    def call_soon(self, callback: Callable[[], None], *, lane: Lane = "training") -> None:
        """Runs something on the thread of a lane, between two requests or two steps of sampling."""
        (self._samples if lane == "sampling" else self._trains).call_soon(callback)

    def end_session(self, session_id: str, models: list[str], files: list[str]) -> None:
        """Takes what a session has out of the engine, soon, and removes its files."""

        def end_samples() -> None:
            self._batch.cancel_session(session_id)
            self._samplers.end_session(session_id)

        def end() -> None:
            self._drop_models(models, files)
            if self._has_two_lanes:  # a request that ran meanwhile may have published weights
                self._samples.call_soon(end_samples)

        self._samples.call_soon(end_samples)
        self._trains.call_soon(end)

    def suspend_session(self, session_id: str, models: list[str]) -> None:
        """Takes what a session has out of the engine. Its files stay, and bring all of it back when it is needed.

        For the thread that trains. The futures of its samples are forgotten: a client that comes back sends them again.
        """

        def suspend_samples() -> None:
            while cancelled := self._batch.cancel_session(session_id):
                self._sample((), unwanted=cancelled)
            for name in self._futures.open_of(session_id):
                parsed = RequestId.parse(name)
                if parsed is not None and parsed.is_sample:
                    self._futures.forget(name)
            self._samplers.end_session(session_id)

        self._samples.call(suspend_samples)
        self._drop_models(models, [])

    def drop_model(self, model_id: str, files: list[str]) -> None:
        """Takes a model out of the engine, soon, and removes its files."""
        self.call_soon(lambda: self._drop_models([model_id], files))

    def _do_where_samples_are(self, callback: Callable[[], None]) -> None:
        """Does something with the samplers in the engine: now, or soon if another thread samples."""
        if self._has_two_lanes:
            self._samples.call_soon(callback)
        else:
            callback()

    def _drop_models(self, models: list[str], files: list[str]) -> None:
        for model_id in models:
            self._trainer.drop(model_id)
        discard_files(self._journal, self._data_dir, files)

    # --- the loop ------------------------------------------------------------------------------------------------

    def _loop(self, lane: Lane) -> None:
        thread = self._samples if lane == "sampling" else self._trains
        housekeeping_at = math.inf if lane == "sampling" else self._clock() + HOUSEKEEPING_S
        while not thread.stopping.is_set():
            try:
                thread.run_calls()
                if self._clock() >= housekeeping_at:
                    housekeeping_at = self._clock() + HOUSEKEEPING_S
                    if self._journal.storage.problem is None:
                        self._housekeeping()
                self._run_next(lane, housekeeping_at)
            except DamagedDataError as error:
                log.error("%s", error)
                thread.stopping.wait(JOURNAL_RETRY_S)
            except JournalError as error:
                if self._journal.storage.problem is None:  # otherwise training waits, and sampling goes on
                    log.error("journal unavailable: %s", error)
                    thread.stopping.wait(JOURNAL_RETRY_S)
            except OutOfMemoryError as error:
                log.warning("%s; it is tried again", error)
                thread.stopping.wait(MEMORY_RETRY_S)
            except ModelsLostError as error:
                log.warning("the engine has lost its models, and what ran is run again: %s", error)
            except Exception:  # the boundary: no error between two requests may end the service
                log.exception("the worker failed between two requests")
                thread.stopping.wait(JOURNAL_RETRY_S)
        if lane != "sampling":
            self._save_all()

    def _save_all(self) -> None:
        try:
            self._trainer.memory.save_all(until=self._save_until)
        except (JournalError, DamagedDataError) as error:
            log.warning("not all models are saved, and some requests will be replayed: %s", error)
        except Exception:  # the boundary: as above
            log.exception("the models were not saved, and some requests will be replayed")

    def _run_next(self, lane: Lane, housekeeping_at: float) -> None:
        now = self._clock()
        pending = self._queue.pending()
        if self._journal.storage.problem is not None:
            pending = replace(pending, training=())
            if lane != "sampling":
                self._gaps_since = now  # a missing request could not arrive either: it was refused
        sampling = self._batch.load if lane != "training" and self._batch.sequences else NO_LOAD
        match plan(
            pending,
            now,
            lane=lane,
            sampling=sampling,
            fairness=self._fairness,
            gap_timeout_s=self._patience_s(now),
            gaps_since=self._gaps_since,
        ):
            case RunTraining(job):
                self._train(job)
                beside_samples = lane == "all" and bool(pending.samples or sampling.sequences)
                seconds = self._clock() - now
                self._fairness = self._fairness.after_training(
                    job.owner, job.model_id, seconds, beside_samples=beside_samples
                )
            case StepSamples(joining):
                self._sample(joining)
                if lane == "all":
                    self._fairness = self._fairness.after_sampling(self._clock() - now)
            case GiveUp(model_id, missing, waiting):
                self._give_up(model_id, missing, waiting)
            case wait:
                until = housekeeping_at if wait.until is None else min(wait.until, housekeeping_at)
                self._queue.wait(None if math.isinf(until) else max(0.0, until - now), lane=lane)

    def _train(self, job: TrainingJob) -> None:
        name = request_id(job.model_id, job.seq_id)
        self._mark(name)
        try:
            self.eta.start([name], job.kind)
            self._is_training = True
            try:
                outcome = self._trainer.run(job)
            finally:
                self.eta.end([name])
                self._is_training = False
            self._commit(job, outcome)
        finally:
            self._mark("")  # only now: a death before the commit counts as one in this request

    def _mark(self, name: str) -> None:
        with self._journal.storage.writing("which request runs"):
            self._note_running(name)

    def _commit(self, job: TrainingJob, outcome: JobOutcome) -> None:
        """Writes the outcome to the journal, and resolves the future once that may be told."""
        name = request_id(job.model_id, job.seq_id)
        finish = outcome.finish
        # Committed before anything is told of it: after a crash, the next process has the same result to give.
        try:
            is_known = self._journal.finish_job(finish)
        except JournalError:
            self._trainer.models.drop(job.model_id)  # the engine is ahead of the journal: restore, then run it again
            raise
        except DamagedDataError as error:
            self._fail_on_damage(job, error)
            return
        if not is_known:  # its session has ended meanwhile
            self._trainer.models.drop(job.model_id)
            if finish.sampler is not None:
                self._do_where_samples_are(partial(self._samplers.withdraw, finish.sampler))
                discard_files(self._journal, self._data_dir, [finish.sampler.file or ""])
            return
        self._note_result(job.owner, len(finish.result))
        if finish.sampler is not None:
            self._do_where_samples_are(partial(self._samplers.published, finish.sampler))
        self._queue.advance(job.model_id, job.seq_id)

        durability = self._journal.durability
        result = FutureResult(finish.result, failed=finish.status == "failed")
        durability.call_when_durable(
            self._commit_to_wait_for(job, finish), partial(self._futures.finish, {name: result})
        )
        if outcome.obsolete_files:
            discard = partial(discard_files, self._journal, self._data_dir, outcome.obsolete_files)
            durability.call_when_durable(durability.newest_commit, discard)
        if finish.sampler is not None:
            drop = partial(self._samplers.drop_superseded, finish.model_id, busy=self._busy_samplers)
            self._do_where_samples_are(drop)

    def _fail_on_damage(self, job: TrainingJob, error: DamagedDataError) -> None:
        """Stops a model for which the journal cannot store a result. That of this request is perhaps in memory only."""
        result = FutureResult.of_error(self._trainer.stop(job.model_id, error))
        try:
            self._journal.finish_job(Finish(job.model_id, job.seq_id, "failed", result.body))
        except DamagedDataError as again:
            log.error("the error of request %d of %s cannot be stored: %s", job.seq_id, job.model_id, again)
        self._queue.advance(job.model_id, job.seq_id)
        self._futures.finish({request_id(job.model_id, job.seq_id): result})

    def _busy_samplers(self) -> set[str]:
        """The samplers with requests that wait or run."""
        return self._batch.samplers | {each.request.sampling_session_id for each in self._queue.pending().samples}

    def _commit_to_wait_for(self, job: TrainingJob, finish: Finish) -> int:
        """The commit that must be durable before a result is sent: as a rule the one that accepted the request.

        The rows of a new model and of a new sampler are read as soon as the client knows them, and a checkpoint has a
        name that others may read. These rows must not be lost in a power failure. So wait for the result's own commit.
        """
        is_read_at_once = any(row is not None for row in (finish.model, finish.sampler, finish.checkpoint))
        return self._journal.durability.newest_commit if is_read_at_once else job.commit

    def _sample(self, joining: tuple[str, ...], *, unwanted: Collection[str] = ()) -> None:
        """Admits requests, decodes one token for each sequence, and resolves the futures of those that finished.

        The futures of `unwanted` ones stay open.
        """
        results: dict[str, FutureResult] = {}
        if joining:
            samples = self._queue.take_samples(joining)
            self.eta.start(samples, SAMPLE)
            results = self._batch.join(samples.values())
        results |= self._batch.step()
        postponed = self._batch.take_postponed()
        if postponed:
            log.warning("%d sample requests wait for memory, or until their weights can be read", len(postponed))
            self.eta.forget(sample.request_id for sample in postponed)
            again_at = self._clock() + JOURNAL_RETRY_S
            self._queue.put_back([replace(sample, not_before=again_at) for sample in postponed])
        if results:
            self.eta.end(results)
            self._futures.finish({name: result for name, result in results.items() if name not in unwanted})

    def _patience_s(self, now: float) -> float:
        """How long a missing request is waited for. Clients come back soon after the start, and what was lost with the
        disk never comes."""
        has_just_begun = now - self._began_at < GAP_TIMEOUT_S
        return min(LOST_S, self._gap_timeout_s) if self._loss and has_just_begun else self._gap_timeout_s

    def _give_up(self, model_id: str, missing: tuple[int, ...], waiting: tuple[TrainingJob, ...]) -> None:
        """Fails the requests of a model that wait behind missing ones, and the missing ones with them."""
        numbers = ", ".join(str(seq_id) for seq_id in missing)
        waited_s = self._patience_s(self._clock())
        text = f"request {numbers} of {model_id} never arrived, and those behind it waited {waited_s:g} s"
        remedy = "Send them again, with new numbers"
        if self._loss:
            text, remedy = f"{text}: {self._loss}", "Start the program again from its last checkpoint"
        error = RequestFailedError(text, remedy=remedy)
        result = FutureResult.of_error(error)
        kinds = {job.seq_id: job.kind for job in waiting}
        # The missing numbers are journaled as failed, so that the late arrival of one of them is recognised.
        try:
            if not self._journal.give_up(model_id, missing, list(kinds), result.body):
                self._queue.wait(ARRIVAL_S)  # it is about to be added to the queue
                return
        except DamagedDataError as damage:
            self._trainer.stop(model_id, damage)
        for seq_id in sorted([*missing, *kinds]):
            self._trainer.models.note_failed(model_id, kinds.get(seq_id, "missing"))
        self._queue.advance(model_id, max(kinds))
        self._futures.finish({request_id(model_id, seq_id): result for seq_id in kinds})
        log.warning("%s: requests %s never arrived, %s given up", model_id, missing, list(kinds))
