"""The log of a step: its metrics, and one row per rollout. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np

from mint.rl.adapter import Task
from mint.rl.rollout import Group, Rollout, RolloutBatch, Span
from mint.rl.tracking.token_counts import token_metrics
from mint.rl.training.policy_update import PolicyUpdate, TrainedRollout


def success_rate(task: Task, group: Group) -> float | None:
    """The mean of `Task.solved_share` over the group's graded rollouts. None where none is graded."""
    solved = [task.task_of(group.item).solved_share(reward) for reward in group.rewards]
    return sum(solved) / len(solved) if solved else None


def step_metrics(task: Task, batch: RolloutBatch, update: PolicyUpdate) -> dict[str, float]:
    """The metrics of a step by the names of the run folder, those of the optimizer included."""
    rollouts = [rollout for group in batch.all_groups for rollout in group.rollouts]
    return {
        "step": float(batch.step),
        "temperature": batch.temperature,
        **_reward_metrics(task, batch),
        **_group_metrics(task, batch, update),
        **_category_metrics(task, batch, update),
        **_rollout_metrics(rollouts),
        **_info_metrics(rollouts),
        **_grader_metrics(batch, rollouts),
        **token_metrics(batch, update),
        "datums": float(update.datums),
        **update.metrics,
    }


def _reward_metrics(task: Task, batch: RolloutBatch) -> dict[str, float]:
    rollouts = [rollout for group in batch.all_groups for rollout in group.rollouts]
    rewards = np.asarray([rollout.reward for rollout in rollouts if rollout.reward is not None], dtype=np.float64)
    names = sorted({name for rollout in rollouts for name in rollout.parts})
    parts = {
        f"reward/part/{name}": float(
            np.mean([rollout.parts.get(name, 0.0) for rollout in rollouts if rollout.reward is not None])
        )
        for name in names
    }
    empty = not len(rewards)
    return {
        "reward/mean": 0.0 if empty else float(rewards.mean()),
        "reward/std": 0.0 if empty else float(rewards.std()),
        "reward/min": 0.0 if empty else float(rewards.min()),
        "reward/max": 0.0 if empty else float(rewards.max()),
        "success/rate": 0.0 if empty else float(np.mean(_successes(task, batch.all_groups))),
        **parts,
    }


def _successes(task: Task, groups: Sequence[Group]) -> list[bool]:
    """Whether each graded rollout is a success by the task of its item."""
    return [task.task_of(group.item).is_success(reward) for group in groups for reward in group.rewards]


def _group_metrics(task: Task, batch: RolloutBatch, update: PolicyUpdate) -> dict[str, float]:
    judged = [group for group in batch.all_groups if len(group.rewards) > 1]
    equal = [group for group in judged if min(group.rewards) == max(group.rewards)]
    good = sum(task.task_of(group.item).is_success(group.rewards[0]) for group in equal)
    used = _used(batch.all_groups, update)
    return {
        "groups/total": float(len(batch.all_groups)),
        "groups/used": float(used),
        "groups/untrained": float(len(judged) - len(equal) - used),
        "groups/all_good": float(good),
        "groups/all_bad": float(len(equal) - good),
        "groups/failed": float(len(batch.all_groups) - len(judged)),
        "groups/refilled": float(len(batch.replaced)),
    }


def _used(groups: Sequence[Group], update: PolicyUpdate) -> int:
    """The number of groups with unequal rewards that went into the loss."""
    trained = {id(one.rollout) for one in update.trained}
    return sum(
        len(set(group.rewards)) > 1 and any(id(rollout) in trained for rollout in group.rollouts) for group in groups
    )


def _category_metrics(task: Task, batch: RolloutBatch, update: PolicyUpdate) -> dict[str, float]:
    """Reward, success, groups with a signal, and the grader's time and cost, of the items of each `Task.category`."""
    by_name: dict[str, list[Group]] = {}
    for group in batch.all_groups:
        name = task.category(group.item)
        if name is not None:
            by_name.setdefault(name, []).append(group)
    found: dict[str, float] = {}
    for name, groups in sorted(by_name.items()):
        rewards = [reward for group in groups for reward in group.rewards]
        found[f"category/{name}/groups"] = float(len(groups))
        found[f"category/{name}/groups_used"] = float(_used(groups, update))
        if rewards:
            found[f"category/{name}/reward"] = float(np.mean(rewards))
            found[f"category/{name}/success"] = float(np.mean(_successes(task, groups)))
        rollouts = [rollout for group in groups for rollout in group.rollouts]
        found[f"time/category/{name}/grader_mean_s"] = float(
            np.mean([rollout.grader_s for rollout in rollouts] or [0.0])
        )
        costs = _costs(rollouts)
        if costs:
            found[f"category/{name}/grader_cost"] = sum(costs)
    return found


def _rollout_metrics(rollouts: Sequence[Rollout]) -> dict[str, float]:
    count = len(rollouts)
    lengths = [len(rollout.tokens) for rollout in rollouts] or [0]
    texts = Counter(rollout.text for rollout in rollouts)
    logprobs = [rollout.logprobs for rollout in rollouts if rollout.tokens]
    return {
        "rollouts/count": float(count),
        "rollouts/ungraded": float(sum(rollout.reward is None for rollout in rollouts)),
        "rollouts/unsupported": float(sum(rollout.unsupported for rollout in rollouts)),
        "rollouts/timeouts": float(sum(rollout.timed_out for rollout in rollouts)),
        "rollouts/tokens": float(sum(lengths)),
        "rollouts/mean_length": float(np.mean(lengths)),
        "rollouts/max_length": float(max(lengths)),
        "rollouts/truncated_share": sum(rollout.truncated for rollout in rollouts) / max(1, count),
        "rollouts/entropy_estimate": float(-np.mean(np.concatenate(logprobs))) if logprobs else 0.0,
        "rollouts/turns_mean": float(np.mean([len(rollout.turns) for rollout in rollouts])) if rollouts else 0.0,
        "rollouts/tool_calls_mean": float(np.mean([rollout.tool_calls for rollout in rollouts])) if rollouts else 0.0,
        "rollouts/duplicate_share": 1.0 - len(texts) / count if count else 0.0,
        "rollouts/retokenized_turns": float(sum(rollout.retokenized_turns for rollout in rollouts)),
    }


def _info_metrics(rollouts: Sequence[Rollout]) -> dict[str, float]:
    """The mean of every number that graders and environments have reported, over the rollouts that have it."""
    found: dict[str, list[float]] = {}
    for rollout in rollouts:
        for name, value in rollout.info.items():
            if isinstance(value, int | float):
                found.setdefault(f"info/{name}", []).append(float(value))
    return {name: float(np.mean(values)) for name, values in sorted(found.items())}


def _grader_metrics(batch: RolloutBatch, rollouts: Sequence[Rollout]) -> dict[str, float]:
    """The time and cost of grading, in all and by the names of graders."""
    seconds = [rollout.grader_s for rollout in rollouts] or [0.0]
    found = {
        "grader/retries": float(sum(rollout.grader_retries for rollout in rollouts)),
        "time/grader_mean_s": float(np.mean(seconds)),
        "time/grader_max_s": float(max(seconds)),
    }
    for name in sorted({name for rollout in rollouts for name in rollout.grader_seconds}):
        own = [rollout.grader_seconds[name] for rollout in rollouts if name in rollout.grader_seconds]
        found[f"time/grader/{name}_mean_s"] = float(np.mean(own))
    costs = _costs(rollouts)
    if costs:
        found["grader/cost"] = sum(costs)
    times = [group.times for group in batch.all_groups if group.times is not None]
    if times:
        sampled = max(one.sampling[1] for one in times)
        graded = [one.grading[1] for one in times if one.grading is not None]
        graded += [ended for one in times for _, ended in one.episodes]
        found["time/sampling_s"] = sampled - min(one.sampling[0] for one in times)
        found["time/grading_after_sampling_s"] = max(0.0, max(graded, default=sampled) - sampled)
    return found


def _costs(rollouts: Sequence[Rollout]) -> list[float]:
    """The costs of the rollouts. A grader reports a cost as `cost` in the `info` of its reward."""
    return [float(rollout.info["cost"]) for rollout in rollouts if isinstance(rollout.info.get("cost"), int | float)]


def timeline_rows(batch: RolloutBatch) -> list[dict[str, Any]]:
    """One row per group: from when to when it was sampled and graded, in seconds since the first request of the batch.

    A group of episodes has the times of its `episodes` instead of a time of grading.
    """
    timed = [(place, group, group.times) for place, group in enumerate(batch.all_groups) if group.times is not None]
    first = min((times.sampling[0] for _, _, times in timed), default=0.0)

    def since_first(span: Span) -> list[float]:
        return [round(moment - first, 4) for moment in span]

    return [
        {
            "step": batch.step,
            "group": place,
            "item": group.index,
            "sampling": since_first(times.sampling),
            "grading": None if times.grading is None else since_first(times.grading),
            "episodes": [since_first(span) for span in times.episodes],
        }
        for place, group, times in timed
    ]


def rollout_rows(batch: RolloutBatch, update: PolicyUpdate, tokenizer: Any) -> list[dict[str, Any]]:
    """One row per rollout for the log, and one per group that could not be sampled."""
    advantages = {id(one.rollout): one.advantage for one in update.counted}
    trained = {id(one.rollout): one for one in update.trained}
    rows: list[dict[str, Any]] = []
    for place, group in enumerate(batch.all_groups):
        # "sample" is the item as text: the run folders of all versions have it under this name.
        shared = {"step": batch.step, "group": place, "item": group.index, "sample": str(group.item)}
        if group.error is not None:
            rows.append({**shared, "error": group.error})
            continue
        shared["prompt"] = tokenizer.decode(group.prompt)
        rows += [
            {
                **shared,
                **rollout_row(rollout),
                "advantage": advantages.get(id(rollout)),
                "used": id(rollout) in trained,
                **_token_columns(trained.get(id(rollout))),
            }
            for rollout in group.rollouts
        ]
    return rows


def _token_columns(trained: TrainedRollout | None) -> dict[str, list[float]]:
    """Per token: the advantage (6 places) where it differs from the rollout's own, and the entropy in nats (4)."""
    columns: dict[str, list[float]] = {}
    if trained is None:
        return columns
    if not (trained.advantages_T == trained.advantage).all():
        columns["token_advantages"] = np.round(trained.advantages_T, 6).tolist()
    if trained.entropies_T is not None:
        columns["entropies"] = np.round(trained.entropies_T.astype(np.float64), 4).tolist()
    return columns


def rollout_row(rollout: Rollout) -> dict[str, Any]:
    """A rollout for JSON."""
    return {
        "text": rollout.text,
        "tokens": rollout.tokens,
        "logprobs": rollout.logprobs,
        "stop_reason": rollout.stop_reason,
        "truncated": rollout.truncated,
        "reward": rollout.reward,
        "parts": dict(rollout.parts),
        "error": rollout.error,
        "unsupported": rollout.unsupported,
        "timed_out": rollout.timed_out,
        "turns": len(rollout.turns),
        "turn_lengths": [len(turn.tokens) for turn in rollout.turns],
        **({"turn_rewards": list(rollout.turn_rewards)} if rollout.turn_rewards else {}),
        "tool_calls": rollout.tool_calls,
        "trace": [dict(entry) for entry in rollout.trace],
        "info": dict(rollout.info),
        "policy_step": rollout.policy_step,
        **({"policy_steps": rollout.policy_steps} if len(set(rollout.policy_steps)) > 1 else {}),
    }
