"""Sample requests: accepted, cancelled, or waited for in place. They are in memory only.

A client sends a lost request again, and gets the same samples. `sampling_sessions` makes the samplers.
"""

from __future__ import annotations

import hashlib
import threading
import time
import uuid
from collections.abc import Callable
from weakref import WeakValueDictionary

import mint.wire as wire
from mint.errors import (
    ConflictError,
    ConnectionLostError,
    InvalidRequestError,
    MintError,
    MissingExtraError,
    OverloadedError,
    RequestCancelledError,
    from_wire,
)
from mint.server.callers import Caller
from mint.server.ids import RequestId, request_id, session_of
from mint.server.queue.futures import FutureResult, Futures
from mint.server.queue.jobs import QueuedSample
from mint.server.queue.queue import RequestQueue
from mint.server.service.request_reader import RequestReader
from mint.server.service.sample_deaths import SampleDeaths
from mint.server.service.sampling_sessions import SamplingSessions
from mint.server.service.sessions import Sessions
from mint.server.store.rows import SamplerRow
from mint.types import SampleResponse, SamplingParams, UntypedPromise
from mint.types.sampling import LogprobsMode
from mint.wire.requests import CancelFutureRequest, SampleRequest

MAX_SAMPLE_SEQ_ID = 2**63 - 1
MAX_SEQUENCE_IDS = 65_536


class SamplingRequests:
    """The sample requests of one service. Any thread may call; coroutines run on any event loop."""

    def __init__(
        self,
        reader: RequestReader,
        queue: RequestQueue,
        futures: Futures,
        sessions: Sessions,
        sampling_sessions: SamplingSessions,
        deaths: SampleDeaths,
        *,
        logprobs_mode: LogprobsMode = "raw",
    ) -> None:
        """A request during which the process died before, by `deaths`, runs alone or fails. `logprobs_mode` is that of
        requests that name none, by callers whose key names none."""
        self._reader = reader
        self._queue = queue
        self._futures = futures
        self._sessions = sessions
        self._sampling_sessions = sampling_sessions
        self._deaths = deaths
        self._logprobs_mode: LogprobsMode = logprobs_mode
        self._cancels: WeakValueDictionary[str, threading.Event] = WeakValueDictionary()  # alive while the sample is
        self._accepting = threading.Lock()  # of its own, so that samples never wait for the database

    def accept(self, caller: Caller, body: bytes) -> UntypedPromise:
        """Accepts a sample request. It is not journaled: clients send a lost one again, and get the same samples.

        Raises:
            InvalidRequestError: not even its sampler and number can be read.
            ConflictError: its number is taken by another request.
            OverloadedError: too much of this owner, or of all owners, waits already.
        """
        sampler, number, count, request = self._reader.read_sample(body)
        row = self._sampling_sessions.require(caller, sampler)
        if not 0 <= number <= MAX_SAMPLE_SEQ_ID:
            remedy = "Count from 0, below 2**63"
            raise InvalidRequestError("is not a request's number", field="seq_id", value=number, remedy=remedy)
        name = request_id(sampler, number)
        fingerprint = hashlib.sha256(body).hexdigest()
        if isinstance(request, SampleRequest):
            request = self._prepared(self._with_logprobs_mode(request, caller), caller, row)
        request = self._deaths.failure(name) or request
        with self._accepting:
            known = self._futures.fingerprint(name)
            if known is None and isinstance(request, SampleRequest):
                self._cancels[name] = cancelled = threading.Event()
                sample = QueuedSample(
                    name,
                    request,
                    time.monotonic(),
                    caller.owner,
                    len(body),
                    cancelled=cancelled,
                    runs_alone=self._deaths.has(name),
                )
                self._enqueue(caller, sample, fingerprint)
            elif known is None and isinstance(request, MintError):
                # As a result, not as a refusal: the client has used up this number, and waits for its future.
                self._futures.open(name, fingerprint, owner=caller.owner)
                self._futures.finish({name: FutureResult.of_error(request)})
            elif known != fingerprint:
                raise ConflictError("was used before by another request", field="seq_id", value=number)
        # clients insist on one id for each sample, even of a request that will fail
        count = min(max(count, 0), MAX_SEQUENCE_IDS)
        return UntypedPromise(request_id=name, sample_sequence_ids=[f"{name}-{index}" for index in range(count)])

    def prepare(self, caller: Caller, weights: SamplerRow, params: SamplingParams) -> None:
        """Checks the grammar of requests with these parameters, and compiles it; slow.

        Raises:
            InvalidRequestError: it cannot be compiled, or takes too much.
            MissingExtraError: llguidance is not installed.
            OverloadedError: too many grammars of the caller wait.
        """
        self._sampling_sessions.prepare(caller, weights, params)

    async def sample_now(
        self,
        caller: Caller,
        weights: SamplerRow,
        request: SampleRequest,
        *,
        cancelled: threading.Event,
        on_token: Callable[[int, int, float], None] | None = None,
    ) -> SampleResponse:
        """Samples from weights that the caller may read, without a session, in the same batch as all other samples.

        Call `prepare` before.

        Raises:
            MintError: what the request failed with; `OverloadedError` if too many wait.
        """
        name = f"now:{uuid.uuid4().hex}"
        sample = QueuedSample(
            name,
            request,
            time.monotonic(),
            caller.owner,
            8 * request.prompt.length,
            on_token=on_token,
            cancelled=cancelled,
            # weights published without a name may be dropped while the request waits: the worker looks them up itself
            weights=None if weights.file is not None else weights,
        )
        self._enqueue(caller, sample)
        try:
            result = await self._futures.wait(name, None)
        finally:  # also when the caller is cancelled: nobody else knows the name of this request
            if self._queue.take_samples([name]):
                self._futures.abandon(name)
            self._futures.forget(name)
        if result is None:
            raise ConnectionLostError("the server stops before the request is done", remedy="Send it again later")
        if result.failed:
            raise from_wire(wire.decode_error(result.body) or {})
        return wire.decode_result(SampleResponse, result.body)

    def cancel(self, caller: Caller, body: bytes) -> None:
        """Cancels a sample request: it leaves the queue or the engine, and its future fails.

        Training requests keep their place in the order, and nothing happens to them.
        """
        name = wire.decode(CancelFutureRequest, body).request_id
        parsed = RequestId.parse(name)
        if parsed is None or not parsed.is_sample:
            return
        self._sessions.require(session_of(parsed.target_id), caller.owner)
        self._queue.take_samples([name])
        event = self._cancels.get(name)
        if event is not None:
            event.set()
        error = RequestCancelledError("the request was cancelled by its client", request_id=name)
        self._futures.finish({name: FutureResult.of_error(error)})

    def _prepared(self, request: SampleRequest, caller: Caller, row: SamplerRow) -> SampleRequest | MintError:
        """The request, or the error with which it fails."""
        try:
            self._sampling_sessions.prepare(caller, row, request.sampling_params)
        except (InvalidRequestError, MissingExtraError) as error:
            return error
        return request

    def _with_logprobs_mode(self, request: SampleRequest, caller: Caller) -> SampleRequest:
        """The request with the mode that its caller's key or this server gives to requests that name none."""
        params = request.sampling_params
        if "logprobs_mode" in params.model_fields_set:
            return request
        mode = caller.logprobs_mode or self._logprobs_mode
        if mode == params.logprobs_mode:
            return request
        return request.model_copy(update={"sampling_params": params.model_copy(update={"logprobs_mode": mode})})

    def _enqueue(self, caller: Caller, sample: QueuedSample, fingerprint: str = "") -> None:
        # Opened before it is queued: the worker may finish it at once, and drops results that nobody expects.
        self._futures.open(sample.request_id, fingerprint, owner=caller.owner)
        try:
            self._queue.add_sample(sample, max_requests=caller.quotas.max_waiting_requests)
        except OverloadedError:
            self._futures.abandon(sample.request_id)
            raise
