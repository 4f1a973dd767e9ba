"""Held-out evaluation: the items that are never trained on, how well a policy does on them, and when a run asks.

Completions are sampled greedily and at temperature 1. Each is graded alone, even where training compares groups.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from contextlib import closing
from typing import Any

from mint.client.sampling_client import SamplingClient
from mint.client.service_client import ServiceClient
from mint.errors import InvalidRequestError, RequestFailedError
from mint.rl.adapter import Task, as_task, task_name
from mint.rl.checkpoint_sampler import checkpoint_sampler
from mint.rl.config import RLConfig
from mint.rl.estimate import Estimate, estimate
from mint.rl.rollout import Group, GroupRequest, Rollout
from mint.rl.rollouts.rollout_worker import RolloutWorker, open_calls
from mint.rl.run_frame import RunFrame
from mint.rl.seeds import mix_seed
from mint.rl.tracking.step_log import rollout_row

EVALUATION_TEMPERATURES = (0.0, 1.0)
GREEDY, SAMPLED = EVALUATION_TEMPERATURES
EXAMPLES = 16
"""Completions that the log keeps of each evaluation."""

EVALUATION_STREAM = 0x45564C
"""Stands where training has the step, so that evaluations have seeds of their own: "EVL" in ASCII."""


def content_hash(task: Task, item: Any) -> str:
    """Identifies an item by its content: 128 bits of SHA-256 over `task.item_key(item)`, as hex."""
    return hashlib.sha256(task.item_key(item).encode()).hexdigest()[:32]


def without_heldout(task: Task, dataset: Sequence[Any], heldout: Sequence[Any]) -> tuple[list[Any], int]:
    """The training items whose content is not in the held-out set, and how many were left out."""
    excluded = {content_hash(task, item) for item in heldout}
    trained = [item for item in dataset if content_hash(task, item) not in excluded] if excluded else list(dataset)
    return trained, len(dataset) - len(trained)


def evaluate(
    worker: RolloutWorker,
    sampling_client: SamplingClient,
    items: Sequence[Any],
    *,
    temperature: float,
    completions: int = 1,
) -> tuple[Estimate, list[Rollout]]:
    """Samples `completions` per item at `temperature` (0 is greedy and always one), each graded alone.

    Returns the estimate and the first completion of each item that could be sampled. The draws depend on the run's
    seed alone, so evaluations of different weights are paired.

    Raises:
        RequestFailedError: not one item could be sampled.
    """
    count = 1 if temperature == 0 else completions
    groups = sample_heldout(worker, sampling_client, items, temperature=temperature, completions=count)
    estimated = estimate(worker.task, groups, completions=count, temperature=temperature)
    return estimated, [group.rollouts[0] for group in groups if group.rollouts]


def sample_heldout(
    worker: RolloutWorker,
    sampling_client: SamplingClient,
    items: Sequence[Any],
    *,
    temperature: float,
    completions: int,
) -> list[Group]:
    """The graded completions of each item, in order.

    Raises:
        RequestFailedError: not one item could be sampled.
    """
    config = worker.config
    requests = [
        GroupRequest(
            item, index, config.evaluation_params(mix_seed(config.seed, EVALUATION_STREAM, index), temperature)
        )
        for index, item in enumerate(items)
    ]
    groups = worker.roll_out(sampling_client, requests, group_size=completions, grade_alone=True)
    if groups and all(group.error for group in groups):
        raise RequestFailedError(f"no held-out prompt could be sampled; the first said: {groups[0].error}")
    return groups


def heldout_items(task: Task, config: RLConfig) -> list[Any]:
    """The first `heldout_size` held-out items.

    Raises:
        InvalidRequestError: the task has none.
    """
    heldout = list(task.build_heldout())[: config.heldout_size]
    if not heldout:
        raise InvalidRequestError(
            "has no held-out set", field="task", value=task_name(task), remedy="Give it a build_heldout()"
        )
    return heldout


def evaluate_checkpoint(
    checkpoint: str, adapter: Any, *, config: RLConfig, service: ServiceClient
) -> dict[float, Estimate]:
    """Evaluates a checkpoint (`mint://…`) or a base model on the held-out items of a task, by temperature.

    Raises:
        InvalidRequestError: the task has no held-out set.
    """
    task = as_task(adapter)
    heldout = heldout_items(task, config)
    sampling_client = checkpoint_sampler(service, checkpoint)
    with closing(open_calls(config)) as calls:
        worker = RolloutWorker(task, config=config, tokenizer=sampling_client.get_tokenizer(), calls=calls)
        return {
            temperature: evaluate(
                worker, sampling_client, heldout, temperature=temperature, completions=config.heldout_samples
            )[0]
            for temperature in EVALUATION_TEMPERATURES
        }


class HeldoutEvaluation:
    """The evaluations of one run: before, on a schedule, after. Logs them and remembers the best weights.

    An evaluation that is in the log already is not made again.
    """

    def __init__(self, run: RunFrame, worker: RolloutWorker, items: Sequence[Any]) -> None:
        """`items` empty: nothing is evaluated."""
        self.run = run
        self.worker = worker
        self.items = items
        self.rows: list[dict[str, Any]] = run.log.read("evaluations.jsonl")
        """As in the log; those of this process also have `replies`, of every item (`_graded_replies`)."""
        self.best_mean = -float("inf")
        self.best_checkpoint: str | None = None

    def to_dict(self) -> dict[str, Any]:
        """The state that a resumed run needs, for JSON."""
        return {"best_mean": self.best_mean, "best_checkpoint": self.best_checkpoint}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Continues from the state of `to_dict`."""
        self.best_mean = float(state["best_mean"])
        self.best_checkpoint = state["best_checkpoint"]

    def evaluate(self, when: str, step: int) -> dict[float, Estimate]:
        """Evaluates greedily and at temperature 1; returns the estimates by temperature.

        With `eval_every`, the weights of the best greedy mean are saved as `best`.
        """
        if not self.items:
            return {}
        known = {row["temperature"]: row for row in self.rows if row["when"] == when and row["step"] == step}
        if len(known) == len(EVALUATION_TEMPERATURES):
            return {temperature: Estimate.from_dict(row) for temperature, row in known.items()}
        trainer = self.run.trainer
        config = self.worker.config
        sampling_client = trainer.save_weights_and_get_sampling_client(name=f"heldout-{when}-{step}")
        estimates = {}
        rows = []
        replies = []
        for temperature in EVALUATION_TEMPERATURES:
            estimates[temperature], rollouts = evaluate(
                self.worker,
                sampling_client,
                self.items,
                temperature=temperature,
                completions=config.heldout_samples,
            )
            replies.append(_graded_replies(rollouts))
            rows.append(
                {
                    "step": step,
                    "when": when,
                    "set": self.worker.task.heldout_name,
                    **estimates[temperature].to_dict(),
                    "checkpoint": None,
                    "examples": [self._example(rollout) for rollout in rollouts[:EXAMPLES] if rollout.turns],
                }
            )
        if config.eval_every and estimates[GREEDY].mean > self.best_mean:
            self.best_mean = estimates[GREEDY].mean
            self.best_checkpoint = trainer.save_state(name="best", overwrite=True).result().path
            for row in rows:
                row["checkpoint"] = self.best_checkpoint
        self.rows += [{**row, "replies": of_row} for row, of_row in zip(rows, replies, strict=True)]
        self.run.record_evaluations(rows)
        return estimates

    def _example(self, rollout: Rollout) -> dict[str, Any]:
        return {"prompt": self.worker.tokenizer.decode(rollout.turns[0].prompt), **rollout_row(rollout)}


def _graded_replies(rollouts: Sequence[Rollout]) -> dict[int, float]:
    """The rewards that should depend on prompt and text alone, by a hash of the item's place, prompt and text: where it
    comes again in another evaluation, the grader has seen the same."""
    return {
        hash((place, *rollout.turns[0].prompt, rollout.text, len(rollout.tokens), rollout.truncated)): rollout.reward
        for place, rollout in enumerate(rollouts)
        if rollout.reward is not None and len(rollout.turns) == 1 and not rollout.tool_calls
    }
