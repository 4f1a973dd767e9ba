"""A cluster on this machine whose ranks have fake engines: the tests of the service run on it with `--cluster local`.

Two ranks are real processes of Ray and do every request; each holds hash chains instead of a model. A new service gets
a cluster without models: one whose service is gone, or else another one. Before it is imported, call `prepare_ray`.
"""

from __future__ import annotations

import weakref
from typing import Any

from mint.cluster.engine import ClusterEngine
from mint.cluster.local_sampling import LocalSampling
from mint.engine.fake_engine import FakeEngine

RANKS = 2

_free: list[ClusterEngine] = []


class _Lent:
    """A cluster that one service uses. It is free again once nothing refers to this object any more."""

    def __init__(self, engine: ClusterEngine) -> None:
        self._engine = engine
        weakref.finalize(self, _free.append, engine)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)


def new_cluster() -> Any:
    """An engine of two ranks, without models."""

    def open_rank(peers: object) -> Any:  # sent by value: ranks cannot import this module
        return FakeEngine()

    own: Any = FakeEngine(lanes=2)
    if not _free:
        return _Lent(ClusterEngine(own, open_rank, RANKS))
    engine = _free.pop()
    for model_id in list(engine._models):
        engine.drop_model(model_id)
    engine._own, engine._sampling, engine._paths = own, LocalSampling(own), {}
    return _Lent(engine)
