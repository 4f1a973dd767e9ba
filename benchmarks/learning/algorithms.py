"""Each algorithm of docs/rl.md on the case that it is for, beside the default, on the bundled model.

    python -m benchmarks.learning.algorithms [CASE …] [--arm NAME …] [--first-seed N] [--seeds N] [--steps N]

stale      sampling weights that are 4 steps old, at 4/3 of the learning rate of the math demo
older      sampling weights that are 8 steps old; one arm takes the samples for those of the newest weights
ahead      rewards that take 2 s: in turns with training, and at most 1 and 3 steps ahead of it
overlong   a reward that grows with the length, and a limit that cuts answers off
entropy    math at a learning rate that collapses the entropy
rare       an answer that the model gives in about one of 100 completions, and items that come back
rarer      32 samples a step, of which one in 500 succeeds, and 16 items
tempting   half the reward for an answer that half of the completions give, all of it for one in 500
seldom     one item in eight can be solved, so that most groups have no signal
epochs     as many samples, trained on up to four times
pairs      groups of 2, of which most are all right or all wrong
ragged     groups of 4 whose grader fails on two of three completions
lengths    a grader that reads the first six words alone, so that a reply may be of any length
turns      episodes of two replies: chance pays for the first, and the second earns less
tail       sampling at temperature 1.5, with and without top_p

All arms of a case see the same items and seeds. An arm's interval is that of the held-out answers of all its seeds.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import re
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from mint.recipes.chat import ChatAdapter
from mint.recipes.datasets.chat_questions import ChatQuestion, fitting, words_of
from mint.recipes.math import DEMO, MathAdapter
from mint.rl import Group, MessageEnvAdapter, Reward, RLAdapter, RLConfig, run_grpo
from mint.rl.estimate import interval
from mint.rl.message_env import Message, MessageEnv, MessageStepResult


class Sums(RLAdapter):
    """The items and prompts of the math task."""

    def __init__(self, seed: int) -> None:
        self.math = MathAdapter(seed=seed)

    def build_dataset(self) -> Sequence[Any]:
        """The items of the math task."""
        return self.math.build_dataset()

    def build_heldout(self) -> Sequence[Any]:
        """Those of the math task."""
        return self.math.build_heldout()

    def make_prompt(self, item: Any, tokenizer: Any) -> list[int]:
        """The prompt of the math task."""
        return self.math.make_prompt(item, tokenizer)

    def close(self) -> None:
        """Ends the processes of the math task."""
        self.math.close()


class SlowMath(Sums):
    """The math task; a reward takes 2 s more."""

    async def compute_reward(self, response: str, item: Any) -> Reward | float:
        """The math reward after the wait."""
        await asyncio.sleep(2.0)
        return await asyncio.to_thread(self.math.compute_reward, response, item)


class Counting(Sums):
    """Pays for each digit, up to 24; the policy learns long answers, up to the limit."""

    def compute_reward(self, response: str, item: Any) -> float:
        """The share of 24 digits."""
        return min(24, len(re.findall(r"\d", response))) / 24


class Rare(Sums):
    """Pays for an answer that is ten too large, which the model gives in about one of 100; 32 items."""

    def build_dataset(self) -> Sequence[Any]:
        """The first 32 sums without a carry. They come back every second step."""
        return [item for item in self.math.build_dataset() if self._is_without_carry(item)][:32]

    def build_heldout(self) -> Sequence[Any]:
        """Others of that kind."""
        return [item for item in self.math.build_heldout() if self._is_without_carry(item)]

    def compute_reward(self, response: str, item: Any) -> float:
        """1 for the value and ten."""
        return float(response.strip() == str(item.value + 10))

    def _is_without_carry(self, item: Any) -> bool:
        return item.op == "+" and item.a % 10 + item.b % 10 < 10


class Seldom(Sums):
    """Seven of eight training items are never solved: the grader wants a number that the model cannot give."""

    def build_dataset(self) -> Sequence[Any]:
        """All items; `compute_reward` says which can be solved."""
        return [(place % 8 == 0, item) for place, item in enumerate(self.math.build_dataset())]

    def build_heldout(self) -> Sequence[Any]:
        """Items that can be solved."""
        return [(True, item) for item in self.math.build_heldout()]

    def make_prompt(self, item: Any, tokenizer: Any) -> list[int]:
        """The prompt of the math task."""
        return self.math.make_prompt(item[1], tokenizer)

    def item_key(self, item: Any) -> str:
        """The question."""
        return self.math.item_key(item[1])

    def compute_reward(self, response: str, item: Any) -> float:
        """1 for the right number, of an item that can be solved."""
        possible, problem = item
        return float(possible and response.strip() == problem.answer)


class Ragged(Sums):
    """The math task with a grader that fails on two of three completions; held-out items are always graded."""

    def __init__(self, seed: int) -> None:
        super().__init__(seed)
        self._drawn = random.Random(f"ragged {seed}")
        self._graded_always = {self.math.item_key(item) for item in self.build_heldout()}

    def compute_reward(self, response: str, item: Any) -> Reward | float:
        """The math reward, or an error."""
        if self.math.item_key(item) not in self._graded_always and self._drawn.random() < 2 / 3:
            raise TimeoutError("the judge is away")
        return self.math.compute_reward(response, item)


class Opening(ChatAdapter):
    """Pays for a reply that has the thing's trait among its first six words, whatever follows them."""

    def compute_reward(self, response: str, item: ChatQuestion) -> Reward:
        """0 or 1."""
        return Reward(float(item.thing.trait in words_of(response)[:6]))


class Lottery(MessageEnv):
    """Asks about a thing twice. The first reply earns `prize`, the second 1 if it has a word that fits the thing."""

    def __init__(self, asked: ChatQuestion, prize: float) -> None:
        self.asked = asked
        self.prize = prize
        self.turn = 0

    def initial_observation(self) -> Sequence[Message]:
        """The question."""
        return self.asked.messages

    def step(self, message: Message) -> MessageStepResult:
        """The prize and the question again, then what the second reply earns."""
        self.turn += 1
        if self.turn == 1:
            return MessageStepResult(self.prize, False, [self.asked.messages[-1]])
        return MessageStepResult(float(fitting(str(message["content"]), self.asked)))


class OneTurnMatters(MessageEnvAdapter):
    """Episodes of `Lottery`; without a prize where they are held out."""

    PRIZE = 4.0
    reward_range = (0.0, 1.0 + PRIZE)

    def __init__(self, seed: int) -> None:
        self.chat = ChatAdapter(seed=seed)
        self._drawn = random.Random(f"lottery {seed}")
        self._without = {self.chat.item_key(item) for item in self.build_heldout()}

    def build_dataset(self) -> Sequence[ChatQuestion]:
        """The questions of the chat task."""
        return self.chat.build_dataset()

    def build_heldout(self) -> Sequence[ChatQuestion]:
        """Its held-out questions."""
        return self.chat.build_heldout()

    def item_key(self, item: ChatQuestion) -> str:
        """The message."""
        return self.chat.item_key(item)

    def make_env(self, item: ChatQuestion) -> MessageEnv:
        """One episode."""
        wins = self.chat.item_key(item) not in self._without and self._drawn.random() < 0.5
        return Lottery(item, self.PRIZE if wins else 0.0)


class Rarer(Sums):
    """Pays for the difference and 20, which the model gives in about one of 500 completions at temperature 1.3."""

    def build_dataset(self) -> Sequence[Any]:
        """16 subtractions. Each comes back every second step of 8 items."""
        return [item for item in self.math.build_dataset() if is_subtraction(item)][:16]

    def build_heldout(self) -> Sequence[Any]:
        """Others of that kind."""
        return [item for item in self.math.build_heldout() if is_subtraction(item)]

    def compute_reward(self, response: str, item: Any) -> float:
        """1 for the value and 20."""
        return float(response.strip() == str(item.value + 20))


class Tempting(Rarer):
    """The same, and half the reward for the right difference, which half of the completions give."""

    def build_dataset(self) -> Sequence[Any]:
        """All subtractions."""
        return [item for item in self.math.build_dataset() if is_subtraction(item)]

    def compute_reward(self, response: str, item: Any) -> float:
        """0, a half, or 1."""
        return max(super().compute_reward(response, item), 0.5 * (response.strip() == item.answer))


def is_subtraction(item: Any) -> bool:
    """Whether the item is a subtraction whose result is at least 10."""
    return item.op == "-" and item.value >= 10


def uncorrected(logprobs: Any, sampled_logprobs: Any, advantages: Any, weights: Any) -> Any:
    """REINFORCE as if the newest weights had sampled: the ratio of the weights is left out."""
    return -(advantages * weights * logprobs)


def lengths(groups: Sequence[Group]) -> dict[str, float]:
    """Mean tokens of the completions that earned 0, and of those that earned 1; left out if there are none."""
    by_reward = {"wrong": 0.0, "right": 1.0}
    found = {
        name: [len(one.tokens) for group in groups for one in group.graded if one.reward == reward]
        for name, reward in by_reward.items()
    }
    return {f"{name}_tokens": float(np.mean(counts)) for name, counts in found.items() if counts}


@dataclass(frozen=True)
class Case:
    """The task, the settings of all arms over those of the math demo, the arms, and what a row shows besides."""

    task: Callable[[int], RLAdapter | MessageEnvAdapter]
    settings: dict[str, Any]
    arms: dict[str, dict[str, Any]]
    shown: tuple[str, ...]


def math(seed: int) -> RLAdapter:
    """The math task."""
    return MathAdapter(seed=seed)


def opening(seed: int) -> RLAdapter:
    """The chat task that reads the opening alone."""
    return Opening(seed=seed)


STALE = {"max_staleness": 4, "staleness": "exactly", "learning_rate": 4e-3}
CASES = {
    "stale": Case(
        math,
        STALE,
        {
            "on-policy": {"max_staleness": 0},
            "importance_sampling": {},
            "TIS": {"loss_fn_config": {"tis_cap": 2.0}},
            "MIS": {"correction": "sequence_mask"},
            "IcePop": {"correction": "token_mask", "correction_high": 5.0},
            "geometric mask": {"correction": "geometric_mask"},
            "ppo": {"loss_fn": "ppo"},
            "ppo, dual clip": {"loss_fn": "ppo", "loss_fn_config": {"dual_clip": 3.0}},
            "ppo, MIS": {"loss_fn": "ppo", "correction": "sequence_mask"},
            "cispo": {"loss_fn": "cispo"},
            "cispo, TIS": {"loss_fn": "cispo", "correction": "token_truncate"},
            "sapo": {"loss_fn": "sapo"},
        },
        ("train/kl_k2", "correction/masked_share"),
    ),
    "older": Case(
        math,
        {"max_staleness": 8, "staleness": "exactly"},
        {
            "uncorrected": {"loss_fn": uncorrected},
            "importance_sampling": {},
            "TIS": {"loss_fn_config": {"tis_cap": 2.0}},
            "MIS": {"correction": "sequence_mask"},
            "IcePop": {"correction": "token_mask", "correction_high": 5.0},
        },
        ("train/kl_k2", "correction/masked_share"),
    ),
    "ahead": Case(
        SlowMath,
        {},
        {
            "in turns": {},
            "at most 1": {"max_staleness": 1},
            "at most 3": {"max_staleness": 3},
            "at most 3, swapped every 4 tokens": {"max_staleness": 3, "swap_every": 4},
            "exactly 3": {"max_staleness": 3, "staleness": "exactly"},
        },
        ("staleness/mean", "staleness/max"),
    ),
    "overlong": Case(
        Counting,
        {"max_tokens": 16, "temperature": 2.0, "learning_rate": 6e-3},
        {
            "keep": {},
            "mask": {"truncation": "mask"},
            "penalize": {"truncation": "penalize", "truncation_penalty": 0.5},
            "soft": {"truncation": "soft", "truncation_penalty": 0.5, "overlong_buffer": 6},
        },
        ("rollouts/truncated_share", "rollouts/mean_length"),
    ),
    "entropy": Case(
        math,
        {"learning_rate": 9e-3},
        {
            "none": {},
            "0.01": {"loss_fn_config": {"entropy_coef": 0.01}},
            "0.1": {"loss_fn_config": {"entropy_coef": 0.1}},
            "KL 0.05": {"kl_penalty_coef": 0.05},
            "KL 0.05 to 0": {"kl_penalty_coef": 0.05, "kl_penalty_coef_end": 0.0},
            "KL 0.05, renewed every 5": {"kl_penalty_coef": 0.05, "kl_reference_every": 5},
        },
        ("rollouts/entropy_estimate", "kl/policy_reference_k3"),
    ),
    "rare": Case(
        Rare,
        {},
        {"none": {}, "replay": {"replay_size": 256}, "dynamic sampling": {"dynamic_sampling": True}},
        ("groups/used", "replay/used"),
    ),
    "rarer": Case(
        Rarer,
        {"group_size": 4, "batch_size": 8, "temperature": 1.3},
        {"none": {}, "replay": {"replay_size": 256, "loss_fn_config": {"tis_cap": 2.0}}},
        ("groups/used", "replay/used"),
    ),
    "tempting": Case(
        Tempting,
        {"temperature": 1.3},
        {
            "none": {},
            "0.05": {"loss_fn_config": {"entropy_coef": 0.05}},
            "0.15": {"loss_fn_config": {"entropy_coef": 0.15}},
            "0.3": {"loss_fn_config": {"entropy_coef": 0.3}},
            "0.6": {"loss_fn_config": {"entropy_coef": 0.6}},
        },
        ("rollouts/entropy_estimate",),
    ),
    "epochs": Case(
        math,
        {},
        {
            "once": {},
            "twice": {"epochs_per_batch": 2},
            "twice, ppo": {"epochs_per_batch": 2, "loss_fn": "ppo"},
            "four times": {"epochs_per_batch": 4},
            "four times, ppo": {"epochs_per_batch": 4, "loss_fn": "ppo"},
            "four times, cispo": {"epochs_per_batch": 4, "loss_fn": "cispo"},
            "four times, gspo": {"epochs_per_batch": 4, "loss_fn": "gspo"},
            "four times, gspo 0.8 to 1.2": {
                "epochs_per_batch": 4,
                "loss_fn": "gspo",
                "loss_fn_config": {"clip_low_threshold": 0.8, "clip_high_threshold": 1.2},
            },
            "four times, sapo": {"epochs_per_batch": 4, "loss_fn": "sapo"},
        },
        ("train/ratio_max",),
    ),
    "seldom": Case(
        Seldom,
        {"batch_size": 8, "group_size": 8},
        {
            "none": {},
            "dynamic sampling": {"dynamic_sampling": True, "max_refill": 7.0},
            "none, as many samples": {"batch_size": 64},
        },
        ("groups/used", "groups/total"),
    ),
    "ragged": Case(
        Ragged,
        {"batch_size": 32, "group_size": 4},
        {"center": {}, "RLOO": {"advantage": "rloo"}},
        ("rollouts/ungraded", "groups/used"),
    ),
    "lengths": Case(
        opening,
        {"max_tokens": 24, "metrics": (lengths,), "heldout_size": 64, "learning_rate": 1e-3},
        {
            "Dr. GRPO": {"loss_normalization": "constant"},
            "GRPO": {"advantage": "std", "loss_normalization": "sequence"},
            "sequence": {"loss_normalization": "sequence"},
            "token": {"loss_normalization": "token"},
        },
        ("custom/wrong_tokens", "custom/right_tokens"),
    ),
    "turns": Case(
        OneTurnMatters,
        {"batch_size": 8, "max_tokens": 20, "max_turns": 2, "heldout_size": 96},
        {"rollout": {}, "turn": {"credit": "turn"}},
        ("rollouts/mean_length",),
    ),
    "pairs": Case(
        math,
        {"group_size": 2, "batch_size": 32},
        {
            "center": {},
            "batch baseline": {"baseline": "batch"},
            "REINFORCE++": {"advantage": "reinforce++", "baseline": "batch"},
            "REINFORCE++-baseline": {"advantage": "reinforce++"},
        },
        ("datums",),
    ),
    "tail": Case(
        math,
        {"temperature": 1.5},
        {
            "all tokens": {},
            "top_p 0.9, raw": {"top_p": 0.9},
            "top_p 0.9, processed": {"top_p": 0.9, "logprobs_mode": "processed"},
        },
        ("train/ratio",),
    ),
}


@dataclass(frozen=True)
class Outcome:
    """Of one run: the rows of its steps, held-out rewards at temperature 1, and the time of its steps."""

    rows: list[dict[str, Any]]
    mean: float
    n: int
    seconds: float
    cpu_seconds: float


def run(case: Case, arm: dict[str, Any], seed: int, steps: int) -> Outcome:
    """One run of `steps` steps."""
    with tempfile.TemporaryDirectory() as folder:
        fields = {"steps": steps, "seed": seed, "batch_size": 16, "heldout_size": 256, "print_progress": False}
        config = DEMO.changed(**{**fields, **case.settings, **arm, "run_dir": Path(folder) / "run"})
        assert isinstance(config, RLConfig)
        cpu = time.process_time()
        result = run_grpo(case.task(seed), config)
        lines = (result.run_dir / "metrics.jsonl").read_text().splitlines()
        after = result.heldout_after[1.0]
        return Outcome(list(map(json.loads, lines)), after.mean, after.n, result.seconds, time.process_time() - cpu)


def compare(name: str, chosen: Sequence[str], seeds: Sequence[int], steps: int) -> None:
    """Prints a row per arm of a case: of those `chosen` that it has, or of all."""
    case = CASES[name]
    arms = {arm: fields for arm, fields in case.arms.items() if arm in chosen} or case.arms
    outcomes: dict[str, list[Outcome]] = {arm: [] for arm in arms}
    for seed in seeds:
        for arm, fields in arms.items():  # in turns, so that other load meets all arms alike
            outcomes[arm].append(run(case, fields, seed, steps))
            print(f"seed {seed}, {arm}: {outcomes[arm][-1].mean:.3f}", file=sys.stderr, flush=True)
    print(f"\n{name}: {steps} steps, seeds {' '.join(map(str, seeds))}, at most 256 held-out items each\n")
    print(
        "| arm | reward, all steps | last 10 steps | held-out at T=1 (95 %) | per seed | s/step | CPU s | "
        + " | ".join(case.shown)
        + " |"
    )
    print("|---" * (7 + len(case.shown)) + "|")
    for arm, runs in outcomes.items():
        total = sum(one.n for one in runs)
        values = [value for one in runs for value in _spread(one)]
        mean, low, high = interval(values, proportion=True)
        last = [row for one in runs for row in one.rows[-10:]]
        cells = [
            arm,
            f"{np.mean([row['reward/mean'] for one in runs for row in one.rows]):.3f}",
            f"{np.mean([row['reward/mean'] for row in last]):.3f}",
            f"{mean:.3f} ({low:.3f} to {high:.3f})" if total else "",
            " ".join(f"{one.mean:.3f}" for one in runs),
            f"{np.mean([one.seconds for one in runs]) / steps:.2f}",
            f"{np.mean([one.cpu_seconds for one in runs]):.0f}",
            *(_shown(key, runs) for key in case.shown),
        ]
        print(f"| {' | '.join(cells)} |", flush=True)


def _shown(key: str, runs: Sequence[Outcome]) -> str:
    """The mean of a metric in the last 10 steps of all runs, and of each run."""
    each = [float(np.mean([row.get(key, 0.0) for row in run.rows[-10:]])) for run in runs]
    return f"{np.mean(each):.4g}" + (f" ({' '.join(f'{value:.4g}' for value in each)})" if len(each) > 1 else "")


def _spread(outcome: Outcome) -> list[float]:
    """One 0 or 1 for each held-out item, with the mean of the run (of partial rewards: rounded to whole items)."""
    right = round(outcome.mean * outcome.n)
    return [1.0] * right + [0.0] * (outcome.n - right)


def main() -> None:
    """Runs the cases that were named; all of them if none was."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("case", nargs="*", choices=[[], *CASES], default=[], metavar="CASE")
    parser.add_argument("--arm", action="append", default=[], help="only this arm; may be given several times")
    parser.add_argument("--first-seed", type=int, default=0)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=40)
    options = parser.parse_args()
    for name in options.case or CASES:
        seeds = range(options.first_seed, options.first_seed + options.seeds)
        compare(name, options.arm, seeds, options.steps)


if __name__ == "__main__":
    main()
