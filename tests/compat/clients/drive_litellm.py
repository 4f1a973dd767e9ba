"""litellm: chat, text, streams, structured outputs and tools through its provider for OpenAI's protocol."""

from __future__ import annotations

import asyncio
import json

import litellm
from animal import FEED, Animal
from checks import MESSAGES, check, raises, report, target

TARGET = target()
MODEL = f"openai/{TARGET.model}"
OPTIONS = {"model": MODEL, "api_base": TARGET.url, "api_key": TARGET.key, "messages": MESSAGES}
GREEDY = {**OPTIONS, "temperature": 0, "max_tokens": 12}


@check("completion, acompletion")
def completion() -> None:
    whole = litellm.completion(**GREEDY).choices[0].message
    assert whole.role == "assistant" and whole.content
    assert asyncio.run(litellm.acompletion(**GREEDY)).choices[0].message.content == whole.content


@check("completion: a stream has the text of the whole")
def stream() -> None:
    parts = [part.choices[0].delta.content or "" for part in litellm.completion(stream=True, **GREEDY)]
    assert "".join(parts) == litellm.completion(**GREEDY).choices[0].message.content


@check("text_completion")
def text() -> None:
    got = litellm.text_completion(
        model=f"text-completion-openai/{TARGET.model}",
        prompt="What is",
        api_base=TARGET.url,
        api_key=TARGET.key,
        max_tokens=8,
    )
    assert got.choices[0].text


@check("response_format: a pydantic type")
def structured() -> None:
    got = litellm.completion(max_tokens=80, response_format=Animal, **OPTIONS)
    Animal.model_validate_json(got.choices[0].message.content)


@check("tools with tool_choice required")
def tools() -> None:
    got = litellm.completion(max_tokens=80, tools=[FEED], tool_choice="required", **OPTIONS)
    call = got.choices[0].message.tool_calls[0].function
    assert call.name == "feed" and json.loads(call.arguments)["animal"] in ("cat", "dog")


@check("batch_completion")
def batch() -> None:
    options = {name: value for name, value in GREEDY.items() if name != "messages"}
    got = litellm.batch_completion(messages=[MESSAGES] * 4, **options)
    assert len({one.choices[0].message.content for one in got}) == 1


@check("errors: unknown model, wrong key")
def errors() -> None:
    raises(litellm.NotFoundError, "no-such", lambda: litellm.completion(**{**GREEDY, "model": "openai/no-such"}))
    raises(litellm.AuthenticationError, "", lambda: litellm.completion(**{**GREEDY, "api_key": "wrong"}))


if __name__ == "__main__":
    report("litellm", "openai")
