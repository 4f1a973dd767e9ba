"""What is asked of a model in training, and what it answers. The examples are in `datum`.

Letters: N tokens of one datum.
"""

from __future__ import annotations

from typing import Any

from pydantic import Field, model_validator

from mint.errors import InvalidRequestError
from mint.types.checkpoint_path import CheckpointUri
from mint.types.tensors import TensorData
from mint.types.value_classes import Params, Result

MAX_RANK = 256
MAX_SEED = 2**63 - 1
"""The largest rank and seed of a lora; a sample's seed has the same limit."""


class AdamParams(Params):
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


class LoraConfig(Params):
    """Which linear layers get a lora, and of which rank. The scale is alpha / rank with alpha = 32 for every rank."""

    rank: int = 16
    seed: int | None = None
    train_unembed: bool = True
    train_mlp: bool = True
    train_attn: bool = True


class CreateModelResponse(Result):
    """A new model."""

    model_id: str
    type: str = "create_model"


class ModelData(Result):
    """The base model, and whose tokenizer it reads."""

    model_name: str
    tokenizer_id: str
    arch: str = "qwen3"


class GetInfoResponse(Result):
    """What a model is, and every setting that took effect."""

    model_id: str
    model_data: ModelData
    is_lora: bool = True
    lora_rank: int
    model_name: str | None = None
    type: str = "get_info"
    effective: dict[str, Any] = Field(default_factory=dict)
    """alpha, scale, seed, trained modules and parameter count, dtype, context length, vocabulary size, threads."""


class ForwardBackwardOutput(Result):
    """Per datum `logprobs`, of the shape of its targets, and under a policy loss `entropies` [N]; `metrics` are named
    `name:reduction`; `warnings` name doubtful data."""

    loss_fn_output_type: str = "ArrayRecord"
    loss_fn_outputs: list[dict[str, TensorData]]
    metrics: dict[str, float] = Field(default_factory=dict)
    warnings: list[str] = Field(default_factory=list)


class OptimStepResponse(Result):
    """`metrics` holds at least `grad_norm`, `step`, `learning_rate` and `skipped_nonfinite`; `state_digest` is a hash
    of weights and moments after the step."""

    metrics: dict[str, float] = Field(default_factory=dict)
    state_digest: str | None = None


class SaveWeightsResponse(Result):
    """The checkpoint's path: `mint://{model_id}/weights/{name}`."""

    path: CheckpointUri
    type: str = "save_weights"


class SaveWeightsForSamplerResponse(Result):
    """A path (named save) or a sampling session (published in memory)."""

    path: CheckpointUri | None = None
    sampling_session_id: str | None = None
    type: str = "save_weights_for_sampler"


class SaveWeightsExternalResponse(Result):
    """The path of the PEFT folder: `mint://{model_id}/external_weights/{name}`."""

    path: CheckpointUri
    size_bytes: int | None = None
    type: str = "save_weights_external"


class LoadWeightsResponse(Result):
    """The loaded checkpoint, and the model that holds it now."""

    path: CheckpointUri
    model_id: str | None = None
    type: str = "load_weights"


class WeightsInfoResponse(Result):
    """The model that a checkpoint was saved from."""

    base_model: str
    is_lora: bool = True
    lora_rank: int
    train_unembed: bool
    train_mlp: bool
    train_attn: bool
