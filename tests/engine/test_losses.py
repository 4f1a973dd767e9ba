"""Each loss and its slope against formulas written out anew in float64, and against finite differences."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import get_args

import numpy as np
import pytest
import torch

from mint.engine.losses import FORMULAS, loss_and_slope, measure
from mint.engine.protocol import LOSSES, LossSpec, TrainDatum, resolve_loss
from mint.errors import InvalidRequestError
from mint.types import LossName
from mint.types.loss_settings import LOSS_SETTINGS

REFERENCE: dict[str, Callable[[float, float, float, float, float, float], float]] = {
    "cross_entropy": lambda p, q, a, low, high, beta: -p,
    "importance_sampling": lambda p, q, a, low, high, beta: -np.exp(p - q) * a,
    "ppo": lambda p, q, a, low, high, beta: -min(np.exp(p - q) * a, min(max(np.exp(p - q), low), high) * a),
    "cispo": lambda p, q, a, low, high, beta: -min(max(np.exp(p - q), low), high) * a * p,
    "dro": lambda p, q, a, low, high, beta: -(a * p - beta / 2 * (p - q) ** 2),
    "sapo": lambda p, q, a, low, high, beta: -4 * a / _tau(a) / (1 + np.exp(-_tau(a) * (np.exp(p - q) - 1))),
}


def _tau(advantage: float) -> float:
    return 1.0 if advantage > 0 else 1.05


def _example(logprobs: np.ndarray, sampler: np.ndarray, advantages: np.ndarray, weights: np.ndarray) -> TrainDatum:
    zeros = np.zeros(len(logprobs), np.int64)
    inputs = {"logprobs": sampler, "advantages": advantages}
    return TrainDatum(zeros, zeros, weights, inputs)


@pytest.mark.parametrize("name", list(REFERENCE))
def test_values_equal_the_formulas(name: str) -> None:
    rng = np.random.default_rng(0)
    p, q, a, w = rng.normal(-2, 0.5, 500), rng.normal(-2, 0.5, 500), rng.normal(0, 2, 500), rng.normal(0, 1, 500)
    config = {"clip_low_threshold": 0.7, "clip_high_threshold": 1.4, "beta": 0.3}
    spec = resolve_loss(name, {key: config[key] for key in LOSS_SETTINGS[name] if key in config})
    loss, _ = loss_and_slope(spec, _example(p, q, a, w), p)
    expected = [w[i] * REFERENCE[name](p[i], q[i], a[i], 0.7, 1.4, 0.3) for i in range(500)]
    np.testing.assert_allclose(loss, expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("name", list(REFERENCE))
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


def test_sapo_gates_as_its_paper_says_and_leaves_a_finite_gradient_at_any_ratio() -> None:
    """The published form of the gate, 4/τ·sigmoid(τ·(r - 1)), differentiated by torch."""
    rng = np.random.default_rng(3)
    p, q, a, w = rng.normal(-2, 1, 200), rng.normal(-2, 1, 200), rng.normal(0, 2, 200), rng.normal(0, 1, 200)
    loss, slope = loss_and_slope(
        resolve_loss("sapo", {"tau_positive": 2.0, "tau_negative": 3.0}), _example(p, q, a, w), p
    )
    own = torch.tensor(p, dtype=torch.float64, requires_grad=True)
    advantages = torch.tensor(a)
    tau = torch.where(advantages > 0, 2.0, 3.0).double()
    expected = -(torch.sigmoid(tau * ((own - torch.tensor(q)).exp() - 1)) * 4 / tau * advantages * torch.tensor(w))
    expected.sum().backward()
    np.testing.assert_allclose(loss, expected.detach().numpy(), rtol=1e-12)
    np.testing.assert_allclose(slope, own.grad.numpy(), rtol=1e-9, atol=1e-14)
    far = np.array([-1000.0, 0.0, 1000.0])
    _, slope = loss_and_slope(resolve_loss("sapo"), _example(far, np.zeros(3), np.ones(3), np.ones(3)), far)
    assert np.isfinite(slope).all()
    assert slope[1] == -1.0, "at r = 1 it is the gradient of importance sampling"


def test_dual_clip_bounds_the_loss_of_a_token_that_is_pushed_down() -> None:
    """max(min(r·A, clip(r)·A), c·A) where A < 0, and ppo's own elsewhere."""
    rng = np.random.default_rng(4)
    p, q, a = rng.normal(-2, 1.5, 500), rng.normal(-2, 1.5, 500), rng.normal(0, 2, 500)
    spec = resolve_loss("ppo", {"dual_clip": 3.0})
    example = _example(p, q, a, np.ones(500))
    loss, slope = loss_and_slope(spec, example, p)
    ratio = np.exp(p - q)
    objective = np.minimum(ratio * a, np.clip(ratio, 0.8, 1.2) * a)
    expected = np.where(a < 0, np.maximum(objective, 3.0 * a), objective)
    np.testing.assert_allclose(loss, -expected, rtol=1e-12)
    step = 1e-6
    above, below = (loss_and_slope(spec, example, p + shift)[0] for shift in (step, -step))
    kink = np.min([abs(ratio - bound) for bound in (0.8, 1.2, 3.0)], axis=0) < 1e-4
    np.testing.assert_allclose(slope[~kink], ((above - below) / (2 * step))[~kink], rtol=1e-5, atol=1e-7)
    assert (slope[(a < 0) & (ratio > 3)] == 0).all()
    assert (slope[(a < 0) & (ratio > 1.3) & (ratio < 3)] != 0).all()


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


def _gspo_by_autograd(example: TrainDatum, logprobs: np.ndarray, low: float, high: float) -> tuple[float, np.ndarray]:
    """Loss and gradient of the sequence-level objective of GRPO trainers, masked mean and all, by torch."""
    p = torch.tensor(logprobs, dtype=torch.float64, requires_grad=True)
    q, advantages = (torch.tensor(example.inputs[key], dtype=torch.float64) for key in ("logprobs", "advantages"))
    weights = torch.tensor(example.weights, dtype=torch.float64)
    mask = (weights != 0).double()
    log_ratio = torch.where(mask > 0, p - q, 0.0)
    ratio = ((log_ratio * mask).sum() / mask.sum().clamp(min=1.0)).exp()
    per_token = -torch.minimum(ratio * advantages, ratio.clamp(low, high) * advantages)
    loss = (per_token * weights).sum()
    loss.backward()
    return float(loss.detach()), p.grad.numpy()


@pytest.mark.parametrize("config", [{}, {"clip_low_threshold": 0.8, "clip_high_threshold": 1.3}])
def test_gspo_equals_autograd_through_one_ratio_per_datum(config: dict[str, float]) -> None:
    spec = resolve_loss("gspo", config)
    low, high = spec.config["clip_low_threshold"], spec.config["clip_high_threshold"]
    rng, clipped = np.random.default_rng(6), 0
    for index in range(100):
        size = int(rng.integers(1, 40))
        q, a = rng.normal(-2, 1, size), rng.normal(0, 1) * np.ones(size)
        if index % 3 == 0:
            a = rng.normal(0, 1, size)
        p = q + rng.normal(0, 0.2, size)
        # several trained spans, as in a conversation of many turns
        w = rng.choice([0.0, 1.0], size) if index % 2 else rng.normal(0, 1, size)
        example = _example(p, q, a, w)
        loss, slope = loss_and_slope(spec, example, p)
        expected, gradient = _gspo_by_autograd(example, p, low, high)
        np.testing.assert_allclose(loss.sum(), expected, rtol=1e-10, atol=1e-12)
        np.testing.assert_allclose(slope, gradient, rtol=1e-10, atol=1e-12)
        clipped += not slope.any()
    assert 0 < clipped < 100  # both sides of the bound were seen


def test_gspo_with_a_ratio_mask_equals_autograd_through_each_tokens_own_logprob() -> None:
    spec = resolve_loss("gspo", {"clip_low_threshold": 0.9, "clip_high_threshold": 1.1})
    rng = np.random.default_rng(7)
    for _ in range(50):
        size = int(rng.integers(2, 40))
        q, a = rng.normal(-2, 1, size), rng.normal(0, 1, size)
        p, mask = q + rng.normal(0, 0.2, size), rng.choice([0.0, 1.0], size)
        example = _example(p, q, a, np.ones(size))
        inputs = {**example.inputs, "sequence_ratio_mask": mask.astype(np.float32)}
        loss, slope = loss_and_slope(spec, TrainDatum(example.tokens, example.targets, example.weights, inputs), p)
        own = torch.tensor(p, dtype=torch.float64, requires_grad=True)
        old, advantages = (torch.tensor(example.inputs[key], dtype=torch.float64) for key in ("logprobs", "advantages"))
        chosen = (own.detach() - old)[torch.tensor(mask) != 0]
        ratio = (chosen.mean() if len(chosen) else torch.zeros(())).exp() * (own - own.detach()).exp()
        expected = -torch.minimum(ratio * advantages, ratio.clamp(0.9, 1.1) * advantages)
        expected.sum().backward()
        np.testing.assert_allclose(loss, expected.detach().numpy(), rtol=1e-10, atol=1e-12)
        np.testing.assert_allclose(slope, own.grad.numpy(), rtol=1e-10, atol=1e-12)


def test_gspo_defaults_are_those_of_its_paper() -> None:
    config = resolve_loss("gspo").config
    assert (config["clip_low_threshold"], config["clip_high_threshold"]) == (1 - 3e-4, 1 + 4e-4)


def _stable_reinforce_by_autograd(
    example: TrainDatum, logprobs: np.ndarray, kl_coeff: float
) -> tuple[np.ndarray, np.ndarray]:
    """REINFORCE whose negative examples are weighed by the trajectory's ratio, cut at 1, by torch in plain loops."""
    p = torch.tensor(logprobs, dtype=torch.float64, requires_grad=True)
    ratio = 1.0
    for own, old, weight in zip(logprobs, example.inputs["logprobs"], example.weights, strict=True):
        ratio *= float(np.exp(own - old)) if weight != 0 else 1.0
    terms = []
    for index, advantage in enumerate(example.inputs["advantages"]):
        taper = 1.0 if advantage >= 0 else min(ratio, 1.0)
        distance = p[index] - float(example.inputs["logprobs"][index])
        term = -taper * float(advantage) * p[index] + kl_coeff * distance**2 / 2
        terms.append(float(example.weights[index]) * term)
    loss = torch.stack(terms)
    loss.sum().backward()
    return loss.detach().numpy(), p.grad.numpy()


@pytest.mark.parametrize("kl_coeff", [0.0, 0.1])
def test_stable_reinforce_equals_autograd_through_one_tapered_weight_per_datum(kl_coeff: float) -> None:
    spec = resolve_loss("stable_reinforce", {"kl_coeff": kl_coeff})
    rng = np.random.default_rng(9)
    tapered = 0
    for _ in range(100):
        size = int(rng.integers(1, 30))
        q, a = rng.normal(-2, 1, size), rng.normal(0, 1) * np.ones(size)
        p, w = q + rng.normal(0, 0.1, size), rng.choice([0.0, 0.5, 1.0], size)
        example = _example(p, q, a, w)
        loss, slope = loss_and_slope(spec, example, p)
        expected, gradient = _stable_reinforce_by_autograd(example, p, kl_coeff)
        np.testing.assert_allclose(loss, expected, rtol=1e-10, atol=1e-12)
        np.testing.assert_allclose(slope, gradient, rtol=1e-10, atol=1e-12)
        tapered += bool(a[0] < 0 and (p - q)[w != 0].sum() < 0)
    assert 10 < tapered < 90  # both sides of the cut were seen


def test_stable_reinforce_is_reinforce_on_data_of_its_own_weights() -> None:
    rng = np.random.default_rng(10)
    p, a = rng.normal(-2, 0.5, 50), rng.normal(0, 2, 50)
    _, slope = loss_and_slope(resolve_loss("stable_reinforce"), _example(p, p, a, np.ones(50)), p)  # at any kl_coeff
    np.testing.assert_array_equal(slope, -a)


def test_stable_reinforce_stops_pushing_down_what_the_policy_has_left_and_keeps_pushing_up() -> None:
    q, ones = np.full(4, -1.0), np.ones(4)
    p = q - 20
    for advantage, force in ((-1.0, 0.0), (1.0, -1.0)):
        spec = resolve_loss("stable_reinforce", {"kl_coeff": 0.0})
        _, slope = loss_and_slope(spec, _example(p, q, advantage * ones, ones), p)
        np.testing.assert_allclose(slope, force * ones, atol=1e-30)


def test_stable_reinforce_has_the_default_that_the_cookbook_names() -> None:
    assert resolve_loss("stable_reinforce").config["kl_coeff"] == 0.01


def test_truncated_importance_sampling_bounds_the_weight_but_keeps_the_gradient() -> None:
    p, q = np.log([4.0, 1.0, 0.25]), np.zeros(3)
    example = _example(p, q, np.array([1.0, -1.0, 2.0]), np.ones(3))
    loss, slope = loss_and_slope(resolve_loss("importance_sampling", {"tis_cap": 2.0}), example, p)
    np.testing.assert_allclose(slope, [-2.0, 1.0, -0.5], rtol=1e-12)
    np.testing.assert_allclose(loss, slope, rtol=1e-12)
    metrics = measure(resolve_loss("importance_sampling", {"tis_cap": 2.0}), [example], [p], [np.ones(3)])
    assert metrics["tokens_clipped:mean"] == pytest.approx(1 / 3)
    assert "tokens_clipped:mean" not in measure(resolve_loss("importance_sampling"), [example], [p], [np.ones(3)])


def test_twice_the_advantage_is_twice_the_gradient() -> None:
    rng = np.random.default_rng(7)
    p, q, a, w = rng.normal(-2, 0.5, 50), rng.normal(-2, 0.5, 50), rng.normal(0, 2, 50), rng.normal(0, 1, 50)
    spec = resolve_loss("importance_sampling")
    (_, single), (_, double) = (loss_and_slope(spec, _example(p, q, factor * a, w), p) for factor in (1, 2))
    assert (2 * single).tobytes() == double.tobytes()


def test_the_effective_sample_size_is_the_share_of_tokens_that_count() -> None:
    spec = resolve_loss("importance_sampling")
    for ratios, share in (([1.0, 1.0, 1.0, 1.0], 1.0), ([1e-9, 1e-9, 1e-9, 1.0], 0.25), ([1e300, 1e-9], 0.5)):
        p, size = np.log(ratios), len(ratios)
        metrics = measure(spec, [_example(p, np.zeros(size), np.ones(size), np.ones(size))], [p], [np.ones(size)])
        assert metrics["ess:mean"] == pytest.approx(share)
    p = np.log(np.linspace(1, 2, 101))
    metrics = measure(spec, [_example(p, np.zeros(101), np.ones(101), np.ones(101))], [p], [np.ones(101)])
    assert metrics["ratio_p99:max"] == pytest.approx(1.99)


def test_every_list_of_losses_names_the_same_losses() -> None:
    docs = Path(__file__).parents[2] / "docs"
    [table] = re.findall(r"^\| `loss_fn` \| minimises .*?\n\n", (docs / "sdk.md").read_text(), re.MULTILINE | re.DOTALL)
    [setting] = re.findall(r"^\| `loss_fn` \| str \|.*$", (docs / "rl.md").read_text(), re.MULTILINE)
    lists = {
        "FORMULAS in engine/losses.py": set(FORMULAS),
        "LossName in types/loss_settings.py": set(get_args(LossName)),
        "LOSS_SETTINGS in types/loss_settings.py": set(LOSS_SETTINGS),
        "the table of losses in docs/sdk.md": set(re.findall(r"^\| `(\w+)` \|", table, re.MULTILINE)) - {"loss_fn"},
        "REFERENCE in tests/engine/test_losses.py": REFERENCE.keys()
        | {"gspo", "stable_reinforce"},  # these have tests of their own
        "the row loss_fn in docs/rl.md": set(re.findall(r'`"?(\w+)"?`', setting)) - {"loss_fn"},
    }
    differences = {place: sorted(names ^ LOSSES.keys()) for place, names in lists.items() if names != LOSSES.keys()}
    assert differences == {}, "compared with LOSSES in engine/protocol.py"


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
    entropies = [np.ones(20)]
    assert measure(resolve_loss(name), [clean], [p], entropies) == measure(resolve_loss(name), [dirty], [p], entropies)


def test_metrics_are_what_their_names_say() -> None:
    p, q = np.log([0.5, 0.25, 0.9]), np.log([0.25, 0.5, 0.9])
    example = _example(p, q, np.array([1.0, -1.0, 2.0]), np.array([1.0, 2.0, 0.0]))
    metrics = measure(resolve_loss("ppo"), [example], [p], [np.array([0.5, 1.5, np.nan])])
    log2 = float(np.log(2))
    assert metrics == pytest.approx({
        "loss:sum": -1.2 + 2 * 0.8, "tokens:sum": 2, "entropy:mean": 1.0, "ratio:mean": 1.25, "ratio_max:max": 2.0,
        "ratio_min:min": 0.5, "kl_k1:mean": 0.0, "kl_k2:mean": log2**2 / 2, "kl_k3:mean": 0.25,
        "abs_logprob_diff:mean": log2, "abs_logprob_diff_max:max": log2, "clip_low_fraction:mean": 0.5,
        "clip_high_fraction:mean": 0.5, "tokens_clipped:mean": 1.0, "ratio_p99:max": 1.985, "ess:mean": 6.25 / 8.5,
    })  # fmt: skip
    assert all(name.count(":") == 1 for name in metrics)


def test_with_nothing_trained_there_are_no_means() -> None:
    zeros = np.zeros(3)
    metrics = measure(resolve_loss("ppo"), [_example(zeros, zeros, zeros, zeros)], [zeros], [zeros])
    assert metrics == {"loss:sum": 0.0, "tokens:sum": 0.0}


def test_defaults_are_filled_in() -> None:
    clip = {"clip_low_threshold": 0.8, "clip_high_threshold": 1.2}
    common = {"trained_only": 0.0, "temperature": 1.0, "entropy_coef": 0.0}
    assert resolve_loss("ppo") == LossSpec("ppo", {**common, **clip, "dual_clip": np.inf})
    assert resolve_loss("dro", {"beta": 1}) == LossSpec("dro", {**common, "beta": 1.0})
    assert resolve_loss("importance_sampling").config == {**common, "tis_cap": np.inf}
    assert resolve_loss("cross_entropy", {}) == LossSpec("cross_entropy", {"trained_only": 0.0})


@pytest.mark.parametrize(
    ("name", "config", "parts"),
    [
        ("grpo", {}, ["grpo", "loss_fn", "importance_sampling", "cispo"]),
        ("ppo", {"epsilon": 0.2}, ["epsilon", "ppo", "clip_low_threshold", "clip_high_threshold"]),
        ("cross_entropy", {"temperature": 0.8}, ["temperature", "trained_only"]),
        ("importance_sampling", {"temperature": 0}, ["temperature", "above 0"]),
        ("importance_sampling", {"tis_cap": 0.0}, ["tis_cap", "above 0"]),
        ("ppo", {"tis_cap": 2.0}, ["tis_cap", "ppo"]),
        ("gspo", {"clip_low_threshold": 1.2}, ["clip_low_threshold", "1.2", "0.9997"]),
        ("dro", {"beta": float("nan")}, ["beta", "nan"]),
        ("ppo", {"dual_clip": 1.1}, ["dual_clip", "1.1", "clip_high_threshold = 1.2"]),
        ("sapo", {"tau_positive": 0}, ["tau_positive", "above 0"]),
        ("cross_entropy", {"entropy_coef": 0.1}, ["entropy_coef", "trained_only"]),
        ("stable_reinforce", {"beta": 0.1}, ["beta", "stable_reinforce", "kl_coeff"]),
        ("ppo", {"clip_high_threshold": -1.0}, ["clip_high_threshold", "-1"]),
        ("ppo", {"clip_low_threshold": 1.3}, ["clip_low_threshold", "1.3", "1.2"]),
    ],
)
def test_a_bad_loss_or_setting_is_refused_by_name(name: str, config: dict[str, float], parts: list[str]) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        resolve_loss(name, config)
    assert all(part in str(caught.value) for part in parts)
