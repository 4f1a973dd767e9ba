"""Stored training runs, checkpoints and sessions, and their list requests.

The names are those of the public protocol's types; `mint.types` has them too. Times are aware datetimes, RFC 3339 on
the wire.
"""

from __future__ import annotations

from datetime import datetime
from typing import Annotated, Any, Literal, Self

from pydantic import AwareDatetime, BaseModel, ConfigDict, Field, model_serializer, model_validator

from mint.errors import InvalidRequestError
from mint.types.checkpoint_path import CheckpointPath, CheckpointUri
from mint.types.value_classes import Result, StrictValue

CheckpointType = Literal["training", "sampler", "external"]
SessionOutcome = Literal["success", "errored", "interrupted"]
"""What a client says of its session when it finishes it."""

AccessScope = Literal["owned", "accessible"]
"""`accessible` adds what others have published to what is the caller's own."""

TYPE_OF_KIND: dict[str, CheckpointType] = {
    "weights": "training",
    "sampler_weights": "sampler",
    "external_weights": "external",
}
"""The middle part of a checkpoint's path → what management calls it."""

MAX_PAGE = 1000

MAX_WHOLE = 10_000
"""How many rows a list has that was not asked for in pages."""

MAX_OFFSET = 2**31 - 1


# --- checkpoints and runs ----------------------------------------------------------------------------------------


class Checkpoint(Result):
    """A named checkpoint. `checkpoint_id` is `weights/NAME` or `sampler_weights/NAME`, `alias` its `ckpt_…` id."""

    checkpoint_id: str
    checkpoint_type: CheckpointType
    time: datetime
    tinker_path: CheckpointUri
    size_bytes: int | None = None
    public: bool = False
    user_metadata: dict[str, Any] | None = None
    expires_at: datetime | None = None
    alias: str | None = None


class ParsedCheckpointTinkerPath(Result):
    """The parts of a checkpoint's path."""

    tinker_path: CheckpointUri
    training_run_id: str
    checkpoint_type: CheckpointType
    checkpoint_id: str

    @classmethod
    def from_tinker_path(cls, tinker_path: str) -> Self:
        """From `mint://MODEL_ID/KIND/NAME`, or its alias `tinker://…`.

        Raises:
            InvalidRequestError: the text is no such path.
        """
        path = CheckpointPath.parse(tinker_path)
        return cls(
            tinker_path=tinker_path,
            training_run_id=path.model_id,
            checkpoint_type=TYPE_OF_KIND[path.kind],
            checkpoint_id=f"{path.kind}/{path.name}",
        )


class Cursor(Result):
    """Which part of a list this is; `limit` is the page size that took effect: the next page is at
    `offset + limit`."""

    offset: int
    limit: int
    total_count: int


class CheckpointsListResponse(Result):
    """Checkpoints, newest first; `RestClient.list_checkpoints` gives all, and then there is no cursor."""

    checkpoints: list[Checkpoint]
    cursor: Cursor | None = None


class TrainingRun(Result):
    """The record of a model, also after its session ends. `corrupted`: its replay gave other bits than acknowledged."""

    training_run_id: str
    base_model: str
    model_owner: str
    is_lora: bool = True
    corrupted: bool = False
    lora_rank: int | None = None
    last_request_time: datetime
    last_checkpoint: Checkpoint | None = None
    last_sampler_checkpoint: Checkpoint | None = None
    user_metadata: dict[str, Any] | None = None


class TrainingRunsResponse(Result):
    """A page of training runs, newest first."""

    training_runs: list[TrainingRun]
    cursor: Cursor


class CheckpointArchiveUrlResponse(Result):
    """Where a checkpoint's archive can be fetched without a key, until `expires`."""

    url: str
    expires: datetime


class ExternalWeightsUrlsResponse(Result):
    """Relative file name → where it can be fetched without a key, until `expires`."""

    urls: dict[str, str]
    expires: datetime


class UploadCheckpointResponse(Result):
    """An uploaded checkpoint; `notes` say what was changed on the way in."""

    path: CheckpointUri
    checkpoint_id: str | None = None
    notes: list[str] = Field(default_factory=list)


class CopyWeightsRequest(StrictValue):
    """Copies readable weights into a new run of the caller's, or into a slot of one of their sessions."""

    source_path: CheckpointUri
    destination_project_id: str | None = None
    session_id: str | None = None
    model_seq_id: Annotated[int, Field(ge=0, lt=2**31)] | None = None
    ttl_seconds: int | None = None
    weights_access_token: str | None = None


class CopyWeightsResponse(Result):
    """The copy."""

    tinker_path: CheckpointUri


class SetCheckpointTtlRequest(StrictValue):
    """How long a checkpoint is kept from now on; null keeps it for good."""

    ttl_seconds: int | None

    @model_serializer
    def _whole(self) -> dict[str, int | None]:
        """With its null, which says something here."""
        return {"ttl_seconds": self.ttl_seconds}


# --- sessions ----------------------------------------------------------------------------------------------------


class GetSessionResponse(Result):
    """What belongs to a session."""

    training_run_ids: list[str]
    sampler_ids: list[str]
    user_metadata: dict[str, Any] | None = None
    display_name: str | None = None


class ListSessionsResponse(Result):
    """Session ids, newest first."""

    sessions: list[str]


class AssignSessionProjectRequest(StrictValue):
    """Puts a session into a project."""

    project_id: Annotated[str, Field(min_length=1, max_length=256)]


class SessionSearchCursor(Result):
    """Where the next page starts; passed back unchanged."""

    last_created_at: AwareDatetime
    last_session_id: str


class SessionSearchOwner(StrictValue):
    """Selects sessions by owner: `own` and `accessible` mean the same here; `user` takes a list of owners."""

    type: Literal["own", "accessible", "user"] = "own"
    owner_urns: list[str] | None = None

    @model_validator(mode="after")
    def _check(self) -> Self:
        if (self.type == "user") != (self.owner_urns is not None):
            remedy = "Give the owners with the type user, and with no other"
            raise InvalidRequestError(
                f"does not go with {self.type}", field="owner_urns", value=self.owner_urns, remedy=remedy
            )
        return self


class SessionStatusQuery(StrictValue):
    """A state to look for; sessions here are `active` or `client_finished`, so the others match none.

    `reasons` are those that clients gave when they finished; None finds sessions that ended in any way.
    """

    type: Literal["active", "cancelled", "failed", "client_finished"]
    reasons: Annotated[list[SessionOutcome], Field(min_length=1)] | None = None

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.reasons is not None and self.type != "client_finished":
            raise InvalidRequestError(
                f"does not go with {self.type}", field="reasons", value=self.reasons, remedy="Look for client_finished"
            )
        return self


class SessionSearchRequest(StrictValue):
    """Sessions to look for: every condition must hold, but of `session_id` and `display_name` either will do."""

    session_id: str | None = None
    project_ids: list[str] | None = None
    user_metadata: dict[str, Any] = Field(default_factory=dict)
    display_name: Annotated[str, Field(min_length=1)] | None = None
    owner: SessionSearchOwner = Field(default_factory=SessionSearchOwner)
    statuses: Annotated[list[SessionStatusQuery], Field(min_length=1)] | None = None
    limit: Annotated[int, Field(ge=1, le=200)] = 50
    cursor: SessionSearchCursor | None = None


class SessionSummary(Result):
    """One session.

    `status` is `{"type": "active"}` while it lives, then `{"type": "client_finished", "reason": {"type": …}, "detail":
    …}`, or None if it ended without a word of its client.
    """

    session_id: str
    created_at: datetime
    owner: str
    project_id: str
    status: dict[str, Any] | None = None
    checkpoints_count: int
    display_name: str | None = None
    user_metadata: dict[str, Any] | None = None
    checkpoint_storage_bytes: int | None = None


class SessionSearchResponse(Result):
    """A page of sessions, newest first; `next_cursor` None after the last."""

    sessions: list[SessionSummary]
    next_cursor: SessionSearchCursor | None = None


class SessionTraceExportResponse(Result):
    """A trace's state; this server keeps none, and says so."""

    status: Literal["pending", "ready", "failed"]
    url: str | None = None
    error: str | None = None


# --- pages -------------------------------------------------------------------------------------------------------


class PageQuery(BaseModel):
    """Which part of a list: at most `MAX_PAGE` items are given at once, whatever was asked for."""

    model_config = ConfigDict(extra="ignore")

    limit: Annotated[int, Field(ge=0)] = 20
    offset: Annotated[int, Field(ge=0, le=MAX_OFFSET)] = 0
    access_scope: AccessScope = "owned"
    project_id: str | None = None

    @property
    def size(self) -> int:
        """The page size that takes effect."""
        return min(self.limit, MAX_PAGE)


class WholeQuery(PageQuery):
    """A list for a client that knows no pages: as many rows as `MAX_WHOLE`."""

    limit: Annotated[int, Field(ge=0)] = MAX_WHOLE

    @property
    def size(self) -> int:
        """The number of rows that takes effect."""
        return MAX_WHOLE


FIRST_PAGE = PageQuery(limit=MAX_PAGE)
"""The most that one question can give."""
