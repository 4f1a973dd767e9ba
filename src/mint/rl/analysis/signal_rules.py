"""Rules about the signal: is there any, did the reward collapse or jump, did anybody measure it. Pure.

Each rule takes a run up to one step and says what that step shows, or None. Knows nothing of how the policy moved
(`rules_policy`) or whether the reward deserves trust (`rules_reward`).
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from itertools import pairwise

from mint.rl.analysis.run_record import Row, StepView
from mint.rl.analysis.step_statistics import (
    StepMetrics,
    best_window,
    get,
    graded,
    graded_groups,
    informative_share,
    mean,
    reward_window,
    total,
)
from mint.rl.finding import Finding

SILENT_STEPS = 3
SILENT_GROUPS = 16
"""At least so many steps and groups without a signal. If 1 group in 3 had one, 16 silent ones would be chance in 0.15 %
of cases; at group size 4 a pass rate of 0.1 gives 1 in 3, of 0.02 1 in 12 (1 − p^G − (1 − p)^G)."""

SILENT_SHARE = 0.02
"""A stray informative group among fifty does not make a signal."""

ONE_SIDED = 0.9
"""Of the silent groups, so many must be all wrong to call it the reason that nothing is learned."""

CONVERGED_Z = 3.0
"""Standard errors by which equal rewards below success lie above those of the start, where a run has converged."""

LEARNED_SHARE = 0.25
"""A run that once had this share of informative groups had a signal."""

DISTINCT_SHARE = 0.5
"""Different texts in a group from which on equal rewards say more about the grader than about the policy."""

SOLVED = 0.95
SOLVED_STEPS = 5
"""Success rate over so many steps at which a task is called solved (a reward at its bound, the practice's alarm)."""

CHANGE_WINDOW = 3
"""Steps whose mean is compared."""

BEST_WINDOW = 10
"""At most so many earlier steps are averaged into the level that was lost."""

COLLAPSE_Z = 5.0
"""Standard errors: one-sided chance 3e-7, for the many thousand pairs of windows of a long run."""

COLLAPSE_SHARE, COLLAPSE_SHARE_CURRICULUM = 0.5, 0.75
"""Of what the reward had gained over its floor, the loss that is a collapse; a curriculum that moves on to harder items
lowers the reward by itself."""

HELDOUT_LOSS = 0.2
"""Of the reward's range, the held-out loss that is a collapse (20 points)."""

SPIKE_Z, SPIKE_SHARE, SPIKE_HISTORY = 3.0, 0.3, 4
"""A jump over the three steps before: standard errors, share of the reward's range, steps that must lie before it."""

SPIKE_TIMES = 4.0
"""... and how many times the usual (median) change from step to step before."""


def silent_window(view: StepView) -> list[StepMetrics] | None:
    """The last steps that hold `SILENT_STEPS` steps and `SILENT_GROUPS` judged groups; None if there are too few."""
    steps: list[StepMetrics] = []
    groups = 0.0
    for step in reversed(view.metrics):
        steps.append(step)
        groups += graded_groups([step])
        if len(steps) >= SILENT_STEPS and groups >= SILENT_GROUPS:
            return steps[::-1]
    return None


def no_signal(view: StepView) -> Finding | None:
    """No group has unequal rewards: all wrong, all right, or a grader that says the same to everything."""
    steps = silent_window(view)
    if steps is None or informative_share(steps) > SILENT_SHARE:
        return None
    groups, good, bad = graded_groups(steps), total(steps, "groups/all_good"), total(steps, "groups/all_bad")
    numbers = {"groups": groups, "all_good": good, "all_bad": bad, "used": total(steps, "groups/used")}
    evidence = (
        f"in {len(steps)} steps {groups:.0f} groups were judged: {good:.0f} all right, {bad:.0f} all wrong, "
        f"{numbers['used']:.0f} with unequal rewards"
    )
    constant = _constant_reward(view, steps, evidence, numbers)
    if constant is not None:
        return constant
    had_signal = any(informative_share([step]) >= LEARNED_SHARE for step in view.metrics)
    if good > bad:
        return Finding(
            "no_learning_signal_all_right",
            "info" if had_signal else "warning",
            view.step,
            evidence + ("" if had_signal else "; so it was from the first step on"),
            "The task is solved at this difficulty: stop here, use harder samples, or set curriculum=True"
            + ("" if had_signal else "; read some samples: does the grader accept everything?"),
            numbers,
        )
    reward, start = reward_window(steps), reward_window(view.metrics[:CHANGE_WINDOW])
    converged = had_signal and reward.above(start) >= CONVERGED_Z
    if converged:
        evidence += f"; they earn {reward.mean:.3f}, at the start {start.mean:.3f}: the policy may have converged"
    return Finding(
        "no_learning_signal_all_wrong",
        "error" if bad >= ONE_SIDED * (good + bad) and not (converged or view.only_compares) else "warning",
        view.step,
        evidence,
        "Use easier samples, partial credit, a larger group_size, a higher temperature or dynamic_sampling=True; if "
        "the base model never succeeds, start with SFT (init_from=…). Read some samples: is the grader right to refuse "
        "them?",
        numbers,
    )


def _constant_reward(
    view: StepView, steps: list[StepMetrics], evidence: str, numbers: dict[str, float]
) -> Finding | None:
    """One and the same reward since the first step, and not because everything is wrong."""
    rewarded = [step for step in view.metrics if graded([step]) > 0]
    values = {get(step, end) for step in rewarded for end in ("reward/min", "reward/max")}
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
        "The reward does not tell completions apart: call compute_reward by hand on a right and on a wrong one",
        {**numbers, "reward": value, "distinct_share": distinct},
    )


def _distinct_share(view: StepView, steps: int) -> float:
    """Over groups of the last `steps` steps: the mean share of different texts; 0 where there are no rollouts."""
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
        f"{rate:.1%} of the rollouts of the last {len(steps)} steps succeed; "
        f"{informative_share(steps):.0%} of the groups still carry a signal",
        "The task is nearly solved: stop here, use harder samples, or set curriculum=True to leave solved ones out",
        {"success_rate": rate, "informative_share": informative_share(steps)},
    )


def reward_collapse(view: StepView) -> Finding | None:
    """The training reward lost most of what it had, or the held-out reward fell beyond its intervals."""
    now = reward_window(view.last(CHANGE_WINDOW))
    highest = max(get(step, "reward/mean") for step in view.metrics)
    floor = view.reward_floor
    least = COLLAPSE_SHARE_CURRICULUM if view.config.get("curriculum") else COLLAPSE_SHARE
    if highest - now.mean < least * (highest - floor) or highest <= floor:
        return _heldout_collapse(view)
    found = best_window(view.metrics[:-CHANGE_WINDOW], BEST_WINDOW)
    if found is None:
        return _heldout_collapse(view)
    end, best = found
    z = best.above(now)
    if z < COLLAPSE_Z or best.mean - now.mean < least * (best.mean - floor):
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
    """(best, last) reading of each held-out set and temperature whose last interval lies below that of its best."""
    last = {(row["set"], row["temperature"]): row for row in view.evaluations}
    for row in view.evaluations:
        other = last[row["set"], row["temperature"]]
        if row["low"] > other["high"]:
            yield row, other


def reward_spike(view: StepView) -> Finding | None:
    """From one step to the next the reward jumps as learning does not."""
    if len(view.metrics) < SPIKE_HISTORY + 1 or view.config.get("curriculum"):
        return None
    before, now = reward_window(view.metrics[-1 - CHANGE_WINDOW : -1]), reward_window(view.last(1))
    z, jump = now.above(before), now.mean - before.mean
    if z < SPIKE_Z or jump < SPIKE_SHARE * (view.reward_ceiling - view.reward_floor):
        return None
    means = [get(step, "reward/mean") for step in view.metrics]
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
    """Nobody reads a held-out set."""
    if view.evaluations:
        return None
    return Finding(
        "no_heldout",
        "info",
        view.step,
        "no reading of a held-out set: training reward alone cannot show overfitting or reward hacking",
        "Return held-out samples from build_heldout() and set heldout_size and eval_every",
    )
