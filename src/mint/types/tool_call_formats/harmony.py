"""Calls of GPT-OSS: messages on channels, of which those to `functions.NAME` are calls.

Source: OpenAI's "Harmony response format" (github.com/openai/harmony). A message is a header, `<|message|>` and a body,
closed by `<|end|>`, `<|call|>` or `<|return|>`. The header holds a recipient (`to=functions.f`), before or after the
channel, and for a call the type of its body.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator

from mint.types.tool_call_formats.call import Part, Reasoning, ToolCall, named_call

START, CHANNEL, CONSTRAIN, MESSAGE = "<|start|>", "<|channel|>", "<|constrain|>", "<|message|>"
HARMONY_ENDS = ("<|call|>", "<|return|>", "<|end|>")
_FUNCTIONS = "functions."


def harmony_calls(text: str, names: Collection[str] | None = None) -> Iterator[Part]:
    """The calls of a reply. What is said on the channel `analysis` is reasoning."""
    for end in HARMONY_ENDS[1:]:
        text = text.replace(end, HARMONY_ENDS[0])
    for message in text.split(HARMONY_ENDS[0]):
        if message.strip():
            yield _message(message)


def _message(message: str) -> Part:
    header, begun, body = message.partition(MESSAGE)
    if not begun and CHANNEL not in header and START not in header:
        return message
    words = header.replace(CHANNEL, f" {CHANNEL}").replace(CONSTRAIN, " ").replace(START, " ").split()
    recipient = next((word.removeprefix("to=") for word in words if word.startswith("to=")), "")
    channel = next((word.removeprefix(CHANNEL) for word in words if word.startswith(CHANNEL)), "")
    if recipient not in ("", "user", "all"):
        name = recipient.removeprefix(_FUNCTIONS)
        if not begun:
            return ToolCall(error=f"the call of {name} has no {MESSAGE}")
        return named_call(name, body)
    return Reasoning(body) if channel == "analysis" else body
