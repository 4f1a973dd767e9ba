"""Rules about the policy: entropy, length, truncation, and the size of the optimizer steps. Pure.

Each rule takes a run up to one step and returns a finding or None.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from mint.rl.analysis.run_record import StepView
from mint.rl.analysis.signal_rules import CHANGE_WINDOW, reward_collapse
from mint.rl.analysis.step_statistics import StepMetrics, graded, informative_share, mean, metric, reward_window, total
from mint.rl.estimate import wilson
from mint.rl.finding import Finding

ENTROPY_SHARE = 0.1
"""In a collapse, at most this share of the entropy at the start is left."""

NEAR_CEILING = 0.8
"""Share of the reward's range from which low entropy is expected: policies trade entropy for reward (arXiv
2505.22617)."""

ROSE_Z = 3.0
"""A mean has risen or fallen if it differs by so many standard errors (one-sided probability 0.1 %)."""

LENGTH_TIMES = 2.0
LENGTH_TOKENS = 4.0
"""Growth since the start counts as runaway from this factor and this number of tokens on."""

TRUNCATED_SHARE = 0.05
"""A finding if the share of truncated completions is surely (95 %) above this."""

ALL_TRUNCATED = 0.9
HARDLY_SUCCESSFUL = 0.15
"""Truncation is an error if at least this share is truncated and the success rate never exceeded
`HARDLY_SUCCESSFUL`."""

KL_DRIFT = 0.05
"""k2 between sampler and policy on trained tokens; training is stable below 0.01."""

ESS_SHARE = 0.3
"""Effective sample size under the importance weights, as a share; low values precede a collapse (arXiv 2602.17616)."""

CLIPPED_SHARE = 0.3
"""Share of the tokens beyond the clip range; clipped tokens have no gradient."""

MISMATCH_LOGPROB = 0.02
"""Mean |Δ logprob| of sampler and trainer with the same weights; bf16 stays below it, a wrong temperature does not."""

TEMPERED = "temperature_logprobs:"
"""Begins the server's warning (`server/worker/lint.py`)."""

MISMATCH_SHARE = 0.15
SMALL_MISMATCH = 0.002
"""The same as a share of the mean |logprob|, from the second number on. A policy that is sure of most tokens has small
logprobs, which a wrong temperature changes by little; rounding changes them by still less (by the logits' error times
1 − p)."""

TOO_LARGE_STEP = 3.0
"""The first-order gain of one step, in standard deviations of the reward (`first_order_gain`), above which the
approximation is invalid. Measured on mint/tiny: 0.4 to 2 at a learning rate that learns (3e-3), 2 to 4 at one that
barely learns (1e-2), 9 to 30 at one that destroys the policy (3e-2)."""

TOO_SMALL_RUN = 0.1
"""The first-order gain of all planned steps together, below which even perfect steps have no visible effect."""

SETTLED_STEPS = 8
"""The fewest steps with a signal before a learning rate is called too low."""


def entropy_collapse(view: StepView) -> Finding | None:
    """The policy is nearly deterministic, but often wrong."""
    if len(view.metrics) < 2 * CHANGE_WINDOW:
        return None
    first = view.metrics[:CHANGE_WINDOW]
    last = view.last(CHANGE_WINDOW)
    before = mean(first, "rollouts/entropy_estimate")
    now = mean(last, "rollouts/entropy_estimate")
    reward = reward_window(last)
    start = reward_window(first)
    floor = view.reward_floor
    span = view.reward_ceiling - view.reward_floor
    near_ceiling = reward.mean - floor >= NEAR_CEILING * span or mean(last, "success/rate") >= NEAR_CEILING
    if now > ENTROPY_SHARE * before or near_ceiling or informative_share(last) > 0.5:
        return None
    gained = reward.above(start) >= ROSE_Z
    return Finding(
        "entropy_collapse",
        "warning" if gained or view.only_compares else "error",
        view.step,
        f"−log p of a sampled token fell from {before:.3g} to {now:.3g}, with a mean reward of {reward.mean:.3f} (at "
        f"the start {start.mean:.3f}); {informative_share(last):.0%} of the groups still carry a signal",
        "Lower learning_rate, set kl_penalty_coef=0.01 or loss_fn_config clip_high_threshold=1.28 with loss_fn='ppo', "
        "raise temperature; go back to an earlier checkpoint",
        {"entropy_start": before, "entropy": now, "reward": reward.mean, "reward_start": start.mean},
    )


def length_runaway(view: StepView) -> Finding | None:
    """Completions become longer and the reward does not rise."""
    if len(view.metrics) < 2 * CHANGE_WINDOW:
        return None
    first = view.metrics[:CHANGE_WINDOW]
    last = view.last(CHANGE_WINDOW)
    before = mean(first, "rollouts/mean_length")
    now = mean(last, "rollouts/mean_length")
    longest = max(metric(step, "rollouts/mean_length") for step in first)
    steady = all(metric(step, "rollouts/mean_length") > longest for step in last)
    if not steady or now < LENGTH_TIMES * before or now < before + LENGTH_TOKENS:
        return None
    if reward_window(last).above(reward_window(first)) >= ROSE_Z:
        return None
    return Finding(
        "length_runaway",
        "warning",
        view.step,
        f"the mean length grew from {before:.1f} to {now:.1f} tokens ({mean(last, 'rollouts/truncated_share'):.0%} "
        "cut off) and the reward did not rise",
        "Add a penalty on length to the reward, give a stop, set truncation='penalize'; with "
        "loss_normalization='sequence', change to 'sum' (it favours long wrong answers)",
        {"length_start": before, "length": now},
    )


def truncation(view: StepView) -> Finding | None:
    """Completions end at a limit."""
    last = view.last(CHANGE_WINDOW)
    count = total(last, "rollouts/count")
    cut = sum(metric(step, "rollouts/truncated_share") * metric(step, "rollouts/count") for step in last)
    if wilson(cut, count)[0] <= TRUNCATED_SHARE:
        return None
    share = cut / count
    hopeless = (
        len(last) == CHANGE_WINDOW
        and share >= ALL_TRUNCATED
        and informative_share(last) <= HARDLY_SUCCESSFUL
        and max(metric(step, "success/rate") for step in view.metrics) <= HARDLY_SUCCESSFUL
    )
    kept = view.config.get("truncation", "keep") == "keep"
    return Finding(
        "truncation",
        "error" if hopeless else "warning",
        view.step,
        f"{share:.0%} of {count:.0f} completions were cut off by a limit"
        + (f"; {mean(last, 'success/rate'):.0%} succeed" if hopeless else ""),
        "Raise max_tokens (or max_turns, max_episode_tokens), or give a stop that the model produces"
        + ("; else choose truncation='mask' or 'penalize'" if kept else ""),
        {"truncated_share": share, "rollouts": count},
    )


def off_policy_drift(view: StepView) -> Finding | None:
    """The trained policy has moved away from the one that sampled."""
    now = view.now
    kl = metric(now, "train/kl_k2")
    ess = metric(now, "train/ess", 1.0)
    clipped = metric(now, "train/clip_low_fraction") + metric(now, "train/clip_high_fraction")
    reasons = [
        f"KL (k2) is {kl:.3g} nats per token" if kl > KL_DRIFT else "",
        f"the effective sample size is {ess:.0%}" if ess < ESS_SHARE else "",
        f"{clipped:.0%} of the tokens are beyond the clip range" if clipped > CLIPPED_SHARE else "",
    ]
    if not any(reasons) or is_mismatched(now):
        return None
    staleness = metric(now, "staleness/mean")
    return Finding(
        "off_policy_drift",
        "warning",
        view.step,
        "; ".join(filter(None, reasons))
        + f" (largest ratio {metric(now, 'train/ratio_max', 1.0):.3g}, weights {staleness:.1f} steps old on average)",
        _closer_to_the_sampler(view.config),
        {"kl_k2": kl, "ess": ess, "clipped": clipped, "staleness": staleness},
    )


def _closer_to_the_sampler(config: Mapping[str, Any]) -> str:
    """The settings of this run that keep the policy near the one that sampled, and a loss that bounds the ratios."""
    least = {"max_staleness": 0, "optim_steps_per_batch": 1, "epochs_per_batch": 1}
    raised = [name for name, lowest in least.items() if int(config.get(name) or lowest) > lowest]
    remedy = f"Lower {', '.join(raised)}{' or ' if raised else ''}learning_rate"
    if config.get("loss_fn", "importance_sampling") != "importance_sampling" or config.get("correction"):
        return remedy
    return f"{remedy}; or use loss_fn='ppo' or 'cispo', or loss_fn_config={{'tis_cap': 2}}"


def sampler_trainer_mismatch(view: StepView) -> Finding | None:
    """With the same weights, the trainer computes other logprobs than the sampler."""
    tempered = _tempered(view)
    if not is_mismatched(view.now) and tempered is None:
        return None
    difference = metric(view.now, "mismatch/mean_abs_logprob_diff")
    share = metric(view.now, "mismatch/relative_logprob_diff")
    in_parts = f", {share:.0%} of the mean |logprob|" if share else ""
    return Finding(
        "sampler_trainer_mismatch",
        "error",
        view.step,
        f"mean |Δ logprob| of sampler and trainer is {difference:.3g} with the same weights (largest "
        f"{metric(view.now, 'mismatch/max_abs_logprob_diff'):.3g}{in_parts})"
        f"; it should be 0, in bf16 at most {MISMATCH_LOGPROB}, and a few percent of the mean |logprob|"
        + (f"; {tempered}" if tempered is not None else ""),
        "Are the logprobs at temperature 1, not at the sampling temperature? Of these weights, not of older ones? Of "
        "the same tokens? If the difference cannot be removed, loss_fn_config={'tis_cap': 2} limits its effect",
        {"mean_abs_logprob_diff": difference, "relative_logprob_diff": share},
    )


def _tempered(view: StepView) -> str | None:
    """The server's warning that the logprobs are those of another temperature, in a run that asked for the policy's.

    It is found by the form of the difference, however small that is where the policy is sure of most tokens.
    """
    if view.config.get("logprobs_mode", "raw") != "raw" or metric(view.now, "staleness/max") > 0:
        return None
    return next((message for message in view.warnings if message.startswith(TEMPERED)), None)


def is_mismatched(now: StepMetrics) -> bool:
    """Whether sampler and trainer differ by more than rounding. A step whose sampler had older weights has no such
    metrics."""
    difference = metric(now, "mismatch/mean_abs_logprob_diff")
    in_parts = metric(now, "mismatch/relative_logprob_diff")
    return difference > MISMATCH_LOGPROB or (difference > SMALL_MISMATCH and in_parts > MISMATCH_SHARE)


def nonfinite_or_skipped_steps(view: StepView) -> Finding | None:
    """A loss or gradient was not finite, and the optimizer step was skipped."""
    skipped = metric(view.now, "optim/skipped_nonfinite")
    broken = sorted(
        name
        for name, value in view.now.items()
        if name.startswith(("train/", "optim/", "reward/")) and not math.isfinite(value)
    )
    if not skipped and not broken:
        return None
    return Finding(
        "nonfinite_or_skipped_steps",
        "error",
        view.step,
        f"{skipped:.0f} optimizer steps were skipped because of gradients that are not finite"
        + (f"; not finite: {', '.join(broken)}" if broken else ""),
        "Lower learning_rate, set grad_clip_norm=1; are rewards, advantages and logprobs of this step finite numbers?",
        {"skipped": skipped},
    )


def first_order_gain(metrics: StepMetrics, config: Mapping[str, Any]) -> float | None:
    """An upper bound, to first order, of the gain in mean reward of one step, in standard deviations of the reward.

    ∇E[R] · Δθ ≤ |∇E[R]| · |Δθ| (Cauchy and Schwarz), with the gradient of the summed loss divided by the rollouts as
    the estimate of ∇E[R]. Its noise makes the bound larger. None for a step that trained nothing.
    """
    spread = metric(metrics, "reward/std")
    rollouts = graded([metrics])
    product = metric(metrics, "optim/grad_norm") * metric(metrics, "optim/update_norm")
    if not (metric(metrics, "datums") > 0 and spread > 0 and rollouts > 0 and math.isfinite(product)):
        return None
    scale = spread if str(config.get("advantage")).startswith("std") else 1.0
    length = metric(metrics, "rollouts/mean_length", 1.0)
    divisors = {"constant": rollouts * float(config.get("max_tokens", 1)), "token": rollouts * length}
    divisors["sequence"] = divisors["token"]
    scale *= divisors.get(str(config.get("loss_normalization")), 1.0)
    # Each of several steps per batch sees a share of the rollouts, and moves by one update.
    steps = max(1.0, metric(metrics, "optim/steps", 1.0))
    return product * scale * steps**2 / rollouts / spread


def _gains(steps: Sequence[StepMetrics], config: Mapping[str, Any]) -> list[float]:
    return [gain for step in steps if (gain := first_order_gain(step, config)) is not None]


def learning_rate_too_high(view: StepView) -> Finding | None:
    """The reward collapsed after steps too large for the first-order approximation."""
    collapse = reward_collapse(view)
    if collapse is None or "z" not in collapse.numbers:
        return None
    best_step = collapse.numbers["best_step"]
    gains = _gains([step for step in view.metrics if metric(step, "step") >= best_step], view.config)
    if not gains or statistics.median(gains) < TOO_LARGE_STEP:
        return None
    gain = statistics.median(gains)
    rate = metric(view.now, "learning_rate")
    return Finding(
        "learning_rate_too_high",
        "error",
        view.step,
        f"{collapse.evidence}, after steps with a first-order gain of {gain:.1f} standard deviations of reward each "
        f"(a sound step has about 1 or less; learning_rate {rate:.3g})",
        f"Divide learning_rate by {max(3, round(gain)):d}, or set grad_clip_norm and lr_warmup_steps; go back to a "
        "checkpoint before the fall",
        {**collapse.numbers, "first_order_gain_of_a_step": gain, "learning_rate": rate},
    )


def learning_rate_too_low(view: StepView) -> Finding | None:
    """There is a signal, but all steps of the run together are too small to change the reward visibly."""
    config = view.config
    warmup = int(config.get("lr_warmup_steps") or 0)
    gains: list[float] = []
    so_far = 0.0
    for step in view.metrics:
        gain = first_order_gain(step, config) if metric(step, "step") > warmup else None
        if gain is None:
            continue
        gains.append(gain)
        so_far += gain
        # A sound run is known after a few steps; then the sum over a long run need not be computed.
        if len(gains) >= SETTLED_STEPS and so_far >= TOO_SMALL_RUN:
            return None
    if len(gains) < SETTLED_STEPS:
        return None
    left = max(0, int(config.get("steps") or 0) - view.step)
    whole = so_far + left * statistics.fmean(gains[-SETTLED_STEPS:])
    if whole >= TOO_SMALL_RUN:
        return None
    rate = metric(view.now, "learning_rate")
    return Finding(
        "learning_rate_too_low",
        "error",
        view.step,
        f"{len(gains)} steps had a signal, but to first order, the whole run can raise the mean "
        f"reward by at most {whole:.2g} standard deviations (learning_rate {rate:.3g})",
        f"Multiply learning_rate by {10 ** max(1, round(math.log10(1.0 / max(whole, 1e-9)))):g} or so, or train more "
        "steps",
        {"first_order_gain_of_the_run": whole, "learning_rate": rate, "steps_with_signal": float(len(gains))},
    )
