"""Held-out evaluation: the items that are never trained on, how well a policy does on them, and when a run asks.

Completions are sampled greedily and at temperature 1; each is graded alone, also where training compares groups.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any

from mint.client.sampling_client import SamplingClient
from mint.client.service_client import ServiceClient
from mint.errors import InvalidRequestError, RequestFailedError
from mint.rl.adapter import Task
from mint.rl.call_pool import CallPool
from mint.rl.config import RLConfig
from mint.rl.estimate import Estimate, estimate
from mint.rl.rollout import Rollout
from mint.rl.rollouts.completions import collect_groups
from mint.rl.seeds import mix_seed
from mint.rl.tracking.step_log import rollout_row
from mint.rl.training_run import TrainingRun

EVALUATION_TEMPERATURES = (0.0, 1.0)
GREEDY, SAMPLED = EVALUATION_TEMPERATURES
EXAMPLES = 16
EVALUATION_STREAM = 0x45564C


def content_hash(task: Task, sample: Any) -> str:
    """What tells held-out samples from training samples: 128 bits of SHA-256 over `task.sample_key(sample)`."""
    return hashlib.sha256(task.sample_key(sample).encode()).hexdigest()[:32]


def without_heldout(task: Task, dataset: Sequence[Any], heldout: Sequence[Any]) -> tuple[list[Any], int]:
    """The training samples that are not in the held-out set, by content, and how many were left out."""
    closed = {content_hash(task, sample) for sample in heldout}
    kept = [sample for sample in dataset if content_hash(task, sample) not in closed] if closed else list(dataset)
    return kept, len(dataset) - len(kept)


def evaluate(
    sampler: SamplingClient,
    task: Task,
    samples: Sequence[Any],
    *,
    config: RLConfig,
    temperature: float,
    calls: CallPool,
    tokenizer: Any,
    num_samples: int = 1,
) -> tuple[Estimate, list[Rollout]]:
    """`num_samples` completions per sample at `temperature` (0: greedy, always one), each judged alone.

    Returns the estimate and the first completion of each sample that could be sampled. The draws depend on the run's
    seed alone, so readings of different weights are paired.

    Raises:
        RequestFailedError: not one sample could be sampled; a reading of 0 would say something else.
    """
    count = 1 if temperature == 0 else num_samples
    groups = collect_groups(
        sampler,
        task,
        samples,
        range(len(samples)),
        config=config,
        tokenizer=tokenizer,
        calls=calls,
        num_samples=count,
        seeds=[mix_seed(config.seed, EVALUATION_STREAM, index) for index in range(len(samples))],
        temperature=temperature,
        alone=True,
    )
    if groups and all(group.error for group in groups):
        raise RequestFailedError(f"no held-out prompt could be sampled; the first said: {groups[0].error}")
    reading = estimate(task, groups, samples=count, temperature=temperature)
    return reading, [group.rollouts[0] for group in groups if group.rollouts]


def evaluate_checkpoint(
    checkpoint: str, task: Task, *, config: RLConfig, service: ServiceClient
) -> dict[float, Estimate]:
    """The held-out set of `task` under a checkpoint (`mint://…`) or a base model, greedily and at temperature 1.

    Raises:
        InvalidRequestError: the task has no held-out set.
    """
    heldout = list(task.build_heldout())[: config.heldout_size]
    if not heldout:
        raise InvalidRequestError(
            "has no held-out set", field="task", value=type(task).__name__, remedy="Give it a build_heldout()"
        )
    sampler = _sampler(checkpoint, service)
    calls = CallPool(timeout_s=config.grader_timeout_s)
    try:
        return {
            temperature: evaluate(
                sampler,
                task,
                heldout,
                config=config,
                temperature=temperature,
                calls=calls,
                tokenizer=sampler.get_tokenizer(),
                num_samples=config.heldout_samples,
            )[0]
            for temperature in EVALUATION_TEMPERATURES
        }
    finally:
        calls.close()


class HeldoutEvaluation:
    """Reads, logs and remembers. A reading that is in the log already is not made again."""

    def __init__(
        self, task: Task, heldout: Sequence[Any], *, run: TrainingRun, config: RLConfig, calls: CallPool
    ) -> None:
        """`heldout` empty: nothing is read."""
        self.task, self.heldout, self.config = task, heldout, config
        self.run, self.calls = run, calls
        self.tokenizer = run.trainer.get_tokenizer()
        self.rows: list[dict[str, Any]] = run.log.read("evaluations.jsonl")
        self.best_mean = -float("inf")
        self.best_checkpoint: str | None = None

    def to_dict(self) -> dict[str, Any]:
        """What a resumed run needs."""
        return {"best_mean": self.best_mean, "best_checkpoint": self.best_checkpoint}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Goes on from `to_dict`."""
        self.best_mean, self.best_checkpoint = float(state["best_mean"]), state["best_checkpoint"]

    def read(self, when: str, step: int) -> tuple[dict[float, Estimate], list[Rollout]]:
        """Greedily and at temperature 1: the estimates by temperature, and sampled examples.

        The weights of the best greedy reading are saved as `best`, where readings are scheduled.
        """
        known = {row["temperature"]: row for row in self.rows if row["when"] == when and row["step"] == step}
        if not self.heldout:
            return {}, []
        if len(known) == len(EVALUATION_TEMPERATURES):
            estimates = {temperature: Estimate.from_dict(row) for temperature, row in known.items()}
            return estimates, [_from_row(row) for row in known[SAMPLED]["examples"]]
        trainer = self.run.trainer
        sampler = trainer.save_weights_and_get_sampling_client(name=f"heldout-{when}-{step}")
        estimates, rows, rollouts = {}, [], []
        for temperature in EVALUATION_TEMPERATURES:
            estimates[temperature], rollouts = evaluate(
                sampler,
                self.task,
                self.heldout,
                config=self.config,
                temperature=temperature,
                calls=self.calls,
                tokenizer=self.tokenizer,
                num_samples=self.config.heldout_samples,
            )
            rows.append(
                {
                    "step": step,
                    "when": when,
                    "set": self.task.heldout_name,
                    **estimates[temperature].to_dict(),
                    "checkpoint": None,
                    "examples": [self._example(rollout) for rollout in rollouts[:EXAMPLES] if rollout.turns],
                }
            )
        if self.config.eval_every and estimates[GREEDY].mean > self.best_mean:
            self.best_mean = estimates[GREEDY].mean
            self.best_checkpoint = trainer.save_state(name="best", overwrite=True).result().path
            for row in rows:
                row["checkpoint"] = self.best_checkpoint
        self.rows += rows
        self.run.record_evaluations(rows)
        return estimates, rollouts[:EXAMPLES]

    def _example(self, rollout: Rollout) -> dict[str, Any]:
        return {"prompt": self.tokenizer.decode(rollout.turns[0].prompt), **rollout_row(rollout)}


def _from_row(row: Mapping[str, Any]) -> Rollout:
    """A logged example, as far as the log keeps it: its turns are one."""
    return Rollout(turns=[], text=row["text"], stop_reason=row["stop_reason"], reward=row["reward"], parts=row["parts"])


def _sampler(checkpoint: str, service: ServiceClient) -> SamplingClient:
    if not checkpoint.startswith("mint://") and not checkpoint.startswith("tinker://"):
        return service.create_sampling_client(base_model=checkpoint)
    if "/sampler_weights/" in checkpoint:
        return service.create_sampling_client(model_path=checkpoint)
    return service.create_training_client_from_state(checkpoint).save_weights_and_get_sampling_client(name="reading")
