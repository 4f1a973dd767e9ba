"""Settings of a run: refused at the door when they make no sense."""

from __future__ import annotations

import pytest

from mint.errors import InvalidRequestError
from mint.rl import RLConfig
from mint.rl.config import mix_seed


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("loss_fn", "reinforce"), ("group_size", 1), ("batch_size", 0), ("max_tokens", 0), ("learning_rate", -1.0),
        ("learning_rate", float("nan")), ("temperature", 0.0), ("kl_penalty_coef", -0.1), ("betas", (0.9, 1.0)),
        ("rank", 0), ("rank", 10_000), ("steps", -1), ("group_szie", 8),
    ],
)  # fmt: skip
def test_a_wrong_setting_is_refused_by_name(field: str, value: object) -> None:
    with pytest.raises(InvalidRequestError, match=field):
        RLConfig(**{field: value})


def test_the_linear_schedule_starts_at_the_learning_rate_and_falls_towards_zero() -> None:
    config = RLConfig(learning_rate=1e-3, steps=4, lr_schedule="linear")
    assert [config.learning_rate_at(step) for step in (1, 2, 3, 4)] == pytest.approx([1e-3, 7.5e-4, 5e-4, 2.5e-4])


def test_mixed_seeds_differ_and_fit_63_bits() -> None:
    seeds = {mix_seed(a, b, c) for a in range(10) for b in range(10) for c in range(10)}
    assert len(seeds) == 1000
    assert all(0 <= seed < 2**63 for seed in seeds)
    assert mix_seed(1, 2) != mix_seed(2, 1)
