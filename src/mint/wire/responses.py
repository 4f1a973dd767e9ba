"""The responses that only clients read; those that users see are in `mint.types`."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, Field


class ClientConfigResponse(BaseModel):
    """The client's feature flags; a flag that is left out keeps the client's own default."""

    use_pyqwest_transport: bool | None = None


class TelemetryResponse(BaseModel):
    """Telemetry is accepted and dropped."""

    status: Literal["accepted"] = "accepted"


class FutureCompletion(BaseModel):
    """A request that has ended."""

    state: Literal["finished", "failed"]
    request_id: str


class RetrieveFuturesResponse(BaseModel):
    """The requests that have ended since the last poll; the next poll passes `cursor` back."""

    completions: list[FutureCompletion] = Field(default_factory=list)
    cursor: int


class JoinSamplingSessionResponse(BaseModel):
    """A number that no other client of the sampler has."""

    client_counter: int
    type: Literal["join_sampling_session"] = "join_sampling_session"


class UnloadModelResponse(BaseModel):
    """A model that was dropped."""

    model_id: str
    type: Literal["unload_model"] = "unload_model"


class ModelSummary(BaseModel):
    """A model in training; `lora_rank` is None until the model is made."""

    model_id: str
    session_id: str
    base_model: str | None = None
    lora_rank: int | None = None


class LiveModelsResponse(BaseModel):
    """The caller's models."""

    models: list[ModelSummary]
