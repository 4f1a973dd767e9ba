"""What the engine does next: a pure function of what waits, what is being sampled, and how its time was shared.

All sample requests run in one batch, whatever weights they use; a request joins it between two steps, and waits for
earlier ones of its own owner alone. Training goes first, because samples that wait meanwhile then run in a larger
batch. Once training is `SLICE_S` ahead, samples catch up. Among training requests, owners take turns by the time they
have used, then the models of an owner. The requests of a model run strictly in `seq_id` order. A missing one holds up
those behind it for `gap_timeout_s`; then all of them are given up.

An engine with two lanes trains and samples at the same time. Each lane asks for itself; neither waits for the other.

Knows nothing of engines, threads or journals.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Literal

from mint.server.queue.fairness import Fairness
from mint.server.queue.jobs import QueuedSample, TrainingJob

GAP_TIMEOUT_S = 600.0
"""Long, because a client's own code may run between two requests (a custom loss reserves its second number early)."""

SLICE_S = 0.1
"""How far training may get ahead of waiting samples. Longer: larger batches; shorter: steadier streams."""

MAX_OWNER_SEQUENCES = 1024
"""Sequences of one owner in the sampling batch. It is more than the engine decodes at once, so that its rows stay full
when some samples of a request end before the others. The engine gives owners equal shares of its rows."""

NEW_FAIRNESS = Fairness()

Lane = Literal["all", "training", "sampling"]
"""What a thread of the engine does: everything, where there is one lane; or one of the two."""


@dataclass(frozen=True)
class Pending:
    """What waits, samples in order of arrival. `next_seq` is the only number of each model that may run now."""

    next_seq: Mapping[str, int] = field(default_factory=dict)
    training: Sequence[TrainingJob] = ()
    samples: Sequence[QueuedSample] = ()

    @cached_property
    def ready(self) -> list[TrainingJob]:
        """The training requests that may run now."""
        return [job for job in self.training if job.seq_id == self.next_seq[job.model_id]]

    @cached_property
    def held_up(self) -> dict[str, float]:
        """For each model whose next number is missing: since when the oldest request waits behind it."""
        oldest: dict[str, float] = {}
        for job in self.training:
            oldest[job.model_id] = min(job.arrived_at, oldest.get(job.model_id, job.arrived_at))
        for job in self.ready:
            del oldest[job.model_id]
        return oldest

    @cached_property
    def postponed(self) -> list[QueuedSample]:
        """The sample requests that were put back until a time."""
        return [sample for sample in self.samples if sample.not_before > float("-inf")]


@dataclass(frozen=True)
class SamplingLoad:
    """The sequences that are being sampled, by owner. No request may join while `is_closed`."""

    sequences: Mapping[str, int] = field(default_factory=dict)
    is_closed: bool = False


@dataclass(frozen=True)
class RunTraining:
    """Run this one training request."""

    job: TrainingJob


@dataclass(frozen=True)
class StepSamples:
    """Let these sample requests join the batch, then decode one token for each of its sequences."""

    joining: tuple[str, ...] = ()


@dataclass(frozen=True)
class GiveUp:
    """Fail the requests that never arrived (`missing`), and those that have waited behind them for too long."""

    model_id: str
    missing: tuple[int, ...]
    waiting: tuple[TrainingJob, ...]


@dataclass(frozen=True)
class Wait:
    """Nothing to do until something arrives, or until this time."""

    until: float | None


NO_LOAD = SamplingLoad()

Plan = RunTraining | StepSamples | GiveUp | Wait


def plan(
    pending: Pending,
    now: float,
    *,
    lane: Lane = "all",
    sampling: SamplingLoad = NO_LOAD,
    fairness: Fairness = NEW_FAIRNESS,
    gap_timeout_s: float = GAP_TIMEOUT_S,
    gaps_since: float = float("-inf"),
) -> Plan:
    """The next thing that a lane does. Before `gaps_since` no request could arrive, so no gap is older."""
    if lane == "training":
        pending, sampling = replace(pending, samples=()), NO_LOAD
    elif lane == "sampling":
        pending = replace(pending, training=())
    samples, samples_from = pending.samples, None
    if pending.postponed:
        samples = [sample for sample in samples if sample.not_before <= now]
        samples_from = min((sample.not_before for sample in pending.postponed if sample.not_before > now), default=None)
    has_samples = bool(samples or sampling.sequences)
    if not pending.training:
        return StepSamples(_joining(samples, sampling)) if has_samples else Wait(samples_from)
    for model_id, since in pending.held_up.items():
        if max(since, gaps_since) + gap_timeout_s <= now:
            return _give_up(pending, model_id)
    if pending.ready and not (has_samples and fairness.training_lead_s > SLICE_S):
        is_only = len(pending.ready) == 1
        return RunTraining(pending.ready[0] if is_only else _next_in_turn(pending.ready, fairness))
    if has_samples:
        return StepSamples(_joining(samples, sampling))
    gap_ends = max(gaps_since, min(pending.held_up.values())) + gap_timeout_s
    return Wait(gap_ends if samples_from is None else min(gap_ends, samples_from))


def _next_in_turn(ready: Sequence[TrainingJob], fairness: Fairness) -> TrainingJob:
    """Takes the owner that used the least time, then its model that did; the longest wait breaks ties."""
    owner = min(ready, key=lambda item: (fairness.owners.start_tag(item.owner), item.arrived_at)).owner
    models = fairness.models_of(owner)
    own = (item for item in ready if item.owner == owner)
    return min(own, key=lambda item: (models.start_tag(item.model_id), item.arrived_at))


def _joining(samples: Sequence[QueuedSample], sampling: SamplingLoad) -> tuple[str, ...]:
    """Takes, of each owner in order of arrival, as many as fit; at least one if nothing of that owner is sampled."""
    if sampling.is_closed:
        return ()
    has = dict(sampling.sequences)
    full: set[str] = set()
    chosen: list[str] = []
    for item in samples:
        if item.owner in full:
            continue
        used = has.get(item.owner, 0)
        if used and used + item.sequences > MAX_OWNER_SEQUENCES:
            full.add(item.owner)  # no smaller one may overtake it, or it could wait for ever
            continue
        has[item.owner] = used + item.sequences
        chosen.append(item.request_id)
    return tuple(chosen)


def _give_up(pending: Pending, model_id: str) -> GiveUp:
    waiting = sorted((job for job in pending.training if job.model_id == model_id), key=lambda job: job.seq_id)
    arrived = {job.seq_id for job in waiting}
    missing = sorted(set(range(pending.next_seq[model_id], waiting[-1].seq_id)) - arrived)
    return GiveUp(model_id, tuple(missing), tuple(waiting))
