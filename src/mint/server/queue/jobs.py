"""Requests on their way through the server, as data: training requests in the journal, and sample requests in memory.

A training job can be decoded from its journal row again, so a later process can run it.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

from pydantic import BaseModel

import mint.wire as wire
from mint.errors import InvalidRequestError, MintError
from mint.server.ids import model_id
from mint.server.store.rows import JobRow, SamplerRow, payload_sha256
from mint.wire.requests import (
    CreateModelRequest,
    ForwardBackwardRequest,
    ForwardRequest,
    LoadWeightsRequest,
    OptimStepRequest,
    SampleRequest,
    SaveWeightsExternalRequest,
    SaveWeightsForSamplerRequest,
    SaveWeightsRequest,
)

MAX_SEQ_ID = 2**31 - 1

REQUESTS: dict[str, type[BaseModel]] = {
    "create_model": CreateModelRequest,
    "forward": ForwardRequest,
    "forward_only": ForwardBackwardRequest,
    "forward_backward": ForwardBackwardRequest,
    "optim_step": OptimStepRequest,
    "save_weights": SaveWeightsRequest,
    "save_weights_for_sampler": SaveWeightsForSamplerRequest,
    "save_weights_external": SaveWeightsExternalRequest,
    "load_weights": LoadWeightsRequest,
}
"""Every kind of request that is journaled, and the type of its body."""


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
    runs_alone: bool = False
    """Whether no other sample may run beside it: it may be what a process has died of."""
    told: Counter[int] = field(default_factory=Counter, compare=False)
    """Tokens of each sample that `on_token` has had: when a failed batch is run again, none is passed on twice."""

    @property
    def sequences(self) -> int:
        """How many sequences are sampled for it; at least one, to score its prompt."""
        return max(1, self.request.num_samples)


def decode_request(kind: str, payload: bytes, encoding: wire.Encoding = wire.Encoding.JSON) -> BaseModel | MintError:
    """The request in a body; a wrong body gives the error with which its job fails in its turn."""
    try:
        return wire.decode(REQUESTS[kind], payload, encoding)
    except InvalidRequestError as error:
        return error


Decode = Callable[[str, bytes, wire.Encoding], BaseModel | MintError]
"""Decodes the body of a journaled request, as `decode_request` does."""


def read_training_request(
    route: str, body: bytes, encoding: wire.Encoding = wire.Encoding.JSON
) -> tuple[JobRow, BaseModel | MintError]:
    """The journal row for the body of a training request, and the request (or why it cannot be decoded).

    The model and the place in its order are read even from a body that is otherwise wrong: the client has used up that
    number, so the request must take its place and fail there.

    Raises:
        InvalidRequestError: not even the model and the place can be read.
    """
    request = decode_request(route, body, encoding)
    if encoding is wire.Encoding.PROTO and route != "forward_backward" and isinstance(request, MintError):
        raise request  # only forward_backward has a protobuf form whose place could be read
    owner, place = _model_and_place(route, body, encoding, request)
    # a pass without a gradient has a kind of its own: its failure does not spoil the gradient
    forward_only = isinstance(request, ForwardBackwardRequest) and request.forward_only
    kind = "forward_only" if forward_only else route
    # With the kind, because two routes may get the same bytes.
    sha256 = payload_sha256(kind, body)
    return JobRow(owner, place, kind, body, sha256, encoding=encoding.value), request


def is_repeat(existing: JobRow, row: JobRow, request: BaseModel | MintError, decode: Decode = decode_request) -> bool:
    """Whether a request is the one that already has its place: the same bytes, or the same message in other bytes."""
    if existing.kind == "missing" or existing.sha256 == row.sha256:
        return True
    if existing.kind != row.kind or isinstance(request, MintError):
        return False
    if existing.payload is None:  # pruned: one protobuf message has many spellings, one of JSON does not
        return existing.encoding == row.encoding == wire.Encoding.PROTO.value
    known = decode(existing.kind, existing.payload, wire.Encoding(existing.encoding))
    return not isinstance(known, MintError) and wire.is_same(known, request)


def read_sample_request(body: bytes) -> tuple[str, int, int, SampleRequest | InvalidRequestError]:
    """The sampler, the number and the count of samples that a body asks for, and the request (or why it is wrong).

    As `read_training_request`, also reads them from a body that is otherwise wrong.

    Raises:
        InvalidRequestError: not even the sampler and the number can be read.
    """
    try:
        request = wire.decode(SampleRequest, body)
    except InvalidRequestError as error:
        readable = wire.read_identity(body, "sampling_session_id", "seq_id")
        if readable is None:
            raise
        asked = wire.read_identity(body, "sampling_session_id", "num_samples")
        return *readable, 1 if asked is None else asked[1], error
    return request.sampling_session_id, request.seq_id, request.num_samples, request


def _model_and_place(
    route: str, body: bytes, encoding: wire.Encoding, request: BaseModel | MintError
) -> tuple[str, int]:
    makes_model = route == "create_model"
    if isinstance(request, MintError):
        identity = None if makes_model else wire.read_identity(body, "model_id", "seq_id", encoding)
        made = wire.read_identity(body, "session_id", "model_seq_id", encoding) if identity is None else None
    else:
        model, seq_id = getattr(request, "model_id", None), getattr(request, "seq_id", None)
        session, number = getattr(request, "session_id", None), getattr(request, "model_seq_id", None)
        identity = None if model is None or seq_id is None else (model, seq_id)
        made = None if session is None or number is None else (session, number)
    if identity is not None and 1 <= identity[1] <= MAX_SEQ_ID:
        return identity
    if identity is None and made is not None and 0 <= made[1] <= MAX_SEQ_ID:
        return model_id(*made), 0
    if isinstance(request, MintError):
        raise request
    place = identity or made
    raise InvalidRequestError(
        "is not a place in the order of requests",
        field="model_seq_id" if makes_model else "seq_id",
        value=None if place is None else place[1],
        remedy="Count from 1 (models from 0), below 2**31",
    )
