"""What every engine promises the service; a new engine adds one line to `ENGINES`."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from engine_data import ADAM, CROSS_ENTROPY, LORA, job, random_data
from small_models import write_model
from two_lanes import TwoLanes

from mint.config import prepare_ray
from mint.engine.fake_engine import FakeEngine
from mint.engine.protocol import (
    CANCELLED,
    LOSSES,
    Engine,
    ModelState,
    SampleBatch,
    SampleResult,
    StopRule,
    TrainDatum,
    resolve_loss,
)
from mint.engine.reductions.division import Peers
from mint.engine.torch_engine import TorchEngine
from mint.errors import CheckpointError, MintError, NotFoundError

ENGINES: dict[str, Callable[[], Engine]] = {
    "fake": lambda: FakeEngine(vocab_size=97),
    "two lanes": lambda: TwoLanes(vocab_size=97),
    "torch": lambda: TorchEngine(dtype="float32", threads=1, device="cpu"),
    "transformers": lambda: TorchEngine(dtype="float32", threads=1, device="cpu", implementation="transformers"),
}


@cache
def _ranks() -> Any:
    """Two ranks, which all engines of this module share: it takes seconds to start some."""
    from mint.cluster.groups import RankGroup  # deferred: ray, which is an extra

    def open_rank(peers: Peers) -> TorchEngine:  # sent by value: ranks cannot import this module
        return TorchEngine(dtype="float32", threads=1, device="cpu", peers=peers)

    return RankGroup(open_rank, 2)


@cache
def _replicas() -> Any:
    """Two replicas, which all engines of this module share, too."""
    from mint.cluster.replicas import Replicas  # deferred: as above

    def open_replica(_peers: Peers) -> TorchEngine:
        return TorchEngine(dtype="float32", threads=1, device="cpu")

    return Replicas(open_replica, 2, check_base=lambda _info: None)


def _cluster(*, replicas: bool = False) -> Engine:
    prepare_ray()
    from mint.cluster.engine import ClusterEngine  # deferred: as above

    sampler = TorchEngine(dtype="float32", threads=1, device="cpu")
    engine = ClusterEngine(sampler, lambda _peers: sampler, 2)
    engine._group = _ranks()
    if replicas:
        engine._sampling = _replicas()
    return engine


ENGINES["cluster"] = _cluster
ENGINES["cluster with replicas"] = lambda: _cluster(replicas=True)
NEEDS_RAY = [pytest.mark.slow, pytest.mark.skipif(find_spec("ray") is None, reason="mint[cluster]")]
OPTIONAL = {"cluster": NEEDS_RAY, "cluster with replicas": NEEDS_RAY}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model")
    write_model(path, "tied")
    return path


@pytest.fixture(params=[pytest.param(name, marks=OPTIONAL.get(name, [])) for name in ENGINES])
def engine(request: pytest.FixtureRequest, folder: Path) -> Engine:
    """An engine with base `base` and model `m` (whose lora is no longer the initial one)."""
    engine = ENGINES[request.param]()
    engine.load_base("base", str(folder))
    engine.create_model("m", "base", LORA)
    _step(engine, "m", 0)
    return engine


def _step(engine: Engine, model_id: str, seed: int) -> None:
    engine.forward_backward(model_id, random_data(seed), CROSS_ENTROPY)
    engine.optim_step(model_id, ADAM)


def test_a_base_is_loaded_once(engine: Engine, folder: Path) -> None:
    info = engine.load_base("base", str(folder))
    assert info.name == "base" and info.vocab_size == 97 and info.context_length > 0
    assert {"dtype", "device"} <= info.settings.keys()


def test_a_new_model_reports_what_took_effect(engine: Engine) -> None:
    settings = engine.create_model("new", "base", LORA)
    assert settings["alpha"] == 32 and settings["scale"] == 32 / LORA.rank
    assert engine.has_model("new") and not engine.has_model("other")


def test_a_trained_state_has_the_size_that_is_said(engine: Engine) -> None:
    shapes = {"m": LORA, "other": dataclasses.replace(LORA, rank=3, train_mlp=False)}
    engine.create_model("other", "base", shapes["other"])
    _step(engine, "other", 0)
    for name, lora in shapes.items():
        state = engine.read_state(name)
        parts = (state.weights, state.exp_avg or {}, state.exp_avg_sq or {})
        assert engine.state_bytes("base", lora) == sum(array.nbytes for part in parts for array in part.values())


def test_the_name_of_a_model_does_not_enter_its_state(engine: Engine) -> None:
    engine.create_model("one", "base", LORA)
    engine.create_model("two", "base", LORA)
    assert engine.state_digest("one") == engine.state_digest("two")


def test_the_seed_of_a_model_enters_its_state(engine: Engine) -> None:
    engine.create_model("one", "base", LORA)
    engine.create_model("two", "base", dataclasses.replace(LORA, seed=8))
    assert engine.state_digest("one") != engine.state_digest("two")


def test_a_dropped_model_is_gone_and_may_be_dropped_again(engine: Engine) -> None:
    engine.drop_model("m")
    engine.drop_model("m")
    assert not engine.has_model("m")
    for call in (engine.state_digest, engine.read_state, engine.clear_gradient):
        with pytest.raises(NotFoundError):
            call("m")


def test_a_pass_returns_a_logprob_per_position_and_well_formed_metrics(engine: Engine) -> None:
    data = random_data(1, policy=True)
    for name in LOSSES:
        result = engine.forward("m", data, resolve_loss(name))
        assert [own.shape for own in result.logprobs] == [example.targets.shape for example in data]
        assert all(own.dtype == np.float32 and np.isfinite(own).all() for own in result.logprobs)
        assert {"loss:sum", "tokens:sum"} <= result.metrics.keys()
        assert all(metric.count(":") == 1 for metric in result.metrics)
        assert result.metrics["tokens:sum"] == sum((example.weights != 0).sum() for example in data)


def test_forward_changes_nothing_and_equals_forward_backward(engine: Engine) -> None:
    data, before = random_data(1), engine.state_digest("m")
    first = engine.forward("m", data, CROSS_ENTROPY)
    second = engine.forward_backward("m", data, CROSS_ENTROPY)
    assert engine.state_digest("m") == before
    assert [own.tobytes() for own in first.logprobs] == [own.tobytes() for own in second.logprobs]


def test_the_same_operations_give_the_same_digests(engine: Engine) -> None:
    digests = []
    for name in ("one", "two"):
        engine.create_model(name, "base", LORA)
        digests.append([])
        for seed in range(3):
            _step(engine, name, seed)
            digests[-1].append(engine.state_digest(name))
    assert digests[0] == digests[1] and len(set(digests[0])) == 3


def test_every_pass_counts_and_clearing_forgets_them(engine: Engine) -> None:
    state, digests = engine.read_state("m"), []
    for passes in ([1], [1, 2], [2], [1, None, 2]):
        engine.write_state("m", state)
        for seed in passes:
            if seed is None:
                engine.clear_gradient("m")
            else:
                engine.forward_backward("m", random_data(seed), CROSS_ENTROPY)
        engine.optim_step("m", ADAM)
        digests.append(engine.state_digest("m"))
    assert len(set(digests)) == 3 and digests[2] == digests[3]


def test_a_step_reports_at_least_these(engine: Engine) -> None:
    engine.forward_backward("m", random_data(1), CROSS_ENTROPY)
    metrics = engine.optim_step("m", ADAM)
    assert {"grad_norm", "step", "learning_rate", "skipped_nonfinite"} <= metrics.keys()
    assert metrics["step"] == 2 and metrics["learning_rate"] == ADAM.learning_rate and metrics["skipped_nonfinite"] == 0


def test_a_written_state_continues_bit_for_bit(engine: Engine) -> None:
    state = engine.read_state("m")
    engine.create_model("copy", "base", dataclasses.replace(LORA, seed=9))
    engine.forward_backward("copy", random_data(5), CROSS_ENTROPY)
    engine.write_state("copy", state)
    assert engine.state_digest("copy") == engine.state_digest("m")
    for name in ("m", "copy"):
        _step(engine, name, 6)
    assert engine.state_digest("copy") == engine.state_digest("m")


def test_a_state_that_was_read_is_a_copy(engine: Engine) -> None:
    state = engine.read_state("m")
    parts = (state.weights, state.exp_avg or {}, state.exp_avg_sq or {})
    before = [{name: array.copy() for name, array in part.items()} for part in parts]
    _step(engine, "m", 6)
    engine.write_state("m", ModelState(state.weights))
    for then, now in zip(before, parts, strict=True):
        assert now and all(np.array_equal(then[name], array) for name, array in now.items())


def test_weights_alone_reset_the_optimizer(engine: Engine) -> None:
    engine.write_state("m", ModelState(engine.read_state("m").weights))
    assert engine.read_state("m").step == 0


def test_a_foreign_state_is_refused_and_changes_nothing(engine: Engine) -> None:
    before = engine.state_digest("m")
    with pytest.raises(CheckpointError):
        engine.write_state("m", ModelState({"nothing": np.zeros(3, np.float32)}))
    assert engine.state_digest("m") == before


def test_published_weights_stay_as_they_were(engine: Engine) -> None:
    engine.publish("m", "w")
    before = engine.sample([job([3, 4], weights_id="w", num_samples=3)])[0]
    _step(engine, "m", 6)
    after = engine.sample([job([3, 4], weights_id="w", num_samples=3)])[0]
    for own, other in zip(before.samples, after.samples, strict=True):
        assert own.tokens.tobytes() == other.tokens.tobytes() and own.logprobs.tobytes() == other.logprobs.tobytes()


def test_saved_weights_sample_as_the_published_ones(engine: Engine) -> None:
    engine.publish("m", "w")
    engine.load_weights("saved", "base", LORA, engine.read_state("m").weights)
    own, saved = engine.sample([job([3, 4], weights_id=name) for name in ("w", "saved")])
    assert own.samples[0].logprobs.tobytes() == saved.samples[0].logprobs.tobytes()
    engine.drop_weights("saved")
    engine.drop_weights("saved")
    with pytest.raises(MintError):
        engine.sample([job([3, 4], weights_id="saved")])


def test_samples_are_complete(engine: Engine) -> None:
    results = engine.sample([job([3, 4], num_samples=n, max_tokens=6, seed=n) for n in (1, 4)])
    assert [len(result.samples) for result in results] == [1, 4]
    for sample in (sample for result in results for sample in result.samples):
        assert sample.tokens.dtype == np.int64 and sample.logprobs.dtype == np.float32
        assert sample.tokens.shape == sample.logprobs.shape == (6,) and not sample.stopped
        assert ((sample.tokens >= 0) & (sample.tokens < 97)).all() and np.isfinite(sample.logprobs).all()


def test_processed_logprobs_of_greedy_samples_are_zero(engine: Engine) -> None:
    (result,) = engine.sample([job([3, 4], temperature=0.0, logprobs_mode="processed")])
    assert not result.samples[0].logprobs.any()


def test_a_job_does_not_depend_on_its_neighbours(engine: Engine) -> None:
    engine.publish("m", "w")
    own = job([3, 4, 5], weights_id="w", num_samples=3, seed=5)
    alone = engine.sample([own])[0]
    mixed = engine.sample([job([9] * 40, num_samples=5), own, job([7], weights_id="w", max_tokens=20)])[1]
    for one, other in zip(alone.samples, mixed.samples, strict=True):
        assert one.tokens.tobytes() == other.tokens.tobytes() and one.logprobs.tobytes() == other.logprobs.tobytes()


def test_the_same_seed_gives_the_same_sample_and_samples_differ(engine: Engine) -> None:
    first, second = engine.sample([job([3, 4], num_samples=4, max_tokens=12, seed=1)] * 2)
    assert [s.tokens.tolist() for s in first.samples] == [s.tokens.tolist() for s in second.samples]
    assert len({tuple(s.tokens.tolist()) for s in first.samples}) > 1


def test_a_stop_token_is_the_last_one(engine: Engine) -> None:
    free = engine.sample([job([3, 4], max_tokens=10)])[0].samples[0].tokens
    stop = int(free[3])
    sample = engine.sample([job([3, 4], max_tokens=10, stop=StopRule(frozenset([stop])))])[0].samples[0]
    assert sample.stopped and sample.tokens.tolist() == free[: free.tolist().index(stop) + 1].tolist()


def test_prompt_logprobs_start_with_none_and_match_forward(engine: Engine) -> None:
    prompt = np.array([3, 4, 5, 6])
    result = engine.sample([job(prompt.tolist(), max_tokens=0, prompt_logprobs=True, topk_prompt_logprobs=3)])[0]
    assert result.samples == [] and result.prompt_logprobs is not None and result.topk_prompt_logprobs is not None
    assert result.prompt_logprobs.dtype == np.float32 and np.isnan(result.prompt_logprobs[0])
    assert np.isfinite(result.prompt_logprobs[1:]).all() and len(result.prompt_logprobs) == 4
    assert result.topk_prompt_logprobs[0] is None
    assert all(pairs is not None and len(pairs) == 3 for pairs in result.topk_prompt_logprobs[1:])


def test_a_pass_with_several_targets_returns_a_logprob_for_each(engine: Engine) -> None:
    rng = np.random.default_rng(0)
    several = [
        TrainDatum(d.tokens, rng.integers(0, 97, (len(d.tokens), k)), rng.random((len(d.tokens), k)).astype(np.float32))
        for k, d in enumerate(random_data(1), start=1)
    ]
    data = [*several, *random_data(2, count=1)]
    several[0].weights[0] = 0
    result = engine.forward_backward("m", data, CROSS_ENTROPY)
    assert [own.shape for own in result.logprobs] == [example.targets.shape for example in data]
    singles = engine.forward(
        "m", [TrainDatum(d.tokens, d.targets[:, 0], d.weights[:, 0]) for d in several], CROSS_ENTROPY
    )
    for own, single in zip(result.logprobs, singles.logprobs, strict=False):
        assert own[:, 0].tobytes() == single.tobytes()
    assert result.metrics["tokens:sum"] == sum(example.trained.sum() for example in data)
    losses = [-(d.weights * own).sum() for d, own in zip(data, result.logprobs, strict=True)]
    assert result.metrics["loss:sum"] == pytest.approx(sum(losses), rel=1e-4)


def test_what_is_asked_besides_tokens_has_its_shape(engine: Engine) -> None:
    pairs = np.array([[1, 4], [4, 9], [1, 4]])
    asked = job(
        [3, 4, 5, 6, 7],
        num_samples=2,
        max_tokens=3,
        topk_sample_logprobs=4,
        target_prompt_logprobs=pairs,
        prompt_alt_tokens_k=6,
        prompt_logprobs=True,
        topk_prompt_logprobs=2,
        prompt_logprobs_last_n=2,
    )
    (result,) = engine.sample([asked])
    for sample in result.samples:
        assert sample.topk is not None and sample.topk.tokens.shape == sample.topk.logprobs.shape == (3, 4)
    assert result.prompt_alt_tokens is not None and result.prompt_alt_tokens.tokens.shape == (4, 6)
    assert result.prompt_alt_tokens.logprobs.shape == (4, 6)
    assert ((result.prompt_alt_tokens.tokens >= 0) & (result.prompt_alt_tokens.tokens < 97)).all()
    assert result.prompt_logprobs is not None and np.isnan(result.prompt_logprobs).tolist() == [True] * 3 + [False] * 2
    assert result.topk_prompt_logprobs is not None
    assert [row is None for row in result.topk_prompt_logprobs] == [True] * 3 + [False] * 2
    found = result.target_prompt_logprobs
    assert found is not None and found.shape == (3,) and found[0] == found[2] and np.isfinite(found).all()
    whole = engine.sample([job([3, 4, 5, 6, 7], max_tokens=0, prompt_logprobs=True)])[0].prompt_logprobs
    assert whole is not None and whole[1] == found[0] and np.array_equal(whole[-2:], result.prompt_logprobs[-2:])


def _finish(batch: SampleBatch, heard: dict[str, SampleResult] | None = None) -> dict[str, SampleResult]:
    results = heard or {}
    while batch.keys:
        results |= batch.step()
    return results


def _same(one: SampleResult, other: SampleResult) -> bool:
    pairs = zip(one.samples, other.samples, strict=True)
    return one.error == other.error and all(
        own.tokens.tobytes() == its.tokens.tobytes() and own.logprobs.tobytes() == its.logprobs.tobytes()
        for own, its in pairs
    )


def test_a_job_that_joins_a_running_batch_gets_what_it_gets_alone(engine: Engine) -> None:
    engine.publish("m", "w")
    jobs = [
        job([3 + n] * (5 * n + 1), weights_id="w" if n % 2 else None, num_samples=n + 1, max_tokens=9 - n, seed=n)
        for n in range(5)
    ]
    alone = engine.sample(jobs)
    batch, results = engine.open_batch(), {}
    assert not batch.keys and batch.step() == {}
    for place, own in enumerate(jobs):
        batch.add(f"job-{place}", own)
        assert f"job-{place}" in batch.keys
        results |= batch.step()
        results |= batch.step()
    results = _finish(batch, results)
    assert all(_same(results[f"job-{place}"], alone[place]) for place in range(5))


def test_a_result_comes_as_soon_as_its_job_has_ended_and_then_the_key_is_free(engine: Engine) -> None:
    batch = engine.open_batch()
    batch.add("long", job([3, 4], max_tokens=120))
    batch.add("short", job([5], max_tokens=2))
    order: list[str] = []
    while not order:
        order += batch.step()
    batch.add("short", job([5], max_tokens=2))
    while batch.keys:
        order += batch.step()
    assert order == ["short", "short", "long"]


def test_a_listener_hears_every_token_in_order_by_the_time_the_result_is_there(engine: Engine) -> None:
    batch, heard = engine.open_batch(), []
    batch.add("heard", job([3, 4], num_samples=3, max_tokens=6), lambda *told: heard.append(told))
    batch.add("deaf", job([3, 4], num_samples=3, max_tokens=6))
    results = _finish(batch)
    for index, sample in enumerate(results["heard"].samples):
        told = [(token, logprob) for which, token, logprob in heard if which == index]
        assert told == list(zip(sample.tokens.tolist(), sample.logprobs.tolist(), strict=True))


@pytest.mark.parametrize("patience", [0, 1, 4])
def test_a_cancelled_job_leaves_at_the_next_step_and_the_others_keep_their_bits(engine: Engine, patience: int) -> None:
    jobs = [job([3, 4], max_tokens=120, seed=n) for n in range(3)]
    alone, batch, results = engine.sample(jobs), engine.open_batch(), {}
    for place, own in enumerate(jobs):
        batch.add(str(place), own)
    for _ in range(patience):
        assert not batch.step()
    batch.cancel("1")
    batch.cancel("unknown")
    results = batch.step()
    assert results["1"].error == CANCELLED and results["1"].samples == [] and "1" not in batch.keys
    results = _finish(batch, results)
    assert _same(results["0"], alone[0]) and _same(results["2"], alone[2])


def test_weights_may_be_dropped_and_trained_on_while_a_job_uses_them(engine: Engine) -> None:
    engine.publish("m", "w")
    own = job([3, 4], weights_id="w", num_samples=2, max_tokens=9)
    (alone,) = engine.sample([own])
    batch = engine.open_batch()
    batch.add("own", own)
    batch.step()
    engine.drop_weights("w")
    _step(engine, "m", 3)
    assert _same(_finish(batch)["own"], alone)
    with pytest.raises(NotFoundError):
        batch.add("late", own)
    assert not batch.keys


def test_the_lanes_of_an_engine_are_one_or_two(engine: Engine) -> None:
    assert engine.lanes in (1, 2)


def test_several_batches_may_be_open(engine: Engine) -> None:
    own = job([3, 4], num_samples=2, max_tokens=5)
    (alone,) = engine.sample([own])
    batches = [engine.open_batch() for _ in range(3)]
    for batch in batches:
        batch.add("own", own)
        batch.step()
    assert all(_same(_finish(batch)["own"], alone) for batch in batches)
