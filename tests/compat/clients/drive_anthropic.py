"""The `anthropic` package: messages, streams, tools, its tool runner, a type, counted tokens, errors."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import anthropic
import anthropic_fields
from animal import FEED, Animal
from checks import MESSAGES, check, raises, report, target

TARGET = target()
MODEL = TARGET.model
URL = TARGET.url.removesuffix("/v1")
CLIENT = anthropic.Anthropic(base_url=URL, api_key=TARGET.key, max_retries=0)
SUM: Any = [{"role": "user", "content": "What is 31 + 44?"}]
# newer versions have no argument for the temperature
GREEDY: dict[str, Any] = {"model": MODEL, "max_tokens": 60, "extra_body": {"temperature": 0}}
ANY: dict[str, Any] = {"model": MODEL, "max_tokens": 80, "messages": MESSAGES}
TOOL: Any = {
    "name": "feed",
    "description": FEED["function"]["description"],
    "input_schema": FEED["function"]["parameters"],
}
FIELDS = Path(__file__).resolve().parents[2] / "openai" / "anthropic_fields.json"


@anthropic.beta_tool
def calculator(expression: str) -> str:
    """Evaluate an arithmetic expression."""
    left, right = expression.split("+")
    return str(int(left) + int(right))


@check("messages.create, messages.count_tokens")
def create() -> None:
    whole = CLIENT.messages.create(messages=SUM, **GREEDY)
    assert whole.stop_reason == "end_turn" and whole.content[0].text
    assert CLIENT.messages.count_tokens(model=MODEL, messages=SUM).input_tokens == whole.usage.input_tokens
    assert CLIENT.messages.create(**{**ANY, "max_tokens": 2}).stop_reason == "max_tokens"


@check("messages.stream: the message of the whole")
def stream() -> None:
    whole = CLIENT.messages.create(messages=SUM, **GREEDY)
    with CLIENT.messages.stream(messages=SUM, **GREEDY) as streaming:
        pieces = list(streaming.text_stream)
        streamed = streaming.get_final_message()
    assert "".join(pieces) == streamed.content[0].text == whole.content[0].text
    assert streamed.usage == whole.usage and len(pieces) > 1


@check("stop_sequences, system")
def stop() -> None:
    whole = CLIENT.messages.create(messages=SUM, system="Be brief.", **GREEDY).content[0].text
    stopped = CLIENT.messages.create(messages=SUM, system="Be brief.", stop_sequences=[whole[-3:]], **GREEDY)
    assert (stopped.stop_reason, stopped.stop_sequence) == ("stop_sequence", whole[-3:])


@check("tools: any, named, none, streamed")
def tools() -> None:
    one = {"disable_parallel_tool_use": True}
    for choice in ({"type": "any", **one}, {"type": "tool", "name": "feed", **one}):
        got = CLIENT.messages.create(tools=[TOOL], tool_choice=choice, **ANY)
        (use,) = got.content
        assert use.name == "feed" and use.input["animal"] in ("cat", "dog") and got.stop_reason == "tool_use"
        with CLIENT.messages.stream(tools=[TOOL], tool_choice=choice, **ANY) as streaming:
            (use,) = streaming.get_final_message().content
        assert use.name == "feed" and use.input["animal"] in ("cat", "dog")
    assert CLIENT.messages.create(tools=[TOOL], tool_choice={"type": "none"}, **ANY).stop_reason != "tool_use"


@check("tool_use and tool_result: the result is read")
def result() -> None:
    (use,) = (called := CLIENT.messages.create(messages=SUM, tools=[calculator.to_dict()], **GREEDY)).content
    told = {"type": "tool_result", "tool_use_id": use.id, "content": calculator(**use.input)}
    history = [*SUM, {"role": "assistant", "content": called.content}, {"role": "user", "content": [told]}]
    assert "75" in CLIENT.messages.create(messages=history, tools=[calculator.to_dict()], **GREEDY).content[0].text


@check("beta.messages.tool_runner")
def runner() -> None:
    ran = CLIENT.beta.messages.tool_runner(messages=SUM, tools=[calculator], **GREEDY)
    assert "75" in ran.until_done().content[0].text


@check("messages.parse: a pydantic type")
def parse() -> None:
    assert isinstance(CLIENT.messages.parse(output_format=Animal, **ANY).parsed_output, Animal)


@check("AsyncAnthropic: 8 requests at once")
def many() -> None:
    async def ask() -> list[str]:
        async with anthropic.AsyncAnthropic(base_url=URL, auth_token=TARGET.key, max_retries=0) as client:
            got = await asyncio.gather(*(client.messages.create(messages=SUM, **GREEDY) for _ in range(8)))
        return [one.content[0].text for one in got]

    assert len(set(asyncio.run(ask()))) == 1


@check("errors: unknown model, thinking, wrong key")
def errors() -> None:
    raises(anthropic.NotFoundError, "no-such", lambda: CLIENT.messages.create(**{**ANY, "model": "no-such"}))
    thinking: Any = {"type": "enabled", "budget_tokens": 1024}
    raises(anthropic.BadRequestError, "thinking", lambda: CLIENT.messages.create(thinking=thinking, **ANY))
    other = anthropic.Anthropic(base_url=URL, api_key="wrong", max_retries=0)
    raises(anthropic.AuthenticationError, "authentication_error", lambda: other.messages.create(**ANY))


@check("the fields that are tested one by one are those of the package")
def fields() -> None:
    assert json.loads(FIELDS.read_text()) == anthropic_fields.FOUND, "run anthropic_fields.py, and decide what is new"


if __name__ == "__main__":
    report("anthropic")
