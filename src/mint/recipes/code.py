"""Code RL: the model writes a function for a problem; the reward is the share of hidden tests that it passes.

The code runs in `mint.sandbox`, which gets the inputs only. The expected values stay in this process and are compared
here in exact type and value, so a solution can only win by returning the right values.
"""

from __future__ import annotations

import random
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from mint.errors import InvalidRequestError
from mint.recipes.datasets.python_functions import (
    PythonFunction,
    all_functions,
    draw_function,
    edge_inputs,
    with_examples,
)
from mint.rl import Reward, RLAdapter, RLConfig, UnsupportedError
from mint.sandbox import InputResult, Limits, Sandbox, same_value, value_text

DEMO = RLConfig(
    base_model="mint/tiny",
    group_size=8,
    batch_size=16,
    steps=50,
    max_tokens=40,
    temperature=1.0,
    learning_rate=3e-3,
    lr_schedule="linear",
    advantage="std",
    heldout_size=398,
)
"""Tuned for the bundled model. `std`, because a nearly right body fails one case of several, so rewards are close."""

SHOTS = 2
FENCE = re.compile(r"```(?:python|py)?[ \t]*\n(.*?)(?:```|\Z)", re.DOTALL)
FIRST_LINE = re.compile(r"^(?:def |import |from |class |@)", re.MULTILINE)

Case = tuple[tuple[Any, ...], Any]
"""Arguments, and the expected value."""


@dataclass(frozen=True)
class CodeProblem:
    """A prompt, the name of the function that it asks for, and the hidden cases that grade it.

    Raises InvalidRequestError if there is no case, or if the prompt shows one of them.
    """

    prompt: str
    function: str
    cases: tuple[Case, ...] = field(repr=False)

    def __post_init__(self) -> None:
        shown = [call for arguments, _ in self.cases if (call := call_text(self.function, arguments)) in self.prompt]
        if shown or not self.cases:
            raise InvalidRequestError(
                "must hold at least one case and none that the prompt shows",
                field="CodeProblem.cases",
                value=shown,
                remedy="Grade on other inputs than those of the examples",
            )


class CodeAdapter(RLAdapter):
    """`# Write plus(x): return x plus 3.` → `def plus(x):` …; or, with `problems`, your own problems."""

    reward_range = (0.0, 1.0)

    def __init__(
        self,
        problems: Sequence[CodeProblem] | None = None,
        heldout: Sequence[CodeProblem] = (),
        *,
        seed: int = 0,
        train_size: int = 4096,
        limits: Limits | None = None,
        unsafe_sandbox: bool = False,
    ) -> None:
        """`problems` None draws one-line functions by `seed`. `unsafe_sandbox` runs the model's code without isolation,
        with the rights of this user."""
        self.problems = problems
        self.heldout = heldout
        self.seed = seed
        self.train_size = train_size
        self.limits = limits
        self.unsafe_sandbox = unsafe_sandbox
        self.heldout_name = (
            "code held-out" if problems is not None else "code held-out (1 in 8 requests by hash, never trained on)"
        )

    @cached_property
    def sandbox(self) -> Sandbox:
        """Started when first used."""
        return Sandbox(self.limits, unsafe=self.unsafe_sandbox)

    def build_dataset(self) -> Sequence[CodeProblem]:
        """Your problems, or one-line functions, half of them after two examples."""
        if self.problems is not None:
            return self.problems
        rng = random.Random(f"code {self.seed}")
        functions = [draw_function(rng, heldout=False) for _ in range(self.train_size)]
        return self._as_problems(functions, rng)

    def build_heldout(self) -> Sequence[CodeProblem]:
        """Your held-out problems, or all held-out one-line functions, without and after two examples, in random
        order."""
        if self.problems is not None:
            return self.heldout
        rng = random.Random("code held-out")
        functions = [function for function in all_functions(heldout=True) for _ in range(2)]
        problems = self._as_problems(functions, rng)
        rng.shuffle(problems)
        return problems

    def make_prompt(self, item: CodeProblem, tokenizer: Any) -> list[int]:
        """The problem as plain text."""
        return tokenizer.encode(item.prompt)

    def compute_reward(self, response: str, item: CodeProblem) -> Reward:
        """The share of the problem's cases that the code in the response passes."""
        return run_tests(self.sandbox, extract_code(response), item.function, item.cases)

    def close(self) -> None:
        """Ends the sandbox; the next use starts another."""
        if "sandbox" in self.__dict__:
            self.__dict__.pop("sandbox").close()

    def _as_problems(self, functions: Sequence[PythonFunction], rng: random.Random) -> list[CodeProblem]:
        answers: dict[tuple[str, int], tuple[Case, ...]] = {}
        problems = []
        for place, function in enumerate(functions):
            key = (function.kind.body, function.constant)
            if key not in answers:
                answers[key] = right_cases(self.sandbox, function)
            prompt = with_examples(function, rng, SHOTS * (place % 2))
            problems.append(CodeProblem(prompt, function.name, answers[key]))
        return problems


def right_cases(sandbox: Sandbox, function: PythonFunction) -> tuple[Case, ...]:
    """Edge inputs of a function, and the values of its right body, computed in the sandbox.

    Raises:
        UnsupportedError: nothing on this machine can run the code.
    """
    inputs = [(value,) for value in edge_inputs(function)]
    outcome = sandbox.run(function.source(function.kind.body), function.name, inputs)
    if outcome.status == "unsupported":
        raise UnsupportedError(f"no sandbox on this machine: {outcome.detail}")
    return tuple((given, result.value) for given, result in zip(inputs, outcome.results, strict=True))


def run_tests(sandbox: Sandbox, code: str, function: str, cases: Sequence[Case]) -> Reward:
    """The share of `cases` for which `function` returns the expected value, in exact type and value.

    `info` names the engine, the run's status and milliseconds, how many cases passed, and the first that failed.

    Raises:
        UnsupportedError: no engine of this machine can run the code.
    """
    outcome = sandbox.run(code, function, [arguments for arguments, _ in cases])
    if outcome.status == "unsupported":
        raise UnsupportedError(outcome.detail)
    passed = [
        result.returned and same_value(result.value, expected)
        for result, (_, expected) in zip(outcome.results, cases, strict=True)
    ]
    info: dict[str, Any] = {
        "engine": outcome.engine,
        "status": outcome.status,
        "ms": round(outcome.milliseconds, 3),
        "passed": sum(passed),
        "cases": len(cases),
    }
    if not all(passed):
        first = passed.index(False)
        info["failed"] = _failure(function, cases[first], outcome.results[first])
    return Reward(sum(passed) / len(cases), info=info)


def extract_code(response: str) -> str:
    """The last fenced block; else the text from the first definition or import on; else the whole response."""
    if blocks := FENCE.findall(response):
        return blocks[-1]
    start = FIRST_LINE.search(response)
    return response[start.start() :] if start else response


def call_text(function: str, arguments: Sequence[Any]) -> str:
    """`top([3, 1], 2)`."""
    return f"{function}({', '.join(map(_shown, arguments))})"


def _shown(value: Any) -> str:
    try:
        return repr(value)
    except (ValueError, RecursionError):  # a number of more than 4,300 digits, or nested too deeply
        return f"a {type(value).__name__} too large to show"


def _failure(function: str, case: Case, result: InputResult) -> str:
    arguments, expected = case
    got = value_text(result.value, 300) if result.returned else result.error
    return f"{call_text(function, arguments)} should be {_shown(expected)}, got {got}"[:300]
