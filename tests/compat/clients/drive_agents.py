"""openai-agents with its default model, which speaks the Responses API: tools, streams, a type, an error."""

from __future__ import annotations

import asyncio
from typing import Any

import openai
from agents import Agent, ModelSettings, OpenAIProvider, RunConfig, Runner, function_tool, set_tracing_disabled
from animal import Animal
from checks import QUESTION, check, report, target

MODEL = target().model
SUM = "What is 31 + 44?"
GREEDY = ModelSettings(temperature=0, max_tokens=60)


@function_tool
def calculator(expression: str) -> str:
    """Evaluate an arithmetic expression."""
    left, right = expression.split("+")
    return str(int(left) + int(right))


def config() -> RunConfig:
    """The default provider would read the part of a model's name before the slash as the name of a provider."""
    return RunConfig(model_provider=OpenAIProvider(openai_client=openai.AsyncOpenAI(max_retries=0)))


def run(agent: Agent[Any], asked: Any) -> Any:
    return asyncio.run(Runner.run(agent, asked, run_config=config()))


ADDER = Agent(name="adder", model=MODEL, tools=[calculator], model_settings=GREEDY)


@check("Runner.run: a tool is called, and its result is read")
def tools() -> None:
    assert type(config().model_provider.get_model(MODEL)).__name__ == "OpenAIResponsesModel"
    result = run(ADDER, SUM)
    items = [type(item).__name__ for item in result.new_items]
    assert items == ["ToolCallItem", "ToolCallOutputItem", "MessageOutputItem"]
    assert "75" in result.final_output


@check("a second turn of the conversation")
def second_turn() -> None:
    history = [*run(ADDER, SUM).to_input_list(), {"role": "user", "content": "What is 2 + 2?"}]
    assert isinstance(run(ADDER, history).final_output, str)


@check("Runner.run_streamed: ends with the reply of the whole")
def stream() -> None:
    async def ask() -> tuple[str, int]:
        streamed = Runner.run_streamed(ADDER, SUM, run_config=config())
        events = [event async for event in streamed.stream_events()]
        return streamed.final_output, len(events)

    reply, events = asyncio.run(ask())
    assert reply == run(ADDER, SUM).final_output and events > 10


@check("output_type: a pydantic type")
def typed() -> None:
    agent = Agent(name="zoo", model=MODEL, output_type=Animal, model_settings=ModelSettings(max_tokens=80))
    assert isinstance(run(agent, QUESTION).final_output, Animal)


@check("errors: reasoning effort is refused by name")
def errors() -> None:
    settings = ModelSettings(max_tokens=8, reasoning={"effort": "high"})
    try:
        run(Agent(name="thinker", model=MODEL, model_settings=settings), QUESTION)
    except openai.BadRequestError as error:
        assert error.param == "reasoning"
        return
    raise AssertionError("accepted")


if __name__ == "__main__":
    set_tracing_disabled(True)
    report("openai-agents", "openai")
