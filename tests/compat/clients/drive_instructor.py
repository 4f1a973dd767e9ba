"""instructor: a pydantic type in each of its modes for OpenAI's protocol, lists, streams of parts, the async client."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable

import instructor
import openai
from animal import Animal
from checks import MESSAGES, check, report, target
from instructor.core.exceptions import IncompleteOutputException, InstructorRetryException

MODEL = target().model
OPTIONS = {"model": MODEL, "messages": MESSAGES, "max_tokens": 80, "max_retries": 0}
MODES = ("TOOLS", "TOOLS_STRICT", "JSON_SCHEMA")
"""In these the server holds the model to the type."""
ASKING_MODES = ("JSON", "JSON_O1", "MD_JSON", "PARALLEL_TOOLS")
"""In these only the prompt has the type, or the model may choose not to call."""


def client(mode: str) -> instructor.Instructor:
    """A client in one of instructor's modes."""
    return instructor.from_openai(openai.OpenAI(max_retries=0), mode=getattr(instructor.Mode, mode))


for name in MODES:

    @check(f"mode {name}")
    def typed(name: str = name) -> None:
        assert isinstance(client(name).chat.completions.create(response_model=Animal, **OPTIONS), Animal)


for name in ASKING_MODES:

    @check(f"mode {name}: an answer, which a small model may get wrong")
    def asked(name: str = name) -> None:
        wanted = Iterable[Animal] if name == "PARALLEL_TOOLS" else Animal
        try:
            got = client(name).chat.completions.create(response_model=wanted, **OPTIONS)
            assert all(isinstance(one, Animal) for one in ([got] if wanted is Animal else got))
        except (IncompleteOutputException, InstructorRetryException) as error:
            assert error.last_completion.choices[0].message.content  # the server answered; instructor cannot read it


@check("create_partial: a stream of parts")
def partial() -> None:
    parts = list(client("JSON_SCHEMA").chat.completions.create_partial(response_model=Animal, **OPTIONS))
    assert parts[-1].kind in ("cat", "dog") and parts[-1].legs in (2, 4)


@check("the async client")
def asynchronous() -> None:
    async def ask() -> list[Animal]:
        made = instructor.from_openai(openai.AsyncOpenAI(max_retries=0), mode=instructor.Mode.TOOLS)
        return await asyncio.gather(*(made.chat.completions.create(response_model=Animal, **OPTIONS) for _ in range(4)))

    assert all(isinstance(one, Animal) for one in asyncio.run(ask()))


if __name__ == "__main__":
    report("instructor", "openai")
