"""Tools: schemas from signatures, strict arguments, two built-in tools, and an environment that charges for the way."""

from __future__ import annotations

import asyncio
import contextlib
import json
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st
from scripted_policy import roll_out, says, tiny_tokenizer

from mint.errors import InvalidRequestError
from mint.rl.adapter import MessageEnvAdapter
from mint.rl.calls.call_pool import CallPool
from mint.rl.message_env import Message, MessageStepResult
from mint.rl.reward import Reward
from mint.rl.rollout import Rollout
from mint.rl.tasks.calculator import calculator
from mint.rl.tasks.search import Search
from mint.rl.tasks.tool_calls import ToolError, as_text, tool
from mint.rl.tasks.tool_env import Costs, ToolEnv
from mint.types.tool_call_formats import ToolCallFormat, parse_tool_calls, tool_call_format


@tool
def convert(amount: float, unit: Literal["km", "mi"], digits: int = 1) -> float:
    """Convert kilometres and miles.

    This paragraph is for people.
    """
    return round(amount * (1.609344 if unit == "mi" else 0.621371), digits)


def test_a_schema_comes_from_the_signature_and_the_docstring() -> None:
    assert convert.schema == {
        "type": "function",
        "function": {
            "name": "convert",
            "description": "Convert kilometres and miles.",
            "parameters": {
                "type": "object",
                "properties": {
                    "amount": {"type": "number"},
                    "unit": {"enum": ["km", "mi"], "type": "string"},
                    "digits": {"default": 1, "type": "integer"},
                },
                "required": ["amount", "unit"],
            },
        },
    }


def test_a_call_gives_what_the_function_gives() -> None:
    assert convert.call({"amount": 10, "unit": "mi"}) == 16.1
    assert convert.call({"amount": 10.0, "unit": "mi", "digits": 3}) == 16.093


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ({"amount": "10", "unit": "mi"}, "amount"),
        ({"unit": "mi"}, "amount"),
        ({"amount": 10, "unit": "m"}, "unit"),
        ({"amount": 10, "unit": "mi", "digits": 1.5}, "digits"),
        ({"amount": 10, "unit": "mi", "digits": True}, "digits"),
        ({"amount": 10, "unit": "mi", "round": 2}, "round"),
        ({"amount": None, "unit": "mi"}, "amount"),
    ],
)
def test_wrong_arguments_are_refused_by_name_and_never_converted(arguments: dict[str, Any], named: str) -> None:
    with pytest.raises(ToolError, match=named):
        convert.call(arguments)


def test_a_function_that_cannot_be_described_is_no_tool() -> None:
    def untyped(a) -> int:
        """Has a docstring."""
        return a

    def silent(a: int) -> int:
        return a

    def starred(*a: int) -> int:
        """Has a docstring."""
        return sum(a)

    def unknown(a: Nowhere) -> int:  # type: ignore[unresolved-reference]  # noqa: F821
        """Has a docstring."""
        return a

    def opaque(a: CallPool) -> int:
        """Has a docstring."""
        return a

    def private(_a: int) -> int:
        """Has a docstring."""
        return _a

    for function in (untyped, silent, starred, unknown, opaque, private):
        with pytest.raises(InvalidRequestError, match=function.__name__):
            tool(function)


# --- the text of a call --------------------------------------------------------------------------------------------


def test_calls_are_read_in_order_with_arguments_as_objects_or_as_json_text() -> None:
    text = """Let me see. <tool_call>
{"name": "a", "arguments": {"x": 1}}
</tool_call> and <tool_call>{"name": "b", "arguments": "{\\"y\\": [2]}"}</tool_call>
<tool_call>{"name": "c"}</tool_call>"""
    calls = parse_tool_calls(text)
    assert [(call.name, call.arguments, call.error) for call in calls] == [
        ("a", {"x": 1}, None),
        ("b", {"y": [2]}, None),
        ("c", {}, None),
    ]
    assert parse_tool_calls("The answer is 4.") == []


@pytest.mark.parametrize(
    "text",
    [
        "<tool_call>",
        "<tool_call></tool_call>",
        '<tool_call>{"name": "a"}',
        "<tool_call>{'name': 'a'}</tool_call>",
        "<tool_call>[1]</tool_call>",
        "<tool_call>null</tool_call>",
        '<tool_call>{"arguments": {}}</tool_call>',
        '<tool_call>{"name": 3, "arguments": {}}</tool_call>',
        '<tool_call>{"name": "a", "arguments": [1]}</tool_call>',
        '<tool_call>{"name": "a", "arguments": "x"}</tool_call>',
        '<tool_call>{"name": "\\ud800", "arguments": {}}</tool_call>',
        '<tool_call>{"name": "a", "arguments": {"x": ' + "9" * 5000 + "}}</tool_call>",
        "<tool_call>" + "[" * 100_000 + "</tool_call>",
    ],
)
def test_a_malformed_call_is_an_error_and_no_exception(text: str) -> None:
    (call,) = parse_tool_calls(text)
    assert call.error


def test_a_call_inside_think_tags_is_not_made() -> None:
    thought = '<think>Shall I <tool_call>{"name": "a"}</tool_call>?</think>\n\n'
    assert parse_tool_calls(thought + "No.") == []
    assert [each.name for each in parse_tool_calls(thought + '<tool_call>{"name": "b"}</tool_call>')] == ["b"]
    assert play("<think>hm</think>\n\ndone").parts["outcome"] == 1.0


QWEN_CODER = """I look it up.
<tool_call>
<function=lookup>
<parameter=city>
Paris
</parameter>
<parameter=days>
3
</parameter>
<parameter=note>
12
line two
</parameter>
</function>
</tool_call>"""


@pytest.mark.parametrize(
    ("written_as", "text", "expected"),
    [
        ("hermes", QWEN_CODER, [("lookup", {"city": "Paris", "days": "3", "note": "12\nline two"})]),
        ("hermes", "<tool_call><function=now></function></tool_call>", [("now", {})]),
        ("llama", '<|python_tag|>{"name": "a", "parameters": {"x": 1}}<|eom_id|>', [("a", {"x": 1})]),
        ("llama", '{"name": "a", "parameters": {"x": 1}}', [("a", {"x": 1})]),
        (
            "llama",
            '<|python_tag|>{"name": "a", "parameters": {}}; {"name": "b", "parameters": {"y": "; {"}}',
            [("a", {}), ("b", {"y": "; {"})],
        ),
        ("llama", '<function=a>{"x": [1]}</function>', [("a", {"x": [1]})]),
        ("llama", '{"answer": 4}', []),
        ("llama", "The answer is {4}.", []),
        ("mistral", '[TOOL_CALLS][{"name": "a", "arguments": {"x": 1}, "id": "VvvODy9mT"}]', [("a", {"x": 1})]),
        ("mistral", 'Well.[TOOL_CALLS] [{"name": "a", "arguments": {}}, {"name": "b"}]</s>', [("a", {}), ("b", {})]),
        (
            "mistral",
            '[TOOL_CALLS]a[ARGS]{"x": "[ARGS]"}[TOOL_CALLS]b[CALL_ID]123456789[ARGS]{"y": 2}',
            [("a", {"x": "[ARGS]"}), ("b", {"y": 2})],
        ),
        ("mistral", "No call.", []),
    ],
)
def test_each_family_writes_calls_in_its_own_format(
    written_as: ToolCallFormat, text: str, expected: list[tuple[str, dict[str, Any]]]
) -> None:
    calls = parse_tool_calls(f"<think>hm</think>\n\n{text}", written_as)
    assert [call.error for call in calls] == [None] * len(expected)
    assert [(call.name, call.arguments) for call in calls] == expected


@pytest.mark.parametrize(
    ("written_as", "text"),
    [
        ("llama", "<|python_tag|>"),
        ("llama", '<|python_tag|>brave_search.call(query="x")'),
        ("llama", '<|python_tag|>{"name": "a", "parameters": [1]}'),
        ("llama", '<|python_tag|>{"name": "a", "parameters": {"x": NaN}}'),
        ("llama", "<|python_tag|>" + '{"x":' * 10_000),
        ("llama", "<function=a>{1}</function>"),
        ("mistral", "[TOOL_CALLS]"),
        ("mistral", "[TOOL_CALLS][1]"),
        ("mistral", "[TOOL_CALLS]a[ARGS]{"),
        ("mistral", "[TOOL_CALLS]" + "[" * 100_000),
    ],
)
def test_a_malformed_call_of_each_family_is_an_error_and_no_exception(written_as: ToolCallFormat, text: str) -> None:
    (call,) = parse_tool_calls(text, written_as)
    assert call.error


@pytest.mark.parametrize(
    ("template", "written_as"),
    [
        ("{{ '<tool_call>' }}", "hermes"),
        ("", "hermes"),
        ("{{- '<|python_tag|>' + tool_call.name }}", "llama"),
        ("{{ '[TOOL_CALLS]' }}", "mistral"),
    ],
)
def test_the_format_is_that_of_the_models_chat_template(template: str, written_as: ToolCallFormat) -> None:
    assert tool_call_format(template) == written_as


def test_arguments_that_are_written_as_texts_get_the_types_of_the_tool() -> None:
    seen: list[tuple[str, int, str, list[int]]] = []

    @tool
    def lookup(city: str, days: int, note: str, places: list[int] = []) -> str:  # noqa: B006
        """Look it up."""
        seen.append((city, days, note, places))
        return "sunny"

    env = ToolEnv([{"role": "user", "content": "?"}], [lookup], lambda text, results: 1.0)
    result = env.step({"role": "assistant", "content": QWEN_CODER})
    assert isinstance(result, MessageStepResult)
    assert seen == [("Paris", 3, "12\nline two", [])]
    assert result.next_messages[0]["content"] == "sunny"


LLAMA_TEMPLATE = """{% for message in messages %}<|im_start|>{{ message['role'] }}
{{ message['content'] }}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}{# <|python_tag|> #}"""


def test_an_episode_reads_the_calls_in_the_format_of_its_model() -> None:
    env = ToolEnv([{"role": "user", "content": "3 + 4?"}], [calculator], lambda text, results: float(text == "7"))
    policy = says('<|python_tag|>{"name": "calculator", "parameters": {"expression": "3 + 4"}}', "7")

    class Task(MessageEnvAdapter):
        def build_dataset(self) -> Sequence[Any]:
            return [""]

        def make_env(self, item: Any) -> ToolEnv:
            return env

    (group,) = roll_out(policy, Task(), tokenizer=tiny_tokenizer(LLAMA_TEMPLATE))
    (rollout,) = group.rollouts
    assert (rollout.reward, rollout.tool_calls, rollout.error) == (1.0, 1, None)


def test_an_open_call_does_not_swallow_the_next() -> None:
    first, second = parse_tool_calls('<tool_call>{"name": <tool_call>{"name": "a", "arguments": {}}</tool_call>')
    assert first.error
    assert second.name == "a"


# --- the calculator ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("expression", "value"),
    [
        ("34 + 58", "92"),
        ("7 - 12", "-5"),
        ("2 * (3 + 4)", "14"),
        ("9 / 3", "3"),
        ("1 / 4", "0.25"),
        ("-7 // 2", "-4"),
        ("7 % 4", "3"),
        ("2 ** 10", "1024"),
        ("2 ** -1", "0.5"),
        ("+1.5 + -1.5", "0"),
        ("12345678901234567890 * 10", "123456789012345678900"),
        (" 1 ", "1"),
    ],
)
def test_the_calculator_calculates(expression: str, value: str) -> None:
    assert calculator.call({"expression": expression}) == value


@pytest.mark.parametrize(
    "expression",
    [
        "",
        "x",
        "1 +",
        "__import__('os').system('true')",
        "(1).__class__",
        "[1][0]",
        "'a' * 3",
        "True + 1",
        "1j",
        "abs(-1)",
        "1 if 1 else 2",
        "1 < 2",
        "~1",
        "1 << 200",
        "9 ** 9 ** 9",
        "(10 ** 60) ** 60",
        "1e308 * 10",
        "1e999",
        "10 ** 64 * 10 ** 64",
        "2 ** 0.5 ** 99999",
        "(-8) ** 0.5",
        "1 / 0",
        "1 % 0",
        "0 ** -1",
        "1" * 201,
        "9" * 200,
        "-" * 199 + "1",
        "(" * 90 + "1" + ")" * 90,
        "1\x00",
        "1\n2",
        "lambda: 1",
        "(x := 1)",
    ],
)
def test_the_calculator_answers_or_refuses_at_once_and_runs_nothing(expression: str) -> None:
    began = time.thread_time()
    with contextlib.suppress(ToolError):
        assert len(calculator.call({"expression": expression})) <= 110
    assert time.thread_time() - began < 0.2


# --- search --------------------------------------------------------------------------------------------------------

TEXTS = ["The cat sat on the mat.", "A dog chased the cat and the other cat.", "Ships sail to Orst on Tuesdays."]


def test_search_finds_the_document_that_says_most_about_the_words(tmp_path: Path) -> None:
    for place, text in enumerate(TEXTS):
        (tmp_path / f"{place}.txt").write_text(text)
    (tmp_path / "notes.bin").write_bytes(b"\xff")
    for documents in (TEXTS, tmp_path):
        search = tool(Search(documents).search)
        assert search.call({"query": "When do ships sail to Orst?"}) == TEXTS[2]
        assert search.call({"query": "cat", "limit": 2}) == f"{TEXTS[1]}\n\n{TEXTS[0]}"
        assert search.call({"query": "zebra"}) == "nothing found"
        assert search.call({"query": "the", "limit": -5}) in TEXTS
    with pytest.raises(InvalidRequestError, match="documents"):
        Search(tmp_path / "none")


def test_search_scores_are_those_of_the_formula() -> None:
    """Against Okapi BM25 by hand: 2 documents of 2 and 4 words, the word once in the first."""
    search = Search(["orst ships", "a b c d"])
    rarity = 0.6931471805599453  # ln(1 + (2 - 1 + 0.5) / (1 + 0.5))
    assert search.score({"orst"}, 0) == pytest.approx(rarity * 2.5 / (1 + 1.5 * (0.25 + 0.75 * 2 / 3)))


# --- the environment -----------------------------------------------------------------------------------------------


@tool
def stuck() -> str:
    """Never answers."""
    threading.Event().wait()
    return "awake"


@tool
def prompt() -> str:
    """Answers at once."""
    return "awake"


@tool
async def later(word: str) -> str:
    """Says it later."""
    await asyncio.sleep(0)
    return word


@tool
def broken() -> str:
    """Fails."""
    raise KeyError("lost")


class Task(MessageEnvAdapter):
    """One environment, made with the options given."""

    costs = Costs(per_call=0.1, per_step=0.01, per_violation=0.25, at_most=0.5)
    reward_range = costs.range_of((0.0, 1.0))

    def __init__(self, grade: Any = None, **options: Any) -> None:
        self.grade = grade or (lambda text, results: float(text == "done"))
        self.options = {"costs": self.costs, **options}

    def build_dataset(self) -> Sequence[str]:
        return [""]

    def make_env(self, item: str) -> ToolEnv:
        return ToolEnv(
            [{"role": "user", "content": "Do it."}],
            [calculator, stuck, prompt, later, broken],
            self.grade,
            **self.options,
        )


def play(*replies: str, task: Task | None = None) -> Rollout:
    ((rollout,),) = [group.rollouts for group in roll_out(says(*replies), task or Task())]
    return rollout


def call(name: str, **arguments: Any) -> str:
    return f'<tool_call>{{"name": "{name}", "arguments": {str(arguments).replace(chr(39), chr(34))}}}</tool_call>'


def results(rollout: Rollout) -> list[str]:
    return [row["content"] for row in rollout.trace if row["role"] == "tool"]


def test_the_reward_is_the_outcome_minus_what_the_way_cost() -> None:
    rollout = play(call("calculator", expression="1 + 1") + call("later", word="hi"), "done")
    assert results(rollout) == ["2", "hi"]
    assert rollout.parts == pytest.approx({"outcome": 1.0, "call_cost": -0.2, "step_cost": -0.02})
    assert rollout.reward == pytest.approx(0.78)
    assert (rollout.tool_calls, rollout.stop_reason) == (2, "env")


@pytest.mark.parametrize(
    ("reply", "kind", "told"),
    [
        (call("shell", command="ls"), "unknown_tool", "there is no tool 'shell'; there is calculator, stuck"),
        (call("calculator", expression=3), "bad_arguments", "expression: Input should be a valid string"),
        (call("calculator", expression="import os"), "bad_arguments", "not an arithmetic expression"),
        ("<tool_call>{</tool_call>", "malformed_call", "the call is not JSON"),
        ("My password, done", "forbidden", None),
    ],
)
def test_a_violation_is_counted_charged_and_told(reply: str, kind: str, told: str | None) -> None:
    rollout = play(reply, "done", task=Task(forbidden=[r"pass\w+"]))
    assert rollout.info["violations"] == 1
    assert rollout.info[kind] == 1
    assert rollout.parts["violation_cost"] == -0.25
    if told is not None:
        (result,) = results(rollout)
        assert result.startswith("error: ")
        assert told in result
        assert rollout.parts["outcome"] == 1.0


def test_a_tool_that_fails_or_hangs_is_told_and_is_no_violation() -> None:
    task = Task(tool_timeout_s=0.5)
    rollout = play(call("broken") + call("stuck") + call("prompt"), "done", task=task)
    assert results(rollout) == ["error: KeyError: 'lost'", "error: no answer within 0.5 s", "awake"]
    assert (rollout.info["violations"], rollout.info["tool_failures"]) == (0, 2)
    assert "violation_cost" not in rollout.parts


def test_costs_never_exceed_their_limit_so_that_the_range_holds() -> None:
    rollout = play(*[call("shell") * 3] * 6, "not yet")
    assert rollout.error is None
    assert rollout.reward == pytest.approx(-0.5)
    assert Task.costs.range_of((0.0, 1.0)) == (-0.5, 1.0)


@given(
    st.tuples(*[st.floats(0, 3)] * 3),
    st.floats(0, 2),
    st.lists(st.integers(0, 4), min_size=1, max_size=12),
)
def test_no_sum_of_charges_leaves_the_declared_range(
    prices: tuple[float, float, float], at_most: float, calls: list[int]
) -> None:
    costs = Costs(*prices, at_most=at_most)
    env = Task(lambda text, results: 0.0, costs=costs).make_env("")
    total = 0.0
    for count in calls:
        result = env.step({"role": "assistant", "content": call("shell") * count})
        assert isinstance(result, MessageStepResult)
        total += result.reward
        assert result.reward == pytest.approx(sum(result.parts.values()))
    assert costs.range_of((0.0, 1.0))[0] <= total <= 0.0


@pytest.mark.parametrize("graded", [None, "1", [1.0]])
def test_a_grade_that_is_none_costs_the_episode_and_ends_it(graded: Any) -> None:
    rollout = play("done", task=Task(lambda text, results: graded))
    assert rollout.reward is None
    assert "grade()" in (rollout.error or "")


def test_the_grade_may_have_parts_and_be_async_and_sees_what_the_tools_gave() -> None:
    seen: list[Message] = []

    async def grade(text: str, given: Sequence[Message]) -> Reward:
        await asyncio.sleep(0)
        seen.extend(given)
        return Reward(0.75, {"right": 1.0, "tone": -0.25}, {"engine": "none"})

    rollout = play(call("calculator", expression="6 * 7"), "done", task=Task(grade))
    assert rollout.parts == pytest.approx({"right": 1.0, "tone": -0.25, "call_cost": -0.1, "step_cost": -0.02})
    assert rollout.info["engine"] == "none"
    (result,) = seen
    assert result["content"] == "42"
    assert result["trace"]["arguments"] == {"expression": "6 * 7"}
    assert result["trace"]["ok"]


def test_a_grade_that_raises_costs_the_episode() -> None:
    rollout = play("done", task=Task(lambda text, results: {}["no"]))
    assert (rollout.reward, rollout.error) == (None, "KeyError: 'no'")


def test_an_episode_that_is_cut_off_earns_nothing_and_keeps_its_costs() -> None:
    rollout = play(*[call("later", word="x")] * 9, task=Task())
    assert rollout.stop_reason == "max_turns"
    assert rollout.reward == pytest.approx(-0.5)
    assert rollout.tool_calls == 8


def test_tools_with_one_name_are_refused() -> None:
    with pytest.raises(InvalidRequestError, match="distinct"):
        ToolEnv([], [calculator, calculator], lambda text, results: 0.0)


def test_a_step_by_hand_needs_no_policy() -> None:
    result = Task().make_env("").step({"role": "assistant", "content": "done"})
    assert isinstance(result, MessageStepResult)
    assert (result.reward, result.episode_done) == (0.99, True)


@pytest.mark.parametrize(
    "arguments",
    [
        '{"x": NaN}',
        '{"x": -Infinity}',
        '{"x": 1e999}',
        '{"x": "\\ud800"}',
        '{"x": ' + "9" * 5000 + "}",
        '{"x": ' + "[" * 70 + "]" * 70 + "}",
        '{"x": ' + "[" * 100_000,
    ],
    ids=lambda text: text[:20],
)
@pytest.mark.parametrize("as_string", [False, True], ids=["an object", "JSON in a string"])
def test_arguments_that_cannot_be_written_again_are_a_malformed_call(arguments: str, as_string: bool) -> None:
    written = json.dumps(arguments) if as_string else arguments
    (call,) = parse_tool_calls(f'<tool_call>{{"name": "f", "arguments": {written}}}</tool_call>')
    assert call.error is not None
    call.error.encode()


def test_a_result_that_json_cannot_hold_is_shown_and_raises_nothing() -> None:
    deep: list[object] = []
    for _ in range(5000):
        deep = [deep]
    assert as_text(10**5000) == "a int too large to show"
    assert as_text(deep) == "a list too large to show"
    assert as_text({(1, 2): 3}) == "{(1, 2): 3}"


def test_a_power_beyond_every_float_is_refused_as_other_large_values_are() -> None:
    with pytest.raises(ToolError, match="beyond 1e\\+100"):
        calculator.call({"expression": "1e90**50"})
