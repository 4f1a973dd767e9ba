"""Reads the large bodies of a server's requests, and writes its large results as JSON, in processes beside the server.

To decode a body of JSON is one long call that holds the interpreter's lock, so that a thread does not help: the event
loop would stand still meanwhile. A hostile body takes longest. Any thread may call, and waits for the result.
"""

from __future__ import annotations

import json
import logging
from contextlib import suppress
from queue import SimpleQueue
from typing import Any

from pydantic import BaseModel
from typing_extensions import override  # a dependency of pydantic; in typing from Python 3.12 on

import mint.wire as wire
from mint.errors import InvalidRequestError, MintError
from mint.server.child_process import ChildProcess
from mint.server.service.decoding_process import Reply, decode_request
from mint.server.service.request_reader import REQUESTS, RequestReader
from mint.server.store.rows import JobRow
from mint.types import ForwardBackwardOutput, SampleResponse
from mint.wire.requests import SampleRequest

log = logging.getLogger("mint.wire")

LARGE_JSON_BYTES = 1 << 20
LARGE_PROTO_BYTES = 16 << 20
"""From these sizes on, a body is decoded in another process; parsing protobuf takes a tenth of the time of JSON."""

PROCESSES = 2


class LargeRequestReader(RequestReader):
    """Reads large bodies in up to `processes` others, which start when they are needed, and all else in this one."""

    def __init__(self, processes: int = PROCESSES) -> None:
        self._processes = [DecodingProcess() for _ in range(processes)]
        self._free: SimpleQueue[DecodingProcess] = SimpleQueue()
        for process in self._processes:
            self._free.put(process)

    @property
    def process_ids(self) -> list[int]:
        """The processes that have been started."""
        found = [process.process_id for process in self._processes]
        return [process_id for process_id in found if process_id is not None]

    @override
    def close(self) -> None:
        for process in self._processes:
            process.close()

    @override
    def read_training(self, route: str, body: bytes, encoding: wire.Encoding) -> tuple[JobRow, BaseModel | MintError]:
        if not _is_large(body, encoding):
            return super().read_training(route, body, encoding)
        reply, content = self._run("training", route, encoding, body)
        row = JobRow(**reply.place, payload=body, encoding=encoding.value)
        return row, reply.failure or decode_request(REQUESTS[route], content)

    @override
    def decode(self, kind: str, body: bytes, encoding: wire.Encoding) -> BaseModel | MintError:
        if _is_large(body, encoding):
            # The other process may die of it, or lack memory; but it was accepted, so it can be decoded here.
            with suppress(InvalidRequestError):
                return self.read_training(kind, body, encoding)[1]
        return super().decode(kind, body, encoding)

    @override
    def read_sample(self, body: bytes) -> tuple[str, int, int, SampleRequest | InvalidRequestError]:
        if not _is_large(body, wire.Encoding.JSON):
            return super().read_sample(body)
        reply, content = self._run("sample", "", wire.Encoding.JSON, body)
        request: Any = reply.failure or decode_request(SampleRequest, content)
        return reply.place["sampler"], reply.place["number"], reply.place["count"], request

    @override
    def result_as_json(self, body: bytes, kind: type[ForwardBackwardOutput] | type[SampleResponse]) -> bytes:
        if not _is_large(body, wire.Encoding.JSON):
            return super().result_as_json(body, kind)
        return self._run("result", kind.__name__, wire.Encoding.PROTO, body)[1]

    def _run(self, task: str, name: str, encoding: wire.Encoding, body: bytes) -> tuple[Reply, bytes]:
        process = self._free.get()
        try:
            reply, content = process.run(task, name, encoding, body)
        finally:
            self._free.put(process)
        for warning in reply.warnings:
            log.warning("%s", warning)
        if reply.is_refused and reply.failure is not None:
            raise reply.failure
        return reply, content


def _is_large(body: bytes, encoding: wire.Encoding) -> bool:
    return len(body) >= (LARGE_PROTO_BYTES if encoding is wire.Encoding.PROTO else LARGE_JSON_BYTES)


class DecodingProcess:
    """One such process. One thread at a time may use it."""

    def __init__(self) -> None:
        self._process = ChildProcess("mint.server.service.decoding_process")

    @property
    def process_id(self) -> int | None:
        """Its id; None while there is none."""
        return self._process.process_id

    def run(self, task: str, name: str, encoding: wire.Encoding, body: bytes) -> tuple[Reply, bytes]:
        """Runs `decoding_process.work` there.

        Raises:
            InvalidRequestError: the process dies of this body.
        """
        question = [json.dumps([task, name, encoding.value]).encode(), body]
        for _ in range(2):  # it may have ended by itself just before
            with suppress(EOFError, OSError):
                answer = self._process.ask(question, 2)
                if answer is not None:
                    return Reply.from_bytes(answer[0]), answer[1]
            self.close()
        log.error("the process that decodes large bodies died twice over one of %d bytes", len(body))
        raise InvalidRequestError(
            "cannot be decoded", field="body", value=f"{len(body)} bytes", remedy="Send less data at once"
        )

    def close(self) -> None:
        """Ends the process."""
        self._process.close()
