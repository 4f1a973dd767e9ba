"""What a server stores for the owner of a key, asked over HTTP."""

from __future__ import annotations

import tarfile
import tempfile
from collections.abc import Sequence
from pathlib import Path

from mint.client.rest_client import RestClient
from mint.models.peft_files import CONFIG_FILE, WEIGHTS_FILE
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

_UPLOADED = (CONFIG_FILE, WEIGHTS_FILE, "optimizer.safetensors", "mint.json")
"""The files of a folder that are sent to a server; the other files of training tools are of no use to it."""


class ServerStorage:
    """See `storage.Storage`."""

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

    def download(self, path: str, output: Path, *, overwrite: bool) -> Path:
        return self._rest.download_checkpoint(path, output, overwrite=overwrite).result()

    def upload(self, file: Path, base_model: str | None, name: str | None) -> str:
        if not file.is_dir():
            return self._rest.upload_checkpoint(file, base_model=base_model, name=name).result().path
        with tempfile.TemporaryDirectory() as scratch:
            packed = Path(scratch) / "lora.tar"
            with tarfile.open(packed, "w") as archive:
                for part in sorted(path for path in file.iterdir() if path.name in _UPLOADED):
                    archive.add(part, part.name)
            return self._rest.upload_checkpoint(packed, base_model=base_model, name=name).result().path

    def sessions(self, limit: int) -> Sequence[SessionSummary]:
        return self._rest.search_sessions(SessionSearchRequest(limit=limit)).result().sessions

    def session(self, session_id: str) -> GetSessionResponse:
        return self._rest.get_session(session_id).result()

    def end_session(self, session_id: str) -> bool:
        self._rest.end_session(session_id).result()
        return True

    def models(self) -> Sequence[SupportedModel]:
        return self._rest.get_server_capabilities().result().supported_models
