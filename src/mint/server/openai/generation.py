"""Generates the choices of a request, as deltas that can be sent while they are sampled.

The prompts run in the same batch as all other samples.
"""

from __future__ import annotations

import asyncio
import secrets
import threading
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator, Generator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Literal

from mint.errors import InvalidRequestError
from mint.server.http.route_table import RunBlocking
from mint.server.openai.detokenizer import Detokenizer
from mint.server.openai.generation_requests import GenerationRequest
from mint.server.openai.schemas import FunctionCall
from mint.server.openai.tool_parser import tool_parser
from mint.server.service.service import Service
from mint.types import ModelInput, SampleResponse
from mint.wire.requests import SampleRequest

SEED_BITS = 63
DELTAS_AT_ONCE = 256
"""After so many the event loop may do other work."""

PROMPTS_AT_ONCE = 32
"""So many prompts are sent to the engine, or cancelled, before the event loop may do other work."""

Finish = Literal["stop", "length"]
Alternatives = list[tuple[int, float]]


@dataclass(frozen=True)
class SampledToken:
    """A token of a choice. `offset` is where it begins in the text; the first token of a prompt has no logprob."""

    token: int
    logprob: float | None
    offset: int
    top: Alternatives | None = None


@dataclass(frozen=True)
class ChoiceDelta:
    """What was added to a choice; the last delta has `finish`."""

    choice: int
    text: str = ""
    calls: list[FunctionCall] = field(default_factory=list)
    echoed: list[SampledToken] = field(default_factory=list)
    sampled: list[SampledToken] = field(default_factory=list)
    finish: Finish | None = None
    prompt: list[SampledToken] | None = None
    """The prompt's tokens, where their logprobs were asked for by themselves."""
    stop: str | None = None
    """Of the last delta: the stop string that ended the text."""
    cached: int = 0
    """Of the last delta of a prompt's first choice: how many tokens of the prompt were not computed anew."""


class TokenCounter:
    """Counts the tokens of the prompts and of the choices; a prompt counts once, however many choices it has."""

    def __init__(self, generation: GenerationRequest) -> None:
        self.prompt = sum(len(prompt) for prompt in generation.prompts)
        self.sampled = 0
        self.cached = 0

    def add(self, delta: ChoiceDelta) -> None:
        """Counts the tokens of a delta."""
        self.sampled += len(delta.sampled)
        self.cached += delta.cached


class _Choice:
    """One choice as it grows."""

    def __init__(self, generation: GenerationRequest, index: int) -> None:
        self._index = index
        least = generation.params.min_tokens
        self._detokenizer = Detokenizer(generation.vocabulary, generation.hidden, generation.stops, min_tokens=least)
        self._tool_parser = None
        if generation.tools:
            self._tool_parser = tool_parser(
                generation.call_format, generation.tools, is_thinking=generation.is_thinking
            )
        self._single_call = generation.single_call
        self._has_called = False
        self.count = 0

    def echo(self, text: str, prompt: list[SampledToken]) -> ChoiceDelta:
        """The prompt as the beginning of the text."""
        self._detokenizer.offset = len(text)
        return ChoiceDelta(self._index, text, echoed=prompt)

    def score_prompt(self, prompt: list[SampledToken]) -> ChoiceDelta:
        """The prompt's logprobs, which are no part of the text."""
        return ChoiceDelta(self._index, prompt=prompt)

    def push(self, token: int, logprob: float, top: Alternatives | None = None) -> ChoiceDelta:
        """Adds a sampled token."""
        self.count += 1
        sampled = [SampledToken(token, logprob, self._detokenizer.offset, top)]
        text, calls = self._parse(self._detokenizer.push(token))
        return ChoiceDelta(self._index, text, calls, sampled=sampled)

    def close(self, finish: Finish, cached: int) -> ChoiceDelta:
        """The last delta."""
        text, calls = self._parse(self._detokenizer.close())
        rest, last_calls = ("", []) if self._tool_parser is None else self._first_call(self._tool_parser.close())
        stop = self._detokenizer.stop
        return ChoiceDelta(self._index, text + rest, [*calls, *last_calls], finish=finish, stop=stop, cached=cached)

    def _parse(self, text: str) -> tuple[str, list[FunctionCall]]:
        return (text, []) if self._tool_parser is None else self._first_call(self._tool_parser.push(text))

    def _first_call(self, found: tuple[str, list[FunctionCall]]) -> tuple[str, list[FunctionCall]]:
        """With `single_call`, what comes after a call is dropped."""
        if not self._single_call:
            return found
        if self._has_called:
            return "", []
        self._has_called = bool(found[1])
        return found[0], found[1][:1]


@dataclass(frozen=True)
class _Done:
    """The end of a prompt's samples; `task` has their result or their error."""

    prompt: int
    task: asyncio.Task[SampleResponse]


class _TokenQueue:
    """Tokens from the engine's thread, and ends of prompts, in order, for one reader on an event loop."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._items: deque[tuple[int, int, float] | _Done] = deque()
        self._has_items = asyncio.Event()

    def put(self, choice: int, token: int, logprob: float) -> None:
        """Adds a token; called on the engine's thread."""
        self._items.append((choice, token, logprob))
        if len(self._items) == 1:  # otherwise the reader is awake already
            self._loop.call_soon_threadsafe(self._has_items.set)

    def finish(self, prompt: int, task: asyncio.Task[SampleResponse]) -> None:
        """Adds the end of a prompt, good or bad; called on the event loop."""
        if not task.cancelled():
            task.exception()  # read it: asyncio logs errors that nobody has read
        self._items.append(_Done(prompt, task))
        self._has_items.set()

    async def __aiter__(self) -> AsyncIterator[tuple[int, int, float] | _Done]:
        while True:
            await self._has_items.wait()
            self._has_items.clear()  # before the items: one that comes meanwhile sets it again
            while self._items:
                yield self._items.popleft()


async def generate(
    service: Service, generation: GenerationRequest, *, live: bool, run_blocking: RunBlocking
) -> AsyncGenerator[ChoiceDelta]:
    """Samples, and yields the deltas of all choices: with `live` as tokens come, else when a prompt is done.

    Closing the generator early cancels the sampling. `run_blocking` runs what takes time.

    Raises:
        MintError: what a prompt failed with; the other prompts are cancelled.
    """
    # Once, and not for each prompt: all have the same grammar.
    with _named_as_sent(generation):
        await run_blocking(service.sampling.prepare, generation.caller, generation.weights, generation.params)
    queue = _TokenQueue()
    cancelled = threading.Event()
    streams = live and not generation.needs_whole_result
    tasks = list[asyncio.Task[SampleResponse]]()
    choices = list[_Choice]()
    running = len(generation.prompts)
    echoes: Sequence[str] = () if generation.echoes is None or generation.needs_whole_result else generation.echoes
    try:
        for number in range(running):
            choices += [_Choice(generation, number * generation.n + sample) for sample in range(generation.n)]
            task = asyncio.create_task(_sample(service, generation, number, queue if streams else None, cancelled))
            task.add_done_callback(partial(queue.finish, number))
            tasks.append(task)
            if len(tasks) % PROMPTS_AT_ONCE == 0:
                await asyncio.sleep(0)
        async for item in queue:
            if isinstance(item, _Done):
                item.task.result()  # an error is raised before anything is yielded
            for index in range(len(choices) if echoes else 0):
                yield choices[index].echo(echoes[index // generation.n], [])
            echoes = ()
            if not isinstance(item, _Done):
                choice, token, logprob = item
                yield choices[choice].push(token, logprob)
                continue
            own = choices[item.prompt * generation.n : (item.prompt + 1) * generation.n]
            remaining = _remaining_deltas(generation, item.prompt, own, item.task.result())
            deltas: list[ChoiceDelta] = await run_blocking(list, remaining)
            for number, delta in enumerate(deltas):
                yield delta
                if number % DELTAS_AT_ONCE == 0:  # a long result must not hold up the other requests
                    await asyncio.sleep(0)
            running -= 1
            if not running:
                return
    finally:
        cancelled.set()
        _cancel(tasks)


def _cancel(tasks: Sequence[asyncio.Task[SampleResponse]]) -> None:
    """Cancels tasks, some at once; returns before all are."""
    for task in tasks[:PROMPTS_AT_ONCE]:
        task.cancel()
    if tasks[PROMPTS_AT_ONCE:]:
        asyncio.get_running_loop().call_soon(_cancel, tasks[PROMPTS_AT_ONCE:])


async def _sample(
    service: Service, generation: GenerationRequest, number: int, queue: _TokenQueue | None, cancelled: threading.Event
) -> SampleResponse:
    """The samples of one prompt; with a queue, their tokens also go there as they come."""
    params = generation.params
    if params.seed is None:
        params = params.model_copy(update={"seed": secrets.randbits(SEED_BITS)})
    scores_echo = generation.echoes is not None and generation.top is not None
    scores_prompt = params.max_tokens == 0 or scores_echo or generation.prompt_top is not None
    request = SampleRequest(
        sampling_session_id=generation.weights.sampler_id,
        seq_id=0,
        prompt=ModelInput.from_ints(list(generation.prompts[number])),
        sampling_params=params,
        num_samples=generation.n,
        prompt_logprobs=scores_prompt,
        topk_prompt_logprobs=max(generation.top or 0, generation.prompt_top or 0) if scores_prompt else 0,
        topk_sample_logprobs=generation.top or 0,
    )

    def put(sample: int, token: int, logprob: float) -> None:
        assert queue is not None  # without one it is not called
        queue.put(number * generation.n + sample, token, logprob)

    on_token = None if queue is None else put
    with _named_as_sent(generation):
        return await service.sampling.sample_now(
            generation.caller, generation.weights, request, cancelled=cancelled, on_token=on_token
        )


@contextmanager
def _named_as_sent(generation: GenerationRequest) -> Generator[None]:
    """Errors of the format of the replies name the field that the caller sent."""
    try:
        yield
    except InvalidRequestError as error:
        if not (error.field or "").startswith("structured_outputs"):
            raise
        field, value, remedy = generation.format_field, error.value, error.remedy
        raise InvalidRequestError(error.message, field=field, value=value, remedy=remedy) from error


def _remaining_deltas(
    generation: GenerationRequest, prompt: int, choices: Sequence[_Choice], response: SampleResponse
) -> Iterator[ChoiceDelta]:
    """Makes the deltas of a prompt's choices that were not sent yet. Many tokens or alternatives take long."""
    if generation.echoes is not None and generation.needs_whole_result:
        echo = generation.echoes[prompt]
        scored = [] if generation.top is None else _scored_prompt(generation, prompt, echo, response, generation.top)
        yield from (choice.echo(echo, scored) for choice in choices)
    if generation.prompt_top is not None:
        text = generation.vocabulary.text(generation.prompts[prompt], frozenset())
        scored = _scored_prompt(generation, prompt, text, response, generation.prompt_top)
        yield from (choice.score_prompt(scored) for choice in choices)
    cached = [response.prompt_cache_hit_tokens, *[0] * (len(choices) - 1)]
    if not response.sequences:  # no token was asked for
        yield from (choice.close("length", count) for choice, count in zip(choices, cached, strict=True))
    for choice, count, sequence in zip(choices, cached, response.sequences, strict=False):
        tokens, logprobs, alternatives = sequence.tokens, sequence.logprobs, sequence.topk_logprobs
        for place in range(choice.count, len(tokens)):
            top = None if alternatives is None else alternatives[place]
            yield choice.push(tokens[place], logprobs[place], top)
        yield choice.close("stop" if sequence.stop_reason == "stop" else "length", count)


def _scored_prompt(
    generation: GenerationRequest, prompt: int, echo: str, response: SampleResponse, width: int
) -> list[SampledToken]:
    """The tokens of a prompt whose text is `echo`, each with `width` alternatives."""
    vocabulary = generation.vocabulary
    tokens = generation.prompts[prompt]
    logprobs, alternatives = response.prompt_logprobs, response.topk_prompt_logprobs
    scored = list[SampledToken]()
    # a first token that is not in the text was added by the tokenizer
    is_added = not echo.encode().startswith(vocabulary.piece(tokens[0]))
    text = Detokenizer(vocabulary, frozenset(tokens[:1]) & vocabulary.special if is_added else frozenset())
    for place, token in enumerate(tokens):
        logprob = None if logprobs is None else logprobs[place]
        top = None if alternatives is None else alternatives[place]
        top = None if top is None else top[:width]
        scored.append(SampledToken(token, logprob, text.offset, top))
        text.push(token)
    return scored
