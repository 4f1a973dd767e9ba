"""A laptop that sleeps through lunch: the session is suspended and resumed, and the loop on it notices nothing."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest

import mint
from mint.server.service import sessions
from mint.server.worker import worker
from mint.types import AdamParams, Datum, ModelInput, SamplingParams

PAUSE_S = 0.4
MakeClient = Callable[..., mint.ServiceClient]


def draw(sampler: mint.SamplingClient) -> Any:
    return sampler.sample(ModelInput.from_ints([1, 2]), 2, SamplingParams(max_tokens=3)).result().sequences


def loop(make_client: MakeClient, folder: str, pause_s: float) -> list[Any]:
    """Losses, digests and samples; the samplers and the model outlive the pauses, one of them with an open gradient."""
    client = make_client(folder)
    training = client.create_lora_training_client("mint/tiny", rank=4, seed=1)
    base = client.create_sampling_client(base_model="mint/tiny")
    seen: list[Any] = []
    sampler = None
    for step in range(3):
        data = [Datum(model_input=ModelInput.from_ints([5, 6, 7 + step]), loss_fn_inputs={"target_tokens": [6, 7, 8]})]
        seen.append(training.forward_backward(data, "cross_entropy").result().metrics)
        time.sleep(pause_s)
        seen.append(training.optim_step(AdamParams()).result().state_digest)
        if sampler is not None:
            seen.append(
                sampler.sample(ModelInput.from_ints([1, 2]), 2, SamplingParams(max_tokens=3)).result().sequences
            )
        sampler = training.save_weights_and_get_sampling_client()
        time.sleep(pause_s)
        seen += [draw(base), draw(sampler)]
    path = training.save_state("end").result().path
    client.close()
    return [*seen, path.rpartition("/")[2]]


def test_a_loop_that_pauses_beyond_the_limit_of_silence_keeps_its_bits(
    make_client: MakeClient, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    expected = loop(make_client, "calm", 0.0)
    monkeypatch.setattr(sessions, "SILENCE_S", PAUSE_S / 4)
    monkeypatch.setattr(worker, "HOUSEKEEPING_S", PAUSE_S / 20)
    with caplog.at_level("INFO", logger="mint.service"):
        assert loop(make_client, "pausing", PAUSE_S) == expected
    told = [record.getMessage() for record in caplog.records]
    assert sum("is suspended" in line for line in told) >= 3
    assert sum("is resumed" in line for line in told) >= 3
