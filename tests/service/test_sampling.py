"""A sampler never sees two versions of the weights, and the same program samples the same tokens everywhere."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from service_harness import BASE, GOOD_PASS, STEP, Harness, failure, open_service
from waiting import wait_until

from mint import wire
from mint.engine.fake_engine import FakeBatch, FakeEngine
from mint.engine.protocol import CANCELLED, SampleResult
from mint.errors import (
    ConflictError,
    JournalError,
    NotFoundError,
    RequestCancelledError,
    RequestFailedError,
    from_wire,
)
from mint.server.callers import LOCAL
from mint.server.limits import ServerLimits
from mint.server.worker import samplers as sampling
from mint.server.worker.sample_requests import sample_result
from mint.types import ModelInput, SamplingParams
from mint.wire.requests import SampleRequest


@contextmanager
def held(harness: Harness) -> Iterator[None]:
    """What is sent meanwhile waits for the engine, and then is there at once."""
    go_on = threading.Event()

    def hold() -> None:
        go_on.wait(120)

    harness.service.call_soon(hold)
    yield
    go_on.set()


def sample_body(sampler: str, seq_id: int, *, prompt: list[int], max_tokens: int = 4) -> bytes:
    body = {
        "sampling_session_id": sampler,
        "seq_id": seq_id,
        "prompt": {"chunks": [{"tokens": prompt}]},
        "sampling_params": {"max_tokens": max_tokens},
    }
    return json.dumps(body).encode()


def publish(harness: Harness, model_id: str, seq_id: int, number: int) -> str:
    body = {"sampling_session_seq_id": number}
    return harness.run("save_weights_for_sampler", model_id, seq_id, body)["sampling_session_id"]


def step(harness: Harness, model_id: str, seq_id: int) -> None:
    harness.run("forward_backward", model_id, seq_id, GOOD_PASS)
    harness.run("optim_step", model_id, seq_id + 1, STEP)


def program(harness: Harness, *, seed: int | None = 3) -> list[object]:
    """A small run: what it samples."""
    model_id = harness.create_model(seed=seed)
    seen: list[object] = []
    for number in range(3):
        sampler = publish(harness, model_id, 3 * number + 1, number)
        seen += [harness.sample(sampler, i, num_samples=2)["sequences"] for i in range(2)]
        step(harness, model_id, 3 * number + 2)
    return seen


def test_the_same_seed_samples_the_same_in_every_process(tmp_path: Path) -> None:
    runs = []
    for name in ("one", "two"):
        harness = Harness(open_service(tmp_path / name))
        runs.append(program(harness))
        harness.service.stop()
    assert runs[0] == runs[1]
    assert len({json.dumps(part) for part in runs[0]}) == len(runs[0])


def test_without_a_seed_runs_differ(tmp_path: Path) -> None:
    harness = Harness(open_service(tmp_path))
    one = program(harness, seed=None)
    assert one != program(Harness(harness.service), seed=None)
    harness.service.stop()


def test_a_sampler_keeps_its_version_while_training_goes_on_and_after_a_restart(tmp_path: Path) -> None:
    harness = Harness(open_service(tmp_path))
    model_id = harness.create_model()
    step(harness, model_id, 1)
    sampler = publish(harness, model_id, 3, 0)
    first = harness.sample(sampler, 0, num_samples=3, prompt_logprobs=True)
    step(harness, model_id, 4)
    newer = publish(harness, model_id, 6, 1)
    params = {"seed": 11}
    old, new = (harness.sample(name, 1, params=dict(params)) for name in (sampler, newer))
    assert old != new
    harness.service.stop()
    harness = Harness(open_service(tmp_path), harness.session_id)
    assert harness.sample(sampler, 0, num_samples=3, prompt_logprobs=True) == first
    assert harness.sample(sampler, 2, params=dict(params)) == old
    assert harness.sample(newer, 2, params=dict(params)) == new
    harness.service.stop()


def test_many_versions_leave_the_engine_and_come_back(tmp_path: Path) -> None:
    engine = FakeEngine(state_bytes=300_000)
    limits = ServerLimits(max_unnamed_samplers=4, lora_cache_bytes=700_000)  # two fit
    harness = Harness(open_service(tmp_path, engine=engine, limits=limits))
    model_id = harness.create_model()
    samplers, seen = [], []
    for number in range(4):
        samplers.append(publish(harness, model_id, 3 * number + 1, number))
        seen.append(harness.sample(samplers[-1], 0, params={"seed": 1}))
        step(harness, model_id, 3 * number + 2)
    assert len(engine._weights) == 2
    assert [harness.sample(name, 1, params={"seed": 1}) for name in samplers] == seen
    harness.sample(samplers[0], 2)
    publish(harness, model_id, 13, 4)  # pushes out the one that was not used for longest
    wait_until(lambda: harness.stored(lambda journal: journal.sampler(samplers[1])) is None)  # after the answer
    assert isinstance(failure(lambda: harness.sample(samplers[1], 3)), NotFoundError)
    assert harness.sample(samplers[0], 4, params={"seed": 1}) == seen[0]
    names = [*samplers, f"{harness.session_id}:sample:4"]
    rows = harness.stored(lambda journal: [journal.sampler(name) for name in names])
    files = [tmp_path / (row.file or "") for row in rows if row is not None]
    assert len(set(files)) == 4 and all(path.is_file() for path in files)
    harness.service.stop()


def test_of_a_models_versions_the_newest_stay_in_the_engine_and_older_ones_come_back(tmp_path: Path) -> None:
    engine = FakeEngine()
    harness = Harness(open_service(tmp_path, engine=engine))
    other, model_id = harness.create_model(0), harness.create_model(1)
    kept = publish(harness, other, 1, 0)
    samplers, seen = [], []
    for number in range(1, 6):
        samplers.append(publish(harness, model_id, 3 * number - 2, number))
        seen.append(harness.sample(samplers[-1], 0, params={"seed": 1}))
        step(harness, model_id, 3 * number - 1)
    assert set(engine._weights) == {kept, *samplers[-sampling.MAX_IN_ENGINE_OF_A_MODEL :]}
    assert [harness.sample(name, 1, params={"seed": 1}) for name in samplers] == seen
    harness.service.stop()


def test_a_copy_of_a_sample_request_gets_the_same_answer_and_another_is_refused(harness: Harness) -> None:
    sampler = publish(harness, harness.create_model(), 1, 0)
    first = harness.sample(sampler, 0, num_samples=2)
    assert harness.sample(sampler, 0, num_samples=2) == first
    assert isinstance(failure(lambda: harness.sample(sampler, 0, num_samples=3)), ConflictError)


def test_greedy_samples_agree_and_random_ones_do_not(harness: Harness) -> None:
    sampler = publish(harness, harness.create_model(), 1, 0)
    greedy = harness.sample(sampler, 0, num_samples=3, params={"temperature": 0.0})["sequences"]
    assert greedy[0] == greedy[1] == greedy[2]
    drawn = harness.sample(sampler, 1, num_samples=3)["sequences"]
    assert len({json.dumps(sequence) for sequence in drawn}) == 3


def test_a_saved_sampler_samples_as_the_published_one(harness: Harness) -> None:
    model_id = harness.create_model()
    step(harness, model_id, 1)
    published = publish(harness, model_id, 3, 0)
    path = harness.run("save_weights_for_sampler", model_id, 4, {"path": "s"})["path"]
    body = {"session_id": harness.session_id, "sampling_session_seq_id": 1, "model_path": path}
    saved = harness.service.sampling_sessions.create(LOCAL, json.dumps(body).encode()).sampling_session_id
    one, two = (harness.sample(name, 0, params={"seed": 5}) for name in (published, saved))
    assert one == two
    info = harness.service.sampling_sessions.info(LOCAL, saved)
    assert (info.base_model, info.model_path) == (BASE, path.replace("tinker://", "mint://"))


def test_a_request_that_leaves_the_engine_cancelled_is_no_fault_of_the_server() -> None:
    prompt = ModelInput.from_ints([5])
    request = SampleRequest(sampling_session_id="s", seq_id=0, prompt=prompt, sampling_params=SamplingParams())
    error = from_wire(wire.decode_error(sample_result(request, SampleResult([], error=CANCELLED)).body) or {})
    assert isinstance(error, RequestCancelledError)
    assert (error.category, error.status) == ("user", 400)


def test_prompt_logprobs_alone_need_no_room_for_samples(harness: Harness) -> None:
    sampler = publish(harness, harness.create_model(), 1, 0)
    prompt = [1 + i % 50 for i in range(512)]
    answer = harness.sample(sampler, 0, prompt=prompt, prompt_logprobs=True, params={"max_tokens": 0})
    assert answer["sequences"] == [] and len(answer["prompt_logprobs"]) == 512
    assert answer["prompt_logprobs"][0] is None and all(value <= 0 for value in answer["prompt_logprobs"][1:])
    topk = harness.sample(sampler, 1, topk_prompt_logprobs=2)["topk_prompt_logprobs"]
    assert topk[0] is None and len(topk[1]) == 2


class BreaksOnSome(FakeEngine):
    """An engine that cannot sample prompts with token 666 beyond their second token."""

    def open_batch(self) -> FakeBatch:
        return BreakingBatch(self)


class BreakingBatch(FakeBatch):
    def step(self) -> dict[str, SampleResult]:
        for running in self._running.values():
            if 666 in running.job.prompt and len(running.tokens[0]) == 2:
                raise ZeroDivisionError("in the batch")
        return super().step()


def test_a_request_that_breaks_the_engine_fails_alone(tmp_path: Path) -> None:
    harness = Harness(open_service(tmp_path, engine=BreaksOnSome()))
    sampler = publish(harness, harness.create_model(), 1, 0)
    bodies = [sample_body(sampler, seq_id, prompt=[token]) for seq_id, token in ((0, 5), (1, 666), (2, 7))]
    with held(harness):  # so that all are sampled together
        requests = [harness.service.sampling.accept(LOCAL, body).request_id for body in bodies]
    assert "ZeroDivisionError" in str(failure(lambda: harness.wait(requests[1])))
    alone = Harness(open_service(tmp_path / "alone"))
    other = publish(alone, alone.create_model(), 1, 0)
    for name, seq_id, token in ((requests[0], 0, 5), (requests[2], 2, 7)):
        assert harness.wait(name) == alone.sample(other, seq_id, prompt=[token], params={"max_tokens": 4})
    assert len(harness.sample(sampler, 3)["sequences"][0]["tokens"]) == 3, "and the next ones are sampled as ever"
    alone.service.stop()
    harness.service.stop()


def test_a_folder_that_cannot_be_used_says_so(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("no folder")
    with pytest.raises(JournalError, match="MINT_HOME"):
        open_service(tmp_path / "file")


class Diverged(FakeEngine):
    """One of its jobs has weights that give no finite logits."""

    def open_batch(self) -> FakeBatch:
        return DivergedBatch(self)


class DivergedBatch(FakeBatch):
    def step(self) -> dict[str, SampleResult]:
        seeds = {key: running.job.seed for key, running in self._running.items()}
        return {key: SampleResult([], error="the weights have diverged") if seeds[key] == 666 else result
                for key, result in super().step().items()}  # fmt: skip


def test_weights_that_have_diverged_fail_the_request_instead_of_answering_nothing(tmp_path: Path) -> None:
    harness = Harness(open_service(tmp_path, engine=Diverged()))
    sampler = publish(harness, harness.create_model(), 1, 0)
    with pytest.raises(RequestFailedError, match="diverged"):
        harness.sample(sampler, 0, params={"seed": 666})
    assert harness.sample(sampler, 1, params={"seed": 1})["sequences"]
    harness.service.stop()
