"""The result of an RL run."""

from __future__ import annotations

from dataclasses import dataclass

from mint.rl.estimate import Estimate
from mint.rl.finding import Finding
from mint.rl.tracking.shown_result import ShownResult
from mint.runs.terminal_text import counted


@dataclass(frozen=True)
class RunResult(ShownResult):
    """A Python prompt shows it as one line, `print` as lines, a notebook as a table with the curve.

    `heldout_before` and `heldout_after` are by temperature (0.0 greedy, 1.0); empty without a held-out set.

    `checkpoint` holds the final weights and optimizer; `best_checkpoint` those of the best greedy evaluation,
    if `eval_every` is set. `stopped_by` is the finding that ended the run early.
    """

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
    findings: list[Finding]
    best_checkpoint: str | None = None
    stopped_by: str | None = None

    def __repr__(self) -> str:
        """One short line, which a Python prompt shows; the fields have everything."""
        rewards = [
            f", held-out reward at temperature {temperature:g} {before.mean:.3f} → {after.mean:.3f}"
            for temperature, before in sorted(self.heldout_before.items())
            if (after := self.heldout_after.get(temperature)) is not None
        ]
        ended = "" if self.stopped_by is None else f", stopped by {self.stopped_by}"
        return f"<{type(self).__name__} {self.run_dir}: {counted(self.steps, 'step')}{ended}{''.join(rewards)}>"
