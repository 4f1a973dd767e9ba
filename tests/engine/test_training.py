"""Training passes: sums over examples, masks, determinism, and state that changes only where it should."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import numpy as np
import pytest
from engine_data import ADAM, CROSS_ENTROPY, LORA, datum, flat, job, random_data, take_gradient, train

from mint.engine import packing, target_logprobs
from mint.engine.cpu.operations import CpuOperations
from mint.engine.protocol import LOSSES, MicroBatching, ModelState, TrainDatum, resolve_loss
from mint.engine.torch_engine import TorchEngine
from mint.errors import CheckpointError
from mint.types.loss_settings import LOSS_SETTINGS


def _gradient(
    engine: TorchEngine,
    passes: list[list[TrainDatum]],
    loss: str = "importance_sampling",
    config: dict[str, float] | None = None,
    micro_batching: MicroBatching | None = None,
) -> np.ndarray:
    engine.clear_gradient("m")
    for data in passes:
        engine.forward_backward("m", data, resolve_loss(loss, config), micro_batching=micro_batching)
    return flat(take_gradient(engine, "m"))


@pytest.fixture
def model(engine: TorchEngine) -> TorchEngine:
    engine.create_model("m", "base", LORA)
    train(engine, "m")
    return engine


@pytest.mark.parametrize("loss", list(LOSSES))
def test_32_examples_at_once_equal_2_times_16_and_32_times_1(model: TorchEngine, loss: str) -> None:
    data = random_data(3, count=32, shared=10, policy=True)
    # wide bounds: a ratio of sequences so near a bound of 4e-4 may fall on either side of it
    config = {"clip_low_threshold": 0.5, "clip_high_threshold": 2.0} if loss == "gspo" else None
    whole = _gradient(model, [data], loss, config)
    assert whole.any()
    halves = _gradient(model, [data[:16], data[16:]], loss, config)
    singles = _gradient(model, [[example] for example in data], loss, config)
    bound = 2e-6 if loss == "cross_entropy" else 1e-6  # its terms are all of one sign, and their sum is larger
    for other in (halves, singles):
        assert np.abs(whole - other).max() <= bound * np.abs(whole).max()


def test_sharing_a_prefix_changes_no_gradient(model: TorchEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    data = random_data(4, count=12, shared=15, policy=True)
    shared = _gradient(model, [data])
    monkeypatch.setattr(packing, "MIN_SHARED", 10**9)
    apart = _gradient(model, [data])
    assert np.abs(shared - apart).max() <= 1e-6 * np.abs(shared).max()


def test_small_micro_batches_give_the_same_gradient(model: TorchEngine) -> None:
    data = random_data(4, count=12, shared=15, policy=True)
    whole = _gradient(model, [data])
    assert len(packing.pack(data, 40)) > 2
    parts = _gradient(model, [data], micro_batching=MicroBatching(40, recompute=False))
    assert np.abs(whole - parts).max() <= 1e-6 * np.abs(whole).max()


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("shared", [0, 10])
@pytest.mark.parametrize("loss", list(LOSSES))
def test_without_logprobs_of_masked_tokens_loss_and_gradient_are_the_same(
    model: TorchEngine, loss: str, shared: int, recompute: bool
) -> None:
    data = random_data(3, count=12, shared=shared, policy=True)
    data = [dataclasses.replace(d, weights=np.where(np.arange(len(d.tokens)) < 9, 0, d.weights)) for d in data]
    micro_batching = MicroBatching(150, recompute)
    whole = _gradient(model, [data], loss, micro_batching=micro_batching)
    parts = _gradient(model, [data], loss, {"trained_only": 1}, micro_batching)
    assert np.abs(whole - parts).max() <= 1e-6 * np.abs(whole).max()
    full, trained = (model.forward("m", data, resolve_loss(loss, config)) for config in ({}, {"trained_only": 1}))
    assert trained.metrics == full.metrics
    for d, *pairs in zip(data, full.logprobs, trained.logprobs, full.entropies, trained.entropies, strict=True):
        for expected, found in (pairs[:2], pairs[2:]):
            assert found.dtype == np.float32
            assert np.array_equal(found, np.where(d.trained, expected, 0))


def test_nothing_to_train_needs_no_forward(model: TorchEngine) -> None:
    data = [dataclasses.replace(d, weights=np.zeros_like(d.weights)) for d in random_data(3)]
    assert not _gradient(model, [data], "cross_entropy", {"trained_only": 1}).any()
    result = model.forward("m", data, resolve_loss("cross_entropy", {"trained_only": 1}))
    assert not any(own.any() for own in result.logprobs)
    assert result.metrics == {"loss:sum": 0.0, "tokens:sum": 0.0}


@pytest.mark.parametrize("loss", list(LOSSES))
@pytest.mark.parametrize("garbage", [np.nan, -np.inf, 1e30])
def test_garbage_at_weight_zero_changes_no_bit(model: TorchEngine, loss: str, garbage: float) -> None:
    clean = random_data(5, policy=True, shared=10)
    dirty = [
        dataclasses.replace(
            d, inputs={k: np.where(d.weights == 0, garbage, v).astype(np.float32) for k, v in d.inputs.items()}
        )
        for d in clean
    ]
    assert any((d.weights == 0).any() for d in clean)
    assert _gradient(model, [clean], loss).tobytes() == _gradient(model, [dirty], loss).tobytes()


@pytest.mark.parametrize("loss", sorted(LOSSES.keys() - {"cross_entropy"}))
def test_prompt_tokens_have_no_gradient_whatever_the_policy_thinks_of_them(model: TorchEngine, loss: str) -> None:
    """The prompt's sampler logprobs are 0, as a padded datum has them: far from the policy's own."""
    (example,) = random_data(5, count=1, policy=True)
    padded = {key: np.where(example.weights == 0, 0, row).astype(np.float32) for key, row in example.inputs.items()}
    example = dataclasses.replace(example, inputs=padded)
    other = dataclasses.replace(example, targets=np.where(example.weights == 0, 90, example.targets))
    assert (example.targets != other.targets).any()
    wide = (
        {"clip_low_threshold": 0.0, "clip_high_threshold": 1e9} if "clip_low_threshold" in LOSS_SETTINGS[loss] else {}
    )
    first, second = (_gradient(model, [[each]], loss, wide) for each in (example, other))
    assert first.any() and first.tobytes() == second.tobytes()


@pytest.mark.parametrize("loss", sorted(LOSSES.keys() - {"cross_entropy"}))
@pytest.mark.parametrize("chunked", [True, False])
def test_the_gradient_at_a_temperature_is_the_slope_of_the_loss(
    model: TorchEngine, loss: str, chunked: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if chunked:
        monkeypatch.setattr(target_logprobs, "MIN_CHUNK_ROWS", 16)
        monkeypatch.setattr(CpuOperations, "logits_at_once", 97 * 20)
    wide = {"clip_low_threshold": 0.0, "clip_high_threshold": 1e9}
    config = {"temperature": 0.7, **{key: wide[key] for key in wide if key in LOSS_SETTINGS[loss]}}
    data = random_data(9, policy=True)
    model.forward_backward("m", data, resolve_loss(loss, config))
    gradient = take_gradient(model, "m")
    length = np.linalg.norm(flat(gradient))
    before = model.read_state("m")
    losses = []
    for step in (1e-3, -1e-3):
        moved = {name: weight + np.float32(step / length) * gradient[name] for name, weight in before.weights.items()}
        model.write_state("m", ModelState(moved))
        result = model.forward("m", data, resolve_loss(loss, config))
        model.write_state("m", before)
        if loss == "cispo":  # its clipped ratio is held fixed
            parts = zip(
                data, result.logprobs, model.forward("m", data, resolve_loss(loss, config)).logprobs, strict=True
            )
            losses.append(
                sum(
                    -(d.weights * np.exp(base - d.inputs["logprobs"]) * d.inputs["advantages"] * p).sum()
                    for d, p, base in parts
                )
            )
        else:
            losses.append(result.metrics["loss:sum"])
    assert (losses[0] - losses[1]) / 2e-3 == pytest.approx(length, rel=0.02)


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_the_gradient_with_an_entropy_bonus_is_the_slope_of_the_loss(model: TorchEngine, temperature: float) -> None:
    """A finite difference along the gradient; the loss is the plain one less coef · w · H of each trained token."""
    config = {"entropy_coef": 0.5, "temperature": temperature}
    data = random_data(9, policy=True)
    spec = resolve_loss("importance_sampling", config)
    result = model.forward_backward("m", data, spec)
    gradient = take_gradient(model, "m")
    plain = model.forward("m", data, resolve_loss("importance_sampling", {"temperature": temperature}))
    bonus = sum(float((datum.weights * own).sum()) for datum, own in zip(data, plain.entropies, strict=True)) * 0.5
    assert result.metrics["loss:sum"] == pytest.approx(plain.metrics["loss:sum"] - bonus, rel=1e-5)
    length = np.linalg.norm(flat(gradient))
    before = model.read_state("m")
    losses = []
    for step in (1e-3, -1e-3):
        moved = {name: weight + np.float32(step / length) * gradient[name] for name, weight in before.weights.items()}
        model.write_state("m", ModelState(moved))
        losses.append(model.forward("m", data, spec).metrics["loss:sum"])
        model.write_state("m", before)
    assert (losses[0] - losses[1]) / 2e-3 == pytest.approx(length, rel=0.02)


def test_logprobs_and_entropies_at_a_temperature_are_those_of_the_divided_logits(engine: TorchEngine) -> None:
    engine.create_model("m", "base", LORA)
    data = random_data(8, policy=True)
    result = engine.forward("m", data, resolve_loss("ppo", {"temperature": 0.7}))
    for example, logprobs, entropies in zip(data, result.logprobs, result.entropies, strict=True):
        rows = engine.sample([job([*example.tokens, 0], max_tokens=0, topk_prompt_logprobs=97)])[0].topk_prompt_logprobs
        table = np.zeros((len(example.tokens), 97))
        for place, row in enumerate((rows or [])[1:]):
            for token, logprob in row or []:
                table[place, token] = logprob
        tempered = table / 0.7
        tempered -= np.log(np.exp(tempered).sum(1, keepdims=True))
        np.testing.assert_allclose(logprobs, tempered[np.arange(len(table)), example.targets], atol=1e-4)
        np.testing.assert_allclose(entropies, -(np.exp(tempered) * tempered).sum(1), atol=1e-4)


def test_a_masked_token_has_no_gradient_of_its_own(model: TorchEngine) -> None:
    """Other targets at masked positions change nothing: their logprobs are reported, not trained."""
    example = datum([3, 4, 5, 6, 7, 8], prompt=4)
    other = dataclasses.replace(example, targets=np.where(example.weights == 0, 9, example.targets))
    assert (
        _gradient(model, [[example]], "cross_entropy").tobytes()
        == _gradient(model, [[other]], "cross_entropy").tobytes()
    )


def test_logprobs_come_back_in_order_for_every_position(model: TorchEngine) -> None:
    data = random_data(6, count=9, shared=12)
    together = model.forward("m", data, CROSS_ENTROPY).logprobs
    for example, own in zip(data, together, strict=True):
        alone = model.forward("m", [example], CROSS_ENTROPY).logprobs[0]
        assert own.dtype == np.float32 and own.shape == example.targets.shape and np.isfinite(own).all()
        assert np.abs(own - alone).max() <= 1e-5


def test_forward_changes_nothing(model: TorchEngine) -> None:
    before = model.state_digest("m")
    data = random_data(6)
    first = model.forward("m", data, CROSS_ENTROPY)
    assert not flat(take_gradient(model, "m")).any()
    assert model.state_digest("m") == before
    second = model.forward_backward("m", data, CROSS_ENTROPY)
    assert first.metrics == second.metrics
    assert [a.tobytes() for a in first.logprobs] == [b.tobytes() for b in second.logprobs]
    assert model.state_digest("m") == before


def test_weights_scale_the_gradient(model: TorchEngine) -> None:
    data = random_data(7)
    doubled = [dataclasses.replace(d, weights=2 * d.weights) for d in data]
    single, double = (_gradient(model, [part], "cross_entropy") for part in (data, doubled))
    np.testing.assert_allclose(double, 2 * single, rtol=1e-4, atol=1e-5 * np.abs(single).max())


def test_the_same_operations_give_the_same_bits(engine: TorchEngine) -> None:
    digests = []
    for name in ("one", "two"):
        engine.create_model(name, "base", LORA)
        train(engine, name, steps=3)
        digests.append(engine.state_digest(name))
    assert digests[0] == digests[1]


def test_another_seed_gives_another_lora(engine: TorchEngine) -> None:
    engine.create_model("one", "base", LORA)
    engine.create_model("two", "base", dataclasses.replace(LORA, seed=8))
    assert engine.state_digest("one") != engine.state_digest("two")


def test_neighbours_in_the_engine_do_not_change_the_bits(engine: TorchEngine) -> None:
    engine.create_model("alone", "base", LORA)
    train(engine, "alone", steps=2)
    engine.create_model("m", "base", LORA)
    engine.create_model("other", "base", dataclasses.replace(LORA, rank=3, seed=1))
    for step in range(2):
        train(engine, "other", steps=1, seed=50 + step)
        train(engine, "m", steps=1, seed=step)
    assert engine.state_digest("m") == engine.state_digest("alone")


def test_a_non_finite_gradient_leaves_the_state_and_clears_itself(model: TorchEngine) -> None:
    before = model.state_digest("m")
    example = datum([3, 4, 5, 6], logprobs=[0, -4, -4], advantages=[np.inf, 1, 1])
    model.forward_backward("m", [example], resolve_loss("importance_sampling"))
    metrics = model.optim_step("m", ADAM)
    assert metrics["skipped_nonfinite"] == 1 and not np.isfinite(metrics["grad_norm"])
    assert model.state_digest("m") == before
    assert not flat(take_gradient(model, "m")).any()
    model.forward_backward("m", random_data(1), CROSS_ENTROPY)
    assert model.optim_step("m", ADAM)["skipped_nonfinite"] == 0


def test_a_step_that_would_break_the_weights_is_not_taken(model: TorchEngine) -> None:
    before = model.state_digest("m")
    model.forward_backward("m", random_data(1), CROSS_ENTROPY)
    assert model.optim_step("m", dataclasses.replace(ADAM, learning_rate=1e39))["skipped_nonfinite"] == 1
    assert model.state_digest("m") == before


def test_a_step_without_a_gradient_reports_no_tokens(model: TorchEngine) -> None:
    metrics = model.optim_step("m", ADAM)
    assert metrics["grad_norm"] == 0 and metrics["tokens"] == 0 and metrics["step"] == 3


def test_a_saved_state_continues_bit_for_bit(model: TorchEngine) -> None:
    state = model.read_state("m")
    model.create_model("copy", "base", dataclasses.replace(LORA, seed=99))
    train(model, "copy", steps=1, seed=70)
    model.forward_backward("copy", random_data(1), CROSS_ENTROPY)  # a pending gradient must go
    model.write_state("copy", state)
    assert model.state_digest("copy") == model.state_digest("m")
    for name in ("m", "copy"):
        train(model, name, steps=2, seed=80)
    assert model.state_digest("copy") == model.state_digest("m")


def test_weights_alone_start_a_fresh_optimizer(model: TorchEngine) -> None:
    state = model.read_state("m")
    model.write_state("m", ModelState(state.weights))
    fresh = model.read_state("m")
    assert fresh.step == 0 and fresh.exp_avg is not None
    assert not any(array.any() for array in fresh.exp_avg.values())


def _without_one(state: ModelState) -> ModelState:
    return dataclasses.replace(state, weights=dict(list(state.weights.items())[1:]))


def _with_one_more(state: ModelState) -> ModelState:
    return dataclasses.replace(state, weights={**state.weights, "extra": np.zeros(2, np.float32)})


def _with_a_wrong_shape(state: ModelState) -> ModelState:
    name = min(state.weights)
    return dataclasses.replace(state, weights={**state.weights, name: np.zeros((2, 2), np.float32)})


def _with_wrong_moments(state: ModelState) -> ModelState:
    return dataclasses.replace(state, exp_avg_sq={})


def _with_half_the_moments(state: ModelState) -> ModelState:
    return dataclasses.replace(state, exp_avg=None)


@pytest.mark.parametrize(
    "damage", [_without_one, _with_one_more, _with_a_wrong_shape, _with_wrong_moments, _with_half_the_moments]
)
def test_a_state_that_does_not_fit_is_refused_and_changes_nothing(
    model: TorchEngine, damage: Callable[[ModelState], ModelState]
) -> None:
    before, state = model.state_digest("m"), damage(model.read_state("m"))
    train(model, "m", steps=1)
    after = model.state_digest("m")
    assert before != after
    with pytest.raises(CheckpointError) as refusal:
        model.write_state("m", state)
    assert refusal.value.remedy
    assert model.state_digest("m") == after
