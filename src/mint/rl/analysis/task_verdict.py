"""Decides from the doctor's evidence whether a task is ready for RL, and what to do if not. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

TaskVerdict = Literal["go", "sft_first", "saturated", "reward_constant", "unlearnable", "truncated"]

UNGRADED_LIMIT = 0.5
TRUNCATED_LIMIT = 0.25
NOISE_LIMIT = 0.5
"""How much rewards change when graded again, as a share of how much those of different completions differ. Of a coin
that is 1. Of a grader that is wrong at random in a tenth of the cases it is 0.36, and the bundled model learned; of one
that is wrong in a fifth 0.64, and it did not (benchmarks/RESULTS.md). Measured on 256 completions, ± 0.12."""

JUNK_LIMIT = 0.5

NOTABLE = 0.1
"""A reward, or a gain, matters from this share of the range on; less is a lucky guess or a scrap of credit."""

SATURATED_FROM = 0.9
"""Mean success from which items teach little (ScaleRL, arXiv 2510.13786, retires items there)."""

SCRAPS_SUCCESS = 0.01
SCRAPS_REWARD = 0.1
"""If success and mean reward (as a share of the range) are below these, partial credit is mostly noise."""

LEAST_INFORMATIVE = 0.1
"""With a smaller share of informative groups at the largest group size, nearly all sampling is wasted. With 15 % and
with 22 %, the bundled model learned (benchmarks/RESULTS.md)."""

LONGER = 4
"""Truncated completions are sampled again with this many times `max_tokens`, and again, up to `LONGEST_TOKENS`."""

LONGEST_TOKENS = 1024

MORE_INFORMATIVE = 0.05
"""A larger group size is worth naming if it gives this share of informative groups more."""


@dataclass(frozen=True)
class TaskEvidence:
    """Shares are of all completions; `success` and `mean` are (mean, low, high), with 95 % intervals over prompts.

    `pass_histogram[i]` counts the prompts solved in about i · 10 % of their samples. `informative` is the expected
    share of groups with unequal rewards by group size. `floor` is the lowest possible reward, `full` that of a success.
    `enough_tokens` is the smallest `max_tokens` tried that halves the truncated share, None if none does, and
    `longest_tried` the largest one; `longer_gain` is what completions up to `enough_tokens` earn more than those up to
    `max_tokens`, over all prompts, with its interval. `junk_accepted` is the share of empty and senseless replies with
    full reward, `noisy` is how much rewards changed when graded again, as a share of how much those of different
    completions differ. `fixed_reward` is the mean reward of `fixed_reply` as the reply to other prompts than those on
    which it was chosen, with its interval. `misplaced_reward` is the mean
    reward of replies to other prompts, and `own_gain` what replies to the prompt itself earn more, with its interval;
    None if that was not tried. `relative`: rewards only compare within a group.
    """

    prompts: int
    samples: int
    success: tuple[float, float, float]
    mean: tuple[float, float, float]
    lowest: float
    highest: float
    floor: float
    full: float
    pass_histogram: tuple[int, ...]
    informative: Mapping[int, float]
    group_size: int
    truncated: float
    enough_tokens: int | None
    longest_tried: int
    longer_gain: tuple[float, float, float]
    ungraded: float
    unsupported: float
    timeouts: int
    first_error: str | None
    junk_accepted: float
    noisy: float
    fixed_reply: str
    fixed_reward: tuple[float, float, float]
    misplaced_reward: float
    own_gain: tuple[float, float, float] | None
    relative: bool
    reward_seconds: float
    reward_seconds_max: float
    mean_tokens: float
    max_tokens: int

    @property
    def only_scraps(self) -> bool:
        """Whether there is hardly any success and the mean reward is near its floor."""
        return not self.relative and self.success[0] < SCRAPS_SUCCESS and self._share(self.mean[0]) < SCRAPS_REWARD

    @property
    def never_full(self) -> bool:
        """Whether completions earned something, and none as much as a success."""
        return not self.relative and self.success[0] == 0 and self.highest > self.floor

    @property
    def fixed_share(self) -> float:
        """The reward of the best fixed reply, as a share of the range."""
        return self._share(self.fixed_reward[0])

    @property
    def fixed_reply_pays(self) -> bool:
        """Whether one reply to every prompt surely earns more than the model does.

        Where the model earns only scraps, but often enough to train on, any such reply counts: nothing else gives RL a
        direction. Where no completion earned anything, RL cannot find that reply.
        """
        if self.mean[0] <= self.floor:
            return False
        follows_scraps = self.only_scraps and max(self.informative.values()) >= LEAST_INFORMATIVE
        pays = self.fixed_share > NOTABLE or follows_scraps
        return pays and self.fixed_reward[1] > self.mean[2]

    @property
    def any_prompt_pays(self) -> bool:
        """Whether replies earn something, and not surely more at their own prompts than at others."""
        return self.own_gain is not None and self.own_gain[1] <= 0 and self._share(self.misplaced_reward) > NOTABLE

    @property
    def only_guesses(self) -> bool:
        """Whether the model earns little, and not surely more than replies to other prompts do: its successes are
        lucky, so that they show RL no way."""
        return self.own_gain is not None and self.own_gain[1] <= 0 and self._share(self.mean[0]) <= NOTABLE

    @property
    def longer_limit_pays(self) -> bool:
        """Whether completions with room for more tokens surely and notably earn more.

        RL learns to be brief where they earn little more (0.66 to 0.93 in a run with 12 tokens, benchmarks/RESULTS.md).
        """
        found = self.enough_tokens is not None and self.longer_gain[1] > 0
        return found and self._share(self.floor + self.longer_gain[0]) > NOTABLE

    @property
    def better_size(self) -> int | None:
        """The group size with the most informative groups, if that is noticeably more than at `group_size`."""
        size, share = max(self.informative.items(), key=lambda option: option[1])
        now = self.informative.get(self.group_size)
        return size if now is not None and share >= now + MORE_INFORMATIVE else None

    def _share(self, reward: float) -> float:
        return (reward - self.floor) / (self.full - self.floor) if self.full > self.floor else 1.0


def decide(seen: TaskEvidence) -> tuple[TaskVerdict, str, str]:
    """The verdict, the reason and the remedy. Defects of the grader are tested first."""
    success = seen.success[0]
    best_size, best = max(seen.informative.items(), key=lambda option: option[1])
    if seen.ungraded > UNGRADED_LIMIT:
        return (
            "unlearnable",
            f"{seen.ungraded:.0%} of the completions were not graded ({seen.first_error})",
            "Correct the grader; if replies can only be compared, use a pairwise judge or DPO (mint.recipes.dpo)",
        )
    if seen.noisy > NOISE_LIMIT:
        return (
            "unlearnable",
            f"graded again, the reward of a completion changed by {seen.noisy:.0%} of what rewards of different "
            "completions differ by",
            "Make the reward a function of the completion; if replies can only be compared, use preferences (DPO)",
        )
    if seen.junk_accepted > JUNK_LIMIT:
        return (
            "reward_constant",
            f"{seen.junk_accepted:.0%} of empty and senseless replies got the full reward",
            "Correct the grader: it accepts anything",
        )
    if seen.truncated > TRUNCATED_LIMIT and seen.longer_limit_pays:
        return (
            "truncated",
            f"{seen.truncated:.0%} of the completions were cut off at {seen.max_tokens} tokens, far fewer at "
            f"{seen.enough_tokens}, where they earn {seen.longer_gain[0]:.2f} more",
            f"Set max_tokens to {seen.enough_tokens} and examine again: rewards of truncated completions mislead",
        )
    # The lower bound: a task that is perhaps solved, and surely solved better by one reply, is not a solved task.
    if seen.fixed_reply_pays and seen.success[1] < SATURATED_FROM:
        return (
            "reward_constant",
            f"{seen.fixed_reply!r} as the reply to every prompt earns {seen.fixed_reward[0]:.2f}, the model earns "
            f"{seen.mean[0]:.2f}",
            "Correct the grader, or balance the prompts: RL would learn that reply instead of the task",
        )
    if seen.lowest == seen.highest and seen.floor < seen.highest and success < SATURATED_FROM:
        return (
            "reward_constant",
            f"every completion got the same reward, {seen.highest:g}",
            "Correct the grader, or let it distinguish better and worse replies",
        )
    if success >= SATURATED_FROM and not seen.relative:
        return (
            "saturated",
            f"the model succeeds in {success:.0%} of the cases already",
            "Take harder prompts, or a stricter reward",
        )
    if seen.any_prompt_pays and seen.own_gain is not None:
        return (
            "reward_constant",
            f"replies to other prompts earn {seen.misplaced_reward:.2f}, those to the prompt itself "
            f"{seen.own_gain[0]:+.2f} (95 %: {seen.own_gain[1]:+.2f} to {seen.own_gain[2]:+.2f})",
            "Correct the grader, or add a part of the reward that depends on the prompt: RL would learn one reply to "
            "every prompt, or nothing. If the model only guesses, fine-tune it on demonstrations first",
        )
    if best < LEAST_INFORMATIVE or seen.only_scraps or (seen.only_guesses and not seen.relative):
        return _no_signal(seen, best_size, best)
    smallest = next(size for size, share in seen.informative.items() if share >= min(0.5, best))
    earned = f"the model succeeds in {success:.0%} of the cases"
    if seen.never_full:
        earned = f"no completion succeeded, the mean reward is {seen.mean[0]:.2f}"
    return (
        "go",
        f"{earned}; groups of {smallest} carry a signal in {seen.informative[smallest]:.0%} of the cases",
        f"Train with group_size={smallest} or more",
    )


def _no_signal(seen: TaskEvidence, size: int, share: float) -> tuple[TaskVerdict, str, str]:
    if seen.relative:
        reason = f"the judge distinguishes the replies of a group in only {share:.0%} of groups of {size}"
        return "reward_constant", reason, "Sample at a higher temperature, or let the judge see finer differences"
    never = seen.success[0] == 0
    rest = f"of groups of {size} {f'only {share:.1%}' if share else 'none'} would carry a signal"
    if seen.only_scraps and seen.highest == seen.floor:
        rest = f"every one earned {seen.highest:g}, so there is no signal"
    elif seen.only_scraps:
        rest = f"the only signal is a little partial credit (mean reward {seen.mean[0]:.3f})"
    elif share >= LEAST_INFORMATIVE:
        rest = f"replies to other prompts earn {seen.misplaced_reward:.3f}, so that these successes may be lucky"
    if seen.truncated > TRUNCATED_LIMIT:
        rest += f"; {seen.truncated:.0%} of the completions were cut off at {seen.max_tokens} tokens, "
        if seen.enough_tokens is None:
            rest += f"and nearly as many at {seen.longest_tried}: the model does not end its replies"
        else:
            rest += f"far fewer at {seen.enough_tokens}, but these earn hardly more"
    return (
        "sft_first",
        f"none of {seen.prompts * seen.samples} completions succeeded (95 %: at most {seen.success[2]:.1%}): {rest}"
        if never
        else f"the model succeeds in {seen.success[0]:.1%} of the cases: {rest}",
        "Fine-tune on demonstrations first (mint.recipes.sft) and start RL from that checkpoint (init_from); if you "
        "have none, easier prompts, partial credit, or distillation from a stronger model. Check that the grader "
        "accepts a reply that is known to be right",
    )
