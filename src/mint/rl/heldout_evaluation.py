"""The readings of the held-out set during a run: before, on a schedule, after; and which weights read best."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from mint.rl.adapter import Task
from mint.rl.config import RLConfig
from mint.rl.evaluation import Estimate, evaluate
from mint.rl.rollouts.calls import CallPool
from mint.rl.rollouts.rollout import Rollout
from mint.rl.tracking.step_log import rollout_row
from mint.rl.training_run import TrainingRun

EVALUATION_TEMPERATURES = (0.0, 1.0)
GREEDY, SAMPLED = EVALUATION_TEMPERATURES
EXAMPLES = 16


class Readings:
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
