"""`mint doctor`: samples a task with the untrained model and says whether RL can learn from it, and why.

Samples, grades and probes the grader; `task_verdict` decides what follows from the evidence.
"""

from __future__ import annotations

import heapq
import math
import statistics
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from mint.client.sampling_client import SamplingClient
from mint.client.service_client import ServiceClient
from mint.errors import InvalidRequestError, RequestFailedError
from mint.rl.adapter import MessageEnvAdapter, RLAdapter, Task, as_task
from mint.rl.analysis.planner import GROUP_SIZES, plan
from mint.rl.analysis.task_verdict import (
    LONGER,
    LONGEST_TOKENS,
    NOTABLE,
    SATURATED_FROM,
    TRUNCATED_LIMIT,
    TaskEvidence,
    TaskVerdict,
    decide,
)
from mint.rl.calls.call_pool import CallPool
from mint.rl.calls.own_thread import run_in_own_thread
from mint.rl.checkpoint_sampler import checkpoint_sampler
from mint.rl.config import RLConfig
from mint.rl.estimate import interval, reward_interval
from mint.rl.rollout import Group, GroupRequest, Rollout
from mint.rl.rollouts.grading import Grade, Grader
from mint.rl.rollouts.rollout_worker import RolloutWorker, open_calls
from mint.rl.seeds import mix_seed
from mint.sandbox import sandbox_level

DOCTOR_STREAM = 0x444F43
PROBES = ("", "?!")
PROBED_ITEMS = 8
LONGER_ITEMS = 32
"""The prompts whose completions with a longer limit are compared with those at `max_tokens`; those of which no
completion was cut off are not sampled again."""

FIXED_REPLIES = 16
FIXED_ITEMS = 16
"""The replies that earned most are graded on this many prompts each; the best of them is then graded on the others."""

GRADED_AGAIN = 256
"""At least as many completions are graded a second time, where there are as many."""

MISPLACED_REPLIES = 4
"""How many replies to other prompts are graded at each prompt."""

HISTOGRAM_BINS = 11


@dataclass(frozen=True)
class Examination:
    """The verdict with its reason, remedy and evidence; `notes` are further remarks.

    `sandbox` names the engines that run model-written code on this machine.
    """

    verdict: TaskVerdict
    reason: str
    remedy: str
    evidence: TaskEvidence
    sandbox: str
    notes: tuple[str, ...] = ()
    examples: tuple[Mapping[str, Any], ...] = ()

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
        fields = asdict(self)
        fields["evidence"]["informative"] = {str(size): share for size, share in self.evidence.informative.items()}
        return fields

    def lines(self) -> list[str]:
        """For people: the verdict first, then the evidence."""
        seen = self.evidence
        shares = "  ".join(f"{size}: {share:.0%}" for size, share in seen.informative.items())
        return [
            f"{self.verdict}: {self.reason}",
            f"do: {self.remedy}",
            f"success       {_with_interval(seen.success)} of {seen.prompts} prompts × {seen.samples} samples",
            f"mean reward   {_with_interval(seen.mean)}, from {seen.lowest:g} to {seen.highest:g}",
            f"pass rates    {' '.join(map(str, seen.pass_histogram))}  (prompts solved 0 %, 10 %, … 100 % of the time)",
            f"informative   {shares}  (expected share of groups with a signal, by group size)",
            f"cut off       {seen.truncated:.0%} at max_tokens {seen.max_tokens}, mean length {seen.mean_tokens:.1f}",
            f"ungraded      {seen.ungraded:.0%}, unsupported {seen.unsupported:.0%}, {seen.timeouts} time-outs",
            f"grading time  {seen.reward_seconds * 1e3:.2f} ms median, {seen.reward_seconds_max * 1e3:.1f} ms at most",
            f"sandbox       {self.sandbox}",
            *(f"note          {note}" for note in self.notes),
        ]


def examine(
    adapter: Any,
    config: RLConfig,
    *,
    service_client: ServiceClient | None = None,
    prompts: int = 64,
    samples: int = 8,
    seed: int = 0,
) -> Examination:
    """Samples `samples` completions of `prompts` training prompts with the starting weights, and decides.

    Raises:
        InvalidRequestError: the dataset is empty.
        RequestFailedError: no prompt could be sampled.
    """
    if service_client is None:
        with ServiceClient() as owned:
            return examine(adapter, config, service_client=owned, prompts=prompts, samples=samples, seed=seed)
    task = as_task(adapter)
    dataset = list(task.build_dataset())
    if not dataset:
        raise InvalidRequestError("is empty", field="build_dataset()", value=[], remedy="Return at least one item")
    items = np.random.default_rng([seed, DOCTOR_STREAM]).permutation(len(dataset))[:prompts].tolist()
    sampler = checkpoint_sampler(service_client, config.init_from or config.base_model)
    calls = open_calls(config)
    try:
        prober = _Prober(sampler, task, dataset, config, calls, seed)
        groups = prober.groups(items, samples)
        evidence = _evidence(prober, groups, samples)
    finally:
        calls.close()
    verdict, reason, remedy = decide(evidence)
    return Examination(
        verdict, reason, remedy, evidence, _sandbox(), _notes(task, dataset, evidence), _examples(groups)
    )


@dataclass(frozen=True)
class _Prober:
    """Samples and grades items of the task."""

    sampling_client: SamplingClient
    task: RLAdapter | MessageEnvAdapter
    dataset: Sequence[Any]
    config: RLConfig
    calls: CallPool
    seed: int

    def groups(self, indices: Sequence[int], completions: int, *, max_tokens: int | None = None) -> list[Group]:
        """Graded groups of these items; at least one could be sampled."""
        config = self.config if max_tokens is None else self.config.changed(max_tokens=max_tokens)
        tokenizer = self.sampling_client.get_tokenizer()
        worker = RolloutWorker(self.task, config=config, tokenizer=tokenizer, calls=self.calls)
        requests = [
            GroupRequest(self.dataset[index], index, config.sampling_params(mix_seed(self.seed, DOCTOR_STREAM, index)))
            for index in indices
        ]
        groups = worker.roll_out(self.sampling_client, requests, group_size=completions)
        # With a longer limit, the context may have no room for any prompt. That is an answer, not a failure.
        if max_tokens is None and all(group.error for group in groups):
            raise RequestFailedError(f"no prompt could be sampled; the first said: {groups[0].error}")
        return groups

    def grades(self, task: RLAdapter, pairs: Sequence[tuple[str, Any]]) -> list[Grade]:
        """The grades of (reply, item), in order, each by `compute_reward`."""
        return run_in_own_thread(Grader(task, self.calls).one_by_one(pairs))

    def compares(self, group: Group) -> bool:
        """Whether the task grades the completions of a group against each other."""
        if not isinstance(self.task, RLAdapter) or not self.has_one_turn(group):
            return False
        texts = [rollout.text for rollout in group.rollouts]
        return run_in_own_thread(Grader(self.task, self.calls).compares(texts, group.item))

    def has_one_turn(self, group: Group) -> bool:
        """Whether the group's completions can be graded again and elsewhere; those of episodes cannot."""
        return isinstance(self.task.task_of(group.item), RLAdapter)

    def is_success(self, reward: float | None, item: Any) -> bool:
        """Whether the reward counts as a success of this item."""
        return reward is not None and self.task.task_of(item).is_success(reward)

    def successes(self, group: Group) -> int:
        """How many of the group's graded rollouts are successes."""
        return sum(self.is_success(reward, group.item) for reward in group.rewards)


def _evidence(prober: _Prober, groups: Sequence[Group], samples: int) -> TaskEvidence:
    rollouts = [rollout for group in groups for rollout in group.rollouts]
    graded = [group for group in groups if group.graded]
    rewards = [reward for group in graded for reward in group.rewards]
    rates = [prober.successes(group) / len(group.rewards) for group in graded]
    cut = _share(rollout.truncated for rollout in rollouts)
    relative = any(map(prober.compares, groups[:1]))
    alone = [] if relative else [group for group in graded if prober.has_one_turn(group)]
    seconds, noisy = _grade_again(prober, alone)
    fixed_reply, fixed_reward = _best_fixed_reply(prober, alone)
    misplaced_reward, own_gain = _gain_at_own_prompt(prober, alone)
    enough_tokens, longest_tried = _enough_tokens(prober, groups, cut)
    return TaskEvidence(
        prompts=len(groups),
        samples=samples,
        success=interval(rates, proportion=True),
        mean=reward_interval(prober.task, [float(np.mean(group.rewards)) for group in graded]),
        lowest=min(rewards, default=0.0),
        highest=max(rewards, default=0.0),
        floor=prober.task.reward_range[0] if prober.task.reward_range else min([0.0, *rewards]),
        full=prober.task.success_reward,
        pass_histogram=tuple(np.bincount([round(10 * rate) for rate in rates], minlength=HISTOGRAM_BINS).tolist()),
        informative=_informative(prober, graded),
        group_size=prober.config.group_size,
        truncated=cut,
        enough_tokens=enough_tokens,
        longest_tried=longest_tried,
        longer_gain=(0.0, 0.0, 0.0) if enough_tokens is None else longer_gain(prober, graded, samples, enough_tokens),
        ungraded=_share(rollout.reward is None for rollout in rollouts),
        unsupported=_share(rollout.unsupported for rollout in rollouts),
        timeouts=sum(rollout.timed_out for rollout in rollouts),
        first_error=next((rollout.error for rollout in rollouts if rollout.error is not None), None),
        junk_accepted=_junk_accepted(prober, alone),
        noisy=noisy,
        fixed_reply=fixed_reply,
        fixed_reward=fixed_reward,
        misplaced_reward=misplaced_reward,
        own_gain=own_gain,
        relative=relative,
        reward_seconds=statistics.median(seconds) if seconds else 0.0,
        reward_seconds_max=max(seconds, default=0.0),
        mean_tokens=float(np.mean([len(rollout.tokens) for rollout in rollouts])),
        max_tokens=prober.config.max_tokens,
    )


def _informative(prober: _Prober, graded: Sequence[Group]) -> dict[int, float]:
    """By group size. Rewards with more than two values are unequal more often than two kinds (unbiased up to n)."""
    if not graded:
        return dict.fromkeys(GROUP_SIZES, 0.0)
    counts = _two_kinds(prober, graded)
    planned = plan(counts, mean_tokens=1.0, batch_size=prober.config.batch_size).options
    shares = {option.group_size: option.informative for option in planned}
    if len({reward for group in graded for reward in group.rewards}) > 2:
        best = 0.0
        for size in shares:
            seen = [_unequal(group.rewards, size) for group in graded if len(group.rewards) >= size]
            best = max(best, float(np.mean(seen)) if seen else 0.0)
            shares[size] = max(shares[size], best)
    return shares


def _two_kinds(prober: _Prober, graded: Sequence[Group]) -> list[tuple[int, int]]:
    """(higher rewards, rewards) of each group: successes, or rewards above the middle if all or none are successes."""
    rewards = [reward for group in graded for reward in group.rewards]
    successes = [(prober.successes(group), len(group.rewards)) for group in graded]
    if 0 < sum(count for count, _ in successes) < len(rewards):
        return successes
    middle = (min(rewards) + max(rewards)) / 2
    return [(sum(reward > middle for reward in group.rewards), len(group.rewards)) for group in graded]


def _unequal(rewards: Sequence[float], size: int) -> float:
    """P(`size` of these rewards, drawn without replacement, are not all equal)."""
    return 1.0 - sum(math.comb(many, size) for many in Counter(rewards).values()) / math.comb(len(rewards), size)


def _enough_tokens(prober: _Prober, groups: Sequence[Group], cut: float) -> tuple[int | None, int]:
    """The smallest limit tried that halves the share `cut` of truncated completions (None: none), and the largest."""
    limit = prober.config.max_tokens
    if cut <= TRUNCATED_LIMIT:
        return None, limit
    indices = [group.index for group in groups if any(rollout.truncated for rollout in group.rollouts)][:PROBED_ITEMS]
    while limit < LONGEST_TOKENS:
        longer = prober.groups(indices, 2, max_tokens=LONGER * limit)
        rollouts = [rollout for group in longer for rollout in group.rollouts]
        if not rollouts:  # the model's context has no room for more
            break
        limit *= LONGER
        if _share(rollout.truncated for rollout in rollouts) <= cut / 2:
            return limit, limit
    return None, limit


def longer_gain(
    prober: _Prober, groups: Sequence[Group], samples: int, enough_tokens: int
) -> tuple[float, float, float]:
    """By how much the rewards of the same prompts rise with a longer limit, with the interval over prompts."""
    compared = groups[:LONGER_ITEMS]
    cut = {group.index: group.rewards for group in compared if any(one.truncated for one in group.rollouts)}
    longer = [group for group in prober.groups(list(cut), samples, max_tokens=enough_tokens) if group.graded]
    gains = [float(np.mean(group.rewards) - np.mean(cut[group.index])) for group in longer]
    return interval([*gains, *[0.0] * (len(compared) - len(cut))])


def _grade_again(prober: _Prober, groups: Sequence[Group]) -> tuple[list[float], float]:
    """Seconds per grading, and how much rewards change, as a share of how much those of different completions differ;
    none for episodes."""
    task = prober.task
    if not isinstance(task, RLAdapter):
        return [], 0.0
    for_each_group = math.ceil(GRADED_AGAIN / len(groups)) if groups else 0
    firsts: list[tuple[Group, Rollout]] = [
        (group, rollout) for group in groups for rollout in group.graded[:for_each_group]
    ]
    again = prober.grades(task, [(rollout.text, group.item) for group, rollout in firsts])
    pairs = [
        (rollout.reward, grade.reward)
        for (_, rollout), grade in zip(firsts, again, strict=True)
        if rollout.reward is not None and grade.reward is not None
    ]
    changed = float(np.mean([abs(first - second) for first, second in pairs])) if pairs else 0.0
    differ = _mean_difference([reward for group in groups for reward in group.rewards])
    noisy = min(1.0, changed / differ) if differ else float(changed > 0)
    return [grade.seconds for grade in again], noisy


def _mean_difference(values: Sequence[float]) -> float:
    """The mean absolute difference of two of these values (Gini)."""
    ordered = np.sort(np.asarray(values, dtype=np.float64))
    n = len(ordered)
    return float(2 * ((2 * np.arange(1, n + 1) - n - 1) * ordered).sum() / (n * (n - 1))) if n > 1 else 0.0


def _junk_accepted(prober: _Prober, groups: Sequence[Group]) -> float:
    task = prober.task
    if not isinstance(task, RLAdapter):
        return 0.0
    pairs = [(probe, group.item) for group in groups[:PROBED_ITEMS] for probe in PROBES]
    grades = prober.grades(task, pairs)
    return _share(prober.is_success(grade.reward, item) for grade, (_, item) in zip(grades, pairs, strict=True))


def _best_fixed_reply(prober: _Prober, groups: Sequence[Group]) -> tuple[str, tuple[float, float, float]]:
    """The reply that pays best when it answers every prompt, and its mean reward with the 95 % interval.

    It is chosen on some prompts, among the replies to them, and graded on the others: the best of several estimates is
    biased upwards.
    """
    task = prober.task
    count = min(FIXED_ITEMS, len(groups) // 2)
    chosen, others = groups[:count], groups[count:]
    if not isinstance(task, RLAdapter) or not chosen:
        return "", (0.0, 0.0, 0.0)
    lowest = min(reward for group in groups for reward in group.rewards)
    paid: defaultdict[str, float] = defaultdict(float)
    for group in chosen:
        for each in group.graded:
            paid[each.text] += (each.reward or 0.0) - lowest
    replies = heapq.nlargest(FIXED_REPLIES, paid, key=paid.__getitem__)
    earned = {reply: _earned(prober, task, reply, chosen)[0] for reply in replies}
    best = max(earned, key=earned.__getitem__)
    return best, _earned(prober, task, best, others)


def _earned(prober: _Prober, task: RLAdapter, reply: str, groups: Sequence[Group]) -> tuple[float, float, float]:
    """The mean reward of one reply to all these prompts, with its interval."""
    grades = prober.grades(task, [(reply, group.item) for group in groups])
    return reward_interval(task, [grade.reward or 0.0 for grade in grades])


def _gain_at_own_prompt(prober: _Prober, groups: Sequence[Group]) -> tuple[float, tuple[float, float, float] | None]:
    """The mean reward of replies to other prompts, and what replies to the prompt itself earn more, with the interval
    over prompts; None where there are no other prompts, and for episodes."""
    task = prober.task
    if not isinstance(task, RLAdapter):
        return 0.0, None
    keys = [task.item_key(group.item) for group in groups]
    pairs = [
        (place, groups[other].graded[0].text)
        for place in range(len(groups))
        for other in ((place + 1 + step) % len(groups) for step in range(MISPLACED_REPLIES))
        if keys[other] != keys[place]
    ]
    grades = prober.grades(task, [(reply, groups[place].item) for place, reply in pairs])
    earned: defaultdict[int, list[float]] = defaultdict(list)
    for (place, _), grade in zip(pairs, grades, strict=True):
        if grade.reward is not None:
            earned[place].append(grade.reward)
    if not earned:
        return 0.0, None
    gains = [float(np.mean(groups[place].rewards) - np.mean(rewards)) for place, rewards in earned.items()]
    return float(np.mean([np.mean(rewards) for rewards in earned.values()])), interval(gains)


def _sandbox() -> str:
    level = sandbox_level()
    missing = [f"no {engine} ({reason})" for engine, reason in level.missing.items()]
    return ", ".join([*level.engines, *missing])


def _notes(task: Task, dataset: Sequence[Any], seen: TaskEvidence) -> tuple[str, ...]:
    chosen = seen.informative.get(seen.group_size)
    better = seen.better_size
    notes = {
        f"no reward reached success_reward, {seen.full:g}; the highest was {seen.highest:g}. If that is the reward of "
        f"a solved item, set success_reward to {seen.highest:g} in the task": seen.never_full,
        "there is no held-out set, so nothing can be measured": not task.build_heldout(),
        f"only {len(dataset)} training items": len(dataset) < seen.group_size * 4,
        f"group_size {seen.group_size} is expected to give a signal in only {chosen or 0:.0%} of the groups"
        + ("" if better is None else f"; {better} gives {seen.informative[better]:.0%}"): (
            chosen is not None and chosen < 0.5
        ),
        f"{seen.truncated:.0%} of the completions are cut off": seen.truncated > 0.05,
        f"{seen.ungraded:.0%} of the completions were not graded ({seen.first_error})": seen.ungraded > 0,
        f"graded again, rewards change by {seen.noisy:.0%} of what those of different completions differ by": (
            seen.noisy > 0
        ),
        f"{seen.junk_accepted:.0%} of empty and senseless replies got the full reward": seen.junk_accepted > 0,
        f"{seen.fixed_reply!r} as the reply to every prompt earns {seen.fixed_reward[0]:.2f}": (
            seen.fixed_share > NOTABLE and seen.success[0] < SATURATED_FROM
        ),
        f"grading takes {seen.reward_seconds:.1f} s per completion and will limit the speed": seen.reward_seconds > 1,
    }
    return tuple(note for note, holds in notes.items() if holds)


def _examples(groups: Sequence[Group]) -> tuple[Mapping[str, Any], ...]:
    pairs = [(group, rollout) for group in groups[:3] for rollout in group.rollouts[:1]]
    return tuple(
        {"sample": str(group.item), "text": each.text, "reward": each.reward, "error": each.error}
        for group, each in pairs
    )


def _share(flags: Any) -> float:
    values = list(flags)
    return sum(map(bool, values)) / len(values) if values else 0.0


def _with_interval(estimate: tuple[float, float, float]) -> str:
    mean, low, high = estimate
    return f"{mean:.3f} ({low:.3f} to {high:.3f})"
