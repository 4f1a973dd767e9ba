"""Mirrors of a run in TensorBoard, Weights & Biases and trackio. The run folder has everything: a tracker that fails is
dropped with a finding, and the run continues.

Imports each of the three packages only when it is used.
"""

from __future__ import annotations

import contextlib
import json
import logging
import secrets
import sys
from collections.abc import Callable, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol, Self

from mint.errors import InvalidRequestError, MissingExtraError
from mint.extras import install_command
from mint.rl.finding import SEVERITIES, Finding

log = logging.getLogger("mint.trackers")

PROJECT = "mint"

Numbers = Mapping[str, float]


class Tracker(Protocol):
    """Takes numbers by name, step by step. A resumed run may continue from an earlier step than the last one logged."""

    def log(self, step: int, numbers: Numbers) -> None:
        """Logs numbers of one step; may be called several times for a step."""
        ...

    def close(self, *, failed: bool) -> None:
        """Writes the rest; `failed`: the run has ended with an error."""
        ...


def require_installed(names: Sequence[str]) -> None:
    """Raises MissingExtraError if the package of a tracker is not installed."""
    for name in names:
        if find_spec(name) is None:
            raise MissingExtraError(
                f"tracking with {name} needs the package {name}", remedy=install_command("trackers")
            )


class Trackers:
    """All trackers of a run; call it as a progress hook."""

    def __init__(
        self, names: Sequence[str], folder: Path, config: Mapping[str, Any], on_failure: Callable[[Finding], object]
    ) -> None:
        """`config` is the content of the run's `config.json`; `on_failure` gets the finding of a tracker that fails.

        Raises:
            MissingExtraError: the package of a tracker is not installed.
            InvalidRequestError: a tracker cannot be opened.
        """
        require_installed(names)
        self._on_failure = on_failure
        self._open: dict[str, Tracker] = {}
        self._step = 0
        self._findings = dict.fromkeys(SEVERITIES, 0)
        for name in names:
            try:
                self._open[name] = _MAKERS[name](folder, config)
            except Exception as error:  # without account or network, each package raises its own errors
                raise InvalidRequestError(
                    f"cannot be opened ({type(error).__name__}: {error})",
                    field="trackers",
                    value=name,
                    remedy="W&B without an account or network: set WANDB_MODE=offline; else leave the tracker out",
                ) from error

    def __call__(self, event: str, fields: Mapping[str, Any]) -> None:
        """Logs the numbers of an event."""
        if event == "step":
            self._log(int(fields["step"]), {name: value for name, value in fields.items() if name != "step"})
        elif event == "evaluation":
            self._log(int(fields["step"]), _evaluation_numbers(fields))
        elif event == "finding":
            self._findings[fields["severity"]] += 1
            self._log(int(fields["step"]), {f"findings/{name}": float(n) for name, n in self._findings.items()})

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        for name in list(self._open):
            self._guarded(name, lambda tracker: tracker.close(failed=error is not None))
        self._open.clear()

    def _log(self, step: int, numbers: Numbers) -> None:
        self._step = step
        for name in list(self._open):
            self._guarded(name, lambda tracker: tracker.log(step, numbers))

    def _guarded(self, name: str, act: Callable[[Tracker], None]) -> None:
        try:
            act(self._open[name])
        except Exception as error:  # no error of a tracker may end the run
            log.warning("the tracker %s failed and is no longer used", name, exc_info=True)
            del self._open[name]
            self._on_failure(
                Finding(
                    "tracker_failed",
                    "warning",
                    self._step,
                    f"{name} failed ({type(error).__name__}: {error}); the run goes on without it",
                    "Everything is in the run folder: see mint dashboard, or correct the tracker and resume",
                )
            )


def _evaluation_numbers(row: Mapping[str, Any]) -> Numbers:
    """The numbers of one evaluation on the held-out set: of a `metric`, or of the reward at a temperature."""
    what = row.get("metric") or ("greedy" if row["temperature"] == 0 else "sampled")
    return {f"heldout/{what}/{name}": float(row[name]) for name in ("mean", "low", "high", "success") if name in row}


class _TensorBoard:
    def __init__(self, folder: Path, config: Mapping[str, Any]) -> None:
        from tensorboard.summary import Writer  # deferred: an optional package

        self._writer = Writer(str(folder / "tensorboard"))

    def log(self, step: int, numbers: Numbers) -> None:
        for name, value in numbers.items():
            self._writer.add_scalar(name, value, step)
        self._writer.flush()

    def close(self, *, failed: bool) -> None:
        self._writer.close()


class _WandB:
    """W&B's own settings say where to send (`WANDB_MODE=offline`, `WANDB_PROJECT`, …)."""

    def __init__(self, folder: Path, config: Mapping[str, Any]) -> None:
        import wandb  # deferred: an optional package

        settings = wandb.Settings(silent=True, console="off")
        project = PROJECT if wandb.setup().settings.project is None else None
        self._run = wandb.init(
            project=project,
            name=folder.name,
            id=_wandb_id(folder),
            resume="allow",
            dir=str(folder),
            config=dict(config),
            settings=settings,
        )

    def log(self, step: int, numbers: Numbers) -> None:
        self._run.log(dict(numbers), step=step)

    def close(self, *, failed: bool) -> None:
        self._run.finish(exit_code=int(failed))


class _Trackio:
    def __init__(self, folder: Path, config: Mapping[str, Any]) -> None:
        import trackio  # deferred: an optional package

        with contextlib.redirect_stdout(sys.stderr):  # it prints a greeting, and stdout is for the user's output
            self._run = trackio.init(
                project=PROJECT,
                name=folder.name,
                config=json.loads(json.dumps(dict(config), default=str)),  # it takes plain JSON values only
                resume="allow",
                embed=False,
                auto_log_cpu=False,
                auto_log_gpu=False,
            )

    def log(self, step: int, numbers: Numbers) -> None:
        self._run.log(dict(numbers), step=step)

    def close(self, *, failed: bool) -> None:
        with contextlib.redirect_stdout(sys.stderr):
            self._run.finish()


def _wandb_id(folder: Path) -> str:
    """The id by which W&B recognizes a resumed run; kept in the run folder."""
    path = folder / "wandb.id"
    if not path.exists():
        path.write_text(secrets.token_hex(4))
    return path.read_text()


_MAKERS: Mapping[str, Callable[[Path, Mapping[str, Any]], Tracker]] = {
    "tensorboard": _TensorBoard,
    "wandb": _WandB,
    "trackio": _Trackio,
}
