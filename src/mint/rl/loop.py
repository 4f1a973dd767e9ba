"""`run_grpo`: sample groups, score them, centre the rewards, take an optimizer step; again.

Uses nothing but the public SDK, so it runs against any server of the protocol. Every random choice is a function of
(seed, step, position), so that a run can be repeated, and resumed from a checkpoint, bit for bit (a run that samples
ahead, `max_staleness` > 0, repeats bit for bit but resumes with fresh samples).
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mint.client.service_client import ServiceClient
from mint.client.training_client import TrainingClient
from mint.config import read_settings
from mint.errors import InvalidRequestError
from mint.rl.adapter import MessageEnvAdapter, Task
from mint.rl.analysis.diagnosis import RunRecord, diagnose
from mint.rl.analysis.finding import SEVERITIES, Finding
from mint.rl.config import RLConfig
from mint.rl.evaluation import Estimate, without_heldout
from mint.rl.heldout_evaluation import GREEDY, SAMPLED, Readings
from mint.rl.kl_reference import Reference
from mint.rl.policy_update import Update, Updater
from mint.rl.rollouts.calls import CallPool
from mint.rl.rollouts.completions import as_adapter, task_name
from mint.rl.rollouts.rollout import Rollout
from mint.rl.rollouts.rollout_worker import Collector, Items, StepRollouts
from mint.rl.tasks.chat_format import check_template
from mint.rl.tracking.step_log import rollout_rows, step_metrics, success_rate
from mint.rl.tracking.trackers import Trackers
from mint.runs.log import ResumePoint, RunLog
from mint.runs.process import recorded_process
from mint.runs.reader import RunReader
from mint.runs.tokens import TokenPieces

__all__ = ["GREEDY", "SAMPLED", "ProgressHook", "RunResult", "run_grpo"]

DIAGNOSED_STEPS = 10
"""Steps whose rollouts the live diagnosis looks at."""

COLLAPSES = frozenset({"reward_collapse", "entropy_collapse", "learning_rate_too_high", "nonfinite_or_skipped_steps"})
"""Findings that `on_collapse` acts on, where their severity is `error`."""

ProgressHook = Callable[[str, dict[str, Any]], None]
"""Told of `("evaluation" | "step" | "samples" | "finding" | "stopped", fields)` as they happen. `samples` has all
`rows` of the step, and the `count` of them that `print_samples` asks to print."""


@dataclass(frozen=True)
class RunResult:
    """What a run did. `heldout_before` and `heldout_after` are by temperature (0.0 greedy, 1.0), empty if not read.

    `checkpoint` holds the final weights and optimizer; `best_checkpoint` those of the best greedy reading, where
    `eval_every` asked for readings. `stopped_by` is the finding that ended the run early.
    """

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
    best_checkpoint: str | None = None
    stopped_by: str | None = None


def run_grpo(
    adapter: Any,
    config: RLConfig | None = None,
    *,
    service_client: ServiceClient | None = None,
    resume: bool = False,
    on_progress: ProgressHook | None = None,
) -> RunResult:
    """Trains `config.base_model` on a task and returns what came of it.

    Args:
        adapter: An `RLAdapter` (or any object with its four methods), or a `MessageEnvAdapter`.
        config: None is `RLConfig.from_env()`: the `MINT_RL_…` variables over the defaults.
        service_client: Whose server to use; None opens one as the environment says (embedded by default).
        resume: Go on with the run in `config.run_dir` from its last checkpoint; the result has the same bits as an
            uninterrupted run. A folder without a run is started.
        on_progress: Called in this thread after each evaluation and step.

    Raises:
        InvalidRequestError: the dataset is empty, or `run_dir` holds another run.
        RequestFailedError: a whole step could not be sampled, or the server failed.
    """
    task = adapter if isinstance(adapter, MessageEnvAdapter) else as_adapter(adapter)
    config = config or RLConfig.from_env()
    _check(config)
    try:
        if service_client is not None:
            return _Run(task, config, service_client, on_progress).run(resume=resume)
        with ServiceClient() as owned:
            return _Run(task, config, owned, on_progress).run(resume=resume)
    finally:
        task.close()


def default_run_dir(task: str) -> Path:
    """A new folder name under `MINT_HOME/runs`, from the task and the time."""
    stamp = time.strftime("%Y%m%d-%H%M%S")
    base = read_settings().home_dir / "runs" / f"{task}-{stamp}"
    candidates = [base, *(base.with_name(f"{base.name}-{number}") for number in range(2, 1000))]
    return next(candidate for candidate in candidates if not candidate.exists())


def _check(config: RLConfig) -> None:
    if config.init_optimizer and config.init_from is None:
        raise InvalidRequestError(
            "needs init_from",
            field="RLConfig.init_optimizer",
            value=True,
            remedy="Name the checkpoint, or leave it out",
        )
    if config.curriculum and config.max_staleness:
        raise InvalidRequestError(
            "cannot be combined with curriculum: what was solved is not known yet when samples are drawn ahead",
            field="RLConfig.max_staleness",
            value=config.max_staleness,
            remedy="Set max_staleness=0 or curriculum=False",
        )


@dataclass
class _Totals:
    """Counters over the whole run, carried over a resume."""

    samples: float = 0
    tokens: float = 0
    seconds: float = 0.0
    optim_steps: float = 0
    max_abs_logprob_diff: float = 0.0


class _Run:
    """One run in progress."""

    def __init__(self, task: Task, config: RLConfig, service: ServiceClient, on_progress: ProgressHook | None) -> None:
        self.task, self.config, self.service = task, config, service
        self.on_progress = on_progress or (lambda event, fields: None)
        self.name = task_name(task)
        self.log = RunLog(config.run_dir or default_run_dir(self.name.removesuffix("Adapter").lower()))
        self.calls = CallPool(timeout_s=config.grader_timeout_s)
        self.totals = _Totals()
        self.history: list[dict[str, float]] = []
        self.recent: deque[tuple[int, list[dict[str, Any]]]] = deque(maxlen=DIAGNOSED_STEPS)
        self.warnings: list[tuple[int, str]] = []
        self.findings: dict[str, Finding] = {}
        self.state_digest: str | None = None
        self.stopped_by: str | None = None

    def run(self, *, resume: bool) -> RunResult:
        try:
            return self._run(resume=resume)
        finally:
            self.calls.close()

    def _run(self, *, resume: bool) -> RunResult:
        began = time.monotonic()
        closed = list(self.task.build_heldout())
        heldout = closed[: self.config.heldout_size]
        self.has_heldout = bool(heldout)
        dataset, left_out = without_heldout(self.task, self.task.build_dataset(), closed)
        if not dataset:
            what = f"has nothing but its {left_out} held-out samples" if left_out else "is empty"
            raise InvalidRequestError(
                what, field=f"{self.name}.build_dataset()", value=[], remedy="Return at least one more sample"
            )
        point = self.log.start(self._described(), resume=resume)
        with (
            recorded_process(self.log.folder) as end,
            Trackers(self.config.trackers, self.log.folder, self._described(), self._note) as self.trackers,
        ):
            self._prepare(dataset, heldout, point)
            if left_out:
                self._note(_left_out(left_out, len(closed)))
            result = self._train(point, began)
            if self.stopped_by is not None:
                end.outcome, end.error = "stopped", self.stopped_by
        return result

    def _prepare(self, dataset: Sequence[Any], heldout: Sequence[Any], point: ResumePoint | None) -> None:
        """Everything that takes part in the run, as it was at `point`."""
        config = self.config
        self.trainer = self._make_trainer(point)
        self.tokenizer = self.trainer.get_tokenizer()
        self.items = Items(len(dataset), config)
        self.collector = Collector(
            self.task, dataset, self.items, config=config, tokenizer=self.tokenizer, calls=self.calls
        )
        reference = Reference(self.service, config) if config.kl_penalty_coef else None
        self.updater = Updater(self.trainer, reference, config)
        self.readings = Readings(
            self.task, heldout, config=config, log=self.log, calls=self.calls, tokenizer=self.tokenizer
        )
        self.pieces = TokenPieces(self.tokenizer, (row["id"] for row in self.log.read("tokens.jsonl")))
        self._restore(point)

    def _train(self, point: ResumePoint | None, began: float) -> RunResult:
        config = self.config
        if isinstance(self.task, MessageEnvAdapter) and (rewrites := check_template(self.tokenizer)) is not None:
            self._note(rewrites)
        before, before_rollouts = self._read("before", 0)
        seconds_setup = time.monotonic() - began
        last = self._steps((point.step if point else 0) + 1)
        checkpoint = point.checkpoint if point and point.step >= last else self._save(last)
        if self.stopped_by is not None and config.on_collapse == "rollback":
            checkpoint = self._roll_back(checkpoint)
        sampler_checkpoint = self.trainer.save_weights_for_sampler(name="final").result().path
        after, after_rollouts = self._read("after", last)
        if self.history:
            self._diagnose(last, [], over=True)
        return RunResult(
            run_dir=self.log.folder,
            checkpoint=checkpoint,
            sampler_checkpoint=sampler_checkpoint or "",
            steps=last,
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
            best_checkpoint=self.readings.best_checkpoint,
            stopped_by=self.stopped_by,
        )

    def _described(self) -> dict[str, Any]:
        """What `config.json` says."""
        return {
            **self.config.model_dump(exclude={"run_dir", "trackers"}),
            "task": self.name,
            "task_spec": self.task.spec,
            "reward_range": self.task.reward_range,
            "success_reward": self.task.success_reward,
            "has_heldout": self.has_heldout,
        }

    # --- starting and saving -------------------------------------------------------------------------------------

    def _make_trainer(self, point: ResumePoint | None) -> TrainingClient:
        config = self.config
        if point is not None:
            return self.service.create_training_client_from_state_with_optimizer(point.checkpoint)
        if config.init_from is not None and config.init_optimizer:
            return self.service.create_training_client_from_state_with_optimizer(config.init_from)
        if config.init_from is not None:
            return self.service.create_training_client_from_state(config.init_from)
        return self.service.create_lora_training_client(
            base_model=config.base_model,
            rank=config.rank,
            seed=config.seed,
            train_mlp=config.train_mlp,
            train_attn=config.train_attn,
            train_unembed=config.train_unembed,
        )

    def _restore(self, point: ResumePoint | None) -> None:
        if point is None:
            return
        self.totals = _Totals(**point.totals)
        self.warnings = [(row["step"], row["warning"]) for row in self.log.read("warnings.jsonl")]
        self.items.restore(point.state["items"])
        self.readings.restore(point.state["readings"])
        self.history = self.log.read("metrics.jsonl")
        self.findings = {row["code"]: Finding(**row) for row in self.log.read("findings.jsonl")}
        reader = RunReader(self.log.folder)
        self.recent.extend((step, reader.rows(step)) for step in reader.steps()[-DIAGNOSED_STEPS:])

    def _save(self, step: int) -> str:
        checkpoint = self.trainer.save_state(name=f"step-{step:06d}", overwrite=True).result().path
        state = {"items": self.items.to_dict(), "readings": self.readings.to_dict()}
        self.log.save_point(ResumePoint(step, checkpoint, vars(self.totals), state))
        self.log.append("checkpoints.jsonl", {"step": step, "checkpoint": checkpoint})
        return checkpoint

    def _roll_back(self, last_checkpoint: str) -> str:
        """Returns to the best reading's weights, or to the last checkpoint before the collapse was seen."""
        seen = self.findings[self.stopped_by or ""].step
        earlier = [row["checkpoint"] for row in self.log.read("checkpoints.jsonl") if row["step"] < seen]
        target = self.readings.best_checkpoint or (earlier[-1] if earlier else last_checkpoint)
        self.trainer.load_state_with_optimizer(target).result()
        return target

    # --- steps ---------------------------------------------------------------------------------------------------

    def _steps(self, first: int) -> int:
        """Runs the steps from `first` on; returns the last one that was taken."""
        config = self.config
        ahead: deque[StepRollouts | Future[StepRollouts]] = deque()
        issued = first - 1
        with ThreadPoolExecutor(max_workers=1, thread_name_prefix="mint-rollouts") as background:
            for step in range(first, config.steps + 1):
                began = time.monotonic()
                wanted = min(config.steps, step + config.max_staleness)
                if issued < wanted:
                    sampler = self.trainer.save_weights_and_get_sampling_client(name=f"rl-step-{step - 1}")
                    for upcoming in range(issued + 1, wanted + 1):
                        arguments = (upcoming, sampler, int(self.totals.optim_steps))
                        if config.max_staleness:
                            ahead.append(background.submit(self.collector.collect, *arguments))
                        else:
                            ahead.append(self.collector.collect(*arguments))
                    issued = wanted
                batch = ahead.popleft()
                self._step(batch.result() if isinstance(batch, Future) else batch, began)
                if self.stopped_by is not None:
                    return step
        return config.steps

    def _step(self, batch: StepRollouts, began: float) -> None:
        sampled = time.monotonic()
        step, config = batch.step, self.config
        lag = int(self.totals.optim_steps) - batch.policy_step
        update = self.updater.update(batch, on_policy=lag == 0)
        for group in batch.all_groups:
            rate = success_rate(self.task, group)
            if rate is not None:
                self.items.curriculum.record(group.item, rate, step)
        metrics = {
            **step_metrics(self.task, batch, update),
            **self.items.curriculum.metrics(),
            "learning_rate": config.learning_rate_at(step),
            "staleness/mean": float(lag),
            "staleness/max": float(lag),
            "time/rollouts_s": sampled - began,
            "time/train_s": time.monotonic() - sampled,
            "time/unix_s": time.time(),
        }
        self._count(metrics, update)
        self._record(batch, metrics, update)
        self.totals.seconds += time.monotonic() - began
        if config.eval_every and step % config.eval_every == 0 and step < config.steps:
            self._read("during", step)
        if step % config.save_every == 0 and step < config.steps:
            self._save(step)
        rewards = [reward for group in batch.all_groups for reward in group.rewards]
        self.task.evaluate(step, rewards, update.datums)

    def _count(self, metrics: dict[str, float], update: Update) -> None:
        self.totals.samples += metrics["rollouts/count"]
        self.totals.tokens += metrics["rollouts/tokens"]
        self.totals.optim_steps += update.optim_steps
        self.totals.max_abs_logprob_diff = max(
            self.totals.max_abs_logprob_diff, metrics.get("mismatch/max_abs_logprob_diff", 0.0)
        )
        self.state_digest = update.state_digest or self.state_digest

    def _record(self, batch: StepRollouts, metrics: dict[str, float], update: Update) -> None:
        step = batch.step
        rows = rollout_rows(batch, update, self.tokenizer)
        self.history.append(metrics)
        self.recent.append((step, rows))
        self.warnings += [(step, warning) for warning in update.warnings]
        self.log.append_all("warnings.jsonl", [{"step": step, "warning": warning} for warning in update.warnings])
        self.log.append_all("tokens.jsonl", self.pieces.new_rows(step, (row.get("tokens", ()) for row in rows)))
        self.log.append_rollouts(step, rows)
        self.log.append("metrics.jsonl", metrics)
        self._tell("step", metrics)
        self._tell("samples", {"step": step, "rows": rows, "count": self.config.print_samples})
        self._diagnose(step, update.findings)

    def _diagnose(self, step: int, findings: Sequence[Finding], *, over: bool = False) -> None:
        """Notes `findings`, and what the log shows of `step`; a run that is `over` cannot be stopped any more."""
        record = RunRecord(
            config=self._described(),
            metrics=self.history,
            evaluations=self.readings.rows,
            rollouts=[row for _, rows_of_step in self.recent for row in rows_of_step],
            warnings=self.warnings,
        )
        for finding in [*findings, *diagnose(record, since=step - 1, known=self.findings.values())]:
            self._note(finding, over=over)

    def _note(self, finding: Finding, *, over: bool = False) -> None:
        known = self.findings.get(finding.code)
        if known is not None and SEVERITIES.index(known.severity) >= SEVERITIES.index(finding.severity):
            return
        self.findings[finding.code] = finding
        self.log.append("findings.jsonl", finding.to_dict())
        self._tell("finding", finding.to_dict())
        stops = finding.severity == "error" and finding.code in COLLAPSES and self.config.on_collapse != "warn"
        if stops and not over:
            self.stopped_by = finding.code
            self._tell("stopped", finding.to_dict())

    def _tell(self, event: str, fields: dict[str, Any]) -> None:
        self.trackers(event, fields)
        self.on_progress(event, fields)

    def _read(self, when: str, step: int) -> tuple[dict[float, Estimate], list[Rollout]]:
        """Reads the held-out set, and keeps the weights if they are the best so far."""
        estimates, rollouts, rows = self.readings.read(when, step, self.trainer)
        for row in rows:
            self._tell("evaluation", row)
        return estimates, rollouts


def _left_out(count: int, heldout: int) -> Finding:
    return Finding(
        "heldout_overlap",
        "info",
        0,
        f"{count} training samples are in the held-out set of {heldout}, too: they were left out of training",
        "Build the two sets apart, so that the training set has the size that you expect",
        {"left_out": float(count)},
    )
