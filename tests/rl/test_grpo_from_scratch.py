"""The loop in one file learns, with nothing but the SDK under it."""

from __future__ import annotations

import ast
from pathlib import Path

import numpy as np
import pytest

import mint
from mint.recipes import grpo_from_scratch
from mint.recipes.data.arithmetic import draw_problems
from mint.recipes.grpo_from_scratch import Config, train

pytestmark = pytest.mark.learns


def test_the_mean_reward_rises_within_sixteen_steps(tmp_path: Path) -> None:
    rewards: list[float] = []
    with mint.ServiceClient(data_dir=tmp_path) as service:
        train(
            draw_problems(0, 8192, heldout=False),
            Config(steps=16),
            service_client=service,
            on_step=lambda _, reward: rewards.append(reward),
        )
    assert len(rewards) == 16
    assert np.mean(rewards[-4:]) > np.mean(rewards[:4]) + 0.1


def test_it_uses_nothing_of_the_library() -> None:
    tree = ast.parse(Path(grpo_from_scratch.__file__).read_text())
    taken = {
        f"{node.module}.{name.name}"
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and node.module and node.module.startswith("mint")
        for name in node.names
    }
    assert taken == {"mint.types", "mint.recipes.data.arithmetic.Problem", "mint.recipes.data.arithmetic.draw_problems"}
