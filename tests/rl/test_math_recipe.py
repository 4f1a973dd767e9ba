"""The math task: exact match, and a held-out set that is disjoint by construction."""

from __future__ import annotations

import pytest

from mint.errors import InvalidRequestError
from mint.recipes.math import MathAdapter
from mint.rl.tasks.math_grader import exact_match


@pytest.mark.parametrize("response", ["92", " 92", " 92 \n"])
def test_the_answer_and_nothing_else_is_right(response: str) -> None:
    assert exact_match(response, "92")


@pytest.mark.parametrize("response", ["", "092", "92.", "9 2", "92 or 93", "+92", "ninety-two", "-92", "92\nQ:", "٩٢"])
def test_anything_else_is_wrong(response: str) -> None:
    assert not exact_match(response, "92")


def test_no_held_out_problem_is_ever_trained_on_whatever_the_seed() -> None:
    for seed in range(3):
        adapter, other = MathAdapter(seed=seed), MathAdapter(seed=seed + 1)
        heldout = {frozenset([(p.a, p.op, p.b), (p.b, p.op, p.a)]) for p in adapter.build_heldout()}
        trained = {frozenset([(p.a, p.op, p.b), (p.b, p.op, p.a)]) for p in other.build_dataset()}
        assert len(adapter.build_heldout()) == 512
        assert heldout
        assert not heldout & trained


def test_math_verify_grades_the_final_answer_however_written_and_says_who_decided() -> None:
    adapter = MathAdapter(grader="math-verify", problems=[("What is 1/4 + 1/4?", "\\frac{1}{2}")])
    try:
        (problem,) = [*adapter.build_dataset(), *adapter.build_heldout()]
        graded = {text: adapter.compute_reward(text, problem) for text in ("0.5", "\\sqrt{\\frac14}", "2/5")}
    finally:
        adapter.close()
    assert {text: reward.value for text, reward in graded.items()} == {"0.5": 1.0, "\\sqrt{\\frac14}": 1.0, "2/5": 0.0}
    assert [reward.info["graded_by"] for reward in graded.values()] == ["number", "math-verify", "number"]


def test_problems_of_ones_own_are_split_by_their_text_or_as_given() -> None:
    problems = [(f"What is {number} doubled?", str(2 * number)) for number in range(400)]
    adapter = MathAdapter(problems=problems)
    trained = {adapter.item_key(problem) for problem in adapter.build_dataset()}
    heldout = {adapter.item_key(problem) for problem in adapter.build_heldout()}
    assert not trained & heldout
    assert trained | heldout == {text for text, _ in problems}
    assert 25 <= len(heldout) <= 80
    given = MathAdapter(problems=problems[:300], heldout_problems=problems[300:])
    assert (len(given.build_dataset()), len(given.build_heldout())) == (300, 100)


def test_arguments_that_cannot_be_honoured_are_refused() -> None:
    with pytest.raises(InvalidRequestError, match="grader"):
        MathAdapter(grader="vibes")  # ty: ignore[invalid-argument-type]
    with pytest.raises(InvalidRequestError, match="heldout_problems"):
        MathAdapter(heldout_problems=[("1 + 1", "2")])
