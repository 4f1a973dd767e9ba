"""What each finding means, and what to look at beside it: the metrics it speaks of, and the rollouts that show it.

A table only: pure, and it knows neither runs nor pages. docs/diagnosis.md says more of every code.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlencode


@dataclass(frozen=True)
class Evidence:
    """`means` is a sentence; `plot` names metrics, the most telling first. `query` are fields of a `RolloutQuery` for
    the rollouts that show the finding, over the last `steps` steps up to the one where it was seen; `steps` 0: no
    rollout shows it."""

    means: str = ""
    plot: tuple[str, ...] = ("reward/mean",)
    query: Mapping[str, Any] = field(default_factory=dict)
    steps: int = 5

    def samples(self, step: int) -> dict[str, Any]:
        """Fields of a `RolloutQuery`: the rollouts that show the finding which was seen at `step`, 0 being before the
        first."""
        if self.steps == 0 or step < 1:
            return dict(self.query)
        return {**self.query, "first_step": max(1, step - self.steps + 1), "last_step": step}


def _flags(*names: str, sort: str | None = None) -> dict[str, Any]:
    return {"flags": frozenset(names)} | ({} if sort is None else {"sort": sort})


_WORST, _BEST, _LONGEST = {"sort": "reward"}, {"sort": "-reward"}, {"sort": "-length"}
_ALL: dict[str, Any] = {}
_TRAINED = _flags("used")
_SIGNAL = ("groups/used", "groups/all_good", "groups/all_bad")
_MISMATCH = ("mismatch/max_abs_logprob_diff", "mismatch/mean_abs_logprob_diff")
_UPDATE = ("optim/update_norm", "learning_rate", "reward/mean")

EVIDENCE: Mapping[str, Evidence] = {
    "no_learning_signal_all_wrong": Evidence(
        "no group has unequal rewards, because everything is wrong: nothing is trained",
        _SIGNAL,
        _flags("no_signal", sort="reward"),
    ),
    "no_learning_signal_all_right": Evidence(
        "no group has unequal rewards, because everything is right: nothing is trained",
        _SIGNAL,
        _flags("no_signal", sort="-reward"),
    ),
    "constant_reward": Evidence("the grader says the same to everything", ("reward/std", "reward/mean"), _ALL),
    "saturation": Evidence("the task is nearly solved", ("success/rate", "groups/used"), _BEST),
    "reward_collapse": Evidence(
        "the reward was there and is gone", ("reward/mean", "success/rate", "rollouts/entropy_estimate"), _WORST, 1
    ),
    "reward_spike": Evidence(
        "the reward jumps as learning does not", ("reward/mean", "reward/max", "rollouts/mean_length"), _BEST, 1
    ),
    "suspected_reward_hacking": Evidence(
        "the reward rises, but not for what was wanted",
        ("reward/mean", "rollouts/duplicate_share", "rollouts/mean_length"),
        _BEST,
        3,
    ),
    "entropy_collapse": Evidence(
        "the policy has become certain without having become right",
        ("rollouts/entropy_estimate", "train/entropy", "rollouts/duplicate_share"),
        _flags("duplicate"),
    ),
    "length_runaway": Evidence(
        "completions grow, the reward does not",
        ("rollouts/mean_length", "rollouts/truncated_share", "reward/mean"),
        _LONGEST,
    ),
    "truncation": Evidence(
        "samples end at a limit", ("rollouts/truncated_share", "rollouts/mean_length"), _flags("truncated")
    ),
    "learning_rate_too_high": Evidence("the reward collapsed after steps that were too large", _UPDATE, _WORST, 1),
    "learning_rate_too_low": Evidence("there is a signal, but the steps cannot matter", _UPDATE, _TRAINED),
    "off_policy_drift": Evidence(
        "the policy that is trained is no longer the one that sampled",
        ("train/kl_k2", "train/ess", "train/ratio_p99", "staleness/mean"),
        _TRAINED,
    ),
    "sampler_trainer_mismatch": Evidence(
        "on the very weights that sampled, the trainer computes other logprobs", _MISMATCH, _TRAINED, 1
    ),
    "masked_loss": Evidence(
        "weights or advantages on prompt tokens, or none on a completion",
        ("train/tokens", "ledger/trained"),
        _TRAINED,
        1,
    ),
    "nonfinite_or_skipped_steps": Evidence(
        "a loss or gradient was not a number, and the step was not taken",
        ("optim/skipped_nonfinite", "optim/grad_norm", "train/loss"),
        _TRAINED,
        1,
    ),
    "server_warnings": Evidence("the server found a batch odd", ("train/lint_warnings",), _TRAINED, 1),
    "grader_failures": Evidence(
        "the grader raised, or gave no number", ("rollouts/ungraded", "groups/failed"), _flags("error")
    ),
    "grader_timeouts": Evidence(
        "the grader did not answer in time", ("rollouts/timeouts", "time/rollouts_s"), _flags("timed_out")
    ),
    "unsupported_rewards": Evidence(
        "the grader said that it cannot judge here", ("rollouts/unsupported",), _flags("unsupported")
    ),
    "judge_unreliable": Evidence(
        "a pairwise judge prefers a place, or its comparisons fail", ("reward/std", "rollouts/ungraded"), _ALL, 1
    ),
    "reward_out_of_range": Evidence(
        "a reward lay outside of the range that was declared, and was refused",
        ("rollouts/ungraded", "reward/max", "reward/min"),
        _flags("error"),
    ),
    "no_heldout": Evidence("nobody reads a held-out set", ("reward/mean", "success/rate"), steps=0),
    "heldout_overlap": Evidence(
        "training samples were in the held-out set, too, and were left out", ("reward/mean", "success/rate"), steps=0
    ),
    "template_rewrites_history": Evidence(
        "the chat template renders past turns differently, so that an episode trains as several datums",
        ("rollouts/retokenized_turns", "rollouts/turns_mean"),
        _LONGEST,
    ),
    "tracker_failed": Evidence("a mirror of the log raised an error, and was left out from there on", steps=0),
}
"""By the code of a finding, in the order in which docs/diagnosis.md has them."""

NO_EVIDENCE = Evidence(steps=1)
"""Of a code that this table does not have."""

CHECKED: Mapping[str, tuple[str, ...]] = {
    "Signal": ("no_learning_signal_all_wrong", "no_learning_signal_all_right", "constant_reward", "saturation"),
    "Reward": ("reward_collapse", "reward_spike", "suspected_reward_hacking"),
    "Policy": ("entropy_collapse", "length_runaway", "truncation"),
    "Update": (
        "learning_rate_too_high",
        "learning_rate_too_low",
        "off_policy_drift",
        "sampler_trainer_mismatch",
        "masked_loss",
        "nonfinite_or_skipped_steps",
        "server_warnings",
    ),
    "Grader": (
        "grader_failures",
        "grader_timeouts",
        "unsupported_rewards",
        "judge_unreliable",
        "reward_out_of_range",
        "no_heldout",
    ),
}
"""What every step is asked for, by topic."""


def evidence_of(finding: Mapping[str, Any]) -> dict[str, Any]:
    """A finding as pages show it: with what it means, the metrics to plot, the query for its rollouts (empty where none
    show it), and the same as the query of an address."""
    known = EVIDENCE.get(finding["code"], NO_EVIDENCE)
    samples = known.samples(int(finding["step"])) if known.steps else {}
    query = {name: sorted(value) if isinstance(value, frozenset) else str(value) for name, value in samples.items()}
    address = urlencode([(_IN_ADDRESS.get(name, name), one) for name, value in query.items() for one in _each(value)])
    shown = {"means": known.means, "plot": list(known.plot), "query": query, "address": address}
    return {**finding, **shown, "has_samples": known.steps > 0}


_IN_ADDRESS = {"flags": "flag"}


def _each(value: str | list[str]) -> list[str]:
    return [value] if isinstance(value, str) else value
