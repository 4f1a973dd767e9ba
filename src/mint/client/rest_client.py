"""Questions about what is saved and what has run, and changes to it, apart from any model in training.

Each method returns an `APIFuture`; its `…_async` twin returns the value. A checkpoint's path may be `mint://…`,
`tinker://…` or, where a method takes a path, a `ckpt_…` id. Knows the routes and their bodies; nothing of HTTP.
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any, Self, TypeVar
from urllib.parse import quote, urlencode

import mint.wire as wire
from mint.client import file_transfers as transfers
from mint.client.futures import APIFuture
from mint.client.session import Address, EmbeddedServer, Session
from mint.config import read_settings
from mint.errors import InvalidRequestError
from mint.types import GetServerCapabilitiesResponse, SamplerInfo, WeightsInfoResponse
from mint.types.records import (
    AccessScope,
    AssignSessionProjectRequest,
    Checkpoint,
    CheckpointArchiveUrlResponse,
    CheckpointsListResponse,
    CopyWeightsRequest,
    CopyWeightsResponse,
    ExternalWeightsUrlsResponse,
    GetSessionResponse,
    ListSessionsResponse,
    ParsedCheckpointTinkerPath,
    SessionSearchRequest,
    SessionSearchResponse,
    SetCheckpointTtlRequest,
    TrainingRun,
    TrainingRunsResponse,
    UploadCheckpointResponse,
)
from mint.wire.requests import WeightsInfoRequest

T = TypeVar("T")


class RestClient:
    """Made by `ServiceClient.create_rest_client`, or alone; alone it opens no session."""

    def __init__(
        self, base_url: str | None = None, api_key: str | None = None, *, session: Session | None = None
    ) -> None:
        """`base_url` and `api_key` None are read from the environment; without an address, the service in this process
        is asked. `session` is one that somebody else opened, and will close."""
        settings = read_settings()
        self._is_guest = session is not None
        url = base_url or settings.base_url
        self._session = session or Session(
            Address(url, api_key or settings.api_key), open_embedded=_open_embedded, joined=""
        )

    def close(self) -> None:
        """Lets go of the connections that this client has opened itself."""
        if not self._is_guest:
            self._session.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_exception: object) -> None:
        self.close()

    # --- the server ----------------------------------------------------------------------------------------------

    def get_server_capabilities(self) -> APIFuture[GetServerCapabilitiesResponse]:
        """The base models on offer."""
        return self._ask(lambda: self._session.get("get_server_capabilities", GetServerCapabilitiesResponse))

    async def get_server_capabilities_async(self) -> GetServerCapabilitiesResponse:
        """As `get_server_capabilities`."""
        return await self.get_server_capabilities()

    def get_sampler(self, sampler_id: str) -> APIFuture[SamplerInfo]:
        """What a sampler samples from."""
        return self._ask(lambda: self._session.get(f"samplers/{_part(sampler_id)}", SamplerInfo))

    async def get_sampler_async(self, sampler_id: str) -> SamplerInfo:
        """As `get_sampler`."""
        return await self.get_sampler(sampler_id)

    # --- training runs -------------------------------------------------------------------------------------------

    def list_training_runs(
        self, limit: int = 20, offset: int = 0, access_scope: AccessScope = "owned", project_id: str | None = None
    ) -> APIFuture[TrainingRunsResponse]:
        """A page of training runs, newest first; `accessible` adds those of which something is published."""
        query = {"limit": limit, "offset": offset, "access_scope": access_scope, "project_id": project_id}
        return self._ask(lambda: self._session.get(_with("training_runs", query), TrainingRunsResponse))

    async def list_training_runs_async(
        self, limit: int = 20, offset: int = 0, access_scope: AccessScope = "owned", project_id: str | None = None
    ) -> TrainingRunsResponse:
        """As `list_training_runs`."""
        return await self.list_training_runs(limit, offset, access_scope, project_id)

    def get_training_run(self, training_run_id: str, access_scope: AccessScope = "owned") -> APIFuture[TrainingRun]:
        """One training run."""
        path = _with(f"training_runs/{_part(training_run_id)}", {"access_scope": access_scope})
        return self._ask(lambda: self._session.get(path, TrainingRun))

    async def get_training_run_async(self, training_run_id: str, access_scope: AccessScope = "owned") -> TrainingRun:
        """As `get_training_run`."""
        return await self.get_training_run(training_run_id, access_scope)

    def get_training_run_by_tinker_path(
        self, tinker_path: str, access_scope: AccessScope = "owned"
    ) -> APIFuture[TrainingRun]:
        """The training run that a checkpoint belongs to."""

        async def ask() -> TrainingRun:
            parsed = await self._located(tinker_path)
            path = _with(f"training_runs/{_part(parsed.training_run_id)}", {"access_scope": access_scope})
            return await self._session.get(path, TrainingRun)

        return self._ask(ask)

    async def get_training_run_by_tinker_path_async(
        self, tinker_path: str, access_scope: AccessScope = "owned"
    ) -> TrainingRun:
        """As `get_training_run_by_tinker_path`."""
        return await self.get_training_run_by_tinker_path(tinker_path, access_scope)

    # --- checkpoints ---------------------------------------------------------------------------------------------

    def list_checkpoints(self, training_run_id: str) -> APIFuture[CheckpointsListResponse]:
        """All checkpoints of a run, newest first."""
        path = f"training_runs/{_part(training_run_id)}/checkpoints"
        return self._ask(lambda: self._session.get(path, CheckpointsListResponse))

    async def list_checkpoints_async(self, training_run_id: str) -> CheckpointsListResponse:
        """As `list_checkpoints`."""
        return await self.list_checkpoints(training_run_id)

    def list_user_checkpoints(
        self, limit: int = 100, offset: int = 0, access_scope: AccessScope = "owned"
    ) -> APIFuture[CheckpointsListResponse]:
        """A page of the checkpoints of all runs, newest first; `accessible` adds what others have published."""
        query = {"limit": limit, "offset": offset, "access_scope": access_scope}
        return self._ask(lambda: self._session.get(_with("checkpoints", query), CheckpointsListResponse))

    async def list_user_checkpoints_async(
        self, limit: int = 100, offset: int = 0, access_scope: AccessScope = "owned"
    ) -> CheckpointsListResponse:
        """As `list_user_checkpoints`."""
        return await self.list_user_checkpoints(limit, offset, access_scope)

    def get_checkpoint(self, path: str) -> APIFuture[Checkpoint]:
        """One checkpoint, by its path or `ckpt_…` id."""
        return self._ask(lambda: self._described(path))

    async def get_checkpoint_async(self, path: str) -> Checkpoint:
        """As `get_checkpoint`."""
        return await self.get_checkpoint(path)

    def get_weights_info_by_tinker_path(self, tinker_path: str) -> APIFuture[WeightsInfoResponse]:
        """What a checkpoint was saved from."""
        request = WeightsInfoRequest(tinker_path=tinker_path)
        return self._ask(lambda: self._session.post("weights_info", request, WeightsInfoResponse))

    async def get_weights_info_by_tinker_path_async(self, tinker_path: str) -> WeightsInfoResponse:
        """As `get_weights_info_by_tinker_path`."""
        return await self.get_weights_info_by_tinker_path(tinker_path)

    def delete_checkpoint(self, training_run_id: str, checkpoint_id: str) -> APIFuture[None]:
        """Deletes a checkpoint for good; `checkpoint_id` is `weights/NAME` or `sampler_weights/NAME`."""
        return self.delete_checkpoint_from_tinker_path(f"mint://{training_run_id}/{checkpoint_id}")

    async def delete_checkpoint_async(self, training_run_id: str, checkpoint_id: str) -> None:
        """As `delete_checkpoint`."""
        await self.delete_checkpoint(training_run_id, checkpoint_id)

    def delete_checkpoint_from_tinker_path(self, tinker_path: str) -> APIFuture[None]:
        """Deletes a checkpoint for good."""
        return self._change("DELETE", tinker_path)

    async def delete_checkpoint_from_tinker_path_async(self, tinker_path: str) -> None:
        """As `delete_checkpoint_from_tinker_path`."""
        await self.delete_checkpoint_from_tinker_path(tinker_path)

    def publish_checkpoint_from_tinker_path(self, tinker_path: str) -> APIFuture[None]:
        """Makes a checkpoint readable by everyone who knows its path."""
        return self._change("POST", tinker_path, "/publish")

    async def publish_checkpoint_from_tinker_path_async(self, tinker_path: str) -> None:
        """As `publish_checkpoint_from_tinker_path`."""
        await self.publish_checkpoint_from_tinker_path(tinker_path)

    def unpublish_checkpoint_from_tinker_path(self, tinker_path: str) -> APIFuture[None]:
        """Makes a checkpoint readable by its owner alone."""
        return self._change("DELETE", tinker_path, "/publish")

    async def unpublish_checkpoint_from_tinker_path_async(self, tinker_path: str) -> None:
        """As `unpublish_checkpoint_from_tinker_path`."""
        await self.unpublish_checkpoint_from_tinker_path(tinker_path)

    def set_checkpoint_ttl_from_tinker_path(self, tinker_path: str, ttl_seconds: int | None) -> APIFuture[None]:
        """Keeps a checkpoint for so long from now on; None keeps it for good."""
        return self._change("PUT", tinker_path, "/ttl", SetCheckpointTtlRequest(ttl_seconds=ttl_seconds))

    async def set_checkpoint_ttl_from_tinker_path_async(self, tinker_path: str, ttl_seconds: int | None) -> None:
        """As `set_checkpoint_ttl_from_tinker_path`."""
        await self.set_checkpoint_ttl_from_tinker_path(tinker_path, ttl_seconds)

    def copy_weights(
        self,
        path: str,
        destination_project_id: str | None = None,
        *,
        ttl_seconds: int | None = None,
        weights_access_token: str | None = None,
    ) -> APIFuture[str]:
        """Copies a readable checkpoint into a new run of the caller's; the path of the copy."""
        request = CopyWeightsRequest(
            source_path=path,
            destination_project_id=destination_project_id,
            ttl_seconds=ttl_seconds,
            weights_access_token=weights_access_token,
        )

        async def ask() -> str:
            return (await self._session.post("copy_weights", request, CopyWeightsResponse)).tinker_path

        return self._ask(ask)

    async def copy_weights_async(
        self,
        path: str,
        destination_project_id: str | None = None,
        *,
        ttl_seconds: int | None = None,
        weights_access_token: str | None = None,
    ) -> str:
        """As `copy_weights`."""
        return await self.copy_weights(
            path, destination_project_id, ttl_seconds=ttl_seconds, weights_access_token=weights_access_token
        )

    # --- files ---------------------------------------------------------------------------------------------------

    def get_checkpoint_archive_url(
        self, training_run_id: str, checkpoint_id: str
    ) -> APIFuture[CheckpointArchiveUrlResponse]:
        """Where a checkpoint's .tar.gz can be fetched, without a key, for a while."""
        return self.get_checkpoint_archive_url_from_tinker_path(f"mint://{training_run_id}/{checkpoint_id}")

    async def get_checkpoint_archive_url_async(
        self, training_run_id: str, checkpoint_id: str
    ) -> CheckpointArchiveUrlResponse:
        """As `get_checkpoint_archive_url`."""
        return await self.get_checkpoint_archive_url(training_run_id, checkpoint_id)

    def get_checkpoint_archive_url_from_tinker_path(self, tinker_path: str) -> APIFuture[CheckpointArchiveUrlResponse]:
        """As `get_checkpoint_archive_url`, by path."""
        return self._ask(lambda: self._archive(tinker_path))

    async def get_checkpoint_archive_url_from_tinker_path_async(self, tinker_path: str) -> CheckpointArchiveUrlResponse:
        """As `get_checkpoint_archive_url_from_tinker_path`."""
        return await self.get_checkpoint_archive_url_from_tinker_path(tinker_path)

    get_checkpoint_archive_url_from_mint_path = get_checkpoint_archive_url_from_tinker_path
    get_checkpoint_archive_url_from_mint_path_async = get_checkpoint_archive_url_from_tinker_path_async

    def get_external_weights_urls(self, tinker_path: str) -> APIFuture[ExternalWeightsUrlsResponse]:
        """Where the files of a checkpoint that `save_weights_external` wrote can be fetched, without a key."""

        async def ask() -> ExternalWeightsUrlsResponse:
            route = _route(await self._located(tinker_path))
            return await self._session.get(f"{route}/external_weights_urls", ExternalWeightsUrlsResponse)

        return self._ask(ask)

    async def get_external_weights_urls_async(self, tinker_path: str) -> ExternalWeightsUrlsResponse:
        """As `get_external_weights_urls`."""
        return await self.get_external_weights_urls(tinker_path)

    def download_checkpoint(self, path: str, output: str | Path) -> APIFuture[Path]:
        """Writes a checkpoint's .tar.gz to `output`: all of it or nothing. In a folder it is named after itself."""

        async def ask() -> Path:
            located = await self._located(path)
            target = Path(output)
            if target.is_dir():
                target /= f"{located.checkpoint_id.replace('/', '-')}.tar.gz"
            url = (await self._archive(located.tinker_path)).url
            return await self._session.transfer(lambda http: transfers.fetch(http, url, target))

        return self._ask(ask)

    async def download_checkpoint_async(self, path: str, output: str | Path) -> Path:
        """As `download_checkpoint`."""
        return await self.download_checkpoint(path, output)

    def upload_checkpoint(
        self, path: str | Path, *, base_model: str | None = None, name: str | None = None
    ) -> APIFuture[UploadCheckpointResponse]:
        """Makes a checkpoint of a .tar.gz that holds a PEFT folder, such as `download_checkpoint` writes.

        `base_model` says what it belongs to where the archive's own word is not known to the server.
        """
        fields = {key: value for key, value in (("base_model", base_model), ("name", name)) if value is not None}

        async def ask() -> UploadCheckpointResponse:
            send = lambda http: transfers.send(http, "checkpoints/upload", Path(path), fields)  # noqa: E731
            return wire.decode(UploadCheckpointResponse, await self._session.transfer(send))

        return self._ask(ask)

    async def upload_checkpoint_async(
        self, path: str | Path, *, base_model: str | None = None, name: str | None = None
    ) -> UploadCheckpointResponse:
        """As `upload_checkpoint`."""
        return await self.upload_checkpoint(path, base_model=base_model, name=name)

    # --- sessions ------------------------------------------------------------------------------------------------

    def list_sessions(
        self, limit: int = 20, offset: int = 0, access_scope: AccessScope = "owned"
    ) -> APIFuture[ListSessionsResponse]:
        """A page of session ids, living or ended, newest first."""
        query = {"limit": limit, "offset": offset, "access_scope": access_scope}
        return self._ask(lambda: self._session.get(_with("sessions", query), ListSessionsResponse))

    async def list_sessions_async(
        self, limit: int = 20, offset: int = 0, access_scope: AccessScope = "owned"
    ) -> ListSessionsResponse:
        """As `list_sessions`."""
        return await self.list_sessions(limit, offset, access_scope)

    def get_session(self, session_id: str, access_scope: AccessScope = "owned") -> APIFuture[GetSessionResponse]:
        """The runs and samplers of a session."""
        path = _with(f"sessions/{_part(session_id)}", {"access_scope": access_scope})
        return self._ask(lambda: self._session.get(path, GetSessionResponse))

    async def get_session_async(self, session_id: str, access_scope: AccessScope = "owned") -> GetSessionResponse:
        """As `get_session`."""
        return await self.get_session(session_id, access_scope)

    def search_sessions(self, request: SessionSearchRequest) -> APIFuture[SessionSearchResponse]:
        """A page of sessions that fit, newest first."""
        return self._ask(lambda: self._session.post("sessions/search", request, SessionSearchResponse))

    def assign_session_project(self, session_id: str, project_id: str) -> APIFuture[None]:
        """Puts a session, and with it its runs, into a project."""
        request = AssignSessionProjectRequest(project_id=project_id)

        async def ask() -> None:
            await self._session.call("PUT", f"sessions/{_part(session_id)}/project", request)

        return self._ask(ask)

    async def assign_session_project_async(self, session_id: str, project_id: str) -> None:
        """As `assign_session_project`."""
        await self.assign_session_project(session_id, project_id)

    # --- inside --------------------------------------------------------------------------------------------------

    def _ask(self, work: Callable[[], Coroutine[Any, Any, T]]) -> APIFuture[T]:
        """Runs `work()` on the session's thread; the session is opened first, where it is not yet."""
        _ = self._session.session_id
        return APIFuture(self._session.run(work()))

    def _change(
        self, method: str, path: str, action: str = "", message: SetCheckpointTtlRequest | None = None
    ) -> APIFuture[None]:
        async def ask() -> None:
            await self._session.call(method, _route(await self._located(path)) + action, message)

        return self._ask(ask)

    async def _located(self, path: str) -> ParsedCheckpointTinkerPath:
        if path.startswith("ckpt_"):
            path = (await self._described(path)).tinker_path
        return ParsedCheckpointTinkerPath.from_tinker_path(path)

    def _described(self, path: str) -> Coroutine[Any, Any, Checkpoint]:
        if path.startswith("ckpt_"):
            return self._session.get(f"checkpoints/{_part(path)}", Checkpoint)
        return self._session.get(_route(ParsedCheckpointTinkerPath.from_tinker_path(path)), Checkpoint)

    async def _archive(self, path: str) -> CheckpointArchiveUrlResponse:
        route = f"{_route(await self._located(path))}/archive"
        return await self._session.transfer(lambda http: transfers.archive_url(http, route))


def _part(text: str) -> str:
    """A part of a route's path, whatever is in it."""
    if text in ("", ".", ".."):
        raise InvalidRequestError("is no id", field="id", value=text, remedy="Pass an id that a listing shows")
    return quote(text, safe=":")


def _route(parsed: ParsedCheckpointTinkerPath) -> str:
    kind, _, name = parsed.checkpoint_id.partition("/")
    return f"training_runs/{_part(parsed.training_run_id)}/checkpoints/{kind}/{_part(name)}"


def _with(path: str, query: dict[str, Any]) -> str:
    return f"{path}?{urlencode({key: value for key, value in query.items() if value is not None})}"


def _open_embedded() -> EmbeddedServer:
    from mint.compose.embedded import open_embedded  # deferred: the one door to the service in this process

    return open_embedded()
