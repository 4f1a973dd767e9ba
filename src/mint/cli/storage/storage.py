"""Runs, checkpoints, sessions and models that are stored, on a server or in a folder: the same questions for both.

A folder is read as its operator, who sees what everyone owns. Reading it starts no engine and takes over no session, so
a server may run on it at the same time.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Protocol

from mint.cli.storage.server_storage import ServerStorage
from mint.client.rest_client import RestClient
from mint.config import read_settings
from mint.errors import MissingExtraError
from mint.extras import install_command
from mint.types import SupportedModel
from mint.types.records import (
    Checkpoint,
    CheckpointsListResponse,
    CopyWeightsRequest,
    GetSessionResponse,
    PageQuery,
    SessionSummary,
    TrainingRun,
    TrainingRunsResponse,
)


class Storage(Protocol):
    """What the commands ask and change. Checkpoints are named by path or `ckpt_…` id; lists are newest first."""

    def runs(self, page: PageQuery) -> TrainingRunsResponse: ...

    def run(self, run_id: str) -> TrainingRun: ...

    def checkpoints(self, page: PageQuery) -> CheckpointsListResponse: ...

    def checkpoints_of(self, run_id: str) -> CheckpointsListResponse: ...

    def checkpoint(self, path: str) -> Checkpoint: ...

    def delete(self, path: str) -> None: ...

    def publish(self, path: str, *, public: bool) -> None: ...

    def set_ttl(self, path: str, seconds: int | None) -> None:
        """Lets a checkpoint expire so many seconds from now; None keeps it for good."""
        ...

    def copy(self, request: CopyWeightsRequest) -> str:
        """Copies a checkpoint; returns the path of the copy."""
        ...

    def download(self, path: str, output: Path, *, overwrite: bool) -> Path:
        """Writes a checkpoint's .tar.gz to the file `output`, or into that folder; returns the file.

        A file that is there is refused, except with `overwrite`.
        """
        ...

    def upload(self, file: Path, base_model: str | None, name: str | None) -> str:
        """Makes a checkpoint of an archive or a PEFT folder; returns its path."""
        ...

    def sessions(self, limit: int) -> Sequence[SessionSummary]: ...

    def session(self, session_id: str) -> GetSessionResponse: ...

    def end_session(self, session_id: str) -> bool:
        """Ends a session; False if the process that serves it will do so within a minute."""
        ...

    def models(self) -> Sequence[SupportedModel]:
        """The base models that can be used by name."""
        ...


@contextmanager
def open_storage(data_dir: Path | None) -> Generator[Storage]:
    """Opens the folder `data_dir`; None opens the server at `MINT_BASE_URL`, or else the folder `MINT_HOME`.

    Raises:
        MissingExtraError: reading a folder needs the `local` extra.
    """
    settings = read_settings()
    if data_dir is None and settings.base_url is not None:
        with RestClient(settings.base_url, settings.api_key) as rest:
            yield ServerStorage(rest)
        return
    try:
        from mint.cli.storage.folder_storage import FolderStorage  # deferred: the server, which remote users lack
    except ImportError as error:
        raise MissingExtraError(
            "reading a data directory needs the service", remedy=f"{install_command('local')}, or set MINT_BASE_URL"
        ) from error
    folder = FolderStorage((data_dir or settings.home_dir).expanduser(), settings)
    try:
        yield folder
    finally:
        folder.close()
