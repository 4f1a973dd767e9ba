"""The code task: graded in the sandbox on hidden inputs, held out by construction, every planted bug told apart."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from mint.errors import InvalidRequestError
from mint.recipes.code import CodeAdapter, CodeProblem, extract_code, right_cases, run_tests
from mint.recipes.datasets.python_functions import (
    ARGUMENT_NAMES,
    CONSTANTS,
    KINDS,
    PythonFunction,
    all_functions,
    is_heldout,
)
from mint.rl import UnsupportedError
from mint.sandbox import Sandbox

PROBLEM = CodeProblem("# Write twice(x): return x times 2.\n", "twice", (((1,), 2), ((2,), 4), ((0,), 0), ((5,), 10)))


@pytest.fixture(scope="module")
def adapter() -> Iterator[CodeAdapter]:
    adapter = CodeAdapter(train_size=300)
    if not adapter.sandbox.level.engines:
        pytest.skip(f"no sandbox here: {adapter.sandbox.level.missing}")
    yield adapter
    adapter.close()


def test_the_reward_is_the_share_of_tests_passed(adapter: CodeAdapter) -> None:
    assert adapter.compute_reward("def twice(x):\n    return x * 2", PROBLEM).value == 1.0
    assert adapter.compute_reward("def twice(x):\n    return x + 2", PROBLEM).value == 0.25
    assert adapter.compute_reward("def twice(x):\n    return 2.0 * x", PROBLEM).value == 0.0
    assert adapter.compute_reward("I think it is fine.", PROBLEM).value == 0.0


def test_the_verdict_says_who_graded_and_what_failed(adapter: CodeAdapter) -> None:
    info = adapter.compute_reward("def twice(x):\n    return x + 2", PROBLEM).info
    assert info["engine"] in ("monty", "zygote")
    assert info["failed"] == "twice(1) should be 2, got 3"
    assert (info["passed"], info["cases"], info["status"]) == (1, 4, "ok")
    assert info["ms"] > 0


@pytest.mark.parametrize("expression", ["10 ** 5000", "float('nan')", "[[]] * 9000", "'x' * 9000"])
def test_no_value_that_code_returns_disturbs_the_grader(adapter: CodeAdapter, expression: str) -> None:
    reward = adapter.compute_reward(f"def twice(x):\n    return {expression}", PROBLEM)
    assert reward.value == 0.0
    assert len(reward.info["failed"]) <= 300


@pytest.mark.parametrize(
    "response",
    [
        "def twice(x):\n    return x * 2",
        "Sure!\n```python\ndef twice(x):\n    return x * 2\n```\nDone.",
        "First ```py\nbroken(\n``` then\n```\ndef twice(x):\n    return x * 2\n```",
        "Here it is:\ndef twice(x):\n    return x * 2",
        "```python\ndef twice(x):\n    return x * 2",
    ],
)
def test_code_is_found_in_what_a_model_says(adapter: CodeAdapter, response: str) -> None:
    assert run_tests(adapter.sandbox, extract_code(response), "twice", PROBLEM.cases).value == 1.0


def test_every_planted_bug_fails_a_case_and_every_right_body_passes_all(adapter: CodeAdapter) -> None:
    for kind in KINDS:
        for constant in CONSTANTS:
            function = PythonFunction(kind, kind.names[0], ARGUMENT_NAMES[kind.argument][0], constant)
            cases = right_cases(adapter.sandbox, function)
            assert run_tests(adapter.sandbox, function.source(kind.bug), function.name, cases).value < 1.0, function
            assert run_tests(adapter.sandbox, function.source(kind.body), function.name, cases).value == 1.0, function


def test_no_held_out_request_is_ever_trained_on_or_shown(adapter: CodeAdapter) -> None:
    heldout = {problem.prompt.split("\n")[-2] for problem in adapter.build_heldout()}
    seen = {line for problem in adapter.build_dataset() for line in problem.prompt.split("\n")}
    assert len(heldout) > 150
    assert not heldout & seen
    assert all(is_heldout(function) for function in all_functions(heldout=True))


def test_a_case_that_the_prompt_shows_may_not_grade() -> None:
    with pytest.raises(InvalidRequestError):
        CodeProblem("Write twice, so that twice(2) == 4.\n", "twice", (((2,), 4), ((3,), 6)))
    with pytest.raises(InvalidRequestError):
        CodeProblem("Write twice.\n", "twice", ())


def test_where_nothing_can_run_the_code_it_is_unsupported_not_wrong() -> None:
    with Sandbox(engines=()) as sandbox, pytest.raises(UnsupportedError):
        run_tests(sandbox, "def twice(x):\n    return x * 2", "twice", PROBLEM.cases)


def test_own_problems_replace_the_built_in_ones() -> None:
    adapter = CodeAdapter([PROBLEM], heldout=[PROBLEM])
    assert list(adapter.build_dataset()) == [PROBLEM]
    assert list(adapter.build_heldout()) == [PROBLEM]
    adapter.close()
