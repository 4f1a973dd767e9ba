"""One replica: a process whose engine samples the jobs that it is sent, as a server of one process would.

The engine has a thread of its own. Orders arrive on another one and are done between two steps, in their order; news
(results, and tokens for listeners) are fetched by a third. `replicas` makes a Ray actor of it.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from operator import itemgetter

import numpy as np

from mint.cluster.answers import Answer, portable
from mint.cluster.lifetime.lease import Crew, ServerLease
from mint.cluster.processes import Process
from mint.cluster.ray_runtime import InOnePiece, on_thread
from mint.cluster.versions import Layout, unpacked
from mint.engine.protocol import BaseInfo, LoraSpec, SampleBatch, SampleJob, SampleResult, TokenListener
from mint.engine.reductions.division import ALONE, Peers
from mint.engine.torch_engine import TorchEngine
from mint.errors import MintError

log = logging.getLogger(__name__)

OpenReplica = Callable[[Peers], TorchEngine]
"""Makes the engine of a replica. It is called in the replica's process, with `ALONE`."""

TOKENS_S = 0.1
"""The time between two messages with tokens, so that listeners get them in bunches: a message takes longer than a
token. The first token after a pause does not wait."""


@dataclass(frozen=True)
class LoadBase:
    """Load the folder `path` as base `name`."""

    name: str
    path: str


@dataclass(frozen=True)
class LoadLora:
    """Make a version of weights available; they are the vector `place` of those that came with the orders."""

    version: str
    base: str
    lora: LoraSpec
    layout: Layout
    place: int


@dataclass(frozen=True)
class DropLora:
    """Forget a version. Jobs that use it keep it."""

    version: str


@dataclass(frozen=True)
class KeepVocabulary:
    """Keep the bytes of a vocabulary's tokens, which are too large to come with each job."""

    number: int
    tokens: Sequence[bytes]


@dataclass(frozen=True)
class AddJob:
    """Sample a job under a number; `vocabulary` is that of its stop rule. With a listener, its tokens are news."""

    number: int
    job: SampleJob
    vocabulary: int | None
    has_listener: bool


@dataclass(frozen=True)
class CancelJob:
    """Give a job up; its result is not wanted."""

    number: int


@dataclass(frozen=True)
class ForgetAll:
    """Forget all jobs, versions and vocabularies; bases stay. `done` is set then."""

    done: threading.Event


Order = LoadBase | LoadLora | DropLora | KeepVocabulary | AddJob | CancelJob | ForgetAll


Drawn = tuple[int, int, float]
"""A sample of a job, a token of it, and its logprob."""


@dataclass
class News:
    """Tokens and results of a replica since it was last asked.

    `tokens` are (sample, token, logprob) in the order of drawing, by job with a listener; `results` are those of jobs
    that ended, `failures` the errors of jobs that cannot be sampled, `bases` what was loaded. `counters` and
    `kv_pages` are those of the engine now.
    """

    tokens: dict[int, list[Drawn]] = field(default_factory=dict)
    results: dict[int, SampleResult] = field(default_factory=dict)
    bases: list[BaseInfo] = field(default_factory=list)
    failures: dict[int, Exception] = field(default_factory=dict)
    counters: dict[str, int] = field(default_factory=dict)
    kv_pages: dict[str, int] = field(default_factory=dict)


@dataclass
class _Running:
    """A job without a result yet; `told` counts the tokens that its listener was told, by sample."""

    job: SampleJob
    has_listener: bool
    told: Counter[int] = field(default_factory=Counter)


class Replica:
    """A replica, in a process of its own.

    A step that fails ends its batch. The engine does not say which job it failed on, so each is then sampled again
    alone, and only the one at fault fails. Orders that come meanwhile wait.
    """

    def __init__(self, open_engine: OpenReplica, crew: Crew | None = None) -> None:
        """With a `crew`, it lives on without its server, until its lease is over."""
        self._lease = None if crew is None else ServerLease(crew.incarnation, crew.lease_s)
        if self._lease is not None:
            self._lease.watch()
        self._open_engine = open_engine
        self._engine: TorchEngine | None = None
        self._orders: queue.SimpleQueue[tuple[Order, Sequence[np.ndarray]]] = queue.SimpleQueue()
        self._vocabularies: dict[int, Sequence[bytes]] = {}
        self._running: dict[int, _Running] = {}
        self._alone: deque[int] = deque()  # jobs of a batch that failed: they run again, one by one
        self._load_errors: dict[str, Exception] = {}  # by the base or version that could not be loaded
        self._changed = threading.Condition()
        self._news = News()
        self._tokens: dict[int, list[Drawn]] = {}  # of the step that runs
        self._told_at = -TOKENS_S  # when tokens were sent last

    def open(self) -> Answer:
        """Makes the engine, and starts to work: the answer is the `Process`."""
        opened = threading.Event()
        failure: list[Exception] = []

        def work() -> None:
            try:
                self._engine = self._open_engine(ALONE)
            except Exception as error:  # the boundary: what is raised here is raised where the replica was started
                if not isinstance(error, MintError):
                    log.exception("the replica could not start")
                failure.append(portable(error))
                return
            finally:
                opened.set()
            self._work(self._engine)

        threading.Thread(target=work, name="mint-replica", daemon=True).start()
        opened.wait()
        return Answer(Process.of_this_actor(), failure[0] if failure else None)

    def renew(self, incarnation: int) -> bool:
        """See `ServerLease.renew`."""
        return self._lease is not None and self._lease.renew(incarnation)

    @on_thread("orders")
    def reset(self, incarnation: int) -> Answer:
        """Forgets all jobs and versions: a new start of the server has taken the replica over. The answer is the
        `Process`.

        Raises:
            SupersededError: a later start has.
        """
        self._require(incarnation)
        done = threading.Event()
        self._orders.put((ForgetAll(done), ()))
        done.wait()
        return Answer(Process.of_this_actor())

    def _require(self, incarnation: int) -> None:
        if self._lease is not None:
            self._lease.require(incarnation)

    @on_thread("orders", has_answer=False)
    def do(self, incarnation: int, orders: Sequence[Order], *vectors: np.ndarray) -> None:
        """Takes orders of the server that has this replica, and the weights for them."""
        self._require(incarnation)
        for order in orders:
            self._orders.put((order, vectors))

    @on_thread("news")
    def news(self, timeout_s: float, incarnation: int = 0) -> InOnePiece:
        """Waits for `News`, at most `timeout_s`.

        Raises:
            SupersededError: another start of the server has this replica: the news are for that one.
        """
        until = time.monotonic() + timeout_s
        with self._changed:
            while True:
                self._require(incarnation)
                news, now = self._news, time.monotonic()
                wait_s = until - now
                if news.tokens:
                    wait_s = min(wait_s, self._told_at + TOKENS_S - now)
                if news.results or news.bases or news.failures or wait_s <= 0:
                    break
                self._changed.wait(wait_s)
            self._news = News()
            if news.tokens:
                self._told_at = now
        if self._engine is not None:
            news.counters, news.kv_pages = self._engine.sampling_counters(), self._engine.kv_pages()
        return InOnePiece(news)

    def _work(self, engine: TorchEngine) -> None:
        batch = engine.open_batch()
        while True:
            if self._alone and not batch.keys:
                self._add(batch, self._alone.popleft())
            while not self._alone and (not batch.keys or not self._orders.empty()):
                self._obey(engine, batch, *self._orders.get())
            try:
                results = batch.step()
            except Exception as error:  # the boundary: the job at fault fails where it came from
                if not isinstance(error, MintError):
                    log.exception("a step of the replica failed")
                self._tell({})  # tokens that were drawn are right, also if the step has failed
                self._separate(error)
                batch = engine.open_batch()
                continue
            for key in results:
                self._running.pop(int(key), None)
            if results or self._tokens:
                self._tell(results)

    def _separate(self, error: Exception) -> None:
        """Lets the jobs of a batch that failed run again alone; one that was alone has failed."""
        failed = [number for number in self._running if number not in self._alone]
        if len(failed) == 1:
            self._fail(failed[0], error)
        else:
            self._alone.extend(failed)

    def _fail(self, number: int, error: Exception) -> None:
        self._running.pop(number, None)
        with self._changed:
            self._news.failures[number] = portable(error)
            self._changed.notify()

    def _tell(self, results: Mapping[str, SampleResult]) -> None:
        with self._changed:
            if results or not self._news.tokens:  # whoever waits knows of the other tokens
                self._changed.notify()
            for number, tokens in self._tokens.items():
                if number in self._running:
                    self._running[number].told.update(map(itemgetter(0), tokens))
                self._news.tokens.setdefault(number, []).extend(tokens)
            self._news.results.update((int(key), result) for key, result in results.items())
        self._tokens.clear()

    def _obey(self, engine: TorchEngine, batch: SampleBatch, order: Order, vectors: Sequence[np.ndarray]) -> None:
        match order:
            case LoadBase(name, path):
                self._load(name, lambda: self._tell_base(engine.load_base(name, path)))
            case LoadLora(version, base, lora, layout, place):
                self._load(version, lambda: engine.load_weights(version, base, lora, unpacked(layout, vectors[place])))
            case DropLora(version):
                engine.drop_weights(version)
            case KeepVocabulary(number, tokens):
                self._vocabularies[number] = tokens
            case AddJob(number, job, vocabulary, has_listener):
                if vocabulary is not None:
                    job = replace(job, stop=replace(job.stop, vocabulary=self._vocabularies[vocabulary]))
                self._running[number] = _Running(job, has_listener)
                self._add(batch, number)
            case CancelJob(number):
                batch.cancel(str(number))
            case ForgetAll(done):
                self._forget_all(engine, batch)
                done.set()

    def _forget_all(self, engine: TorchEngine, batch: SampleBatch) -> None:
        for key in list(batch.keys):
            batch.cancel(key)
        for own in (self._running, self._alone, self._vocabularies, self._load_errors, self._tokens):
            own.clear()
        engine.forget_all()
        with self._changed:
            self._news = News()
            self._changed.notify_all()

    def _load(self, name: str, load: Callable[[], None]) -> None:
        """Loads a base or a version; the jobs that need it fail with the error, if there is one."""
        try:
            load()
            self._load_errors.pop(name, None)
        except Exception as error:  # the boundary, as in `_work`
            log.exception("%s could not be loaded", name)
            self._load_errors[name] = error

    def _tell_base(self, info: BaseInfo) -> None:
        with self._changed:
            self._news.bases.append(info)
            self._changed.notify()

    def _add(self, batch: SampleBatch, number: int) -> None:
        """Puts a job into the batch, for the first time or again."""
        running = self._running[number]
        job = running.job
        listener = self._listener(number, running) if running.has_listener else None
        try:
            batch.add(str(number), job, listener)
        except Exception as error:  # the boundary, as in `_work`
            if not isinstance(error, MintError):
                log.exception("a job cannot be sampled")
            self._fail(number, self._load_errors.get(job.weights_id or "") or self._load_errors.get(job.base) or error)

    def _listener(self, number: int, running: _Running) -> TokenListener:
        """Notes tokens as news, but for those that were told before the job was run again."""
        again = dict(running.told)

        def hear(sample: int, token: int, logprob: float) -> None:
            if again and again.get(sample, 0):
                again[sample] -= 1
                return
            drawn = self._tokens.get(number)
            if drawn is None:
                drawn = self._tokens[number] = []
            drawn.append((sample, token, logprob))

        return hear
