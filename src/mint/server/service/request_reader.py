"""Reads the bodies of requests that carry data, and writes results as JSON.

A training request gets the row of the journal from which a later process can read it again. Knows no journal.
"""

from __future__ import annotations

from contextlib import suppress

from pydantic import BaseModel

import mint.wire as wire
from mint.errors import InvalidRequestError, MintError
from mint.server.ids import model_id
from mint.server.store.rows import JobRow, payload_sha256, with_message_sha256
from mint.types import ForwardBackwardOutput, SampleResponse
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


class RequestReader:
    """Reads in this process. Any thread may call."""

    def read_training(self, route: str, body: bytes, encoding: wire.Encoding) -> tuple[JobRow, BaseModel | MintError]:
        """The journal row for the body of a training request, and the request (or why it cannot be decoded).

        The model and the place in its order are read even from a body that is otherwise wrong: the client has used up
        that number, so the request must take its place and fail there.

        Raises:
            InvalidRequestError: not even the model and the place can be read.
        """
        request: BaseModel | MintError
        try:
            request = wire.decode(REQUESTS[route], body, encoding)
        except InvalidRequestError as error:
            if encoding is wire.Encoding.PROTO and route != "forward_backward":
                raise  # only forward_backward has a protobuf form whose place could be read
            request = error
        owner, place = _model_and_place(route, body, encoding, request)
        # a pass without a gradient has a kind of its own: its failure does not spoil the gradient
        forward_only = isinstance(request, ForwardBackwardRequest) and request.forward_only
        kind = "forward_only" if forward_only else route
        # With the kind, because two routes may get the same bytes.
        sha256 = payload_sha256(kind, body)
        if encoding is wire.Encoding.PROTO and not isinstance(request, MintError):
            with suppress(InvalidRequestError):  # it holds a value that mint does not write, and will fail for it
                sha256 = with_message_sha256(sha256, wire.encode(request, encoding))
        return JobRow(owner, place, kind, body, sha256, encoding=encoding.value), request

    def decode(self, kind: str, body: bytes, encoding: wire.Encoding) -> BaseModel | MintError:
        """The request in an accepted body; a wrong body gives the error with which its job fails in its turn."""
        try:
            return wire.decode(REQUESTS[kind], body, encoding)
        except InvalidRequestError as error:
            return error

    def is_repeat(self, existing: JobRow, row: JobRow, request: BaseModel | MintError) -> bool:
        """Whether a request is the one that already has its place: the same bytes, or the same message in other
        bytes.

        Raises:
            DamagedDataError: the row of the other request is damaged.
        """
        if existing.kind == "missing" or existing.sha256 == row.sha256:
            return True
        existing.verify()
        if existing.kind != row.kind or isinstance(request, MintError):
            return False
        if existing.payload is None:  # pruned
            return existing.message_sha256 is not None and existing.message_sha256 == row.message_sha256
        known = self.decode(existing.kind, existing.payload, wire.Encoding(existing.encoding))
        return not isinstance(known, MintError) and wire.is_same(known, request)

    def read_sample(self, body: bytes) -> tuple[str, int, int, SampleRequest | InvalidRequestError]:
        """The sampler, the number and the count of samples that a body asks for, and the request (or why it is wrong).

        As `read_training`, also reads them from a body that is otherwise wrong.

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

    def result_as_json(self, body: bytes, kind: type[ForwardBackwardOutput] | type[SampleResponse]) -> bytes:
        """A stored result of this kind for a client that reads only JSON."""
        return wire.result_as_json(body, kind)

    def close(self) -> None:
        """Ends what was started for reading."""


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
