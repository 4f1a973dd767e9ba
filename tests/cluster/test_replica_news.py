"""What a replica says of its tokens, and what a listener is told of them, without processes."""

from __future__ import annotations

from typing import Any
from unittest.mock import patch

import numpy as np
import pytest

pytest.importorskip("ray", reason="pip install 'mint[cluster]'")

from mint.cluster.processes import Process
from mint.cluster.replica import AddJob, LoadBase, News, Replica
from mint.cluster.replicas import _Job
from mint.cluster.routing import Needs
from mint.engine.fake_engine import FakeBatch, FakeEngine
from mint.engine.protocol import SampleJob, SampleResult, StopRule

JOBS = 3


class Counts(FakeEngine):
    """Has what a replica asks torch's engine for, beside the contract."""

    def sampling_counters(self) -> dict[str, int]:
        return {}

    def kv_pages(self) -> dict[str, int]:
        return {}


class FailsOnce(Counts):
    """Its first batch fails in the third step."""

    def __init__(self) -> None:
        super().__init__()
        self.steps = 0

    def open_batch(self) -> FakeBatch:
        return _FailingBatch(self)


class _FailingBatch(FakeBatch):
    def step(self) -> dict[str, SampleResult]:
        engine: Any = self._engine
        engine.steps += 1
        if engine.steps == 3:
            raise RuntimeError("broken")
        return super().step()


def asked(number: int, samples: int = 2) -> SampleJob:
    return SampleJob("mint/tiny", None, np.array([5, 6, number]), samples, 6, 1.0, -1, 1.0, number, StopRule())


def run(engine: FakeEngine) -> tuple[dict[int, list[tuple[int, int, float]]], dict[int, SampleResult]]:
    """The tokens by job, and the results, of some streamed jobs on a replica."""
    replica = Replica(lambda _peers: engine)  # ty: ignore[invalid-argument-type]
    with patch.object(Process, "of_this_actor", lambda: None):  # it is no actor here
        assert replica.open().error is None
    orders = [AddJob(number, asked(number), None, has_listener=True) for number in range(JOBS)]
    replica.do(0, [LoadBase("mint/tiny", "mint/tiny"), *orders])
    tokens: dict[int, list[tuple[int, int, float]]] = {}
    results: dict[int, SampleResult] = {}
    while len(results) < JOBS:
        piece: Any = replica.news(5.0)
        news: News = piece._value
        assert not news.failures
        for number, drawn in news.tokens.items():
            tokens.setdefault(number, []).extend(drawn)
        results |= news.results
    return tokens, results


@pytest.mark.parametrize("engine", [Counts, FailsOnce])
def test_each_token_is_told_once_and_in_order_also_if_a_batch_runs_again(engine: type[Counts]) -> None:
    tokens, results = run(engine())
    for number, result in results.items():
        for sample, own in enumerate(result.samples):
            told = [(token, logprob) for of, token, logprob in tokens[number] if of == sample]
            assert [token for token, _ in told] == own.tokens.tolist()
            assert [logprob for _, logprob in told] == own.logprobs.tolist()


def test_a_listener_is_not_told_again_what_it_has_heard_of_a_replica_that_was_lost() -> None:
    heard: list[tuple[int, int, float]] = []
    batch: Any = None
    job = _Job(0, "a", asked(0), lambda *token: heard.append(token), None, Needs(2), batch)
    drawn = [(0, 7, -1.0), (1, 8, -2.0), (0, 9, -3.0), (1, 10, -4.0), (0, 11, -5.0)]
    job.tell(drawn[:3])
    job.again = dict(job.heard)  # the replica is lost here
    job.tell(drawn[:2])
    job.tell(drawn[2:])
    assert heard == drawn and job.heard == {0: 3, 1: 2}
