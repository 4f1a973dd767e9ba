"""`run_grpo`: in each step, sample groups, grade them, centre the rewards, and take an optimizer step.

Uses only the public SDK, so it runs against any server of the protocol. Every random choice is a function of (seed,
step, position). So a run repeats bit for bit, and resumes from a checkpoint bit for bit. A run that samples ahead
(`max_staleness` > 0) resumes with fresh samples, and repeats only with `staleness="exactly"`.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Sequence
from contextlib import closing, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from mint.client.service_client import ServiceClient
from mint.errors import InvalidRequestError
from mint.rl.adapter import MessageEnvAdapter, RLAdapter, as_task, task_name
from mint.rl.analysis.diagnosis import diagnose, is_contradicted
from mint.rl.analysis.run_record import RunRecord
from mint.rl.calls.call_pool import CallPool
from mint.rl.config import RLConfig
from mint.rl.finding import Finding
from mint.rl.heldout_evaluation import HeldoutEvaluation, without_heldout
from mint.rl.rollout import RolloutBatch
from mint.rl.rollouts.batch_collector import BatchCollector
from mint.rl.rollouts.item_order import ItemOrder
from mint.rl.rollouts.prompt_check import require_prompts
from mint.rl.rollouts.replay_buffer import ReplayBuffer
from mint.rl.rollouts.rollout_worker import RolloutWorker, open_calls
from mint.rl.rollouts.rollouts_ahead import RolloutsAhead
from mint.rl.rollouts.swapping_sampler import PublishedPolicy
from mint.rl.run_frame import ProgressHook, RunFrame, open_run
from mint.rl.run_result import RunResult
from mint.rl.tasks.chat_format import check_template
from mint.rl.tracking.custom_metrics import custom_metrics, without_nonfinite
from mint.rl.tracking.step_log import rollout_rows, step_metrics, success_rate, timeline_rows
from mint.rl.training.kl_reference import KLReference
from mint.rl.training.off_policy import truncated_by_default
from mint.rl.training.policy_update import PolicyTrainer, PolicyUpdate
from mint.runs.log import ResumePoint
from mint.runs.reader import RunReader
from mint.runs.tokens import TokenPieces

log = logging.getLogger(__name__)

DIAGNOSED_STEPS = 10
"""The live diagnosis reads the rollouts of so many last steps."""

COLLAPSES = frozenset({"reward_collapse", "entropy_collapse", "learning_rate_too_high", "nonfinite_or_skipped_steps"})
"""Findings on which `on_collapse` acts if their severity is `error`."""


def run_grpo(
    adapter: Any,
    config: RLConfig | None = None,
    *,
    service_client: ServiceClient | None = None,
    resume: bool = False,
    on_progress: ProgressHook | None = None,
) -> RunResult:
    """Trains `config.base_model` on a task.

    Args:
        adapter: An `RLAdapter` (or any object with its four methods), or a `MessageEnvAdapter`.
        config: None is `RLConfig.from_env()`: the `MINT_RL_…` variables over the defaults.
        service_client: None opens one as the environment says (embedded by default) and closes it with the run.
        resume: Continue the run in `config.run_dir` from its last checkpoint. Without `max_staleness`, the result is
            bit for bit that of a run without interruption. A folder without a run starts a new one.
        on_progress: Called in this thread after each evaluation and step. None prints a line for each on standard
            error, unless `config.print_progress` is False.

    Raises:
        InvalidRequestError: the dataset is empty, no prompt can be made of its first items, or `run_dir` holds another
            run.
        RequestFailedError: a whole step could not be sampled, or the server failed.
    """
    task = as_task(adapter)
    config = config or RLConfig.from_env()
    try:
        return _run_task(task, config, service_client, resume=resume, on_progress=on_progress)
    finally:
        task.close()


def _run_task(
    task: RLAdapter | MessageEnvAdapter,
    config: RLConfig,
    service_client: ServiceClient | None,
    *,
    resume: bool,
    on_progress: ProgressHook | None,
) -> RunResult:
    began = time.monotonic()
    name = task_name(task)
    all_heldout = _items(f"{name}.build_heldout()", task.build_heldout())
    heldout = all_heldout[: config.heldout_size]
    dataset, left_out = without_heldout(task, _items(f"{name}.build_dataset()", task.build_dataset()), all_heldout)
    if not dataset:
        what = f"has only its {left_out} held-out items" if left_out else "is empty"
        raise InvalidRequestError(
            what, field=f"{name}.build_dataset()", value=[], remedy="Return at least one more item"
        )
    described = {
        "task": name,
        "task_spec": task.spec,
        "reward_range": task.reward_range,
        "success_reward": task.success_reward,
        "has_heldout": bool(heldout),
    }
    folder_name = name.removesuffix("Adapter").lower()
    with (
        closing(open_calls(config)) as calls,
        open_run(
            config,
            service_client,
            name=folder_name,
            described=described,
            resume=resume,
            on_progress=on_progress,
            unused_settings=_unused_on(task, config),
            check_tokenizer=partial(require_prompts, task, [*heldout, *dataset], config),
        ) as frame,
    ):
        truncated = truncated_by_default(config, frame.effective)
        if truncated is not config:
            how = {name: getattr(truncated, name) for name in ("correction", "loss_fn_config")}
            frame.log.save_effective({**frame.effective, "truncated_by_default": how})
            log.warning("%s samples, and the trainer's logprobs differ: %s", frame.effective["sampler"], how)
        run = _RLRun(task, truncated, frame, calls, dataset=dataset, heldout=heldout)
        if left_out:
            frame.note(_heldout_overlap(left_out, len(all_heldout)))
        return run.train(began)


def _items(field: str, built: Any) -> list[Any]:
    """The items of a dataset: a list, a generator, or anything else with items in an order."""
    try:
        items = None if isinstance(built, str) else iter(built)
    except TypeError:
        items = None
    if items is None:
        raise InvalidRequestError(
            f"is {type(built).__name__}", field=field, value=str(built)[:80], remedy="Return a list of items"
        )
    return list(items)


@dataclass
class _Totals:
    """Counters over the whole run, including the steps before a resume."""

    samples: float = 0
    tokens: float = 0
    seconds: float = 0.0
    optim_steps: float = 0
    max_abs_logprob_diff: float = 0.0


class _RLRun:
    """One RL run in progress."""

    def __init__(
        self,
        task: RLAdapter | MessageEnvAdapter,
        config: RLConfig,
        frame: RunFrame,
        calls: CallPool,
        *,
        dataset: Sequence[Any],
        heldout: Sequence[Any],
    ) -> None:
        """Makes the parts of the run, and restores their state in a resumed run."""
        self.task = task
        self.config = config
        self.frame = frame
        self.totals = _Totals()
        self.recent: deque[tuple[int, list[dict[str, Any]]]] = deque(maxlen=DIAGNOSED_STEPS)
        self.warnings: list[tuple[int, str]] = []
        self.state_digest: str | None = None
        self.order = ItemOrder(len(dataset), config)
        worker = RolloutWorker(task, config=config, tokenizer=frame.trainer.get_tokenizer(), calls=calls)
        self.tokenizer = worker.tokenizer
        self.collector = BatchCollector(worker, dataset, self.order, config)
        self.reference = KLReference(frame.service, config, frame.base_model) if config.has_kl_penalty else None
        self.policy_trainer = PolicyTrainer(frame.trainer, self.reference, config)
        self.replay = ReplayBuffer(task, config)
        self.heldout = HeldoutEvaluation(frame, worker, heldout)
        self.pieces = TokenPieces(self.tokenizer, (row["id"] for row in frame.log.read("tokens.jsonl")))
        if frame.point is not None:
            self._restore(frame.point)

    def _restore(self, point: ResumePoint) -> None:
        log = self.frame.log
        self.totals = _Totals(**point.totals)
        self.warnings = [(row["step"], row["warning"]) for row in log.read("warnings.jsonl")]
        self.order.restore(point.state["items"])
        # older run folders name the evaluations "readings", and some have no digest
        self.heldout.restore(point.state["heldout"] if "heldout" in point.state else point.state["readings"])
        self.state_digest = point.state.get("state_digest")
        self.replay.restore(point.state.get("replay", ()))
        if self.reference is not None:
            self.reference.renew(point.state.get("kl_reference"))
        reader = RunReader(log.folder)
        self.recent.extend((step, reader.rows(step)) for step in reader.steps()[-DIAGNOSED_STEPS:])

    def train(self, began: float) -> RunResult:
        frame = self.frame
        if isinstance(self.task, MessageEnvAdapter) and (finding := check_template(self.tokenizer)) is not None:
            frame.note(finding)
        before = self.heldout.evaluate("before", 0)
        seconds_setup = time.monotonic() - began
        last = self._run_steps(frame.first_step)
        checkpoint = self._save(last)
        if frame.stopped_by is not None and self.config.on_collapse == "rollback":
            checkpoint = self._roll_back(checkpoint)
        sampler_checkpoint = frame.save_sampler_weights()
        after = self.heldout.evaluate("after", last)
        if frame.metrics:
            self._diagnose(last, [], over=True)
        record = self._run_record()
        return RunResult(
            run_dir=frame.log.folder,
            checkpoint=checkpoint,
            sampler_checkpoint=sampler_checkpoint,
            steps=last,
            samples=int(self.totals.samples),
            tokens=int(self.totals.tokens),
            seconds=self.totals.seconds,
            seconds_setup=seconds_setup,
            max_abs_logprob_diff=self.totals.max_abs_logprob_diff,
            state_digest=self.state_digest,
            heldout_before=before,
            heldout_after=after,
            findings=[one for one in frame.findings.values() if not is_contradicted(one, record)],
            best_checkpoint=self.heldout.best_checkpoint,
            stopped_by=frame.stopped_by,
        )

    def _save(self, step: int) -> str:
        state = {
            "items": self.order.to_dict(),
            "heldout": self.heldout.to_dict(),
            "state_digest": self.state_digest,
            "replay": self.replay.to_dict(),
            "kl_reference": None if self.reference is None else self.reference.path,
        }
        return self.frame.save(step, totals=vars(self.totals), state=state)

    def _roll_back(self, last_checkpoint: str) -> str:
        """Loads the weights of the best evaluation, else of the last checkpoint before the collapse was seen."""
        seen = self.frame.findings[self.frame.stopped_by or ""].step
        earlier = [row["checkpoint"] for row in self.frame.log.read("checkpoints.jsonl") if row["step"] < seen]
        target = self.heldout.best_checkpoint or (earlier[-1] if earlier else last_checkpoint)
        self.frame.trainer.load_state_with_optimizer(target).result()
        return target

    def _run_steps(self, first: int) -> int:
        """Runs the steps from `first` on; returns the last one that was taken."""
        config = self.config
        with RolloutsAhead(self.collector, config, first) if config.max_staleness else nullcontext() as ahead:
            for step in range(first, config.steps + 1):
                began = time.monotonic()
                sampler = self.frame.trainer.save_weights_and_get_sampling_client(name=f"rl-step-{step - 1}")
                optim_steps = int(self.totals.optim_steps)
                if ahead is None:
                    batch = self.collector.collect(step, sampler, optim_steps)
                else:
                    ahead.publish(PublishedPolicy(step - 1, optim_steps, sampler))
                    batch = ahead.next()
                self._step(batch, began)
                if self.frame.stopped_by is not None:
                    return step
        return config.steps

    def _step(self, batch: RolloutBatch, began: float) -> None:
        sampled = time.monotonic()
        step = batch.step
        config = self.config
        lags = self._lags(batch)
        trained, replayed = self.replay.replay(batch)
        update = self.policy_trainer.train(trained, on_policy=not lags.any() and not replayed)
        self.replay.add(batch.all_groups)
        for group in batch.all_groups:
            rate = success_rate(self.task, group)
            if rate is not None:
                self.order.curriculum.record(group.index, rate, step)
        own, not_finite = without_nonfinite(custom_metrics(batch.all_groups, config.metrics), step)
        metrics = {
            **step_metrics(self.task, batch, update),
            **own,
            **self.order.curriculum.metrics(),
            "learning_rate": config.learning_rate_at(step, config.steps),
            "replay/used": float(replayed),
            "staleness/mean": float(lags.mean()),
            "staleness/max": float(lags.max()),
            "time/rollouts_s": sampled - began,
            "time/train_s": time.monotonic() - sampled,
            "time/unix_s": time.time(),
        }
        self._count(metrics, update)
        self._record(batch, metrics, update)
        if not_finite is not None:
            self.frame.note(not_finite)
        self.totals.seconds += time.monotonic() - began
        if self.reference is not None and config.kl_reference_every and step % config.kl_reference_every == 0:
            saved = self.frame.trainer.save_weights_for_sampler(name=f"reference-{step:06d}").result()
            self.reference.renew(saved.path)
        if config.eval_every and step % config.eval_every == 0 and step < config.steps:
            self.heldout.evaluate("during", step)
        if self.frame.is_save_due(step, config.steps):
            self._save(step)
        rewards = [reward for group in batch.all_groups for reward in group.rewards]
        self.task.evaluate(step, rewards, update.datums)

    def _lags(self, batch: RolloutBatch) -> np.ndarray:
        """The optimizer steps since each sampled token, that is, since the weights that sampled it; at least one."""
        versions = [version for group in batch.groups for one in group.rollouts for version in one.policy_steps]
        return int(self.totals.optim_steps) - np.asarray(versions or [batch.policy_step])

    def _count(self, metrics: dict[str, float], update: PolicyUpdate) -> None:
        self.totals.samples += metrics["rollouts/count"]
        self.totals.tokens += metrics["rollouts/tokens"]
        self.totals.optim_steps += update.optim_steps
        self.totals.max_abs_logprob_diff = max(
            self.totals.max_abs_logprob_diff, metrics.get("mismatch/max_abs_logprob_diff", 0.0)
        )
        self.state_digest = update.state_digest or self.state_digest

    def _record(self, batch: RolloutBatch, metrics: dict[str, float], update: PolicyUpdate) -> None:
        step = batch.step
        log = self.frame.log
        rows = rollout_rows(batch, update, self.tokenizer)
        self.recent.append((step, rows))
        self.warnings += [(step, warning) for warning in update.warnings]
        log.append_all("warnings.jsonl", [{"step": step, "warning": warning} for warning in update.warnings])
        log.append_all("tokens.jsonl", self.pieces.new_rows(step, (row.get("tokens", ()) for row in rows)))
        log.append_rollouts(step, rows)
        log.append_all("timeline.jsonl", timeline_rows(batch))
        self.frame.record_step(metrics)
        self.frame.tell("samples", {"step": step, "rows": rows, "count": self.config.print_samples})
        self._diagnose(step, update.findings)

    def _diagnose(self, step: int, findings: Sequence[Finding], *, over: bool = False) -> None:
        """Notes `findings` and those of the diagnosis of `step`; a run that is `over` cannot be stopped any more."""
        frame = self.frame
        for finding in [*findings, *diagnose(self._run_record(), since=step - 1, known=frame.findings.values())]:
            collapsed = finding.severity == "error" and finding.code in COLLAPSES
            if frame.note(finding) and collapsed and self.config.on_collapse != "warn" and not over:
                frame.stop(finding)

    def _run_record(self) -> RunRecord:
        """The logs of the run so far, for the diagnosis."""
        return RunRecord(
            config=self.frame.described,
            metrics=self.frame.metrics,
            evaluations=self.heldout.rows,
            rollouts=[row for _, rows_of_step in self.recent for row in rows_of_step],
            warnings=self.warnings,
        )


def _unused_on(task: RLAdapter | MessageEnvAdapter, config: RLConfig) -> list[str]:
    if isinstance(task, MessageEnvAdapter):
        found = config.without_effect("a reward function: environments are not asked again", "grader_retries")
        if config.max_episode_tokens is not None and config.max_episode_tokens < config.max_tokens:
            found.append(
                f"max_tokens = {config.max_tokens} is never reached, because max_episode_tokens = "
                f"{config.max_episode_tokens} ends the episode before"
            )
        return found
    limits = ("max_turns", "max_episode_tokens", "max_episode_s")
    return config.without_effect("episodes (a MessageEnvAdapter)", "credit", *limits)


def _heldout_overlap(count: int, heldout: int) -> Finding:
    return Finding(
        "heldout_overlap",
        "info",
        0,
        f"{count} training items are also in the held-out set of {heldout}; they were left out of training",
        "Build two disjoint sets, so that the training set has the size that you expect",
        {"left_out": float(count)},
    )
