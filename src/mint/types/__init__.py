"""The values that a user builds, and the results that a user gets.

Knows nothing of requests and bytes (`wire`), HTTP (`client`, `server`) or arithmetic (`engine`). Values are checked
here for their *type* only; whether they make sense for a model (token in the vocabulary, lengths, ranges) is checked by
the service.

Letters in the shape comments: N tokens of one datum · K alternatives per position.
"""

from __future__ import annotations

from importlib import import_module
from typing import Annotated, Any, Literal, NamedTuple

import numpy as np
from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    PlainSerializer,
    ValidationError,
    field_validator,
    model_validator,
)

from mint.errors import InvalidRequestError
from mint.types.model_input import EncodedTextChunk, ModelInput
from mint.types.tensors import DType, StrictValue, TensorData
from mint.types.tensors import of_checked as of_checked

StopReason = Literal["stop", "length"]
LossName = Literal["cross_entropy", "importance_sampling", "ppo", "cispo", "dro", "gspo"]

INT_INPUTS = frozenset({"target_tokens"})
"""Keys of `Datum.loss_fn_inputs` that hold token ids; all others are float32."""

LOSS_WEIGHTS = "loss_weights"
"""Another name of the input `weights`."""


def input_dtype(key: str) -> DType:
    """What the tensor under this key of `Datum.loss_fn_inputs` holds."""
    return "int64" if key in INT_INPUTS else "float32"


class _Params(StrictValue):
    """A strict value that users construct by hand, so that a wrong type is a `MintError` too."""

    def __init__(self, **fields: Any) -> None:
        try:
            super().__init__(**fields)
        except ValidationError as error:
            raise invalid_request(error, type(self).__name__) from error


def invalid_request(error: ValidationError, where: str) -> InvalidRequestError:
    """The first complaint of a pydantic error as a `MintError` that names field, value and remedy."""
    first = error.errors()[0]
    inner = first.get("ctx", {}).get("error")
    if isinstance(inner, InvalidRequestError):
        return inner
    path = ".".join(str(part) for part in (where, *first["loc"]))
    value = "(missing)" if first["type"] == "missing" else first.get("input")
    remedy = "Remove it or correct its spelling" if first["type"] == "extra_forbidden" else None
    return InvalidRequestError(first["msg"], field=path, value=value, remedy=remedy)


# --- inputs, datums ----------------------------------------------------------------------------------------------


class Datum(_Params):
    """One training example: an input of N tokens and the tensors that its loss reads, each of length N.

    Position t of every tensor speaks of predicting `target_tokens[t]` from `model_input[: t + 1]`; so
    `model_input = full[:-1]` and `target_tokens = full[1:]`. Values may be lists, numpy arrays, torch tensors or
    `TensorData`; `loss_weights` is read as `weights`. For cross-entropy, targets and weights may both be [N, K]: K
    weighted targets per position (top-K distillation), dense or sparse.
    """

    model_input: ModelInput
    loss_fn_inputs: dict[str, TensorData]

    @field_validator("loss_fn_inputs", mode="before")
    @classmethod
    def _as_tensors(cls, inputs: Any) -> Any:
        if not isinstance(inputs, dict):
            return inputs
        if LOSS_WEIGHTS in inputs:
            if "weights" in inputs:
                raise InvalidRequestError(
                    "is an alias of `weights`, and both were given",
                    field="loss_fn_inputs.loss_weights",
                    value="(given twice)",
                    remedy="Give one of them",
                )
            inputs = {("weights" if key == LOSS_WEIGHTS else key): value for key, value in inputs.items()}
        return {key: _as_tensor(key, value) for key, value in inputs.items()}


def _as_tensor(key: str, value: Any) -> Any:
    dtype = input_dtype(key)
    if isinstance(value, TensorData) and value.dtype == dtype:
        return value
    if isinstance(value, dict):
        value = TensorData.model_validate(value)
        if value.dtype == dtype:
            return value
    try:
        return TensorData.from_any(value, dtype=dtype)
    except (ValueError, OverflowError) as error:
        if isinstance(error, InvalidRequestError):
            error.field = f"loss_fn_inputs.{key}"
            raise
        raise InvalidRequestError(
            str(error), field=f"loss_fn_inputs.{key}", value=value, remedy="Pass numbers, one per token"
        ) from error


# --- parameters --------------------------------------------------------------------------------------------------


class SamplingParams(_Params):
    """How to sample.

    `max_tokens` None means up to the context. `stop` is a string, strings or token ids, besides the model's own end
    token; None keeps that alone, `[]` disables every stop. `stop_token_ids` adds token ids to whatever `stop` says.
    The stop token is kept as the last of the sequence. `temperature` 0 is greedy; `top_k` -1 and `top_p` 1.0 are off.
    `logprobs_mode` "raw": logprobs are the policy's own, at temperature 1 without top-k and top-p. "processed": those
    of the distribution that was really sampled from (greedy: 0); to train on them, pass the same temperature to the
    loss (`loss_fn_config={"temperature": …}`).
    """

    max_tokens: int | None = None
    temperature: float = 1.0
    top_k: int = -1
    top_p: float = 1.0
    seed: int | None = None
    stop: str | list[str] | list[int] | None = None
    stop_token_ids: list[int] | None = None
    logprobs_mode: Literal["raw", "processed"] = "raw"


class AdamParams(_Params):
    """One AdamW step. `grad_clip_norm` 0 means no clipping; `betas=(b1, b2)` may stand for `beta1` and `beta2`."""

    learning_rate: float = 2e-5
    beta1: float = 0.9
    beta2: float = 0.999
    eps: float = 1e-8
    weight_decay: float = 0.0
    grad_clip_norm: float = 0.0

    @model_validator(mode="before")
    @classmethod
    def _split_betas(cls, fields: Any) -> Any:
        if not isinstance(fields, dict) or "betas" not in fields:
            return fields
        fields = dict(fields)
        betas = fields.pop("betas")
        if "beta1" in fields or "beta2" in fields or not isinstance(betas, list | tuple) or len(betas) != 2:
            raise InvalidRequestError(
                "is not a pair (beta1, beta2), or was given together with beta1/beta2",
                field="AdamParams.betas",
                value=betas,
                remedy="Pass betas=(0.9, 0.999), or beta1 and beta2",
            )
        return {**fields, "beta1": betas[0], "beta2": betas[1]}

    @property
    def betas(self) -> tuple[float, float]:
        """`(beta1, beta2)`."""
        return (self.beta1, self.beta2)


class LoraConfig(_Params):
    """Which linear layers get a lora, of which rank. The scale is alpha / rank with alpha = 32 for every rank."""

    rank: int = 16
    seed: int | None = None
    train_unembed: bool = True
    train_mlp: bool = True
    train_attn: bool = True


def _show(path: str) -> str:
    return "mint://" + path.removeprefix("tinker://") if path.startswith("tinker://") else path


def _send(path: str) -> str:
    return "tinker://" + path.removeprefix("mint://") if path.startswith("mint://") else path


CheckpointUri = Annotated[str, AfterValidator(_show), PlainSerializer(_send)]
"""A checkpoint's path: `mint://…` in Python, `tinker://…` on the wire, as every client of this protocol reads it."""


# --- results -----------------------------------------------------------------------------------------------------


class _Result(BaseModel):
    """A result: read leniently, so that a newer server may say more."""

    model_config = ConfigDict(extra="ignore", ser_json_inf_nan="constants")


class UntypedPromise(_Result):
    """An accepted request; its result is fetched by `request_id`."""

    request_id: str
    model_id: str | None = None
    sample_sequence_ids: list[str] | None = None


class CreateSessionResponse(_Result):
    """A new session; the messages are for people."""

    session_id: str
    info_message: str | None = None
    warning_message: str | None = None
    error_message: str | None = None
    type: str = "create_session"


class CreateModelResponse(_Result):
    """A new model."""

    model_id: str
    type: str = "create_model"


class ModelData(_Result):
    """Which base model, and whose tokenizer."""

    model_name: str
    tokenizer_id: str
    arch: str = "qwen3"


class GetInfoResponse(_Result):
    """What a model is, and every setting that took effect."""

    model_id: str
    model_data: ModelData
    is_lora: bool = True
    lora_rank: int
    model_name: str | None = None
    type: str = "get_info"
    effective: dict[str, Any] = Field(default_factory=dict)
    """alpha, scale, seed, trained modules and parameter count, dtype, context length, vocabulary size, threads."""


class ForwardBackwardOutput(_Result):
    """Per datum `logprobs`, of the shape of its targets, and under a policy's loss `entropies` [N]; `metrics` are named
    `name:reduction`; `warnings` name doubtful data."""

    loss_fn_output_type: str = "ArrayRecord"
    loss_fn_outputs: list[dict[str, TensorData]]
    metrics: dict[str, float] = Field(default_factory=dict)
    warnings: list[str] = Field(default_factory=list)


class OptimStepResponse(_Result):
    """`metrics` holds at least `grad_norm`, `step`, `learning_rate` and `skipped_nonfinite`; `state_digest` names the
    weights and moments after the step."""

    metrics: dict[str, float] = Field(default_factory=dict)
    state_digest: str | None = None


class SaveWeightsResponse(_Result):
    """Where the checkpoint is: `mint://{model_id}/weights/{name}`."""

    path: CheckpointUri
    type: str = "save_weights"


class SaveWeightsForSamplerResponse(_Result):
    """A path (named save) or a sampling session (published in memory)."""

    path: CheckpointUri | None = None
    sampling_session_id: str | None = None
    type: str = "save_weights_for_sampler"


class SaveWeightsExternalResponse(_Result):
    """Where the PEFT folder is: `mint://{model_id}/external_weights/{name}`."""

    path: CheckpointUri
    size_bytes: int | None = None
    type: str = "save_weights_external"


class LoadWeightsResponse(_Result):
    """The loaded checkpoint, and the model that holds it now."""

    path: CheckpointUri
    model_id: str | None = None
    type: str = "load_weights"


class CreateSamplingSessionResponse(_Result):
    """A new sampler."""

    sampling_session_id: str
    type: str = "create_sampling_session"


class SamplerInfo(_Result):
    """What a sampler samples from."""

    sampler_id: str
    base_model: str
    model_path: CheckpointUri | None = None
    tokenizer_id: str | None = None


class TopkLogprobs(NamedTuple):
    """The most probable tokens at L places, best first, as matrices [L, K]; empty cells are (0, -99999)."""

    token_ids: np.ndarray
    logprobs: np.ndarray


def _as_matrices(rows: list[list[tuple[int, float]]] | list[list[tuple[int, float]] | None]) -> TopkLogprobs:
    width = max((len(row) for row in rows if row is not None), default=0)
    token_ids = np.zeros((len(rows), width), np.int32)
    logprobs = np.full((len(rows), width), -99999.0, np.float32)
    for place, row in enumerate(rows):
        for column, (token, logprob) in enumerate(row or ()):
            token_ids[place, column], logprobs[place, column] = token, logprob
    return TopkLogprobs(token_ids, logprobs)


class SampledSequence(_Result):
    """Token ids, and for each its logprob, as `SamplingParams.logprobs_mode` says. Same length, always present."""

    tokens: list[int]
    logprobs: list[float]
    stop_reason: StopReason
    topk_logprobs: list[list[tuple[int, float]]] | None = None
    """The most probable tokens at each place, best first, and the policy's own logprobs of them; on request."""

    @property
    def tokens_np(self) -> np.ndarray:
        """`tokens` as int32."""
        return np.asarray(self.tokens, np.int32)

    @property
    def logprobs_np(self) -> np.ndarray:
        """`logprobs` as float32."""
        return np.asarray(self.logprobs, np.float32)

    @property
    def topk_logprobs_np(self) -> TopkLogprobs | None:
        """`topk_logprobs` as matrices."""
        return None if self.topk_logprobs is None else _as_matrices(self.topk_logprobs)


class PromptAltTokens(_Result):
    """Draws from the policy at every place of the prompt after the first, both [prompt - 1, K]: row i is about token
    i + 1, and the logprobs are the policy's own, whatever the temperature of the draws."""

    tokens: TensorData
    logprobs: TensorData


class SampleResponse(_Result):
    """The samples; on request the prompt's logprobs (first None) and the top-k alternatives per prompt token."""

    sequences: list[SampledSequence]
    prompt_logprobs: list[float | None] | None = None
    topk_prompt_logprobs: list[list[tuple[int, float]] | None] | None = None
    target_prompt_logprobs: TensorData | None = None
    """Logprobs of the tokens that the request named, in its layout; 0 where it named none (-1)."""
    prompt_alt_tokens: PromptAltTokens | None = None

    @property
    def prompt_logprobs_np(self) -> np.ndarray | None:
        """`prompt_logprobs` as float32, NaN where there is none."""
        if self.prompt_logprobs is None:
            return None
        return np.asarray([np.nan if logprob is None else logprob for logprob in self.prompt_logprobs], np.float32)

    @property
    def topk_prompt_logprobs_np(self) -> TopkLogprobs | None:
        """`topk_prompt_logprobs` as matrices."""
        return None if self.topk_prompt_logprobs is None else _as_matrices(self.topk_prompt_logprobs)


class WeightsInfoResponse(_Result):
    """What a checkpoint was saved from."""

    base_model: str
    is_lora: bool = True
    lora_rank: int
    train_unembed: bool
    train_mlp: bool
    train_attn: bool


class SupportedModel(_Result):
    """A base model that this server can train and sample."""

    model_name: str
    max_context_length: int | None = None
    trainable: bool = True
    sampleable: bool = True


class GetServerCapabilitiesResponse(_Result):
    """What this server offers."""

    supported_models: list[SupportedModel]


class TokenizerFilesResponse(_Result):
    """What a base model's tokenizer is made of: file name → text."""

    base_model: str
    files: dict[str, str]


# --- names of other SDKs of this protocol ------------------------------------------------------------------------

LossFnType = LossName
ModelID = str
ModelInputChunk = EncodedTextChunk
OptimParams = AdamParams
TensorDtype = DType

_ELSEWHERE = {
    "mint.types.model_input": ("DmelChunk", "ImageAssetPointerChunk", "ImageChunk"),
    "mint.types.records": (
        "Checkpoint", "CheckpointArchiveUrlResponse", "CheckpointType", "CheckpointsListResponse", "CopyWeightsRequest",
        "CopyWeightsResponse", "Cursor", "ExternalWeightsUrlsResponse", "GetSessionResponse", "ListSessionsResponse",
        "ParsedCheckpointTinkerPath", "SessionSearchCursor", "SessionSearchOwner", "SessionSearchRequest",
        "SessionSearchResponse", "SessionStatusQuery", "SessionSummary", "TrainingRun", "TrainingRunsResponse",
    ),
    "mint.wire.requests": ("ForwardBackwardInput", "OptimStepRequest", "SampleRequest"),
}  # fmt: skip


def __getattr__(name: str) -> Any:
    for module, names in _ELSEWHERE.items():
        if name in names:
            return getattr(import_module(module), name)  # deferred: these modules are built on this one
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
