"""Rules about the reward and the grader: failures, reward hacking, unreliable judges, server warnings. Pure.

Each rule takes a run up to one step and returns a finding or None. No rule can prove that a reward is hacked; the
evidence says where to look.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from mint.rl.analysis.policy_rules import ROSE_Z
from mint.rl.analysis.run_record import Row, StepView
from mint.rl.analysis.signal_rules import CHANGE_WINDOW, heldout_falls
from mint.rl.analysis.step_statistics import mean, metric, reward_window, total
from mint.rl.estimate import wilson
from mint.rl.finding import Finding, Severity
from mint.rl.tasks.judges import position_bias
from mint.runs.terminal_text import counted

FAILED_STEPS = 3
"""Steps over which grader failures are counted."""

MANY_FAILED = 0.5
FEWEST_FAILED = 8
"""Failures are an error from this share of the rollouts of those steps and from this number on."""

HACK_STEPS = 5
"""Steps whose rollouts are searched for reward hacking."""

SAME_TEXT_ITEMS = 8
"""The fewest prompts on which the same text must have won."""

SAME_TEXT_SHARE = 0.5
"""The text must be this share of all winners, and win with at least this probability (lower 95 % bound)."""

LENGTH_VARIANCE = 0.5
"""The share of the variance of reward within groups that length explains (r²)."""

LENGTH_ROLLOUTS = 64
LENGTH_GROWTH = 1.5

EQUAL_TEXTS = 8
"""The fewest texts that must have occurred several times."""

DIFFERENT_SHARE = 0.05
MANY_DIFFERENT = 0.25
"""Rewards are inconsistent if surely (95 %) more than this share of those texts earned different rewards; an error
from `MANY_DIFFERENT` on."""

WIDE_RANGE = 20.0
"""A range of rewards that explains why advantages are large."""

PART_Z = 4.0
"""Standard errors by which a part of the reward must have fallen; high, because every step tests several parts."""


def suspected_reward_hacking(view: StepView) -> Finding | None:
    """The reward rises, with a sign that it rises for the wrong reason."""
    return _heldout_falls(view) or _one_text_wins(view) or _length_wins(view) or _parts_fall(view)


def _hacking(view: StepView, severity: Severity, evidence: str, numbers: dict[str, float]) -> Finding:
    return Finding(
        "suspected_reward_hacking",
        severity,
        view.step,
        evidence,
        "Read the winning completions of this step. Close the gap in the grader (hidden inputs, exact answers, a "
        "penalty, a second grader), hold the policy near the base with kl_penalty_coef, and stop at the best held-out "
        "checkpoint",
        numbers,
    )


def _heldout_falls(view: StepView) -> Finding | None:
    """The held-out reward has fallen from its best, the training reward has not, and the two changes differ.

    A set whose reward surely rose at another temperature is left out: its greedy replies became worse, not the grader.
    """
    rose = _sets_that_rose(view)
    falls = [fall for fall in heldout_falls(view) if fall[0]["set"] not in rose]
    if not falls or len(view.metrics) < 2 * CHANGE_WINDOW:
        return None
    before = reward_window(view.metrics[:CHANGE_WINDOW])
    now = reward_window(view.last(CHANGE_WINDOW))
    gain = now.mean - before.mean
    noise = now.mean_error**2 + before.mean_error**2
    best, last = max(falls, key=lambda fall: fall[0]["mean"] - fall[1]["mean"])
    loss = best["mean"] - last["mean"]
    noise += sum(((row["high"] - row["low"]) / 3.92) ** 2 for row in (best, last))
    if gain < 0 or gain + loss < ROSE_Z * math.sqrt(noise):
        return None
    return _hacking(
        view,
        "error",
        f"training reward went from {before.mean:.3f} to {now.mean:.3f} while held-out ({last['set']}, temperature "
        f"{last['temperature']:g}) fell from {best['mean']:.3f} to {last['mean']:.3f}, intervals apart",
        {"train_start": before.mean, "train": now.mean, "heldout_best": best["mean"], "heldout": last["mean"]},
    )


def _sets_that_rose(view: StepView) -> set[str]:
    """The held-out sets whose last reading lies above the first one, at any temperature."""
    first: dict[tuple[str, float], Row] = {}
    for row in view.evaluations:
        first.setdefault((row["set"], row["temperature"]), row)
    last = {(row["set"], row["temperature"]): row for row in view.evaluations}
    return {name for (name, temperature), row in last.items() if row["low"] > first[name, temperature]["high"]}


def _one_text_wins(view: StepView) -> Finding | None:
    """The same text wins on many prompts: the reward does not depend on the prompt."""
    # The last step alone decides whether the rows of more steps are worth reading.
    winners = [row for row in view.rows(1) if _wins(row, view)]
    texts = Counter(_normal(row["text"]) for row in winners).most_common(1)
    if not texts or texts[0][1] < SAME_TEXT_SHARE * len(winners):
        return None
    text = texts[0][0]
    rows = [row for row in view.rows(HACK_STEPS) if row.get("reward") is not None]
    winners = [row for row in rows if _wins(row, view)]
    won = [row for row in winners if _normal(row["text"]) == text]
    tried = [row for row in rows if _normal(row["text"]) == text]
    prompts = {row["prompt"] for row in won}
    share = len(won) / len(winners)
    reliable = wilson(len(prompts), len({row["prompt"] for row in tried}))[0]
    if len(prompts) < SAME_TEXT_ITEMS or share < SAME_TEXT_SHARE or reliable < SAME_TEXT_SHARE:
        return None
    return _hacking(
        view,
        "warning",
        f"{text[:60]!r} is {share:.0%} of the winning completions and won on {len(prompts)} different prompts of "
        f"{len({row['prompt'] for row in tried})} on which it was sampled",
        {"share_of_winners": share, "prompts": float(len(prompts))},
    )


def _wins(row: Row, view: StepView) -> bool:
    """Whether the reward lies in the upper half of the range."""
    return row.get("reward") is not None and row["reward"] - view.reward_floor > 0.5 * (
        view.reward_ceiling - view.reward_floor
    )


def _normal(text: str) -> str:
    """Lower case with single spaces, so that near-duplicates are equal."""
    return " ".join(text.casefold().split())


def _length_wins(view: StepView) -> Finding | None:
    """Length explains the reward within groups, and the policy has changed its length accordingly."""
    start = mean(view.metrics[:CHANGE_WINDOW], "rollouts/mean_length")
    now = mean(view.last(CHANGE_WINDOW), "rollouts/mean_length")
    if len(view.metrics) < 2 * CHANGE_WINDOW or start / LENGTH_GROWTH < now < start * LENGTH_GROWTH:
        return None
    groups: dict[tuple[int, int], list[Row]] = defaultdict(list)
    for row in view.rows(HACK_STEPS):
        if row.get("reward") is not None:
            groups[row["step"], row["group"]].append(row)
    lengths = np.concatenate(
        [_centred(len(row["tokens"]) for row in group) for group in groups.values()] or [np.zeros(0)]
    )
    rewards = np.concatenate([_centred(row["reward"] for row in group) for group in groups.values()] or [np.zeros(0)])
    used = (rewards != 0) | (lengths != 0)
    if used.sum() < LENGTH_ROLLOUTS or not lengths.any() or not rewards.any():
        return None
    correlation = float(lengths @ rewards / math.sqrt(float(lengths @ lengths) * float(rewards @ rewards)))
    growth = now / max(start, 1e-9) if correlation > 0 else start / max(now, 1e-9)
    if correlation**2 < LENGTH_VARIANCE or growth < LENGTH_GROWTH:
        return None
    return _hacking(
        view,
        "warning",
        f"length explains {correlation**2:.0%} of the reward's variance within groups (correlation "
        f"{correlation:+.2f}), and the mean length went from {start:.1f} to {now:.1f} tokens",
        {"correlation": correlation, "length_start": start, "length": now},
    )


def _centred(values: Iterable[float]) -> np.ndarray:
    array = np.asarray(list(values), dtype=np.float64)
    return array - array.mean()


def _parts_fall(view: StepView) -> Finding | None:
    """The reward rises while one of its parts falls."""
    if len(view.metrics) < 2 * CHANGE_WINDOW:
        return None
    first = view.metrics[:CHANGE_WINDOW]
    last = view.last(CHANGE_WINDOW)
    if reward_window(last).above(reward_window(first)) < ROSE_Z:
        return None
    for name in sorted(key for key in view.now if key.startswith("reward/part/")):
        # A part varies about as much as the whole reward at most, so the variance of the whole is used.
        before = reward_window(first, name)
        now = reward_window(last, name)
        if before.above(now) >= PART_Z:
            return _hacking(
                view,
                "warning",
                f"the reward rose from {mean(first, 'reward/mean'):.3f} to {mean(last, 'reward/mean'):.3f} while its "
                f"part {name.removeprefix('reward/part/')!r} fell from {before.mean:.3f} to {now.mean:.3f}",
                {"part_start": before.mean, "part": now.mean},
            )
    return None


def inconsistent_reward(view: StepView) -> Finding | None:
    """Equal completions of one prompt earn different rewards."""
    return _differs_in_groups(view) or _differs_in_evaluations(view)


def _differs_in_groups(view: StepView) -> Finding | None:
    """Within a group. From step to step the reward may depend on the rest of the batch."""
    rewards: dict[tuple[Any, ...], list[float]] = defaultdict(list)
    for row in view.rows(HACK_STEPS):
        if row.get("reward") is not None and row.get("turns", 1) <= 1 and not row.get("tool_calls"):
            key = (row["step"], row["group"], row["text"], len(row["tokens"]), row.get("truncated"))
            rewards[key].append(row["reward"])
    return _inconsistent(view, rewards, "occurred several times in one group")


def _differs_in_evaluations(view: StepView) -> Finding | None:
    """Among the replies to held-out items in evaluations of several steps. These are always the same items, each graded
    alone, so that a grader that changes from step to step shows here."""
    if not view.evaluations or int(view.evaluations[-1]["step"]) < view.step:
        return None
    by_step: dict[tuple[Any, ...], dict[int, float]] = defaultdict(dict)
    for evaluation in view.evaluations:
        for reply, reward in evaluation.get("replies", {}).items():
            by_step[evaluation["set"], reply].setdefault(int(evaluation["step"]), reward)
    rewards = {reply: [*of_steps.values()] for reply, of_steps in by_step.items()}
    return _inconsistent(view, rewards, "answered a held-out item in several evaluations")


def _inconsistent(view: StepView, rewards: Mapping[tuple[Any, ...], Sequence[float]], where: str) -> Finding | None:
    """The finding, if many of the texts that came several times have unequal rewards."""
    repeated = [values for values in rewards.values() if len(values) > 1]
    different = sum(len(set(values)) > 1 for values in repeated)
    surely = wilson(different, len(repeated))[0]
    if len(repeated) < EQUAL_TEXTS or surely < DIFFERENT_SHARE:
        return None
    return Finding(
        "inconsistent_reward",
        "error" if surely >= MANY_DIFFERENT else "warning",
        view.step,
        f"of {len(repeated)} texts that {where}, {different} earned different rewards",
        "Make the reward a function of the prompt and the completion: the policy cannot learn the rest of it",
        {"repeated_texts": float(len(repeated)), "different_rewards": float(different)},
    )


def grader_failures(view: StepView) -> Finding | None:
    """The grader raised, or returned no finite number."""
    kinds = ("ungraded", "unsupported", "timeouts")
    of_now = {kind: metric(view.now, f"rollouts/{kind}") for kind in kinds}
    if not of_now["ungraded"]:
        return None
    out_of_range = sum(_out_of_range(row) for row in view.rows(1))
    if of_now["ungraded"] - of_now["unsupported"] - of_now["timeouts"] - out_of_range <= 0:
        return None
    errors = Counter(
        row["error"]
        for row in view.rows(FAILED_STEPS)
        if row.get("error") and "reward" in row and not (row["unsupported"] or row["timed_out"] or _out_of_range(row))
    )
    last = view.last(FAILED_STEPS)
    failed = total(last, "rollouts/ungraded") - total(last, "rollouts/unsupported") - total(last, "rollouts/timeouts")
    first = f"; most often {errors.most_common(1)[0][0]!r}" if errors else ""
    return _grading(
        view,
        "grader_failures",
        failed,
        f"got no reward{first}",
        "See `error` in rollouts.jsonl; correct compute_reward, or the environment",
    )


def grader_timeouts(view: StepView) -> Finding | None:
    """The grader did not answer in time."""
    if not metric(view.now, "rollouts/timeouts"):
        return None
    failed = total(view.last(FAILED_STEPS), "rollouts/timeouts")
    limit = view.config.get("grader_timeout_s", 30.0)
    return _grading(
        view,
        "grader_timeouts",
        failed,
        f"were not graded within {limit:g} s",
        "Raise grader_timeout_s, or make compute_reward stop by itself on hostile answers",
    )


def unsupported_rewards(view: StepView) -> Finding | None:
    """The grader cannot judge on this machine."""
    if not metric(view.now, "rollouts/unsupported"):
        return None
    reasons = Counter(row["error"] for row in view.rows(FAILED_STEPS) if row.get("unsupported"))
    first = f": {reasons.most_common(1)[0][0]}" if reasons else ""
    return _grading(
        view,
        "unsupported_rewards",
        total(view.last(FAILED_STEPS), "rollouts/unsupported"),
        f"could not be judged on this machine{first}",
        "They are left out of their groups. Use a machine or a grader that supports them, or leave such items out",
    )


def judge_unreliable(view: StepView) -> Finding | None:
    """A pairwise judge prefers the first or the second reply, or fails (from the rollouts' `info`)."""
    judged = [row["info"] for row in view.rows(FAILED_STEPS) if "judge_pairs" in row.get("info", {})]
    pairs = sum(info["judge_pairs"] for info in judged)
    failed = sum(info["judge_failed_pairs"] for info in judged)
    flips = sum(info["judge_flipped_pairs"] for info in judged)
    alarm = position_bias((pairs - failed) // 2, flips // 2)  # both responses of a pair have counted it
    if alarm is None and not failed:
        return None
    last_error = next((info["judge_last_error"] for info in reversed(judged) if "judge_last_error" in info), None)
    said = [f"{failed} of {pairs} comparisons failed, the last with: {last_error}"] if failed else []
    return Finding(
        "judge_unreliable",
        "warning",
        view.step,
        "; ".join([*said, *([] if alarm is None else [alarm])]),
        "Both orders are judged, so a biased judge weakens the signal but is not unfair: ask a more precise question, "
        "or use a better judge. Failed comparisons are left out: check the judge's endpoint",
        {"pairs": float(pairs), "failed": float(failed)},
    )


def reward_out_of_range(view: StepView) -> Finding | None:
    """A reward was outside the range that its task declares."""
    wrong = [row for row in view.rows(1) if _out_of_range(row)] if metric(view.now, "rollouts/ungraded") else []
    if not wrong:
        return None
    return Finding(
        "reward_out_of_range",
        "error",
        view.step,
        f"{len(wrong)} rewards of this step were refused; {wrong[0]['error']}",
        "Correct the grader, or declare the range that it keeps in reward_range",
        {"rollouts": float(len(wrong))},
    )


def _out_of_range(row: Row) -> bool:
    return "outside its declared range" in (row.get("error") or "")


def _grading(view: StepView, code: str, failed: float, what: str, remedy: str) -> Finding:
    count = total(view.last(FAILED_STEPS), "rollouts/count")
    decisive = failed >= FEWEST_FAILED and failed >= MANY_FAILED * count
    return Finding(
        code,
        "error" if decisive else "warning",
        view.step,
        f"{failed:.0f} of {counted(count, 'rollout')} of the last "
        f"{counted(len(view.last(FAILED_STEPS)), 'step')} {what}",
        remedy,
        {"failed": failed, "rollouts": count},
    )


def server_warnings(view: StepView) -> Finding | None:
    """The server's lint has remarks on the batch."""
    # Samples of older weights must differ from the policy's. `off_policy_drift` says when they differ too much.
    # Rewards on a large scale have large advantages.
    stale = metric(view.now, "staleness/max") > 0
    wide = view.reward_ceiling - view.reward_floor >= WIDE_RANGE
    # A weighting of one's own may leave out what earned less than its group, or more.
    weighted = view.config.get("loss_weighting") is not None
    known = (
        *(("mismatch:", "foreign_tokens:", "stale_policy:") if stale else ()),
        *(("large_advantages:",) if wide else ()),
        *(("raw_rewards:",) if weighted else ()),
    )
    warnings = [message for message in view.warnings if not message.startswith(known)]
    if not warnings:
        return None
    return Finding(
        "server_warnings",
        "warning",
        view.step,
        _joined(warnings),
        "The batch was trained unchanged; the warning says what is wrong with it",
        {"warnings": float(len(warnings))},
    )


def _joined(warnings: Sequence[str]) -> str:
    different = list(dict.fromkeys(warnings))
    more = f" (and {len(different) - 3} more)" if len(different) > 3 else ""
    return "; ".join(different[:3]) + more
