"""The task of the published model: what is held out, what counts as right, and that it trains."""

from __future__ import annotations

from pathlib import Path

import pytest

from mint.recipes.question_task import Question
from mint.recipes.sums import DEMO, SumsAdapter
from mint.rl import run_grpo


def _operands(question: Question) -> tuple[int, ...]:
    words = question.text.replace("?", " ").split()
    return tuple(sorted(int(word) for word in words if word.isdigit()))


def test_a_held_out_sum_is_trained_on_in_neither_order() -> None:
    task = SumsAdapter(seed=1)
    training, heldout = task.build_dataset(), task.build_heldout()
    assert not {_operands(item) for item in training} & {_operands(item) for item in heldout}
    assert len(training) + len(heldout) == 49 * 49 and len(heldout) > 200
    assert all(sum(_operands(item)) == int(item.answer) for item in [*training, *heldout])


@pytest.mark.parametrize(
    ("reply", "reward"),
    [("39", 1), ("14 + 25 = 39.", 1), ("It is 39", 1), ("14 + 25", 0), ("39 or 40", 0), ("390", 0), ("", 0)],
)
def test_the_last_number_of_a_reply_counts(reply: str, reward: float) -> None:
    question = Question("What is 14 + 25? Reply with the number only.", "39")
    assert SumsAdapter().compute_reward(reply, question).value == reward


def test_it_trains_any_chat_model(tmp_path: Path) -> None:
    settings = {"base_model": "mint/tiny", "steps": 1, "heldout_size": 4, "batch_size": 2, "run_dir": tmp_path / "run"}
    result = run_grpo(SumsAdapter(), DEMO.changed(**settings))
    assert result.steps == 1 and result.samples == 16
