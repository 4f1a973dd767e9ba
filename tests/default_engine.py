"""The engine of a test's service, fake or torch's. With `--cluster local` it is a cluster on this machine: the same
tests then run on two ranks, which are real processes of Ray and do every request. A process that a test has forked has
no ranks: it cannot speak with its parent's Ray.

A new service gets a cluster without models: one whose service is gone, or else another one.
"""

from __future__ import annotations

import gc
import os
import weakref
from collections import defaultdict
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

import pytest

from mint.engine.fake_engine import FakeEngine

if TYPE_CHECKING:
    from mint.cluster.engine import ClusterEngine

RANKS = 2
KEPT = 3
"""Clusters that wait for a service, in all: the processes of one take up to a gigabyte."""

MICRO_BATCH_ROWS = 1024

_cluster_process: list[int] = []
"""The process whose engines are clusters, if there is one."""

_free: defaultdict[str, list[ClusterEngine]] = defaultdict(list)


def use_clusters() -> None:
    """From now on, the engines are clusters. Called before ray is imported."""
    from mint.config import prepare_ray  # deferred: most runs need none of it

    prepare_ray()
    _cluster_process[:] = [os.getpid()]


def uses_clusters() -> bool:
    """Whether engines are clusters, whose replicas sample in processes of their own."""
    return _cluster_process == [os.getpid()]


def in_one_process(what: str) -> pytest.MarkDecorator:
    """Leaves a test out where engines are clusters: `what` it does to the engine, or to the service's thread, does not
    reach the processes that sample."""
    return pytest.mark.skipif(uses_clusters(), reason=f"{what} in this process, and replicas sample in others")


class _Sampling(FakeEngine):
    """What samples for ranks; the engine of a cluster has counters."""

    def sampling_counters(self) -> dict[str, int]:
        """None."""
        return {}

    def kv_pages(self) -> dict[str, int]:
        """None."""
        return {}


def fake_engine() -> Any:
    """An engine that holds hash chains instead of models."""
    if not uses_clusters():
        return FakeEngine()
    return _cluster("fake", partial(_Sampling, lanes=2), lambda _peers: FakeEngine())


def torch_engine(**settings: Any) -> Any:
    """torch's engine with these settings, which must have no paths or functions."""
    from mint.engine.torch_engine import TorchEngine  # deferred: torch takes seconds to import

    if not uses_clusters():
        return TorchEngine(**settings)
    given = {"device": "cpu", "micro_batch_rows": MICRO_BATCH_ROWS, **settings}

    def open_rank(peers: Any) -> Any:  # sent by value: ranks cannot import this module
        return TorchEngine(peers=peers, **given)

    return _cluster(repr(sorted(given.items())), lambda: TorchEngine(**given), open_rank)


class _Lent:
    """A cluster that one service uses. It is free again once nothing refers to this object any more."""

    def __init__(self, kind: str, engine: ClusterEngine) -> None:
        self._engine = engine
        weakref.finalize(self, _free[kind].append, engine)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    def close(self) -> None:
        """Does nothing: the ranks wait for the next service."""


def _close_idle(most: int) -> None:
    """Ends clusters that no service uses, until there are no more than `most`."""
    while sum(map(len, _free.values())) > most:
        next(engines for engines in _free.values() if engines).pop(0).close()


def _cluster(kind: str, open_own: Callable[[], Any], open_rank: Callable[[Any], Any]) -> Any:
    from mint.cluster.engine import ClusterEngine  # deferred: ray takes seconds to import
    from mint.cluster.local_sampling import LocalSampling

    own = open_own()
    if not _free[kind]:
        gc.collect()  # a service and its threads refer to each other
    if not _free[kind]:
        _close_idle(KEPT - 1)
        return _Lent(kind, ClusterEngine(own, open_rank, RANKS))
    engine = _free[kind].pop()
    for model_id in list(engine._models):
        engine.drop_model(model_id)
    engine._own, engine._sampling, engine._paths = own, LocalSampling(own), {}
    return _Lent(kind, engine)
