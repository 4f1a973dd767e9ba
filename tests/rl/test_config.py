"""Settings of a run: refused at the door when they make no sense."""

from __future__ import annotations

import numpy as np
import pytest

from mint.errors import InvalidRequestError
from mint.rl import RLConfig
from mint.rl.seeds import mix_seed


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("loss_fn", "reinforce"), ("group_size", 1), ("batch_size", 0), ("max_tokens", 0), ("learning_rate", -1.0),
        ("learning_rate", float("nan")), ("temperature", 0.0), ("kl_penalty_coef", -0.1), ("betas", (0.9, 1.0)),
        ("rank", 0), ("rank", 10_000), ("steps", -1),
    ],
)  # fmt: skip
def test_a_wrong_setting_is_refused_by_name(field: str, value: object) -> None:
    with pytest.raises(InvalidRequestError, match=field):
        RLConfig(**{field: value})


def test_the_linear_schedule_starts_at_the_learning_rate_and_falls_towards_zero() -> None:
    config = RLConfig(learning_rate=1e-3, steps=4, lr_schedule="linear")
    assert [config.learning_rate_at(step, 4) for step in (1, 2, 3, 4)] == pytest.approx([1e-3, 7.5e-4, 5e-4, 2.5e-4])


def test_an_unknown_setting_is_refused_with_the_one_that_was_meant() -> None:
    with pytest.raises(InvalidRequestError, match=r"RLConfig\.group_szie") as refused:
        RLConfig(group_szie=8)
    assert refused.value.remedy == "Did you mean group_size?"


def test_mixed_seeds_differ_and_fit_63_bits() -> None:
    seeds = {mix_seed(a, b, c) for a in range(10) for b in range(10) for c in range(10)}
    assert len(seeds) == 1000
    assert all(0 <= seed < 2**63 for seed in seeds)
    assert mix_seed(1, 2) != mix_seed(2, 1)


def test_the_temperature_moves_linearly_to_its_end() -> None:
    config = RLConfig(temperature=1.2, temperature_end=0.8, steps=5)
    assert [config.temperature_at(step) for step in range(1, 6)] == pytest.approx([1.2, 1.1, 1.0, 0.9, 0.8])
    assert RLConfig(temperature=0.7, steps=5).temperature_at(5) == 0.7


def test_warm_up_rises_to_the_learning_rate_and_the_cosine_falls_from_it() -> None:
    config = RLConfig(learning_rate=1e-3, steps=6, lr_schedule="cosine", lr_warmup_steps=2)
    rates = [config.learning_rate_at(step, config.steps) for step in range(1, 7)]
    assert rates[:3] == pytest.approx([5e-4, 1e-3, 1e-3])
    assert rates[2:] == pytest.approx([1e-3 * (1 + np.cos(np.pi * done / 4)) / 2 for done in range(4)])


def test_a_band_upside_down_is_refused() -> None:
    with pytest.raises(InvalidRequestError, match="curriculum_low"):
        RLConfig(curriculum_low=0.9, curriculum_high=0.1)
