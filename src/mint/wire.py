"""Requests, and the bytes on the wire that requests and results are written as: JSON.

Knows no HTTP and no routes. Infinities and NaN are written as `Infinity` and `NaN`, which both sides read.
"""

from __future__ import annotations

from typing import Any, Literal, TypeVar

import pydantic_core
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from mint.errors import MintError
from mint.types import AdamParams, Datum, LoraConfig, ModelInput, SamplingParams, StrictValue, invalid_request

T = TypeVar("T", bound=BaseModel)

MEDIA_TYPE = "application/json"
API_PREFIX = "/api/v1"


def encode(message: BaseModel) -> bytes:
    """A request or result as JSON, without the fields that are None."""
    return message.model_dump_json(exclude_none=True).encode()


def encode_error(error: MintError) -> bytes:
    """The body of a refused request or of a failed future."""
    return pydantic_core.to_json(error.to_wire())


def decode(kind: type[T], body: bytes) -> T:
    """The message in `body`.

    Raises:
        InvalidRequestError: the body is not JSON, or not of this kind; names the first wrong field.
    """
    try:
        return kind.model_validate_json(body)
    except ValidationError as error:
        raise invalid_request(error, kind.__name__) from error


def decode_error(body: bytes) -> dict[str, Any] | None:
    """The error in `body` as `to_wire` wrote it, or None where it holds no error."""
    try:
        content = pydantic_core.from_json(body)
    except ValueError:
        return None
    return content if isinstance(content, dict) and "error" in content else None


def read_identity(body: bytes, name: str, number: str) -> tuple[str, int] | None:
    """The string field `name` and the whole number `number` of a body that may be wrong everywhere else.

    A request whose place in the order can be read has used that place up, however wrong the rest of it is.
    """
    try:
        content = pydantic_core.from_json(body)
    except ValueError:
        return None
    if not isinstance(content, dict):
        return None
    owner, place = content.get(name), content.get(number)
    if not isinstance(owner, str) or not isinstance(place, int) or isinstance(place, bool):
        return None
    return owner, place


# --- requests ----------------------------------------------------------------------------------------------------


class CreateSessionRequest(StrictValue):
    """Opens a session; everything else belongs to one."""

    model_config = ConfigDict(strict=True, extra="ignore")
    tags: list[str] = Field(default_factory=list)
    user_metadata: dict[str, Any] | None = None
    sdk_version: str = ""


class SessionRequest(StrictValue):
    """Heartbeat, or the end of a session."""

    model_config = ConfigDict(strict=True, extra="ignore")
    session_id: str


class CreateModelRequest(StrictValue):
    """A new lora over `base_model`; its id is `{session_id}:train:{model_seq_id}`."""

    session_id: str
    model_seq_id: int
    base_model: str
    lora_config: LoraConfig = Field(default_factory=LoraConfig)
    user_metadata: dict[str, Any] | None = None
    type: Literal["create_model"] = "create_model"


class ModelRequest(StrictValue):
    """A question about one model."""

    model_config = ConfigDict(strict=True, extra="ignore")
    model_id: str


class ForwardBackwardInput(StrictValue):
    """The data and the loss of one pass."""

    data: list[Datum]
    loss_fn: str
    loss_fn_config: dict[str, float] | None = None


class ForwardBackwardRequest(StrictValue):
    """One pass over `data`; with `forward_only` no gradient is made."""

    model_id: str
    seq_id: int
    forward_backward_input: ForwardBackwardInput
    forward_only: bool = False


class ForwardRequest(StrictValue):
    """One pass without a gradient, as older SDKs ask for it."""

    model_id: str
    seq_id: int
    forward_input: ForwardBackwardInput


class OptimStepRequest(StrictValue):
    """Applies the accumulated gradient."""

    model_id: str
    seq_id: int
    adam_params: AdamParams = Field(default_factory=AdamParams)
    type: Literal["optim_step"] = "optim_step"


class SaveWeightsRequest(StrictValue):
    """Saves weights and optimizer under `path` (a bare name)."""

    model_id: str
    seq_id: int
    path: str
    overwrite: bool = False
    type: Literal["save_weights"] = "save_weights"


class SaveWeightsForSamplerRequest(StrictValue):
    """Saves weights under `path`, or, with `sampling_session_seq_id`, publishes them in memory only."""

    model_id: str
    seq_id: int
    path: str | None = None
    sampling_session_seq_id: int | None = None
    kind: Literal["snapshot"] = "snapshot"
    type: Literal["save_weights_for_sampler"] = "save_weights_for_sampler"


class LoadWeightsRequest(StrictValue):
    """Loads a checkpoint into `model_id`, or, with `session_id` and `model_seq_id`, into a new model."""

    path: str
    optimizer: bool
    model_id: str | None = None
    seq_id: int | None = None
    session_id: str | None = None
    model_seq_id: int | None = None
    type: Literal["load_weights"] = "load_weights"


class CreateSamplingSessionRequest(StrictValue):
    """A sampler over a base model or over saved weights."""

    session_id: str
    sampling_session_seq_id: int
    base_model: str | None = None
    model_path: str | None = None
    type: Literal["create_sampling_session"] = "create_sampling_session"


class SampleRequest(StrictValue):
    """`num_samples` continuations of one prompt."""

    sampling_session_id: str
    seq_id: int
    prompt: ModelInput
    sampling_params: SamplingParams
    num_samples: int = 1
    prompt_logprobs: bool = False
    topk_prompt_logprobs: int = 0
    type: Literal["sample"] = "sample"


class WeightsInfoRequest(StrictValue):
    """A question about one checkpoint."""

    model_config = ConfigDict(strict=True, extra="ignore")
    tinker_path: str


class RetrieveFutureRequest(StrictValue):
    """Waits for one result."""

    model_config = ConfigDict(strict=True, extra="ignore")
    request_id: str
