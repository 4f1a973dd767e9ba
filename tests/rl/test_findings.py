"""What a step's numbers show."""

from __future__ import annotations

from mint.rl.findings import step_findings

HEALTHY = {
    "step": 1.0, "groups/used": 8.0, "groups/all_good": 0.0, "groups/all_bad": 0.0, "rollouts/truncated_share": 0.0,
    "rollouts/ungraded": 0.0, "rollouts/count": 64.0, "mismatch/mean_abs_logprob_diff": 1e-7,
}  # fmt: skip


def names(*history: dict[str, float]) -> list[str]:
    return [finding.name for finding in step_findings(history, [])]


def test_a_healthy_step_has_no_finding() -> None:
    assert names(HEALTHY) == []


def test_three_steps_without_signal_are_named_with_the_remedy_for_their_side() -> None:
    hard = {**HEALTHY, "groups/used": 0.0, "groups/all_bad": 8.0}
    assert names(hard, hard) == []
    assert names(hard, hard, hard) == ["no_learning_signal"]
    assert "easier" in step_findings([hard] * 3, [])[0].remedy
    solved = {**HEALTHY, "groups/used": 0.0, "groups/all_good": 8.0}
    assert names(solved, solved, solved) == ["saturated"]
    assert "harder" in step_findings([solved] * 3, [])[0].remedy


def test_truncation_grader_errors_mismatch_and_server_warnings_are_named() -> None:
    assert names({**HEALTHY, "rollouts/truncated_share": 0.06}) == ["truncation"]
    assert names({**HEALTHY, "rollouts/ungraded": 2.0}) == ["grader_errors"]
    assert names({**HEALTHY, "mismatch/mean_abs_logprob_diff": 0.05}) == ["sampler_trainer_mismatch"]
    found = step_findings([HEALTHY], ["datum 3: raw rewards?"])
    assert [(finding.name, finding.evidence) for finding in found] == [("datum_warning", "datum 3: raw rewards?")]
