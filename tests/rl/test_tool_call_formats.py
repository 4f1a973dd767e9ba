"""The formats in which families write tool calls: published examples, calls written and read back, and broken text.

Sources of the examples: OpenAI's "Harmony response format", the model cards and chat templates of DeepSeek V3 and V3.1,
Kimi K2, GLM-4.5, Granite 3.3, Phi-4-mini, Command R7B and Mistral, and Meta's "Llama 3.2 prompt format".
"""

from __future__ import annotations

import json
import random
import sys
from collections.abc import Callable
from typing import Any, get_args

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mint.types.tool_call_formats import (
    MARKUP,
    OPENING_MARKS,
    SYNTAX,
    ToolCall,
    ToolCallFormat,
    other_format,
    parse_tool_calls,
    read_reply,
    render_tool_calls,
    tool_call_format,
    with_ids,
)

FORMATS: list[ToolCallFormat] = list(get_args(ToolCallFormat))
AS_TEXTS = ("qwen_coder", "glm")

EXAMPLES: list[tuple[ToolCallFormat, str, str, list[tuple[str, dict[str, Any]]]]] = [
    (
        "harmony",
        "<|channel|>analysis<|message|>I need the weather.<|end|><|start|>assistant<|channel|>commentary"
        ' to=functions.get_weather <|constrain|>json<|message|>{"location":"San Francisco"}<|call|>',
        "",
        [("get_weather", {"location": "San Francisco"})],
    ),
    (
        "harmony",
        ' to=functions.get_weather<|channel|>commentary json<|message|>{"location": "Paris"}',
        "",
        [("get_weather", {"location": "Paris"})],
    ),
    (
        "harmony",
        "<|channel|>commentary<|message|>I look.<|end|><|start|>assistant to=functions.now<|channel|>commentary"
        "<|message|>{}<|call|>",
        "I look.",
        [("now", {})],
    ),
    ("harmony", "<|channel|>analysis<|message|>2+2<|end|><|start|>assistant<|channel|>final<|message|>4.", "4.", []),
    (
        "deepseek_v3",
        "Well.<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>get_weather\n```json\n"
        '{"location": "Tokyo"}\n```<｜tool▁call▁end｜>\n<｜tool▁call▁begin｜>function<｜tool▁sep｜>now\n```json\n{}\n'
        "```<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
        "Well.\n",
        [("get_weather", {"location": "Tokyo"}), ("now", {})],
    ),
    (
        "deepseek_v31",
        '<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>get_weather<｜tool▁sep｜>{"location": "Tokyo"}<｜tool▁call▁end｜>'
        "<｜tool▁call▁begin｜>now<｜tool▁sep｜>{}<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
        "",
        [("get_weather", {"location": "Tokyo"}), ("now", {})],
    ),
    (
        "kimi",
        "<|tool_calls_section_begin|><|tool_call_begin|>functions.get_weather:0<|tool_call_argument_begin|>"
        '{"city": "Beijing"}<|tool_call_end|><|tool_calls_section_end|>',
        "",
        [("get_weather", {"city": "Beijing"})],
    ),
    (
        "glm",
        "<think></think>\n<tool_call>get_weather\n<arg_key>city</arg_key>\n<arg_value>Beijing</arg_value>\n"
        "<arg_key>days</arg_key>\n<arg_value>3</arg_value>\n</tool_call>",
        "",
        [("get_weather", {"city": "Beijing", "days": "3"})],
    ),
    ("glm", "<tool_call>now\n</tool_call>", "", [("now", {})]),
    ("glm4", 'get_weather\n{"city": "Beijing"}', "", [("get_weather", {"city": "Beijing"})]),
    ("granite", '<|tool_call|>[{"name": "f", "arguments": {"x": 1}}, {"name": "g", "arguments": {}}]', "",
     [("f", {"x": 1}), ("g", {})]),
    ("granite", '<tool_call>[{"name": "f", "arguments": {"x": 1}}]', "", [("f", {"x": 1})]),
    ("phi4_mini", '<|tool_call|>[{"name": "f", "arguments": {"x": 1}}]<|/tool_call|>', "", [("f", {"x": 1})]),
    ("phi4_mini", '<|tool_call|>{"name": "f", "arguments": {"x": 1}}<|/tool_call|>', "", [("f", {"x": 1})]),
    ("pythonic", '[f(a=1, b=[True, None, -2.5]), g(b="x", c={"k": "it\'s"})]', "",
     [("f", {"a": 1, "b": [True, None, -2.5]}), ("g", {"b": "x", "c": {"k": "it's"}})]),
    ("llama", "[f(a=true)]", "", [("f", {"a": True})]),
    ("llama", "<|python_start|>[f(a=1)]<|python_end|>", "", [("f", {"a": 1})]),
    ("llama", '<|python_start|>Yes.<|python_end|>{"name": "f", "parameters": {"a": 1}}', "Yes.", [("f", {"a": 1})]),
    ("llama", '[{"name": "f", "parameters": {"a": 1}}]', "", [("f", {"a": 1})]),
    ("llama", 'I call it. {"name": "f", "parameters": {"a": {"b": 1}}}; {"name": "g", "parameters": {}}',
     "I call it. ", [("f", {"a": {"b": 1}}), ("g", {})]),
    (
        "command",
        '<|START_THINKING|>hm<|END_THINKING|><|START_ACTION|>[\n    {"tool_call_id": "0", "tool_name": "f", '
        '"parameters": {"x": 1}}\n]<|END_ACTION|>',
        "",
        [("f", {"x": 1})],
    ),
    ("command", "<|START_THINKING|>hm<|END_THINKING|><|START_RESPONSE|>4.<|END_RESPONSE|>", "4.", []),
    ("mistral_named", '[TOOL_CALLS]f[CALL_ID]a1B2c3D4e[ARGS]{"x": 1}', "", [("f", {"x": 1})]),
]  # fmt: skip
NAMES = ("get_weather", "now", "f", "g")


@pytest.mark.parametrize(("written_as", "text", "said", "expected"), EXAMPLES)
def test_published_examples_are_read(
    written_as: ToolCallFormat, text: str, said: str, expected: list[tuple[str, dict[str, Any]]]
) -> None:
    reply = read_reply(text, written_as, NAMES)
    assert [call.error for call in reply.calls] == [None] * len(expected)
    assert [(call.name, call.arguments) for call in reply.calls] == expected
    assert reply.text == said


NAME = st.from_regex(r"[a-z][a-z_0-9]{0,8}", fullmatch=True).map(lambda name: f"t_{name}")
TEXT = st.text(st.characters(exclude_characters="<>[]|｜\r", exclude_categories=("Cs",)), max_size=12)
SCALAR = st.none() | st.booleans() | st.integers(-(10**9), 10**9) | st.floats(allow_nan=False, allow_infinity=False)
VALUE = st.recursive(SCALAR | TEXT, lambda part: st.lists(part, max_size=3) | st.dictionaries(NAME, part, max_size=3))
CALLS = st.lists(st.tuples(NAME, st.dictionaries(NAME, VALUE, max_size=3)), min_size=1, max_size=3)


@pytest.mark.parametrize("written_as", FORMATS)
@settings(max_examples=80)
@given(wanted=CALLS)
def test_calls_that_are_written_are_read_back(
    written_as: ToolCallFormat, wanted: list[tuple[str, dict[str, Any]]]
) -> None:
    if SYNTAX[written_as].between is None:
        wanted = wanted[:1]
    text = render_tool_calls([ToolCall(name, arguments) for name, arguments in wanted], written_as)
    read = parse_tool_calls(text, written_as, {name for name, _ in wanted})
    assert [call.error for call in read] == [None] * len(wanted)
    if written_as in AS_TEXTS:
        wanted = [
            (name, {key: value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
                    for key, value in arguments.items()})
            for name, arguments in wanted
        ]  # fmt: skip
    assert [(call.name, call.arguments) for call in read] == wanted


BROKEN: list[tuple[ToolCallFormat, str]] = [
    ("harmony", "<|channel|>commentary to=functions.f <|constrain|>json<|message|>{x: 1}<|call|>"),
    ("harmony", "<|channel|>commentary to=functions.f"),
    (
        "deepseek_v3",
        "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>f\n```json\n{x}\n```<｜tool▁call▁end｜>",
    ),
    ("deepseek_v31", "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>f<｜tool▁sep｜>{}"),
    ("deepseek_v31", "<｜tool▁call▁begin｜>f{}<｜tool▁call▁end｜>"),
    ("kimi", "<|tool_call_begin|>f<|tool_call_argument_begin|>{}<|tool_call_end|>"),
    ("kimi", "<|tool_call_begin|>functions.f:0<|tool_call_argument_begin|>{}"),
    ("granite", "<|tool_call|>[{]"),
    ("phi4_mini", "<|tool_call|>f()<|/tool_call|>"),
    ("glm", "<tool_call>f<arg_key>x</arg_key><arg_value>1</tool_call>"),
    ("glm", "<tool_call><arg_key>x</arg_key><arg_value>1</arg_value></tool_call>"),
    ("hermes", "<tool_call>f</tool_call>"),
    ("hermes", "<tool_call>f<arg_key>x</arg_key><arg_value>1</arg_value></tool_call>"),
    ("qwen_coder", "<tool_call><function=f><parameter=x>1</function></tool_call>"),
    ("pythonic", "[f(a=__import__('os').system('true'))]"),
    ("pythonic", "[f(open('x'))]"),
    ("pythonic", "[f(a=1"),
    ("pythonic", "[f(**{'a': 1})]"),
    ("pythonic", "[f(a=1e999)]"),
    ("pythonic", "[f(a=" + "[" * 5000 + "]" * 5000 + ")]"),
    ("pythonic", "[f(a=" + "-" * 50_000 + "1)]"),
    ("pythonic", "[f(a=" + "9" * 5000 + ")]"),
    ("command", "<|START_ACTION|>[{<|END_ACTION|>"),
]


@pytest.mark.parametrize(("written_as", "text"), BROKEN, ids=lambda value: str(value)[:40])
def test_a_call_that_cannot_be_read_says_why(written_as: ToolCallFormat, text: str) -> None:
    (call,) = parse_tool_calls(text, written_as, ("f",))
    assert call.error
    call.error.encode()


def test_python_is_read_and_never_evaluated(monkeypatch: pytest.MonkeyPatch) -> None:
    ran: list[str] = []
    monkeypatch.setattr("os.getcwd", lambda: ran.append("ran") or "")
    for text in ("[f(a=__import__('os').getcwd())]", "[__import__('os').getcwd()]", "[f(a=[x for x in (1,)])]"):
        assert all(call.error for call in parse_tool_calls(text, "pythonic"))
    assert ran == []


@pytest.mark.parametrize("written_as", FORMATS)
@pytest.mark.parametrize(
    "answer",
    ['{"name": "Ada", "parameters": {}}', '{"name": "Ada"}', "[1, 2]", "[Ada(1815)]", 'So: {"name": "Ada"}', "Ada\n{}"],
)
def test_an_answer_is_no_call_unless_it_names_a_tool(written_as: ToolCallFormat, answer: str) -> None:
    reply = read_reply(answer, written_as, ("calculator",))
    assert (reply.calls, reply.text) == ([], answer)


@pytest.mark.parametrize("written_as", FORMATS)
def test_a_call_inside_reasoning_does_not_count(written_as: ToolCallFormat) -> None:
    call = render_tool_calls([ToolCall("f", {"x": 1})], written_as)
    reply = read_reply(f"<think>{call}</think>\n\nNo.", written_as, ("f",))
    assert (reply.calls, reply.text) == ([], "No.")
    (call,) = parse_tool_calls(f"<think>hm</think>\n\n{call}", written_as, ("f",))
    assert call.name == "f"


SAME_MARKS = {"glm": "hermes", "qwen_coder": "hermes", "pythonic": "llama", "mistral_named": "mistral"} | {
    "deepseek_v31": "deepseek_v3",
    "phi4_mini": "granite",
}


@pytest.mark.parametrize("written_as", FORMATS)
@pytest.mark.parametrize("chosen", FORMATS)
def test_a_call_in_another_format_is_recognized(chosen: ToolCallFormat, written_as: ToolCallFormat) -> None:
    text = render_tool_calls([ToolCall("f", {"x": 1})], written_as)
    found = other_format(text, chosen, ("f",))
    if parse_tool_calls(text, chosen, ("f",)) or written_as == "glm4":
        assert found is None
    elif not any(mark in text and mark in OPENING_MARKS[chosen] for mark in OPENING_MARKS[written_as]):
        assert found is not None
        assert SAME_MARKS.get(found, found) == SAME_MARKS.get(written_as, written_as)
    assert other_format("The answer is {4}.", chosen, ("f",)) is None


@pytest.mark.parametrize(
    ("template", "vocabulary", "written_as"),
    [
        ("<|start|>assistant<|channel|>commentary<|call|>", (), "harmony"),
        ("{{'<｜tool▁call▁begin｜>' + tool['type'] + '<｜tool▁sep｜>' + name + '```json'}}", (), "deepseek_v3"),
        ("{{'<｜tool▁call▁begin｜>' + name + '<｜tool▁sep｜>'}}", (), "deepseek_v31"),
        ("<|tool_call_begin|>{{ tool_call['id'] }}", (), "kimi"),
        ("<|START_ACTION|>[", (), "command"),
        ("[TOOL_CALLS]{{ name }}[ARGS]", (), "mistral_named"),
        ("<tool_call>{{ name }}<arg_key>", (), "glm"),
        ("<|tool|>{{ tools }}<|/tool|>", (), "phi4_mini"),
        ("write <|tool_call|> and a JSON list", (), "granite"),
        ("[func_name1(params_name1=params_value1)]", (), "pythonic"),
        ("<tool_call><function={{ name }}><parameter=", (), "qwen_coder"),
        ("<|start_header_id|>ipython<|end_header_id|>", (), "llama"),
        ("{{ message.content }}", ("[TOOL_CALLS]", "[ARGS]"), "mistral_named"),
        ("{{ message.content }}", ("<tool_call>", "</tool_call>"), "hermes"),
        ("<tool_call>{{ call | tojson }}</tool_call>", ("<|python_tag|>",), "hermes"),
        ("{{ message.content }}", (), "hermes"),
    ],
)
def test_template_and_special_tokens_name_the_format(
    template: str, vocabulary: tuple[str, ...], written_as: ToolCallFormat
) -> None:
    assert tool_call_format(template, vocabulary) == written_as


def test_ids_are_those_of_the_policy_or_nine_letters_and_digits() -> None:
    calls = parse_tool_calls(
        '[TOOL_CALLS][{"name": "a", "id": "VvvODy9mT"}, {"name": "b", "id": "too_long_for_it"}, {"name": "c"}]',
        "mistral",
    )
    assert [call.id for call in with_ids(calls, 7)] == ["VvvODy9mT", "call00008", "call00009"]
    (call,) = parse_tool_calls(render_tool_calls([ToolCall("f", {})], "kimi"), "kimi")
    assert call.id == "functions.f:0"


def counted(function: Callable[[], object]) -> int:
    """How many functions of Python and C it calls: as many on every machine."""
    count = 0

    def note(frame: object, event: str, argument: object) -> None:
        nonlocal count
        count += event in ("call", "c_call")

    sys.setprofile(note)
    try:
        function()
    finally:
        sys.setprofile(None)
    return count


PIECES = [*sorted(MARKUP), "<function=", "</function>", "<parameter=", "</parameter>", "</think>", "functions.f:0"]
PIECES += [*'{}[]()",:=\\', "f", "1", " ", "\n", '{"name": "f"', '"arguments": {', "f(a=", "```json\n", "é"]


def test_random_text_takes_bounded_work_and_raises_nothing() -> None:
    rng = random.Random(7)
    for number in range(10_000):
        written_as = FORMATS[number % len(FORMATS)]
        text = "".join(rng.choices(PIECES, k=rng.randrange(40)))
        read = counted(lambda text=text, written_as=written_as: read_reply(text, written_as, ("f",)))
        assert read <= 1500 + 30 * len(text), (written_as, text)
        reply = read_reply(text, written_as, ("f",))
        assert all((call.error is None) == bool(call.name or call.arguments is not None) for call in reply.calls)


@pytest.mark.parametrize("written_as", FORMATS)
def test_work_grows_no_faster_than_the_text(written_as: ToolCallFormat) -> None:
    for piece in PIECES:
        small, large = (counted(lambda text=piece * size: read_reply(text, written_as, ("f",))) for size in (500, 2000))
        assert large <= 4 * small + 2000, piece
