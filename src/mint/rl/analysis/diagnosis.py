"""Why a run does or does not learn: which rules are asked, in which order, and which finding explains which.

Pure functions over the run log, live or afterwards. The rules are in `rules_signal`, `rules_policy` and `rules_reward`;
what each code means and what to do about it is in docs/diagnosis.md. Also the check of every batch before training.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace

import numpy as np

from mint.rl.analysis.finding import Finding, Severity
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
from mint.rl.analysis.reward_rules import (
    grader_failures,
    grader_timeouts,
    judge_unreliable,
    reward_out_of_range,
    server_warnings,
    suspected_reward_hacking,
    unsupported_rewards,
)
from mint.rl.analysis.run_record import RunRecord, View
from mint.rl.analysis.signal_rules import no_heldout, no_signal, reward_collapse, reward_spike, saturation
from mint.types import Datum

__all__ = ["CODES", "RunRecord", "check_datums", "diagnose"]

Rule = Callable[[View], Finding | None]

RULES: tuple[Rule, ...] = (
    nonfinite_or_skipped_steps,
    sampler_trainer_mismatch,
    server_warnings,
    reward_out_of_range,
    grader_failures,
    grader_timeouts,
    unsupported_rewards,
    judge_unreliable,
    truncation,
    learning_rate_too_high,
    learning_rate_too_low,
    off_policy_drift,
    suspected_reward_hacking,
    reward_collapse,
    reward_spike,
    no_signal,
    saturation,
    entropy_collapse,
    length_runaway,
    no_heldout,
)
"""Causes before symptoms."""

CODES: Mapping[str, Severity] = {
    "no_learning_signal_all_wrong": "error",
    "no_learning_signal_all_right": "warning",
    "constant_reward": "error",
    "saturation": "info",
    "reward_collapse": "error",
    "reward_spike": "warning",
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
"""Every code, and the worst severity that it can have."""

_FALLS = frozenset({"reward_collapse", "entropy_collapse", "no_learning_signal_all_wrong", "truncation"})
_SILENCE = frozenset({"no_learning_signal_all_wrong", "constant_reward"})

EXPLAINS: Mapping[str, frozenset[str]] = {
    "masked_loss": _FALLS,
    "nonfinite_or_skipped_steps": _FALLS,
    "sampler_trainer_mismatch": _FALLS | {"learning_rate_too_high", "suspected_reward_hacking"},
    "reward_out_of_range": _SILENCE | {"reward_collapse", "grader_failures"},
    "grader_failures": _SILENCE | {"reward_collapse"},
    "grader_timeouts": _SILENCE | {"reward_collapse"},
    "unsupported_rewards": _SILENCE,
    "truncation": frozenset({"no_learning_signal_all_wrong", "entropy_collapse"}),
    "learning_rate_too_high": _FALLS,
    "reward_collapse": frozenset({"no_learning_signal_all_wrong", "entropy_collapse", "truncation"}),
    "entropy_collapse": frozenset({"no_learning_signal_all_wrong"}),
    "suspected_reward_hacking": frozenset({"reward_collapse", "entropy_collapse"}),
}
"""An error of the first kind is the cause of errors of the others that are seen no earlier: those become warnings."""

_RANK: Mapping[Severity, int] = {"info": 0, "warning": 1, "error": 2}


def diagnose(record: RunRecord, *, since: int = 0, known: Iterable[Finding] = ()) -> list[Finding]:
    """What the steps after `since` show that `known` findings do not say, in the order of `RULES`.

    Each code at most once: at the step where it is first seen, or, if it becomes more severe later, where it does.
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


def _explained(finding: Finding, causes: Iterable[Finding]) -> Finding:
    """A symptom of a known error is a warning that names it."""
    if finding.severity != "error":
        return finding
    for cause in causes:
        if cause.severity == "error" and finding.code in EXPLAINS.get(cause.code, ()):
            return replace(finding, severity="warning", evidence=f"{finding.evidence} (follows from {cause.code})")
    return finding


def check_datums(datums: Sequence[Datum], prompt_lengths: Sequence[int]) -> list[Finding]:
    """At most one `masked_loss` finding (step 0) about a batch that is about to be trained on.

    `prompt_lengths[i]` tokens of datum i are the prompt [P]. Position t predicts token t + 1, so the first P − 1
    positions must have weight 0 and advantage 0, and something after them must be trained.
    """
    on_prompt, untrained = [], []
    for place, (datum, length) in enumerate(zip(datums, prompt_lengths, strict=True)):
        prompt = max(0, length - 1)
        weights = _column(datum, "weights")
        advantages = _column(datum, "advantages")
        if any(column is not None and bool(column[:prompt].any()) for column in (weights, advantages)):
            on_prompt.append(place)
        if weights is not None and not weights[prompt:].any():
            untrained.append(place)
    if not on_prompt and not untrained:
        return []
    first = (on_prompt or untrained)[0]
    evidence = (
        f"{len(on_prompt)} of {len(datums)} datums have weights or advantages on prompt tokens"
        if on_prompt
        else f"{len(untrained)} of {len(datums)} datums have no weight on their completion"
    )
    return [
        Finding(
            "masked_loss",
            "error",
            0,
            f"{evidence}; the first is datum {first}, with a prompt of {prompt_lengths[first]} tokens",
            "Give the first len(prompt) − 1 positions weight 0 and advantage 0, and the completion's weight 1: "
            "input = full[:-1], target_tokens = full[1:]",
            {"on_prompt": float(len(on_prompt)), "untrained": float(len(untrained)), "datums": float(len(datums))},
        )
    ]


def _column(datum: Datum, name: str) -> np.ndarray | None:
    tensor = datum.loss_fn_inputs.get(name)
    return None if tensor is None else tensor.to_numpy()
