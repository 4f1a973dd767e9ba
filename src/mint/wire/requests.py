"""Every request of the protocol, as strict values. Results and the values that users make are in `mint.types`.

Defaults are the protocol's own (Tinker's), because old SDKs leave out a field that has its default; the mint SDK sends
every setting. Unknown fields of newer SDKs are ignored and named in the log. Known fields that cannot be honoured are
refused, unless they have no effect.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

import pydantic_core
from pydantic import AfterValidator, Field, model_validator

from mint.errors import InvalidRequestError
from mint.types import AdamParams, CheckpointUri, Datum, LoraConfig, ModelInput, SamplingParams, StrictValue, TensorData

_DEFAULTS: dict[str, dict[str, Any]] = {
    "adam_params": {"learning_rate": 1e-4, "beta1": 0.9, "beta2": 0.95, "eps": 1e-12},
    "lora_config": {"rank": 32},
    "sampling_params": {},
}
"""The protocol's values for settings that a client leaves out; the mint SDK's own defaults differ."""

MAX_METADATA_BYTES = 256 * 1024
"""The most JSON that a session, a model or a checkpoint may have as `user_metadata`: its row is kept for good."""


def _bounded(metadata: dict[str, Any]) -> dict[str, Any]:
    try:
        size = len(pydantic_core.to_json(metadata))
    except ValueError as error:
        remedy = "Pass text that is valid Unicode, and only numbers, texts, lists and dictionaries"
        raise InvalidRequestError("cannot be written as JSON", value=repr(metadata), remedy=remedy) from error
    if size > MAX_METADATA_BYTES:
        remedy = f"Send at most {MAX_METADATA_BYTES} bytes of JSON; keep larger things in a file of your own"
        raise InvalidRequestError("is too large", value=f"{size} bytes", remedy=remedy)
    return metadata


UserMetadata = Annotated[dict[str, Any], AfterValidator(_bounded)]


class WireRequest(StrictValue):
    """A request. A field that is null counts as left out, and gets the protocol's default.

    A number is the exception: JSON has no NaN and no infinity, and clients write null for them. So a null where a
    number belongs is kept, and refused by the field's type.
    """

    @model_validator(mode="before")
    @classmethod
    def _complete(cls, fields: Any) -> Any:
        if not isinstance(fields, dict):
            return fields
        given = _without_nulls(fields, cls)
        for key in _DEFAULTS.keys() & cls.model_fields.keys():
            part = given.get(key, {})
            if isinstance(part, dict):
                defaults = dict(_DEFAULTS[key])
                known = _without_nulls(part, cls.model_fields[key].annotation)
                if "betas" in known:  # stands for both
                    defaults.pop("beta1", None)
                    defaults.pop("beta2", None)
                given[key] = defaults | known
        return given


def _without_nulls(fields: dict[Any, Any], message: Any) -> dict[Any, Any]:
    """`fields` of a message without those that are null, except where the message has a number that is never null."""
    kept = {}
    for name, value in fields.items():
        field = message.model_fields.get(name)
        if value is not None or (field is not None and field.annotation in (int, float)):
            kept[name] = value
    return kept


class ClientConfigRequest(WireRequest):
    """The version of the SDK that asks."""

    sdk_version: str = ""


class ResizeClusterRequest(WireRequest):
    """How many processes train and sample; what is left out stays as it is."""

    trainers: int | None = Field(None, ge=1, le=64)
    samplers: int | None = Field(None, ge=1, le=64)


class JoinSamplerRequest(WireRequest):
    """A worker at an address joins or leaves; `key` is what it asks of those that send it work."""

    address: str = Field(max_length=300, pattern=r"^https?://[^/?#@\s,]+$")
    key: str = Field(min_length=16, max_length=200, pattern=r"^[A-Za-z0-9_-]+$")
    leaves: bool = False


class CreateSessionRequest(WireRequest):
    """Opens a session; models and samplers belong to one.

    `request_key` is a random key of this request: an owner who sends it again gets the same session.
    """

    tags: list[str] = Field(default_factory=list)
    user_metadata: UserMetadata | None = None
    sdk_version: str = ""
    project_id: str | None = None
    display_name: str | None = None
    request_key: str | None = Field(default=None, pattern="^[0-9a-f]{32}$")
    type: Literal["create_session"] = "create_session"


class SessionRequest(WireRequest):
    """A heartbeat."""

    session_id: str
    type: Literal["session_heartbeat"] = "session_heartbeat"


class FinishReason(WireRequest):
    """How a session ended: a `SessionOutcome`, or what a newer client says, which is not kept."""

    type: str = "success"


class FinishSessionRequest(WireRequest):
    """Why a session ends; the server keeps the first 1,000 characters of `detail`."""

    reason: FinishReason | None = None
    detail: str | None = None


class CreateModelRequest(WireRequest):
    """A new lora over `base_model`; its id is `{session_id}:train:{model_seq_id}`."""

    session_id: str
    model_seq_id: int
    base_model: str
    lora_config: LoraConfig = Field(default_factory=LoraConfig)
    optimizer_config: dict[str, Any] | None = None
    rollout_correction_config: dict[str, Any] | None = None
    user_metadata: UserMetadata | None = None
    type: Literal["create_model"] = "create_model"


class ModelRequest(WireRequest):
    """A question about one model."""

    model_id: str
    type: Literal["get_info"] = "get_info"


class UnloadModelRequest(WireRequest):
    """Drops a model."""

    model_id: str
    type: Literal["unload_model"] = "unload_model"


class ForwardBackwardInput(StrictValue):
    """The data and the loss of one pass."""

    data: list[Datum]
    loss_fn: str
    loss_fn_config: dict[str, float | str] | None = None


class ForwardBackwardRequest(StrictValue):
    """One pass over `data`; with `forward_only` no gradient is made."""

    model_id: str
    seq_id: int
    forward_backward_input: ForwardBackwardInput
    forward_only: bool = False
    type: Literal["forward_backward"] = "forward_backward"


class ForwardRequest(StrictValue):
    """One pass without a gradient, as older SDKs ask for it."""

    model_id: str
    seq_id: int
    forward_input: ForwardBackwardInput
    type: Literal["forward"] = "forward"


class OptimStepRequest(WireRequest):
    """Applies the accumulated gradient."""

    model_id: str
    seq_id: int
    adam_params: AdamParams = Field(default_factory=AdamParams)
    optimizer_params: dict[str, Any] | None = None
    type: Literal["optim_step"] = "optim_step"


class SaveWeightsRequest(WireRequest):
    """Saves weights and optimizer under `path` (a bare name)."""

    model_id: str
    seq_id: int
    path: str
    overwrite: bool = False
    ttl_seconds: int | None = None
    user_metadata: UserMetadata | None = None
    type: Literal["save_weights"] = "save_weights"


class SaveWeightsForSamplerRequest(WireRequest):
    """Saves weights under `path`, or, with `sampling_session_seq_id`, publishes them in memory only."""

    model_id: str
    seq_id: int
    path: str | None = None
    sampling_session_seq_id: int | None = None
    kind: str = "snapshot"
    ttl_seconds: int | None = None
    user_metadata: UserMetadata | None = None
    type: Literal["save_weights_for_sampler"] = "save_weights_for_sampler"


class SaveWeightsExternalRequest(WireRequest):
    """Saves weights as a PEFT folder, to be downloaded file by file."""

    model_id: str
    seq_id: int
    path: str
    ttl_seconds: int | None = None
    age_encryption_recipients: list[str] | None = None
    user_metadata: UserMetadata | None = None
    type: Literal["save_weights_external"] = "save_weights_external"


class LoadWeightsRequest(WireRequest):
    """Loads a checkpoint into `model_id`, or, with `session_id` and `model_seq_id`, into a new model."""

    path: CheckpointUri
    optimizer: bool = False
    model_id: str | None = None
    seq_id: int | None = None
    session_id: str | None = None
    model_seq_id: int | None = None
    base_model: str | None = None
    optimizer_config: dict[str, Any] | None = None
    user_metadata: UserMetadata | None = None
    weights_access_token: str | None = None
    type: Literal["load_weights"] = "load_weights"


class CreateSamplingSessionRequest(WireRequest):
    """A sampler over a base model or over saved weights."""

    session_id: str
    sampling_session_seq_id: int
    base_model: str | None = None
    model_path: CheckpointUri | None = None
    type: Literal["create_sampling_session"] = "create_sampling_session"


class SampleRequest(WireRequest):
    """`num_samples` continuations of one prompt.

    `record_stability_info` asks a server to keep what the loss `stable_reinforce` needs of a sequence. Here that is in
    its logprobs, which are always sent and come back in the datum, so nothing is kept. `base_model` and `model_path`
    are refused: here the session has them.
    """

    sampling_session_id: str
    seq_id: int
    prompt: ModelInput
    sampling_params: SamplingParams = Field(default_factory=SamplingParams)
    base_model: str | None = None
    model_path: str | None = None
    num_samples: int = 1
    prompt_logprobs: bool = False
    topk_prompt_logprobs: int = 0
    topk_sample_logprobs: int = 0
    target_prompt_logprobs: TensorData | None = None
    prompt_alt_tokens_k: int = 0
    prompt_logprobs_last_n: int | None = None
    record_stability_info: bool = False
    type: Literal["sample"] = "sample"


class WeightsInfoRequest(WireRequest):
    """A question about one checkpoint."""

    tinker_path: CheckpointUri


class RetrieveFutureRequest(WireRequest):
    """A long poll for one result."""

    request_id: str
    allow_metadata_only: bool = False


class SamplingSessionTarget(WireRequest):
    """A sampler whose results are polled, or one of its clones (`seq_id // 1e9`)."""

    sampling_session_id: str
    cloned_sampler_id: int = 0
    type: Literal["sampling_session"] = "sampling_session"


class RetrieveFuturesRequest(WireRequest):
    """Polls for the results of a sampler; `prev_cursor` is the last answer's cursor, or 0.

    `timeout` is in seconds, 0 for an answer at once; results that were fetched already may be forgotten.
    """

    target: SamplingSessionTarget
    prev_cursor: int = 0
    timeout: float | None = None
    retrieved_request_ids: list[str] = Field(default_factory=list)


class JoinSamplingSessionRequest(WireRequest):
    """Gives a further client of a sampler a number of its own."""

    sampling_session_id: str
    type: Literal["join_sampling_session"] = "join_sampling_session"


class CancelFutureRequest(WireRequest):
    """Cancels a sample request whose result is not wanted any more."""

    request_id: str
    type: Literal["cancel_future"] = "cancel_future"
