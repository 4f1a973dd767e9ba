"""Converts messages to token ids with the model's chat template, and never tokenizes sampled text again.

The prompt of a later turn is the earlier prompt, the sampled ids, and the ids of the text that the template inserts
between a reply and the next one. To find that text, a marker is rendered in place of the reply, or of an argument of
its last tool call. Some templates render earlier turns differently later on (they strip the reasoning from old
replies). Then the sampled ids cannot be kept, the conversation is rendered anew, and the caller learns of it.

A reply with tool calls becomes a message with `tool_calls`, which the templates of Mistral and GPT-OSS need. If a
template does not show these calls, or refuses them, the message holds the text of the reply as it is.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property
from typing import Any, Literal

from mint.errors import InvalidRequestError
from mint.rl.finding import Finding
from mint.rl.message_env import Message
from mint.rl.tasks.chat_options import template_text
from mint.types.tool_call_formats import (
    CALL_ENDS,
    ToolCall,
    ToolCallFormat,
    other_format,
    read_reply,
    render_tool_calls,
    tool_call_format,
    with_ids,
)
from mint.types.tool_call_formats.messages import (
    description_of,
    properties_of,
    results_as_user,
    structured_reply,
    with_system_text,
)

log = logging.getLogger("mint.chat")

MARKER = "MARKER7c1f0a93"
"""Rendered in place of a reply to find the text around it; no template trims or escapes letters and digits."""

NOT_RENDERED = "trace"
"""The key of a message for facts that are logged but not rendered (times, verdicts)."""

ReplyForm = Literal["objects", "texts", "plain", "user"]
"""How a reply with calls, and the results of tools, are given to a template: with `tool_calls` whose arguments are
objects, or JSON in texts; as plain text; as plain text with the results as what a user says."""


_STRUCTURED: Sequence[ReplyForm] = ("objects", "texts")


@dataclass(frozen=True)
class Extension:
    """The next prompt [P]; whether it begins with the earlier prompt and what was sampled; and the messages that were
    rendered for the reply and what followed, to be appended to the conversation."""

    prompt: list[int]
    kept: bool
    messages: Sequence[Message]


@cache
def warn_once(text: str) -> None:
    """Logs a warning, once in this process."""
    log.warning(text)


class ChatFormat:
    """One tokenizer's chat template with one set of tools. `tool_call_format` is how its model writes tool calls."""

    def __init__(
        self,
        tokenizer: Any,
        tools: Sequence[Mapping[str, Any]] = (),
        *,
        written_as: ToolCallFormat | None = None,
    ) -> None:
        """`tools` are the JSON schemas that the policy is told. `written_as` names the format of its tool calls; None
        is that of the chat template, or of the tokenizer's special tokens.

        Raises:
            InvalidRequestError: the tokenizer has no chat template, or it cannot render a plain conversation.
        """
        self._tokenizer = tokenizer
        self._tools = [dict(tool) for tool in tools] or None
        self._properties = properties_of(tools)
        added = tokenizer.get_added_vocab()
        self._template = template_text(tokenizer)
        self.tool_call_format = written_as or tool_call_format(self._template, added)
        self._described: str | None = None
        _, marked, closing = self._render([_user("Hi"), _assistant(MARKER)], ask=False).partition(MARKER)
        if not marked:
            raise InvalidRequestError(
                "drops the assistant's message",
                field="chat_template",
                remedy="Use a model with a chat template",
            )
        self._closing = self._encode(closing)
        self._special = set(added.values())
        ends = [added[text] for text in CALL_ENDS.get(self.tool_call_format, ()) if text in added]
        self._end_ids = {tokenizer.eos_token_id, *(self._special & set(self._closing[:1])), *ends}
        self._end_texts = {text for text, token in added.items() if token in self._end_ids} | {tokenizer.eos_token}
        if self._tools is not None and not self._describes_tools():
            self._described = description_of(self._tools, self.tool_call_format)
            warn_once(
                "the model's chat template does not describe tools; they are described in the system message, "
                f"with calls in the format {self.tool_call_format}"
            )

    @property
    def tool_names(self) -> Collection[str] | None:
        """The names of the tools; None if the policy is told of none here."""
        return self._properties.keys() or None

    def prompt(self, conversation: Sequence[Message]) -> list[int]:
        """The ids of the conversation, ready for the policy's next message [P]."""
        return self._encode(self._render(conversation))

    def reply(self, tokens_T: Sequence[int]) -> str:
        """The policy's text, with tool-call markup and without the end-of-turn token."""
        ended = bool(tokens_T) and tokens_T[-1] in self._end_ids
        return self._decode(list(tokens_T[:-1] if ended else tokens_T))

    def calls(self, content: str, *, earlier: int = 0) -> list[ToolCall]:
        """The calls in a reply, each with an id; `earlier` calls came before. Warns if the reply seems to hold calls in
        another format than the model's."""
        names = self.tool_names
        found = read_reply(content, self.tool_call_format, names).calls
        if (
            not found
            and names is not None
            and (other := other_format(content, self.tool_call_format, names)) is not None
        ):
            warn_once(
                f"a reply seems to hold a tool call in the format {other}, but calls are read in the format "
                f"{self.tool_call_format}; `tool_call_format` in RLConfig names another"
            )
        return with_ids(found, earlier)

    def extend(
        self,
        conversation: Sequence[Message],
        following: Sequence[Message],
        *,
        prompt_P: Sequence[int],
        tokens_T: Sequence[int],
        calls: Sequence[ToolCall] | None = None,
    ) -> Extension:
        """The next prompt after `conversation` was answered by `tokens_T` and `following` was said.

        `calls` are those of the reply, with ids; None: they are read from it. A result of a tool without `tool_call_id`
        gets that of the call at its place. Where the template renders earlier turns differently now, the whole
        conversation is rendered anew.

        Raises:
            InvalidRequestError: the template refuses the conversation in every form.
        """
        content = self.reply(tokens_T)
        calls = self.calls(content) if calls is None else calls
        answered = _with_call_ids(following, calls)
        before = self._render(conversation)
        rewritten: Extension | None = None
        refusal: InvalidRequestError | None = None
        for form in self._forms_for(calls, answered):
            try:
                between, after, messages = self._continue(form, conversation, content, calls, answered, before)
            except InvalidRequestError as error:
                refusal = refusal or error
                continue
            if between is not None:
                prompt = [*prompt_P, *tokens_T, *self._rest_of_turn(tokens_T, self._encode(between))]
                return Extension(prompt, True, messages)
            rewritten = rewritten or Extension(self._encode(after), False, messages)
        if rewritten is None:
            raise refusal or InvalidRequestError("renders no reply", field="chat_template")
        return rewritten

    def _continue(
        self,
        form: ReplyForm,
        conversation: Sequence[Message],
        content: str,
        calls: Sequence[ToolCall],
        following: Sequence[Message],
        before: str,
    ) -> tuple[str | None, str, Sequence[Message]]:
        """In one form: the text between the reply and the next one (None if the template changes what was before), the
        whole text, and the messages."""
        said = results_as_user(following) if form == "user" else following
        if form in ("plain", "user"):
            after = self._render([*conversation, _assistant(content), *said])
            between = self._render([*conversation, _assistant(MARKER), *said]).rpartition(MARKER)[2]
            # White space that the template trims or adds does not count.
            is_kept = _squeeze(after) == _squeeze(before + content + between)
            return between if is_kept else None, after, [_assistant(content), *said]
        reply = self._structured(form, content, calls)
        after = self._render([*conversation, reply, *said])
        marked_calls = [*calls[:-1], replace(calls[-1], arguments={"x": MARKER}, as_texts=False)]
        marked = self._render([*conversation, self._structured(form, content, marked_calls), *said])
        rest = marked.rpartition(MARKER)[2]
        ends = [place for text in self._end_texts if text and (place := rest.find(text)) >= 0]
        between = rest[min(ends) :] if ends else ""
        shown = _rest_after(before, after.removesuffix(between)) if between and after.endswith(between) else None
        is_kept = shown is not None and self._is_same_reply(shown, content)
        return between if is_kept else None, after, [reply, *said]

    def _structured(self, form: ReplyForm, content: str, calls: Sequence[ToolCall]) -> Message:
        reply = read_reply(content, self.tool_call_format, self.tool_names)
        return structured_reply(
            calls,
            text=reply.text,
            reasoning=reply.reasoning,
            written_as=self.tool_call_format,
            properties=self._properties,
            arguments="objects" if form == "objects" else "texts",
        )

    def _is_same_reply(self, shown: str, content: str) -> bool:
        """Whether the template shows the calls and the text that the policy wrote, maybe with other white space. Calls
        that cannot be read have no form in a template: their text stays as it was sampled."""
        rendered = read_reply(shown, self.tool_call_format, self.tool_names)
        written = read_reply(content, self.tool_call_format, self.tool_names)
        if any(call.error is not None for call in written.calls):
            return True
        same_calls = [_comparable(call) for call in rendered.calls] == [_comparable(call) for call in written.calls]
        return same_calls and _squeeze(rendered.reasoning + rendered.text) == _squeeze(written.reasoning + written.text)

    def _forms_for(self, calls: Sequence[ToolCall], following: Sequence[Message]) -> list[ReplyForm]:
        """The forms to try, the best first."""
        if not calls:
            has_results = any(message["role"] == "tool" for message in following)
            return ["plain", "user"] if has_results else ["plain"]
        forms = self._forms
        if any(call.error is not None for call in calls):  # only its own text shows a call that cannot be read
            return sorted(forms, key=lambda form: form != "plain")
        return forms

    @cached_property
    def _forms(self) -> list[ReplyForm]:
        """The forms in which the template shows two calls one after the other, each with its result."""
        structured: list[ReplyForm] = [form for form in _STRUCTURED if self._shows(form)]
        plain: list[ReplyForm] = ["plain"] if self._shows("plain") else []
        return [*structured[:1], *plain] or ["user"]

    def _shows(self, form: ReplyForm) -> bool:
        conversation = [_user("Hi")]
        marks = [f"{MARKER}{number}" for number in range(4)]
        for said, result in ((marks[0], marks[1]), (marks[2], marks[3])):
            calls = with_ids([ToolCall("f", {"x": said})], len(conversation))
            content = render_tool_calls(calls, self.tool_call_format)
            reply = _assistant(content) if form == "plain" else self._structured(form, "", calls)
            conversation += [reply, *_with_call_ids([{"role": "tool", "name": "f", "content": result}], calls)]
        try:
            text = self._render(conversation)
        except InvalidRequestError:
            return False
        return all(mark in text for mark in marks)

    def _describes_tools(self) -> bool:
        conversation = [_user("Hi")]
        try:
            return self._render(conversation) != self._render(conversation, with_tools=False)
        except InvalidRequestError:  # some cannot do without tools
            return True

    @cached_property
    def _has_system(self) -> bool:
        """Whether the template takes a system message and shows it."""
        try:
            conversation = [{"role": "system", "content": MARKER}, _user("Hi")]
            return MARKER in self._apply(conversation, ask=True, with_tools=True)
        except InvalidRequestError:
            return False

    def _rest_of_turn(self, tokens_T: Sequence[int], between: list[int]) -> list[int]:
        """`between` without the end token if the policy has sampled one; a reply that was cut off has none."""
        if not tokens_T or tokens_T[-1] not in self._end_ids:
            return between
        place = next((place for place, token in enumerate(between) if token in self._special), None)
        return between if place is None or between[place] not in self._end_ids else between[place + 1 :]

    def _render(self, conversation: Sequence[Message], *, ask: bool = True, with_tools: bool = True) -> str:
        if self._described is not None:
            conversation = with_system_text(conversation, self._described, has_system=self._has_system)
        return self._apply(conversation, ask=ask, with_tools=with_tools)

    def _apply(self, conversation: Sequence[Message], *, ask: bool, with_tools: bool) -> str:
        shown = [{key: value for key, value in message.items() if key != NOT_RENDERED} for message in conversation]
        tools = self._tools if with_tools else None
        others = {"xml_tools": tools} if tools is not None and "xml_tools" in self._template else {}  # SmolLM3
        try:
            return self._tokenizer.apply_chat_template(
                shown, tools=tools, tokenize=False, add_generation_prompt=ask, **others
            )
        except Exception as error:  # a template is third-party code and may raise anything
            raise InvalidRequestError(
                f"cannot render the conversation ({error})",
                field="chat_template",
                value=[message.get("role") for message in shown],
                remedy="Use a model with a chat template, and roles that it knows",
            ) from error

    def _encode(self, text: str) -> list[int]:
        return self._tokenizer.encode(text, add_special_tokens=False)

    def _decode(self, tokens: Sequence[int]) -> str:
        return self._tokenizer.decode(tokens, skip_special_tokens=False, clean_up_tokenization_spaces=False)


CALL = "CALL"
TEMPLATE_CASES: Mapping[str, tuple[str, Message]] = {
    "a reply, then a user": ("It is 7.", {"role": "user", "content": "Thanks."}),
    "a tool call, then its result": (CALL, {"role": "tool", "content": "7"}),
    "a reasoning block, then a user": ("<think>\n3 + 4\n</think>\n\n7", {"role": "user", "content": "Thanks."}),
    "a reasoning block and a tool call, then its result": (
        f"<think>\n3 + 4\n</think>\n\n{CALL}",
        {"role": "tool", "content": "7"},
    ),
}
"""Replies that some templates render differently once they are past; `CALL` stands for a call in the model's format."""
REASONING_CASES = [name for name in TEMPLATE_CASES if "reasoning" in name]


def check_template(tokenizer: Any) -> Finding | None:
    """Checks whether the template keeps earlier turns as they were; the finding names the cases in which it does not.

    Raises:
        InvalidRequestError: there is no chat template.
    """
    chat = ChatFormat(tokenizer)
    start = [_user("What is 3 + 4?")]
    changed: list[str] = []
    refused: list[str] = []
    call = render_tool_calls([ToolCall("f", {"x": 1})], chat.tool_call_format)
    for name, (content, following) in TEMPLATE_CASES.items():
        tokens = tokenizer.encode(content.replace(CALL, call), add_special_tokens=False)
        try:
            if not chat.extend(start, [following], prompt_P=chat.prompt(start), tokens_T=tokens).kept:
                changed.append(name)
        except InvalidRequestError:
            refused.append(name)
    if not changed and not refused:
        return None
    says = [("renders past turns differently after", changed), ("cannot render", refused)]
    return Finding(
        code="template_rewrites_history",
        severity="warning" if {*changed, *refused} - {*REASONING_CASES} else "info",
        step=0,
        evidence="the chat template " + ", and ".join(f"{what}: {'; '.join(names)}" for what, names in says if names),
        remedy="Episodes of this kind train as several datums (`rollouts/retokenized_turns` counts the breaks); "
        "a template that keeps past replies verbatim trains them as one",
        numbers={"changed": float(len(changed)), "refused": float(len(refused))},
    )


def _user(content: str) -> Message:
    return {"role": "user", "content": content}


def _assistant(content: str) -> Message:
    return {"role": "assistant", "content": content}


def _squeeze(text: str) -> str:
    return "".join(text.split())


def _rest_after(before: str, text: str) -> str | None:
    """What follows `before` in `text`, where white space does not count; None if the text does not begin with it."""
    letters: Iterator[str] = iter(_squeeze(before))
    place = 0
    for wanted in letters:
        while place < len(text) and text[place].isspace():
            place += 1
        if place == len(text) or text[place] != wanted:
            return None
        place += 1
    return text[place:]


def _with_call_ids(messages: Sequence[Message], calls: Sequence[ToolCall]) -> list[Message]:
    """The messages; results of tools without an id get those of the calls, in order."""
    ids = iter(calls)
    shown: list[Message] = []
    for message in messages:
        call = next(ids, None) if message.get("role") == "tool" else None
        shown.append(message if call is None else {"tool_call_id": call.id, **message})
    return shown


def _comparable(call: ToolCall) -> tuple[str, Any]:
    texts = {
        name: value if isinstance(value, str) else json.dumps(value) for name, value in (call.arguments or {}).items()
    }
    return call.name, texts
