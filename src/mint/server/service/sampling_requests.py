"""The operations of sampling: samplers are made and described, sample requests accepted and called off.

Takes the bytes of a request and returns a message, or raises a `MintError`. What becomes of an accepted request is the
worker's business. Knows no HTTP.
"""

from __future__ import annotations

import hashlib
import secrets
import threading
import time
import uuid
from collections.abc import Callable
from pathlib import Path
from weakref import WeakValueDictionary

import mint.wire as wire
from mint.errors import (
    ConflictError,
    ConnectionLostError,
    InvalidRequestError,
    OverloadedError,
    RequestCancelledError,
    from_wire,
)
from mint.server.callers import Caller
from mint.server.ids import RequestName, request_id, sampler_id, seed_root, session_of
from mint.server.queue.futures import Answer, FutureBook
from mint.server.queue.queue import Inbox
from mint.server.service.sessions import Sessions
from mint.server.store import checkpoints
from mint.server.store.journal import Journal
from mint.server.store.rows import SamplerRow
from mint.server.worker.base_models import Bases
from mint.server.worker.samplers import Samplers, SampleWork
from mint.types import CreateSamplingSessionResponse, SampleResponse, SamplerInfo, UntypedPromise
from mint.wire.requests import (
    CancelFutureRequest,
    CreateSamplingSessionRequest,
    JoinSamplingSessionRequest,
    SampleRequest,
)
from mint.wire.responses import JoinSamplingSessionResponse

MAX_SEQUENCE_IDS = 65_536
MAX_SAMPLE_SEQ_ID = 2**63 - 1
MAX_CLONES = 2**32
"""A clone numbers its requests from its own number times 1e9, and the product must fit 63 bits."""


class SamplingDesk:
    """Samplers and sample requests of one service."""

    def __init__(
        self,
        journal: Journal,
        sessions: Sessions,
        futures: FutureBook,
        inbox: Inbox,
        samplers: Samplers,
        bases: Bases,
        data_dir: Path,
    ) -> None:
        self._journal = journal
        self._sessions = sessions
        self._futures = futures
        self._inbox = inbox
        self._samplers = samplers
        self._bases = bases
        self._data_dir = data_dir
        self._cancels: WeakValueDictionary[str, threading.Event] = WeakValueDictionary()  # alive while the work is

    # --- samplers ------------------------------------------------------------------------------------------------

    def create_sampling_session(self, caller: Caller, body: bytes) -> CreateSamplingSessionResponse:
        """A sampler over a base model or over a checkpoint."""
        request = wire.decode(CreateSamplingSessionRequest, body)
        self._sessions.require_or_open(request.session_id, caller)
        name = sampler_id(request.session_id, request.sampling_session_seq_id)
        existing = self._journal.sampler(name)
        if existing is None:
            self._journal.add_sampler(self._sampler_row(caller, name, request))
        elif existing.model_path != request.model_path or request.base_model not in (None, existing.base_model):
            raise ConflictError(
                "was used before by another request",
                field="sampling_session_seq_id",
                value=request.sampling_session_seq_id,
                remedy="Count upwards by one for every new sampler",
            )
        return CreateSamplingSessionResponse(sampling_session_id=name)

    def _sampler_row(self, caller: Caller, name: str, request: CreateSamplingSessionRequest) -> SamplerRow:
        number = request.sampling_session_seq_id
        if request.model_path is not None:
            found = checkpoints.find_checkpoint(self._journal, request.model_path, reader=caller.owner)
            manifest = checkpoints.read_manifest(self._data_dir / found.folder)
            if request.base_model not in (None, manifest.base_model):
                raise InvalidRequestError(
                    f"does not fit the checkpoint, which was saved from {manifest.base_model}",
                    field="base_model",
                    value=request.base_model,
                    remedy="Leave it out",
                )
            root = seed_root(manifest.lora["seed"] if manifest.seed_given else None, number)
            path, base = request.model_path, manifest.base_model
            return SamplerRow(name, request.session_id, base, path, found.folder, None, manifest.lora, root)
        if request.base_model is None:
            raise InvalidRequestError(
                "is missing", field="model_path", value="(none)", remedy="Give model_path or base_model"
            )
        self._bases.folder(request.base_model)
        root = seed_root(self._session_seed(request.session_id), number)
        return SamplerRow(name, request.session_id, request.base_model, None, None, None, None, root)

    def _session_seed(self, session_id: str) -> int | None:
        """The seed of the first model of the session that was given one."""
        rows = self._journal.models_of(session_id)
        return next((row.lora["seed"] for row in rows if row.seed_given is True and row.lora is not None), None)

    def sampler_info(self, caller: Caller, name: str) -> SamplerInfo:
        """What a sampler samples from."""
        self._sessions.require(session_of(name), caller.owner)
        row = self._samplers.row(name)
        folder = str(self._bases.folder(row.base_model))
        return SamplerInfo(sampler_id=name, base_model=row.base_model, model_path=row.model_path, tokenizer_id=folder)

    def join(self, caller: Caller, body: bytes) -> JoinSamplingSessionResponse:
        """A number for a further client of a sampler, which no other has; the first client's is 0."""
        name = wire.decode(JoinSamplingSessionRequest, body).sampling_session_id
        self._sessions.require(session_of(name), caller.owner)
        self._samplers.row(name)
        return JoinSamplingSessionResponse(client_counter=1 + secrets.randbelow(MAX_CLONES))

    # --- requests ------------------------------------------------------------------------------------------------

    def sample(self, caller: Caller, body: bytes) -> UntypedPromise:
        """Accepts a sample request. It is not journaled: a lost one is sent again, and gives the same samples.

        Raises:
            InvalidRequestError: not even whose request it is can be read.
            OverloadedError: too much of this owner, or of everybody, waits already.
        """
        request: SampleRequest | InvalidRequestError
        try:
            request = wire.decode(SampleRequest, body)
            identity = (request.sampling_session_id, request.seq_id)
        except InvalidRequestError as error:
            readable = wire.read_identity(body, "sampling_session_id", "seq_id")
            if readable is None:
                raise
            identity, request = readable, error
        self._sessions.require(session_of(identity[0]), caller.owner)
        self._samplers.row(identity[0])
        if not 0 <= identity[1] <= MAX_SAMPLE_SEQ_ID:
            remedy = "Count from 0, below 2**63"
            raise InvalidRequestError("is not a request's number", field="seq_id", value=identity[1], remedy=remedy)
        name = request_id(*identity)
        fingerprint = hashlib.sha256(body).hexdigest()
        known = self._futures.fingerprint(name)
        if known is None and isinstance(request, SampleRequest):
            event = threading.Event()
            work = SampleWork(name, request, time.monotonic(), cancelled=event, owner=caller.owner)
            self._add(work, caller, len(body), fingerprint)
            self._cancels[name] = event
        elif known is None and isinstance(request, InvalidRequestError):
            self._futures.open(name, fingerprint)
            self._futures.finish({name: Answer(wire.encode_error(request), failed=True)})
        elif known != fingerprint:
            raise ConflictError("was used before by another request", field="seq_id", value=identity[1])
        # clients insist on one id per sample, even of a request that will fail
        asked = wire.read_identity(body, "sampling_session_id", "num_samples")
        count = min(max(1 if asked is None else asked[1], 0), MAX_SEQUENCE_IDS)
        return UntypedPromise(request_id=name, sample_sequence_ids=[f"{name}-{index}" for index in range(count)])

    async def sample_now(
        self,
        caller: Caller,
        weights: SamplerRow,
        request: SampleRequest,
        *,
        cancelled: threading.Event,
        on_token: Callable[[int, int, float], None] | None = None,
    ) -> SampleResponse:
        """Samples from weights that the caller may read, without a session, beside everybody else's samples.

        Raises:
            MintError: what the request failed with; `OverloadedError` where too many wait.
        """
        name = f"now:{uuid.uuid4().hex}"
        # weights published without a name may be pushed out while the request waits: the worker looks them up itself
        known = None if weights.file is not None else weights
        work = SampleWork(name, request, time.monotonic(), on_token, cancelled, known, owner=caller.owner)
        self._add(work, caller, 8 * request.prompt.length, "")
        try:
            answer = await self._futures.wait(name, None)
        finally:
            if self._inbox.take_samples([name]):
                self._futures.abandon(name)
            self._futures.forget(name)
        if answer is None:
            raise ConnectionLostError("the server stops before the request is done", remedy="Send it again later")
        if answer.failed:
            raise from_wire(wire.decode_error(answer.body) or {})
        return wire.decode_result(SampleResponse, answer.body)

    def cancel(self, caller: Caller, body: bytes) -> None:
        """Calls a sample request off: it leaves the queue or the engine, and its future fails.

        Anything else is let be: training requests have their place in the order, and what is done is done.
        """
        name = wire.decode(CancelFutureRequest, body).request_id
        parsed = RequestName.parse(name)
        if parsed is None or not parsed.is_sample:
            return
        self._sessions.require(session_of(parsed.owner), caller.owner)
        self._inbox.take_samples([name])
        event = self._cancels.get(name)
        if event is not None:
            event.set()
        error = RequestCancelledError("the request was called off by its client", request_id=name)
        self._futures.finish({name: Answer(wire.encode_error(error), failed=True)})

    def _add(self, work: SampleWork, caller: Caller, size_bytes: int, fingerprint: str) -> None:
        self._futures.open(work.request_id, fingerprint)
        bound = caller.quotas.max_waiting_requests
        try:
            self._inbox.add_sample(work, owner=caller.owner, size_bytes=size_bytes, max_requests=bound)
        except OverloadedError:
            self._futures.abandon(work.request_id)
            raise
