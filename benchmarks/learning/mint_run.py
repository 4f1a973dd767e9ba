"""mint's side of `against_trl`: one whole run of `run_grpo`, with a JSON line on stdout for each step.

Run as `python -m benchmarks.learning.mint_run SPEC.json`. The service is embedded in this process. The time of a step
includes everything that a run writes to disk: journal, snapshots, rollouts, metrics, checkpoints.
"""

from __future__ import annotations

import importlib.metadata
import json
import math
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TextIO

import mint
from benchmarks.learning.answer_rewards import REWARDS
from benchmarks.learning.published_model import CHAIN_SUM
from mint.recipes.math import MathAdapter
from mint.recipes.task_sources.reasoning_gym import ReasoningGymAdapter
from mint.rl import RLAdapter, RLConfig, run_grpo
from mint.rl.calls.call_pool import CallPool
from mint.rl.heldout_evaluation import evaluate
from mint.rl.rollouts.rollout_worker import RolloutWorker
from mint.runs.log import RunLog
from mint.types import ModelInput


class Watched(RLAdapter):
    """A task that says after each step what it earned and when it ended."""

    answers: TextIO
    samples = 0

    def evaluate(self, step: int, rewards: list[float], num_datums: int) -> None:
        """The last thing that a step does."""
        self.samples += len(rewards)
        self.cpu_ended_s = time.process_time()
        self.answer(event="step", at_s=time.monotonic(), reward=sum(rewards) / len(rewards), samples=self.samples)

    def answer(self, **fields: Any) -> None:
        """One JSON line to the parent."""
        self.answers.write(json.dumps(fields) + "\n")
        self.answers.flush()


class WatchedMath(Watched, MathAdapter):
    """The arithmetic task."""


class WatchedSums(Watched, ReasoningGymAdapter):
    """reasoning-gym's chain_sum."""


def make_task(spec: dict[str, Any]) -> Watched:
    """The spec's task."""
    if spec["task"] == "math":
        return WatchedMath(seed=spec["seed"])
    return WatchedSums("chain_sum", seed=spec["seed"], **CHAIN_SUM)


def run_config(spec: dict[str, Any]) -> RLConfig:
    """The settings that make the same step as TRL's: Dr. GRPO's constant, and no lora on the unembedding."""
    return RLConfig(
        base_model=spec["base_model"],
        seed=spec["seed"],
        steps=spec["steps"],
        batch_size=spec["prompts_per_step"],
        group_size=spec["group_size"],
        max_tokens=spec["max_tokens"],
        temperature=1.0,
        stop=None if spec["end_token_ids"] is None else [],
        stop_token_ids=spec["end_token_ids"],
        rank=spec["rank"],
        train_unembed=False,
        learning_rate=spec["learning_rate"],
        lr_schedule=spec["schedule"],
        loss_fn="importance_sampling",
        advantage="center",
        loss_normalization="constant",
        heldout_size=0,
        run_dir=Path(spec["work_dir"]) / "run",
    )


def check_rollouts(spec: dict[str, Any], run_dir: Path) -> None:
    """Raises RuntimeError unless the run asked the spec's prompts, in order, and graded as the spec's reward does."""
    rows = list(RunLog(run_dir).read("rollouts.jsonl"))
    asked = {(row["step"], row["group"]): row["prompt"] for row in rows}
    if [asked[key] for key in sorted(asked)] != spec["prompts"]:
        raise RuntimeError("the run asked other prompts than the spec has, or in another order")
    grade, solution = REWARDS[spec["reward"]], dict(zip(spec["prompts"], spec["solutions"], strict=True))
    for row in rows:
        if not math.isclose(row["reward"], grade(row["text"], solution[row["prompt"]]), abs_tol=1e-9):
            raise RuntimeError(
                f"the task gave {row['reward']} for {row['text']!r}, where TRL's side gives another reward"
            )


def heldout_rewards(sampler: Any, task: RLAdapter, items: Sequence[Any], config: RLConfig) -> dict[str, list[float]]:
    """The reward of each held-out question, answered greedily and by a sample at temperature 1."""
    calls, rewards = CallPool(timeout_s=config.grader_timeout_s), {}
    worker = RolloutWorker(task, config=config, tokenizer=sampler.get_tokenizer(), calls=calls)
    for name, temperature in (("heldout_greedy", 0.0), ("heldout_sampled", 1.0)):
        _, rollouts = evaluate(worker, sampler, items, temperature=temperature)
        rewards[name] = [rollout.reward or 0.0 for rollout in rollouts]
    calls.close()
    return rewards


def main() -> None:
    """Speaks JSON lines on the real stdout; whatever else is printed goes to stderr."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    spec = json.loads(Path(sys.argv[1]).read_text())
    task, config, service = make_task(spec), run_config(spec), mint.ServiceClient()
    task.answers = answers
    task.answer(event="ready")
    called_s, cpu_called_s = time.monotonic(), time.process_time()
    result = run_grpo(task, config, service_client=service)
    check_rollouts(spec, result.run_dir)
    base = service.create_sampling_client(base_model=config.base_model)
    probe = base.compute_logprobs(ModelInput.from_ints(spec["probe_tokens"])).result()
    effective = service.create_training_client_from_state(result.checkpoint).get_info().effective
    heldout = task.build_heldout()[: len(spec["heldout"])]
    task.answer(
        event="finished",
        first_step_at_s=called_s + result.seconds_setup,
        cpu_seconds=task.cpu_ended_s - cpu_called_s,
        tokens=result.tokens,
        probe_logprob=sum(logprob for logprob in probe if logprob is not None),
        trained_parameters=effective["trainable_parameters"],
        dtype=effective["dtype"],
        threads=effective["threads"],
        **heldout_rewards(service.create_sampling_client(model_path=result.sampler_checkpoint), task, heldout, config),
        versions={"mint": mint.__version__, "torch": importlib.metadata.version("torch")},
    )


if __name__ == "__main__":
    main()
