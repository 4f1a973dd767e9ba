"""Data that is possible but doubtful is named in `warnings`; good data is not."""

from __future__ import annotations

import numpy as np
import pytest

from mint.engine.protocol import TrainDatum
from mint.server import lint as rules


def batch(count: int = 8, *, shift: int = 1, first_weight: float = 0.0, **inputs: list[float]) -> list[TrainDatum]:
    rng = np.random.default_rng(0)
    data = []
    for index in range(count):
        full = rng.integers(1, 1000, 8)
        weights = np.array([first_weight, 0, 0, 1, 1, 1], dtype=np.float32)
        chosen = {"logprobs": [-1.0] * 6, "advantages": [0.5 if index % 2 else -0.5] * 6, **inputs}
        arrays = {key: np.array(row, dtype=np.float32) for key, row in chosen.items()}
        data.append(TrainDatum(full[:6], full[shift : shift + 6], weights, arrays))
    return data


def lint(data: list[TrainDatum], loss: str, logprob: float = -1.0) -> list[str]:
    return rules.lint(data, loss, [np.full(datum.weights.shape, logprob, np.float32) for datum in data])


def test_good_data_has_no_warning() -> None:
    assert lint(batch(), "ppo") == []
    assert lint(batch(), "cross_entropy") == []


DOUBTFUL = {
    "targets equal the input": batch(shift=0),
    "not the input shifted by one": batch(shift=2),
    "exact copies": batch(1) * 8,
    "raw rewards": batch(advantages=[1.0] * 6),
    "all advantages are 0": batch(advantages=[0.0] * 6),
    "logprobs are exactly 0": batch(logprobs=[0.0] * 6),
    "the first token has a weight": batch(first_weight=1.0),
}


@pytest.mark.parametrize("words", DOUBTFUL)
def test_doubtful_data_is_named(words: str) -> None:
    assert any(words in warning for warning in lint(DOUBTFUL[words], "importance_sampling"))


def test_the_same_short_sample_many_times_is_normal_in_reinforcement_learning() -> None:
    assert lint(batch(2) * 8, "ppo") == []
    assert any("exact copies" in warning for warning in lint(batch(2) * 8, "cross_entropy"))


def test_logprobs_of_exactly_zero_are_normal_where_the_policy_is_certain() -> None:
    assert lint(batch(logprobs=[0.0] * 6), "ppo", logprob=-1e-6) == []


def test_nothing_to_train_is_named() -> None:
    data = [TrainDatum(d.tokens, d.targets, np.zeros_like(d.weights), d.inputs) for d in batch()]
    assert any("nothing is trained" in warning for warning in lint(data, "cross_entropy"))


def test_a_few_datums_prove_nothing() -> None:
    assert lint(batch(4, advantages=[1.0] * 6), "ppo") == []
