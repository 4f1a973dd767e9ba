"""The metrics of a batch do not depend on where it was cut into requests."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mint.client.chunking import merge
from mint.client.metric_reduction import reduce_metrics
from mint.engine.losses import measure
from mint.engine.protocol import LOSSES, TrainDatum, resolve_loss
from mint.types import ForwardBackwardOutput

NOT_EXACT = {"ratio_p99:max"}
"""A quantile of all cannot be had from those of the parts."""

Example = tuple[TrainDatum, np.ndarray, np.ndarray]
"""A datum, the policy's logprobs, and the entropies of its positions."""


def example(rng: np.random.Generator) -> Example:
    size = int(rng.integers(1, 40))
    weights = np.where(rng.random(size) < rng.choice([0.0, 0.3, 1.0]), rng.normal(1, 0.2, size), 0).astype(np.float32)
    sampler = rng.normal(-1.5, 1, size).astype(np.float32)
    policy = (sampler + rng.normal(0, rng.choice([0.01, 0.5]), size)).astype(np.float32)
    tokens = rng.integers(0, 9, size)
    inputs = {"logprobs": sampler, "advantages": rng.normal(size=size).astype(np.float32)}
    datum = TrainDatum(tokens, tokens, weights, inputs)
    return datum, policy, rng.random(size)


def metrics_of(loss: str, examples: list[Example]) -> dict[str, float]:
    data, logprobs, entropies = (list(column) for column in zip(*examples, strict=True))
    return measure(resolve_loss(loss), data, logprobs, entropies)


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 2**32 - 1), loss=st.sampled_from(list(LOSSES)))
def test_metrics_of_parts_are_those_of_the_whole(seed: int, loss: str) -> None:
    rng = np.random.default_rng(seed)
    examples = [example(rng) for _ in range(int(rng.integers(1, 12)))]
    cuts = sorted(rng.integers(1, len(examples) + 1, int(rng.integers(0, 5))).tolist())
    parts = [examples[start:end] for start, end in zip([0, *cuts], [*cuts, len(examples)], strict=True) if start < end]
    whole = metrics_of(loss, examples)
    joined = reduce_metrics([metrics_of(loss, part) for part in parts], [len(part) for part in parts])
    assert joined.keys() == whole.keys()
    for name in whole.keys() - NOT_EXACT:
        assert joined[name] == pytest.approx(whole[name], rel=1e-9, abs=1e-12), name


def test_ratios_beyond_float64_do_not_break_the_reduction() -> None:
    broken = {"tokens:sum": 3.0, "ratio:mean": math.inf, "ess:mean": 0.5}
    good = {"tokens:sum": 1.0, "ratio:mean": 1.0, "ess:mean": 1.0}
    assert reduce_metrics([broken, good], [1, 1]) == {"tokens:sum": 4.0, "ratio:mean": math.inf, "ess:mean": 0.625}


def test_servers_that_count_no_tokens_are_weighted_by_datums() -> None:
    parts = [
        {"loss:sum": 1.0, "entropy:mean": 1.0, "kl": 1.0, "worst:slack": 0.0, "step:unique": 7.0},
        {"loss:sum": 2.0, "entropy:mean": 2.0, "kl": 2.0, "worst:slack": 4.0, "step:unique": 7.0},
    ]
    assert reduce_metrics(parts, [3, 1]) == {
        "loss:sum": 3.0,
        "entropy:mean": 1.25,
        "kl": 1.25,
        "worst:slack": 3.0,
        "step:unique": 7.0,
        "step:unique_1": 7.0,
    }


def test_a_mean_that_only_some_parts_report_is_left_out() -> None:
    parts = [{"tokens:sum": 2.0, "ess:mean": 0.5}, {"tokens:sum": 2.0}]
    assert reduce_metrics(parts, [1, 1]) == {"tokens:sum": 4.0}


def test_joined_outputs_have_the_reduced_metrics() -> None:
    outputs = [
        ForwardBackwardOutput(loss_fn_outputs=[{}], metrics={"tokens:sum": tokens, "entropy:mean": entropy})
        for tokens, entropy in ((1.0, 4.0), (3.0, 0.0))
    ]
    assert merge(outputs).metrics == {"tokens:sum": 4.0, "entropy:mean": 1.0}
