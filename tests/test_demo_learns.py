"""The product's first promise, in full: run with `make test-slow`."""

from __future__ import annotations

import pytest

from mint.recipes.math import DEMO, MathAdapter
from mint.rl import run_grpo


@pytest.mark.slow
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_the_demo_learns_to_95_percent_greedily_and_90_at_temperature_1(seed: int) -> None:
    result = run_grpo(MathAdapter(seed=seed), DEMO.model_copy(update={"seed": seed}))
    assert result.heldout_before[0.0].mean <= 0.70
    assert result.heldout_after[0.0].mean >= 0.95
    assert result.heldout_after[1.0].mean >= 0.90
    assert result.max_abs_logprob_diff <= 1e-5
