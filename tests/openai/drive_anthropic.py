"""Runs the `anthropic` package against the server at `argv[1]`, with the key `argv[2]` and the model `argv[3]`.

Runs in an environment of its own, without mint. Prints what came back as JSON.
"""

from __future__ import annotations

import json
import sys
from typing import Any

import anthropic
import pydantic

QUESTION: Any = [{"role": "user", "content": "What is 31 + 44?"}]
TOOL: Any = {
    "name": "calculator",
    "description": "Evaluate an arithmetic expression.",
    "input_schema": {
        "type": "object",
        "properties": {"expression": {"type": "string"}},
        "required": ["expression"],
    },
}


class Sum(pydantic.BaseModel):
    left: int
    right: int


@anthropic.beta_tool
def calculator(expression: str) -> str:
    """Evaluate an arithmetic expression."""
    left, right = expression.split("+")
    return str(int(left) + int(right))


def main(url: str, key: str, model: str) -> dict[str, Any]:
    client = anthropic.Anthropic(base_url=url, api_key=key, max_retries=0)
    # newer versions have no argument for the temperature
    asked: dict[str, Any] = {"model": model, "max_tokens": 60, "extra_body": {"temperature": 0}}
    whole = client.messages.create(messages=QUESTION, **asked)
    with client.messages.stream(messages=QUESTION, **asked) as stream:
        pieces = list(stream.text_stream)
        streamed = stream.get_final_message()
    called = client.messages.create(messages=QUESTION, tools=[TOOL], **asked)
    with client.messages.stream(messages=QUESTION, tools=[TOOL], **asked) as stream:
        called_in_stream = stream.get_final_message()
    (use,) = called.content
    result = {"type": "tool_result", "tool_use_id": use.id, "content": calculator(**use.input)}
    told = [*QUESTION, {"role": "assistant", "content": called.content}, {"role": "user", "content": [result]}]
    answer = client.messages.create(messages=told, tools=[TOOL], **asked)
    runner = client.beta.messages.tool_runner(messages=QUESTION, tools=[calculator], **asked)
    parsed = client.messages.parse(messages=QUESTION, output_format=Sum, model=model, max_tokens=200)
    counted = client.messages.count_tokens(model=model, messages=QUESTION)
    errors = []
    for wrong in ({"model": "nobody/nothing"}, {"thinking": {"type": "enabled", "budget_tokens": 1024}}):
        try:
            client.messages.create(**{"messages": QUESTION, **asked, **wrong})
        except anthropic.APIStatusError as error:
            errors.append([type(error).__name__, error.status_code, error.body["error"]["type"]])
    try:
        anthropic.Anthropic(base_url=url, api_key="wrong", max_retries=0).messages.create(messages=QUESTION, **asked)
    except anthropic.AuthenticationError as error:
        errors.append([type(error).__name__, error.status_code, error.body["error"]["type"]])
    return {
        "version": anthropic.__version__,
        "text": whole.content[0].text,
        "stop_reason": whole.stop_reason,
        "pieces": pieces,
        "streamed": streamed.content[0].text,
        "usage": [whole.usage.input_tokens, whole.usage.output_tokens],
        "streamed_usage": [streamed.usage.input_tokens, streamed.usage.output_tokens],
        "use": [use.name, use.input, called.stop_reason],
        "use_in_stream": [called_in_stream.content[0].name, called_in_stream.content[0].input],
        "answer": answer.content[0].text,
        "run": runner.until_done().content[0].text,
        "parsed": parsed.parsed_output.model_dump(),
        "counted": counted.input_tokens,
        "errors": errors,
    }


if __name__ == "__main__":
    sys.stdout.write(json.dumps(main(*sys.argv[1:4])))
