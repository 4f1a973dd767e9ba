"""Lists, shows and changes what is stored: training runs, checkpoints, sessions.

Each method returns an `APIFuture`; awaiting its `…_async` twin gives the value. A checkpoint's path may be `mint://…`,
`tinker://…` or, where a method takes a path, a `ckpt_…` id. Knows the routes and their bodies; nothing of HTTP.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Coroutine
from pathlib import Path
from typing import Any, Self, TypeVar
from urllib.parse import quote, urlencode

import mint.wire as wire
from mint.client.async_twins import awaited
from mint.client.connection import file_transfers
from mint.client.connection.endpoint import Endpoint
from mint.client.connection.request_checks import checked
from mint.client.embedded_service import open_embedded_service
from mint.client.futures import APIFuture
from mint.client.session import Session
from mint.config import read_settings
from mint.errors import InvalidRequestError
from mint.types import GetServerCapabilitiesResponse, SamplerInfo, WeightsInfoResponse
from mint.types.checkpoint_path import CheckpointPath
from mint.types.records import (
    MAX_PAGE,
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
from mint.wire.requests import FinishSessionRequest, WeightsInfoRequest

T = TypeVar("T")


class RestClient:
    """Made by `ServiceClient.create_rest_client`, or alone; alone it opens no session."""

    def __init__(
        self, base_url: str | None = None, api_key: str | None = None, *, session: Session | None = None
    ) -> None:
        """`base_url` and `api_key` None are read from the environment; without an address, the service in this process
        is used. `session` is the session of another client, which closes it."""
        settings = read_settings()
        self._shares_session = session is not None
        url = base_url or settings.base_url
        self._session = session or Session(
            Endpoint(url, api_key or settings.api_key), open_embedded=open_embedded_service, joined=""
        )

    def close(self) -> None:
        """Closes the connections that this client has opened itself."""
        if not self._shares_session:
            self._session.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_exception: object) -> None:
        self.close()

    # --- the server ----------------------------------------------------------------------------------------------

    def get_server_capabilities(self) -> APIFuture[GetServerCapabilitiesResponse]:
        """The base models of the server."""
        return self._ask(lambda: self._session.server.get("get_server_capabilities", GetServerCapabilitiesResponse))

    get_server_capabilities_async = awaited(get_server_capabilities)

    def get_sampler(self, sampler_id: str) -> APIFuture[SamplerInfo]:
        """What a sampler samples from."""
        return self._ask(lambda: self._session.server.get(f"samplers/{_part(sampler_id)}", SamplerInfo))

    get_sampler_async = awaited(get_sampler)

    # --- training runs -------------------------------------------------------------------------------------------

    def list_training_runs(
        self, limit: int = 20, offset: int = 0, access_scope: AccessScope = "owned", project_id: str | None = None
    ) -> APIFuture[TrainingRunsResponse]:
        """A page of training runs, newest first; `accessible` adds runs of others with a published checkpoint."""
        query = {"limit": limit, "offset": offset, "access_scope": access_scope, "project_id": project_id}
        return self._ask(lambda: self._session.server.get(_with("training_runs", query), TrainingRunsResponse))

    list_training_runs_async = awaited(list_training_runs)

    def get_training_run(self, training_run_id: str, access_scope: AccessScope = "owned") -> APIFuture[TrainingRun]:
        """One training run."""
        path = _with(f"training_runs/{_part(training_run_id)}", {"access_scope": access_scope})
        return self._ask(lambda: self._session.server.get(path, TrainingRun))

    get_training_run_async = awaited(get_training_run)

    def get_training_run_by_tinker_path(
        self, tinker_path: str, access_scope: AccessScope = "owned"
    ) -> APIFuture[TrainingRun]:
        """The training run that a checkpoint belongs to."""

        async def ask() -> TrainingRun:
            parsed = await self._located(tinker_path)
            path = _with(f"training_runs/{_part(parsed.training_run_id)}", {"access_scope": access_scope})
            return await self._session.server.get(path, TrainingRun)

        return self._ask(ask)

    get_training_run_by_tinker_path_async = awaited(get_training_run_by_tinker_path)

    # --- checkpoints ---------------------------------------------------------------------------------------------

    def list_checkpoints(self, training_run_id: str) -> APIFuture[CheckpointsListResponse]:
        """All checkpoints of a run, newest first."""

        async def ask() -> CheckpointsListResponse:
            path = f"training_runs/{_part(training_run_id)}/checkpoints"
            return CheckpointsListResponse(checkpoints=[item async for item in all_checkpoints(self._session, path)])

        return self._ask(ask)

    list_checkpoints_async = awaited(list_checkpoints)

    def list_user_checkpoints(
        self, limit: int = 100, offset: int = 0, access_scope: AccessScope = "owned"
    ) -> APIFuture[CheckpointsListResponse]:
        """A page of the checkpoints of all runs, newest first; `accessible` adds those that others have published."""
        query = {"limit": limit, "offset": offset, "access_scope": access_scope}
        return self._ask(lambda: self._session.server.get(_with("checkpoints", query), CheckpointsListResponse))

    list_user_checkpoints_async = awaited(list_user_checkpoints)

    def get_checkpoint(self, path: str) -> APIFuture[Checkpoint]:
        """One checkpoint, by its path or `ckpt_…` id."""
        return self._ask(lambda: self._described(path))

    get_checkpoint_async = awaited(get_checkpoint)

    def get_weights_info_by_tinker_path(self, tinker_path: str) -> APIFuture[WeightsInfoResponse]:
        """The model that a checkpoint was saved from."""
        request = checked(WeightsInfoRequest, tinker_path=tinker_path)
        return self._ask(lambda: self._session.server.post("weights_info", request, WeightsInfoResponse))

    get_weights_info_by_tinker_path_async = awaited(get_weights_info_by_tinker_path)

    def delete_checkpoint(self, training_run_id: str, checkpoint_id: str) -> APIFuture[None]:
        """Deletes a checkpoint for good; `checkpoint_id` is `weights/NAME` or `sampler_weights/NAME`."""
        return self.delete_checkpoint_from_tinker_path(f"mint://{training_run_id}/{checkpoint_id}")

    delete_checkpoint_async = awaited(delete_checkpoint)

    def delete_checkpoint_from_tinker_path(self, tinker_path: str) -> APIFuture[None]:
        """Deletes a checkpoint for good."""
        return self._change("DELETE", tinker_path)

    delete_checkpoint_from_tinker_path_async = awaited(delete_checkpoint_from_tinker_path)

    def publish_checkpoint_from_tinker_path(self, tinker_path: str) -> APIFuture[None]:
        """Makes a checkpoint readable by everyone who knows its path."""
        return self._change("POST", tinker_path, "/publish")

    publish_checkpoint_from_tinker_path_async = awaited(publish_checkpoint_from_tinker_path)

    def unpublish_checkpoint_from_tinker_path(self, tinker_path: str) -> APIFuture[None]:
        """Makes a checkpoint readable only by its owner."""
        return self._change("DELETE", tinker_path, "/publish")

    unpublish_checkpoint_from_tinker_path_async = awaited(unpublish_checkpoint_from_tinker_path)

    def set_checkpoint_ttl_from_tinker_path(self, tinker_path: str, ttl_seconds: int | None) -> APIFuture[None]:
        """Deletes a checkpoint after `ttl_seconds` from now; None keeps it for good."""
        return self._change("PUT", tinker_path, "/ttl", checked(SetCheckpointTtlRequest, ttl_seconds=ttl_seconds))

    set_checkpoint_ttl_from_tinker_path_async = awaited(set_checkpoint_ttl_from_tinker_path)

    def copy_weights(
        self,
        path: str,
        destination_project_id: str | None = None,
        *,
        ttl_seconds: int | None = None,
        weights_access_token: str | None = None,
    ) -> APIFuture[str]:
        """Copies a readable checkpoint into a new run of the caller; the path of the copy."""
        request = checked(
            CopyWeightsRequest,
            source_path=path,
            destination_project_id=destination_project_id,
            ttl_seconds=ttl_seconds,
            weights_access_token=weights_access_token,
        )

        async def ask() -> str:
            return (await self._session.server.post("copy_weights", request, CopyWeightsResponse)).tinker_path

        return self._ask(ask)

    copy_weights_async = awaited(copy_weights)

    # --- files ---------------------------------------------------------------------------------------------------

    def get_checkpoint_archive_url(
        self, training_run_id: str, checkpoint_id: str
    ) -> APIFuture[CheckpointArchiveUrlResponse]:
        """The URL of a checkpoint's .tar.gz; it needs no key, and expires."""
        return self.get_checkpoint_archive_url_from_tinker_path(f"mint://{training_run_id}/{checkpoint_id}")

    get_checkpoint_archive_url_async = awaited(get_checkpoint_archive_url)

    def get_checkpoint_archive_url_from_tinker_path(self, tinker_path: str) -> APIFuture[CheckpointArchiveUrlResponse]:
        """Same as `get_checkpoint_archive_url`, by path."""
        return self._ask(lambda: self._archive(tinker_path))

    get_checkpoint_archive_url_from_tinker_path_async = awaited(get_checkpoint_archive_url_from_tinker_path)

    get_checkpoint_archive_url_from_mint_path = get_checkpoint_archive_url_from_tinker_path
    get_checkpoint_archive_url_from_mint_path_async = get_checkpoint_archive_url_from_tinker_path_async

    def get_external_weights_urls(self, tinker_path: str) -> APIFuture[ExternalWeightsUrlsResponse]:
        """The URLs of the files that `save_weights_external` wrote; they need no key, and expire."""

        async def ask() -> ExternalWeightsUrlsResponse:
            route = _route(await self._located(tinker_path))
            return await self._session.server.get(f"{route}/external_weights_urls", ExternalWeightsUrlsResponse)

        return self._ask(ask)

    get_external_weights_urls_async = awaited(get_external_weights_urls)

    def download_checkpoint(self, path: str, output: str | Path, *, overwrite: bool = False) -> APIFuture[Path]:
        """Writes a checkpoint's .tar.gz to the file or folder `output`: all of it or nothing.

        A file that is there is refused, except with `overwrite`.
        """

        async def ask() -> Path:
            located = await self._located(path)
            target = Path(output)
            if target.is_dir():
                target /= CheckpointPath.parse(located.tinker_path).archive_name
            if not overwrite and target.exists():
                raise file_transfers.exists_already(target)
            url = (await self._archive(located.tinker_path)).url
            return await file_transfers.download(self._session.server, url, target)

        return self._ask(ask)

    download_checkpoint_async = awaited(download_checkpoint)

    def upload_checkpoint(
        self, path: str | Path, *, base_model: str | None = None, name: str | None = None
    ) -> APIFuture[UploadCheckpointResponse]:
        """Makes a checkpoint of a .tar.gz that holds a PEFT folder, such as `download_checkpoint` writes.

        `base_model` names its base model, where the server does not know the name in the archive.
        """
        fields = {key: value for key, value in (("base_model", base_model), ("name", name)) if value is not None}

        async def ask() -> UploadCheckpointResponse:
            body = await file_transfers.upload(self._session.server, "checkpoints/upload", Path(path), fields)
            return wire.decode(UploadCheckpointResponse, body)

        return self._ask(ask)

    upload_checkpoint_async = awaited(upload_checkpoint)

    # --- sessions ------------------------------------------------------------------------------------------------

    def list_sessions(
        self, limit: int = 20, offset: int = 0, access_scope: AccessScope = "owned"
    ) -> APIFuture[ListSessionsResponse]:
        """A page of session ids, active and ended, newest first."""
        query = {"limit": limit, "offset": offset, "access_scope": access_scope}
        return self._ask(lambda: self._session.server.get(_with("sessions", query), ListSessionsResponse))

    list_sessions_async = awaited(list_sessions)

    def get_session(self, session_id: str, access_scope: AccessScope = "owned") -> APIFuture[GetSessionResponse]:
        """The runs and samplers of a session."""
        path = _with(f"sessions/{_part(session_id)}", {"access_scope": access_scope})
        return self._ask(lambda: self._session.server.get(path, GetSessionResponse))

    get_session_async = awaited(get_session)

    def search_sessions(self, request: SessionSearchRequest) -> APIFuture[SessionSearchResponse]:
        """A page of the sessions that meet all conditions, newest first."""
        return self._ask(lambda: self._session.server.post("sessions/search", request, SessionSearchResponse))

    def assign_session_project(self, session_id: str, project_id: str) -> APIFuture[None]:
        """Puts a session, and with it its runs, into a project."""
        request = checked(AssignSessionProjectRequest, project_id=project_id)

        async def ask() -> None:
            await self._session.server.call("PUT", f"sessions/{_part(session_id)}/project", request)

        return self._ask(ask)

    assign_session_project_async = awaited(assign_session_project)

    def end_session(self, session_id: str) -> APIFuture[None]:
        """Ends a session for good, also one of a program that has died: its models, futures and unnamed samplers go,
        and named checkpoints stay."""

        async def ask() -> None:
            await self._session.server.call("POST", f"sessions/{_part(session_id)}/finish", FinishSessionRequest())

        return self._ask(ask)

    end_session_async = awaited(end_session)

    # --- inside --------------------------------------------------------------------------------------------------

    def _ask(self, work: Callable[[], Coroutine[Any, Any, T]]) -> APIFuture[T]:
        """Runs `work()` on the session's thread; opens the session first."""
        self._session.open()
        return APIFuture(self._session.run(work()))

    def _change(
        self, method: str, path: str, action: str = "", message: SetCheckpointTtlRequest | None = None
    ) -> APIFuture[None]:
        async def ask() -> None:
            await self._session.server.call(method, _route(await self._located(path)) + action, message)

        return self._ask(ask)

    async def _located(self, path: str) -> ParsedCheckpointTinkerPath:
        if path.startswith("ckpt_"):
            path = (await self._described(path)).tinker_path
        return ParsedCheckpointTinkerPath.from_tinker_path(path)

    def _described(self, path: str) -> Coroutine[Any, Any, Checkpoint]:
        if path.startswith("ckpt_"):
            return self._session.server.get(f"checkpoints/{_part(path)}", Checkpoint)
        return self._session.server.get(_route(ParsedCheckpointTinkerPath.from_tinker_path(path)), Checkpoint)

    async def _archive(self, path: str) -> CheckpointArchiveUrlResponse:
        route = f"{_route(await self._located(path))}/archive"
        return await file_transfers.archive_url(self._session.server, route)


async def all_checkpoints(session: Session, path: str) -> AsyncIterator[Checkpoint]:
    """The checkpoints of all pages of the route `path`, newest first."""
    offset = 0
    while True:
        page = await session.server.get(_with(path, {"limit": MAX_PAGE, "offset": offset}), CheckpointsListResponse)
        for checkpoint in page.checkpoints:
            yield checkpoint
        if page.cursor is None or not page.checkpoints:  # an older server gives all at once
            return
        offset += page.cursor.limit
        if offset >= page.cursor.total_count:
            return


def _part(text: str) -> str:
    """A part of a route's path, quoted."""
    remedy = "Pass an id that a listing shows"
    if not isinstance(text, str) or text in ("", ".", ".."):
        raise InvalidRequestError("is not an id", field="id", value=text, remedy=remedy)
    try:
        return quote(text, safe=":")
    except UnicodeEncodeError as error:  # a lone surrogate
        raise InvalidRequestError("is not an id", field="id", value=ascii(text), remedy=remedy) from error


def _route(parsed: ParsedCheckpointTinkerPath) -> str:
    kind, _, name = parsed.checkpoint_id.partition("/")
    return f"training_runs/{_part(parsed.training_run_id)}/checkpoints/{kind}/{_part(name)}"


def _with(path: str, query: dict[str, Any]) -> str:
    return f"{path}?{urlencode({key: value for key, value in query.items() if value is not None})}"
