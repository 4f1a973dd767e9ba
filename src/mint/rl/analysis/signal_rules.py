"""Rules about the learning signal: missing signal, collapse or jump of the reward, missing evaluation. Pure.

Each rule takes a run up to one step and returns a finding or None. `policy_rules` are about the policy, `reward_rules`
about the grader.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from itertools import pairwise

import numpy as np

from mint.rl.analysis.run_record import Row, StepView
from mint.rl.analysis.step_statistics import (
    StepMetrics,
    best_window,
    graded,
    graded_groups,
    informative_share,
    mean,
    metric,
    reward_window,
    total,
)
from mint.rl.estimate import students
from mint.rl.finding import Finding
from mint.rl.objective import is_recorded_function
from mint.runs.terminal_text import counted

SILENT_STEPS = 3
SILENT_GROUPS = 16
"""The fewest steps and groups without a signal. If 1 group in 3 had a signal, 16 without one would be chance in 0.15 %
of cases. At group size 4, a pass rate of 0.1 gives 1 in 3, a pass rate of 0.02 1 in 12 (1 − p^G − (1 − p)^G)."""

SILENT_SHARE = 0.02
"""Up to this share of informative groups, there is no signal."""

ONE_SIDED = 0.9
"""Share of the groups without a signal that must be all right, or all wrong, to say so."""

LOW_REWARD = 0.25
"""Share of the range from the lowest reward to that of a success. Rewards of partial credit that lie higher are not
called wrong, though none of them is a success."""

CONVERGED_Z = 3.0
"""A run has converged if its equal rewards lie so many standard errors above those of the start."""

LEARNED_SHARE = 0.25
"""A run has had a signal if any step had this share of informative groups."""

DISTINCT_SHARE = 0.5
"""With at least this share of different texts in a group, equal rewards are the grader's fault, not the policy's."""

REVERSED = -0.5
REVERSED_GROUPS = 4
"""Advantages have the wrong sign if their correlation with the rewards within so many groups is as low. With every
published estimator, they rise with the reward."""

SOLVED = 0.95
SOLVED_STEPS = 5
"""A task is solved at this success rate over so many steps."""

CHANGE_WINDOW = 3
"""Steps of a mean that is compared."""

BEST_WINDOW = 10
"""The most earlier steps in the mean from which the reward fell."""

COLLAPSE_Z = 5.0
"""Standard errors of many rollouts; a one-sided probability of 3e-7, because a long run has many thousand pairs of
windows."""

COLLAPSE_SHARE = 0.5
"""A collapse loses this share of the reward above its floor."""

COLLAPSE_SHARE_CURRICULUM = 0.75
"""The same with a curriculum, which lowers the reward by choosing harder items."""

HELDOUT_LOSS = 0.2
"""A held-out collapse loses this share of the reward's range."""

SPIKE_Z = 3.0
"""Standard errors of a jump above the mean of `CHANGE_WINDOW` steps."""

SPIKE_SHARE = 0.3
"""A jump is at least this share of the reward's range."""

SPIKE_HISTORY = 4
"""The fewest steps before a jump."""

SPIKE_TIMES = 4.0
"""A jump is at least so many times the median change from step to step."""


def silent_window(view: StepView) -> list[StepMetrics] | None:
    """The last steps, at least `SILENT_STEPS` with `SILENT_GROUPS` graded groups; None if there are too few."""
    steps: list[StepMetrics] = []
    groups = 0.0
    for step in reversed(view.metrics):
        steps.append(step)
        groups += graded_groups([step])
        if len(steps) >= SILENT_STEPS and groups >= SILENT_GROUPS:
            return steps[::-1]
    return None


def nothing_trained(view: StepView) -> Finding | None:
    """Groups have unequal rewards, and for some steps none of them has gone into the loss."""
    steps = view.last(SILENT_STEPS)
    left_out = total(steps, "groups/untrained")
    if len(steps) < SILENT_STEPS or left_out < SILENT_STEPS or total(steps, "groups/used"):
        return None
    filtered = view.config.get("group_filter")
    own = {name: view.config.get(name) for name in ("advantage", "baseline", "loss_weighting")}
    functions = [f"{name} ({value})" for name, value in own.items() if is_recorded_function(value)]
    causes = [*([f"group_filter ({filtered})"] if filtered else []), *functions]
    if view.config.get("truncation") == "mask":
        causes.append("truncation = mask")
    return Finding(
        "nothing_trained",
        "error",
        view.step,
        f"in {counted(len(steps), 'step')} {counted(left_out, 'group')} had unequal rewards, "
        "and none of them went into the loss",
        f"Look at what may leave all of them out: {', '.join(causes)}"
        if causes
        else "Look at the advantages of the rollouts: all of them are 0",
        {"untrained": left_out},
    )


def no_signal(view: StepView) -> Finding | None:
    """No group has unequal rewards: all wrong, all right, some of both, or a grader that gives one reward to all."""
    steps = silent_window(view)
    if steps is None or informative_share(steps) > SILENT_SHARE:
        return None
    groups = graded_groups(steps)
    good = total(steps, "groups/all_good")
    bad = total(steps, "groups/all_bad")
    numbers = {"groups": groups, "all_good": good, "all_bad": bad, "used": groups - good - bad}
    reward = reward_window(steps)
    full = float(view.config.get("success_reward", 1.0)) - view.reward_floor
    earned = (reward.mean - view.reward_floor) * groups - full * good  # by groups without a success
    failed = "all wrong" if earned <= LOW_REWARD * full * bad else "alike with partial credit"
    evidence = (
        f"in {counted(len(steps), 'step')} {counted(groups, 'group')} got rewards: "
        f"{good:.0f} all right, {bad:.0f} {failed}, {numbers['used']:.0f} with unequal rewards"
    )
    constant = _constant_reward(view, steps, evidence, numbers)
    if constant is not None:
        return constant
    had_signal = any(informative_share([step]) >= LEARNED_SHARE for step in view.metrics)
    if good >= ONE_SIDED * (good + bad):
        return Finding(
            "no_learning_signal_all_right",
            "info" if had_signal else "warning",
            view.step,
            evidence + ("" if had_signal else "; this was so from the first step on"),
            "The task is solved at this difficulty: stop here, use harder items, or set curriculum=True"
            + ("" if had_signal else "; read some completions: does the grader accept everything?"),
            numbers,
        )
    start = reward_window(view.metrics[:CHANGE_WINDOW])
    converged = had_signal and reward.above(start) >= CONVERGED_Z
    evidence += f"; they earn {reward.mean:.3f}"
    if converged:
        evidence += f", at the start {start.mean:.3f}: the policy may have converged"
    low = reward.mean - view.reward_floor <= LOW_REWARD * full
    if bad < ONE_SIDED * (good + bad) or not low:
        return Finding(
            "no_learning_signal",
            "warning" if had_signal else "error",
            view.step,
            evidence + ", and the completions of one prompt earn the same",
            "Raise temperature or group_size, set dynamic_sampling=True, or give finer partial credit. If all "
            "completions of a prompt are alike, the policy is deterministic: go back to an earlier checkpoint",
            {**numbers, "reward": reward.mean},
        )
    return Finding(
        "no_learning_signal_all_wrong",
        "warning" if converged or view.only_compares else "error",
        view.step,
        evidence,
        "Use easier items, partial credit, a larger group_size, a higher temperature or dynamic_sampling=True; if "
        "the base model never succeeds, start with SFT (init_from=…). Read some completions: does the grader "
        "reject right ones?",
        numbers,
    )


def _constant_reward(
    view: StepView, steps: list[StepMetrics], evidence: str, numbers: dict[str, float]
) -> Finding | None:
    """Every reward since the first step is the same, and above the lowest one."""
    rewarded = [step for step in view.metrics if graded([step]) > 0]
    values = {metric(step, end) for step in rewarded for end in ("reward/min", "reward/max")}
    if len(values) != 1:
        return None
    (value,) = values
    if value <= view.reward_floor:
        return None
    distinct = _distinct_share(view, len(steps))
    if value >= view.reward_ceiling and distinct < DISTINCT_SHARE:
        return None
    return Finding(
        "constant_reward",
        "error",
        view.step,
        f"every rollout since the first step earned {value:g}, though {distinct:.0%} of the texts of a group differ; "
        + evidence,
        "The reward does not distinguish completions: call compute_reward by hand on a right and on a wrong one",
        {**numbers, "reward": value, "distinct_share": distinct},
    )


def _distinct_share(view: StepView, steps: int) -> float:
    """The mean share of different texts in the groups of the last `steps` steps; 0 without rollouts."""
    texts: dict[tuple[int, int], list[str]] = {}
    for row in view.rows(steps):
        if row.get("tokens"):
            texts.setdefault((row["step"], row["group"]), []).append(row["text"])
    shares = [(len(set(group)) - 1) / (len(group) - 1) for group in texts.values() if len(group) > 1]
    return statistics.fmean(shares) if shares else 0.0


def saturation(view: StepView) -> Finding | None:
    """Nearly every rollout succeeds."""
    steps = view.last(SOLVED_STEPS)
    rate = mean(steps, "success/rate")
    if len(steps) < SOLVED_STEPS or rate < SOLVED:
        return None
    return Finding(
        "saturation",
        "info",
        view.step,
        f"{rate:.1%} of the rollouts of the last {counted(len(steps), 'step')} succeed; "
        f"{informative_share(steps):.0%} of the groups still carry a signal",
        "The task is nearly solved: stop here, use harder items, or set curriculum=True to leave solved ones out",
        {"success_rate": rate, "informative_share": informative_share(steps)},
    )


def reversed_advantages(view: StepView) -> Finding | None:
    """Completions that earned more than their group get lower advantages than the others."""
    groups: dict[int, list[tuple[float, float]]] = {}
    for row in view.rows(1):
        if row.get("reward") is not None and row.get("advantage") is not None:
            groups.setdefault(row["group"], []).append((row["reward"], row["advantage"]))
    pairs_BG2 = [np.array(pairs, np.float64) for pairs in groups.values()]
    centred_BG2 = [pairs - pairs.mean(axis=0) for pairs in pairs_BG2 if (np.ptp(pairs, axis=0) > 0).all()]
    if len(centred_BG2) < REVERSED_GROUPS:
        return None
    rewards, advantages = np.concatenate(centred_BG2).T
    correlation = float(rewards @ advantages / np.sqrt((rewards @ rewards) * (advantages @ advantages)))
    if not correlation <= REVERSED:
        return None
    return Finding(
        "reversed_advantages",
        "error",
        view.step,
        f"in {len(centred_BG2)} groups with unequal rewards, a higher reward has a lower advantage (correlation "
        f"{correlation:.2f}): training makes the reward fall",
        "Change the sign of the advantages: reward minus baseline, not baseline minus reward. If the reward is a cost, "
        "return minus the cost",
        {"correlation": correlation, "groups": float(len(centred_BG2))},
    )


def reward_collapse(view: StepView) -> Finding | None:
    """The training reward has fallen by much, or the held-out reward by more than its intervals."""
    now = reward_window(view.last(CHANGE_WINDOW))
    # No window has a higher mean than the best step: most steps are cleared by this, and no window is searched.
    highest = max(metric(step, "reward/mean") for step in view.metrics)
    floor = view.reward_floor
    least = COLLAPSE_SHARE_CURRICULUM if view.config.get("curriculum") else COLLAPSE_SHARE
    if highest - now.mean < least * (highest - floor) or highest <= floor:
        return _heldout_collapse(view)
    found = best_window(view.metrics[:-CHANGE_WINDOW], BEST_WINDOW)
    if found is None:
        return _heldout_collapse(view)
    end, best = found
    z = best.above(now)
    if z < students(COLLAPSE_Z, best.count + now.count - 2) or best.mean - now.mean < least * (best.mean - floor):
        return _heldout_collapse(view)
    best_step = int(view.metrics[end - 1]["step"])
    return Finding(
        "reward_collapse",
        "error",
        view.step,
        f"the mean reward fell from {best.mean:.3f} around step {best_step} to {now.mean:.3f} ({z:.1f} standard "
        "errors)",
        f"Go back to a checkpoint near step {best_step} (on_collapse='rollback' does it); lower learning_rate, set "
        "grad_clip_norm=1 or loss_fn='ppo'. Did the grader change? `mint bisect` finds the checkpoint",
        {"best": best.mean, "now": now.mean, "z": min(z, 1e3), "best_step": best_step},
    )


def _heldout_collapse(view: StepView) -> Finding | None:
    span = view.reward_ceiling - view.reward_floor
    for best, last in heldout_falls(view):
        if best["mean"] - last["mean"] >= HELDOUT_LOSS * span:
            return Finding(
                "reward_collapse",
                "error",
                view.step,
                f"held-out reward fell from {best['mean']:.3f} [{best['low']:.3f}, {best['high']:.3f}] at step "
                f"{best['step']} to {last['mean']:.3f} [{last['low']:.3f}, {last['high']:.3f}]",
                f"Go back to the checkpoint of step {best['step']} (on_collapse='rollback' does it) and lower "
                "learning_rate",
                {"best": best["mean"], "now": last["mean"], "best_step": best["step"]},
            )
    return None


def heldout_falls(view: StepView) -> Iterator[tuple[Row, Row]]:
    """(best, last) evaluation of each held-out set and temperature whose last interval lies below its best one."""
    last = {(row["set"], row["temperature"]): row for row in view.evaluations}
    for row in view.evaluations:
        other = last[row["set"], row["temperature"]]
        if row["low"] > other["high"]:
            yield row, other


def reward_spike(view: StepView) -> Finding | None:
    """The reward rises from one step to the next faster than learning explains."""
    if len(view.metrics) < SPIKE_HISTORY + 1 or view.config.get("curriculum"):
        return None
    before = reward_window(view.metrics[-1 - CHANGE_WINDOW : -1])
    now = reward_window(view.last(1))
    z = now.above(before)
    jump = now.mean - before.mean
    if z < SPIKE_Z or jump < SPIKE_SHARE * (view.reward_ceiling - view.reward_floor):
        return None
    means = [metric(step, "reward/mean") for step in view.metrics]
    changes = [abs(one - other) for one, other in pairwise(means[:-1])]
    if jump < SPIKE_TIMES * statistics.median(changes):
        return None
    return Finding(
        "reward_spike",
        "warning",
        view.step,
        f"the mean reward jumped from {before.mean:.3f} to {now.mean:.3f} in one step ({min(z, 999):.1f} standard "
        f"errors; before, it changed by {statistics.median(changes):.3f} a step)",
        "Compare rollouts of this step and the one before: did the grader, the data or the sampling settings change?",
        {"before": before.mean, "now": now.mean, "z": min(z, 1e3)},
    )


def no_heldout(view: StepView) -> Finding | None:
    """There is no held-out evaluation."""
    if view.evaluations:
        return None
    return Finding(
        "no_heldout",
        "info",
        view.step,
        "there is no held-out evaluation: training reward alone cannot show overfitting or reward hacking",
        "Return held-out items from build_heldout() and set heldout_size and eval_every",
    )
