"""What a data directory stores, read and changed as its operator, without an engine, a session or a server.

Needs the `local` extra.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

from mint.client.connection.file_transfers import exists_already
from mint.config import Settings
from mint.engine.bases.lora_layers import lora_layers
from mint.errors import InvalidRequestError, MintError, NotFoundError
from mint.models import registry
from mint.models.folder import context_length
from mint.server.callers import LOCAL_OWNER
from mint.server.ops.ended_sessions import SessionEnd, end_session
from mint.server.private_files import open_data_dir
from mint.server.service.downloads import ARCHIVE, open_file
from mint.server.service.uploads import import_checkpoint
from mint.server.spare_space import SpareSpace
from mint.server.store.checkpoint_catalog import CheckpointCatalog
from mint.server.store.checkpoints import find_checkpoint
from mint.server.store.database import OpenFor
from mint.server.store.journal import JOURNAL_FILE, Journal
from mint.server.store.session_catalog import SessionCatalog
from mint.server.store.training_run_catalog import TrainingRunCatalog
from mint.types import SupportedModel
from mint.types.checkpoint_path import CheckpointPath
from mint.types.records import (
    MAX_PAGE,
    Checkpoint,
    CheckpointsListResponse,
    CopyWeightsRequest,
    GetSessionResponse,
    PageQuery,
    SessionSearchRequest,
    SessionSummary,
    TrainingRun,
    TrainingRunsResponse,
)

OPERATOR = None
"""The owner that catalogs take for the operator, who sees everything."""


class FolderStorage:
    """See `storage.Storage`. Opens the database at the first question, and for writing at the first change."""

    def __init__(self, data_dir: Path, settings: Settings) -> None:
        self._data_dir = data_dir
        self._aliases = settings.model_aliases
        self._opened: dict[OpenFor, Journal] = {}

    def close(self) -> None:
        for journal in self._opened.values():
            journal.close()

    def _journal(self, opened_for: OpenFor) -> Journal:
        if opened_for not in self._opened:
            file = self._data_dir / JOURNAL_FILE
            if not file.is_file():
                remedy = "Set MINT_HOME or pass --data-dir; or set MINT_BASE_URL to ask a server"
                raise NotFoundError("holds no journal", field="data_dir", value=str(self._data_dir), remedy=remedy)
            self._opened[opened_for] = Journal(file, opened_for)
        return self._opened[opened_for]

    @property
    def _runs(self) -> TrainingRunCatalog:
        return TrainingRunCatalog(self._journal(OpenFor.READING), self._data_dir)

    @property
    def _checkpoints(self) -> CheckpointCatalog:
        return CheckpointCatalog(self._journal(OpenFor.READING), self._data_dir)

    @property
    def _changed_checkpoints(self) -> CheckpointCatalog:
        return CheckpointCatalog(self._journal(OpenFor.COMMAND), self._data_dir)

    @property
    def _new_checkpoints(self) -> CheckpointCatalog:
        return CheckpointCatalog(self._journal(OpenFor.SERVICE), self._data_dir)

    @property
    def _sessions(self) -> SessionCatalog:
        return SessionCatalog(self._journal(OpenFor.READING))

    def runs(self, page: PageQuery) -> TrainingRunsResponse:
        return self._runs.runs(OPERATOR, page)

    def run(self, run_id: str) -> TrainingRun:
        return self._runs.run(OPERATOR, run_id)

    def checkpoints(self, page: PageQuery) -> CheckpointsListResponse:
        return self._checkpoints.checkpoints(OPERATOR, page)

    def checkpoints_of(self, run_id: str) -> CheckpointsListResponse:
        found: list[Checkpoint] = []
        offset = 0
        while True:
            page = self._checkpoints.checkpoints_of(OPERATOR, run_id, PageQuery(limit=MAX_PAGE, offset=offset))
            found += page.checkpoints
            if not page.checkpoints or page.cursor is None:
                return CheckpointsListResponse(checkpoints=found)
            offset += page.cursor.limit

    def checkpoint(self, path: str) -> Checkpoint:
        return self._checkpoints.checkpoint(OPERATOR, path)

    def delete(self, path: str) -> None:
        self._changed_checkpoints.delete(OPERATOR, path)

    def publish(self, path: str, *, public: bool) -> None:
        self._changed_checkpoints.publish(OPERATOR, path, public=public)

    def set_ttl(self, path: str, seconds: int | None) -> None:
        self._changed_checkpoints.set_ttl(OPERATOR, path, seconds)

    def copy(self, request: CopyWeightsRequest) -> str:
        return self._new_checkpoints.copy(OPERATOR, request)

    def download(self, path: str, output: Path, *, overwrite: bool) -> Path:
        row = find_checkpoint(self._journal(OpenFor.READING), path, reader=OPERATOR)
        target = output / CheckpointPath(row.model_id, row.kind, row.name).archive_name if output.is_dir() else output
        if not overwrite and target.exists():
            raise exists_already(target)
        _, content = open_file(self._data_dir / row.folder, ARCHIVE)
        _write_whole(target, content)
        return target

    def upload(self, file: Path, base_model: str | None, name: str | None) -> str:
        # no key owns it: it belongs to this machine
        journal = self._journal(OpenFor.SERVICE)
        row = import_checkpoint(
            journal,
            self._data_dir,
            file,
            owner=LOCAL_OWNER,
            base_model=base_model,
            name=name,
            layers_of=lora_layers,
        )
        return CheckpointPath(row.model_id, row.kind, row.name).uri

    def sessions(self, limit: int) -> Sequence[SessionSummary]:
        return self._sessions.search_sessions(OPERATOR, SessionSearchRequest(limit=limit)).sessions

    def session(self, session_id: str) -> GetSessionResponse:
        return self._sessions.session(OPERATOR, session_id)

    def end_session(self, session_id: str) -> bool:
        journal = self._journal(OpenFor.COMMAND)
        SpareSpace(self._data_dir / JOURNAL_FILE).release_if_short()  # the locks are files, too
        open_data_dir(self._data_dir)  # a restored one may lack the folder of the locks
        return end_session(journal, self._data_dir, session_id) is SessionEnd.ENDED

    def models(self) -> Sequence[SupportedModel]:
        return [
            SupportedModel(model_name=name, max_context_length=self._context_length(name))
            for name in registry.available(self._aliases)
        ]

    def _context_length(self, name: str) -> int | None:
        try:
            return context_length(name, self._aliases)
        except (MintError, OSError):  # it is listed all the same; using it will say what is wrong
            return None


def _write_whole(path: Path, content: Iterator[bytes]) -> None:
    """Writes all of a file, or leaves the old one as it is."""
    try:
        with tempfile.NamedTemporaryFile(dir=path.parent, prefix=f".{path.name}.", delete=False) as part:
            staging = Path(part.name)
            try:
                for chunk in content:
                    part.write(chunk)
                part.flush()
                staging.chmod(0o644)
                staging.replace(path)
            finally:
                staging.unlink(missing_ok=True)
    except OSError as error:
        raise InvalidRequestError(
            f"cannot be written: {error.strerror}", field="output", value=str(path), remedy="Name another file"
        ) from error
