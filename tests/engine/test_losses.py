"""Each loss and its slope against formulas written out anew in float64, and against finite differences."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from mint.engine.losses import loss_and_slope, measure
from mint.engine.protocol import LOSSES, LossSpec, TrainDatum, resolve_loss
from mint.errors import InvalidRequestError

REFERENCE: dict[str, Callable[[float, float, float, float, float, float], float]] = {
    "cross_entropy": lambda p, q, a, low, high, beta: -p,
    "importance_sampling": lambda p, q, a, low, high, beta: -np.exp(p - q) * a,
    "ppo": lambda p, q, a, low, high, beta: -min(np.exp(p - q) * a, min(max(np.exp(p - q), low), high) * a),
    "cispo": lambda p, q, a, low, high, beta: -min(max(np.exp(p - q), low), high) * a * p,
    "dro": lambda p, q, a, low, high, beta: -(a * p - beta / 2 * (p - q) ** 2),
}


def _example(logprobs: np.ndarray, sampler: np.ndarray, advantages: np.ndarray, weights: np.ndarray) -> TrainDatum:
    zeros = np.zeros(len(logprobs), np.int64)
    inputs = {"logprobs": sampler, "advantages": advantages}
    return TrainDatum(zeros, zeros, weights, inputs)


@pytest.mark.parametrize("name", list(LOSSES))
def test_values_equal_the_formulas(name: str) -> None:
    rng = np.random.default_rng(0)
    p, q, a, w = rng.normal(-2, 0.5, 500), rng.normal(-2, 0.5, 500), rng.normal(0, 2, 500), rng.normal(0, 1, 500)
    config = {"clip_low_threshold": 0.7, "clip_high_threshold": 1.4, "beta": 0.3}
    spec = resolve_loss(name, {key: config[key] for key in LOSSES[name].config})
    loss, _ = loss_and_slope(spec, _example(p, q, a, w), p)
    expected = [w[i] * REFERENCE[name](p[i], q[i], a[i], 0.7, 1.4, 0.3) for i in range(500)]
    np.testing.assert_allclose(loss, expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("name", list(LOSSES))
def test_slopes_equal_finite_differences(name: str) -> None:
    rng = np.random.default_rng(1)
    p, q, a, w = rng.normal(-2, 0.5, 500), rng.normal(-2, 0.5, 500), rng.normal(0, 2, 500), rng.normal(0, 1, 500)
    example, spec, step = _example(p, q, a, w), resolve_loss(name), 1e-6
    _, slope = loss_and_slope(spec, example, p)
    if name == "cispo":  # its clipped ratio is held fixed
        expected = -w * np.clip(np.exp(p - q), 0.8, 1.2) * a
    else:
        above, below = (loss_and_slope(spec, example, p + shift)[0] for shift in (step, -step))
        expected = (above - below) / (2 * step)
        kink = np.minimum(abs(np.exp(p - q) - 0.8), abs(np.exp(p - q) - 1.2)) < 1e-4
        assert kink.sum() < 5
        slope, expected = slope[~kink], expected[~kink]
    np.testing.assert_allclose(slope, expected, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize(
    ("ratio", "advantage", "flows"),
    [
        (1.25, 1.0, True), (1.25, -1.0, True), (0.75, 1.0, True), (0.75, -1.0, True),  # on a bound
        (1.5, 1.0, False), (1.5, -1.0, True), (0.5, 1.0, True), (0.5, -1.0, False),  # beyond it
        (1.0, 1.0, True), (1.0, -1.0, True),
    ],
)  # fmt: skip
def test_ppo_stops_the_gradient_only_beyond_the_bound_that_the_advantage_pushes_to(
    ratio: float, advantage: float, flows: bool
) -> None:
    spec = resolve_loss("ppo", {"clip_low_threshold": 0.75, "clip_high_threshold": 1.25})
    p, q = np.log([ratio]), np.zeros(1)
    assert np.exp(p[0]) == ratio  # exactly on the bound
    loss, slope = loss_and_slope(spec, _example(p, q, np.array([advantage]), np.ones(1)), p)
    assert slope[0] == pytest.approx(-ratio * advantage if flows else 0.0, rel=1e-15)
    assert loss[0] == pytest.approx(-min(ratio * advantage, min(max(ratio, 0.75), 1.25) * advantage), rel=1e-15)


def test_cispo_keeps_a_gradient_at_every_token() -> None:
    p, q = np.array([-9.0, -1.0, -0.1]), np.array([-1.0, -1.0, -8.0])
    _, slope = loss_and_slope(resolve_loss("cispo"), _example(p, q, np.ones(3), np.ones(3)), p)
    np.testing.assert_allclose(slope, [-0.8, -1.0, -1.2], rtol=1e-12)


@pytest.mark.parametrize("name", ["ppo", "cispo"])
def test_thresholds_per_token_override_the_config(name: str) -> None:
    p, q, ones = np.log([1.5, 1.5]), np.zeros(2), np.ones(2)
    example = _example(p, q, ones, ones)
    limits = {"clip_low_threshold": np.array([0.5, 0.5]), "clip_high_threshold": np.array([1.1, 2.0])}
    example = TrainDatum(example.tokens, example.targets, ones, {**example.inputs, **limits})
    loss, _ = loss_and_slope(resolve_loss(name), example, p)
    factor = p if name == "cispo" else ones
    np.testing.assert_allclose(loss, -np.array([1.1, 1.5]) * factor, rtol=1e-7)


@pytest.mark.parametrize("name", list(LOSSES))
@pytest.mark.parametrize("garbage", [np.nan, np.inf, -np.inf, 1e30])
def test_whatever_lies_at_weight_zero_changes_nothing(name: str, garbage: float) -> None:
    rng = np.random.default_rng(2)
    p, q, a = rng.normal(-2, 0.5, 20), rng.normal(-2, 0.5, 20), rng.normal(0, 1, 20)
    w = (np.arange(20) % 3 > 0).astype(np.float64)
    clean = _example(p, q, a, w)
    dirty = _example(p, np.where(w == 0, garbage, q), np.where(w == 0, garbage, a), w)
    for own, other in zip(
        loss_and_slope(resolve_loss(name), clean, p), loss_and_slope(resolve_loss(name), dirty, p), strict=True
    ):
        assert own.tobytes() == other.tobytes()
    entropies = [np.ones(int(w.sum()))]
    assert measure(resolve_loss(name), [clean], [p], entropies) == measure(resolve_loss(name), [dirty], [p], entropies)


def test_metrics_are_what_their_names_say() -> None:
    p, q = np.log([0.5, 0.25, 0.9]), np.log([0.25, 0.5, 0.9])
    example = _example(p, q, np.array([1.0, -1.0, 2.0]), np.array([1.0, 2.0, 0.0]))
    metrics = measure(resolve_loss("ppo"), [example], [p], [np.array([0.5, 1.5])])
    log2 = float(np.log(2))
    assert metrics == pytest.approx({
        "loss:sum": -1.2 + 2 * 0.8, "tokens:sum": 2, "entropy:mean": 1.0, "ratio:mean": 1.25, "ratio_max:max": 2.0,
        "ratio_min:min": 0.5, "kl_k1:mean": 0.0, "kl_k2:mean": log2**2 / 2, "kl_k3:mean": 0.25,
        "abs_logprob_diff:mean": log2, "abs_logprob_diff_max:max": log2, "clip_low_fraction:mean": 0.5,
        "clip_high_fraction:mean": 0.5,
    })  # fmt: skip
    assert all(name.count(":") == 1 for name in metrics)


def test_with_nothing_trained_there_are_no_means() -> None:
    zeros = np.zeros(3)
    metrics = measure(resolve_loss("ppo"), [_example(zeros, zeros, zeros, zeros)], [zeros], [np.zeros(0)])
    assert metrics == {"loss:sum": 0.0, "tokens:sum": 0.0}


def test_defaults_are_filled_in() -> None:
    assert resolve_loss("ppo") == LossSpec("ppo", {"clip_low_threshold": 0.8, "clip_high_threshold": 1.2})
    assert resolve_loss("dro", {"beta": 1}) == LossSpec("dro", {"beta": 1.0})
    assert resolve_loss("cross_entropy", {}) == LossSpec("cross_entropy", {})


@pytest.mark.parametrize(
    ("name", "config", "parts"),
    [
        ("grpo", {}, ["grpo", "loss_fn", "importance_sampling", "cispo"]),
        ("ppo", {"epsilon": 0.2}, ["epsilon", "ppo", "clip_low_threshold", "clip_high_threshold"]),
        ("importance_sampling", {"temperature": 0.8}, ["temperature", "none"]),
        ("dro", {"beta": float("nan")}, ["beta", "nan"]),
        ("ppo", {"clip_high_threshold": -1.0}, ["clip_high_threshold", "-1"]),
        ("ppo", {"clip_low_threshold": 1.3}, ["clip_low_threshold", "1.3", "1.2"]),
    ],
)
def test_a_bad_loss_or_setting_is_refused_by_name(name: str, config: dict[str, float], parts: list[str]) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        resolve_loss(name, config)
    assert all(part in str(caught.value) for part in parts)
