"""What is kept, asked of a server or read from a folder: the same questions, the same answers.

A folder is read as its operator, to whom everything is there. No engine is started, and no session is taken over, so
that it can be read while a server runs on it. Knows nothing of how answers are shown.
"""

from __future__ import annotations

import tarfile
import tempfile
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Protocol

from mint.client.rest_client import RestClient
from mint.config import read_settings
from mint.errors import MissingExtraError
from mint.models.peft_format import CONFIG_FILE, WEIGHTS_FILE
from mint.types import SupportedModel
from mint.types.records import (
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

_OF_AN_ADAPTER = (CONFIG_FILE, WEIGHTS_FILE, "optimizer.safetensors", "mint.json")
"""What of a folder is sent to a server; what else training tools leave there is of no use to it."""


class Kept(Protocol):
    """The questions, and the changes."""

    def runs(self, page: PageQuery) -> TrainingRunsResponse:
        """A page of training runs."""
        ...

    def run(self, run_id: str) -> TrainingRun:
        """One training run."""
        ...

    def checkpoints(self, page: PageQuery) -> CheckpointsListResponse:
        """A page of checkpoints of all runs."""
        ...

    def checkpoints_of(self, run_id: str) -> CheckpointsListResponse:
        """All checkpoints of a run."""
        ...

    def checkpoint(self, path: str) -> Checkpoint:
        """One checkpoint, by path or `ckpt_…` id."""
        ...

    def delete(self, path: str) -> None:
        """Deletes a checkpoint for good."""
        ...

    def publish(self, path: str, *, public: bool) -> None:
        """Makes a checkpoint readable by all who know its path, or by its owner alone."""
        ...

    def set_ttl(self, path: str, seconds: int | None) -> None:
        """How long a checkpoint is kept from now on; None is for good."""
        ...

    def copy(self, request: CopyWeightsRequest) -> str:
        """Copies a checkpoint; the path of the copy."""
        ...

    def download(self, path: str, output: Path) -> Path:
        """Writes a checkpoint's .tar.gz to a file, or into a folder; where it is then."""
        ...

    def upload(self, file: Path, base_model: str | None, name: str | None) -> str:
        """Makes a checkpoint of an archive; its path."""
        ...

    def sessions(self, limit: int) -> Sequence[SessionSummary]:
        """The newest sessions."""
        ...

    def session(self, session_id: str) -> GetSessionResponse:
        """What belongs to a session."""
        ...

    def models(self) -> Sequence[SupportedModel]:
        """The base models that can be used by name."""
        ...


@contextmanager
def open_kept(data_dir: Path | None) -> Generator[Kept]:
    """That of `data_dir`; None is the server of `MINT_BASE_URL`, or the folder of `MINT_HOME`.

    Raises:
        MissingExtraError: reading a folder needs the `local` extra.
        MintError: whatever a question in the block raises.
    """
    settings = read_settings()
    if data_dir is None and settings.base_url is not None:
        with RestClient(settings.base_url, settings.api_key) as rest:
            yield _Server(rest)
        return
    try:
        from mint.cli.storage_folder import Folder  # deferred: the database, which remote users lack
    except ImportError as error:
        raise MissingExtraError(
            "reading a data directory needs the service", remedy="pip install 'mint[local]', or set MINT_BASE_URL"
        ) from error
    folder = Folder((data_dir or settings.home_dir).expanduser(), settings)
    try:
        yield folder
    finally:
        folder.close()


class _Server:
    """What a server answers to the owner of a key."""

    def __init__(self, rest: RestClient) -> None:
        self._rest = rest

    def runs(self, page: PageQuery) -> TrainingRunsResponse:
        return self._rest.list_training_runs(page.limit, page.offset, page.access_scope).result()

    def run(self, run_id: str) -> TrainingRun:
        return self._rest.get_training_run(run_id, "accessible").result()

    def checkpoints(self, page: PageQuery) -> CheckpointsListResponse:
        return self._rest.list_user_checkpoints(page.limit, page.offset, page.access_scope).result()

    def checkpoints_of(self, run_id: str) -> CheckpointsListResponse:
        return self._rest.list_checkpoints(run_id).result()

    def checkpoint(self, path: str) -> Checkpoint:
        return self._rest.get_checkpoint(path).result()

    def delete(self, path: str) -> None:
        self._rest.delete_checkpoint_from_tinker_path(path).result()

    def publish(self, path: str, *, public: bool) -> None:
        rest = self._rest
        change = rest.publish_checkpoint_from_tinker_path if public else rest.unpublish_checkpoint_from_tinker_path
        change(path).result()

    def set_ttl(self, path: str, seconds: int | None) -> None:
        self._rest.set_checkpoint_ttl_from_tinker_path(path, seconds).result()

    def copy(self, request: CopyWeightsRequest) -> str:
        copied = self._rest.copy_weights(
            request.source_path, request.destination_project_id, ttl_seconds=request.ttl_seconds
        )
        return copied.result()

    def download(self, path: str, output: Path) -> Path:
        return self._rest.download_checkpoint(path, output).result()

    def upload(self, file: Path, base_model: str | None, name: str | None) -> str:
        if not file.is_dir():
            return self._rest.upload_checkpoint(file, base_model=base_model, name=name).result().path
        with tempfile.TemporaryDirectory() as scratch:
            packed = Path(scratch) / "adapter.tar"
            with tarfile.open(packed, "w") as archive:
                for part in sorted(path for path in file.iterdir() if path.name in _OF_AN_ADAPTER):
                    archive.add(part, part.name)
            return self._rest.upload_checkpoint(packed, base_model=base_model, name=name).result().path

    def sessions(self, limit: int) -> Sequence[SessionSummary]:
        return self._rest.search_sessions(SessionSearchRequest(limit=limit)).result().sessions

    def session(self, session_id: str) -> GetSessionResponse:
        return self._rest.get_session(session_id).result()

    def models(self) -> Sequence[SupportedModel]:
        return self._rest.get_server_capabilities().result().supported_models
