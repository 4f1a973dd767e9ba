"""Carries out a completion or a chat: prompts → samples, as pieces that leave while they are sampled.

What was asked becomes an `Order`: token ids and settings alone. `pieces` runs it beside everybody else's samples and
gives its choices in pieces; `openai_answers` writes them down. Knows no HTTP.
"""

from __future__ import annotations

import asyncio
import inspect
import json
import secrets
import threading
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal

from mint.errors import InvalidRequestError, MintError
from mint.server.callers import Caller
from mint.server.openai.messages import ChatMessage, ChatRequest, CompletionRequest, FunctionCall
from mint.server.openai.models import find_weights
from mint.server.openai.text import THINK_OPEN, CallReader, TextStream, Vocabulary, read_vocabulary
from mint.server.service.service import Service
from mint.server.store.rows import SamplerRow
from mint.types import ModelInput, SampleResponse, SamplingParams
from mint.wire.requests import SampleRequest

MAX_SEQUENCES = 4096
SEED_BITS = 63
PIECES_AT_ONCE = 256
"""After so many others on the event loop have their turn."""

Finish = Literal["stop", "length"]
Alternatives = list[tuple[int, float]]


@dataclass(frozen=True)
class Order:
    """What is to be sampled: `n` choices of each prompt. `top` None is no logprobs, else how many alternatives."""

    caller: Caller
    weights: SamplerRow
    vocabulary: Vocabulary
    hidden: frozenset[int]
    prompts: Sequence[Sequence[int]]
    n: int
    params: SamplingParams
    stops: Sequence[str] = ()
    top: int | None = None
    echoes: Sequence[str] | None = None
    reads_calls: bool = False
    is_thinking: bool = False

    @property
    def waits(self) -> bool:
        """Whether what goes with the tokens is known at the end only, so that nothing can leave before."""
        return bool(self.top) or (self.echoes is not None and self.top is not None)


@dataclass(frozen=True)
class Sampled:
    """A token of a choice. `offset` is where in the text it begins; the first of a prompt has no logprob."""

    token: int
    logprob: float | None
    offset: int
    top: Alternatives | None = None


@dataclass(frozen=True)
class Piece:
    """What a choice grows by; `finish` comes with the last."""

    choice: int
    text: str = ""
    calls: list[FunctionCall] = field(default_factory=list)
    echoed: list[Sampled] = field(default_factory=list)
    sampled: list[Sampled] = field(default_factory=list)
    finish: Finish | None = None


# --- orders --------------------------------------------------------------------------------------------------------


def order_completion(service: Service, caller: Caller, request: CompletionRequest) -> Order:
    """Reads a completion request; slow (tokenizer).

    Raises:
        NotFoundError: there is no such model for this caller.
        InvalidRequestError: a prompt cannot be used.
    """
    weights = find_weights(service, caller, request.model)
    vocabulary = read_vocabulary(service.base_models.folder(weights.base_model))
    if len(request.prompts) * request.n > MAX_SEQUENCES:
        remedy = f"Ask for at most {MAX_SEQUENCES} choices at once"
        raise InvalidRequestError("times the prompts is too much", field="n", value=request.n, remedy=remedy)
    hidden = vocabulary.hidden(skip_special=request.skip_special_tokens, calls=False)
    encode = vocabulary.tokenizer.encode
    prompts = [
        encode(prompt, add_special_tokens=request.add_special_tokens) if isinstance(prompt, str) else prompt
        for prompt in request.prompts
    ]
    beginning = vocabulary.tokenizer.bos_token_id
    prompts = [prompt or ([] if beginning is None else [beginning]) for prompt in prompts]
    echoes = [
        text if isinstance(text, str) else vocabulary.text(prompt, frozenset())
        for text, prompt in zip(request.prompts, prompts, strict=True)
    ]
    return Order(
        caller=caller,
        weights=weights,
        vocabulary=vocabulary,
        hidden=hidden | frozenset(request.stop_token_ids or ()),
        prompts=prompts,
        n=request.n,
        params=_params(request, request.max_tokens),
        stops=request.stop_strings,
        top=request.logprobs,
        echoes=echoes if request.echo else None,
    )


def order_chat(service: Service, caller: Caller, request: ChatRequest) -> Order:
    """Reads a chat request; slow (tokenizer).

    Raises:
        NotFoundError: there is no such model for this caller.
        InvalidRequestError: the model has no chat template, or it cannot render the conversation.
    """
    weights = find_weights(service, caller, request.model)
    vocabulary = read_vocabulary(service.base_models.folder(weights.base_model))
    text = _render(vocabulary.tokenizer, request)
    reads_calls = bool(request.offered_tools)
    hidden = vocabulary.hidden(skip_special=request.skip_special_tokens, calls=reads_calls)
    return Order(
        caller=caller,
        weights=weights,
        vocabulary=vocabulary,
        hidden=hidden | frozenset(request.stop_token_ids or ()),
        prompts=[vocabulary.tokenizer.encode(text, add_special_tokens=False)],
        n=request.n,
        params=_params(request, request.token_limit),
        stops=request.stop_strings,
        top=request.top_logprobs if request.logprobs else None,
        reads_calls=reads_calls,
        is_thinking=text.rstrip().endswith(THINK_OPEN),
    )


def _params(request: CompletionRequest | ChatRequest, max_tokens: int | None) -> SamplingParams:
    return SamplingParams(
        max_tokens=max_tokens,
        temperature=request.temperature,
        top_p=request.top_p,
        top_k=request.top_k or -1,
        seed=request.sampling_seed,
        stop=request.stop_strings or None,
        stop_token_ids=request.stop_token_ids,
    )


def _render(tokenizer: Any, request: ChatRequest) -> str:
    """The conversation as the model's own template writes it (transformers renders it in a sandbox)."""
    if tokenizer.chat_template is None:
        remedy = "Use /v1/completions, or a model whose folder has a chat template"
        raise InvalidRequestError("has no chat template", field="model", value=request.model, remedy=remedy)
    taken = inspect.signature(tokenizer.apply_chat_template).parameters
    for name in request.chat_template_kwargs:
        if name in taken or name == "messages":
            remedy = "Pass only what the template itself reads, such as enable_thinking"
            raise InvalidRequestError("is not for templates", field="chat_template_kwargs", value=name, remedy=remedy)
    try:
        return tokenizer.apply_chat_template(
            [_message(message) for message in request.messages],
            tools=[tool.model_dump(exclude_none=True) for tool in request.offered_tools] or None,
            tokenize=False,
            add_generation_prompt=True,
            **request.chat_template_kwargs,
        )
    except MintError:
        raise
    except Exception as error:  # the boundary: a template is a program from elsewhere and may raise anything
        roles = [message.role for message in request.messages]
        remedy = "Use roles and an order of them that the model's chat template knows"
        raise InvalidRequestError(
            f"cannot be rendered by the model's chat template ({error})", field="messages", value=roles, remedy=remedy
        ) from error


def _message(message: ChatMessage) -> dict[str, Any]:
    """As templates read it: a text, and the arguments of calls as objects."""
    shown: dict[str, Any] = {"role": "system" if message.role == "developer" else message.role, "content": message.text}
    if message.name is not None:
        shown["name"] = message.name
    if message.tool_call_id is not None:
        shown["tool_call_id"] = message.tool_call_id
    if message.tool_calls is not None:
        shown["tool_calls"] = [
            {
                "id": call.id,
                "type": "function",
                "function": {"name": call.function.name, "arguments": _arguments(call.function.arguments)},
            }
            for call in message.tool_calls
        ]
    return shown


def _arguments(text: str) -> Any:
    try:
        arguments = json.loads(text)
    except (ValueError, RecursionError):  # the model's own words: templates write texts as they stand
        return text
    return arguments if isinstance(arguments, dict) else text


# --- carrying out --------------------------------------------------------------------------------------------------


class _Choice:
    """One choice as it grows."""

    def __init__(self, order: Order, index: int) -> None:
        self._index = index
        self._text = TextStream(order.vocabulary, order.hidden, order.stops)
        self._calls = CallReader(is_thinking=order.is_thinking) if order.reads_calls else None
        self.count = 0

    def echo(self, text: str, sampled: list[Sampled]) -> Piece:
        """The prompt as the beginning of the text."""
        self._text.offset = len(text)
        return Piece(self._index, text, echoed=sampled)

    def push(self, token: int, logprob: float, top: Alternatives | None = None) -> Piece:
        """One token more."""
        self.count += 1
        sampled = [Sampled(token, logprob, self._text.offset, top)]
        text = self._text.push(token)
        said, calls = (text, []) if self._calls is None else self._calls.push(text)
        return Piece(self._index, said, calls, sampled=sampled)

    def close(self, finish: Finish) -> Piece:
        """No token more."""
        text = self._text.close()
        said, calls = (text, []) if self._calls is None else self._calls.push(text)
        rest = "" if self._calls is None else self._calls.close()
        return Piece(self._index, said + rest, calls, finish=finish)


@dataclass(frozen=True)
class _Done:
    prompt: int
    task: asyncio.Task[SampleResponse]


class _Mailbox:
    """Tokens from the engine's thread, and ends of prompts, in order, for one reader on an event loop."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._news: deque[tuple[int, int, float] | _Done] = deque()
        self._arrived = asyncio.Event()

    def hear(self, choice: int, token: int, logprob: float) -> None:
        """A token; called on the engine's thread."""
        self._news.append((choice, token, logprob))
        if len(self._news) == 1:  # otherwise the reader is awake, and will come to this one
            self._loop.call_soon_threadsafe(self._arrived.set)

    def finish(self, prompt: int, task: asyncio.Task[SampleResponse]) -> None:
        """A prompt's end, good or bad; called on the event loop."""
        if not task.cancelled():
            task.exception()  # seen: asyncio complains of those that nobody has looked at
        self._news.append(_Done(prompt, task))
        self._arrived.set()

    async def take(self) -> AsyncIterator[tuple[int, int, float] | _Done]:
        """All news, without end."""
        while True:
            await self._arrived.wait()
            self._arrived.clear()
            while self._news:
                yield self._news.popleft()


async def pieces(service: Service, order: Order, *, live: bool) -> AsyncGenerator[Piece]:
    """Samples, and gives every choice in pieces as they come; whoever leaves early ends the sampling. Unless
    `live`, they come when a prompt is done.

    Raises:
        MintError: what a prompt failed with; then the others are given up.
    """
    mailbox, cancelled = _Mailbox(), threading.Event()
    tells = live and not order.waits
    tasks = [
        asyncio.create_task(_sample(service, order, number, mailbox if tells else None, cancelled))
        for number in range(len(order.prompts))
    ]
    for number, task in enumerate(tasks):
        task.add_done_callback(partial(mailbox.finish, number))
    choices = [_Choice(order, index) for index in range(len(order.prompts) * order.n)]
    waiting = len(tasks)
    echoes: Sequence[str] = () if order.echoes is None or order.waits else order.echoes
    try:
        async for news in mailbox.take():
            if isinstance(news, _Done):
                news.task.result()  # what is refused is refused before anything is said
            for index in range(len(choices) if echoes else 0):
                yield choices[index].echo(echoes[index // order.n], [])
            echoes = ()
            if not isinstance(news, _Done):
                choice, token, logprob = news
                yield choices[choice].push(token, logprob)
                continue
            own = choices[news.prompt * order.n : (news.prompt + 1) * order.n]
            for number, piece in enumerate(_rest(order, news.prompt, own, news.task.result())):
                yield piece
                if number % PIECES_AT_ONCE == 0:
                    await asyncio.sleep(0)
            waiting -= 1
            if not waiting:
                return
    finally:
        cancelled.set()
        for task in tasks:
            task.cancel()


async def _sample(
    service: Service, order: Order, number: int, mailbox: _Mailbox | None, cancelled: threading.Event
) -> SampleResponse:
    """One prompt's samples; with a mailbox, their tokens go there as they come."""
    params = order.params
    if params.seed is None:
        params = params.model_copy(update={"seed": secrets.randbits(SEED_BITS)})
    scores_prompt = params.max_tokens == 0 or (order.echoes is not None and order.top is not None)
    request = SampleRequest(
        sampling_session_id=order.weights.sampler_id,
        seq_id=0,
        prompt=ModelInput.from_ints(list(order.prompts[number])),
        sampling_params=params,
        num_samples=order.n,
        prompt_logprobs=scores_prompt,
        topk_prompt_logprobs=(order.top or 0) if scores_prompt else 0,
        topk_sample_logprobs=order.top or 0,
    )

    def hear(sample: int, token: int, logprob: float) -> None:
        if mailbox is not None:
            mailbox.hear(number * order.n + sample, token, logprob)

    on_token = None if mailbox is None else hear
    return await service.sample_now(order.caller, order.weights, request, cancelled=cancelled, on_token=on_token)


def _rest(order: Order, prompt: int, choices: Sequence[_Choice], response: SampleResponse) -> Iterator[Piece]:
    """What has not left yet of a prompt's choices."""
    if order.echoes is not None and order.waits:
        echo = order.echoes[prompt]
        scored = [] if order.top is None else _scored_prompt(order, prompt, echo, response)
        yield from (choice.echo(echo, scored) for choice in choices)
    if not response.sequences:  # no token was asked for
        yield from (choice.close("length") for choice in choices)
    for choice, sequence in zip(choices, response.sequences, strict=False):
        for place in range(choice.count, len(sequence.tokens)):
            top = None if sequence.topk_logprobs is None else sequence.topk_logprobs[place]
            yield choice.push(sequence.tokens[place], sequence.logprobs[place], top)
        yield choice.close("stop" if sequence.stop_reason == "stop" else "length")


def _scored_prompt(order: Order, prompt: int, echo: str, response: SampleResponse) -> list[Sampled]:
    tokens, scored = order.prompts[prompt], list[Sampled]()
    added = not echo.encode().startswith(order.vocabulary.piece(tokens[0]))  # by the tokenizer: it is not in the text
    text = TextStream(order.vocabulary, frozenset(tokens[:1]) & order.vocabulary.special if added else frozenset())
    for place, token in enumerate(tokens):
        logprob = None if response.prompt_logprobs is None else response.prompt_logprobs[place]
        top = None if response.topk_prompt_logprobs is None else response.topk_prompt_logprobs[place]
        scored.append(Sampled(token, logprob, text.offset, top))
        text.push(token)
    return scored
