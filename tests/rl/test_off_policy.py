"""Corrections for samples of other weights: the closed forms, written anew in plain loops, and through a run."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any, get_args

import numpy as np
import pytest
from digits_task import ManyDigits

from mint.rl import RLConfig, run_grpo
from mint.rl.config import CorrectionName
from mint.rl.run_frame import ProgressHook
from mint.rl.training.datums import policy_datum
from mint.rl.training.off_policy import correction_factors, correction_metrics, truncated_by_default
from mint.rl.training.policy_update import logprob_mismatch
from mint.types import ForwardBackwardOutput, TensorData


def reference(proximal: list[float], sampled: list[float], name: str, low: float, high: float) -> list[float]:
    ratios = [math.exp(p - q) for p, q in zip(proximal, sampled, strict=True)]
    product = math.prod(ratios)
    geometric = product ** (1 / len(ratios))
    if name == "token_truncate":
        return [min(ratio, high) for ratio in ratios]
    if name == "token_mask":
        return [ratio if low <= ratio <= high else 0.0 for ratio in ratios]
    if name == "sequence_truncate":
        return [min(product, high)] * len(ratios)
    if name == "sequence_mask":
        return [product if product <= high else 0.0] * len(ratios)
    return [1.0 if low <= geometric <= high else 0.0] * len(ratios)


@pytest.mark.parametrize("name", get_args(CorrectionName))
def test_factors_equal_the_formulas(name: CorrectionName) -> None:
    rng = np.random.default_rng(0)
    both = set()
    for _ in range(200):
        size = int(rng.integers(1, 12))
        sampled = rng.normal(-2, 1, size)
        proximal = sampled + rng.normal(0, 0.6, size)
        found = correction_factors(proximal, sampled, name, low=0.7, high=1.5)
        expected = reference(proximal.tolist(), sampled.tolist(), name, 0.7, 1.5)
        np.testing.assert_allclose(found, expected, rtol=1e-12)
        both.add(bool((found == 0).any()) or bool((found == 1.5).any()))
    assert both == {True, False}, "inside and outside of the bounds were seen"


@pytest.mark.parametrize("name", get_args(CorrectionName))
def test_samples_of_the_same_weights_are_not_changed(name: CorrectionName) -> None:
    logprobs = np.random.default_rng(1).normal(-2, 1, 30)
    assert (correction_factors(logprobs, logprobs, name, low=0.5, high=2.0) == 1).all()


def test_metrics_are_those_of_all_tokens() -> None:
    factors = [np.array([0.0, 0.5]), np.array([2.0, 1.5])]
    assert correction_metrics(factors) == {
        "correction/mean": 1.0,
        "correction/masked_share": 0.25,
        "correction/max": 2.0,
    }


def test_the_mismatch_is_measured_on_trained_tokens_and_as_a_share_of_their_logprobs() -> None:
    datums = [
        policy_datum([1, 2], [3, 4], logprobs_T=[-0.1, -0.5], advantages_T=np.ones(2)),
        policy_datum([1], [5], logprobs_T=[-1.0], advantages_T=np.ones(1)),
    ]
    trainer = [np.array([-9.0, -0.2, -0.5], np.float32), np.array([-1.3], np.float32)]  # -9: of a prompt
    outputs = [{"logprobs": TensorData.from_numpy(row)} for row in trainer]
    found = logprob_mismatch(datums, ForwardBackwardOutput(loss_fn_outputs=outputs))
    assert found["mismatch/max_abs_logprob_diff"] == pytest.approx(0.3)
    assert found["mismatch/mean_abs_logprob_diff"] == pytest.approx(0.4 / 3)
    assert found["mismatch/relative_logprob_diff"] == pytest.approx(0.4 / 2.0)


def steps(*, resume: bool = False, on_progress: ProgressHook | None = None, **fields: Any) -> list[dict[str, float]]:
    config = RLConfig(
        base_model="mint/tiny", batch_size=3, group_size=4, max_tokens=6, temperature=1.0, heldout_size=0,
        print_progress=False, **{"steps": 3, "learning_rate": 2e-3, **fields},
    )  # fmt: skip
    result = run_grpo(ManyDigits(), config, resume=resume, on_progress=on_progress)
    return [json.loads(line) for line in (result.run_dir / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.learns
def test_truncated_ratios_of_tokens_are_the_tis_of_the_server_where_the_batch_is_trained_on_once() -> None:
    """The correction goes through weights and a second forward; the server's `tis_cap` is inside its loss."""
    names = ("reward/mean", "optim/grad_norm")
    stale = {"max_staleness": 2, "staleness": "exactly", "steps": 4, "learning_rate": 1e-2}
    inside = steps(loss_fn_config={"tis_cap": 1.2}, **stale)
    outside = steps(correction="token_truncate", correction_high=1.2, **stale)
    for one, other in zip(inside, outside, strict=True):
        assert {name: other[name] for name in names} == pytest.approx({name: one[name] for name in names}, rel=1e-3)
    assert outside[-1]["correction/max"] == pytest.approx(1.2)
    assert outside[0]["correction/mean"] == 1.0
    assert outside[0]["mismatch/max_abs_logprob_diff"] == 0


@pytest.mark.learns
def test_a_correction_goes_with_every_loss_and_with_several_epochs() -> None:
    rows = steps(
        loss_fn="ppo", correction="sequence_mask", correction_high=1.05, epochs_per_batch=2, max_staleness=1,
        staleness="exactly", learning_rate=1e-2,
    )  # fmt: skip
    assert [row["optim/steps"] for row in rows] == [2.0, 2.0, 2.0]
    assert rows[0]["correction/masked_share"] == 0
    assert any(row["correction/masked_share"] > 0 for row in rows[1:])


@pytest.mark.learns
def test_every_epoch_trains_on_the_whole_batch() -> None:
    one, two = (steps(epochs_per_batch=count, optim_steps_per_batch=2, steps=1)[0] for count in (1, 2))
    assert (one["optim/steps"], two["optim/steps"]) == (2.0, 4.0)
    assert two["datums"] == one["datums"]
    assert two["train/tokens"] == 2 * one["train/tokens"]


@pytest.mark.learns
def test_top_p_cuts_the_sampler_and_the_mode_says_which_logprobs_the_loss_gets() -> None:
    """On fresh weights: raw logprobs have the ratio 1, processed ones less, by the mass that top_p left out."""
    raw = steps(top_p=0.9, steps=1)[0]
    processed = steps(top_p=0.9, logprobs_mode="processed", steps=1)[0]
    assert raw["reward/mean"] == processed["reward/mean"]
    assert raw["train/ratio"] == pytest.approx(1.0, abs=1e-5)
    assert raw["mismatch/max_abs_logprob_diff"] <= 1e-5
    assert processed["train/ratio_max"] <= 1.0 + 1e-5
    assert processed["train/ratio"] < 1 - 1e-4
    assert "mismatch/max_abs_logprob_diff" not in processed


@pytest.mark.learns
def test_the_kl_penalty_changes_and_its_reference_is_renewed_also_in_a_resumed_run(tmp_path: Path) -> None:
    fields = {
        "kl_penalty_coef": 0.2, "kl_penalty_coef_end": 0.0, "kl_reference_every": 2, "steps": 5, "save_every": 3,
        "learning_rate": 1e-2,
    }  # fmt: skip
    rows = steps(run_dir=tmp_path / "run", **fields)
    assert [row["kl/penalty_coef"] for row in rows] == pytest.approx([0.2, 0.15, 0.1, 0.05, 0.0])
    fixed = steps(**{**fields, "kl_reference_every": 0})
    drift = [row["kl/policy_reference_k3"] for row in rows]
    assert drift[1] == pytest.approx(fixed[1]["kl/policy_reference_k3"])
    assert drift[2] == pytest.approx(0.0, abs=1e-9), "the policy is the reference that was made of it"
    assert fixed[2]["kl/policy_reference_k3"] > 1e-4

    def stop_after_step_4(event: str, row: dict[str, Any]) -> None:
        if event == "step" and row["step"] == 4:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        steps(run_dir=tmp_path / "broken", on_progress=stop_after_step_4, **fields)
    resumed = steps(run_dir=tmp_path / "broken", resume=True, **fields)
    assert [row["kl/policy_reference_k3"] for row in resumed] == drift


def test_samples_of_another_program_are_truncated_unless_the_config_says_how() -> None:
    def own_loss(logprobs: Any, sampled: Any, advantages: Any, weights: Any) -> Any:
        return (logprobs * weights).sum()

    measured = {"sampler_promise": "measured"}
    plain = RLConfig()
    assert truncated_by_default(plain, {}) is plain
    assert truncated_by_default(plain, measured).loss_fn_config == {"tis_cap": 2.0}
    assert truncated_by_default(RLConfig(loss_fn="ppo"), measured).correction == "token_truncate"
    for own in (
        RLConfig(loss_fn_config={"tis_cap": 5.0}),
        RLConfig(correction="token_mask"),
        RLConfig(loss_fn=own_loss),
    ):
        assert truncated_by_default(own, measured) is own
