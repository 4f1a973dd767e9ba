"""The operations of training: requests are accepted durably and in their place, models described and let go.

Takes the bytes of a request and returns a message, or raises a `MintError`. What an accepted request does is the
worker's business. Knows no HTTP.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Iterable

from pydantic import BaseModel

import mint.wire as wire
from mint.errors import ConflictError, InvalidRequestError, MintError, NotFoundError, OverloadedError
from mint.server.callers import Caller
from mint.server.ids import model_id, request_id, session_of
from mint.server.queue.futures import Answer, FutureBook
from mint.server.queue.queue import Inbox
from mint.server.service.sessions import Sessions
from mint.server.store.journal import Journal
from mint.server.store.rows import JobRow, ModelRow, RunRow
from mint.server.worker.base_models import Bases
from mint.server.worker.trainer import Trainer, TrainingJob
from mint.types import GetInfoResponse, ModelData, UntypedPromise
from mint.wire.requests import ModelRequest, UnloadModelRequest
from mint.wire.responses import LiveModel, LiveModelsResponse, UnloadModelResponse

MAX_SEQ_ID = 2**31 - 1
UNLOAD = MAX_SEQ_ID + 1
"""The number of a model's last request, beyond all that have a place in its order."""

MAX_AHEAD = 100_000
"""How far beyond its model's next request another may be: no client has so many under way."""

SAVES = frozenset({"save_weights", "save_weights_for_sampler", "save_weights_external"})


class TrainingDesk:
    """Models and training requests of one service."""

    def __init__(
        self,
        journal: Journal,
        sessions: Sessions,
        futures: FutureBook,
        inbox: Inbox,
        trainer: Trainer,
        bases: Bases,
        *,
        run_soon: Callable[[Callable[[], None]], None],
    ) -> None:
        """`run_soon` runs something on the worker's thread, which alone may use the trainer."""
        self._journal = journal
        self._sessions = sessions
        self._futures = futures
        self._inbox = inbox
        self._trainer = trainer
        self._bases = bases
        self._run_soon = run_soon
        self._models: set[str] = set()  # known to exist; a cache of the journal

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
        if encoding is wire.Encoding.PROTO and kind != "forward_backward" and isinstance(request, MintError):
            raise request  # such a body has no place that could be read
        model, place = self._place(kind, body, encoding, request)
        session_id = session_of(model)
        kind = TrainingJob.kind_of(kind, request)
        sha256 = hashlib.sha256(kind.encode() + b"\0" + body).hexdigest()
        row = JobRow(model, place, kind, body, sha256, encoding=encoding.value)
        new_model = run = None
        now = time.time()
        if place == 0:
            self._sessions.require_or_open(session_id, caller)
            self._require_room_for_model(caller, model)
            metadata = getattr(request, "user_metadata", None)
            new_model = ModelRow(model, session_id)
            run = RunRow(model, session_id, caller.owner, now, now, user_metadata=metadata)
        else:
            self._sessions.require(session_id, caller.owner)
            self._require_model(model)
            self._require_near(model, place)
        self._require_room(caller, row)
        if kind in SAVES:
            request = self._refusal_of_save(caller) or request
        existing = self._journal.add_job(row, now=now, model=new_model, run=run)
        commit = self._journal.durability.newest_commit
        if existing is None:
            self.enqueue(row, request, owner=caller.owner, commit=commit)
        elif not _is_repeat(existing, row, request):
            raise ConflictError(
                f"was used before by another request ({existing.kind}) of {model}",
                field="seq_id" if place else "model_seq_id",
                value=place,
                remedy="Count upwards by one for every new request; send a repeated one unchanged",
            )
        self._journal.durability.wait_durable(commit)
        return UntypedPromise(request_id=request_id(model, place), model_id=model)

    def enqueue(self, row: JobRow, request: BaseModel | MintError, *, owner: str, commit: int = 0) -> None:
        """Puts a request that the journal has into the queue; `request` may be the error that it shall end in.

        `commit` is the journal's commit that accepted it, 0 for one of an earlier process.
        """
        job = TrainingJob(row.model_id, row.seq_id, row.kind, request, time.monotonic(), commit)
        self._futures.open(request_id(row.model_id, row.seq_id))
        next_seq = self._next_seq(row.model_id)
        self._inbox.add_training(job, next_seq=next_seq, owner=owner, size_bytes=len(row.payload or b""))

    def forget(self, models: Iterable[str]) -> None:
        """These models are gone."""
        self._models.difference_update(models)

    def get_info(self, caller: Caller, body: bytes) -> GetInfoResponse:
        """What a model is, and what took effect."""
        name = wire.decode(ModelRequest, body).model_id
        self._sessions.require(session_of(name), caller.owner)
        row = self._journal.model(name)
        if row is None or row.base_model is None or row.lora is None:
            raise NotFoundError("is not a model here", field="model_id", value=name, remedy="Create one first")
        effective = row.effective or {}
        folder = str(self._bases.folder(row.base_model))
        arch = str(effective.get("arch", "qwen3"))
        return GetInfoResponse(
            model_id=name,
            model_data=ModelData(model_name=row.base_model, tokenizer_id=folder, arch=arch),
            lora_rank=row.lora["rank"],
            model_name=row.base_model,
            effective=effective,
        )

    def live_models(self, caller: Caller) -> LiveModelsResponse:
        """The caller's models, oldest first."""
        rows = [row for session_id in self._sessions.of(caller.owner) for row in self._journal.models_of(session_id)]
        return LiveModelsResponse(
            models=[
                LiveModel(
                    model_id=row.model_id,
                    session_id=row.session_id,
                    base_model=row.base_model,
                    lora_rank=None if row.lora is None else row.lora["rank"],
                )
                for row in rows
            ]
        )

    def unload(self, caller: Caller, body: bytes) -> UntypedPromise:
        """Lets a model go at once, with all that waits for it. Its checkpoints and samplers stay.

        Raises:
            NotFoundError, SessionEndedError: there is no such model (any more).
        """
        name = wire.decode(UnloadModelRequest, body).model_id
        self._sessions.require(session_of(name), caller.owner)
        promise = UntypedPromise(request_id=request_id(name, UNLOAD), model_id=name)
        if self._futures.fingerprint(promise.request_id) is not None:
            return promise
        self._require_model(name)
        self.forget([name])
        self._inbox.drop_models([name])
        files = tuple(self._journal.end_model(name, time.time()))
        error = NotFoundError("was unloaded", field="model_id", value=name, remedy="Create another one")
        gone = Answer(wire.encode_error(error), failed=True)
        self._futures.finish(dict.fromkeys(self._futures.open_of(name), gone))
        self._futures.open(promise.request_id)
        self._futures.finish({promise.request_id: Answer(wire.encode(UnloadModelResponse(model_id=name)))})

        def let_go() -> None:
            self._trainer.forget(name)
            self._trainer.discard(files)

        self._run_soon(let_go)
        return promise

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
        if self._journal.model(name) is None:
            raise NotFoundError("is not a model here", field="model_id", value=name, remedy="Create one first")
        self._models.add(name)

    def _require_near(self, name: str, place: int) -> None:
        """That the requests before this one can still come: all of them would have to be waited for."""
        expected = self._next_seq(name)
        if place > expected + MAX_AHEAD:
            raise InvalidRequestError(
                f"is far beyond the next request of {name}, which is {expected}",
                field="seq_id",
                value=place,
                remedy="Count upwards by one for every new request",
            )

    def _require_room_for_model(self, caller: Caller, name: str) -> None:
        """That a model may be made: under a name that was not used before, and within the caller's quota."""
        run = self._journal.run(name)
        if run is not None and run.ended_at is not None:
            remedy = "Make the next one under another number"
            raise NotFoundError("was unloaded", field="model_id", value=name, remedy=remedy)
        limit = caller.quotas.max_models
        if limit is None or run is not None:
            return
        used = len(self.live_models(caller).models)
        if used >= limit:
            raise OverloadedError(
                f"{limit} models may live at once, and so many do",
                field="max_models",
                value=used + 1,
                remedy="Unload one or close its ServiceClient, or ask the operator for more",
            )

    def _require_room(self, caller: Caller, row: JobRow) -> None:
        """That the request may wait: the one that runs next always may, so that a full queue cannot stand still."""
        try:
            bound = caller.quotas.max_waiting_requests
            self._inbox.require_room(caller.owner, len(row.payload or b""), max_requests=bound)
        except OverloadedError:
            if row.seq_id != self._next_seq(row.model_id) and self._journal.job(row.model_id, row.seq_id) is None:
                raise

    def _next_seq(self, name: str) -> int:
        known = self._inbox.next_seq(name)
        if known is not None:
            return known
        model = self._journal.model(name)
        return 0 if model is None else model.applied_seq + 1

    def _refusal_of_save(self, caller: Caller) -> MintError | None:
        """Why nothing more may be saved, if so: its place is taken all the same, and its future says it."""
        limit = caller.quotas.max_checkpoint_bytes
        used = 0 if limit is None else self._journal.checkpoint_bytes(caller.owner)
        if limit is None or used < limit:
            return None
        return InvalidRequestError(
            f"is the quota of bytes in checkpoints, and {used} are used",
            field="max_checkpoint_bytes",
            value=limit,
            remedy="Delete checkpoints that are not needed (mint checkpoints delete), or ask the operator for more",
        )


def _is_repeat(existing: JobRow, row: JobRow, request: BaseModel | MintError) -> bool:
    """Whether a request is the one that has its place: the same bytes, or the same message written differently."""
    if existing.kind == "missing" or existing.sha256 == row.sha256:
        return True
    if existing.kind != row.kind or isinstance(request, MintError):
        return False
    if existing.payload is None:  # pruned: one protobuf message has many spellings, one of JSON does not
        return existing.encoding == row.encoding == wire.Encoding.PROTO.value
    known = TrainingJob.decode(existing.kind, existing.payload, wire.Encoding(existing.encoding))
    return not isinstance(known, MintError) and wire.is_same(known, request)


def _pair(request: BaseModel, name: str, number: str) -> tuple[str, int] | None:
    owner, place = getattr(request, name, None), getattr(request, number, None)
    return (owner, place) if isinstance(owner, str) and isinstance(place, int) else None
