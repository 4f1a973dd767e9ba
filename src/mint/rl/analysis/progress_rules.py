"""Rules about progress: a signal that leads nowhere, or down, and learning that is learning by heart. Pure.

Each rule takes a run up to one step and returns a finding or None.
"""

from __future__ import annotations

import math
import statistics

from mint.rl.analysis.policy_rules import ROSE_Z, TOO_LARGE_STEP, first_order_gain, is_mismatched
from mint.rl.analysis.run_record import Row, StepView
from mint.rl.analysis.signal_rules import CHANGE_WINDOW
from mint.rl.analysis.step_statistics import best_window, metric, reward_change, reward_trend, reward_window
from mint.rl.estimate import Z95
from mint.rl.finding import Finding
from mint.runs.terminal_text import counted

PATIENCE = 25
"""The fewest steps with a signal before a flat reward is reported. Some healthy runs rise only after a dozen."""

RISING_Z = 2.0
"""Standard errors of the trend from which a run makes progress."""

SMALL_GAIN = 0.3
"""A run makes no progress if it has surely gained less than this share of the reward that was missing. A run of so few
rollouts that its gain may be larger is not judged."""

SURE_Z = 1.7
"""Standard errors of a one-sided 95 % interval (Student's t with about 25 degrees of freedom)."""

START_STEPS = 5
"""The steps whose mean is the start of a run that rises early and then stays at its level."""

LOOK_AHEAD = 2.0
"""A steady gain may go on: up to the planned steps, and at most to this many times those made."""

NEARLY_ALL = 0.9
"""Share of the reward's range above which there is too little left to gain."""

FALLING_STEPS = 10
"""The fewest steps before a falling reward is reported."""

FALLING_Z = 3.0
FALLING_SHARE = 0.15
"""A falling reward has lost this share of the reward's range, by so many standard errors of the trend."""

HIGHER_Z = 2.5
"""Standard errors by which the best window must lie above the start to say that the reward was higher once: one of many
windows lies 2 above it by chance."""

PROMPT_STEPS = 5
"""Steps whose prompts are counted."""

PROMPT_GROUPS = 16
"""The fewest groups among which the prompts are counted."""

FEW_PROMPTS = 8
PROMPT_REPEATS = 3
"""Fewer prompts than this, each seen so often on average, are few."""

LEARNED_BY_HEART = 0.25
"""The held-out reward has gained at most this share of what the training reward has gained."""

SAMPLED = 1.0
"""The temperature of the held-out evaluation that is compared with training: the greedy one may be near its ceiling."""


def no_progress(view: StepView) -> Finding | None:
    """There is a signal and the policy is trained, but neither the training nor the held-out reward rises."""
    with_signal = sum(metric(step, "datums") > 0 for step in view.metrics)
    warmup = int(view.config.get("lr_warmup_steps") or 0)
    if with_signal < PATIENCE + warmup or view.only_compares or view.config.get("curriculum"):
        return None
    planned = int(view.config.get("steps") or 0)
    if view.step == planned and len(view.evaluations) > 0 and int(view.evaluations[-1]["step"]) < planned:
        return None  # the last held-out evaluation comes next, and says more
    line, change = reward_trend(view.metrics), reward_change(view.metrics, START_STEPS)
    start = reward_window(view.metrics[:START_STEPS])
    missing = view.reward_ceiling - start.mean
    if missing < (1 - NEARLY_ALL) * (view.reward_ceiling - view.reward_floor):
        return None
    if any(rise.rise >= RISING_Z * rise.scatter for rise in (line, change)) or _heldout_rose(view) or _is_falling(view):
        return None
    ahead = min(LOOK_AHEAD, max(1.0, planned / len(view.metrics)))
    most = max(ahead * (line.rise + SURE_Z * line.scatter), change.rise + SURE_Z * change.scatter)
    if most >= SMALL_GAIN * missing:
        return None
    return Finding(
        "no_progress",
        "warning",
        view.step,
        f"{counted(with_signal, 'step')} had a signal, but the mean reward, {start.mean:.3f} at the start, has changed "
        f"by {line.rise:+.3f} along its trend and by {change.rise:+.3f} since the first {START_STEPS} steps (standard "
        f"errors {line.scatter:.3f} and {change.scatter:.3f}), and no held-out evaluation shows a gain",
        "Read some completions with their rewards: does the prompt say what will be rewarded? Grade one completion "
        "twice. Then raise learning_rate or batch_size, use easier items or partial credit, or start with "
        "SFT (init_from=…)",
        {"rise": line.rise, "error": line.scatter, "change": change.rise, "steps_with_signal": float(with_signal)},
    )


def falling_reward(view: StepView) -> Finding | None:
    """The reward has fallen from the first steps on, though the steps are not too large: training makes it worse."""
    if not _is_falling(view):
        return None
    start = reward_window(view.metrics[:CHANGE_WINDOW])
    now = reward_window(view.last(CHANGE_WINDOW))
    trend = reward_trend(view.metrics)
    return Finding(
        "falling_reward",
        "error",
        view.step,
        f"the mean reward has fallen from the start, from {start.mean:.3f} to {now.mean:.3f} "
        f"({-trend.rise / trend.error:.1f} standard errors of the trend), and was never higher",
        "Check the sign of the advantages: a completion that earned more than its group must get a positive one. Does "
        "compute_reward return a cost? Is each reward that of its own completion?",
        {"start": start.mean, "now": now.mean, "rise": trend.rise, "error": trend.error},
    )


def _is_falling(view: StepView) -> bool:
    """Whether the reward falls along its trend, was never above its start, and no step was too large."""
    if len(view.metrics) < FALLING_STEPS or view.only_compares or view.config.get("curriculum"):
        return False
    if is_mismatched(view.now):
        return False
    trend = reward_trend(view.metrics)
    span = view.reward_ceiling - view.reward_floor
    if trend.rise > -FALLING_Z * trend.error or trend.rise > -FALLING_SHARE * span:
        return False
    best = best_window(view.metrics, CHANGE_WINDOW)
    start = reward_window(view.metrics[:CHANGE_WINDOW])
    if best is not None and best[1].above(start) >= HIGHER_Z:
        return False
    gains = [gain for step in view.metrics if (gain := first_order_gain(step, view.config)) is not None]
    return not gains or statistics.median(gains) < TOO_LARGE_STEP


def few_prompts(view: StepView) -> Finding | None:
    """The run trains on a handful of prompts again and again."""
    prompts, groups = _prompts(view)
    if groups < PROMPT_GROUPS or prompts >= FEW_PROMPTS or groups < PROMPT_REPEATS * prompts:
        return None
    return Finding(
        "few_prompts",
        "warning",
        view.step,
        f"the last {groups} groups have only {prompts} different prompts",
        "Build more items; does make_prompt use the item? On so few prompts, a policy learns the answers by heart",
        {"prompts": float(prompts), "groups": float(groups)},
    )


def overfitting(view: StepView) -> Finding | None:
    """On prompts that come back, the training reward rises, and the held-out reward does not."""
    readings = [row for row in view.evaluations if row["temperature"] == SAMPLED]
    if len(view.metrics) < 2 * CHANGE_WINDOW or view.config.get("curriculum"):
        return None
    first, last = _first_and_last(readings)
    if first is None or last is None:
        return None
    before = reward_window(view.metrics[:CHANGE_WINDOW])
    now = reward_window(view.last(CHANGE_WINDOW))
    gain = now.mean - before.mean
    heldout = last["mean"] - first["mean"]
    noise = now.mean_error**2 + before.mean_error**2 + _error(first, last) ** 2
    if now.above(before) < ROSE_Z or heldout > LEARNED_BY_HEART * gain or gain - heldout < ROSE_Z * math.sqrt(noise):
        return None
    prompts, groups = _prompts(view)
    if groups < 2 * prompts:
        return None
    return Finding(
        "overfitting",
        "error",
        view.step,
        f"the training reward rose from {before.mean:.3f} to {now.mean:.3f}, the held-out reward ({last['set']}, "
        f"temperature {SAMPLED:g}) went from {first['mean']:.3f} to {last['mean']:.3f}; the last {groups} groups have "
        f"only {prompts} different prompts: the policy learns their answers by heart",
        "Build more items, and stop at the best held-out checkpoint",
        {"train_start": before.mean, "train": now.mean, "heldout_start": first["mean"], "heldout": last["mean"]},
    )


def _first_and_last(readings: list[Row]) -> tuple[Row | None, Row | None]:
    """The first and the last evaluation of the first held-out set; None without two of them."""
    of_set = [row for row in readings if row["set"] == readings[0]["set"]]
    return (of_set[0], of_set[-1]) if len(of_set) > 1 else (None, None)


def _heldout_rose(view: StepView) -> bool:
    """Whether the last interval of some held-out set and temperature lies above its first one."""
    first: dict[tuple[str, float], Row] = {}
    last: dict[tuple[str, float], Row] = {}
    for row in view.evaluations:
        first.setdefault((row["set"], row["temperature"]), row)
        last[row["set"], row["temperature"]] = row
    return any(last[of]["low"] > row["high"] for of, row in first.items())


def _error(first: Row, second: Row) -> float:
    """The standard error of the difference of two readings, from their 95 % intervals."""
    return math.hypot(*((row["high"] - row["low"]) / (2 * Z95) for row in (first, second)))


def _prompts(view: StepView) -> tuple[int, int]:
    """The number of different prompts in the last steps, and of their groups.

    An environment may keep its question to itself until later turns. So an episode's item counts, too.
    """
    prompts: set[tuple[str, str]] = set()
    groups: set[tuple[int, int]] = set()
    for row in view.rows(PROMPT_STEPS):
        if "prompt" in row:
            several_turns = row.get("turns", 1) > 1
            prompts.add((row["prompt"], row.get("sample", "") if several_turns else ""))
            groups.add((row["step"], row["group"]))
    return len(prompts), len(groups)
