"""Each algorithm of docs/rl.md on the case that it is for, beside the default, on the bundled model.

    python -m benchmarks.learning.algorithms [CASE …] [--arm NAME …] [--first-seed N] [--seeds N] [--steps N]

stale      sampling weights that are 4 steps old, at 4/3 of the learning rate of the math demo
older      sampling weights that are 8 steps old; one arm takes the samples for those of the newest weights
dual       ppo with sampling weights that are 8 steps old, at 4/3 of the learning rate of the math demo
ahead      rewards that take 2 s: in turns with training, and at most 1 and 3 steps ahead of it
overlong   a reward that grows with the length, and a limit that cuts answers off
entropy    math at a learning rate that collapses the entropy
rare       an answer that the model gives in about one of 100 completions, and items that come back
rarer      32 samples a step, of which one in 500 succeeds, and 16 items
tempting   half the reward for an answer that half of the completions give, all of it for one in 500
seldom     one item in eight can be solved, so that most groups have no signal
early      batches of 8 samples, of which one in 500 earns 1 and the others at most 0.45: the policy settles early
epochs     as many samples, trained on up to four times
updates    a word that one in 23 replies has, and 16 small optimizer steps on each batch
mixture    a mixture of experts, and each batch trained on four times
quantized  a mixture of experts that samples on a base in NF4, and is trained on the base in float32
pairs      groups of 2, of which most are all right or all wrong
ragged     groups of 4 whose grader fails on two of three completions
penalized  groups of 2 with a KL penalty, which must be weighed against the reward
scaled     a right answer earns 0.1, beside a KL penalty
schedules  a KL penalty that holds the policy where it began
lengths    a grader that reads the first six words alone, so that a reply may be of any length
turns      episodes of two replies: chance pays for the first, and the second earns less
rounds     episodes of five replies: chance pays for the first, and each of the others earns less
unlikely   functions of one line, sampled at temperature 2, where unlikely tokens break them
tail       sampling at temperature 1.5, with and without top_p

All arms of a case see the same items and seeds. An arm's interval is that of the held-out answers of all its seeds.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.learning.algorithm_tasks import (
    Counting,
    LeadingZero,
    ManyRounds,
    OneTurnMatters,
    Ragged,
    Rare,
    Rarer,
    Seldom,
    SlowMath,
    Tempting,
    belonging,
    functions,
    math,
    opening,
    small_opening,
)
from benchmarks.learning.mixture_base import write_mixture
from benchmarks.learning.quantized_sampler import quantized_sampling
from mint.recipes.math import DEMO
from mint.rl import Group, MessageEnvAdapter, RLAdapter, RLConfig, run_grpo
from mint.rl.estimate import interval


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
    """The task, the settings of all arms over those of the math demo, the arms, and what a row shows besides.

    `mixture`: the base is a mixture of experts (`mixture_base`). `sampled_on`: the base that samples is quantized so,
    and the base that is trained is not.
    """

    task: Callable[[int], RLAdapter | MessageEnvAdapter]
    settings: dict[str, Any]
    arms: dict[str, dict[str, Any]]
    shown: tuple[str, ...]
    mixture: bool = False
    sampled_on: str | None = None


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
    "dual": Case(
        math,
        {"max_staleness": 8, "staleness": "exactly", "learning_rate": 4e-3, "loss_fn": "ppo"},
        {"ppo": {}, "dual clip": {"loss_fn_config": {"dual_clip": 3.0}}},
        ("train/kl_k2",),
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
    "early": Case(
        LeadingZero,
        {"batch_size": 2, "group_size": 4, "max_tokens": 1, "learning_rate": 8e-3, "heldout_samples": 8},
        {"none": {}, "0.1": {"loss_fn_config": {"entropy_coef": 0.1}}},
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
            "four times, cispo without a lower bound": {
                "epochs_per_batch": 4,
                "loss_fn": "cispo",
                "loss_fn_config": {"clip_low_threshold": 0.0},
            },
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
    "updates": Case(
        belonging,
        {"optim_steps_per_batch": 16, "learning_rate": 2e-3, "max_tokens": 24, "heldout_size": 128},
        {
            "ppo": {"loss_fn": "ppo"},
            "cispo": {"loss_fn": "cispo", "loss_fn_config": {"clip_low_threshold": 0.0}},
        },
        ("train/ratio_max", "train/tokens_clipped"),
    ),
    "mixture": Case(
        math,
        {"epochs_per_batch": 4},
        {
            "importance_sampling": {},
            "ppo": {"loss_fn": "ppo"},
            "gspo": {"loss_fn": "gspo", "loss_fn_config": {"clip_low_threshold": 0.8, "clip_high_threshold": 1.2}},
        },
        ("train/ratio_max",),
        mixture=True,
    ),
    "quantized": Case(
        math,
        {},
        {
            "uncorrected": {"loss_fn": uncorrected},
            "importance_sampling": {},
            "TIS": {"loss_fn_config": {"tis_cap": 2.0}},
            "IcePop": {"correction": "token_mask", "correction_high": 5.0},
            "MIS": {"correction": "sequence_mask"},
        },
        ("train/kl_k2", "correction/masked_share"),
        mixture=True,
        sampled_on="nf4",
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
    "penalized": Case(
        opening,
        {"group_size": 2, "batch_size": 32, "kl_penalty_coef": 0.3, "max_tokens": 16, "heldout_size": 174},
        {
            "center": {},
            "RLOO": {"advantage": "rloo"},
            "center, groups of 16": {"group_size": 16, "batch_size": 4},
        },
        ("kl/policy_reference_k3",),
    ),
    "scaled": Case(
        small_opening,
        {"kl_penalty_coef": 0.1, "max_tokens": 16, "heldout_size": 174},
        {"center": {}, "REINFORCE++-baseline": {"advantage": "reinforce++"}},
        ("kl/policy_reference_k3",),
    ),
    "schedules": Case(
        opening,
        {"kl_penalty_coef": 1.0, "max_tokens": 16, "heldout_size": 174},
        {
            "constant": {},
            "to 0": {"kl_penalty_coef_end": 0.0},
            "renewed every 5": {"kl_reference_every": 5},
        },
        ("kl/policy_reference_k3",),
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
    "rounds": Case(
        ManyRounds,
        {"batch_size": 8, "max_tokens": 16, "max_turns": 5, "heldout_size": 64},
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
    "unlikely": Case(
        functions,
        {"temperature": 2.0, "max_tokens": 40, "batch_size": 8, "heldout_size": 128},
        {
            "all tokens": {},
            "top_p 0.9, raw": {"top_p": 0.9},
            "top_p 0.9, processed": {"top_p": 0.9, "logprobs_mode": "processed"},
            "ppo, top_p 0.9, raw": {"loss_fn": "ppo", "top_p": 0.9},
            "ppo, top_p 0.9, processed": {"loss_fn": "ppo", "top_p": 0.9, "logprobs_mode": "processed"},
        },
        ("train/ratio", "train/tokens_clipped"),
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
        if case.mixture:
            config = config.changed(base_model=str(write_mixture(Path(folder) / "mixture")))
        cpu = time.process_time()
        base = Path(config.base_model)
        with nullcontext() if case.sampled_on is None else quantized_sampling(base, case.sampled_on) as service:
            result = run_grpo(case.task(seed), config, service_client=service)
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
