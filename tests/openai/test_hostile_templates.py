"""The chat template of a stranger: it may refuse, it may be slow; it reaches nothing, and it ends."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import time
from collections.abc import Iterator
from copy import copy
from pathlib import Path
from resource import RUSAGE_SELF, getrusage
from typing import Any

import pytest
from waiting import wait_until

from mint.errors import InvalidRequestError, OverloadedError
from mint.models.registry import resolve
from mint.server.openai import chat_template
from mint.server.openai.chat_template import render_conversation
from mint.server.openai.schemas import ChatRequest
from mint.tokenizer import load_tokenizer

REQUEST = ChatRequest(model="m", messages=[{"role": "user", "content": "{{ 7 * 7 }}{% for i in x %}"}])
SECRET = "the-secret-of-this-machine"

ESCAPES = {
    "classes": "{{ ''.__class__.__mro__[1].__subclasses__() }}",
    "classes by a filter": "{{ ('' | attr('__class__')).__mro__ }}",
    "classes by format": "{{ '{0.__class__.__mro__}'.format(messages) }}",
    "classes by a mapped attribute": "{{ [''] | map(attribute='__class__') | list }}",
    "globals of a function": "{{ raise_exception.__globals__ }}",
    "globals of a macro": "{% macro f() %}{% endmacro %}{{ f.__init__.__globals__ }}",
    "globals of cycler": "{{ cycler.__init__.__globals__.os.environ }}",
    "the template itself": "{{ self.__init__.__globals__ }}",
    "the context": "{{ self._TemplateReference__context.environment }}",
    "a generator's frame": "{{ (messages | map('length')).gi_frame.f_globals }}",
    "import": "{% import 'os' as os %}{{ os.environ }}",
    "include": "{% include 'FILE' %}",
    "extends": "{% extends 'FILE' %}",
    "change the messages": "{% set _ = messages.append(1) %}{{ messages }}",
    "change a message": "{% set _ = messages[0].update({'role': 'system'}) %}{{ messages }}",
    "a large range": "{% for i in range(10**9) %}{% endfor %}",
    "endless recursion": "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
    "a digit too many": "{{ 10 ** 5000 }}",
    "no template": "{% if %}",
}
HARMLESS = {"classes by a mapped attribute", "globals of a function"}
"""Rendered, as a value that is not defined; all others are refused."""

SLOW = {
    "loops in loops": "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
    "recursion": "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(60) }}",
}

PLAIN = "{% for message in messages %}{{ message.role }}: {{ message.content }}\n{% endfor %}"
ALL_THAT_IT_GETS = "{{ tools | tojson }}{{ bos_token }}{{ eos_token }}{{ depth }}{{ messages }}"
LARGE = {
    "a doubled text": (
        "{% set n = namespace(s='x') %}{% for i in range(40) %}{% set n.s = n.s ~ n.s %}{% endfor %}{{ n.s | length }}",
        "512 MiB of memory",
    ),
    "a long list": ("{{ ([0] * 10**9) | length }}", "512 MiB of memory"),
    "many small lists": (
        "{% set n = namespace(s=[]) %}{% for i in range(99999) %}{% set n.s = [n.s, 'x' * (9999 + i)] %}{% endfor %}",
        "512 MiB of memory",
    ),
    "a long conversation": ("{{ 'x' * (17 * 1024 ** 2) }}", "16,777,216 characters"),
}


@pytest.fixture
def tokenizer() -> Iterator[Any]:
    """A copy of the bundled model's, for another template."""
    yield copy(load_tokenizer(str(resolve("mint/tiny", {})), "mint/tiny"))


@pytest.mark.parametrize("name", ESCAPES)
def test_a_template_reaches_nothing_beyond_the_conversation(
    tokenizer: Any, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MINT_SECRET", SECRET)
    file = tmp_path / "secret.txt"
    file.write_text(SECRET)
    tokenizer.chat_template = ESCAPES[name].replace("FILE", str(file))
    began = time.process_time()
    try:
        shown = render_conversation(tokenizer, REQUEST)
        assert name in HARMLESS
    except InvalidRequestError as refused:
        shown = str(refused)
    assert not any(mark in shown for mark in (SECRET, "<class", "<module", " at 0x"))
    assert time.process_time() - began < 5


@pytest.mark.parametrize("name", SLOW)
def test_a_template_that_does_not_end_is_stopped(tokenizer: Any, name: str) -> None:
    tokenizer.chat_template = SLOW[name]
    with pytest.raises(InvalidRequestError, match=r"takes more than 0\.2 s"):
        render_conversation(tokenizer, REQUEST, limit_s=0.2)
    wait_until(lambda: not _rendering_processes())


@pytest.mark.parametrize("name", LARGE)
def test_what_a_template_takes_is_limited_and_is_not_the_servers(tokenizer: Any, name: str) -> None:
    before = getrusage(RUSAGE_SELF).ru_maxrss
    tokenizer.chat_template, problem = LARGE[name]
    with pytest.raises(InvalidRequestError, match=f"has a chat template that takes more than {problem}"):
        render_conversation(tokenizer, REQUEST)
    assert getrusage(RUSAGE_SELF).ru_maxrss - before < 128 << 10  # KiB
    tokenizer.chat_template = PLAIN
    assert REQUEST.messages[0].text in render_conversation(tokenizer, REQUEST)


def test_a_template_that_ends_its_process_ends_nothing_else(tokenizer: Any) -> None:
    tokenizer.chat_template = PLAIN
    render_conversation(tokenizer, REQUEST)
    [process] = _rendering_processes()
    os.kill(process, signal.SIGKILL)
    assert REQUEST.messages[0].text in render_conversation(tokenizer, REQUEST)


@pytest.mark.parametrize("template", [PLAIN, ALL_THAT_IT_GETS])
def test_a_template_says_beside_the_server_what_transformers_says(tokenizer: Any, template: str) -> None:
    add = {"name": "add", "description": "é \ud83e", "parameters": {"type": "object", "properties": {"a": {}}}}
    tools = [{"type": "function", "function": add}]
    call = {"id": "c", "type": "function", "function": {"name": "add", "arguments": {"a": [1, None, 1.5]}}}
    sent = {**call, "function": {"name": "add", "arguments": '{"a": [1, null, 1.5]}'}}
    said = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "שלום \u202e"}]
    result = {"role": "tool", "content": "3", "tool_call_id": "c"}
    depth = [1, {"x": None}]
    request = ChatRequest(
        model="m",
        messages=[*said, {"role": "assistant", "content": None, "tool_calls": [sent]}, result],
        tools=tools,
        chat_template_kwargs={"depth": depth},
    )
    tokenizer.chat_template = template
    messages = [*said, {"role": "assistant", "content": "", "tool_calls": [call]}, result]
    wanted = tokenizer.apply_chat_template(
        messages, tools=tools, tokenize=False, add_generation_prompt=True, depth=depth
    )
    assert render_conversation(tokenizer, request) == wanted


CALLS_WITH_IDS = (
    "{% for m in messages %}{% for c in m.tool_calls or [] %}{{ MARK }}{{ c.id }} {{ ARGUMENTS }};{% endfor %}"
    "{% if m.role == 'tool' %}{{ m.tool_call_id }}={{ m.content }};{% endif %}{% endfor %}"
)


@pytest.mark.parametrize(
    ("mark", "wanted"),
    [
        ("[TOOL_CALLS]", "call12345"),
        ("<|tool_call_begin|>", "functions.add:0"),
        ("<tool_call>", "call12345"),
    ],
)
def test_ids_of_calls_are_those_that_the_template_takes(tokenizer: Any, mark: str, wanted: str) -> None:
    """Mistral's templates refuse ids that are not nine letters and digits; Kimi's ids name the function."""
    tokenizer.chat_template = CALLS_WITH_IDS.replace("MARK", f"'{mark}'").replace("ARGUMENTS", "c.function.arguments.a")
    calls = [
        {"id": own, "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}
        for own in ("call12345", "call_0123456789abcdef01234567")
    ]
    results = [{"role": "tool", "content": call["id"][:5], "tool_call_id": call["id"]} for call in calls]
    said = [{"role": "user", "content": "?"}, {"role": "assistant", "content": None, "tool_calls": calls}]
    text = render_conversation(tokenizer, ChatRequest(model="m", messages=[*said, *results]))
    first, second, first_result, second_result, _ = text.replace(mark, "").split(";")
    assert first == f"{wanted} 1"
    assert first_result == f"{wanted}=call1"
    other = second.removesuffix(" 1")
    assert second_result == f"{other}=call_"
    assert other != wanted
    if mark == "[TOOL_CALLS]":
        assert len(other) == 9
        assert other.isalnum()


def test_a_template_that_takes_arguments_as_text_gets_text(tokenizer: Any) -> None:
    tokenizer.chat_template = CALLS_WITH_IDS.replace("MARK", "''").replace(
        "ARGUMENTS", "'json ' + c.function.arguments"
    )
    call = {"id": "c", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}
    said = [{"role": "user", "content": "?"}, {"role": "assistant", "content": None, "tool_calls": [call]}]
    assert render_conversation(tokenizer, ChatRequest(model="m", messages=said)) == 'c json {"a": 1};'


def test_a_machine_that_cannot_start_a_process_is_not_the_templates_fault(
    tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(*_arguments: Any, **_options: Any) -> None:
        raise OSError(errno.EAGAIN, os.strerror(errno.EAGAIN))

    chat_template._free_processes.cache_clear()  # as in a server that has just started
    tokenizer.chat_template = PLAIN
    with monkeypatch.context() as patch:
        patch.setattr(subprocess, "Popen", refused)
        with pytest.raises(OverloadedError, match="cannot be started"):
            render_conversation(tokenizer, REQUEST)
    assert REQUEST.messages[0].text in render_conversation(tokenizer, REQUEST)


def test_the_template_of_a_bundled_model_needs_no_process(tokenizer: Any) -> None:
    before = _rendering_processes()
    assert REQUEST.messages[0].text in render_conversation(tokenizer, REQUEST)
    assert _rendering_processes() == before


def _rendering_processes() -> list[int]:
    command = ["pgrep", "-P", str(os.getpid()), "-f", "rendering_process"]
    children = subprocess.run(command, capture_output=True, text=True)
    return [int(line) for line in children.stdout.split()]


def test_a_template_is_not_made_of_what_users_write(tokenizer: Any) -> None:
    assert REQUEST.messages[0].text in render_conversation(tokenizer, REQUEST)
