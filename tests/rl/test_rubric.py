"""Rubrics and penalties: every part is named, and the parts add up to the reward."""

from __future__ import annotations

import time
from typing import Any, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mint.errors import InvalidRequestError
from mint.rl.reward import Reward, UnsupportedError
from mint.rl.tasks.penalties import PenaltyError, forbidden, penalized, repetition, tool_spam, verbosity, with_penalties
from mint.rl.tasks.rubric import Rubric, RubricError
from mint.types.tool_call_formats import OPENING_MARKS, SYNTAX, ToolCall, ToolCallFormat, render_tool_calls


def short(response: str, _: Any) -> bool:
    return len(response) <= 5


def has_word(response: str, sample: str) -> float:
    return float(sample in response)


def test_the_parts_are_the_weighted_answers_and_add_up() -> None:
    reward = Rubric({"word": (0.7, has_word), "short": (0.3, short)})("a fox there", "fox")
    assert reward.value == pytest.approx(0.7)
    assert reward.parts == {"word": 0.7, "short": 0.0}


def test_each_part_has_its_own_time() -> None:
    def slow(response: str, item: Any) -> bool:
        time.sleep(0.02)
        return True

    reward = with_penalties(Rubric({"quick": (0.5, short), "slow": (0.5, slow)}), {"long": verbosity(100)})("hi", None)
    assert list(reward.grader_seconds) == ["quick", "slow"]
    assert reward.grader_seconds["slow"] >= 0.02


def test_all_parts_together_give_exactly_one() -> None:
    yes = lambda response, item: True  # noqa: E731
    rubric = Rubric({name: (weight, yes) for name, weight in zip("abcde", (0.3, 0.3, 0.2, 0.1, 0.1), strict=True)})
    assert rubric("", None).value == 1.0
    assert Rubric(dict.fromkeys("abcdefghij", (0.1, yes)))("", None).value == 1.0


def test_weights_that_can_leave_the_declared_range_are_refused() -> None:
    with pytest.raises(InvalidRequestError, match=r"0 to 1\.1"):
        Rubric({"a": (0.6, short), "b": (0.5, short)})
    with pytest.raises(InvalidRequestError, match=r"-0\.5 to 1"):
        Rubric({"a": (1.0, short), "b": (-0.5, short)})
    assert Rubric({"a": (1.0, short), "b": (-0.5, short)}, reward_range=(-0.5, 1.0))("hi", None).value == 0.5
    with pytest.raises(InvalidRequestError):
        Rubric({})


def test_a_part_that_raises_or_answers_nonsense_is_named() -> None:
    with pytest.raises(RubricError, match="'broken' of the rubric raised ZeroDivisionError"):
        Rubric({"fine": (0.5, short), "broken": (0.5, lambda response, item: 1 / 0)})("x", None)
    for nonsense in (2.0, -0.1, float("nan")):
        with pytest.raises(RubricError, match="'wild'"):
            Rubric({"wild": (1.0, lambda response, item, nonsense=nonsense: nonsense)})("x", None)


def test_a_part_that_cannot_judge_says_so_unchanged() -> None:
    def cannot(response: str, sample: Any) -> float:
        raise UnsupportedError("no engine here")

    with pytest.raises(UnsupportedError):
        Rubric({"cannot": (1.0, cannot)})("x", None)


def test_verbosity_costs_its_slope_per_word_over_the_limit_up_to_the_most() -> None:
    penalty = verbosity(3, slope=0.1, most=0.25)
    assert [penalty(" ".join("word" for _ in range(count)), None) for count in (0, 3, 4, 5, 50)] == pytest.approx(
        [0, 0, 0.1, 0.2, 0.25]
    )
    assert verbosity(3, slope=0.1, unit="characters")("12345", None) == pytest.approx(0.2)


def test_forbidden_patterns_tool_spam_and_repetition_cost_what_they_say() -> None:
    assert forbidden([r"as an ai", r"\bsorry\b"], cost=0.4)("I am Sorry.", None) == 0.4
    assert forbidden([r"\bsorry\b"])("sorrylike", None) == 0.0
    spam = tool_spam(1, cost=0.2, most=0.5)
    assert [spam("<tool_call>x</tool_call>" * count, None) for count in (0, 1, 2, 9)] == pytest.approx([0, 0, 0.2, 0.5])
    assert tool_spam(0, cost=0.1, pattern="!")("!!", None) == pytest.approx(0.2)
    assert repetition(n=2)("a b c d", None) == 0.0
    assert repetition(n=2)("a b a b a b", None) == pytest.approx(3 / 5)
    assert repetition(n=3)("a b", None) == 0.0


@pytest.mark.parametrize("written_as", SYNTAX)
def test_tool_spam_counts_the_calls_of_every_format(written_as: ToolCallFormat) -> None:
    count = 1 if written_as in ("glm4", "harmony") else 3  # a call of these two ends the reply
    reply = render_tool_calls([ToolCall("add", {"a": place, "b": 4}) for place in range(count)], written_as)
    spam = tool_spam(0, cost=0.1, written_as=written_as)
    assert spam(reply, None) == pytest.approx(0.1 * count)
    assert spam("No call here.", None) == 0
    if any(mark in reply for mark in OPENING_MARKS[written_as]):
        assert tool_spam(1, cost=0.1)(reply, None) == pytest.approx(0.1 * (count - 1))


def test_tool_spam_refuses_a_format_that_does_not_exist() -> None:
    with pytest.raises(InvalidRequestError, match="hermes"):
        tool_spam(1, written_as=cast("Any", "xml"))


def test_penalties_are_negative_parts_and_the_clip_is_a_part_too() -> None:
    reward = penalized(0.3, "sorry", None, {"apology": forbidden(["sorry"], cost=0.5)}, low=0.0)
    assert reward.value == 0.0
    assert reward.parts == pytest.approx({"reward": 0.3, "apology": -0.5, "clipped": 0.2})
    mild = penalized(Reward(0.8, {"word": 0.8}, {"by": "rubric"}), "fine", None, {"apology": forbidden(["sorry"])})
    assert (mild.value, dict(mild.parts), dict(mild.info)) == (0.8, {"word": 0.8, "apology": 0.0}, {"by": "rubric"})


@given(st.floats(-1, 1), st.lists(st.floats(0, 5), min_size=1, max_size=4), st.floats(-1, 0))
def test_with_penalties_the_value_stays_in_range_and_the_parts_add_up(
    earned: float, costs: list[float], low: float
) -> None:
    penalties = {f"p{index}": lambda response, item, cost=cost: cost for index, cost in enumerate(costs)}
    reward = with_penalties(lambda response, item: earned, penalties, low=low)("text", None)
    assert low <= reward.value <= max(low, earned)
    assert sum(reward.parts.values()) == pytest.approx(reward.value, abs=1e-9)


def test_a_penalty_that_pays_fails_or_takes_a_taken_name_is_an_error_that_names_it() -> None:
    for bad in (lambda response, item: -1.0, lambda response, item: float("inf"), lambda response, item: {}[0]):
        with pytest.raises(PenaltyError, match="'odd'"):
            penalized(1.0, "x", None, {"odd": bad})
    with pytest.raises(PenaltyError, match="'word'"):
        penalized(Reward(1.0, {"word": 1.0}), "x", None, {"word": verbosity(1)})
    with pytest.raises(InvalidRequestError):
        verbosity(3, slope=-1)
