"""The frame of a training run: opens or resumes its folder, logs, saves checkpoints, and records how it ended.

Knows nothing of what is trained on. Every recipe opens a run, loops over its steps, and writes through it:

    with open_run(config, service_client, name="sft", described={...}, resume=resume) as run:
        for step in range(run.first_step, steps + 1):
            ...
            run.record_step({"step": step, "train/loss": loss})
            if run.is_save_due(step, steps):
                run.save(step)
        checkpoint = run.save(steps)

Ctrl-C, or a request to stop in its folder, ends a run after its step: a checkpoint is due then, and `save` raises
`RunInterrupted`.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

from mint.client.service_client import ServiceClient
from mint.client.training_client import TrainingClient
from mint.config import read_settings
from mint.errors import InvalidRequestError
from mint.rl.finding import SEVERITIES, Finding
from mint.rl.run_config import RunConfig
from mint.rl.tracking.progress import LiveProgress
from mint.rl.tracking.trackers import Trackers, require_installed
from mint.runs.interrupt import (
    Interrupt,
    RunInterrupted,
    deferred_interrupt,
    forget_stop_request,
    is_stop_requested,
)
from mint.runs.log import ResumePoint, RunLog, is_run
from mint.runs.process import PROCESS, other_living_process, recorded_process
from mint.runs.terminal_text import counted

log = logging.getLogger("mint.runs")

ProgressHook = Callable[[str, dict[str, Any]], None]
"""Called with an event and its fields, in the thread that trains. The events are `evaluation` (a row of
`evaluations.jsonl`), `step` (a row of `metrics.jsonl`), `finding` and `stopped` (a row of `findings.jsonl`), and in RL
runs `samples` (all `rows` of the step, and the `count` of them that `print_samples` asks to print)."""


@contextmanager
def open_run(
    config: RunConfig,
    service_client: ServiceClient | None,
    *,
    name: str,
    described: Mapping[str, Any],
    resume: bool,
    on_progress: ProgressHook | None = None,
    unused_settings: Sequence[str] = (),
    check_tokenizer: Callable[[Any], None] | None = None,
) -> Generator[RunFrame]:
    """Starts the run in `config.run_dir`, or goes on with the one that is there.

    Args:
        service_client: None opens one as the environment says (embedded by default) and closes it with the run.
        name: Begins the folder's name where `config.run_dir` is None.
        described: What `config.json` says besides the settings. A run is only resumed with the same content.
        on_progress: Called after each evaluation and step. None prints a line for each on standard error, unless
            `config.print_progress` is False.
        resume: Go on from the last checkpoint in `config.run_dir`. A folder without a run is started.
        unused_settings: A sentence for each setting that has no effect on this task.
        check_tokenizer: Called with the tokenizer of a new run, before anything is made: raises if the task cannot use
            it.

    Raises:
        InvalidRequestError: the folder holds a run and `resume` is False, the run there has other settings or is run by
            another process now, or `resume` is True and `config.run_dir` is None, or holds no run while one of its name
            is in MINT_HOME.
        MissingExtraError: the package of a tracker is not installed.
        UnknownBaseModelError: the service has no such base model. As with every refusal of the service in a new run,
            no folder is made. A tokenizer that cannot be loaded or used leaves no training run, either.
        RunInterrupted: the user has pressed Ctrl-C.
    """
    require_startable(config, resume=resume)
    with nullcontext(service_client) if service_client is not None else ServiceClient() as service:
        trainer = None
        if config.run_dir is None or not is_run(config.run_dir):
            # Before the folder is made: the service may refuse the base model, and its tokenizer may be damaged.
            tokenizer = _base_tokenizer(service, config)
            if check_tokenizer is not None:
                check_tokenizer(tokenizer)
            trainer = make_trainer(service, config, None)
        run_log = RunLog(config.run_dir or default_run_dir(name))
        content = {**config.model_dump(mode="json", exclude=set(config.not_in_the_result)), **described}
        point = run_log.start(content, resume=resume)
        if resume and point is None:
            what = "has no checkpoint" if trainer is None else "holds no run yet"
            log.warning("%s %s: the run starts at step 1", run_log.folder, what)
        if point is not None and point.step >= int(content["steps"]):
            remedy = "a new run with init_from goes on from its last checkpoint"
            log.warning("%s is complete, all %d steps of it are done: %s", run_log.folder, point.step, remedy)
        lines = LiveProgress(int(content["steps"]), title=f"{name}: {run_log.folder}", plain=True)
        printed = nullcontext(on_progress) if on_progress is not None or not config.print_progress else lines
        forget_stop_request(run_log.folder)
        with recorded_process(run_log.folder) as end, printed as progress:
            run = RunFrame(config, service, run_log, content, point, progress)
            with Trackers(config.trackers, run_log.folder, content, run.note) as trackers:
                run.hooks.insert(0, trackers)  # before the user's hook, which may raise
                run.trainer = trainer or make_trainer(service, config, point)
                info = run.trainer.get_info()
                run.effective = info.effective
                run_log.save_effective(info.effective)
                model = run.base_model = info.model_name or info.model_data.model_name
                unused = [
                    *config.unused_settings(),
                    *unused_settings,
                    *_replaced_by_checkpoint(config, model, info.lora_rank),
                ]
                unused += _never_reached(config, int(content["steps"]))
                if unused:
                    run.note(_unused_settings(unused))
                with run.interruptible():
                    yield run
            if run.stopped_by is not None:
                end.outcome = "stopped"
                end.error = run.stopped_by


def require_startable(config: RunConfig, *, resume: bool) -> None:
    """Refuses what cannot start, before anything is printed, opened or made.

    Raises:
        InvalidRequestError: `resume` is True and `config.run_dir` is None, holds a run that another process runs now,
            or holds no run while one of its name is in MINT_HOME.
        MissingExtraError: the package of a tracker is not installed.
    """
    if resume and config.run_dir is None:
        raise InvalidRequestError(
            "needs the folder of the run",
            field="resume",
            value=True,
            remedy="Name it as run_dir (on the command line --run-dir FOLDER, or --run-dir latest), or leave "
            "out resume",
        )
    if resume and config.run_dir is not None and not is_run(config.run_dir):
        _refuse_other_folder(config.run_dir)
    if resume and config.run_dir is not None:
        _refuse_running(config.run_dir)
    require_installed(config.trackers)


def _replaced_by_checkpoint(config: RunConfig, base_model: str, rank: int) -> list[str]:
    """A sentence for each given setting of the model that differs from that of the checkpoint `init_from`."""
    if config.init_from is None:
        return []
    absolute = str(Path(config.base_model).expanduser().resolve())  # the service stores the path of a folder so
    base_models = (config.base_model, absolute)
    found = (("base_model", base_model, base_model in base_models), ("rank", rank, rank == config.rank))
    return [
        f"{name} = {getattr(config, name)} has no effect beside init_from, whose checkpoint has {value}"
        for name, value, is_same in found
        if name in config.model_fields_set and not is_same
    ]


def _never_reached(config: RunConfig, steps: int) -> list[str]:
    """A sentence if the warm-up is longer than the run."""
    if not 0 < steps < config.lr_warmup_steps:
        return []
    warm_up = config.lr_warmup_steps
    return [
        f"learning_rate = {config.learning_rate:g} is never reached, because lr_warmup_steps = {warm_up} and the run "
        f"has {counted(steps, 'step')}"
    ]


def _unused_settings(sentences: Sequence[str]) -> Finding:
    return Finding(
        "unused_settings",
        "warning",
        0,
        "; ".join(sentences),
        "Set what they need, or leave them out",
        {"settings": float(len(sentences))},
    )


def _refuse_other_folder(run_dir: Path) -> None:
    """Refuses to start a run in the place of one that lies elsewhere: `run_dir` holds none, and its name is that of a
    run in `MINT_HOME`."""
    meant = read_settings().home_dir / "runs" / run_dir.name
    if run_dir.name and is_run(meant):
        raise InvalidRequestError(
            "holds no run to resume",
            field="run_dir",
            value=str(run_dir),
            remedy=f"The run of this name is {meant}: name that folder, or leave out resume to start a new run",
        )


def _refuse_running(run_dir: Path) -> None:
    """Refuses to go on with a run that another process runs: both would write into the folder."""
    process = other_living_process(run_dir)
    if process is not None:
        raise InvalidRequestError(
            f"holds a run that process {process.pid} runs now",
            field="run_dir",
            value=str(run_dir),
            remedy=f"Wait until it ends, or end it with `mint runs stop {run_dir}`. If process {process.pid} is "
            f"something else, remove {run_dir / PROCESS}",
        )


class RunFrame:
    """A run in progress; made by `open_run`.

    `trainer` holds the weights to go on with. `point` is where an earlier process left off, None in a new run.
    `described` is the content of `config.json`, `metrics` are the rows of all steps so far, and `findings` those noted
    so far, by code.
    """

    trainer: TrainingClient

    def __init__(
        self,
        config: RunConfig,
        service: ServiceClient,
        log: RunLog,
        described: Mapping[str, Any],
        point: ResumePoint | None,
        on_progress: ProgressHook | None,
    ) -> None:
        self.config = config
        self.service = service
        self.log = log
        self.described = described
        self.point = point
        self.hooks: list[Callable[[str, dict[str, Any]], None]] = [] if on_progress is None else [on_progress]
        self.metrics: list[dict[str, Any]] = log.read("metrics.jsonl")
        self.findings = {row["code"]: Finding(**row) for row in log.read("findings.jsonl")}
        self.stopped_by: str | None = None
        self.effective: Mapping[str, Any] = {}
        """What took effect on the server."""
        self.base_model = config.base_model
        """How the service calls the model's base: a folder by its absolute path; `init_from` may have another one."""
        self._saved_step = 0 if point is None else point.step
        self._interrupt = Interrupt()

    @property
    def first_step(self) -> int:
        """The step to begin with, counted from 1."""
        return 1 if self.point is None else self.point.step + 1

    @contextmanager
    def interruptible(self) -> Generator[None]:
        """Within the block the first Ctrl-C ends the run after its step, and the second one at once.

        Raises:
            RunInterrupted: instead of every other KeyboardInterrupt.
        """
        try:
            with deferred_interrupt() as self._interrupt:
                yield
        except RunInterrupted:
            raise
        except KeyboardInterrupt as interrupt:
            raise self._interrupted() from interrupt

    def _interrupted(self) -> RunInterrupted:
        is_asked = is_stop_requested(self.log.folder) and not self._interrupt.requested
        by = "a request to stop" if is_asked else "Ctrl-C"
        return RunInterrupted(self.log.folder, saved_step=self._saved_step, steps=int(self.described["steps"]), by=by)

    def _is_to_end(self) -> bool:
        return self._interrupt.requested or is_stop_requested(self.log.folder)

    def tell(self, event: str, fields: dict[str, Any]) -> None:
        """Calls the trackers and the progress hook."""
        for hook in self.hooks:
            hook(event, fields)

    def record_step(self, metrics: dict[str, Any]) -> None:
        """Logs the metrics of one step, which must name it as `step`."""
        self.metrics.append(metrics)
        self.log.append("metrics.jsonl", metrics)
        self.tell("step", metrics)

    def record_evaluations(self, rows: Sequence[dict[str, Any]]) -> None:
        """Logs evaluations of the held-out set; each row names its `step` and `when` (before, during, after)."""
        self.log.append_all("evaluations.jsonl", list(rows))
        for row in rows:
            self.tell("evaluation", row)

    def note(self, finding: Finding) -> bool:
        """Logs a finding, unless it is known with at least this severity. Returns whether it was new."""
        known = self.findings.get(finding.code)
        if known is not None and SEVERITIES.index(known.severity) >= SEVERITIES.index(finding.severity):
            return False
        self.findings[finding.code] = finding
        self.log.append("findings.jsonl", finding.to_dict())
        self.tell("finding", finding.to_dict())
        return True

    def stop(self, finding: Finding) -> None:
        """Marks the run as stopped by a finding; the recipe's loop reads `stopped_by` and ends."""
        self.stopped_by = finding.code
        self.tell("stopped", finding.to_dict())

    def is_save_due(self, step: int, steps: int) -> bool:
        """Whether a checkpoint is due after `step` of `steps`; the last step is saved by the recipe itself."""
        return step < steps and (step % self.config.save_every == 0 or self._is_to_end())

    def save(
        self, step: int, *, totals: Mapping[str, float] | None = None, state: Mapping[str, Any] | None = None
    ) -> str:
        """Saves weights and optimizer as the point to resume from; returns the checkpoint.

        A resumed process finds `totals` and `state` in `point`. A step that is saved already is not saved again.

        Raises:
            RunInterrupted: the user has pressed Ctrl-C, or asked the run to stop; the step is saved.
        """
        if self.point is not None and self.point.step >= step:
            return self.point.checkpoint
        checkpoint = self.trainer.save_state(name=f"step-{step:06d}", overwrite=True).result().path
        self.log.save_point(ResumePoint(step, checkpoint, totals or {}, state or {}))
        self.log.append("checkpoints.jsonl", {"step": step, "checkpoint": checkpoint})
        self._saved_step = step
        if self._is_to_end():
            raise self._interrupted()
        return checkpoint

    def save_sampler_weights(self) -> str:
        """Saves the weights to sample from; returns their path."""
        return self.trainer.save_weights_for_sampler(name="final").result().path or ""


def _base_tokenizer(service: ServiceClient, config: RunConfig) -> Any:
    """The tokenizer of the model that a new run trains. It comes from a sampler of the base model, because a training
    client would leave a training run behind."""
    base_model = config.base_model
    if config.init_from is not None:
        info = service.create_rest_client().get_weights_info_by_tinker_path(config.init_from).result()
        base_model = info.base_model
    return service.create_sampling_client(base_model=base_model).get_tokenizer()


def make_trainer(service: ServiceClient, config: RunConfig, point: ResumePoint | None) -> TrainingClient:
    """The model to train: from the resume point, else from `config.init_from`, else a new lora."""
    if point is not None:
        return service.create_training_client_from_state_with_optimizer(point.checkpoint)
    if config.init_from is not None and config.init_optimizer:
        return service.create_training_client_from_state_with_optimizer(config.init_from)
    if config.init_from is not None:
        return service.create_training_client_from_state(config.init_from)
    return service.create_lora_training_client(
        base_model=config.base_model,
        rank=config.rank,
        seed=config.seed,
        train_mlp=config.train_mlp,
        train_attn=config.train_attn,
        train_unembed=config.train_unembed,
    )


def default_run_dir(name: str) -> Path:
    """A new folder name under `MINT_HOME/runs`, which it makes for its owner alone, from the name and the time."""
    stamp = time.strftime("%Y%m%d-%H%M%S")
    runs = read_settings().home_dir / "runs"
    # With rights for others, the next service would find it so, take them away and say so.
    runs.mkdir(mode=0o700, parents=True, exist_ok=True)
    base = runs / f"{name}-{stamp}"
    candidates = [base, *(base.with_name(f"{base.name}-{number}") for number in range(2, 1000))]
    return next(candidate for candidate in candidates if not candidate.exists())
