"""What a sample request may ask besides tokens, and requests that stream or are given up."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from default_engine import fake_engine, torch_engine
from service_harness import BASE, Harness, failure, open_service

from mint import wire
from mint.engine.protocol import SampleBatch, SampleResult
from mint.errors import InvalidRequestError, RequestFailedError, from_wire
from mint.server.callers import LOCAL
from mint.server.queue.futures import FutureResult
from mint.server.queue.jobs import QueuedSample
from mint.server.store.database import OpenFor
from mint.server.store.journal import JOURNAL_FILE, Journal
from mint.server.worker import validation
from mint.server.worker.samplers import Samplers
from mint.server.worker.sampling_batch import SamplingBatch
from mint.types import EncodedTextChunk, ModelInput, SampleResponse, SamplingParams
from mint.types.tensors import TensorData
from mint.wire.requests import SampleRequest

PROMPT = [5, 6, 7, 8, 9]


@pytest.fixture(params=["fake", "torch"], scope="module")
def harness(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Harness]:
    engine = fake_engine() if request.param == "fake" else torch_engine(threads=1, device="cpu")
    service = open_service(tmp_path_factory.mktemp("data"), engine=engine)
    harness = Harness(service)
    made = {"session_id": harness.session_id, "sampling_session_seq_id": 0, "base_model": BASE}
    service.sampling_sessions.create(LOCAL, json.dumps(made).encode())
    yield harness
    service.stop()


def _request(harness: Harness, *, max_tokens: int = 3, seed: int = 1, **fields: Any) -> SampleRequest:
    return SampleRequest(
        sampling_session_id=f"{harness.session_id}:sample:0",
        seq_id=0,
        prompt=ModelInput(chunks=[EncodedTextChunk(tokens=fields.pop("prompt", PROMPT))]),
        sampling_params=SamplingParams(max_tokens=max_tokens, seed=seed),
        **fields,
    )


def _batch(harness: Harness) -> SamplingBatch:
    service = harness.service
    journal = Journal(service.data_dir / JOURNAL_FILE, OpenFor.COMMAND)
    samplers = Samplers(harness.engine, journal, service.base_models, service.data_dir)
    return SamplingBatch(harness.engine, samplers)


def _answers(running: SamplingBatch, *works: QueuedSample) -> dict[str, FutureResult]:
    """Those of all requests, sampled together to their end."""
    answers = running.join(works)
    while len(answers) < len(works):
        answers |= running.step()
    return answers


def _run(harness: Harness, *works: QueuedSample) -> list[SampleResponse | Exception]:
    found = _answers(_batch(harness), *works)
    answers: list[SampleResponse | Exception] = []
    for body in (found[work.request_id].body for work in works):
        error = wire.decode_error(body)
        encoding = wire.Encoding.JSON if body.startswith(b"{") else wire.Encoding.PROTO
        answers.append(wire.decode(SampleResponse, body, encoding) if error is None else from_wire(error))
    return answers


def _sample(harness: Harness, **fields: Any) -> SampleResponse:
    (answer,) = _run(harness, QueuedSample("r", _request(harness, **fields), 0.0))
    if isinstance(answer, Exception):
        raise answer
    return answer


def test_the_best_tokens_of_every_step_come_with_the_samples(harness: Harness) -> None:
    response = _sample(harness, topk_sample_logprobs=4, num_samples=2)
    for sequence in response.sequences:
        assert sequence.topk_logprobs is not None and [len(row) for row in sequence.topk_logprobs] == [4, 4, 4]
        assert all(row == sorted(row, key=lambda pair: -pair[1]) for row in sequence.topk_logprobs)
    plain = _sample(harness, num_samples=2)
    assert [sequence.tokens for sequence in plain.sequences] == [sequence.tokens for sequence in response.sequences]
    assert plain.sequences[0].topk_logprobs is None


def test_named_tokens_come_back_in_the_layout_they_were_named_in(harness: Harness) -> None:
    ids = torch.full((4, 6), -1, dtype=torch.int64)
    ids[0, 2], ids[3, 0], ids[3, 5], ids[2, 1] = 0, 9, 11, 4  # 0 is a token like any other
    dense = _sample(harness, target_prompt_logprobs=TensorData.from_torch(ids)).target_prompt_logprobs
    asked = TensorData.from_torch_sparse(ids, pad_value=-1)
    sparse = _sample(harness, target_prompt_logprobs=asked).target_prompt_logprobs
    assert dense is not None and sparse is not None and asked.is_sparse and not dense.is_sparse
    assert dense.dtype == sparse.dtype == "float32" and dense.shape == sparse.shape == [4, 6]
    assert sparse.sparse_crow_indices == asked.sparse_crow_indices and len(sparse.data) == 4
    np.testing.assert_array_equal(dense.to_numpy(), sparse.to_numpy())
    table = dense.to_numpy()
    assert (table[ids.numpy() == -1] == 0).all() and (table[ids.numpy() != -1] < 0).all()


def test_named_tokens_of_the_prompt_have_its_own_logprobs(harness: Harness) -> None:
    own = TensorData.from_numpy(np.array(PROMPT[1:])[:, None])
    response = _sample(harness, target_prompt_logprobs=own, prompt_logprobs=True, max_tokens=0)
    assert response.target_prompt_logprobs is not None and response.prompt_logprobs is not None
    assert response.sequences == [] and response.prompt_logprobs[0] is None
    assert response.target_prompt_logprobs.data == response.prompt_logprobs[1:]


def test_alternatives_are_two_tables_of_one_row_per_place(harness: Harness) -> None:
    draws = _sample(harness, prompt_alt_tokens_k=7).prompt_alt_tokens
    assert draws is not None and draws.tokens.shape == draws.logprobs.shape == [4, 7]
    assert draws.tokens.dtype == "int64" and draws.logprobs.dtype == "float32"
    assert _sample(harness).prompt_alt_tokens is None


def test_the_last_n_alone_are_scored(harness: Harness) -> None:
    whole = _sample(harness, prompt_logprobs=True, topk_prompt_logprobs=2)
    part = _sample(harness, prompt_logprobs=True, topk_prompt_logprobs=2, prompt_logprobs_last_n=2)
    assert whole.prompt_logprobs is not None and whole.topk_prompt_logprobs is not None
    assert part.prompt_logprobs == [None, None, None, *whole.prompt_logprobs[3:]]
    assert part.topk_prompt_logprobs == [None, None, None, *whole.topk_prompt_logprobs[3:]]


def _ids(rows: int, columns: int, fill: int = 3) -> TensorData:
    return TensorData.from_numpy(np.full((rows, columns), fill))


BAD: dict[str, tuple[dict[str, Any], str]] = {
    "topk_sample_logprobs negative": ({"topk_sample_logprobs": -1}, "from 0 to"),
    "topk_sample_logprobs too many": ({"topk_sample_logprobs": 1025}, "from 0 to"),
    "topk_sample_logprobs too large an answer": (
        {"topk_sample_logprobs": 900, "num_samples": 1000, "max_tokens": 100},
        "too large an answer",
    ),
    "prompt_alt_tokens_k negative": ({"prompt_alt_tokens_k": -1}, "from 0 to"),
    "prompt_alt_tokens_k too many": ({"prompt_alt_tokens_k": 1025}, "from 0 to"),
    "prompt_logprobs_last_n zero": ({"prompt_logprobs_last_n": 0, "prompt_logprobs": True}, "from 1 to 4"),
    "prompt_logprobs_last_n whole prompt": ({"prompt_logprobs_last_n": 5, "prompt_logprobs": True}, "from 1 to 4"),
    "prompt_logprobs_last_n alone": ({"prompt_logprobs_last_n": 2}, "prompt_logprobs=True"),
    "prompt_logprobs_last_n one token": (
        {"prompt_logprobs_last_n": 1, "prompt_logprobs": True, "prompt": [5]},
        "from 1 to 0",
    ),
    "target_prompt_logprobs floats": (
        {"target_prompt_logprobs": TensorData(data=[1.0] * 4, dtype="float32", shape=[4, 1])},
        "int64",
    ),
    "target_prompt_logprobs flat": ({"target_prompt_logprobs": TensorData(data=[1] * 4, dtype="int64")}, "[4, K]"),
    "target_prompt_logprobs rows": ({"target_prompt_logprobs": _ids(5, 1)}, "[4, K]"),
    "target_prompt_logprobs columns": ({"target_prompt_logprobs": _ids(4, 0)}, "[4, K]"),
    "target_prompt_logprobs width": (
        {
            "target_prompt_logprobs": TensorData(
                data=[1], dtype="int64", shape=[4, 10**12], sparse_crow_indices=[0, 1], sparse_col_indices=[0]
            )
        },
        "[4, K]",
    ),
    "target_prompt_logprobs cells": (
        {"target_prompt_logprobs": TensorData(data=[1] * 7, dtype="int64", shape=[4, 2])},
        "[4, 2]",
    ),
    "target_prompt_logprobs none named": ({"target_prompt_logprobs": _ids(4, 2, -1)}, "at least one"),
    "target_prompt_logprobs beyond": ({"target_prompt_logprobs": _ids(4, 2, 10**6)}, "vocabulary"),
    "target_prompt_logprobs below": ({"target_prompt_logprobs": _ids(4, 2, -2)}, "vocabulary"),
    "target_prompt_logprobs one token": ({"target_prompt_logprobs": _ids(0, 2), "prompt": [5]}, "at least one"),
    "target_prompt_logprobs sparse": (
        {
            "target_prompt_logprobs": TensorData(
                data=[1], dtype="int64", shape=[4, 10**6], sparse_crow_indices=[0, 1], sparse_col_indices=[0]
            )
        },
        "4 + 1 numbers",
    ),
}


@pytest.mark.parametrize("name", BAD)
def test_what_cannot_be_honoured_is_refused_by_name(harness: Harness, name: str) -> None:
    fields, text = BAD[name]
    error = failure(lambda: _sample(harness, **fields))
    assert isinstance(error, InvalidRequestError) and text in str(error)
    assert (error.field or "").startswith(name.split()[0])


def test_a_sparse_question_of_any_width_costs_what_it_lists(harness: Harness) -> None:
    wide = TensorData(
        data=[3], dtype="int64", shape=[4, 2**21], sparse_crow_indices=[0, 0, 1, 1, 1], sparse_col_indices=[10**6]
    )
    answer = _sample(harness, target_prompt_logprobs=wide).target_prompt_logprobs
    assert answer is not None and len(answer.data) == 1 and answer.data[0] < 0


def test_a_long_answer_is_bounded_by_all_its_places(harness: Harness, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(validation, "MAX_ALTERNATIVES", 30)
    assert _sample(harness, topk_prompt_logprobs=6, prompt_alt_tokens_k=6, topk_sample_logprobs=10).sequences
    for fields in ({"topk_prompt_logprobs": 7}, {"prompt_alt_tokens_k": 7}, {"topk_sample_logprobs": 11}):
        assert "too large an answer" in str(failure(lambda fields=fields: _sample(harness, **fields)))
    assert _sample(harness, topk_prompt_logprobs=15, prompt_logprobs=True, prompt_logprobs_last_n=2).sequences


# --- streaming and giving up -------------------------------------------------------------------------------------


def test_a_listener_hears_every_token_of_its_request(harness: Harness) -> None:
    heard: list[tuple[int, int, float]] = []
    streaming = QueuedSample(
        "s", _request(harness, num_samples=2, max_tokens=5), 0.0, on_token=lambda *token: heard.append(token)
    )
    answers = _run(harness, streaming, QueuedSample("q", _request(harness, seed=9), 0.0))
    alone = _sample(harness, num_samples=2, max_tokens=5)
    assert isinstance(answers[0], SampleResponse) and answers[0].sequences == alone.sequences
    for index, sequence in enumerate(alone.sequences):
        own = [(token, np.float32(logprob)) for sample, token, logprob in heard if sample == index]
        assert own == list(zip(sequence.tokens, np.float32(sequence.logprobs), strict=True))


def test_a_listener_that_fails_hurts_nobody(harness: Harness) -> None:
    calls: list[int] = []

    def fail(sample: int, token: int, logprob: float) -> None:
        calls.append(token)
        raise ZeroDivisionError("in the listener")

    heard: list[int] = []
    answers = _run(
        harness,
        QueuedSample("bad", _request(harness), 0.0, on_token=fail),
        QueuedSample("good", _request(harness), 0.0, on_token=lambda sample, token, logprob: heard.append(token)),
    )
    expected = _sample(harness).sequences
    for answer in answers:
        assert isinstance(answer, SampleResponse) and answer.sequences == expected
    assert len(calls) == 1 and heard == expected[0].tokens


def test_a_request_that_is_given_up_fails_alone(harness: Harness) -> None:
    event, heard = threading.Event(), []

    def hear(sample: int, token: int, logprob: float) -> None:
        heard.append(token)
        if len(heard) == 2:
            event.set()

    answers = _run(
        harness,
        QueuedSample("gone", _request(harness, max_tokens=50), 0.0, on_token=hear, cancelled=event),
        QueuedSample("stays", _request(harness), 0.0, cancelled=threading.Event()),
    )
    assert isinstance(answers[0], RequestFailedError) and "cancelled" in str(answers[0])
    assert len(heard) == 2 and isinstance(answers[1], SampleResponse)
    assert answers[1].sequences == _sample(harness).sequences
    (never,) = _run(harness, QueuedSample("never", _request(harness), 0.0, cancelled=event))
    assert isinstance(never, RequestFailedError)


class Breaking:
    """A batch that breaks at its third step, for the first two times."""

    breaks = 2

    def __init__(self, batch: SampleBatch) -> None:
        self._batch = batch
        self._steps = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._batch, name)

    def step(self) -> dict[str, SampleResult]:
        self._steps += 1
        if self._steps == 3 and Breaking.breaks:
            Breaking.breaks -= 1
            raise ZeroDivisionError("in the batch")
        return self._batch.step()


def test_what_is_run_again_is_told_once(harness: Harness, monkeypatch: pytest.MonkeyPatch) -> None:
    """An engine that breaks in the midst of a batch: each of its requests is run again, alone, and once."""
    engine, heard = harness.engine, dict[str, list[int]]()
    opened = engine.open_batch
    monkeypatch.setattr(engine, "open_batch", lambda: Breaking(opened()))
    monkeypatch.setattr(Breaking, "breaks", 2)

    def work(name: str) -> QueuedSample:
        heard[name] = []
        listener = lambda sample, token, logprob: heard[name].append(token)  # noqa: E731
        return QueuedSample(name, _request(harness, max_tokens=5), 0.0, on_token=listener)

    running = _batch(harness)
    answers = _answers(running, work("a"), work("b"), work("c"))
    assert [answers[name].failed for name in "abc"] == [True, False, False], "the first was alone when it broke again"
    expected = _sample(harness, max_tokens=5).sequences[0].tokens
    assert heard["b"] == heard["c"] == expected and heard["a"] == expected[: len(heard["a"])]
    assert running.sequences == 0
