"""Runs openai-agents with its default model, which speaks the Responses API, against the server at `argv[1]`.

Runs in an environment of its own, without mint. Prints what came back as JSON.
"""

from __future__ import annotations

import asyncio
import json
import sys
from typing import Any

import openai
import pydantic
from agents import Agent, ModelSettings, OpenAIProvider, RunConfig, Runner, function_tool, set_tracing_disabled


class Sum(pydantic.BaseModel):
    left: int
    right: int


@function_tool
def calculator(expression: str) -> str:
    """Evaluate an arithmetic expression."""
    left, right = expression.split("+")
    return str(int(left) + int(right))


async def main(url: str, key: str, model: str) -> dict[str, Any]:
    set_tracing_disabled(True)
    client = openai.AsyncOpenAI(base_url=f"{url}/v1", api_key=key, max_retries=0)
    # the name of a model may have a slash, which the default provider would read as the name of a provider
    config = RunConfig(model_provider=OpenAIProvider(openai_client=client))
    greedy = ModelSettings(temperature=0, max_tokens=60)
    agent = Agent(name="adder", model=model, tools=[calculator], model_settings=greedy)
    first = await Runner.run(agent, "What is 31 + 44?", run_config=config)
    history = [*first.to_input_list(), {"role": "user", "content": "What is 2 + 2?"}]
    second = await Runner.run(agent, history, run_config=config)
    streamed = Runner.run_streamed(agent, "What is 31 + 44?", run_config=config)
    events = [event.type async for event in streamed.stream_events()]
    typed = Agent(name="typed", model=model, output_type=Sum, model_settings=ModelSettings(max_tokens=200))
    value = await Runner.run(typed, "What is 31 + 44?", run_config=config)
    return {
        "reply": first.final_output,
        "items": [type(item).__name__ for item in first.new_items],
        "second": second.final_output,
        "streamed": streamed.final_output,
        "events": len(events),
        "value": value.final_output.model_dump(),
        "model": type(config.model_provider.get_model(model)).__name__,
    }


if __name__ == "__main__":
    sys.stdout.write(json.dumps(asyncio.run(main(*sys.argv[1:4]))))
