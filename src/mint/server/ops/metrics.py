"""Metrics for Prometheus: requests by route, the queue, the engine's work. No owners, no keys, no texts.

Requests are counted from their access records, the engine through a wrapper; the rest is read when metrics are asked
for.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any, cast

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, disable_created_metrics, generate_latest
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from mint.engine.protocol import Engine, SampleBatch, SampleResult
from mint.server.http.access_log import NO_ROUTE, AccessRecord
from mint.server.mirror.mirror import Mirror
from mint.server.ops.loop_pauses import LoopPauses
from mint.server.service.service import Service

BUCKETS_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
PAUSE_BUCKETS_S = (0.001, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 10.0)

TIMED = frozenset(
    {
        "load_base",
        "create_model",
        "forward",
        "forward_backward",
        "optim_step",
        "read_state",
        "write_state",
        "publish",
        "load_weights",
    }
)
"""The operations of the engine whose time is counted; the steps of its batches count as `sample`."""


class Metrics:
    """The metrics of one process."""

    def __init__(self) -> None:
        disable_created_metrics()  # when a counter was created is of no use, and doubles the page
        self._registry = CollectorRegistry()
        self._requests = Counter(
            "mint_requests", "Requests answered.", ("method", "route", "status"), registry=self._registry
        )
        self._seconds = Histogram(
            "mint_request_seconds",
            "From the head of a request to the end of its answer; those that wait for a result included.",
            ("route",),
            buckets=BUCKETS_S,
            registry=self._registry,
        )
        self._busy = Counter("mint_engine_busy_seconds", "Time in the engine.", ("operation",), registry=self._registry)
        self._tokens = Counter("mint_tokens", "Tokens worked on.", ("kind",), registry=self._registry)
        for kind in ("trained", "sampled"):
            self._tokens.labels(kind)
        pauses = Histogram(
            "mint_event_loop_pause_seconds",
            "How late a timer of the event loop came; 50 observations in a second.",
            buckets=PAUSE_BUCKETS_S,
            registry=self._registry,
        )
        worst = Gauge(
            "mint_event_loop_worst_pause_seconds", "The longest pause of the last minute.", registry=self._registry
        )
        self.loop_pauses = LoopPauses(pauses.observe)
        """Those of the server's event loop, from `start` on."""
        worst.set_function(self.loop_pauses.worst_s)
        self._engine: object = None
        self._state: _ServiceState | None = None

    def observe(self, record: AccessRecord) -> None:
        """Counts a request and its response."""
        # without a route, the method is any text that the sender has made up: no label
        method = "-" if record.route == NO_ROUTE else record.method
        self._requests.labels(method, record.route, record.status).inc()
        self._seconds.labels(record.route).observe(record.seconds)

    def watch(self, service: Service) -> None:
        """Adds the state of a service to the metrics."""
        self._state = _ServiceState(service)
        self._registry.register(self._state)

    def watch_mirror(self, mirror: Mirror) -> None:
        """Adds how far behind a mirror is to the metrics."""
        self._registry.register(_MirrorMetrics(mirror))

    def metered(self, engine: Engine) -> Engine:
        """The same engine, with its work counted."""
        self._engine = engine
        self._registry.register(_EngineState(engine))
        return cast("Engine", _Metered(engine, self._count_work))

    def render(self) -> bytes:
        """All metrics in Prometheus' text format."""
        return generate_latest(self._registry)

    def totals(self) -> dict[str, dict[str, float]]:
        """The engine's work since the start: `tokens` by kind, and `busy_s` by operation.

        If the engine has them, also its counters of `sampling`, and its `kv_pages` now.
        """
        count = getattr(self._engine, "sampling_counters", None)
        pages = getattr(self._engine, "kv_pages", None)
        return {
            "tokens": _by_label(self._tokens),
            "busy_s": _by_label(self._busy),
            "sampling": {} if count is None else dict(count()),
            "kv_pages": {} if pages is None else dict(pages()),
        }

    def requests(self) -> list[dict[str, Any]]:
        """How many requests of each route were `answered`, and how many `refused` (status 400 and above)."""
        rows: dict[tuple[str, str], dict[str, Any]] = {}
        samples = (each for metric in self._requests.collect() for each in metric.samples)
        for sample in samples:
            if not sample.name.endswith("_total"):
                continue
            method, route, status = (sample.labels[name] for name in ("method", "route", "status"))
            row = rows.setdefault((method, route), {"method": method, "route": route, "answered": 0, "refused": 0})
            row["refused" if int(status) >= 400 else "answered"] += int(sample.value)
        return list(rows.values())

    def journal_bytes(self) -> int:
        """How large the files of the watched service's journal are; 0 without one."""
        return 0 if self._state is None else self._state.journal_bytes()

    def _count_work(self, operation: str, seconds: float, arguments: tuple[Any, ...], result: Any) -> None:
        self._busy.labels(operation).inc(seconds)
        if operation == "forward_backward":
            self._tokens.labels("trained").inc(sum(len(datum.tokens) for datum in arguments[1]))
        elif operation == "sample":
            count = sum(len(sample.tokens) for found in result.values() for sample in found.samples)
            self._tokens.labels("sampled").inc(count)


def _by_label(counter: Counter) -> dict[str, float]:
    """A counter's values by its only label."""
    samples = [sample for metric in counter.collect() for sample in metric.samples if sample.name.endswith("_total")]
    return {next(iter(sample.labels.values())): sample.value for sample in samples}


class _Metered:
    """An engine that counts calls, and passes them on to another one."""

    def __init__(self, engine: Engine, count: Callable[[str, float, tuple[Any, ...], Any], None]) -> None:
        self._engine = engine
        self._count = count

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._engine, name)
        if name not in TIMED:
            return found

        def timed(*arguments: Any, **named: Any) -> Any:
            started_at = time.perf_counter()
            result = found(*arguments, **named)
            self._count(name, time.perf_counter() - started_at, arguments, result)
            return result

        return timed

    def open_batch(self) -> SampleBatch:
        """A batch of the engine, counted too."""
        return cast("SampleBatch", _MeteredBatch(self._engine.open_batch(), self._count))


class _MeteredBatch:
    """A batch that counts steps, and passes all calls on to another one."""

    def __init__(self, batch: SampleBatch, count: Callable[[str, float, tuple[Any, ...], Any], None]) -> None:
        self._batch = batch
        self._count = count

    def __getattr__(self, name: str) -> Any:
        return getattr(self._batch, name)

    def step(self) -> dict[str, SampleResult]:
        """A step of the batch; the tokens of a request are counted when it has finished."""
        started_at = time.perf_counter()
        results = self._batch.step()
        self._count("sample", time.perf_counter() - started_at, (), results)
        return results


class _EngineState(Collector):
    """The engine's own counters, read when metrics are asked for; nothing if it has none."""

    def __init__(self, engine: object) -> None:
        self._count = getattr(engine, "sampling_counters", None)
        self._pages = getattr(engine, "kv_pages", None)

    def describe(self) -> Iterable[Metric]:
        """Nothing: the engine is not read before it works."""
        return ()

    def collect(self) -> Iterable[Metric]:
        """Counters of sampling, and gauges of its memory."""
        if self._count is not None:
            counts = self._count()
            prompts = CounterMetricFamily(
                "mint_prompt_tokens", "Tokens of prompts, by whether their keys were known.", labels=("source",)
            )
            for source, name in (("computed", "prefilled"), ("reused", "reused")):
                prompts.add_metric((source,), counts.get(name, 0))
            yield prompts
            steps, preemptions = (counts.get(name, 0) for name in ("steps", "preemptions"))
            yield CounterMetricFamily("mint_sampling_steps", "Steps of the batches that are sampled.", value=steps)
            yield CounterMetricFamily(
                "mint_sampling_preemptions",
                "How often a sequence gave its memory back, to be computed again later.",
                value=preemptions,
            )
        if self._pages is not None:
            pages = GaugeMetricFamily("mint_kv_pages", "Pages of keys and values.", labels=("state",))
            for state, value in self._pages().items():
                pages.add_metric((state,), value)
            yield pages


def _external(state: Mapping[str, Any] | None) -> Iterable[Metric]:
    """Of external samplers: which are up, and how far their logprobs are from the trainer's."""
    if state is None:
        return
    up = GaugeMetricFamily("mint_sampler_up", "1 while an external sampler answers.", labels=("address",))
    for host in state["hosts"]:
        up.add_metric((host["address"],), float(host["up"]))
    yield up
    gap = state["gap"]
    last = gap["last"] or {"mean": 0.0, "max": 0.0, "k3": 0.0}
    of_pass = GaugeMetricFamily(
        "mint_sampler_gap_nats", "|sampler - trainer| of logprobs in the last pass, and k3.", labels=("of",)
    )
    for name, value in last.items():
        of_pass.add_metric((name,), value)
    yield of_pass
    yield CounterMetricFamily("mint_sampler_gap_alarms", "Passes in which it was too large.", value=gap["alarms"])


class _MirrorMetrics(Collector):
    """The state of the mirror, read when metrics are asked for."""

    def __init__(self, mirror: Mirror) -> None:
        self._mirror = mirror

    def collect(self) -> Iterable[Metric]:
        """Its lag, whether it works, and what was sent."""
        state = self._mirror.state
        yield GaugeMetricFamily(
            "mint_mirror_lag_seconds", "The mirror has the state from so long ago.", value=state.lag_s
        )
        yield GaugeMetricFamily(
            "mint_mirror_working", "1 while the mirror can be written.", value=float(state.problem is None)
        )
        yield CounterMetricFamily("mint_mirror_sent_bytes", "What was sent to the mirror.", value=state.sent_bytes)


class _ServiceState(Collector):
    """The state of the service, read when metrics are asked for."""

    def __init__(self, service: Service) -> None:
        self._service = service

    def describe(self) -> Iterable[Metric]:
        """Nothing: the service is not read before it works."""
        return ()

    def collect(self) -> Iterable[Metric]:
        """The gauges."""
        waiting = self._service.pending
        queue = GaugeMetricFamily("mint_waiting_requests", "Accepted and not finished.", labels=("kind",))
        queue.add_metric(("training",), len(waiting.training))
        queue.add_metric(("sample",), len(waiting.samples))
        yield queue
        rows = self._service.sampled_sequences
        yield GaugeMetricFamily("mint_sampled_rows", "Sequences that are being sampled together.", value=rows)
        yield GaugeMetricFamily("mint_open_sessions", "Sessions that live.", value=len(self._service.session_owners))
        memory, disk = self._service.memory, self._service.disk
        yield GaugeMetricFamily("mint_models", "Models in the engine.", value=memory.model_count)
        yield CounterMetricFamily("mint_models_parked", "How often a model left memory.", value=memory.parked_count)
        in_memory = GaugeMetricFamily(
            "mint_model_memory_bytes", "Memory of the models, and their limit.", labels=("of",)
        )
        in_memory.add_metric(("used",), memory.used_bytes)
        in_memory.add_metric(("limit",), float("inf") if memory.limit_bytes is None else memory.limit_bytes)
        yield in_memory
        samplers = self._service.samplers
        loras = GaugeMetricFamily(
            "mint_lora_cache_bytes", "Memory of the LoRAs to sample from, and their limit.", labels=("of",)
        )
        loras.add_metric(("used",), samplers.in_engine_bytes)
        loras.add_metric(("limit",), samplers.cache_limit_bytes or float("inf"))
        yield loras
        yield GaugeMetricFamily("mint_cached_loras", "LoRAs to sample from in memory.", value=samplers.in_engine_count)
        yield CounterMetricFamily("mint_loras_loaded", "How often one was read.", value=samplers.loaded_count)
        room = GaugeMetricFamily("mint_disk_bytes", "Free space, and what of it stays in reserve.", labels=("of",))
        room.add_metric(("free",), disk.free_bytes)
        room.add_metric(("reserve",), disk.reserve_bytes)
        yield room
        yield GaugeMetricFamily(
            "mint_disk_nearly_full",
            "1 while less than twice the reserve is free; below it, new sessions, models and saves are refused.",
            value=float(disk.look()),
        )
        yield GaugeMetricFamily("mint_journal_bytes", "Size of the journal's files.", value=self.journal_bytes())
        yield GaugeMetricFamily(
            "mint_storage_working",
            "1 while the data directory can be written; training waits while it is 0.",
            value=float(self._service.storage_problem is None),
        )
        yield GaugeMetricFamily(
            "mint_journal_damaged",
            "1 once a damaged page or row of the journal was found; models that need it have stopped.",
            value=float(self._service.journal_damage is not None),
        )
        yield from _external(self._service.cluster_state.get("external"))
        yield GaugeMetricFamily(
            "mint_working", "1 while requests are being worked on.", value=float(self._service.is_working)
        )

    def journal_bytes(self) -> int:
        """The size of the journal's files together."""
        sizes = []
        for path in self._service.data_dir.glob("journal.sqlite3*"):
            try:
                sizes.append(path.stat().st_size)
            except FileNotFoundError:  # SQLite has deleted its log in between
                continue
        return sum(sizes)
