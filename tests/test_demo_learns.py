"""The product's first promise, in full: run with `make test-slow`."""

from __future__ import annotations

import pytest

from mint.cli.train import DemoTask
from mint.recipes.task_registry import load_task
from mint.rl import run_grpo


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("seed", [0, 1, 2])
@pytest.mark.parametrize("task", [task.value for task in DemoTask])
def test_every_demo_lifts_held_out_reward_with_intervals_apart(task: str, seed: int) -> None:
    choice = load_task(task, seed=seed)
    result = run_grpo(choice.adapter, choice.config)
    for temperature in (0.0, 1.0):
        assert result.heldout_after[temperature].low > result.heldout_before[temperature].high
    assert result.max_abs_logprob_diff <= 1e-5
    assert not [finding for finding in result.findings if finding.severity == "error"]
    if task == "math":
        assert result.heldout_before[0.0].mean <= 0.70
        assert result.heldout_after[0.0].mean >= 0.95
        assert result.heldout_after[1.0].mean >= 0.90
