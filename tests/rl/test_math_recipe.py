"""The math task: exact match, and a held-out set that is disjoint by construction."""

from __future__ import annotations

import pytest

from mint.recipes.math import MathAdapter, exact_match


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
