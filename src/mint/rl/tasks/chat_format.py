"""Converts messages to token ids with the model's chat template, and never tokenizes sampled text again.

The prompt of a later turn is the earlier prompt, the sampled ids, and the ids of the text that the template inserts
between a reply and the next one. To find that text, a marker is rendered in place of the reply. Some templates render
earlier turns differently later on (they strip the reasoning from old replies). Then the sampled ids cannot be kept, the
conversation is rendered anew, and the caller learns of it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from mint.errors import InvalidRequestError
from mint.rl.finding import Finding
from mint.rl.message_env import Message
from mint.rl.tasks.chat_options import template_text
from mint.types.tool_call_formats import tool_call_format

MARKER = "MARKER7c1f0a93"
"""Rendered in place of a reply to find the text around it; no template trims or escapes letters and digits."""

NOT_RENDERED = "trace"
"""The key of a message for facts that are logged but not rendered (times, verdicts)."""


class ChatFormat:
    """One tokenizer's chat template with one set of tools. `tool_call_format` is how its model writes tool calls."""

    def __init__(self, tokenizer: Any, tools: Sequence[Mapping[str, Any]] = ()) -> None:
        """`tools` are the JSON schemas that the template describes to the policy.

        Raises:
            InvalidRequestError: the tokenizer has no chat template, or it cannot render a plain conversation.
        """
        self._tokenizer = tokenizer
        self._tools = [dict(tool) for tool in tools] or None
        self.tool_call_format = tool_call_format(template_text(tokenizer))
        _, marked, closing = self._render([_user("Hi"), _assistant(MARKER)], ask=False).partition(MARKER)
        if not marked:
            raise InvalidRequestError(
                "drops the assistant's message",
                field="chat_template",
                remedy="Use a model with a chat template",
            )
        self._closing = self._encode(closing)
        special = set(tokenizer.get_added_vocab().values())
        self._end_ids = {tokenizer.eos_token_id, *(special & set(self._closing[:1]))}

    def prompt(self, conversation: Sequence[Message]) -> list[int]:
        """The ids of the conversation, ready for the policy's next message [P]."""
        return self._encode(self._render(conversation))

    def reply(self, tokens_T: Sequence[int]) -> str:
        """The policy's text, with tool-call markup and without the end-of-turn token."""
        ended = bool(tokens_T) and tokens_T[-1] in self._end_ids
        return self._decode(list(tokens_T[:-1] if ended else tokens_T))

    def extend(
        self,
        conversation: Sequence[Message],
        following: Sequence[Message],
        *,
        prompt_P: Sequence[int],
        tokens_T: Sequence[int],
    ) -> tuple[list[int], bool]:
        """The next prompt after `conversation` was answered by `tokens_T` and `following` was said.

        Returns the ids, and whether they begin with `prompt_P` and `tokens_T`; False means that the template renders
        earlier turns differently now, so that the whole conversation was rendered anew.
        """
        content = self.reply(tokens_T)
        before = self._render(conversation)
        after = self._render([*conversation, _assistant(content), *following])
        marked = self._render([*conversation, _assistant(MARKER), *following])
        between = marked.rpartition(MARKER)[2]
        # White space that the template trims or adds does not count.
        if _squeeze(after) != _squeeze(before + content + between):
            return self._encode(after), False
        return [*prompt_P, *tokens_T, *self._rest_of_turn(tokens_T, self._encode(between))], True

    def _rest_of_turn(self, tokens_T: Sequence[int], between: list[int]) -> list[int]:
        """`between` without the end token if the policy has sampled it; a reply that was cut off has none."""
        if not tokens_T or tokens_T[-1] not in self._end_ids & set(self._closing):
            return between
        said = self._closing.index(tokens_T[-1]) + 1
        return between[said:] if between[:said] == self._closing[:said] else between

    def _render(self, conversation: Sequence[Message], *, ask: bool = True) -> str:
        shown = [{key: value for key, value in message.items() if key != NOT_RENDERED} for message in conversation]
        try:
            return self._tokenizer.apply_chat_template(
                shown, tools=self._tools, tokenize=False, add_generation_prompt=ask
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


TEMPLATE_CASES: Mapping[str, tuple[str, Message]] = {
    "a reply, then a user": ("It is 7.", {"role": "user", "content": "Thanks."}),
    "a tool call, then its result": (
        '<tool_call>{"name":"f", "arguments":{"x":1}}</tool_call>',
        {"role": "tool", "content": "7"},
    ),
    "a reasoning block, then a user": ("<think>\n3 + 4\n</think>\n\n7", {"role": "user", "content": "Thanks."}),
    "a reasoning block and a tool call, then its result": (
        '<think>\n3 + 4\n</think>\n\n<tool_call>{"name":"f", "arguments":{"x":1}}</tool_call>',
        {"role": "tool", "content": "7"},
    ),
}
"""Replies that some templates render differently once they are past."""
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
    for name, (content, following) in TEMPLATE_CASES.items():
        tokens = tokenizer.encode(content, add_special_tokens=False)
        try:
            if not chat.extend(start, [following], prompt_P=chat.prompt(start), tokens_T=tokens)[1]:
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
