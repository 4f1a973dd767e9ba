"""The engine's thread: plan → run → finish, until it is told to stop.

All calls to the engine happen here, one at a time. Nothing escapes: an error becomes the failed future of its request,
and the loop goes on. Does not know HTTP, nor what makes a request valid.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable

import mint.wire as wire
from mint.errors import JournalError, MintError, RequestFailedError
from mint.server.ids import request_id
from mint.server.queue.eta import SAMPLE, Pace
from mint.server.queue.fairness import Shares
from mint.server.queue.futures import Answer, FutureBook
from mint.server.queue.queue import Inbox
from mint.server.queue.scheduler import GAP_TIMEOUT_S, GiveUp, Pending, RunTraining, StepSamples, plan
from mint.server.worker import recovery
from mint.server.worker.samplers import Samplers
from mint.server.worker.sampling_batch import RunningSamples, as_failure
from mint.server.worker.trainer import Outcome, Trainer, TrainingJob

log = logging.getLogger("mint.worker")

HOUSEKEEPING_S = 60.0
JOURNAL_RETRY_S = 1.0


class Worker:
    """One thread, one engine."""

    def __init__(
        self,
        inbox: Inbox,
        futures: FutureBook,
        trainer: Trainer,
        samplers: Samplers,
        *,
        housekeeping: Callable[[], None],
        mark: Callable[[str], None],
        gap_timeout_s: float = GAP_TIMEOUT_S,
    ) -> None:
        """`housekeeping` is called now and then; `mark` is told what is being run, so that a death in it counts."""
        self._inbox = inbox
        self._futures = futures
        self._trainer = trainer
        self._samplers = samplers
        self._housekeeping = housekeeping
        self._mark = mark
        self._gap_timeout_s = gap_timeout_s
        self._running = RunningSamples(trainer.engine, samplers)
        self._shares = Shares()
        self.pace = Pace()
        self._errands: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._loop, name="mint-worker", daemon=True)

    def start(self) -> None:
        """Begins to work."""
        self._thread.start()

    def stop(self) -> None:
        """Ends after the request that is running; what waits stays in the journal."""
        self._stopping.set()
        self._inbox.wake()
        if self._thread.is_alive():
            self._thread.join()
        self._run_errands()

    @property
    def is_alive(self) -> bool:
        """Whether requests are being worked on."""
        return self._thread.is_alive()

    @property
    def sampled_rows(self) -> int:
        """Sequences that are being sampled."""
        return self._running.rows

    def cancel_samples(self, session_id: str) -> None:
        """Lets go of what a session has under way; as an errand only."""
        self._running.cancel_session(session_id)

    def run_soon(self, errand: Callable[[], None]) -> None:
        """Runs something else that touches the engine, between two requests."""
        self._errands.put(errand)
        self._inbox.wake()

    def _loop(self) -> None:
        housekeeping_at = time.monotonic() + HOUSEKEEPING_S
        while not self._stopping.is_set():
            try:
                self._run_errands()
                if time.monotonic() >= housekeeping_at:
                    self._housekeeping()
                    housekeeping_at = time.monotonic() + HOUSEKEEPING_S
                self._work(housekeeping_at)
            except JournalError as error:
                log.error("journal unavailable: %s", error)
                self._stopping.wait(JOURNAL_RETRY_S)
            except Exception:  # the boundary: whatever went wrong here must not end the service
                log.exception("the worker failed between two requests")
                self._stopping.wait(JOURNAL_RETRY_S)

    def _run_errands(self) -> None:
        while not self._errands.empty():
            self._errands.get()()

    def _work(self, housekeeping_at: float) -> None:
        now = time.monotonic()
        pending = self._inbox.pending()
        running = self._running.state
        match plan(pending, now, running=running, shares=self._shares, gap_timeout_s=self._gap_timeout_s):
            case RunTraining(model_id, seq_id):
                job = self._inbox.job(model_id, seq_id)
                if job is not None:
                    self._train_in_turn(job, pending, now)
            case StepSamples(joining):
                self._sample(joining)
                self._shares = self._shares.after_sampling(time.monotonic() - now)
            case GiveUp(model_id, missing, waiting):
                self._give_up(model_id, missing, waiting)
            case wait:
                until = housekeeping_at if wait.until is None else min(wait.until, housekeeping_at)
                self._inbox.wait(max(0.0, until - now))

    def _train_in_turn(self, job: TrainingJob, pending: Pending, now: float) -> None:
        owner, beside_samples = self._inbox.owner_of(job), bool(pending.samples) or self._running.rows > 0
        self._train(job)
        seconds = time.monotonic() - now
        self._shares = self._shares.after_training(owner, job.model_id, seconds, beside_samples=beside_samples)

    def _train(self, job: TrainingJob) -> None:
        name = request_id(job.model_id, job.seq_id)
        self._mark(name)
        self.pace.began([name], job.kind)
        try:
            outcome = self._outcome(job)
        finally:
            self.pace.ended([name])
        try:
            known = self._trainer.journal.finish_job(outcome.finish)
        except JournalError:
            self._trainer.forget(job.model_id)  # the engine is ahead of the journal: restore, then run it again
            raise
        finish = outcome.finish
        if not known:  # its session has ended meanwhile
            self._trainer.forget(job.model_id)
            if finish.sampler is not None:
                self._samplers.withdraw(finish.sampler)
                self._trainer.discard((finish.sampler.file or "",))
            return
        gone = outcome.obsolete_files
        if finish.sampler is not None:
            gone += self._samplers.published(finish.sampler, finish.model_id)
        self._mark("")
        self._inbox.advance(job.model_id, job.seq_id)

        def tell(problem: MintError | None) -> None:
            body = finish.result if problem is None else wire.encode_error(problem)
            self._futures.finish({name: Answer(body, failed=problem is not None or finish.status == "failed")})

        self._trainer.journal.durability.call_when_durable(job.commit, outcome.written, tell)
        self._trainer.discard(gone)

    def _outcome(self, job: TrainingJob) -> Outcome:
        try:
            if job.seq_id > 0:
                recovery.require_live(self._trainer, job.model_id)
            return self._trainer.run(job)
        except JournalError:
            raise
        except MintError as error:
            return self._trainer.fail(job, error)
        except Exception as error:  # the boundary: an engine may raise anything, and the request must hear of it
            log.exception("request %d (%s) of %s failed", job.seq_id, job.kind, job.model_id)
            outcome = self._trainer.fail(job, as_failure(error))
            if job.kind != "forward_backward":
                self._trainer.forget(job.model_id)  # its state is not known any more: restore it from the journal
            return outcome

    def _sample(self, joining: tuple[str, ...]) -> None:
        """Takes requests in, and gets all that run one step further; those that end are told at once."""
        answers: dict[str, Answer] = {}
        if joining:
            works = self._inbox.take_samples(joining)
            self.pace.began((work.request_id for work in works), SAMPLE)
            answers = self._running.join(works)
        answers |= self._running.step()
        if answers:
            self.pace.ended(answers)
            self._futures.finish(answers)

    def _give_up(self, model_id: str, missing: tuple[int, ...], waiting: tuple[int, ...]) -> None:
        numbers = ", ".join(str(seq_id) for seq_id in missing)
        error = RequestFailedError(
            f"request {numbers} of {model_id} never arrived, and those behind it waited {self._gap_timeout_s:g} s",
            remedy="Send them again, with new numbers",
        )
        body = wire.encode_error(error)
        jobs = {seq_id: self._inbox.job(model_id, seq_id) for seq_id in waiting}
        kinds = {seq_id: job.kind for seq_id, job in jobs.items() if job is not None}
        self._trainer.journal.give_up(model_id, missing, waiting, body)
        for seq_id in sorted([*missing, *waiting]):
            self._trainer.note_failed(model_id, kinds.get(seq_id, "missing"))
        self._inbox.advance(model_id, max(waiting))
        self._futures.finish({request_id(model_id, seq_id): Answer(body, failed=True) for seq_id in waiting})
        log.warning("%s: requests %s never arrived, %s given up", model_id, missing, waiting)
