"""What the engine does next: a pure function of what waits and of the time.

One rule for training and sampling: the request that has waited longest goes first. A model's training requests run
strictly in `seq_id` order; one that is missing holds up those behind it for `gap_timeout_s`, after which all of them
are given up. Sample requests that wait together run together, whatever weights they ask for; a short pause collects
those that a client sends in one burst.

Knows nothing of engines, threads or journals.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

GAP_TIMEOUT_S = 600.0
"""Long, because a client's own code may run between two requests (a custom loss reserves its second number early)."""

BURST_PAUSE_S, LONGEST_BURST_PAUSE_S = 0.002, 0.008
"""Samples start once none has arrived for this long: a fiftieth of what a batch takes, within these bounds …"""

BURST_LIMIT_S = 0.03
"""… or the first of them has waited this long."""

MAX_BATCH_SEQUENCES = 1024


@dataclass(frozen=True)
class TrainingItem:
    """A training request that waits; times are monotonic seconds."""

    model_id: str
    seq_id: int
    arrived_at: float
    kind: str = ""


@dataclass(frozen=True)
class SampleItem:
    """A sample request that waits."""

    request_id: str
    sequences: int
    arrived_at: float


@dataclass(frozen=True)
class Pending:
    """All that waits. `next_seq` is, for each model, the only number that may run now."""

    next_seq: Mapping[str, int] = field(default_factory=dict)
    training: Sequence[TrainingItem] = ()
    samples: Sequence[SampleItem] = ()


@dataclass(frozen=True)
class RunTraining:
    """Run this one training request."""

    model_id: str
    seq_id: int


@dataclass(frozen=True)
class RunSamples:
    """Run these sample requests in one call."""

    request_ids: tuple[str, ...]


@dataclass(frozen=True)
class GiveUp:
    """Requests that never arrived, and those that have waited behind them for too long."""

    model_id: str
    missing: tuple[int, ...]
    waiting: tuple[int, ...]


@dataclass(frozen=True)
class Wait:
    """Nothing to do until something arrives, or until this time."""

    until: float | None


Plan = RunTraining | RunSamples | GiveUp | Wait


def plan(pending: Pending, now: float, *, gap_timeout_s: float = GAP_TIMEOUT_S, batch_s: float = 0.0) -> Plan:
    """The next thing to do; `batch_s` is how long a batch of samples has taken lately.

    A burst that is cut in two costs a whole second batch, and over a socket its requests arrive further apart than a
    short batch is worth waiting for: so the longer a batch takes, the longer its stragglers are waited for.
    """
    ready = [item for item in pending.training if item.seq_id == pending.next_seq[item.model_id]]
    head = min(ready, key=lambda item: item.arrived_at, default=None)
    samples_at = _samples_ready_at(pending.samples, batch_s)
    samples_are_ready = samples_at is not None and samples_at <= now
    if samples_are_ready and (head is None or pending.samples[0].arrived_at <= head.arrived_at):
        return RunSamples(_merge(pending.samples))
    if head is not None:
        return RunTraining(head.model_id, head.seq_id)
    held_up = _oldest_per_model(pending)
    for model_id, since in held_up.items():
        if since + gap_timeout_s <= now:
            return _give_up(pending, model_id)
    deadlines = [since + gap_timeout_s for since in held_up.values()]
    return Wait(min([*deadlines, *([samples_at] if samples_at is not None else [])], default=None))


def _samples_ready_at(samples: Sequence[SampleItem], batch_s: float) -> float | None:
    """When the burst that is arriving counts as complete; samples are in order of arrival."""
    if not samples:
        return None
    pause_s = min(max(BURST_PAUSE_S, batch_s / 50), LONGEST_BURST_PAUSE_S)
    return min(samples[-1].arrived_at + pause_s, samples[0].arrived_at + BURST_LIMIT_S)


def _merge(samples: Sequence[SampleItem]) -> tuple[str, ...]:
    """The longest run from the front that fits a batch, and at least one."""
    chosen = [samples[0].request_id]
    sequences = samples[0].sequences
    for item in samples[1:]:
        sequences += item.sequences
        if sequences > MAX_BATCH_SEQUENCES:
            break
        chosen.append(item.request_id)
    return tuple(chosen)


def _oldest_per_model(pending: Pending) -> dict[str, float]:
    """For each model whose next number is missing: since when the oldest request waits behind it."""
    oldest: dict[str, float] = {}
    for item in pending.training:
        oldest[item.model_id] = min(item.arrived_at, oldest.get(item.model_id, item.arrived_at))
    return oldest


def _give_up(pending: Pending, model_id: str) -> GiveUp:
    waiting = sorted(item.seq_id for item in pending.training if item.model_id == model_id)
    missing = sorted(set(range(pending.next_seq[model_id], waiting[-1])) - set(waiting))
    return GiveUp(model_id, tuple(missing), tuple(waiting))
