"""mint: LoRA fine-tuning and reinforcement learning of language models, on your own machine.

    import mint
    from mint import types

    client = mint.ServiceClient()                                    # the service in this process, or MINT_BASE_URL
    trainer = client.create_lora_training_client("mint/tiny", rank=16)
    sampler = trainer.save_weights_and_get_sampling_client()

`import mint as tinker` serves scripts that were written for that package: its names are here, too. The names are loaded
when first used, so that `import mint` costs little.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from mint.version import VERSION

if TYPE_CHECKING:
    import mint.errors as errors
    import mint.types as types
    from mint.client.futures import APIFuture
    from mint.client.rest_client import RestClient
    from mint.client.sampling_client import SamplingClient
    from mint.client.service_client import ServiceClient
    from mint.client.training_client import TrainingClient
    from mint.errors import (
        APIConnectionError,
        APIError,
        APIResponseValidationError,
        APIStatusError,
        APITimeoutError,
        AuthenticationError,
        BadRequestError,
        BillingError,
        ConflictError,
        InternalServerError,
        MintError,
        NotFoundError,
        PermissionDeniedError,
        RateLimitError,
        RequestFailedError,
        TinkerError,
        UnprocessableEntityError,
    )
    from mint.types import (
        AdamParams,
        Checkpoint,
        CheckpointType,
        Datum,
        DmelChunk,
        EncodedTextChunk,
        ForwardBackwardOutput,
        ImageAssetPointerChunk,
        ImageChunk,
        LoraConfig,
        ModelID,
        ModelInput,
        ModelInputChunk,
        OptimParams,
        OptimStepRequest,
        OptimStepResponse,
        ParsedCheckpointTinkerPath,
        SampledSequence,
        SampleRequest,
        SampleResponse,
        SamplingParams,
        StopReason,
        TensorData,
        TensorDtype,
        TrainingRun,
    )

__version__ = VERSION

_NAMES = {
    "mint.client.futures": ("APIFuture",),
    "mint.client.rest_client": ("RestClient",),
    "mint.client.sampling_client": ("SamplingClient",),
    "mint.client.service_client": ("ServiceClient",),
    "mint.client.training_client": ("TrainingClient",),
    "mint.errors": (
        "APIConnectionError", "APIError", "APIResponseValidationError", "APIStatusError", "APITimeoutError",
        "AuthenticationError", "BadRequestError", "BillingError", "ConflictError", "InternalServerError", "MintError",
        "NotFoundError", "PermissionDeniedError", "RateLimitError", "RequestFailedError", "TinkerError",
        "UnprocessableEntityError",
    ),
    "mint.types": (
        "AdamParams", "Checkpoint", "CheckpointType", "Datum", "DmelChunk", "EncodedTextChunk",
        "ForwardBackwardOutput", "ImageAssetPointerChunk", "ImageChunk", "LoraConfig", "ModelID", "ModelInput",
        "ModelInputChunk", "OptimParams", "OptimStepRequest", "OptimStepResponse", "ParsedCheckpointTinkerPath",
        "SampleRequest", "SampleResponse", "SampledSequence", "SamplingParams", "StopReason", "TensorData",
        "TensorDtype", "TrainingRun",
    ),
}  # fmt: skip
_HOMES = {name: module for module, names in _NAMES.items() for name in names}
_SAME_AS = {"BackcompatSamplingClientFuture": "SamplingClient", "BackcompatTrainingClientFuture": "TrainingClient"}
"""Names of tinker's for what is both a client and the future of its making; here every client is."""

_MODULES = {"errors": "mint.errors", "types": "mint.types"}

__all__ = [
    "APIConnectionError", "APIError", "APIFuture", "APIResponseValidationError", "APIStatusError",
    "APITimeoutError", "AdamParams", "AuthenticationError", "BadRequestError", "BillingError", "Checkpoint",
    "CheckpointType", "ConflictError", "Datum", "DmelChunk", "EncodedTextChunk", "ForwardBackwardOutput",
    "ImageAssetPointerChunk", "ImageChunk", "InternalServerError", "LoraConfig", "MintError", "ModelID",
    "ModelInput", "ModelInputChunk", "NotFoundError", "OptimParams", "OptimStepRequest", "OptimStepResponse",
    "ParsedCheckpointTinkerPath", "PermissionDeniedError", "RateLimitError", "RequestFailedError", "RestClient",
    "SampleRequest", "SampleResponse", "SampledSequence", "SamplingClient", "SamplingParams", "ServiceClient",
    "StopReason", "TensorData", "TensorDtype", "TinkerError", "TrainingClient", "TrainingRun",
    "UnprocessableEntityError", "__version__", "errors", "types",
]  # fmt: skip


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return import_module(_MODULES[name])
    name = _SAME_AS.get(name, name)
    if name not in _HOMES:
        raise AttributeError(f"module 'mint' has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)
