"""Our request types know every field of those of the newest public SDK, so that none is ignored in silence.

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
from mint.types.tensors import TensorData
from mint.types.value_classes import ArrayValue
from mint.wire import requests
from tests.compat.sdk_environments import VERSIONS, sdk_python

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

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


def fields(kind: Any) -> set[str]:
    form: type[BaseModel] = kind.json_form if issubclass(kind, ArrayValue) else kind
    return set(form.model_fields)


@pytest.fixture(scope="module")
def of_sdk() -> dict[str, list[str]]:
    """The types of the newest SDK, each with its fields."""
    script = Path(__file__).with_name("sdk_request_types.py")
    done = subprocess.run([sdk_python(VERSIONS[-1]), script], capture_output=True, text=True, timeout=300, check=True)
    found: dict[str, list[str]] = json.loads(done.stdout.splitlines()[-1])
    return found


def test_every_request_type_of_the_sdk_is_known(of_sdk: dict[str, list[str]]) -> None:
    asked = {name for name in of_sdk if name.endswith(("Request", "Params"))} | {"LoraConfig", "Datum", "TensorData"}
    other = {"OptimParamsBase", "DimuonParams"}  # of other optimizers, which are refused by their type
    assert asked - other - SAME.keys() == NOT_REQUESTS.keys()
    assert SAME.keys() <= of_sdk.keys()


@pytest.mark.parametrize("name", SAME)
def test_every_field_of_a_type_is_known(of_sdk: dict[str, list[str]], name: str) -> None:
    unknown = set(of_sdk[name]) - fields(SAME[name])
    assert unknown == {field for kind, field in ELSEWHERE if kind == name}
