"""Requests on their way through the server, as data: training jobs of the journal, and sample requests in memory."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

from pydantic import BaseModel

import mint.wire as wire
from mint.errors import MintError
from mint.server.store.rows import SamplerRow
from mint.wire.requests import SampleRequest

MEMORY_PATIENCE_S = 30.0
"""How long a request is tried again because memory was short, from the first time on; then it fails."""


@dataclass(frozen=True)
class TrainingJob:
    """A training request that the journal has accepted.

    `request` is the decoded body, or the error with which the job fails in its turn. `commit` is the journal's commit
    that accepted it (0: one of an earlier process); its result is sent only after that is durable.
    """

    model_id: str
    seq_id: int
    kind: str
    request: BaseModel | MintError
    arrived_at: float = 0.0  # monotonic seconds
    commit: int = 0
    owner: str = ""
    size_bytes: int = 0


@dataclass(frozen=True)
class QueuedSample:
    """A sample request from its arrival to its result. It is in no journal: clients send a lost one again."""

    request_id: str
    request: SampleRequest
    arrived_at: float
    owner: str = ""
    size_bytes: int = 0
    on_token: Callable[[int, int, float], None] | None = None
    """Called on the worker's thread with (sample, token, logprob) for each token: it must be quick."""
    cancelled: threading.Event | None = None
    """Set by a caller that no longer wants the result; the request then fails and frees its place in the batch."""
    weights: SamplerRow | None = None
    """What to sample from, for requests outside a sampling session."""
    not_before: float = float("-inf")
    """Monotonic seconds; for a request that was put back, because the storage would not let it run."""
    waits_for: str = ""
    """Why it was put back, for its client."""
    runs_alone: bool = False
    """Whether no other sample may run beside it: it may be what a process has died of."""
    told: Counter[int] = field(default_factory=Counter, compare=False)
    """Tokens of each sample that `on_token` has had: when a failed batch is run again, none is passed on twice."""

    @property
    def sequences(self) -> int:
        """How many sequences are sampled for it; at least one, to score its prompt."""
        return max(1, self.request.num_samples)


Decode = Callable[[str, bytes, wire.Encoding], BaseModel | MintError]
"""Decodes the body of a journaled request, as `RequestReader.decode` does."""
