"""Samplers over HTTP: what is sent, what is refused, and what happens when they fail. `test_vllm.py` has a real one."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from faulty_sampler import MODEL, FaultySampler, faulty_sampler
from ports import free_port

from mint.cluster.external.engine import ExternalEngine
from mint.cluster.external.gap import ALARM, Gap, GapMeter
from mint.cluster.external.samplers import ExternalSamplers, served_name
from mint.cluster.external.vllm_protocol import BadAnswerError, Choice, generate_body, read_choice, require_possible
from mint.compose.cluster_engine import external_engine
from mint.config import Settings, read_serve_settings
from mint.engine.protocol import (
    CANCELLED,
    LogitBias,
    LogitRules,
    LoraSpec,
    PassResult,
    SampleJob,
    SampleResult,
    StopRule,
    TrainDatum,
    sample_together,
)
from mint.engine.torch_engine import TorchEngine
from mint.errors import InvalidRequestError, NotFoundError

PROMPT = np.array([1, 2, 3])
WEIGHTS = {
    "model.layers.0.self_attn.q_proj.lora_A.weight": np.ones((2, 4), np.float32),
    "model.layers.0.self_attn.q_proj.lora_B.weight": np.ones((4, 2), np.float32),
}
SHAPE = LoraSpec(2, 0, True, False, False)


def job(weights_id: str | None = None, **changes: Any) -> SampleJob:
    given = {"num_samples": 2, "max_tokens": 4, "temperature": 1.0, "top_k": -1, "top_p": 1.0, "seed": 7}
    given |= {"stop": StopRule(), **changes}
    return SampleJob(MODEL, weights_id, PROMPT, **given)


@pytest.fixture
def faulty() -> Iterator[tuple[str, FaultySampler]]:
    with faulty_sampler() as found:
        yield found


@pytest.fixture
def samplers(faulty: tuple[str, FaultySampler]) -> Iterator[ExternalSamplers]:
    own = ExternalSamplers([faulty[0]], patience_s=2.0, silence_s=1.0, lora_slots=2)
    yield own
    own.close()


def sample(samplers: ExternalSamplers, *jobs: SampleJob) -> list[SampleResult]:
    return sample_together(samplers.open_batch(), jobs)


def wait_until(condition: Any, within_s: float = 10.0) -> None:
    until = time.monotonic() + within_s
    while not condition():
        assert time.monotonic() < until
        time.sleep(0.01)


# --- what is sent ------------------------------------------------------------------------------------------------


def test_a_job_is_sent_with_all_that_it_asks_for() -> None:
    rules = LogitRules(
        allowed=np.array([4, 5]),
        bias=LogitBias(np.array([5]), np.array([1.5], np.float32)),
        min_tokens=1,
        repetition_penalty=1.1,
        frequency_penalty=0.2,
        presence_penalty=0.3,
        min_p=0.05,
    )
    stop = StopRule(frozenset({9, 8}), (b"end", b"\xff"), [b"x"] * 10)
    asked = job(stop=stop, rules=rules, top_k=3, top_p=0.9, seed=2**63 + 5, cache_scope="a", topk_sample_logprobs=2)
    assert generate_body(asked, "v1", stream=True) == {
        "token_ids": [1, 2, 3],
        "model": "v1",
        "cache_salt": "a",
        "stream": True,
        "sampling_params": {
            "n": 2, "max_tokens": 4, "temperature": 1.0, "top_p": 0.9, "top_k": 3, "seed": 5, "logprobs": 2,
            "ignore_eos": True, "skip_special_tokens": False, "stop_token_ids": [8, 9], "stop": ["end"],
            "include_stop_str_in_output": True, "min_tokens": 1, "repetition_penalty": 1.1, "frequency_penalty": 0.2,
            "presence_penalty": 0.3, "min_p": 0.05, "allowed_token_ids": [4, 5], "logit_bias": {"5": 1.5},
        },
    }  # fmt: skip


@pytest.mark.parametrize(
    "asked",
    [
        {"prompt_alt_tokens_k": 1},
        {"target_prompt_logprobs": np.array([[1, 2]])},
        {"logprobs_mode": "processed"},
        {"rules": LogitRules(grammar=object())},  # ty: ignore[invalid-argument-type]
    ],
)
def test_what_the_protocol_has_no_words_for_is_refused(asked: dict[str, Any]) -> None:
    require_possible(job())
    with pytest.raises(InvalidRequestError, match="external sampler"):
        require_possible(job(**asked))


def test_what_a_sampler_says_beside_the_tokens_stays_with_the_sample() -> None:
    choice = Choice()
    part = {"token_ids": [5], "logprobs": {"content": [{"token_id": 5, "logprob": -1.0}]}}
    read_choice(choice, {**part, "weight_versions": [{"version": "v", "start": 0, "end": 1}], "routed_experts": "abc"})
    assert choice.details == {"weight_versions": [{"version": "v", "start": 0, "end": 1}], "routed_experts": "abc"}
    with pytest.raises(BadAnswerError, match="logprob of token 6 for token 5"):
        read_choice(choice, {"token_ids": [5], "logprobs": {"content": [{"token_id": 6, "logprob": -1.0}]}})


def test_a_base_is_found_by_its_path_or_name_or_is_the_only_one() -> None:
    two = {"org/a": {"root": "/m/x"}, "b": {"root": "/m/y"}, "lora": {"root": "/l", "parent": "b"}}
    assert served_name(two, "/m/y") == "b" and served_name(two, "/else/a") == "org/a"
    assert served_name(two, "/cache/models--org--a/snapshots/12") == "org/a"
    assert served_name(two, "/m/z") is None and served_name(two, "/x/lora") is None
    assert served_name({"b": {"root": "/m/y"}}, "/m/z") == "b"


# --- what they do ------------------------------------------------------------------------------------------------


def test_jobs_are_sampled_and_streams_hear_each_token(samplers: ExternalSamplers) -> None:
    [result] = sample(samplers, job())
    assert [each.tokens.tolist() for each in result.samples] == [[5] * 4] * 2 and not result.samples[0].stopped
    heard: list[tuple[int, int, float]] = []
    batch = samplers.open_batch()
    batch.add("a", job(), lambda *news: heard.append(news))
    while batch.keys:
        batch.step()
    assert sorted(heard) == sorted([(i, 5, -0.5) for i in range(2)] * 4)


def test_a_sample_ends_where_the_stop_rule_says(samplers: ExternalSamplers) -> None:
    vocabulary = [b"a"] * 6
    for stop in (StopRule(frozenset({5})), StopRule(frozenset(), (b"a",), vocabulary)):
        [result] = sample(samplers, job(stop=stop))
        assert [each.tokens.tolist() for each in result.samples] == [[5]] * 2 and result.samples[0].stopped


def test_each_version_has_a_name_and_those_used_longest_ago_make_room(
    samplers: ExternalSamplers, faulty: tuple[str, FaultySampler]
) -> None:
    for number in range(5):
        samplers.add_weights(f"w{number}", MODEL, SHAPE, WEIGHTS)
        assert sample(samplers, job(f"w{number}"))[0].error is None
    wait_until(lambda: len(faulty[1].loras) == 2)
    assert faulty[1].most_loras <= 3 and len({body["model"] for body in faulty[1].generated}) == 5
    for name, path in faulty[1].loras.items():
        assert Path(path).name == name and (Path(path) / "adapter_model.safetensors").exists()
    assert sample(samplers, job("w0"))[0].error is None  # it comes back
    folder = Path(next(iter(faulty[1].loras.values()))).parent
    for number in range(5):
        samplers.drop_weights(f"w{number}")
    wait_until(lambda: not faulty[1].loras and not list(folder.iterdir()))
    with pytest.raises(NotFoundError):
        sample(samplers, job("w0"))


def test_weights_that_are_dropped_stay_for_the_jobs_that_use_them(
    samplers: ExternalSamplers, faulty: tuple[str, FaultySampler]
) -> None:
    samplers.add_weights("w", MODEL, SHAPE, WEIGHTS)
    faulty[1].delay_s = 0.3
    batch = samplers.open_batch()
    batch.add("a", job("w"))
    wait_until(lambda: faulty[1].generated)
    samplers.drop_weights("w")
    results: dict[str, SampleResult] = {}
    while batch.keys:
        results |= batch.step()
    assert results["a"].error is None
    wait_until(lambda: not faulty[1].loras)


def test_a_job_can_be_cancelled(samplers: ExternalSamplers, faulty: tuple[str, FaultySampler]) -> None:
    faulty[1].delay_s = 0.5
    batch = samplers.open_batch()
    batch.add("a", job())
    wait_until(lambda: faulty[1].generated)
    batch.cancel("a")
    assert batch.step()["a"].error == CANCELLED
    wait_until(lambda: samplers.state["hosts"][0]["sequences"] == 0)


# --- how they fail -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fault", "words"),
    [
        ({"logprob": None}, "it gave None as a logprob"),
        ({"logprob": float("nan")}, "it gave nan as a logprob"),
        ({"logprob": 3.0}, "above 0"),
        ({"cuts_to": 3}, "after 3 of 4 tokens"),
        ({"answers": [(200, {"choices": []})]}, "0 samples, and 2 were asked for"),
        ({"answers": [(200, [1])]}, "no JSON object"),
        ({"answers": [(422, {"error": {"message": "no such thing"}})]}, "422: no such thing"),
        ({"answers": [(403, {"error": {"message": "no"}})]}, "--enable-scale-out"),
        ({"answers": [(500, {"error": {"message": "broken"}})] * 3}, "500: broken"),
    ],
)
def test_an_answer_that_cannot_be_used_fails_its_job_alone(
    samplers: ExternalSamplers, faulty: tuple[str, FaultySampler], fault: dict[str, Any], words: str
) -> None:
    for name, value in fault.items():
        setattr(faulty[1], name, value)
    [result] = sample(samplers, job())
    assert result.error is not None and words in result.error and not result.samples
    faulty[1].logprob, faulty[1].cuts_to = -0.5, None
    assert sample(samplers, job())[0].error is None


def test_a_sampler_that_fails_for_a_while_is_asked_again(
    samplers: ExternalSamplers, faulty: tuple[str, FaultySampler]
) -> None:
    faulty[1].answers = [(503, {"error": {"message": "busy"}})] * 2
    assert sample(samplers, job())[0].error is None
    faulty[1].breaks_off = 2
    assert sample(samplers, job())[0].error is None


def test_a_lora_that_the_sampler_has_lost_is_loaded_again(
    samplers: ExternalSamplers, faulty: tuple[str, FaultySampler]
) -> None:
    samplers.add_weights("w", MODEL, SHAPE, WEIGHTS)
    assert sample(samplers, job("w"))[0].error is None
    faulty[1].loras.clear()
    assert sample(samplers, job("w"))[0].error is None and len(faulty[1].loras) == 1


def test_a_lora_that_is_refused_fails_its_jobs_with_the_reason(
    samplers: ExternalSamplers, faulty: tuple[str, FaultySampler]
) -> None:
    samplers.add_weights("w", MODEL, SHAPE, WEIGHTS)
    faulty[1].refuses_loras = 400
    [result] = sample(samplers, job("w"))
    assert result.error is not None and "no such lora" in result.error
    faulty[1].refuses_loras = 0
    assert sample(samplers, job("w"))[0].error is None


def test_a_frozen_sampler_is_lost_and_its_jobs_run_on_another_one(faulty: tuple[str, FaultySampler]) -> None:
    with faulty_sampler() as (address, other):
        samplers = ExternalSamplers([faulty[0], address], patience_s=20.0, silence_s=1.0)
        try:
            wait_until(lambda: all(host["up"] for host in samplers.state["hosts"]))
            faulty[1].delay_s = other.delay_s = 0.2
            batch = samplers.open_batch()
            for number in range(4):
                batch.add(str(number), job())
            wait_until(lambda: faulty[1].generated and other.generated)
            faulty[1].is_frozen, faulty[1].delay_s = True, 1000.0
            results: dict[str, SampleResult] = {}
            for number in range(4, 8):
                batch.add(str(number), job())
            while batch.keys:
                results |= batch.step()
            assert all(result.error is None for result in results.values()) and len(results) == 8
            assert samplers.state["hosts"][0]["lost"] == 1 and not samplers.state["hosts"][0]["up"]
            faulty[1].is_frozen, faulty[1].delay_s = False, 0.0
            wait_until(lambda: samplers.state["hosts"][0]["up"])
        finally:
            samplers.close()


def test_a_worker_that_leaves_is_told_of_the_jobs_that_are_on_their_way_to_it(
    faulty: tuple[str, FaultySampler],
) -> None:
    samplers, (address, worker), key = ExternalSamplers([], patience_s=2.0), faulty, "k" * 16
    try:
        samplers.join(address, key, lambda _address: None)
        worker.delay_s = 0.3
        batch = samplers.open_batch()
        batch.add("own", job())
        wait_until(lambda: samplers.state["hosts"][0]["jobs"])
        assert samplers.leave(address, key) == 1
        samplers.join(address, key, lambda _address: None)  # a sign of life that came late
        assert samplers.leave(address, key) == 1
        results: dict[str, SampleResult] = {}
        while batch.keys:
            results |= batch.step()
        assert results["own"].error is None and len(worker.generated) == 1
        assert samplers.leave(address, key) == 0 and samplers.state["hosts"] == []
    finally:
        samplers.close()


def test_jobs_wait_for_a_sampler_that_comes_back() -> None:
    port = free_port()
    samplers = ExternalSamplers([f"http://127.0.0.1:{port}"], patience_s=20.0, silence_s=1.0)
    try:
        results: list[SampleResult] = []
        samplers.add_weights("w", MODEL, SHAPE, WEIGHTS)
        thread = threading.Thread(target=lambda: results.extend(sample(samplers, job("w"))))
        thread.start()
        for _ in range(2):  # it starts, and is gone, and starts
            with faulty_sampler(port) as (_, own):
                wait_until(lambda own=own: own.generated)
                thread.join(10)
                assert [each.error for each in results] == [None]
            wait_until(lambda: not samplers.state["hosts"][0]["up"])
            results.clear()
            thread = threading.Thread(target=lambda: results.extend(sample(samplers, job("w"))))
            thread.start()
        with faulty_sampler(port):
            thread.join(10)
            assert [each.error for each in results] == [None]
    finally:
        samplers.close()


def test_without_a_sampler_jobs_fail_after_a_time_with_the_reason() -> None:
    samplers = ExternalSamplers([f"http://127.0.0.1:{free_port()}"], patience_s=1.0)
    try:
        [result] = sample(samplers, job())
        assert (
            result.error is not None and "none answers since 1 s" in result.error and "http://127.0.0.1" in result.error
        )
        with pytest.raises(InvalidRequestError, match="does not answer since 0 s"):
            samplers.served([MODEL], within_s=0.2)
    finally:
        samplers.close()


# --- the check, and the gap --------------------------------------------------------------------------------------


def test_a_sampler_with_other_numbers_is_refused_as_the_base_is_loaded(
    faulty: tuple[str, FaultySampler], folder: Path
) -> None:
    with faulty_sampler() as (address, own):
        own.answers = [(200, {"prompt_logprobs": [None, {"1": {"logprob": -1.0}}], "choices": []})]
        engine = ExternalEngine(TorchEngine(dtype="float32", threads=1, device="cpu"), ExternalSamplers([address]))
        with pytest.raises(InvalidRequestError, match="no logprobs for the prompt"):
            engine.load_base(str(folder), str(folder))
        engine.close()


def test_the_gap_is_that_of_trained_tokens() -> None:
    weights = np.array([0, 1, 1], np.float32)
    sampled = np.array([9.0, -1.0, -2.0], np.float32)
    datum = TrainDatum(np.arange(3), np.arange(3), weights, {"logprobs": sampled})
    gap = Gap.of([datum], PassResult([np.array([0.0, -1.5, -1.75], np.float32)], {}))
    assert gap is not None and (gap.tokens, gap.mean, gap.max) == (2, 0.375, 0.5)
    assert gap.k3 == pytest.approx((np.expm1(-0.5) + 0.5 + np.expm1(0.25) - 0.25) / 2)
    without = TrainDatum(np.arange(3), np.arange(3), weights)
    assert Gap.of([without], PassResult([sampled], {})) is None


def test_a_gap_above_the_limit_is_reported(caplog: pytest.LogCaptureFixture) -> None:
    meter = GapMeter()
    meter.add(Gap(10, ALARM / 2, 1.0, 0.0))
    assert not caplog.records and meter.state["alarms"] == 0
    meter.add(Gap(30, 2 * ALARM, 2.0, 0.1))
    assert "sampler and trainer are apart" in caplog.text and meter.state["alarms"] == 1
    meter.add(Gap(1, float("nan"), float("nan"), float("nan")))
    assert meter.state["alarms"] == 2


# --- the settings ------------------------------------------------------------------------------------------------


def test_the_settings_name_addresses(tmp_path: Path) -> None:
    settings = Settings(sampler="vllm=http://127.0.0.1:1/, vllm=https://b:2/x")
    assert settings.sampler_addresses == ["http://127.0.0.1:1", "https://b:2/x"]
    for text in ("http://a", "vllm=a:1", "sglang=http://a"):
        with pytest.raises(ValueError, match="vllm=http"):
            Settings(sampler=text)
    served = read_serve_settings({"sampler": "vllm=http://a:1", "sampler_folder": tmp_path})
    assert served.with_cluster(settings).sampler_addresses == ["http://a:1"]
    with pytest.raises(InvalidRequestError, match="--sampler-folder"):
        external_engine(Settings(sampler="vllm=http://a:1"), TorchEngine(dtype="float32", threads=1, device="cpu"))
