"""What a step writes down of each rollout: the tokens of every turn, and what the loss was given for each of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from mint.recipes.tools import DEMO, ToolsAdapter
from mint.rl import run_grpo
from mint.runs.log import RunLog

COEF = 0.3


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three steps of episodes with a KL penalty; the first samples from the reference itself."""
    home = tmp_path_factory.mktemp("home")
    config = DEMO.changed(steps=3, batch_size=3, group_size=4, heldout_size=0, kl_penalty_coef=COEF)
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("MINT_HOME", str(home))
        environment.setenv("MINT_THREADS", "1")
        run_grpo(ToolsAdapter(seed=0), config.changed(run_dir=home / "run"))
    return home / "run"


def rollouts(folder: Path) -> list[dict[str, Any]]:
    return RunLog(folder).read("rollouts.jsonl")


def test_the_lengths_of_the_turns_add_up_to_the_tokens(folder: Path) -> None:
    rows = rollouts(folder)
    assert {row["turns"] for row in rows} >= {1, 2}
    for row in rows:
        assert len(row["turn_lengths"]) == row["turns"]
        assert sum(row["turn_lengths"]) == len(row["tokens"])


def test_the_advantage_of_each_token_is_the_rollouts_less_the_penalty_that_the_step_reports(folder: Path) -> None:
    rows, metrics = rollouts(folder), RunLog(folder).read("metrics.jsonl")
    assert not any("token_advantages" in row for row in rows if row["step"] == 1), "there the policy is the reference"
    for step in (2, 3):
        used = [row for row in rows if row["step"] == step and row["used"]]
        assert any("token_advantages" in row for row in used)
        # A token pays for itself and all that follow, so the first one pays for the whole rollout.
        paid = sum(row["advantage"] - row.get("token_advantages", [row["advantage"]])[0] for row in used)
        tokens = sum(len(row["tokens"]) for row in used)
        k1 = metrics[step - 1]["kl/policy_reference_k1"]
        assert paid == pytest.approx(COEF * k1 * tokens, abs=1e-6 * len(used))
        assert all(len(row.get("token_advantages", row["tokens"])) == len(row["tokens"]) for row in used)


def test_each_step_says_when_it_was_done(folder: Path) -> None:
    times = [row["time/unix_s"] for row in RunLog(folder).read("metrics.jsonl")]
    assert times == sorted(times)
    assert times[-1] <= (folder / "metrics.jsonl").stat().st_mtime + 1
