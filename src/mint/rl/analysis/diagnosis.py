"""Diagnosis of a run: the order of the rules, and which finding explains which. Pure.

The rules are in `signal_rules`, `progress_rules`, `policy_rules` and `reward_rules`. docs/diagnosis.md says what each
code means and what to do about it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace

from mint.rl.analysis.policy_rules import (
    entropy_collapse,
    learning_rate_too_high,
    learning_rate_too_low,
    length_runaway,
    nonfinite_or_skipped_steps,
    off_policy_drift,
    sampler_trainer_mismatch,
    truncation,
)
from mint.rl.analysis.progress_rules import falling_reward, few_prompts, no_progress, overfitting
from mint.rl.analysis.reward_rules import (
    grader_failures,
    grader_timeouts,
    inconsistent_reward,
    judge_unreliable,
    reward_out_of_range,
    server_warnings,
    suspected_reward_hacking,
    unsupported_rewards,
)
from mint.rl.analysis.run_record import RunRecord, StepView
from mint.rl.analysis.signal_rules import (
    no_heldout,
    no_signal,
    nothing_trained,
    reversed_advantages,
    reward_collapse,
    reward_spike,
    saturation,
)
from mint.rl.finding import Finding, Severity

Rule = Callable[[StepView], Finding | None]

RULES: tuple[Rule, ...] = (
    nonfinite_or_skipped_steps,
    sampler_trainer_mismatch,
    reversed_advantages,
    server_warnings,
    reward_out_of_range,
    grader_failures,
    grader_timeouts,
    unsupported_rewards,
    judge_unreliable,
    inconsistent_reward,
    few_prompts,
    truncation,
    learning_rate_too_high,
    learning_rate_too_low,
    off_policy_drift,
    falling_reward,
    suspected_reward_hacking,
    overfitting,
    reward_collapse,
    reward_spike,
    nothing_trained,
    no_signal,
    saturation,
    entropy_collapse,
    length_runaway,
    no_progress,
    no_heldout,
)
"""In this order: causes before symptoms."""

CODES: Mapping[str, Severity] = {
    "no_learning_signal_all_wrong": "error",
    "no_learning_signal_all_right": "warning",
    "no_learning_signal": "error",
    "constant_reward": "error",
    "nothing_trained": "error",
    "reversed_advantages": "error",
    "saturation": "info",
    "reward_collapse": "error",
    "reward_spike": "warning",
    "no_progress": "warning",
    "falling_reward": "error",
    "overfitting": "error",
    "few_prompts": "warning",
    "inconsistent_reward": "error",
    "entropy_collapse": "error",
    "length_runaway": "warning",
    "truncation": "error",
    "masked_loss": "error",
    "off_policy_drift": "warning",
    "sampler_trainer_mismatch": "error",
    "suspected_reward_hacking": "error",
    "grader_failures": "error",
    "grader_timeouts": "error",
    "unsupported_rewards": "error",
    "judge_unreliable": "warning",
    "reward_out_of_range": "error",
    "nonfinite_or_skipped_steps": "error",
    "learning_rate_too_high": "error",
    "learning_rate_too_low": "error",
    "server_warnings": "warning",
    "no_heldout": "info",
}
"""Every code with its worst severity."""

_COLLAPSE_SYMPTOMS = frozenset(
    {
        "reward_collapse",
        "falling_reward",
        "entropy_collapse",
        "no_learning_signal_all_wrong",
        "no_learning_signal",
        "truncation",
    }
)
_NO_SIGNAL_SYMPTOMS = frozenset({"no_learning_signal_all_wrong", "no_learning_signal", "constant_reward"})

EXPLAINS: Mapping[str, frozenset[str]] = {
    "masked_loss": _COLLAPSE_SYMPTOMS,
    "nonfinite_or_skipped_steps": _COLLAPSE_SYMPTOMS,
    "sampler_trainer_mismatch": _COLLAPSE_SYMPTOMS | {"learning_rate_too_high", "suspected_reward_hacking"},
    "reversed_advantages": _COLLAPSE_SYMPTOMS,
    "reward_out_of_range": _NO_SIGNAL_SYMPTOMS | {"reward_collapse", "grader_failures"},
    "grader_failures": _NO_SIGNAL_SYMPTOMS | {"reward_collapse"},
    "grader_timeouts": _NO_SIGNAL_SYMPTOMS | {"reward_collapse"},
    "unsupported_rewards": _NO_SIGNAL_SYMPTOMS,
    "truncation": frozenset({"no_learning_signal_all_wrong", "no_learning_signal", "entropy_collapse"}),
    "learning_rate_too_high": _COLLAPSE_SYMPTOMS,
    "falling_reward": _COLLAPSE_SYMPTOMS - {"falling_reward"},
    "reward_collapse": frozenset({"no_learning_signal_all_wrong", "entropy_collapse", "truncation"}),
    "entropy_collapse": frozenset({"no_learning_signal_all_wrong"}),
    "suspected_reward_hacking": frozenset({"reward_collapse", "entropy_collapse"}),
}
"""Cause → symptoms. An error of a symptom that is not older than the error of its cause becomes a warning."""

_RANK: Mapping[Severity, int] = {"info": 0, "warning": 1, "error": 2}


def diagnose(record: RunRecord, *, since: int = 0, known: Iterable[Finding] = ()) -> list[Finding]:
    """The findings of the steps after `since` that are not in `known`.

    Each code comes at most once: at its first step, or at the step where it becomes more severe.
    """
    before = {finding.code: finding for finding in known}
    found: dict[str, Finding] = {}
    for place, metrics in enumerate(record.metrics):
        if metrics["step"] <= since:
            continue
        view = record.at(place)
        for rule in RULES:
            finding = rule(view)
            if finding is None:
                continue
            finding = _explained(finding, [*before.values(), *found.values()])
            seen = found.get(finding.code) or before.get(finding.code)
            if seen is None or _RANK[finding.severity] > _RANK[seen.severity]:
                found[finding.code] = finding
    return list(found.values())


def is_contradicted(finding: Finding, record: RunRecord) -> bool:
    """Whether the end of the run does not show any more what a finding of an earlier step says: a gain came later, in
    training or in the last held-out evaluation."""
    return finding.code == "no_progress" and no_progress(record.at(len(record.metrics) - 1)) is None


def _explained(finding: Finding, causes: Iterable[Finding]) -> Finding:
    """Turns an error that a known error explains into a warning that names the cause."""
    if finding.severity != "error":
        return finding
    for cause in causes:
        if cause.severity == "error" and finding.code in EXPLAINS.get(cause.code, ()):
            return replace(finding, severity="warning", evidence=f"{finding.evidence} (follows from {cause.code})")
    return finding
