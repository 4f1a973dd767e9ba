"""Text leaves as soon as it is certain: whole characters, no beginning of a stop string, calls apart from words."""

from __future__ import annotations

import json
from functools import cache

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mint.models.registry import BUNDLED
from mint.server.openai.detokenizer import Detokenizer, Vocabulary, read_vocabulary
from mint.server.openai.schemas import ChatTool, FunctionDefinition
from mint.server.openai.tool_parser import tool_parser
from mint.types.tool_call_formats import ToolCallFormat

TOOLS = [
    ChatTool(
        type="function",
        function=FunctionDefinition(
            name="f", parameters={"properties": {"x": {"type": "integer"}, "place": {"type": "string"}}}
        ),
    )
]
CALL = '<tool_call>{"name": "f", "arguments": {"x": 1}}</tool_call>'


@cache
def vocabulary() -> Vocabulary:
    return read_vocabulary(BUNDLED["mint/tiny"])


def stream(tokens: list[int], stops: tuple[str, ...] = ()) -> list[str]:
    text = Detokenizer(vocabulary(), vocabulary().hidden(skip_special=True, calls=False), stops)
    return [*(text.push(token) for token in tokens), text.close()]


def test_no_piece_of_a_text_holds_half_a_character() -> None:
    text = "é漢🙂ß — naïve"
    tokens = [vocabulary().pieces.index(bytes([byte])) for byte in text.encode()]
    pieces = stream(tokens)
    assert "".join(pieces) == text
    assert not any("�" in piece for piece in pieces)
    assert "".join(stream(tokens[:1])) == "�"


@settings(max_examples=200, deadline=None)
@given(st.lists(st.integers(0, 1023), max_size=40), st.lists(st.text(min_size=1, max_size=4), max_size=3), st.data())
def test_what_has_left_is_the_text_up_to_the_first_stop_string(
    tokens: list[int], stops: list[str], data: st.DataObject
) -> None:
    hidden = vocabulary().special | vocabulary().ends
    tokens = [token for token in tokens if token not in hidden]
    raw = b"".join(vocabulary().piece(token) for token in tokens)
    whole = raw.decode(errors="ignore")
    if whole:
        start = data.draw(st.integers(0, len(whole) - 1))
        stops = [*stops, whole[start : start + data.draw(st.integers(1, 6))]]
    expected = b""
    for token in tokens:  # the answer ends with the first token that completes a stop string
        expected += vocabulary().piece(token)
        places = [place for stop in stops if (place := expected.find(stop.encode())) >= 0]
        if places:
            expected = expected[: min(places)]
            break
    assert "".join(stream(tokens, tuple(stops))) == expected.decode(errors="replace")


def test_a_stop_string_may_be_a_token_that_is_no_text() -> None:
    tokens = [*vocabulary().tokenizer.encode("Seven."), 5, *vocabulary().tokenizer.encode("Eight.")]
    assert vocabulary().piece(5) == b"<tool_response>"
    assert "".join(stream(tokens)) == "Seven.Eight."
    assert "".join(stream(tokens, ("<tool_response>",))) == "Seven."


def read(
    text: str, sizes: int, *, is_thinking: bool = False, written_as: ToolCallFormat = "hermes"
) -> tuple[str, list[tuple[str, dict[str, object]]]]:
    reader = tool_parser(written_as, TOOLS, is_thinking=is_thinking)
    said, calls = "", []
    for start in range(0, len(text), sizes):
        piece, found = reader.push(text[start : start + sizes])
        said += piece
        calls += found
    piece, found = reader.close()
    return said + piece, [(call.name, json.loads(call.arguments)) for call in [*calls, *found]]


F = ("f", {"x": 1})
CASES = {
    "a call alone": (CALL, "", [F]),
    "words, then calls": (f"Let me see.\n\n{CALL}\n{CALL}\n", "Let me see.", [F, F]),
    "words after a call": (f"One {CALL} two", "One two", [F]),
    "arguments as text": ('<tool_call>{"name": "f", "arguments": "{\\"x\\": 1}"}</tool_call>', "", [F]),
    "no arguments": ('<tool_call>{"name": "f"}</tool_call>', "", [("f", {})]),
    "no JSON stays text": ("So: <tool_call>{f: 1}</tool_call> or", "So: <tool_call>{f: 1}</tool_call> or", []),
    "no name stays text": ('<tool_call>{"arguments": {}}</tool_call>', '<tool_call>{"arguments": {}}</tool_call>', []),
    "a list stays text": ("<tool_call>[1]</tool_call>", "<tool_call>[1]</tool_call>", []),
    "half a character stays text": (
        '<tool_call>{"name": "\\ud800"}</tool_call>',
        '<tool_call>{"name": "\\ud800"}</tool_call>',
        [],
    ),
    "an open call stays text": (f'{CALL} <tool_call>{{"name"', '<tool_call>{"name"', [F]),
    "an open call before another": (f"<tool_call>oh {CALL}", "<tool_call>oh ", [F]),
    "a call in a reasoning block": (f"<think>{CALL}</think>\n{CALL}", f"<think>{CALL}</think>", [F]),
    "almost a mark": ("a <tool_cal> b < c <thin", "a <tool_cal> b < c <thin", []),
    "white space stays": (" a \n b \n", " a \n b \n", []),
}


@pytest.mark.parametrize("sizes", [1, 3, 7, 1000])
@pytest.mark.parametrize("case", CASES)
def test_calls_are_read_alike_however_the_text_arrives(case: str, sizes: int) -> None:
    text, said, calls = CASES[case]
    assert read(text, sizes) == (said, calls)


OF_LLAMA = '{"name": "f", "parameters": {"x": 1}}'
OTHER_FORMATS: dict[str, tuple[ToolCallFormat, str, str, list[object]]] = {
    "Qwen3-Coder": (
        "hermes",
        "So:\n<tool_call>\n<function=f>\n<parameter=x>\n1\n</parameter>\n<parameter=place>\n12\n</parameter>\n</function>\n"
        "</tool_call>",
        "So:",
        [("f", {"x": 1, "place": "12"})],
    ),
    "Llama, a whole reply": ("llama", OF_LLAMA, "", [F]),
    "Llama, after its tag": ("llama", 'Ok<|python_tag|>{"name": "f", "parameters": {"x": 1}}', "Ok", [F]),
    "Llama, several": (
        "llama",
        '{"name": "f", "parameters": {"x": 1}}; {"name": "f", "parameters": {"x": 1}}',
        "",
        [F, F],
    ),
    "Llama, named": ("llama", 'I call <function=f>{"x": 1}</function>', "I call ", [F]),
    "Llama, an answer in JSON": ("llama", '{"answer": 3}', '{"answer": 3}', []),
    "Llama, words": ("llama", "x < y {1}", "x < y {1}", []),
    "Mistral": ("mistral", 'Yes[TOOL_CALLS][{"name": "f", "arguments": {"x": 1}}]', "Yes", [F]),
    "Mistral, named": ("mistral", '[TOOL_CALLS]f[ARGS]{"x": 1}[TOOL_CALLS]f[ARGS]{"x": 1}', "", [F, F]),
    "Mistral, broken": ("mistral", "[TOOL_CALLS][{", "[TOOL_CALLS][{", []),
    "Llama, JSON that names no tool": ("llama", '{"name": "Ada"}', '{"name": "Ada"}', []),
    "Llama, Python": ("llama", "[f(x=1), f(x=1)]", "", [F, F]),
    "Llama, a list": ("llama", "[1, 2]", "[1, 2]", []),
    "GPT-OSS, a call": (
        "harmony",
        "<|channel|>analysis<|message|>hm<|end|><|start|>assistant<|channel|>commentary to=functions.f "
        '<|constrain|>json<|message|>{"x": 1}',
        "",
        [F],
    ),
    "GPT-OSS, words": (
        "harmony",
        "<|channel|>analysis<|message|>hm<|end|><|start|>assistant<|channel|>final<|message|>Yes.",
        "Yes.",
        [],
    ),
    "DeepSeek V3.1": (
        "deepseek_v31",
        'Ok<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>f<｜tool▁sep｜>{"x": 1}<｜tool▁call▁end｜><｜tool▁calls▁end｜>',
        "Ok",
        [F],
    ),
    "GLM-4.5": (
        "glm",
        "So\n<tool_call>f\n<arg_key>x</arg_key>\n<arg_value>1</arg_value>\n<arg_key>place</arg_key>\n"
        "<arg_value>12</arg_value>\n</tool_call>",
        "So",
        [("f", {"x": 1, "place": "12"})],
    ),
    "GLM-4": ("glm4", 'f\n{"x": 1}', "", [F]),
    "GLM-4, words": ("glm4", "f is a name", "f is a name", []),
    "Kimi K2": (
        "kimi",
        '<|tool_calls_section_begin|><|tool_call_begin|>functions.f:0<|tool_call_argument_begin|>{"x": 1}'
        "<|tool_call_end|><|tool_calls_section_end|>",
        "",
        [F],
    ),
    "Granite 3": ("granite", '<|tool_call|>[{"name": "f", "arguments": {"x": 1}}]', "", [F]),
    "Phi-4-mini": ("phi4_mini", '<|tool_call|>[{"name": "f", "arguments": {"x": 1}}]<|/tool_call|>', "", [F]),
    "Command": (
        "command",
        '<|START_THINKING|>hm<|END_THINKING|><|START_ACTION|>[{"tool_name": "f", "parameters": {"x": 1}}]',
        "",
        [F],
    ),
    "Command, words": ("command", "<|START_RESPONSE|>Yes.<|END_RESPONSE|>", "Yes.", []),
}


@pytest.mark.parametrize("sizes", [1, 3, 7, 1000])
@pytest.mark.parametrize("case", OTHER_FORMATS)
def test_calls_in_the_formats_of_other_families_are_read(case: str, sizes: int) -> None:
    written_as, text, said, calls = OTHER_FORMATS[case]
    assert read(text, sizes, written_as=written_as) == (said, calls)


def test_a_call_in_a_reasoning_block_that_the_prompt_has_opened_does_not_count() -> None:
    assert read(f"hm {CALL}</think>{CALL}", 4, is_thinking=True) == (f"hm {CALL}</think>", [F])


def test_deep_json_in_a_call_is_text() -> None:
    text = f"<tool_call>{'[' * 100_000}</tool_call>"
    assert read(text, 10_000) == (text, [])
