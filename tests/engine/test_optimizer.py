"""AdamW step for step as torch's, and a report of what happened."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from mint.engine.optimizer import AdamState, step_adam
from mint.engine.protocol import AdamSpec

DEVICES = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("clip", [0.0, 0.5])
def test_100_steps_are_those_of_the_formula(clip: float, fused: bool, device: str) -> None:
    """Loshchilov and Hutter's algorithm 2 in float64."""
    rng, spec = np.random.default_rng(1), AdamSpec(1e-2, 0.9, 0.95, 1e-8, 0.1, clip)
    exact, mean, square = rng.standard_normal(1001), np.zeros(1001), np.zeros(1001)
    weights = torch.from_numpy(exact).float().to(device)
    gradient, state = torch.zeros_like(weights), AdamState.fresh(weights)
    for step in range(1, 101):
        drawn = rng.standard_normal(1001) * (1 + step % 7)
        gradient.copy_(torch.from_numpy(drawn))
        norm = float(np.linalg.norm(drawn))
        if clip:
            drawn *= min(1.0, clip / (norm + 1e-6))
        mean, square = 0.9 * mean + 0.1 * drawn, 0.95 * square + 0.05 * drawn**2
        before, exact = exact, exact * (1 - 1e-2 * 0.1)
        exact -= 1e-2 * (mean / (1 - 0.9**step)) / (np.sqrt(square / (1 - 0.95**step)) + 1e-8)
        metrics = step_adam(weights, gradient, state, spec, fused=fused)
        assert metrics["grad_norm"] == pytest.approx(norm, rel=1e-6)
        assert metrics["update_norm"] == pytest.approx(float(np.linalg.norm(exact - before)), rel=1e-4)
        assert metrics["step"] == step and not gradient.any()
    for found, expected in ((weights, exact), (state.exp_avg, mean), (state.exp_avg_sq, square)):
        np.testing.assert_allclose(found.cpu().numpy(), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("decay", [0.0, 0.1])
@pytest.mark.parametrize("clip", [0.0, 0.5, 1e6])
def test_200_steps_equal_torch_adamw(decay: float, clip: float) -> None:
    generator = torch.Generator().manual_seed(0)
    weights = torch.randn(1000, generator=generator)
    reference = weights.clone().requires_grad_()
    optimizer = torch.optim.AdamW([reference], 1e-2, (0.9, 0.95), 1e-8, decay, foreach=False)
    state, gradient = AdamState.fresh(weights), torch.zeros(1000)
    for step in range(200):
        drawn = torch.randn(1000, generator=generator) * (1 + step % 7)
        gradient.copy_(drawn)
        reference.grad = drawn.clone()
        norm = torch.nn.utils.clip_grad_norm_([reference], clip or float("inf"))
        before = weights.clone()
        metrics = step_adam(weights, gradient, state, AdamSpec(1e-2, 0.9, 0.95, 1e-8, decay, clip))
        optimizer.step()
        assert metrics["grad_norm"] == pytest.approx(float(norm), rel=1e-6)
        assert metrics["update_norm"] == pytest.approx(float((weights - before).norm()), rel=1e-5)
        assert metrics["step"] == step + 1 and metrics["skipped_nonfinite"] == 0
        assert not gradient.any()
    np.testing.assert_allclose(weights.numpy(), reference.detach().numpy(), rtol=1e-6, atol=1e-6)


def test_the_step_does_not_depend_on_the_scale_of_the_loss() -> None:
    results = []
    for scale in (1.0, 1000.0):
        weights = torch.ones(10)
        step_adam(
            weights, torch.linspace(-1, 1, 10) * scale, AdamState.fresh(weights), AdamSpec(0.1, 0.9, 0.95, 1e-12, 0, 0)
        )
        results.append(weights.numpy())
    np.testing.assert_allclose(*results, rtol=1e-6)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("value", [float("nan"), float("inf"), 1e30])
def test_a_gradient_that_cannot_be_squared_is_skipped(value: float, fused: bool, device: str) -> None:
    weights = torch.ones(4, device=device)
    state, gradient = AdamState.fresh(weights), torch.tensor([1.0, value, 1.0, 1.0], device=device)
    metrics = step_adam(weights, gradient, state, AdamSpec(0.1, 0.9, 0.95, 1e-8, 0.1, 0), fused=fused)
    assert metrics["skipped_nonfinite"] == 1 and metrics["update_norm"] == 0 and metrics["step"] == 0
    assert weights.tolist() == [1.0] * 4 and not state.exp_avg.any() and not gradient.any()
