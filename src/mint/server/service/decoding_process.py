"""The process beside the server that decodes large bodies: `python -m mint.server.service.decoding_process FD`.

It takes tasks from a socket, one after another, and sends back what `Reply` says. It ends with the server, or after
`IDLE_S` without a task, so that its memory is free again. Everything that it sends has been checked, and is cheap to
read. Knows no service.
"""

from __future__ import annotations

import json
import logging
import os
import resource
import sys
from dataclasses import asdict, dataclass, field
from multiprocessing.connection import Connection
from typing import Any

import mint.wire as wire
from mint.errors import InvalidRequestError, MintError, from_wire
from mint.server.child_process import READY
from mint.server.service.request_reader import RequestReader
from mint.types import ForwardBackwardOutput, SampleResponse
from mint.wire.requests import ForwardBackwardRequest, ForwardRequest

IDLE_S = 60.0
MAX_MEMORY_BYTES = 4 << 30

LESS_URGENT = 5
"""How much this process adds to its nice value. One owner's bodies then take at most a quarter of the time of a core
that others need, and the server's event loop, which works in short turns, need not wait until they are decoded."""

RESULTS = {kind.__name__: kind for kind in (ForwardBackwardOutput, SampleResponse)}


@dataclass
class Reply:
    """What became of a body: the place of the request, and either the message or the error.

    `is_refused`: the error was raised, and the request has no place. The message itself follows as bytes.
    """

    place: dict[str, Any] = field(default_factory=dict)
    error: dict[str, Any] | None = None
    is_refused: bool = False
    warnings: list[str] = field(default_factory=list)

    def to_bytes(self) -> bytes:
        """For the socket."""
        return json.dumps(asdict(self)).encode()

    @classmethod
    def from_bytes(cls, content: bytes) -> Reply:
        """What `to_bytes` wrote."""
        return cls(**json.loads(content))

    @property
    def failure(self) -> MintError | None:
        """The error as an exception."""
        return None if self.error is None else from_wire(self.error)


def work(task: str, name: str, encoding: wire.Encoding, body: bytes) -> tuple[Reply, bytes]:
    """One task: `training` and `sample` read a request, `result` writes a stored result as JSON."""
    reader = RequestReader()
    try:
        if task == "result":
            return Reply(), reader.result_as_json(body, RESULTS[name])
        if task == "sample":
            sampler, number, count, request = reader.read_sample(body)
            place: dict[str, Any] = {"sampler": sampler, "number": number, "count": count}
        else:
            row, request = reader.read_training(name, body, encoding)
            place = {"model_id": row.model_id, "seq_id": row.seq_id, "kind": row.kind, "sha256": row.sha256}
    except MintError as error:
        return Reply(error=error.to_wire(), is_refused=True), b""
    except MemoryError:
        return Reply(error=_too_complex(body).to_wire(), is_refused=True), b""
    if isinstance(request, MintError):
        return Reply(place, request.to_wire()), b""
    try:
        return Reply(place), encode_request(request)
    except MintError as error:
        return Reply(place, error.to_wire()), b""


def encode_request(request: Any) -> bytes:
    """A request in the form that `decode_request` reads: that of protobuf for a pass, JSON for the others."""
    if isinstance(request, ForwardRequest):
        request = ForwardBackwardRequest(
            model_id=request.model_id,
            seq_id=request.seq_id,
            forward_backward_input=request.forward_input,
            forward_only=True,
        )
    is_pass = isinstance(request, ForwardBackwardRequest)
    return wire.encode(request, wire.Encoding.PROTO if is_pass else wire.Encoding.JSON)


def decode_request(kind: type[Any], content: bytes) -> Any:
    """The request of this kind that `encode_request` has written."""
    if kind is ForwardRequest:
        found = wire.decode(ForwardBackwardRequest, content, wire.Encoding.PROTO)
        return ForwardRequest(model_id=found.model_id, seq_id=found.seq_id, forward_input=found.forward_backward_input)
    return wire.decode(kind, content, wire.Encoding.PROTO if kind is ForwardBackwardRequest else wire.Encoding.JSON)


def _too_complex(body: bytes) -> InvalidRequestError:
    return InvalidRequestError(
        "takes too much memory to decode", field="body", value=f"{len(body)} bytes", remedy="Send less data at once"
    )


class _Collector(logging.Handler):
    """Keeps warnings for the server's log."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        """Keeps a line."""
        self.lines.append(record.getMessage())


def main(handle: int) -> None:
    """Works until the server ends, or has nothing to do for a while."""
    os.nice(LESS_URGENT)
    resource.setrlimit(resource.RLIMIT_AS, (MAX_MEMORY_BYTES, MAX_MEMORY_BYTES))
    collector = _Collector()
    logging.getLogger("mint").addHandler(collector)
    with Connection(handle) as connection:
        connection.send_bytes(READY)
        while connection.poll(IDLE_S):
            try:
                task, name, encoding = json.loads(connection.recv_bytes())
                body = connection.recv_bytes()
                reply, content = work(task, name, wire.Encoding(encoding), body)
                reply.warnings, collector.lines = collector.lines, []
                connection.send_bytes(reply.to_bytes())
                connection.send_bytes(content)
            except (EOFError, ConnectionError):
                return


if __name__ == "__main__":
    main(int(sys.argv[1]))
