"""The values that a user builds, and the results that a user gets.

Knows nothing of requests and bytes (`wire`), HTTP (`client`, `server`) or arithmetic (`engine`). Values are checked
here for their *type* only; the service checks whether they make sense for a model (token in the vocabulary, lengths,
ranges).
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

from mint.types.checkpoint_path import CheckpointUri as CheckpointUri
from mint.types.datum import Datum as Datum
from mint.types.loss_settings import LossName as LossName
from mint.types.model_input import DmelChunk as DmelChunk
from mint.types.model_input import EncodedTextChunk as EncodedTextChunk
from mint.types.model_input import ImageAssetPointerChunk as ImageAssetPointerChunk
from mint.types.model_input import ImageChunk as ImageChunk
from mint.types.model_input import ModelInput as ModelInput
from mint.types.provenance import PromptProvenanceSpan as PromptProvenanceSpan
from mint.types.provenance import ProvenanceSpans as ProvenanceSpans
from mint.types.provenance import SampledProvenanceSpan as SampledProvenanceSpan
from mint.types.sampling import CreateSamplingSessionResponse as CreateSamplingSessionResponse
from mint.types.sampling import PromptAltTokens as PromptAltTokens
from mint.types.sampling import SampledSequence as SampledSequence
from mint.types.sampling import SampleResponse as SampleResponse
from mint.types.sampling import SamplerInfo as SamplerInfo
from mint.types.sampling import SamplingParams as SamplingParams
from mint.types.sampling import StopReason as StopReason
from mint.types.sampling import StructuredOutputs as StructuredOutputs
from mint.types.sampling import TopkLogprobs as TopkLogprobs
from mint.types.server_info import CreateSessionResponse as CreateSessionResponse
from mint.types.server_info import GetServerCapabilitiesResponse as GetServerCapabilitiesResponse
from mint.types.server_info import SupportedModel as SupportedModel
from mint.types.server_info import TokenizerFilesResponse as TokenizerFilesResponse
from mint.types.server_info import UntypedPromise as UntypedPromise
from mint.types.tensors import DType as DType
from mint.types.tensors import TensorData as TensorData
from mint.types.training import AdamParams as AdamParams
from mint.types.training import CreateModelResponse as CreateModelResponse
from mint.types.training import ForwardBackwardOutput as ForwardBackwardOutput
from mint.types.training import GetInfoResponse as GetInfoResponse
from mint.types.training import LoadWeightsResponse as LoadWeightsResponse
from mint.types.training import LoraConfig as LoraConfig
from mint.types.training import ModelData as ModelData
from mint.types.training import OptimStepResponse as OptimStepResponse
from mint.types.training import SaveWeightsExternalResponse as SaveWeightsExternalResponse
from mint.types.training import SaveWeightsForSamplerResponse as SaveWeightsForSamplerResponse
from mint.types.training import SaveWeightsResponse as SaveWeightsResponse
from mint.types.training import WeightsInfoResponse as WeightsInfoResponse
from mint.types.validation_errors import invalid_request as invalid_request
from mint.types.value_classes import StrictValue as StrictValue

# Names of other SDKs of this protocol.
LossFnType = LossName
ModelID = str
ModelInputChunk = EncodedTextChunk
OptimParams = AdamParams
TensorDtype = DType

_LOADED_WHEN_USED = {
    "mint.types.records": (
        "Checkpoint",
        "CheckpointArchiveUrlResponse",
        "CheckpointType",
        "CheckpointsListResponse",
        "CopyWeightsRequest",
        "CopyWeightsResponse",
        "Cursor",
        "ExternalWeightsUrlsResponse",
        "GetSessionResponse",
        "ListSessionsResponse",
        "ParsedCheckpointTinkerPath",
        "SessionSearchCursor",
        "SessionSearchOwner",
        "SessionSearchRequest",
        "SessionSearchResponse",
        "SessionStatusQuery",
        "SessionSummary",
        "TrainingRun",
        "TrainingRunsResponse",
    ),
    "mint.wire.requests": ("ForwardBackwardInput", "OptimStepRequest", "SampleRequest"),
}
"""Names of modules that are built on this one."""


def __getattr__(name: str) -> Any:
    for module, names in _LOADED_WHEN_USED.items():
        if name in names:
            return getattr(import_module(module), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
