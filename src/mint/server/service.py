"""The operations of the service: check whose it is, accept it durably, enqueue it, look it up.

Every operation takes the bytes of a request and returns a message, or raises a `MintError`. What an accepted request
does is the worker's business. Knows no HTTP.
"""

from __future__ import annotations

import hashlib
import logging
import re
import shutil
import time
from collections.abc import Mapping
from pathlib import Path

from pydantic import BaseModel

import mint.wire as wire
from mint.engine.protocol import Engine
from mint.errors import (
    ConflictError,
    InvalidRequestError,
    JournalError,
    MintError,
    NotFoundError,
    OverloadedError,
    RequestFailedError,
    SessionEndedError,
)
from mint.server import checkpoints
from mint.server.bases import Bases
from mint.server.callers import Caller
from mint.server.futures import Answer, FutureBook
from mint.server.identities import RequestName, model_id, request_id, sampler_id, seed_root, session_of
from mint.server.inbox import Inbox
from mint.server.instances import Instance
from mint.server.journal import JobRow, Journal, ModelRow, RunRow, SamplerRow
from mint.server.sampling import Samplers, SampleWork
from mint.server.scheduler import GAP_TIMEOUT_S
from mint.server.sessions import STALE_S, Sessions
from mint.server.training import Trainer, TrainingJob
from mint.server.validation import MAX_SAMPLES
from mint.server.worker import Worker
from mint.types import (
    CreateSamplingSessionResponse,
    CreateSessionResponse,
    GetInfoResponse,
    GetServerCapabilitiesResponse,
    ModelData,
    SamplerInfo,
    SupportedModel,
    UntypedPromise,
    WeightsInfoResponse,
)
from mint.wire.requests import (
    CreateSamplingSessionRequest,
    CreateSessionRequest,
    ModelRequest,
    RetrieveFutureRequest,
    SampleRequest,
    SessionRequest,
    WeightsInfoRequest,
)

log = logging.getLogger("mint.service")

LONG_POLL_S = 25.0
MADE_UP_SESSION = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{7,127}", re.ASCII)
MAX_ATTEMPTS = 5
"""A request in whose run the process has died this often is failed instead of being run again."""

MAX_SEQ_ID = 2**31 - 1
ORPHAN_AGE_S = 3600.0


class Service:
    """One data directory, one engine."""

    def __init__(
        self, engine: Engine, data_dir: Path, *, aliases: Mapping[str, str], gap_timeout_s: float = GAP_TIMEOUT_S
    ) -> None:
        """Opens the data directory; `start` begins to work."""
        try:
            data_dir.mkdir(parents=True, exist_ok=True)
            self.instance = Instance(data_dir)
        except OSError as error:
            raise JournalError(f"{data_dir} cannot be used: {error}", remedy="Set MINT_HOME to a folder") from error
        self.data_dir = data_dir
        self.journal = Journal(data_dir / checkpoints.JOURNAL_FILE)
        self.bases = Bases(engine, aliases)
        self.futures = FutureBook()
        self._inbox = Inbox()
        self._sessions = Sessions(self.journal, self.instance.instance_id)
        self._trainer = Trainer(engine, self.journal, self.bases, data_dir)
        self._samplers = Samplers(engine, self.journal, self.bases, data_dir)
        self._models: set[str] = set()  # known to exist; a cache of the journal
        self._worker = Worker(
            self._inbox,
            self.futures,
            self._trainer,
            self._samplers,
            housekeeping=self._housekeeping,
            mark=self.instance.mark,
            gap_timeout_s=gap_timeout_s,
        )

    def start(self) -> None:
        """Takes over what dead processes have left, and begins to work."""
        with self.instance.sole_adopter():
            self._adopt()
            self._sweep_orphans()
        self._worker.start()

    def stop(self) -> None:
        """Ends after the request that is running; what waits stays in the journal for the next process."""
        self._worker.stop()
        self.journal.touch_sessions(self._sessions.last_seen())
        self.journal.close()
        self.instance.close()

    @property
    def is_working(self) -> bool:
        """Whether requests are being worked on."""
        return self._worker.is_alive

    # --- sessions ------------------------------------------------------------------------------------------------

    def create_session(self, caller: Caller, body: bytes) -> CreateSessionResponse:
        """Opens a session."""
        request = wire.decode(CreateSessionRequest, body)
        details = request.model_dump(include={"tags", "sdk_version", "project_id", "display_name"}, exclude_none=True)
        session_id = self._sessions.create(caller.owner, request.user_metadata, details)
        return CreateSessionResponse(session_id=session_id)

    def heartbeat(self, caller: Caller, body: bytes) -> None:
        """Keeps a session alive."""
        self._sessions.require(wire.decode(SessionRequest, body).session_id, caller.owner)

    def finish_session(self, caller: Caller, session_id: str) -> None:
        """Ends a session: its models, futures, published weights and snapshots go; named checkpoints stay."""
        self._sessions.require(session_id, caller.owner)
        self._end_session(session_id)

    def _require_session(self, caller: Caller, session_id: str) -> None:
        """As `Sessions.require`; a session that its client has made up without asking is opened.

        MinT's own scripts for raw HTTP do so. An id that is, or was, in use stays whose it is.
        """
        if MADE_UP_SESSION.fullmatch(session_id) and not self._sessions.is_known(session_id):
            self._sessions.create(caller.owner, None, session_id=session_id)
        self._sessions.require(session_id, caller.owner)

    def _end_session(self, session_id: str) -> None:
        if not self._sessions.end(session_id):
            return
        models = [row.model_id for row in self.journal.models_of(session_id)]
        self._models.difference_update(models)
        self._inbox.drop(models, session_id)
        files = tuple(self.journal.end_session(session_id, time.time()))
        error = SessionEndedError("has ended", field="session_id", value=session_id, remedy="Make a new ServiceClient")
        body = wire.encode_error(error)
        self.futures.finish({name: Answer(body, failed=True) for name in self.futures.open_of(session_id)})

        def let_go() -> None:
            self._samplers.end_session(session_id)
            for name in models:
                self._trainer.forget(name)
            self._trainer.discard(files)

        self._worker.run_soon(let_go)

    # --- training ------------------------------------------------------------------------------------------------

    def submit(
        self, caller: Caller, kind: str, body: bytes, encoding: wire.Encoding = wire.Encoding.JSON
    ) -> UntypedPromise:
        """Accepts a request that changes a model or reads it in its turn; the same one again gets the same promise.

        Raises:
            InvalidRequestError: not even its place in the order can be read.
            ConflictError: its place is taken by another request.
            NotFoundError, SessionEndedError: there is no such model.
        """
        request = TrainingJob.decode(kind, body, encoding)
        model, place = self._place(kind, body, encoding, request)
        session_id = session_of(model)
        kind = TrainingJob.kind_of(kind, request)
        sha256 = hashlib.sha256(kind.encode() + b"\0" + body).hexdigest()
        row = JobRow(model, place, kind, body, sha256, encoding=encoding.value)
        new_model = run = None
        now = time.time()
        if place == 0:
            self._require_session(caller, session_id)
            metadata = getattr(request, "user_metadata", None)
            new_model = ModelRow(model, session_id)
            run = RunRow(model, session_id, caller.owner, now, now, user_metadata=metadata)
        else:
            self._sessions.require(session_id, caller.owner)
            self._require_model(model)
        name = request_id(model, place)
        existing = self.journal.add_job(row, now=now, model=new_model, run=run)
        if existing is None:
            self._enqueue(row, request)
        elif existing.kind != "missing" and existing.sha256 != row.sha256:
            raise ConflictError(
                f"was used before by another request ({existing.kind}) of {model}",
                field="seq_id" if place else "model_seq_id",
                value=place,
                remedy="Count upwards by one for every new request; send a repeated one unchanged",
            )
        return UntypedPromise(request_id=name, model_id=model)

    def get_info(self, caller: Caller, body: bytes) -> GetInfoResponse:
        """What a model is, and what took effect."""
        name = wire.decode(ModelRequest, body).model_id
        self._sessions.require(session_of(name), caller.owner)
        row = self.journal.model(name)
        if row is None or row.base_model is None or row.lora is None:
            raise NotFoundError("is not a model here", field="model_id", value=name, remedy="Create one first")
        effective = row.effective or {}
        folder = str(self.bases.folder(row.base_model))
        arch = str(effective.get("arch", "qwen3"))
        return GetInfoResponse(
            model_id=name,
            model_data=ModelData(model_name=row.base_model, tokenizer_id=folder, arch=arch),
            lora_rank=row.lora["rank"],
            model_name=row.base_model,
            effective=effective,
        )

    def _place(
        self, kind: str, body: bytes, encoding: wire.Encoding, request: BaseModel | MintError
    ) -> tuple[str, int]:
        """The model that a body is for, and its place there; readable even where the rest of the body is wrong."""
        makes_model = kind == "create_model"
        if isinstance(request, MintError):
            identity = None if makes_model else wire.read_identity(body, "model_id", "seq_id", encoding)
            made = wire.read_identity(body, "session_id", "model_seq_id", encoding) if identity is None else None
        else:
            identity = _pair(request, "model_id", "seq_id")
            made = _pair(request, "session_id", "model_seq_id")
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

    def _require_model(self, name: str) -> None:
        if name in self._models:
            return
        if self.journal.model(name) is None:
            raise NotFoundError("is not a model here", field="model_id", value=name, remedy="Create one first")
        self._models.add(name)

    def _enqueue(self, row: JobRow, request: BaseModel | MintError) -> None:
        job = TrainingJob(row.model_id, row.seq_id, row.kind, request, time.monotonic())
        model = self.journal.model(row.model_id)
        self.futures.open(request_id(row.model_id, row.seq_id))
        self._inbox.add_training(job, next_seq=0 if model is None else model.applied_seq + 1)

    # --- sampling ------------------------------------------------------------------------------------------------

    def create_sampling_session(self, caller: Caller, body: bytes) -> CreateSamplingSessionResponse:
        """A sampler over a base model or over a checkpoint."""
        request = wire.decode(CreateSamplingSessionRequest, body)
        self._require_session(caller, request.session_id)
        name = sampler_id(request.session_id, request.sampling_session_seq_id)
        existing = self.journal.sampler(name)
        if existing is None:
            self.journal.add_sampler(self._sampler_row(caller, name, request))
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
            found = checkpoints.find_checkpoint(self.journal, request.model_path, reader=caller.owner)
            manifest = checkpoints.read_manifest(self.data_dir / found.folder)
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
        self.bases.folder(request.base_model)
        root = seed_root(self._session_seed(request.session_id), number)
        return SamplerRow(name, request.session_id, request.base_model, None, None, None, None, root)

    def _session_seed(self, session_id: str) -> int | None:
        """The seed of the first model of the session that was given one."""
        rows = self.journal.models_of(session_id)
        return next((row.lora["seed"] for row in rows if row.seed_given is True and row.lora is not None), None)

    def sampler_info(self, caller: Caller, name: str) -> SamplerInfo:
        """What a sampler samples from."""
        self._sessions.require(session_of(name), caller.owner)
        row = self._samplers.row(name)
        folder = str(self.bases.folder(row.base_model))
        return SamplerInfo(sampler_id=name, base_model=row.base_model, model_path=row.model_path, tokenizer_id=folder)

    def sample(self, caller: Caller, body: bytes) -> UntypedPromise:
        """Accepts a sample request. It is not journaled: a lost one is sent again, and gives the same samples."""
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
        name = request_id(*identity)
        fingerprint = hashlib.sha256(body).hexdigest()
        known = self.futures.fingerprint(name)
        if known is None:
            self.futures.open(name, fingerprint)
            if isinstance(request, InvalidRequestError):
                self.futures.finish({name: Answer(wire.encode_error(request), failed=True)})
            else:
                self._add_sample(SampleWork(name, request, time.monotonic()))
        elif known != fingerprint:
            raise ConflictError("was used before by another request", field="seq_id", value=identity[1])
        count = min(max(request.num_samples, 0), MAX_SAMPLES) if isinstance(request, SampleRequest) else 0
        return UntypedPromise(request_id=name, sample_sequence_ids=[f"{name}-{index}" for index in range(count)])

    def _add_sample(self, work: SampleWork) -> None:
        try:
            self._inbox.add_sample(work)
        except OverloadedError:
            self.futures.abandon(work.request_id)
            raise

    # --- looking up ----------------------------------------------------------------------------------------------

    async def retrieve(self, caller: Caller, body: bytes) -> Answer | None:
        """The answer of an accepted request, as soon as it is there; None if it takes longer than a long poll.

        Raises:
            NotFoundError: no such request; a lost sample request may be sent again.
            SessionEndedError: its session has ended.
        """
        name = wire.decode(RetrieveFutureRequest, body).request_id
        parsed = RequestName.parse(name)
        if parsed is None:
            raise NotFoundError("is not a request here", field="request_id", value=name)
        self._sessions.require(session_of(parsed.owner), caller.owner)
        answer = await self.futures.wait(name, LONG_POLL_S)
        if answer is not None or self.futures.fingerprint(name) is not None:
            return answer
        row = None if parsed.is_sample else self.journal.job(parsed.owner, parsed.number)
        if row is None or row.result is None:
            raise NotFoundError("is not a request here (any more)", field="request_id", value=name)
        return Answer(row.result, failed=row.status == "failed")

    def capabilities(self) -> GetServerCapabilitiesResponse:
        """The base models that can be used by name."""
        models = [
            SupportedModel(model_name=name, max_context_length=self.bases.context_length(name))
            for name in self.bases.names
        ]
        return GetServerCapabilitiesResponse(supported_models=models)

    def weights_info(self, caller: Caller, body: bytes) -> WeightsInfoResponse:
        """What a checkpoint was saved from."""
        path = wire.decode(WeightsInfoRequest, body).tinker_path
        row = checkpoints.find_checkpoint(self.journal, path, reader=caller.owner)
        manifest = checkpoints.read_manifest(self.data_dir / row.folder)
        trained = {key: manifest.lora[key] for key in ("train_unembed", "train_mlp", "train_attn")}
        return WeightsInfoResponse(base_model=manifest.base_model, lora_rank=manifest.lora["rank"], **trained)

    # --- keeping house -------------------------------------------------------------------------------------------

    def _adopt(self) -> None:
        """Takes over the sessions of dead processes, with all that they had accepted and not finished."""
        live = self.journal.live_sessions()
        dead = self.instance.dead_among(row.instance_id for row in live)
        if not dead:
            return
        now = time.time()
        marks = [RequestName.parse(mark) for mark in dead.values()]
        running = [(name.owner, name.number) for name in marks if name is not None and not name.is_sample]
        self.journal.adopt_sessions(list(dead), running=running, instance_id=self.instance.instance_id, now=now)
        self.instance.bury(dead)
        for session in (row for row in live if row.instance_id in dead):
            self._sessions.resume(session.session_id, session.owner)
            if now - session.last_seen > STALE_S:
                self._end_session(session.session_id)
                continue
            for model in self.journal.models_of(session.session_id):
                for job in self.journal.jobs(model.model_id, after=model.applied_seq, status=("pending",)):
                    self._enqueue(job, _adopted_request(job))
        log.info("took over the sessions of %d dead processes", len(dead))

    def _sweep_orphans(self) -> None:
        """Removes files that a death has left between writing and committing; young ones may still be in the making."""
        named = self.journal.named_files()
        limit = time.time() - ORPHAN_AGE_S
        for folder in ("snapshots", "published", "checkpoints"):
            for path in (self.data_dir / folder).glob("*"):
                if str(path.relative_to(self.data_dir)) not in named and path.stat().st_mtime < limit:
                    log.info("orphan %s removed", path)
                    shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)

    def _housekeeping(self) -> None:
        self.journal.touch_sessions(self._sessions.last_seen())
        for session_id in self._sessions.expired():
            log.info("session %s expired", session_id)
            self._end_session(session_id)


def _pair(request: BaseModel, name: str, number: str) -> tuple[str, int] | None:
    owner, place = getattr(request, name, None), getattr(request, number, None)
    return (owner, place) if isinstance(owner, str) and isinstance(place, int) else None


def _adopted_request(row: JobRow) -> BaseModel | MintError:
    """What a dead process had accepted, unless it is what keeps killing processes."""
    if row.attempts < MAX_ATTEMPTS:
        return TrainingJob.decode(row.kind, row.payload or b"", wire.Encoding(row.encoding))
    return RequestFailedError(
        f"the process died {row.attempts} times while it ran this request", remedy="See the server's log"
    )
