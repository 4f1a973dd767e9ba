"""The replicas as Ray actors: starts them, gives each job to one, hears of results, notices who died or is frozen.

A job is a function of its weights, prompt and seed. So the jobs of a lost replica run again on others, and give the
same tokens; a listener is not told again what it has heard.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections import Counter, deque
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import count
from operator import itemgetter
from typing import Any

import numpy as np
import ray
from ray.exceptions import RayError

from mint.cluster.lifetime.adoption import adopt_replicas, replica_name
from mint.cluster.lifetime.lease import SupersededError
from mint.cluster.processes import Process, end_process
from mint.cluster.ray_runtime import HERE, REPLICA, InOnePiece, Place, first_line, start_ray
from mint.cluster.replica import (
    AddJob,
    CancelJob,
    Drawn,
    DropLora,
    KeepVocabulary,
    LoadBase,
    LoadLora,
    News,
    OpenReplica,
    Order,
    Replica,
)
from mint.cluster.routing import Needs, ReplicaState, beginnings, route
from mint.cluster.versions import Version, Versions
from mint.engine.protocol import CANCELLED, BaseInfo, LoraSpec, SampleJob, SampleResult, TokenListener
from mint.errors import MintError

log = logging.getLogger(__name__)

NEWS_S = 0.01
"""How long a step waits for news. A job that comes meanwhile waits for the next step."""

HEARTBEAT_S = 2.0
"""A replica answers after this time at the latest, also if there is no news."""

SILENCE_S = 30.0
"""A replica is frozen if it answers nothing for so long. The thread that answers computes nothing."""

START_TIMEOUT_S = 300.0
"""The longest time in which a replica starts: it loads torch."""

MAX_LOSSES = 3
"""A job that was on so many replicas when they were lost fails; so do all if so many in turn could not start."""

LORA_LIMIT_BYTES = 1 << 30
"""The memory of a replica for loras; others are read again from the object store when a job needs them."""


class ReplicaLostError(RuntimeError):
    """No replica could be started."""


@dataclass
class _Job:
    number: int
    key: str
    job: SampleJob
    listener: TokenListener | None
    version: Version | None
    needs: Needs
    batch: ReplicaBatch
    heard: Counter[int] = field(default_factory=Counter)  # tokens that the listener was told, by sample
    again: dict[int, int] = field(default_factory=dict)  # of these, those that come again after a loss
    losses: int = 0

    def tell(self, tokens: Sequence[Drawn]) -> None:
        """Tells the listener of tokens, but for those that come again."""
        assert self.listener is not None, "nobody listens"
        if self.again:
            tokens = [own for own in tokens if not self._comes_again(own[0])]
        self.heard.update(map(itemgetter(0), tokens))
        for sample, token, logprob in tokens:
            self.listener(sample, token, logprob)

    def _comes_again(self, sample: int) -> bool:
        if not self.again.get(sample, 0):
            return False
        self.again[sample] -= 1
        return True


@dataclass
class _Member:
    """A replica, as this process sees it."""

    number: int
    actor: Any
    state: ReplicaState
    asked: Any  # the reference to what it was asked last: its start, then news
    silent_since: float
    is_leaving: bool = False  # it ends after its jobs
    process: Process | None = None  # once it has started
    jobs: dict[int, _Job] = field(default_factory=dict)
    bases: set[str] = field(default_factory=set)
    vocabularies: set[int] = field(default_factory=set)
    orders: list[Order] = field(default_factory=list)
    vectors: list[Any] = field(default_factory=list)
    counters: Mapping[str, int] = field(default_factory=dict)
    kv_pages: Mapping[str, int] = field(default_factory=dict)

    @property
    def pid(self) -> int | None:
        """Its process id, once it has started."""
        return None if self.process is None else self.process.pid


class Replicas:
    """Processes that sample. One thread at a time samples; versions come from any.

    `wanted` is how many there are to be. Any thread may set it; replicas come and go at the next step.
    """

    def __init__(
        self,
        open_engine: OpenReplica,
        replicas: int,
        *,
        check_base: Callable[[BaseInfo], None],
        place: Place = HERE,
        lora_limit_bytes: int = LORA_LIMIT_BYTES,
        silence_s: float = SILENCE_S,
    ) -> None:
        """`open_engine` makes the engine of a replica. The replicas start with the first job.

        `check_base` is given each base that a replica has loaded, and raises if its numbers would differ.
        """
        self._open_engine = open_engine
        self.wanted = replicas
        self._check_base = check_base
        self._place = place
        self._lora_limit_bytes = lora_limit_bytes
        self._silence_s = silence_s
        self._paths: dict[str, str] = {}
        # Replicas that are taken over may know versions of an earlier start of the server, and may still answer to it.
        self._versions = Versions(self._store, prefix=f"{place.incarnation}." if place.incarnation else "")
        self._members: dict[int, _Member] = {}
        self._waiting: deque[_Job] = deque()
        self._numbers = count(place.incarnation << 32)
        self._vocabularies: dict[int, tuple[int, Sequence[bytes]]] = {}  # by id; kept, so that ids stay true
        self._failed_starts = 0
        self._has_adopted = False
        self._losses = 0
        self._ended_counters: Counter[str] = Counter()
        self._listened_at = 0.0

    # --- what the engine calls -----------------------------------------------------------------------------------

    def load_base(self, name: str, path: str) -> None:
        """Notes where a base lies; each replica loads it with its first job."""
        self._paths[name] = path

    def add_weights(self, weights_id: str, base: str, lora: LoraSpec, weights: Mapping[str, np.ndarray]) -> None:
        """Makes a version that jobs may use at once; a replica gets it with its first job. Any thread may call."""
        self._versions.add(weights_id, base, lora, weights)

    def drop_weights(self, weights_id: str) -> None:
        """Forgets weights; unknown ids are fine. Jobs that use them keep them."""
        self._versions.drop(weights_id)

    def open_batch(self) -> ReplicaBatch:
        """An empty batch."""
        return ReplicaBatch(self)

    def sampling_counters(self) -> dict[str, int]:
        """The sum over all replicas, also those that are gone."""
        total = Counter(self._ended_counters)
        for member in list(self._members.values()):
            total.update(member.counters)
        return dict(total)

    def kv_pages(self) -> dict[str, int]:
        """The sum over all replicas now."""
        total: Counter[str] = Counter()
        for member in list(self._members.values()):
            total.update(member.kv_pages)
        return dict(total)

    @property
    def state(self) -> dict[str, Any]:
        """How many `samplers` there are to be, how many are `sampling`, how often one was `lost`; the `versions` of
        weights, the jobs that are `waiting` for a replica, and `replicas`: of each its process, jobs, sequences and
        loras. Any thread may ask."""
        running = [member for member in list(self._members.values()) if member.pid is not None]
        return {
            "samplers": self.wanted,
            "sampling": len(running),
            "samplers_lost": self._losses,
            "versions": len(self._versions),
            "waiting": len(self._waiting),
            "replicas": [
                {
                    "process": member.pid,
                    "jobs": len(member.jobs),
                    "sequences": member.state.sequences,
                    "loras": len(member.state.loras),
                    "lora_bytes": member.state.lora_bytes,
                }
                for member in running
            ],
        }

    @property
    def processes(self) -> list[int]:
        """The process ids of the replicas that have started."""
        return [member.pid for member in list(self._members.values()) if member.pid is not None]

    def close(self) -> None:
        """Ends all replicas. They start again with the next job."""
        for member in self._members.values():
            end_process(member.actor, member.process)
        self._members.clear()

    # --- jobs ----------------------------------------------------------------------------------------------------

    def add(self, key: str, job: SampleJob, listener: TokenListener | None, batch: ReplicaBatch) -> _Job:
        """Accepts a job; it goes to a replica at the next step.

        Raises:
            NotFoundError: its weights are not loaded.
        """
        version = None if job.weights_id is None else self._versions.of(job.weights_id, job.base)
        name = None if version is None else version.name
        needs = Needs(
            max(1, job.num_samples),
            name,
            0 if version is None else version.size_bytes,
            beginnings(name or job.base, job.cache_scope, job.prompt),
        )
        own = _Job(next(self._numbers), key, job, listener, version, needs, batch)
        self._waiting.append(own)
        return own

    def cancel(self, job: _Job) -> None:
        """Gives a job up."""
        for member in self._members.values():
            if member.jobs.pop(job.number, None) is not None:
                member.state.end(job.needs)
                member.orders.append(CancelJob(job.number))
                return
        with contextlib.suppress(ValueError):
            self._waiting.remove(job)

    def step(self, timeout_s: float) -> None:
        """Gives jobs to replicas, and tells batches and listeners of the news that come within the time.

        Raises:
            ReplicaLostError: replicas cannot be started.
            Exception: a listener has failed.
        """
        self._fit_number()
        for version in self._versions.take_gone():
            for member in self._members.values():
                if member.state.forget(version):
                    member.orders.append(DropLora(version))
        self._give_jobs()
        for member in self._members.values():
            self._send(member)
        self._listen(timeout_s)

    def _give_jobs(self) -> None:
        running = {
            number: member.state
            for number, member in self._members.items()
            if member.pid is not None and not member.is_leaving
        }
        while self._waiting:
            number = route(running, self._waiting[0].needs)
            if number is None:  # later ones wait, too: otherwise it could wait for ever
                return
            self._give(self._members[number], self._waiting.popleft())

    def _give(self, member: _Member, own: _Job) -> None:
        job, version = own.job, own.version
        if job.base not in member.bases:
            member.bases.add(job.base)
            member.orders.append(LoadBase(job.base, self._paths[job.base]))
        must_load = not member.state.has_lora(own.needs)
        member.orders += [DropLora(name) for name in member.state.add(own.needs)]
        if version is not None:
            if must_load:
                place = len(member.vectors)
                member.vectors.append(version.stored)
                member.orders.append(LoadLora(version.name, version.base, version.lora, version.layout, place))
            job = replace(job, weights_id=version.name)
        vocabulary = self._vocabulary(member, job)
        if vocabulary is not None:
            job = replace(job, stop=replace(job.stop, vocabulary=()))
        member.orders.append(AddJob(own.number, job, vocabulary, own.listener is not None))
        member.jobs[own.number] = own
        if version is not None and not self._versions.is_current(version):  # dropped while the job waited
            member.state.forget(version.name)
            member.orders.append(DropLora(version.name))

    def _vocabulary(self, member: _Member, job: SampleJob) -> int | None:
        """The number under which the replica has the vocabulary of the job's stop rule."""
        tokens = job.stop.vocabulary
        if not tokens:
            return None
        number, _ = self._vocabularies.setdefault(id(tokens), (len(self._vocabularies), tokens))
        if number not in member.vocabularies:
            member.vocabularies.add(number)
            member.orders.append(KeepVocabulary(number, tokens))
        return number

    def _send(self, member: _Member) -> None:
        if member.orders:
            orders, vectors = member.orders, member.vectors
            member.orders, member.vectors = [], []
            member.actor.do.remote(self._place.incarnation, InOnePiece(orders), *vectors)

    # --- news ----------------------------------------------------------------------------------------------------

    def _listen(self, timeout_s: float) -> None:
        now = time.monotonic()
        if now - self._listened_at > HEARTBEAT_S:  # nobody listened meanwhile
            for member in self._members.values():
                member.silent_since = now
        asked = {member.asked: member for member in self._members.values()}
        ready, _ = ray.wait(list(asked), timeout=timeout_s)
        if ready:  # and those that are there by now
            ready, _ = ray.wait(list(asked), num_returns=len(asked), timeout=0)
        self._listened_at = now = time.monotonic()
        for reference in ready:
            member = asked[reference]
            try:
                answer = ray.get(reference)
            except SupersededError as error:
                self._lose(member, f"is not this server's any more: {first_line(error)}", ends=False)
                continue
            except RayError as error:
                self._lose(member, f"has died: {first_line(error)}")
                continue
            member.silent_since = now
            if member.pid is None:
                if answer.error is not None:
                    self._lose(member, f"could not start: {answer.error}")
                    raise answer.error
                member.process = answer.value
                self._failed_starts = 0
                log.info("a replica samples: process %d", member.pid)
            self._ask(member)
            if isinstance(answer, News):
                self._hear(member, answer)
        for member in list(self._members.values()):
            limit_s = START_TIMEOUT_S if member.pid is None else self._silence_s
            if now - member.silent_since > limit_s:
                self._lose(member, f"is silent since {now - member.silent_since:.0f} s")

    def _ask(self, member: _Member) -> None:
        member.asked = member.actor.news.remote(HEARTBEAT_S, self._place.incarnation)

    def _hear(self, member: _Member, news: News) -> None:
        member.counters, member.kv_pages = news.counters, news.kv_pages
        failure: Exception | None = None
        for info in news.bases:
            try:
                self._check_base(info)
            except MintError as error:
                self._lose(member, f"would give other results: {error}")
                raise
        for number, tokens in news.tokens.items():
            job = member.jobs.get(number)
            if job is None or job.listener is None:
                continue
            try:
                job.tell(tokens)
            except Exception as error:  # the boundary: it is raised once all the news are noted
                log.exception("a listener failed")
                failure = error
        for number, result in news.results.items():
            job = member.jobs.get(number)
            if job is not None:
                self._end_job(member, job, result)
        for number, error in news.failures.items():
            job = member.jobs.get(number)
            if job is not None:
                member.bases.discard(job.job.base)  # it may be what could not be loaded: it is tried again
                text = error.message if isinstance(error, MintError) else str(error)
                self._end_job(member, job, SampleResult([], error=text))
        if failure is not None:
            raise failure

    def _end_job(self, member: _Member, job: _Job, result: SampleResult) -> None:
        self._remove(member, job)
        job.batch.results[job.key] = result

    def _remove(self, member: _Member, job: _Job) -> None:
        del member.jobs[job.number]
        member.state.end(job.needs)

    # --- replicas that come and go -------------------------------------------------------------------------------

    def _fit_number(self) -> None:
        """Starts the replicas that are missing, and ends those that are too many once they have no jobs."""
        staying = [member for member in self._members.values() if not member.is_leaving]
        for member in list(self._members.values()):
            if member.is_leaving and len(staying) < self.wanted:
                member.is_leaving = False
                staying.append(member)
        for member in sorted(staying, key=lambda own: own.state.sequences)[: max(0, len(staying) - self.wanted)]:
            member.is_leaving = True
        for member in list(self._members.values()):
            if member.is_leaving and not member.jobs:
                self._remove_member(member)
                log.info("a replica leaves: process %s", member.pid)
        missing = self.wanted - sum(not member.is_leaving for member in self._members.values())
        if missing > 0:
            self._start(missing)

    def _start(self, missing: int) -> None:
        start_ray(self._place)
        crew = self._place.crew
        if crew is not None and not self._has_adopted:
            self._has_adopted = True
            for actor in adopt_replicas(crew):
                self._add_member(actor, actor.reset.remote(crew.incarnation))
                missing -= 1
        groups = {"orders": 1, "news": 1}
        remote = ray.remote(**self._place.options(REPLICA), max_restarts=0, concurrency_groups=groups)(Replica)
        for _ in range(missing):
            named = {} if crew is None else self._place.named(replica_name(crew))
            actor: Any = remote.options(**named).remote(self._open_engine, crew)
            self._add_member(actor, actor.open.remote())

    def _add_member(self, actor: Any, asked: Any) -> None:
        number = next(self._numbers)
        state = ReplicaState(self._lora_limit_bytes)
        self._members[number] = _Member(number, actor, state, asked, time.monotonic())

    def _remove_member(self, member: _Member, *, ends: bool = True) -> None:
        if ends:
            end_process(member.actor, member.process)
        del self._members[member.number]
        self._ended_counters.update(member.counters)

    def _store(self, vector: np.ndarray) -> Any:
        start_ray(self._place)
        return ray.put(vector)

    def _lose(self, member: _Member, reason: str, *, ends: bool = True) -> None:
        """Ends a replica; its jobs wait for another one, the earliest first."""
        self._remove_member(member, ends=ends)
        self._losses += 1
        name = "a replica" if member.pid is None else f"the replica of process {member.pid}"
        log.error("%s %s; another one starts, and %d jobs run again", name, reason, len(member.jobs))
        if member.pid is None:
            self._failed_starts += 1
            others = any(own.pid is not None for own in self._members.values())
            if self._failed_starts >= MAX_LOSSES and not others:
                self._failed_starts = 0
                raise ReplicaLostError(f"{MAX_LOSSES} replicas in turn could not start; the last one {reason}")
        for own in sorted(member.jobs.values(), key=lambda job: -job.number):
            own.losses += 1
            own.again = dict(own.heard)
            if own.losses < MAX_LOSSES:
                self._waiting.appendleft(own)
            else:
                text = f"{MAX_LOSSES} replicas were lost while they sampled this request"
                own.batch.results[own.key] = SampleResult([], error=text)


class ReplicaBatch:
    """`SampleBatch` over the replicas. A step waits for news of any of them."""

    def __init__(self, replicas: Replicas) -> None:
        self._replicas = replicas
        self._jobs: dict[str, _Job] = {}
        self.results: dict[str, SampleResult] = {}

    @property
    def keys(self) -> Collection[str]:
        """The jobs without a result yet."""
        return self._jobs.keys()

    def add(self, key: str, job: SampleJob, listener: TokenListener | None = None) -> None:
        """Adds a job; it goes to a replica at the next step.

        Raises:
            NotFoundError: its weights are not loaded.
        """
        self._jobs[key] = self._replicas.add(key, job, listener, self)

    def cancel(self, key: str) -> None:
        """Removes the job at the next step; unknown keys are ignored."""
        if key in self._jobs and key not in self.results:
            self._replicas.cancel(self._jobs[key])
            self.results[key] = SampleResult([], error=CANCELLED)

    def step(self) -> dict[str, SampleResult]:
        """Waits a moment for news; returns the results of the jobs that ended."""
        if not self._jobs:
            return {}
        try:
            self._replicas.step(0.0 if self.results else NEWS_S)
        except Exception:
            for key in list(self._jobs):
                self.cancel(key)  # the batch must not be used any more
            raise
        results, self.results = self.results, {}
        for key in results:
            del self._jobs[key]
        return results
