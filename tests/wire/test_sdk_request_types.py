"""Our request types know every field of those of the newest public SDK, and of the types within them, so that none is
ignored in silence.

`tests/service/test_native_fields.py` shows that each field which we know is honoured or refused by name.
"""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest
from pydantic import BaseModel

from mint.types import AdamParams, LoraConfig, SamplingParams, records
from mint.types.datum import Datum
from mint.types.model_input import EncodedTextChunk, ModelInput
from mint.types.provenance import PromptProvenanceSpan, SampledProvenanceSpan
from mint.types.tensors import TensorData
from mint.types.value_classes import ArrayValue
from mint.wire import requests
from tests.compat.sdk_environments import VERSIONS, sdk_python

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

Fields = dict[str, dict[str, list[str]]]
"""Type → field → the types within it."""

SAME: dict[str, Any] = {
    # the SDK's name -> our type
    "ClientConfigRequest": requests.ClientConfigRequest,
    "CreateSessionRequest": requests.CreateSessionRequest,
    "SessionHeartbeatRequest": requests.SessionRequest,
    "ClientSessionFinished": requests.FinishSessionRequest,
    "CreateModelRequest": requests.CreateModelRequest,
    "GetInfoRequest": requests.ModelRequest,
    "UnloadModelRequest": requests.UnloadModelRequest,
    "ForwardBackwardInput": requests.ForwardBackwardInput,
    "ForwardBackwardRequest": requests.ForwardBackwardRequest,
    "ForwardRequest": requests.ForwardRequest,
    "OptimStepRequest": requests.OptimStepRequest,
    "SaveWeightsRequest": requests.SaveWeightsRequest,
    "SaveWeightsForSamplerRequest": requests.SaveWeightsForSamplerRequest,
    "SaveWeightsExternalRequest": requests.SaveWeightsExternalRequest,
    "LoadWeightsRequest": requests.LoadWeightsRequest,
    "CreateSamplingSessionRequest": requests.CreateSamplingSessionRequest,
    "SampleRequest": requests.SampleRequest,
    "FutureRetrieveRequest": requests.RetrieveFutureRequest,
    "FuturesRetrieveRequest": requests.RetrieveFuturesRequest,
    "SamplingSessionFuturesTarget": requests.SamplingSessionTarget,
    "JoinSamplingSessionRequest": requests.JoinSamplingSessionRequest,
    "CopyWeightsRequest": records.CopyWeightsRequest,
    "SessionSearchRequest": records.SessionSearchRequest,
    "AdamParams": AdamParams,
    "LoraConfig": LoraConfig,
    "SamplingParams": SamplingParams,
    "Datum": Datum,
    "ModelInput": ModelInput,
    "EncodedTextChunk": EncodedTextChunk,
    "TensorData": TensorData,
    "PromptProvenanceSpan": PromptProvenanceSpan,
    "SampledProvenanceSpan": SampledProvenanceSpan,
    "ClientSessionFinishSuccess": requests.FinishReason,
    "ClientSessionFinishErrored": requests.FinishReason,
    "ClientSessionFinishInterrupted": requests.FinishReason,
    "OwnSearchOwner": records.SessionSearchOwner,
    "AccessibleSearchOwner": records.SessionSearchOwner,
    "UserSearchOwner": records.SessionSearchOwner,
    "ActiveSessionStatusQuery": records.SessionStatusQuery,
    "CancelledSessionStatusQuery": records.SessionStatusQuery,
    "FailedSessionStatusQuery": records.SessionStatusQuery,
    "ClientFinishedSessionStatusQuery": records.SessionStatusQuery,
    "SessionSearchCursor": records.SessionSearchCursor,
}

ELSEWHERE = {
    ("OptimStepRequest", "optim_params"): "sent as adam_params or optimizer_params",
    ("ClientSessionFinished", "type"): "not sent: the body has the reason and the detail",
    ("TensorData", "_numpy"): "sent as data",
}
"""Fields of the SDK's types that are not on the wire by this name, and how they are sent."""

NOT_REQUESTS = {
    "TelemetrySendRequest": "accepted unread",
    "CreateCustomLossRequest": "the route is refused, and the SDK is told not to use it",
    "GetBillingUsageRequest": "the route is refused",
    "GetCurrentCheckpointStorageUsageRequest": "the route is refused",
}
"""Requests whose fields nobody reads."""

REFUSED = {
    "DmelChunk": "sound",
    "ImageChunk": "images",
    "ImageAssetPointerChunk": "images",
    "OptimParamsBase": "of other optimizers, which are refused by their type",
    "DimuonParams": "of another optimizer",
    "OptimizerConfigBase": "of other optimizers",
    "AdamOptimizerConfig": "the optimizer here: it has a type and nothing else",
}
"""Types whose values are refused, or say nothing, by their `type`."""


def fields(kind: Any) -> set[str]:
    form: type[BaseModel] = kind.json_form if issubclass(kind, ArrayValue) else kind
    return set(form.model_fields)


@pytest.fixture(scope="module")
def of_sdk() -> Fields:
    """Of the newest SDK."""
    script = Path(__file__).with_name("sdk_request_types.py")
    done = subprocess.run([sdk_python(VERSIONS[-1]), script], capture_output=True, text=True, timeout=300, check=True)
    found: Fields = json.loads(done.stdout.splitlines()[-1])
    return found


def test_every_type_within_a_request_of_the_sdk_is_known(of_sdk: Fields) -> None:
    waiting = ["ClientSessionFinished", *(name for name in of_sdk if name.endswith(("Request", "Params")))]
    reached = set()
    while waiting:
        name = waiting.pop()
        if name not in reached and name not in NOT_REQUESTS:
            reached.add(name)
            waiting += [inner for within in of_sdk[name].values() for inner in within]
    assert reached == SAME.keys() | REFUSED.keys()
    assert NOT_REQUESTS.keys() <= of_sdk.keys()


@pytest.mark.parametrize("name", SAME)
def test_every_field_of_a_type_is_known(of_sdk: Fields, name: str) -> None:
    unknown = set(of_sdk[name]) - fields(SAME[name])
    assert unknown == {field for kind, field in ELSEWHERE if kind == name}
