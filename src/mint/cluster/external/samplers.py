"""Samples at external samplers: gives each job to one, loads the loras that it needs there, and tries again elsewhere.

One event loop on a thread of its own speaks to all samplers. A job is routed as among replicas (`cluster/routing.py`).
If a sampler is lost, its jobs run again on another one, or wait until it is back; after `patience_s` without any, they
fail. The tokens of a job that runs again may be others: only the same program on the same machine gives the same bits.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import queue
import threading
import time
from collections import Counter
from collections.abc import Callable, Collection, Coroutine, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np

from mint.cluster.external.host import CONNECT_S, Host, HostRefusedError, HostUnreachableError
from mint.cluster.external.lora_folders import LoraFolders
from mint.cluster.external.vllm_protocol import BadAnswerError, require_possible
from mint.cluster.routing import Needs, ReplicaState, beginnings, route
from mint.cluster.versions import Version, Versions
from mint.engine.protocol import CANCELLED, LoraSpec, SampleJob, SampleResult, TokenListener
from mint.errors import InvalidRequestError

log = logging.getLogger(__name__)

NEWS_S = 0.01
"""How long a step waits for news. A job that comes meanwhile waits for the next step."""

LORA_SLOTS = 16
"""So many loras are loaded at a sampler at once, by default; others come in place of those used longest ago."""

HEALTH_EVERY_S = 2.0
"""How often a sampler is asked whether it is well."""

SILENCE_S = 30.0
"""A sampler that does not say for so long that it is well is lost."""

PATIENCE_S = 300.0
"""A job fails after so long without a sampler for it."""

MAX_FAILURES = 3
"""A job fails after so many answers that say that the sampler has failed."""

WORKER_SILENCE_S = 8.0
"""The same for one that has joined."""

FORGET_S = 60.0
"""One that has joined is forgotten after so long without a sign of life; it may join again."""

RETRY_S = 1.0
"""How long a job waits after such an answer, and a sampler after it was not reached."""

BASE = "base of "
"""Begins the id of the lora of zeros that stands for a base."""

TRY_AGAIN = frozenset({408, 425, 429, 500, 502, 503, 504})
"""The answers after which a job is tried again; others blame the request."""


@dataclass
class _Member:
    """A sampler, as this process sees it."""

    host: Host
    state: ReplicaState
    models: dict[str, dict[str, Any]] = field(default_factory=dict)
    is_up: bool = False
    problem: str = "was not asked yet"
    well_at: float = field(default_factory=time.monotonic)
    losses: int = 0
    silence_s: float = SILENCE_S
    key: str | None = None  # of one that has joined
    is_checked: bool = True  # whether it gets jobs
    leaves: bool = False
    jobs: set[asyncio.Task[SampleResult]] = field(default_factory=set)
    loads: dict[str, asyncio.Task[None]] = field(default_factory=dict)  # by lora
    unloads: set[asyncio.Task[None]] = field(default_factory=set)


@dataclass
class _Job:
    key: str
    job: SampleJob
    listener: TokenListener | None
    version: Version | None
    needs: Needs
    news: queue.SimpleQueue[_News]
    failures: int = 0
    told: dict[int, list[int]] = field(default_factory=dict)  # the tokens that the listener has heard, by sample


@dataclass(frozen=True)
class _News:
    """A token of a sample, or the result."""

    key: str
    token: tuple[int, int, float] | None = None
    result: SampleResult | None = None


class ExternalSamplers:
    """Samplers at some addresses. One thread at a time samples; versions come from any."""

    def __init__(
        self,
        addresses: Sequence[str],
        *,
        api_key: str | None = None,
        shared: Path | None = None,
        lora_slots: int = LORA_SLOTS,
        patience_s: float = PATIENCE_S,
        silence_s: float = SILENCE_S,
    ) -> None:
        """`shared` is a folder that all samplers see under the same path; None: they are on this machine."""
        self.folders = LoraFolders(shared)
        self._slots = lora_slots
        self._patience_s = patience_s
        self._versions = Versions(lambda vector: vector)
        self._uses: Counter[str] = Counter()  # jobs of a version, by its name
        self._gone: dict[str, None] = {}  # versions that were dropped, and have jobs yet
        self._bases: set[str] = set()
        self._waiting = 0
        self._loop = asyncio.new_event_loop()
        self._changed = asyncio.Event()  # a sampler came back, or has room
        self._members = {
            number: _Member(Host(address, api_key=api_key), ReplicaState(lora_slots), silence_s=silence_s)
            for number, address in enumerate(addresses)
        }
        self._numbers = count(len(self._members))
        self._tasks: set[asyncio.Task[Any]] = set()
        self._thread = threading.Thread(target=self._work, name="mint-external-samplers", daemon=True)
        self._thread.start()
        self._call(self._watch_all())

    # --- what the engine calls -----------------------------------------------------------------------------------

    def add_weights(self, weights_id: str, base: str, lora: LoraSpec, weights: Mapping[str, np.ndarray]) -> None:
        """Makes a version that jobs may use at once; a sampler loads it with its first job. Any thread may call."""
        self._versions.add(weights_id, base, lora, weights)
        self._retire_gone()

    def add_base(self, base: str, lora: LoraSpec, zeros: Mapping[str, np.ndarray]) -> None:
        """Has the base sampled through a lora that changes nothing: where all places for loras are taken, vLLM's CPU
        build (0.32.0) applies the last one to requests that name none."""
        if base not in self._bases:
            self.add_weights(BASE + base, base, lora, zeros)
            self._bases.add(base)

    def drop_weights(self, weights_id: str) -> None:
        """Forgets weights; unknown ids are fine. Jobs that use them keep them."""
        self._versions.drop(weights_id)
        self._retire_gone()

    def _retire_gone(self) -> None:
        for name in self._versions.take_gone():
            self._call(self._retire(name))

    def open_batch(self) -> ExternalBatch:
        """An empty batch."""
        return ExternalBatch(self)

    @property
    def addresses(self) -> list[str]:
        """Where the samplers are."""
        return [member.host.address for member in list(self._members.values())]

    @property
    def state(self) -> dict[str, Any]:
        """The `versions` of weights, the jobs that are `waiting` for a sampler, and `hosts`: of each its address,
        whether it is `up`, what the `problem` is if not, how often it was `lost`, its jobs, sequences and loras. Any
        thread may ask."""
        return {
            "versions": len(self._versions),
            "waiting": self._waiting,
            "hosts": [
                {
                    "address": member.host.address,
                    "up": member.is_up,
                    "problem": None if member.is_up else member.problem,
                    "lost": member.losses,
                    "jobs": len(member.jobs),
                    "sequences": member.state.sequences,
                    "loras": len(member.state.loras),
                }
                for member in list(self._members.values())
            ],
        }

    def close(self) -> None:
        """Unloads all loras, and ends the thread."""
        with contextlib.suppress(TimeoutError):
            self._call(self._close()).result(timeout=5)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(timeout=5)
        self.folders.close()

    # --- those that join and leave -------------------------------------------------------------------------------

    def join(self, address: str, key: str, check: Callable[[str], None]) -> None:
        """Adds a sampler that fetches its loras, once `check` has accepted it; one that is there already is fine.

        Raises:
            InvalidRequestError: it does not answer, or `check` refuses it.
        """
        self._call(self._join(address, key, check)).result()

    def leave(self, address: str, key: str) -> int:
        """Gives no more jobs to a sampler that has joined, and forgets it when it has none. How many it has yet: of
        these some may still be on their way to it."""
        return self._call(self._leave(address, key)).result()

    async def _join(self, address: str, key: str, check: Callable[[str], None]) -> None:
        for member in self._members.values():
            if (member.host.address, member.key) == (address, key):
                return  # also where it leaves, and had said before that it is there
        for number, member in list(self._members.items()):
            if member.host.address == address and member.key is not None:  # it was started again
                self._note_lost(member, "another one has its address")
                await self._forget_member(number)
        member = _Member(
            Host(address, api_key=key, fetches=True),
            ReplicaState(self._slots),
            silence_s=WORKER_SILENCE_S,
            key=key,
            is_checked=False,
        )
        number = next(self._numbers)
        self._members[number] = member
        try:
            await self._greet(member)
            await asyncio.to_thread(check, address)
        except (HostUnreachableError, HostRefusedError, BadAnswerError) as error:
            await self._forget_member(number)
            raise InvalidRequestError(
                f"does not answer the server: {error}",
                field="address",
                value=address,
                remedy="Name an address that the server reaches: mint worker --host",
            ) from error
        except Exception:
            await self._forget_member(number)
            raise
        member.is_checked = True
        member.well_at = time.monotonic()
        self._start_watching(member, number)
        self._changed.set()
        log.info("the sampler %s has joined", address)

    async def _leave(self, address: str, key: str) -> int:
        for number, member in list(self._members.items()):
            if (member.host.address, member.key) == (address, key):
                if not member.leaves:
                    log.info("the sampler %s leaves; it has %d jobs yet", address, len(member.jobs))
                member.leaves = True
                if member.jobs:
                    return len(member.jobs)
                await self._forget_member(number)
        return 0

    async def _forget_member(self, number: int) -> None:
        member = self._members.pop(number, None)
        if member is not None:
            await member.host.close()

    def served(self, bases: Sequence[str], *, within_s: float) -> list[str]:
        """Which of the bases some sampler has. Waits for a sampler as `ask_each` does.

        Raises:
            InvalidRequestError: none answers in time, or none has any of them.
        """
        up = self._wait_for_one(within_s)
        found = [base for base in bases if any(served_name(member.models, base) is not None for member in up)]
        if not found:
            raise self._without(up, ", ".join(bases))
        return found

    def _wait_for_one(self, within_s: float) -> list[_Member]:
        until = time.monotonic() + within_s
        said = False
        while not (up := [member for member in list(self._members.values()) if member.is_up]):
            if time.monotonic() >= until:
                raise InvalidRequestError(
                    f"does not answer since {within_s:.0f} s: {self._problems()}",
                    field="sampler",
                    value=", ".join(self.addresses),
                    remedy="Start the sampler, or leave --sampler out",
                )
            if not said and time.monotonic() >= until - within_s + 1:
                log.warning("waiting for a sampler: %s", self._problems())
                said = True
            time.sleep(0.05)
        return up

    def _without(self, up: Sequence[_Member], base: str) -> InvalidRequestError:
        has = ", ".join(sorted({name for member in up for name in member.models}))
        return InvalidRequestError(
            f"does not serve {base}; it serves {has}",
            field="sampler",
            value=", ".join(self.addresses),
            remedy="Start it with this model, and --served-model-name",
        )

    def ask_each(
        self,
        base: str,
        ask: Callable[[Host, str], Coroutine[Any, Any, Any]],
        *,
        within_s: float,
        address: str | None = None,
    ) -> list[Any]:
        """What each sampler that has the base, under the given name, answers; with `address`, what that one does. Waits
        for one for `within_s` at most.

        Raises:
            InvalidRequestError: none answers in time, or none has the base.
        """
        up = [each for each in self._wait_for_one(within_s) if address in (None, each.host.address)]
        having = [(member.host, name) for member in up if (name := served_name(member.models, base)) is not None]
        if not having:
            raise self._without(up, base)
        return [asyncio.run_coroutine_threadsafe(ask(host, name), self._loop).result() for host, name in having]

    # --- jobs ----------------------------------------------------------------------------------------------------

    def add(self, key: str, job: SampleJob, listener: TokenListener | None, news: queue.SimpleQueue[_News]) -> Any:
        """Accepts a job, whose news come into the queue; returns what `cancel` takes.

        Raises:
            NotFoundError: its weights are not loaded.
            InvalidRequestError: it asks for what no external sampler has.
        """
        require_possible(job)
        weights_id = job.weights_id or (BASE + job.base if job.base in self._bases else None)
        version = None if weights_id is None else self._versions.of(weights_id, job.base)
        name = None if version is None else version.name
        needs = Needs(
            max(1, job.num_samples),
            name,
            int(name is not None),
            beginnings(name or job.base, job.cache_scope, job.prompt),
        )
        return self._call(self._run(_Job(key, job, listener, version, needs, news)))

    async def _run(self, own: _Job) -> None:
        name = own.needs.lora
        if name is not None:
            self._uses[name] += 1
        try:
            result = await self._sampled(own)
        except asyncio.CancelledError:
            raise
        except (HostUnreachableError, HostRefusedError, BadAnswerError, _GaveUpError) as error:
            result = SampleResult([], error=f"the external sampler failed: {error}")
        except Exception as error:  # the boundary: the request must end
            log.exception("a job cannot be sampled at an external sampler")
            result = SampleResult([], error=f"the external sampler failed: {type(error).__name__}: {error}")
        finally:
            if name is not None:
                self._uses[name] -= 1
                if name in self._gone:
                    await self._retire(name)
        own.news.put(_News(own.key, result=result))

    async def _sampled(self, own: _Job) -> SampleResult:
        while True:
            member = await self._choose(own)
            task = asyncio.ensure_future(self._sampled_at(member, own))
            member.jobs.add(task)
            try:
                return await task
            except asyncio.CancelledError:
                if not task.cancelled() or _current_is_cancelled():
                    task.cancel()
                    raise  # the job is given up
                continue  # the sampler was lost
            except HostUnreachableError as error:
                if await self._is_lost(member, error):
                    continue
                own.failures += 1
                if own.failures >= MAX_FAILURES:
                    raise
            except HostRefusedError as error:
                if error.status == 404 and own.needs.lora is not None:
                    self._forget(member, own.needs.lora)  # it was started again, or has too many
                elif error.status not in TRY_AGAIN:
                    raise
                own.failures += 1
                if own.failures >= MAX_FAILURES:
                    raise
                log.warning("%s: %s; the job is tried again", member.host.address, error)
                await asyncio.sleep(RETRY_S)
            finally:
                member.jobs.discard(task)
                member.state.end(own.needs)
                self._changed.set()

    async def _sampled_at(self, member: _Member, own: _Job) -> SampleResult:
        base = served_name(member.models, own.job.base)
        if base is None:
            raise HostUnreachableError("it has other models now")
        name = base
        if own.version is not None:
            await asyncio.shield(self._loading(member, own.version))
            name = self.folders.name(own.version)
        limit = member.models[base].get("max_model_len")
        if limit is not None and len(own.job.prompt) + max(1, own.job.max_tokens) > limit:
            raise BadAnswerError(
                f"it takes {limit} tokens at most (--max-model-len), and this request may have "
                f"{len(own.job.prompt) + own.job.max_tokens}"
            )
        return await member.host.generate(own.job, name, self._hearing(own))

    def _hearing(self, own: _Job) -> Callable[[int, int, float], None] | None:
        """Passes tokens on, but for those that were heard before the job ran again, which must be the same."""
        if own.listener is None:
            return None
        heard: Counter[int] = Counter()

        def hear(sample: int, token: int, logprob: float) -> None:
            told = own.told.setdefault(sample, [])
            place = heard[sample]
            heard[sample] += 1
            if place < len(told):
                if told[place] != token:
                    raise BadAnswerError("it was lost, and now gives other tokens than those that were streamed")
                return
            told.append(token)
            own.news.put(_News(own.key, token=(sample, token, logprob)))

        return hear

    async def _choose(self, own: _Job) -> _Member:
        """The sampler for a job, which is noted there; waits while none is up, or none has room."""
        since = time.monotonic()
        self._waiting += 1
        try:
            while True:
                base = own.job.base
                able = {
                    n: m.state
                    for n, m in self._members.items()
                    if m.is_up and m.is_checked and not m.leaves and served_name(m.models, base) is not None
                }
                number = route(able, own.needs)
                if number is not None:
                    self._note(self._members[number], own)
                    return self._members[number]
                if able:
                    since = time.monotonic()  # it is busy, not lost
                elif time.monotonic() - since > self._patience_s:
                    raise _GaveUpError(f"none answers since {self._patience_s:.0f} s: {self._problems()}")
                self._changed.clear()
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(self._changed.wait(), min(RETRY_S, self._patience_s / 4))
        finally:
            self._waiting -= 1

    def _note(self, member: _Member, own: _Job) -> None:
        for name in member.state.add(own.needs):
            self._unload(member, name)

    def _loading(self, member: _Member, version: Version) -> asyncio.Task[None]:
        if version.name not in member.loads:
            member.loads[version.name] = asyncio.ensure_future(self._load(member, version))
        return member.loads[version.name]

    async def _load(self, member: _Member, version: Version) -> None:
        try:
            if member.unloads:
                await asyncio.wait(set(member.unloads))
            path = await asyncio.to_thread(self.folders.write, version)
            await member.host.load_lora(self.folders.name(version), str(path))
        except Exception:
            self._forget(member, version.name)
            raise

    def _unload(self, member: _Member, name: str) -> None:
        member.loads.pop(name, None)

        async def unload() -> None:
            with contextlib.suppress(HostUnreachableError, HostRefusedError):
                await member.host.unload_lora(f"{self.folders.prefix}-{name}")

        task = asyncio.ensure_future(unload())
        member.unloads.add(task)
        task.add_done_callback(member.unloads.discard)

    def _forget(self, member: _Member, name: str) -> None:
        """Notes that a sampler does not have a lora."""
        member.loads.pop(name, None)
        member.state.forget(name)

    async def _retire(self, name: str) -> None:
        """Takes a version out of all samplers, once no job needs it."""
        if self._uses[name]:
            self._gone[name] = None
            return
        self._gone.pop(name, None)
        del self._uses[name]
        for member in list(self._members.values()):
            if member.state.forget(name):
                self._unload(member, name)
        await asyncio.to_thread(self.folders.remove, f"{self.folders.prefix}-{name}")

    # --- samplers that come and go -------------------------------------------------------------------------------

    async def _watch_all(self) -> None:
        for number, member in self._members.items():
            self._start_watching(member, number)

    def _start_watching(self, member: _Member, number: int) -> None:
        task = asyncio.ensure_future(self._watch(member, number))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _watch(self, member: _Member, number: int) -> None:
        while self._members.get(number) is member:
            if member.leaves and not member.jobs:
                await self._forget_member(number)
                return
            if member.key is not None and time.monotonic() - member.well_at > FORGET_S:
                log.error("the sampler %s is forgotten: it was silent for %.0f s", member.host.address, FORGET_S)
                await self._forget_member(number)
                return
            try:
                if member.is_up:
                    await member.host.is_well(member.silence_s)
                else:
                    await self._greet(member)
                member.well_at = time.monotonic()
            except (HostUnreachableError, HostRefusedError, BadAnswerError) as error:
                self._note_lost(member, str(error))
            except Exception:  # the boundary: whoever watches must not end
                log.exception("watching %s failed", member.host.address)
            await asyncio.sleep(min(HEALTH_EVERY_S, member.silence_s) if member.is_up else RETRY_S)

    async def _greet(self, member: _Member) -> None:
        """Notes a sampler that answers, and which loras it has kept."""
        await member.host.is_well(member.silence_s)
        member.models = await member.host.models()
        for name in [name for name in member.loads if f"{self.folders.prefix}-{name}" not in member.models]:
            self._forget(member, name)
        member.is_up = True
        self._changed.set()
        log.info("the sampler %s answers: it serves %s", member.host.address, ", ".join(member.models))

    def _note_lost(self, member: _Member, reason: str) -> None:
        member.problem = reason
        if not member.is_up:
            return
        member.is_up = False
        member.losses += 1
        for name in list(member.loads):
            self._forget(member, name)
        jobs = list(member.jobs)
        log.error("the sampler %s is lost: %s; %d jobs run again", member.host.address, reason, len(jobs))
        for task in jobs:
            task.cancel()

    async def _is_lost(self, member: _Member, error: HostUnreachableError) -> bool:
        """Whether a sampler that broke off an answer is lost, and notes it; otherwise one connection was."""
        try:
            await member.host.is_well(CONNECT_S)
        except (HostUnreachableError, HostRefusedError):
            self._note_lost(member, str(error))
            return True
        return False

    def _problems(self) -> str:
        members = [f"{member.host.address}: {member.problem}" for member in list(self._members.values())]
        return "; ".join(members) or "no worker has joined (mint worker --join URL)"

    # --- the loop ------------------------------------------------------------------------------------------------

    def _work(self) -> None:
        asyncio.set_event_loop(self._loop)
        self._loop.run_forever()

    def _call(self, work: Coroutine[Any, Any, Any]) -> Any:
        return asyncio.run_coroutine_threadsafe(work, self._loop)

    async def _close(self) -> None:
        for task in list(self._tasks):
            task.cancel()
        for member in self._members.values():
            for name in list(member.loads) if member.is_up else []:
                self._unload(member, name)
        unloads = {task for member in self._members.values() for task in member.unloads}
        if unloads:
            await asyncio.wait(unloads, timeout=3)
        for member in self._members.values():
            await member.host.close()


def served_name(models: Mapping[str, Mapping[str, Any]], base: str) -> str | None:
    """The name of a base, a folder, among the models of a sampler: by its path or name; or the only one that it has."""
    path = Path(base)
    hub = [part.removeprefix("models--").replace("--", "/") for part in path.parts if part.startswith("models--")]
    bases = {name: model for name, model in models.items() if not model.get("parent")}
    for name, model in bases.items():
        if base in (name, model.get("root")) or name in hub or name.rpartition("/")[2] == path.name:
            return name
    return next(iter(bases)) if len({model.get("root") for model in bases.values()}) == 1 else None


class _GaveUpError(RuntimeError):
    """No sampler was there for too long."""


def _current_is_cancelled() -> bool:
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0


class ExternalBatch:
    """`SampleBatch` over external samplers. A step waits for news of any of them."""

    def __init__(self, samplers: ExternalSamplers) -> None:
        self._samplers = samplers
        self._news: queue.SimpleQueue[_News] = queue.SimpleQueue()
        self._running: dict[str, Any] = {}
        self._listeners: dict[str, TokenListener | None] = {}
        self._results: dict[str, SampleResult] = {}

    @property
    def keys(self) -> Collection[str]:
        """The jobs without a result yet."""
        return self._running.keys()

    def add(self, key: str, job: SampleJob, listener: TokenListener | None = None) -> None:
        """Adds a job, which is sent at once.

        Raises:
            NotFoundError: its weights are not loaded.
            InvalidRequestError: it asks for what no external sampler has.
        """
        self._running[key] = self._samplers.add(key, job, listener, self._news)
        self._listeners[key] = listener

    def cancel(self, key: str) -> None:
        """Removes the job at the next step; unknown keys are ignored."""
        if key in self._running and key not in self._results:
            self._running[key].cancel()
            self._results[key] = SampleResult([], error=CANCELLED)

    def step(self) -> dict[str, SampleResult]:
        """Waits a moment for news; returns the results of the jobs that ended."""
        if not self._running:
            return {}
        try:
            news = self._news.get(timeout=0.0 if self._results else NEWS_S)
            while True:
                self._hear(news)
                news = self._news.get_nowait()
        except queue.Empty:
            pass
        except Exception:
            for key in list(self._running):
                self.cancel(key)  # the batch must not be used any more
            raise
        results, self._results = self._results, {}
        for key in results:
            del self._running[key], self._listeners[key]
        return results

    def _hear(self, news: _News) -> None:
        if news.key not in self._running or news.key in self._results:
            return
        if news.result is not None:
            self._results[news.key] = news.result
            return
        listener = self._listeners[news.key]
        if listener is not None and news.token is not None:
            listener(*news.token)
