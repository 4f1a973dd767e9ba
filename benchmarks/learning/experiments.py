"""Small experiments that decide a default, over the public SDK on mint/tiny; `benchmarks/LOG.md` keeps the results.

    python -m benchmarks.learning.experiments {temperature,estimator,noise,staleness,share,kl} [--seeds N] [--steps N]

temperature  what the sampler's logprobs mean at T other than 1: of the tempered distribution, trained at 1 (a), the
             policy's own (b, the default), tempered ones with the training logits divided by T, too (c)
estimator    centred, leave-one-out, divided by the group's or the batch's deviation
noise        a sampler whose logprobs are off by normal noise, with and without truncated importance sampling
staleness    sampling weights that lag 0, 1, 4, 8 steps behind
share        the learning rate as it is, or scaled by the share of groups that carried a signal
kl           no KL penalty, k1 in the advantage, k3 as a loss: what it costs in reward and holds in KL
All arms of an experiment see the same problems and the same sampling seeds.
"""

from __future__ import annotations

import argparse
import time
from collections import deque
from dataclasses import dataclass, field
from typing import Literal

import numpy as np

import mint
from mint.recipes.datasets.arithmetic import Problem, draw_problems
from mint.recipes.math import exact_match
from mint.rl.config import AdvantageName
from mint.rl.estimate import interval
from mint.rl.training.advantages import group_advantages
from mint.rl.training.datums import policy_datum
from mint.rl.training.kl_reference import kl_penalty
from mint.types import AdamParams, Datum, ModelInput, SampledSequence, SamplingParams

PROMPTS, GROUP, MAX_TOKENS, HELDOUT = 16, 8, 8, 512


@dataclass(frozen=True)
class Arm:
    """One way to train."""

    name: str
    loss: str = "importance_sampling"
    loss_config: dict[str, float] = field(default_factory=dict)
    temperature: float = 1.0
    logprobs_mode: Literal["raw", "processed"] = "raw"
    estimator: AdvantageName = "center"
    noise: float = 0.0
    lag: int = 0
    lr: float = 2e-3
    lr_by_share: bool = False
    kl: str = "none"
    kl_coef: float = 0.05


def temperature_arms(loss: str) -> list[Arm]:
    """a, b and c at T = 0.8."""
    return [
        Arm(f"{loss} a processed, trained at 1", loss, {}, 0.8, "processed"),
        Arm(f"{loss} b raw", loss, {}, 0.8),
        Arm(f"{loss} c processed, trained at T", loss, {"temperature": 0.8}, 0.8, "processed"),
    ]


EXPERIMENTS: dict[str, list[Arm]] = {
    "temperature": [*temperature_arms("importance_sampling"), *temperature_arms("ppo")],
    "estimator": [Arm(name, estimator=name) for name in ("center", "rloo", "std", "std_batch")],
    "noise": [
        Arm(f"sigma {sigma:g}, {name}", loss_config=config, noise=sigma)
        for sigma in (0.0, 0.02, 0.1, 0.5)
        for name, config in (("plain", {}), ("tis_cap 2", {"tis_cap": 2.0}))
    ],
    "staleness": [
        Arm(f"lag {lag}, {name}", loss_config=config, lag=lag)
        for lag in (0, 1, 4, 8)
        for name, config in (("plain", {}), ("tis_cap 2", {"tis_cap": 2.0}))
    ],
    "share": [Arm("constant lr"), Arm("lr x informative share", lr_by_share=True)],
    "kl": [Arm("none"), Arm("k1 in the advantage", kl="k1"), Arm("k3 as a loss", kl="k3")],
}


@dataclass(frozen=True)
class Outcome:
    """Training rewards per step, held-out success at temperature 1, mean |p - q|, and KL to the base at the end."""

    rewards: list[float]
    heldout: float
    gap: float
    kl: float


class Learner:
    """One run on the arithmetic questions."""

    def __init__(self, service: mint.ServiceClient, arm: Arm, seed: int) -> None:
        """Starts from the base."""
        self.arm, self.seed = arm, seed
        self.model = service.create_lora_training_client("mint/tiny", rank=16, seed=seed)
        self.base = service.create_sampling_client(base_model="mint/tiny")
        self.tokenizer = self.model.get_tokenizer()
        self.rng = np.random.default_rng(seed)

    def run(self, steps: int) -> Outcome:
        """`steps` steps, then the held-out questions."""
        problems = draw_problems(self.seed, steps * PROMPTS, heldout=False)
        samplers: deque[mint.SamplingClient] = deque(maxlen=self.arm.lag + 1)
        rewards, gaps, kls = [], [], []
        for step in range(steps):
            samplers.append(self.model.save_weights_and_get_sampling_client())
            asked = problems[step * PROMPTS : (step + 1) * PROMPTS]
            groups = self._sample(samplers[0], asked, GROUP, self.arm.temperature, 10_000 * self.seed + step * PROMPTS)
            scores = [
                [self._score(problem, one) for one in group] for problem, group in zip(asked, groups, strict=True)
            ]
            rewards.append(float(np.mean(scores)))
            data = self._datums(asked, groups, scores, kls)
            if data:
                share = sum(min(group) < max(group) for group in scores) / PROMPTS
                gaps.append(self._train(data, self.arm.lr * (share if self.arm.lr_by_share else 1.0)))
        heldout = draw_problems(self.seed, HELDOUT, heldout=True)
        sampler = self.model.save_weights_and_get_sampling_client()
        answers = self._sample(sampler, heldout, 1, 1.0, 5_000_000)
        right = sum(self._score(problem, group[0]) for problem, group in zip(heldout, answers, strict=True))
        return Outcome(rewards, right / HELDOUT, float(np.mean(gaps)), float(np.mean(kls[-5:])) if kls else 0.0)

    def _sample(
        self, sampler: mint.SamplingClient, problems: list[Problem], count: int, temperature: float, seed: int
    ) -> list[list[SampledSequence]]:
        futures = [
            sampler.sample(
                ModelInput.from_ints(self.tokenizer.encode(problem.question)),
                count,
                SamplingParams(
                    max_tokens=MAX_TOKENS,
                    temperature=temperature,
                    seed=seed + place,
                    logprobs_mode=self.arm.logprobs_mode,
                ),
            )
            for place, problem in enumerate(problems)
        ]
        return [future.result().sequences for future in futures]

    def _score(self, problem: Problem, sequence: SampledSequence) -> float:
        return float(exact_match(self.tokenizer.decode(sequence.tokens, skip_special_tokens=True), problem.answer))

    def _datums(
        self,
        asked: list[Problem],
        groups: list[list[SampledSequence]],
        scores: list[list[float]],
        kls: list[float],
    ) -> list[Datum]:
        chosen = []
        for problem, group, marks in zip(asked, groups, scores, strict=True):
            if self.arm.kl != "none" or min(marks) < max(marks):
                prompt = self.tokenizer.encode(problem.question)
                advantages = group_advantages(marks, self.arm.estimator, batch_std=float(np.std(scores, ddof=1)))
                chosen += [(prompt, *pair) for pair in zip(group, advantages.tolist(), strict=True)]
        pulls = self._pulls([(prompt, sequence) for prompt, sequence, _ in chosen], kls)
        return [
            policy_datum(
                prompt,
                sequence.tokens,
                logprobs_T=(np.asarray(sequence.logprobs) + self.rng.normal(0, self.arm.noise, len(pull))).tolist(),
                advantages_T=advantage - pull,
            )
            for (prompt, sequence, advantage), pull in zip(chosen, pulls, strict=True)
        ]

    def _pulls(self, chosen: list[tuple[list[int], SampledSequence]], kls: list[float]) -> list[np.ndarray]:
        """What the KL term takes from each token's advantage."""
        if self.arm.kl == "none":
            return [np.zeros(len(sequence.tokens)) for _, sequence in chosen]
        futures = [self.base.compute_logprobs(ModelInput.from_ints([*p, *sequence.tokens])) for p, sequence in chosen]
        pulls, ratios = [], []
        for (prompt, sequence), future in zip(chosen, futures, strict=True):
            base = np.asarray(future.result()[len(prompt) :], dtype=np.float64)
            own = np.asarray(sequence.logprobs, dtype=np.float64)
            ratios.append(base - own)
            # The gradient of k3 = r - 1 - log r with respect to the policy's logprob is 1 - r, r = base / policy.
            k3 = self.arm.kl_coef * -np.expm1(base - own)
            pulls.append(kl_penalty(own, base, self.arm.kl_coef) if self.arm.kl == "k1" else k3)
        joined = np.concatenate(ratios)
        kls.append(float((np.expm1(joined) - joined).mean()))
        return pulls

    def _train(self, data: list[Datum], lr: float) -> float:
        output = self.model.forward_backward(data, self.arm.loss, self.arm.loss_config)
        self.model.optim_step(AdamParams(learning_rate=lr)).result()
        return output.result().metrics["abs_logprob_diff:mean"]


def compare(name: str, seeds: int, steps: int) -> None:
    """Prints a row per arm; intervals are over all held-out answers of all seeds."""
    service = mint.ServiceClient()
    print(f"{name}: {PROMPTS} prompts x {GROUP}, {steps} steps, {seeds} seeds, {HELDOUT} held-out each")
    print("| arm | reward, all steps | last 10 | held-out at T=1 (95 %) | per seed | mean abs(p-q) | KL to base | s |")
    print("|---|---|---|---|---|---|---|---|")
    for arm in EXPERIMENTS[name]:
        started = time.perf_counter()
        runs = [Learner(service, arm, seed).run(steps) for seed in range(seeds)]
        right = sum(round(run.heldout * HELDOUT) for run in runs)
        mean, low, high = interval([1.0] * right + [0.0] * (seeds * HELDOUT - right), proportion=True)
        cells = [
            arm.name,
            f"{np.mean([run.rewards for run in runs]):.3f}",
            f"{np.mean([run.rewards[-10:] for run in runs]):.3f}",
            f"{mean:.3f} ({low:.3f} to {high:.3f})",
            " ".join(f"{run.heldout:.3f}" for run in runs),
            f"{np.mean([run.gap for run in runs]):.4f}",
            f"{np.mean([run.kl for run in runs]):.4f}",
            f"{time.perf_counter() - started:.0f}",
        ]
        print(f"| {' | '.join(cells)} |", flush=True)


def main() -> None:
    """Runs the experiment that was named."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("experiment", choices=list(EXPERIMENTS))
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=40)
    options = parser.parse_args()
    compare(options.experiment, options.seeds, options.steps)


if __name__ == "__main__":
    main()
