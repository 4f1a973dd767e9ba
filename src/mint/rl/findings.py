"""What can be seen to be wrong from a step's own numbers: a name, the evidence, a remedy. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

NO_SIGNAL_STEPS = 3
TRUNCATED_SHARE = 0.05
MISMATCH_LOGPROB = 0.02
"""Mean |Δ logprob| between sampler and trainer on fresh weights above which ratios are not to be trusted."""


@dataclass(frozen=True)
class Finding:
    """One thing that looks wrong, first seen at `step`."""

    step: int
    name: str
    evidence: str
    remedy: str

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self)


def step_findings(history: Sequence[Mapping[str, float]], warnings: Iterable[str]) -> list[Finding]:
    """What the last step of `history` (metrics, oldest first) shows; `warnings` are the server's about its datums."""
    now = history[-1]
    step = int(now["step"])
    found = [Finding(step, "datum_warning", warning, "See the datum named in the evidence") for warning in warnings]
    recent = history[-NO_SIGNAL_STEPS:]
    if len(recent) == NO_SIGNAL_STEPS and all(metrics["groups/used"] == 0 for metrics in recent):
        found.append(_no_signal(step, recent))
    if now["rollouts/truncated_share"] > TRUNCATED_SHARE:
        found.append(
            Finding(
                step,
                "truncation",
                f"{now['rollouts/truncated_share']:.0%} of the completions ended at max_tokens, not at a stop token",
                "Raise max_tokens, or give a stop that the model produces",
            )
        )
    if now["rollouts/ungraded"] > 0:
        found.append(
            Finding(
                step,
                "grader_errors",
                f"{now['rollouts/ungraded']:.0f} completions of {now['rollouts/count']:.0f} got no reward",
                "See `error` in rollouts.jsonl",
            )
        )
    if now.get("mismatch/mean_abs_logprob_diff", 0.0) > MISMATCH_LOGPROB:
        found.append(
            Finding(
                step,
                "sampler_trainer_mismatch",
                f"mean |Δ logprob| is {now['mismatch/mean_abs_logprob_diff']:.3g} on fresh weights",
                "Are the logprobs of another temperature, or of older weights?",
            )
        )
    return found


def _no_signal(step: int, recent: Sequence[Mapping[str, float]]) -> Finding:
    good = sum(metrics["groups/all_good"] for metrics in recent)
    bad = sum(metrics["groups/all_bad"] for metrics in recent)
    if good > bad:
        name, remedy = "saturated", "The task is solved at this difficulty: stop here, or use harder samples"
    else:
        name = "no_learning_signal"
        remedy = "Use easier samples, partial credit, a larger group_size or a higher temperature; or start with SFT"
    return Finding(
        step,
        name,
        f"in {len(recent)} steps every group had equal rewards ({good:.0f} all good, {bad:.0f} all bad)",
        remedy,
    )
