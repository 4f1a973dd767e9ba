"""langchain with langchain-openai: chat, streams, batches, `with_structured_output`, tools, an agent."""

from __future__ import annotations

import asyncio

from animal import Animal
from checks import QUESTION, check, report, target
from langchain.agents import create_agent
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI, OpenAI

MODEL = target().model
CHAT = ChatOpenAI(model=MODEL, max_tokens=80, max_retries=0)
GREEDY = ChatOpenAI(model=MODEL, max_tokens=12, max_retries=0, temperature=0)


@tool
def feed(animal: str) -> str:
    """Feeds an animal."""
    return f"{animal} is fed"


@check("invoke, ainvoke, batch")
def invoke() -> None:
    whole = GREEDY.invoke(QUESTION).content
    assert whole and asyncio.run(GREEDY.ainvoke(QUESTION)).content == whole
    assert [one.content for one in GREEDY.batch([QUESTION] * 3)] == [whole] * 3


@check("stream: the text of the whole")
def stream() -> None:
    assert "".join(str(part.content) for part in GREEDY.stream(QUESTION)) == GREEDY.invoke(QUESTION).content


@check("OpenAI: completions")
def text() -> None:
    assert OpenAI(model=MODEL, max_tokens=8, max_retries=0).invoke("What is")


for method in ("json_schema", "function_calling"):

    @check(f"with_structured_output({method})")
    def structured(method: str = method) -> None:
        assert isinstance(CHAT.with_structured_output(Animal, method=method).invoke(QUESTION), Animal)


@check("with_structured_output(json_schema, include_raw, strict)")
def strict() -> None:
    got = CHAT.with_structured_output(Animal, method="json_schema", include_raw=True, strict=True).invoke(QUESTION)
    assert isinstance(got["parsed"], Animal) and got["parsing_error"] is None


@check("bind_tools(tool_choice='any')")
def tools() -> None:
    [call] = CHAT.bind_tools([feed], tool_choice="any", parallel_tool_calls=False).invoke(QUESTION).tool_calls
    assert call["name"] == "feed" and isinstance(call["args"]["animal"], str)


@check("create_agent: a turn with a tool on offer")
def agent() -> None:
    said = create_agent(GREEDY, tools=[feed]).invoke({"messages": [{"role": "user", "content": QUESTION}]})["messages"]
    assert said[0].content == QUESTION and said[-1].type == "ai"


if __name__ == "__main__":
    report("langchain", "langchain-openai", "openai")
