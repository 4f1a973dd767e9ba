"""The public names of `mint`, each with its home. `mint/__init__.py` serves them when they are first used.

Importing this module loads the whole SDK.
"""

from __future__ import annotations

import mint.errors as errors  # noqa: F401
import mint.types as types  # noqa: F401
from mint.client.futures import APIFuture as APIFuture
from mint.client.rest_client import RestClient as RestClient
from mint.client.sampling_client import SamplingClient as SamplingClient
from mint.client.service_client import ServiceClient as ServiceClient
from mint.client.training_client import TrainingClient as TrainingClient
from mint.errors import APIConnectionError as APIConnectionError
from mint.errors import APIError as APIError
from mint.errors import APIResponseValidationError as APIResponseValidationError
from mint.errors import APIStatusError as APIStatusError
from mint.errors import APITimeoutError as APITimeoutError
from mint.errors import AuthenticationError as AuthenticationError
from mint.errors import BadRequestError as BadRequestError
from mint.errors import BillingError as BillingError
from mint.errors import ConflictError as ConflictError
from mint.errors import InternalServerError as InternalServerError
from mint.errors import MintError as MintError
from mint.errors import NotFoundError as NotFoundError
from mint.errors import PermissionDeniedError as PermissionDeniedError
from mint.errors import RateLimitError as RateLimitError
from mint.errors import RequestFailedError as RequestFailedError
from mint.errors import TinkerError as TinkerError
from mint.errors import UnprocessableEntityError as UnprocessableEntityError
from mint.types import AdamParams as AdamParams
from mint.types import Datum as Datum
from mint.types import DmelChunk as DmelChunk
from mint.types import EncodedTextChunk as EncodedTextChunk
from mint.types import ForwardBackwardOutput as ForwardBackwardOutput
from mint.types import ImageAssetPointerChunk as ImageAssetPointerChunk
from mint.types import ImageChunk as ImageChunk
from mint.types import LoraConfig as LoraConfig
from mint.types import ModelID as ModelID
from mint.types import ModelInput as ModelInput
from mint.types import ModelInputChunk as ModelInputChunk
from mint.types import OptimParams as OptimParams
from mint.types import OptimStepResponse as OptimStepResponse
from mint.types import PromptProvenanceSpan as PromptProvenanceSpan
from mint.types import ProvenanceSpans as ProvenanceSpans
from mint.types import SampledProvenanceSpan as SampledProvenanceSpan
from mint.types import SampledSequence as SampledSequence
from mint.types import SampleResponse as SampleResponse
from mint.types import SamplingParams as SamplingParams
from mint.types import StopReason as StopReason
from mint.types import TensorData as TensorData
from mint.types import TensorDtype as TensorDtype
from mint.types.records import Checkpoint as Checkpoint
from mint.types.records import CheckpointType as CheckpointType
from mint.types.records import ParsedCheckpointTinkerPath as ParsedCheckpointTinkerPath
from mint.types.records import TrainingRun as TrainingRun
from mint.wire.requests import OptimStepRequest as OptimStepRequest
from mint.wire.requests import SampleRequest as SampleRequest
