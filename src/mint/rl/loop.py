"""`run_grpo`: sample groups, score them, centre the rewards, take one step; again.

Uses nothing but the public SDK, so it runs against any server of the protocol. Every random choice is a function of
(seed, step, position), so that a run can be repeated, and resumed from a checkpoint, bit for bit.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from mint.client.sampling_client import SamplingClient
from mint.client.service_client import ServiceClient
from mint.client.training_client import TrainingClient
from mint.config import read_settings
from mint.errors import InvalidRequestError, RequestFailedError
from mint.rl.adapter import RLAdapter
from mint.rl.advantages import group_advantages, kl_penalty
from mint.rl.config import RLConfig, mix_seed
from mint.rl.datums import policy_datum
from mint.rl.evaluation import Estimate, evaluate
from mint.rl.findings import Finding, step_findings
from mint.rl.grading import Grader
from mint.rl.rollouts import Group, Rollout, roll_out
from mint.rl.run_log import ResumePoint, RunLog
from mint.types import Datum, ForwardBackwardOutput, ModelInput

EVALUATION_TEMPERATURES = (0.0, 1.0)
GREEDY, SAMPLED = EVALUATION_TEMPERATURES

ProgressHook = Callable[[str, dict[str, Any]], None]
"""Told of `("evaluation" | "step", fields)` as they happen."""


@dataclass(frozen=True)
class RunResult:
    """What a run did. `heldout_before` and `heldout_after` are by temperature (0.0 greedy, 1.0), empty if not read."""

    run_dir: Path
    checkpoint: str
    sampler_checkpoint: str
    steps: int
    samples: int
    tokens: int
    seconds: float
    seconds_setup: float
    max_abs_logprob_diff: float
    state_digest: str | None
    heldout_before: dict[float, Estimate]
    heldout_after: dict[float, Estimate]
    heldout_rollouts: dict[str, list[Rollout]] = field(repr=False)
    findings: list[Finding]


def run_grpo(
    adapter: RLAdapter,
    config: RLConfig,
    *,
    service_client: ServiceClient | None = None,
    resume: bool = False,
    on_progress: ProgressHook | None = None,
) -> RunResult:
    """Trains `config.base_model` on the task of `adapter` and returns what came of it.

    Args:
        service_client: Whose server to use; None opens one as the environment says (embedded by default).
        resume: Go on with the run in `config.run_dir` from its last checkpoint; the result has the same bits as an
            uninterrupted run. A folder without a run is started.
        on_progress: Called in this thread after each evaluation and step.

    Raises:
        InvalidRequestError: the dataset is empty, or `run_dir` holds another run.
        RequestFailedError: a whole step could not be sampled, or the server failed.
    """
    if service_client is not None:
        return _Run(adapter, config, service_client, on_progress).run(resume=resume)
    with ServiceClient() as owned:
        return _Run(adapter, config, owned, on_progress).run(resume=resume)


def default_run_dir(task: str) -> Path:
    """A new folder name under `MINT_HOME/runs`, from the task and the time."""
    stamp = time.strftime("%Y%m%d-%H%M%S")
    base = read_settings().home_dir / "runs" / f"{task}-{stamp}"
    candidates = [base, *(base.with_name(f"{base.name}-{number}") for number in range(2, 1000))]
    return next(candidate for candidate in candidates if not candidate.exists())


@dataclass
class _Totals:
    """Counters over the whole run, carried over a resume."""

    samples: float = 0
    tokens: float = 0
    seconds: float = 0.0
    max_abs_logprob_diff: float = 0.0


class _Run:
    """One run in progress."""

    def __init__(
        self, adapter: RLAdapter, config: RLConfig, service: ServiceClient, on_progress: ProgressHook | None
    ) -> None:
        self.adapter, self.config, self.service = adapter, config, service
        self.on_progress = on_progress or (lambda event, fields: None)
        self.task = type(adapter).__name__
        self.log = RunLog(config.run_dir or default_run_dir(self.task.removesuffix("Adapter").lower()))
        self.grader = Grader(timeout_s=config.grader_timeout_s)
        self.totals = _Totals()
        self.history: list[dict[str, float]] = []
        self.findings: dict[str, Finding] = {}
        self.state_digest: str | None = None
        self.base_sampler: SamplingClient | None = None
        self.kl_policy_base: float | None = None

    def run(self, *, resume: bool) -> RunResult:
        began = time.monotonic()
        config = self.config
        self.dataset = list(self.adapter.build_dataset())
        if not self.dataset:
            raise InvalidRequestError(
                "is empty", field=f"{self.task}.build_dataset()", value=[], remedy="Return at least one sample"
            )
        point = self.log.start({**config.model_dump(exclude={"run_dir"}), "task": self.task}, resume=resume)
        self.trainer = self._make_trainer(point)
        self.tokenizer = self.trainer.get_tokenizer()
        if config.kl_penalty_coef:
            self.base_sampler = self.service.create_sampling_client(base_model=config.base_model)
        heldout = list(self.adapter.build_heldout())[: config.heldout_size]
        before, before_rollouts = self._read_heldout("before", heldout)
        seconds_setup = time.monotonic() - began
        for step in range((point.step if point else 0) + 1, config.steps + 1):
            self._step(step)
        if not point or point.step < config.steps:
            checkpoint = self._save(config.steps)
        else:
            checkpoint = point.checkpoint
        sampler_checkpoint = self.trainer.save_weights_for_sampler(name="final").result().path
        after, after_rollouts = self._read_heldout("after", heldout)
        self.grader.close()
        return RunResult(
            run_dir=self.log.folder,
            checkpoint=checkpoint,
            sampler_checkpoint=sampler_checkpoint or "",
            steps=config.steps,
            samples=int(self.totals.samples),
            tokens=int(self.totals.tokens),
            seconds=self.totals.seconds,
            seconds_setup=seconds_setup,
            max_abs_logprob_diff=self.totals.max_abs_logprob_diff,
            state_digest=self.state_digest,
            heldout_before=before,
            heldout_after=after,
            heldout_rollouts={"before": before_rollouts, "after": after_rollouts},
            findings=list(self.findings.values()),
        )

    def _make_trainer(self, point: ResumePoint | None) -> TrainingClient:
        config = self.config
        if point is not None:
            self.totals = _Totals(**point.totals)
            self.history = self.log.read("metrics.jsonl")
            self.findings = {row["name"]: Finding(**row) for row in reversed(self.log.read("findings.jsonl"))}
            return self.service.create_training_client_from_state_with_optimizer(point.checkpoint)
        return self.service.create_lora_training_client(
            base_model=config.base_model,
            rank=config.rank,
            seed=config.seed,
            train_mlp=config.train_mlp,
            train_attn=config.train_attn,
            train_unembed=config.train_unembed,
        )

    def _step(self, step: int) -> None:
        began = time.monotonic()
        config = self.config
        sampler = self.trainer.save_weights_and_get_sampling_client(name=f"rl-step-{step - 1}")
        groups = roll_out(
            sampler,
            self.adapter,
            self._batch(step),
            tokenizer=self.tokenizer,
            grader=self.grader,
            num_samples=config.group_size,
            params=[config.sampling_params(mix_seed(config.seed, step, place)) for place in range(config.batch_size)],
        )
        if all(group.error for group in groups):
            raise RequestFailedError(f"step {step}: no prompt could be sampled; the first said: {groups[0].error}")
        sampled = time.monotonic()
        datums = self._datums(groups)
        metrics, warnings = self._train(step, datums)
        metrics = {"step": float(step), **_rollout_metrics(groups), "datums": float(len(datums)), **metrics}
        if self.kl_policy_base is not None:
            metrics["kl/policy_base"] = self.kl_policy_base
        metrics |= {"time/rollouts_s": sampled - began, "time/train_s": time.monotonic() - sampled}
        self._record(step, groups, metrics, warnings)
        self.totals.seconds += time.monotonic() - began
        if step % config.save_every == 0 and step < config.steps:
            self._save(step)
        self.adapter.evaluate(step, [reward for group in groups for reward in group.rewards], len(datums))

    def _batch(self, step: int) -> Sequence[Any]:
        """The samples of a step: a walk through the dataset, shuffled anew by (seed, epoch) each time round."""
        size = len(self.dataset)
        places = range((step - 1) * self.config.batch_size, step * self.config.batch_size)
        orders = {
            epoch: np.random.default_rng([self.config.seed, epoch]).permutation(size)
            for epoch in {place // size for place in places}
        }
        return [self.dataset[orders[place // size][place % size]] for place in places]

    def _datums(self, groups: Sequence[Group]) -> list[Datum]:
        """One datum per graded rollout of every group that has a signal (unequal rewards, or a KL penalty)."""
        chosen: list[tuple[Group, Rollout, float]] = []
        for group in groups:
            advantages = group_advantages(group.rewards, self.config.advantage)
            if self.base_sampler is not None or advantages.any():
                chosen += [(group, *pair) for pair in zip(group.graded, advantages.tolist(), strict=True)]
        penalties = self._kl_penalties([(group, rollout) for group, rollout, _ in chosen])
        return [
            policy_datum(
                group.prompt,
                rollout.tokens,
                logprobs_T=rollout.logprobs,
                advantages_T=advantage - penalty,
            )
            for (group, rollout, advantage), penalty in zip(chosen, penalties, strict=True)
        ]

    def _kl_penalties(self, chosen: Sequence[tuple[Group, Rollout]]) -> list[np.ndarray]:
        if self.base_sampler is None:
            return [np.zeros(len(rollout.tokens)) for _, rollout in chosen]
        futures = [
            self.base_sampler.compute_logprobs(ModelInput.from_ints([*group.prompt, *rollout.tokens]))
            for group, rollout in chosen
        ]
        policy = [np.asarray(rollout.logprobs) for _, rollout in chosen]
        base = [
            np.asarray(future.result()[len(group.prompt) :], dtype=np.float64)
            for (group, _), future in zip(chosen, futures, strict=True)
        ]
        self.kl_policy_base = float(np.mean(np.concatenate(policy) - np.concatenate(base))) if chosen else 0.0
        return [kl_penalty(*pair, self.config.kl_penalty_coef) for pair in zip(policy, base, strict=True)]

    def _train(self, step: int, datums: list[Datum]) -> tuple[dict[str, float], list[str]]:
        """One optimizer step; none at all where no group had a signal."""
        if not datums:
            return {}, []
        config = self.config
        passed = self.trainer.forward_backward(datums, config.loss_fn, config.loss_fn_config)
        stepped = self.trainer.optim_step(config.adam_params(step))
        output, optimizer = passed.result(), stepped.result()
        self.state_digest = optimizer.state_digest
        mismatch = _logprob_mismatch(datums, output)
        self.totals.max_abs_logprob_diff = max(
            self.totals.max_abs_logprob_diff, mismatch["mismatch/max_abs_logprob_diff"]
        )
        trained = {f"train/{name.partition(':')[0]}": value for name, value in output.metrics.items()}
        stepped_metrics = {f"optim/{name.partition(':')[0]}": value for name, value in optimizer.metrics.items()}
        return {**trained, **stepped_metrics, **mismatch}, output.warnings

    def _record(self, step: int, groups: Sequence[Group], metrics: dict[str, float], warnings: Sequence[str]) -> None:
        self.history.append(metrics)
        self.totals.samples += metrics["rollouts/count"]
        self.totals.tokens += metrics["rollouts/tokens"]
        self.log.append_all("rollouts.jsonl", [row for group in groups for row in _rollout_rows(step, group)])
        for finding in step_findings(self.history, warnings):
            if self.findings.setdefault(finding.name, finding) is finding:
                self.log.append("findings.jsonl", finding.to_dict())
        self.log.append("metrics.jsonl", metrics)
        self.on_progress("step", metrics)

    def _save(self, step: int) -> str:
        checkpoint = self.trainer.save_state(name=f"step-{step:06d}", overwrite=True).result().path
        self.log.save_point(ResumePoint(step, checkpoint, vars(self.totals)))
        return checkpoint

    def _read_heldout(self, when: str, samples: Sequence[Any]) -> tuple[dict[float, Estimate], list[Rollout]]:
        """Reads the held-out set greedily and at temperature 1; a resumed run does not read it again `before`."""
        known = {row["temperature"]: row for row in self.log.read("evaluations.jsonl") if row["when"] == when}
        if not samples:
            return {}, []
        if len(known) == len(EVALUATION_TEMPERATURES):
            return {temperature: _estimate_from(row) for temperature, row in known.items()}, [
                Rollout(**rollout) for rollout in known[SAMPLED]["examples"]
            ]
        sampler = self.trainer.save_weights_and_get_sampling_client(name=f"heldout-{when}")
        estimates, rollouts = {}, []
        for temperature in EVALUATION_TEMPERATURES:
            estimates[temperature], rollouts = evaluate(
                sampler,
                self.adapter,
                samples,
                config=self.config,
                temperature=temperature,
                grader=self.grader,
                tokenizer=self.tokenizer,
            )
            row = {"when": when, "set": self.adapter.heldout_name, **estimates[temperature].to_dict()}
            self.log.append("evaluations.jsonl", {**row, "examples": [vars(rollout) for rollout in rollouts[:16]]})
            self.on_progress("evaluation", row)
        return estimates, rollouts[:16]


def _estimate_from(row: dict[str, Any]) -> Estimate:
    return Estimate(**{name: row[name] for name in ("mean", "low", "high", "n", "temperature", "ungraded")})


def _logprob_mismatch(datums: Sequence[Datum], output: ForwardBackwardOutput) -> dict[str, float]:
    """|sampler − trainer| over the trained tokens: the weights are those that sampled, so it should be 0."""
    differences = [
        np.abs(datum.loss_fn_inputs["logprobs"].to_numpy() - result["logprobs"].to_numpy())[
            datum.loss_fn_inputs["weights"].to_numpy() != 0
        ]
        for datum, result in zip(datums, output.loss_fn_outputs, strict=True)
    ]
    joined = np.concatenate(differences)
    return {
        "mismatch/max_abs_logprob_diff": float(joined.max()),
        "mismatch/mean_abs_logprob_diff": float(joined.mean()),
    }


def _rollout_metrics(groups: Sequence[Group]) -> dict[str, float]:
    rollouts = [rollout for group in groups for rollout in group.rollouts]
    rewards = [rollout.reward for rollout in rollouts if rollout.reward is not None]
    ends = [(min(group.rewards), max(group.rewards)) for group in groups if len(group.rewards) > 1]
    count = len(rollouts)
    return {
        "reward/mean": float(np.mean(rewards)) if rewards else 0.0,
        "reward/std": float(np.std(rewards)) if rewards else 0.0,
        "groups/total": float(len(groups)),
        "groups/used": float(sum(low < high for low, high in ends)),
        "groups/all_good": float(sum(low == high > 0 for low, high in ends)),
        "groups/all_bad": float(sum(low == high <= 0 for low, high in ends)),
        "groups/failed": float(len(groups) - len(ends)),
        "rollouts/count": float(count),
        "rollouts/ungraded": float(count - len(rewards)),
        "rollouts/tokens": float(sum(len(rollout.tokens) for rollout in rollouts)),
        "rollouts/truncated_share": sum(rollout.truncated for rollout in rollouts) / max(1, count),
        "rollouts/entropy_estimate": float(-np.mean(np.concatenate([rollout.logprobs for rollout in rollouts]))),
    }


def _rollout_rows(step: int, group: Group) -> list[dict[str, Any]]:
    shared = {"step": step, "sample": str(group.sample)}
    if group.error is not None:
        return [{**shared, "error": group.error}]
    return [{**shared, **vars(rollout)} for rollout in group.rollouts]
