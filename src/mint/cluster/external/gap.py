"""How far the logprobs of sampler and trainer are apart, measured on every pass with the weights that sampled."""

from __future__ import annotations

import logging
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from mint.engine.protocol import PassResult, TrainDatum

log = logging.getLogger(__name__)

ALARM = 0.02
"""A mean |Δ logprob| above this is reported, as the finding `sampler_trainer_mismatch` is."""


@dataclass(frozen=True)
class Gap:
    """Over some tokens, in nats: the mean and the largest |trainer - sampler|, and the k3 estimate of KL(sampler ‖
    trainer)."""

    tokens: int
    mean: float
    max: float
    k3: float

    @classmethod
    def of(cls, data: Sequence[TrainDatum], result: PassResult) -> Gap | None:
        """Over the trained tokens of a pass; None if the data has no logprobs of a sampler."""
        pairs = [
            (row[datum.trained], datum.inputs["logprobs"][datum.trained])
            for datum, row in zip(data, result.logprobs, strict=True)
            if "logprobs" in datum.inputs and datum.trained.any() and row.ndim == 1
        ]
        if not pairs:
            return None
        trainer, sampler = (np.concatenate(rows).astype(np.float64) for rows in zip(*pairs, strict=True))
        difference = trainer - sampler
        with np.errstate(over="ignore"):
            k3 = float((np.expm1(difference) - difference).mean())
        absolute = np.abs(difference)
        return cls(len(difference), float(absolute.mean()), float(absolute.max()), k3)


class GapMeter:
    """The last gap, and the totals since the start. Any thread may ask."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._last: Gap | None = None
        self._tokens = 0
        self._sum = 0.0
        self._max = 0.0
        self._alarms = 0

    def add(self, gap: Gap) -> None:
        """Notes a gap, and reports one that is too large."""
        with self._lock:
            self._last = gap
            self._tokens += gap.tokens
            self._sum += gap.mean * gap.tokens
            self._max = max(self._max, gap.max)
            is_large = not gap.mean <= ALARM
            self._alarms += is_large
        if is_large:
            log.error(
                "sampler and trainer are apart: |Δ logprob| %.3g in the mean over %d tokens (at most %.3g, k3 %.3g); "
                "the limit is %g",
                *(gap.mean, gap.tokens, gap.max, gap.k3, ALARM),
            )

    @property
    def state(self) -> dict[str, Any]:
        """`tokens` that were compared, the `mean` over them, the largest (`max`), `alarms`, and the `last` pass."""
        with self._lock:
            last = self._last
            return {
                "tokens": self._tokens,
                "mean": self._sum / self._tokens if self._tokens else 0.0,
                "max": self._max,
                "alarms": self._alarms,
                "last": None if last is None else {"mean": last.mean, "max": last.max, "k3": last.k3},
            }
