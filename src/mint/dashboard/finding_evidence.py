"""For each finding: what it means, which metrics to plot, and which rollouts show it.

A table only; knows neither runs nor pages. docs/diagnosis.md explains every code.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlencode


@dataclass(frozen=True)
class FindingEvidence:
    """`means` is a sentence; `plot` names metrics, the most useful first.

    `query` has the fields of a `RolloutQuery` for the rollouts that show the finding, in the last `steps` steps up to
    the one where it was seen. `steps` 0: rollouts do not show it.
    """

    means: str = ""
    plot: tuple[str, ...] = ("reward/mean",)
    query: Mapping[str, Any] = field(default_factory=dict)
    steps: int = 5

    def samples(self, step: int) -> dict[str, Any]:
        """The fields of a `RolloutQuery` for a finding seen at `step`; step 0 is before the first step."""
        if self.steps == 0 or step < 1:
            return dict(self.query)
        return {**self.query, "first_step": max(1, step - self.steps + 1), "last_step": step}


def _flags(*names: str, sort: str | None = None) -> dict[str, Any]:
    return {"flags": frozenset(names)} | ({} if sort is None else {"sort": sort})


_WORST = {"sort": "reward"}
_BEST = {"sort": "-reward"}
_LONGEST = {"sort": "-length"}
_ALL: dict[str, Any] = {}
_TRAINED = _flags("used")
_SIGNAL = ("groups/used", "groups/all_good", "groups/all_bad")
_MISMATCH = ("mismatch/max_abs_logprob_diff", "mismatch/mean_abs_logprob_diff")
_UPDATE = ("optim/update_norm", "learning_rate", "reward/mean")

CHECKED: Mapping[str, Mapping[str, FindingEvidence]] = {
    "Signal": {
        "no_learning_signal_all_wrong": FindingEvidence(
            "no group has unequal rewards, because everything is wrong: nothing is trained",
            _SIGNAL,
            _flags("no_signal", sort="reward"),
        ),
        "no_learning_signal_all_right": FindingEvidence(
            "no group has unequal rewards, because everything is right: nothing is trained",
            _SIGNAL,
            _flags("no_signal", sort="-reward"),
        ),
        "no_learning_signal": FindingEvidence(
            "no group has unequal rewards; some are right and others wrong, or all have partial credit",
            _SIGNAL,
            _flags("no_signal"),
        ),
        "constant_reward": FindingEvidence(
            "the grader gives every completion the same reward", ("reward/std", "reward/mean"), _ALL
        ),
        "nothing_trained": FindingEvidence(
            "groups have unequal rewards, and none of them goes into the loss",
            ("groups/untrained", "groups/used"),
            _ALL,
        ),
        "reversed_advantages": FindingEvidence(
            "a higher reward has a lower advantage", ("reward/mean", "success/rate"), _TRAINED
        ),
        "no_progress": FindingEvidence(
            "there is a signal, but the reward does not rise",
            ("reward/mean", "optim/update_norm", "groups/used"),
            _TRAINED,
        ),
        "few_prompts": FindingEvidence("the run trains on a handful of prompts", ("reward/mean",), _ALL),
        "overfitting": FindingEvidence(
            "the training reward rises and the held-out reward does not", ("reward/mean", "success/rate"), _BEST
        ),
        "saturation": FindingEvidence("the task is nearly solved", ("success/rate", "groups/used"), _BEST),
    },
    "Reward": {
        "reward_collapse": FindingEvidence(
            "the reward was high and has fallen",
            ("reward/mean", "success/rate", "rollouts/entropy_estimate"),
            _WORST,
            1,
        ),
        "falling_reward": FindingEvidence(
            "the reward has fallen from the first steps on", ("reward/mean", "success/rate"), _TRAINED
        ),
        "inconsistent_reward": FindingEvidence(
            "equal completions of one prompt earn different rewards", ("reward/std", "rollouts/duplicate_share"), _ALL
        ),
        "reward_spike": FindingEvidence(
            "the reward jumps faster than a policy learns",
            ("reward/mean", "reward/max", "rollouts/mean_length"),
            _BEST,
            1,
        ),
        "suspected_reward_hacking": FindingEvidence(
            "the reward rises, but not because the task is solved",
            ("reward/mean", "rollouts/duplicate_share", "rollouts/mean_length"),
            _BEST,
            3,
        ),
    },
    "Policy": {
        "entropy_collapse": FindingEvidence(
            "the policy has become certain, but not right",
            ("rollouts/entropy_estimate", "train/entropy", "rollouts/duplicate_share"),
            _flags("duplicate"),
        ),
        "length_runaway": FindingEvidence(
            "completions become longer, and the reward does not rise",
            ("rollouts/mean_length", "rollouts/truncated_share", "reward/mean"),
            _LONGEST,
        ),
        "truncation": FindingEvidence(
            "completions are cut off at a limit",
            ("rollouts/truncated_share", "rollouts/mean_length"),
            _flags("truncated"),
        ),
    },
    "Update": {
        "learning_rate_too_high": FindingEvidence(
            "the reward collapsed after steps that were too large", _UPDATE, _WORST, 1
        ),
        "learning_rate_too_low": FindingEvidence(
            "there is a signal, but the steps are too small to matter", _UPDATE, _TRAINED
        ),
        "off_policy_drift": FindingEvidence(
            "the policy in training differs from the one that sampled",
            ("train/kl_k2", "train/ess", "train/ratio_p99", "staleness/mean"),
            _TRAINED,
        ),
        "sampler_trainer_mismatch": FindingEvidence(
            "with the same weights, sampler and trainer compute different logprobs", _MISMATCH, _TRAINED, 1
        ),
        "masked_loss": FindingEvidence(
            "weights or advantages on prompt tokens, or none on a completion",
            ("train/tokens", "ledger/trained"),
            _TRAINED,
            1,
        ),
        "nonfinite_or_skipped_steps": FindingEvidence(
            "a loss or gradient was not finite, and the step was skipped",
            ("optim/skipped_nonfinite", "optim/grad_norm", "train/loss"),
            _TRAINED,
            1,
        ),
        "server_warnings": FindingEvidence(
            "the server found something unusual in a batch", ("train/lint_warnings",), _TRAINED, 1
        ),
    },
    "Grader": {
        "grader_failures": FindingEvidence(
            "the grader raised an error, or returned no number", ("rollouts/ungraded", "groups/failed"), _flags("error")
        ),
        "grader_timeouts": FindingEvidence(
            "the grader did not answer in time", ("rollouts/timeouts", "time/rollouts_s"), _flags("timed_out")
        ),
        "unsupported_rewards": FindingEvidence(
            "the grader declared that it cannot judge these completions",
            ("rollouts/unsupported",),
            _flags("unsupported"),
        ),
        "judge_unreliable": FindingEvidence(
            "a pairwise judge prefers a position, or its comparisons fail", ("reward/std", "rollouts/ungraded"), _ALL, 1
        ),
        "reward_out_of_range": FindingEvidence(
            "a reward was outside the declared range, and was refused",
            ("rollouts/ungraded", "reward/max", "reward/min"),
            _flags("error"),
        ),
        "no_heldout": FindingEvidence("there is no held-out evaluation", ("reward/mean", "success/rate"), steps=0),
    },
}
"""Topic → code → evidence: the findings that are looked for at every step, in the order of docs/diagnosis.md."""

BESIDE_THE_STEPS: Mapping[str, FindingEvidence] = {
    "heldout_overlap": FindingEvidence(
        "some training samples were also in the held-out set, and were left out",
        ("reward/mean", "success/rate"),
        steps=0,
    ),
    "template_rewrites_history": FindingEvidence(
        "the chat template renders past turns differently, so that an episode trains as several datums",
        ("rollouts/retokenized_turns", "rollouts/turns_mean"),
        _LONGEST,
    ),
    "unused_settings": FindingEvidence("some settings have no effect beside the others", steps=0),
    "tracker_failed": FindingEvidence("a tracker raised an error, and gets nothing more", steps=0),
    "custom_metric_not_finite": FindingEvidence(
        "a metric of your own was not finite at some step, and is left out there", steps=0
    ),
}
"""The findings that are noted once, by what prepares and records a run."""

EVIDENCE: Mapping[str, FindingEvidence] = {
    **{code: evidence for topic in CHECKED.values() for code, evidence in topic.items()},
    **BESIDE_THE_STEPS,
}
"""Finding code → evidence."""

NO_EVIDENCE = FindingEvidence(steps=1)
"""For a code that is not in this table."""


def evidence_of(finding: Mapping[str, Any]) -> dict[str, Any]:
    """A finding as pages show it: with its meaning, the metrics to plot, and the query for its rollouts.

    The query is empty if rollouts do not show the finding; `address` is the same query as part of a URL.
    """
    known = EVIDENCE.get(finding["code"], NO_EVIDENCE)
    samples = known.samples(int(finding["step"])) if known.steps else {}
    query = {name: sorted(value) if isinstance(value, frozenset) else str(value) for name, value in samples.items()}
    address = urlencode([(_URL_NAMES.get(name, name), one) for name, value in query.items() for one in _each(value)])
    shown = {"means": known.means, "plot": list(known.plot), "query": query, "address": address}
    return {**finding, **shown, "has_samples": known.steps > 0}


_URL_NAMES = {"flags": "flag"}


def _each(value: str | list[str]) -> list[str]:
    return [value] if isinstance(value, str) else value
