"""The loss stable_reinforce from sampling to the step: what the spans of a datum decide, and what they refuse."""

from __future__ import annotations

from typing import Any

import pytest
from service_harness import STEP, Harness, failure, make_sampler

from mint.errors import InvalidRequestError
from mint.server.service.service import Service


@pytest.fixture
def harness(shared_service: Service) -> Harness:
    return Harness(shared_service)


def span(kind: str, length: int, offset: int = 0) -> dict[str, Any]:
    return {"type": kind, "sequence_id": "a:sample:0:0-0", "offset": offset, "length": length}


def body(advantages: list[float], *, spans: bool = True, **more: Any) -> dict[str, Any]:
    """Two prompt tokens and three sampled ones; positions of targets 0 (prompt), 1, 2, 3 (sampled)."""
    inputs = {"target_tokens": [6, 7, 8, 9], "logprobs": [0.0, -1.0, -2.0, -3.0], "advantages": advantages}
    datum: dict[str, Any] = {
        "model_input": {"chunks": [{"type": "encoded_text", "tokens": [5, 6, 7, 8]}]},
        "loss_fn_inputs": {
            key: {"data": row, "dtype": "int64" if key == "target_tokens" else "float32"} for key, row in inputs.items()
        },
    }
    if spans:
        datum["model_input_spans"] = [span("prompt", 2), span("sampled", 2)]
        datum["loss_fn_input_spans"] = [span("prompt", 1, offset=1), span("sampled", 3)]
    return {"forward_backward_input": {"data": [datum], "loss_fn": "stable_reinforce", **more}}


def test_a_sampler_that_records_stability_information_samples_as_any_other(harness: Harness) -> None:
    plain = harness.sample(make_sampler(harness), 0, params={"seed": 3, "max_tokens": 4})
    recorded = harness.sample(
        make_sampler(harness, 1), 0, params={"seed": 3, "max_tokens": 4}, record_stability_info=True
    )
    assert recorded["sequences"] == plain["sequences"]


def test_every_sampled_token_is_trained_and_no_other(harness: Harness) -> None:
    model_id = harness.create_model()
    spans = harness.run("forward_backward", model_id, 1, body([0.0, 0.0, -1.0, 0.5]))
    assert spans["metrics"]["tokens:sum"] == 3.0  # the sampled token without an advantage counts in the ratio
    assert not spans["warnings"] or "weights_missing" not in " ".join(spans["warnings"])
    without = harness.run("forward_backward", model_id, 2, body([0.0, 0.0, -1.0, 0.5], spans=False))
    assert without["metrics"]["tokens:sum"] == 2.0
    assert harness.run("optim_step", model_id, 3, STEP)["metrics"]["step"] == 1.0


def test_an_advantage_on_a_prompt_token_is_refused_by_name(harness: Harness) -> None:
    error = failure(lambda: harness.run("forward_backward", harness.create_model(), 1, body([0.5, 0.0, 1.0, 1.0])))
    assert isinstance(error, InvalidRequestError)
    assert error.field == "data[0].loss_fn_inputs.advantages[0]" and error.value == "0.5" and error.remedy
