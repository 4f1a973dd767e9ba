"""Sampling sessions: what a new sampler samples from (a checkpoint or a base model), and the root of its seeds.

Samplers of weights that a model publishes are made by the worker.
"""

from __future__ import annotations

import secrets
import threading
from pathlib import Path

import mint.wire as wire
from mint.errors import ConflictError, InvalidRequestError
from mint.models.fingerprint import BASE_FINGERPRINT
from mint.server.callers import Caller
from mint.server.disk_space import DiskSpace
from mint.server.grammars.compiler import compile_grammar
from mint.server.grammars.trial import try_grammar
from mint.server.ids import sampler_id, seed_root, session_of
from mint.server.journal_use import JournalUse
from mint.server.service.sessions import Sessions
from mint.server.store.checkpoint_folders import read_manifest
from mint.server.store.checkpoints import find_checkpoint
from mint.server.store.journal import Journal
from mint.server.store.rows import SamplerRow
from mint.server.worker.base_models import BaseModels
from mint.server.worker.samplers import Samplers
from mint.types import CreateSamplingSessionResponse, SamplerInfo, SamplingParams
from mint.wire.requests import CreateSamplingSessionRequest, JoinSamplingSessionRequest
from mint.wire.responses import JoinSamplingSessionResponse

MAX_CLONES = 2**32
"""A clone's number times `CLONE_SEQ_IDS` must fit 63 bits."""


class SamplingSessions:
    """The samplers that clients of one service have made. Any thread may call."""

    def __init__(
        self,
        journal: Journal,
        data_dir: Path,
        sessions: Sessions,
        samplers: Samplers,
        base_models: BaseModels,
        disk: DiskSpace,
        journal_use: JournalUse,
        accepting: threading.RLock,
    ) -> None:
        """New samplers are accepted under `accepting`."""
        self._journal = journal
        self._data_dir = data_dir
        self._sessions = sessions
        self._samplers = samplers
        self._base_models = base_models
        self._disk = disk
        self._journal_use = journal_use
        self._accepting = accepting

    def require(self, caller: Caller, name: str) -> SamplerRow:
        """The row of a sampler of the caller.

        Raises:
            NotFoundError, SessionEndedError: there is no such sampler.
        """
        self._sessions.require(session_of(name), caller.owner)
        return self._samplers.row(name)

    def create(self, caller: Caller, body: bytes) -> CreateSamplingSessionResponse:
        """A sampler over a base model or over a checkpoint.

        Raises:
            OverloadedError: the sampler is new, and the disk is filled up to the reserve.
            QuotaExceededError: the sampler is new, and the caller's room in the journal is used up.
            NotFoundError, SessionEndedError, InvalidRequestError: it cannot be made.
            ConflictError: its number is taken by another one.
        """
        request = wire.decode(CreateSamplingSessionRequest, body)
        with self._accepting:
            session_id = self._sessions.require_or_open(request.session_id, caller)
            request = request.model_copy(update={"session_id": session_id})
            name = sampler_id(session_id, request.sampling_session_seq_id)
            existing = self._journal.sampler(name)
            if existing is None:
                self._disk.require_free_space()
                row = self._new_row(name, request, reader=caller.owner)
                self._journal_use.add_record(caller.owner, 0, caller.quotas.max_journal_bytes)
                self._journal.add_sampler(row)
            elif existing.model_path != request.model_path or not self._is_same_base(request, existing.base_model):
                raise ConflictError(
                    "was used before by another request",
                    field="sampling_session_seq_id",
                    value=request.sampling_session_seq_id,
                    remedy="Count upwards by one for every new sampler",
                )
            commit = self._journal.durability.newest_commit  # for a repeated request, too
        # Outside of the lock: samplers that are made meanwhile share the next fsync.
        self._journal.durability.wait_durable(commit)
        return CreateSamplingSessionResponse(sampling_session_id=name)

    def prepare(self, caller: Caller, row: SamplerRow, params: SamplingParams) -> None:
        """Tries out the grammar of a request to the sampler, and compiles it, so that the engine need not wait for it.

        Raises:
            InvalidRequestError: it cannot be compiled, or takes too much.
            MissingExtraError: llguidance is not installed.
            OverloadedError: too many grammars of the caller wait.
        """
        wanted = params.structured_outputs
        if wanted is None:
            return
        folder = self._base_models.folder(row.base_model)
        try_grammar(wanted, folder, owner=caller.owner)
        base = self._base_models.loaded(row.base_model)
        if base is not None:
            compile_grammar(wanted, folder, base.eos_token_ids, base.vocab_size, owner=caller.owner)

    def info(self, caller: Caller, name: str) -> SamplerInfo:
        """What a sampler samples from."""
        row = self.require(caller, name)
        folder = str(self._base_models.folder(row.base_model))
        return SamplerInfo(sampler_id=name, base_model=row.base_model, model_path=row.model_path, tokenizer_id=folder)

    def join(self, caller: Caller, body: bytes) -> JoinSamplingSessionResponse:
        """A number for one more client of a sampler, which no other client has; the first client's is 0."""
        self.require(caller, wire.decode(JoinSamplingSessionRequest, body).sampling_session_id)
        return JoinSamplingSessionResponse(client_counter=1 + secrets.randbelow(MAX_CLONES))

    def _new_row(self, name: str, request: CreateSamplingSessionRequest, *, reader: str) -> SamplerRow:
        """The row of the sampler that a request asks for.

        Raises:
            InvalidRequestError: it names neither a checkpoint nor a base model, or two that do not fit.
            NotFoundError: there is no such checkpoint that `reader` may read.
            CheckpointError: the base model is loaded, and has other weights than when the checkpoint was trained. If it
                is not loaded yet, the first sample says so.
            UnknownBaseModelError: there is no such base model.
        """
        session_id, number = request.session_id, request.sampling_session_seq_id
        if request.model_path is not None:
            found = find_checkpoint(self._journal, request.model_path, reader=reader)
            manifest = read_manifest(self._data_dir / found.folder)
            if not self._is_same_base(request, manifest.base_model):
                raise InvalidRequestError(
                    f"does not fit the checkpoint, which was saved from {manifest.base_model}",
                    field="base_model",
                    value=request.base_model,
                    remedy="Leave it out",
                )
            root = seed_root(manifest.lora["seed"] if manifest.seed_given else None, number)
            base = self._base_models.recorded_name(manifest.base_model)
            info = self._base_models.loaded(base)
            if info is not None:
                manifest.require_base(str(info.settings[BASE_FINGERPRINT]))
            path = request.model_path
            return SamplerRow(name, session_id, base, path, found.folder, None, manifest.lora, root)
        if request.base_model is None:
            raise InvalidRequestError(
                "is missing", field="model_path", value="(none)", remedy="Give model_path or base_model"
            )
        base = self._base_models.require(request.base_model)
        # the seed of the first model of the session that was given one
        models = self._journal.models_of(session_id)
        seeds = [row.lora["seed"] for row in models if row.seed_given is True and row.lora is not None]
        root = seed_root(seeds[0] if seeds else None, number)
        return SamplerRow(name, session_id, base, None, None, None, None, root)

    def _is_same_base(self, request: CreateSamplingSessionRequest, base_model: str) -> bool:
        """Whether a request names this base model, in any spelling of its path, or none."""
        if request.base_model in (None, base_model):
            return True
        return self._base_models.recorded_name(request.base_model) == self._base_models.recorded_name(base_model)
