"""Writes generated choices as completions and chat completions: whole ones, and the events of a stream."""

from __future__ import annotations

import hashlib
import time
import uuid
from collections.abc import Iterator, Sequence
from typing import Any

from mint.errors import MintError
from mint.server.openai.delivery import END_OF_STREAM, event
from mint.server.openai.detokenizer import Vocabulary
from mint.server.openai.errors import describe_error
from mint.server.openai.generation import ChoiceDelta, SampledToken, TokenCounter
from mint.server.openai.generation_requests import GenerationRequest
from mint.server.openai.schemas import (
    AssistantMessage,
    ChatChoice,
    ChatChunk,
    ChatCompletion,
    ChatFinish,
    ChatLogprobs,
    ChatRequest,
    ChatTokenLogprob,
    ChatToolCall,
    ChunkChoice,
    Completion,
    CompletionChoice,
    CompletionLogprobs,
    CompletionRequest,
    Delta,
    FunctionCall,
    PromptLogprob,
    PromptLogprobs,
    TokenLogprob,
    ToolCallDelta,
    Usage,
)


class _Writer:
    """What the responses of both routes share."""

    def __init__(self, request: CompletionRequest | ChatRequest, generation: GenerationRequest, kind: str) -> None:
        self._request = request
        self._generation = generation
        self._as_ids = request.return_tokens_as_token_ids
        self._counts = TokenCounter(generation)
        weights = generation.weights.weights_id or generation.weights.base_model
        # changes when a training run publishes newer weights
        fingerprint = f"fp_{hashlib.sha256(weights.encode()).hexdigest()[:12]}"
        self._head: dict[str, Any] = {
            "id": f"{kind}-{uuid.uuid4().hex}",
            "created": int(time.time()),
            "model": request.model,
            "system_fingerprint": fingerprint,
        }

    def _name(self, token: int) -> str:
        return self._generation.vocabulary.name(token, as_id=self._as_ids)

    def _ids(self, sampled: Sequence[SampledToken]) -> list[int] | None:
        return [each.token for each in sampled] if self._request.return_token_ids else None

    def fail(self, error: MintError) -> Iterator[bytes]:
        """The error, and the mark that ends a stream."""
        yield event(describe_error(error))
        yield END_OF_STREAM

    @property
    def _usage(self) -> Usage:
        counts = self._counts
        total = counts.prompt + counts.sampled
        return Usage(prompt_tokens=counts.prompt, completion_tokens=counts.sampled, total_tokens=total)

    def _by_choice(self, deltas: Sequence[ChoiceDelta]) -> list[ChoiceDelta]:
        """All deltas of each choice as one."""
        parts: dict[int, list[ChoiceDelta]] = {}
        for delta in deltas:
            self._counts.add(delta)
            parts.setdefault(delta.choice, []).append(delta)
        return [
            ChoiceDelta(
                index,
                "".join(delta.text for delta in own),
                [call for delta in own for call in delta.calls],
                [each for delta in own for each in delta.echoed],
                [each for delta in own for each in delta.sampled],
                own[-1].finish,
                next((delta.prompt for delta in own if delta.prompt is not None), None),
            )
            for index, own in sorted(parts.items())
        ]

    def _prompt_logprobs(self, delta: ChoiceDelta) -> PromptLogprobs | None:
        if delta.prompt is None:
            return None
        return [self._scored(each) for each in delta.prompt]

    def _scored(self, place: SampledToken) -> dict[int, PromptLogprob] | None:
        if place.logprob is None:
            return None
        found = {
            token: PromptLogprob(logprob=logprob, rank=rank, decoded_token=self._name(token))
            for rank, (token, logprob) in enumerate(place.top or (), 1)
        }
        own = PromptLogprob(logprob=place.logprob, rank=None, decoded_token=self._name(place.token))
        return {place.token: found.get(place.token, own), **found}


class CompletionWriter(_Writer):
    """Writes `/v1/completions`."""

    def __init__(self, request: CompletionRequest, generation: GenerationRequest) -> None:
        super().__init__(request, generation, "cmpl")
        self._started: set[int] = set()

    def whole(self, deltas: Sequence[ChoiceDelta]) -> Completion:
        """The whole response."""
        choices = [self._choice(delta, is_first=True) for delta in self._by_choice(deltas)]
        return Completion(**self._head, choices=choices, usage=self._usage)

    def events(self, delta: ChoiceDelta) -> Iterator[bytes]:
        """The next event of a stream; none for a delta that shows nothing."""
        self._counts.add(delta)
        if not (delta.text or delta.finish or delta.echoed or self._shows_tokens(delta)):
            return
        is_first = delta.choice not in self._started
        self._started.add(delta.choice)
        yield event(Completion(**self._head, choices=[self._choice(delta, is_first=is_first)]))

    def end(self) -> Iterator[bytes]:
        """The token counts, if they were asked for, and the mark that ends a stream."""
        if self._request.wants_usage:
            yield event(Completion(**self._head, choices=[], usage=self._usage))
        yield END_OF_STREAM

    def _shows_tokens(self, delta: ChoiceDelta) -> bool:
        return bool(delta.sampled) and (self._generation.top is not None or self._request.return_token_ids)

    def _choice(self, delta: ChoiceDelta, *, is_first: bool) -> CompletionChoice:
        shows_prompt = is_first and self._request.return_token_ids
        prompt = list(self._generation.prompts[delta.choice // self._generation.n])
        return CompletionChoice(
            index=delta.choice,
            text=delta.text,
            logprobs=self._logprobs([*delta.echoed, *delta.sampled]),
            finish_reason=delta.finish,
            token_ids=self._ids(delta.sampled),
            prompt_token_ids=prompt if shows_prompt else None,
            prompt_logprobs=self._prompt_logprobs(delta),
        )

    def _logprobs(self, sampled: Sequence[SampledToken]) -> CompletionLogprobs | None:
        if self._generation.top is None:
            return None
        return CompletionLogprobs(
            tokens=[self._name(each.token) for each in sampled],
            token_logprobs=[each.logprob for each in sampled],
            top_logprobs=[self._top(each) for each in sampled] if self._generation.top else None,
            text_offset=[each.offset for each in sampled],
        )

    def _top(self, sampled: SampledToken) -> dict[str, float] | None:
        """The alternatives and the token itself, with exactly the logprob that `token_logprobs` has."""
        if sampled.logprob is None:
            return None
        top = {self._name(token): logprob for token, logprob in sampled.top or ()}
        return {**top, self._name(sampled.token): sampled.logprob}


class ChatWriter(_Writer):
    """Writes `/v1/chat/completions`."""

    def __init__(self, request: ChatRequest, generation: GenerationRequest) -> None:
        super().__init__(request, generation, "chatcmpl")
        self._started: set[int] = set()
        self._calls: dict[int, int] = {}  # choice → number of its calls so far

    def whole(self, deltas: Sequence[ChoiceDelta]) -> ChatCompletion:
        """The whole response."""
        choices = []
        whole = self._by_choice(deltas)
        for delta in whole:
            calls = [ChatToolCall(id=call_id(), function=call) for call in delta.calls]
            message = AssistantMessage(content=delta.text or (None if calls else ""), tool_calls=calls or None)
            choices.append(
                ChatChoice(
                    index=delta.choice,
                    message=message,
                    logprobs=self._logprobs(delta.sampled),
                    finish_reason=_chat_finish(delta, bool(calls)) or "length",
                    token_ids=self._ids(delta.sampled),
                )
            )
        return ChatCompletion(
            **self._head,
            choices=choices,
            usage=self._usage,
            prompt_token_ids=self._prompt,
            prompt_logprobs=self._prompt_logprobs(whole[0]),
        )

    def events(self, delta: ChoiceDelta) -> Iterator[bytes]:
        """The next event of a stream, after the first of its message; none for a delta that shows nothing."""
        self._counts.add(delta)
        if delta.choice not in self._started:
            self._started.add(delta.choice)
            yield event(self._first(delta.choice))
        shows_tokens = bool(delta.sampled) and (self._generation.top is not None or self._request.return_token_ids)
        if not (delta.text or delta.calls or delta.finish or shows_tokens):
            return
        calls = [self._delta(delta.choice, call) for call in delta.calls]
        chunk = ChunkChoice(
            index=delta.choice,
            delta=Delta(content=delta.text or None, tool_calls=calls or None),
            logprobs=self._logprobs(delta.sampled),
            finish_reason=_chat_finish(delta, delta.choice in self._calls),
            token_ids=self._ids(delta.sampled),
        )
        yield event(ChatChunk(**self._head, choices=[chunk]))

    def end(self) -> Iterator[bytes]:
        """The token counts, if they were asked for, and the mark that ends a stream."""
        if self._request.wants_usage:
            yield event(ChatChunk(**self._head, choices=[], usage=self._usage))
        yield END_OF_STREAM

    def _first(self, choice: int) -> ChatChunk:
        delta = Delta(role="assistant", content="")
        chunk = ChunkChoice(index=choice, delta=delta)
        return ChatChunk(**self._head, choices=[chunk], prompt_token_ids=self._prompt if choice == 0 else None)

    @property
    def _prompt(self) -> list[int] | None:
        return list(self._generation.prompts[0]) if self._request.return_token_ids else None

    def _delta(self, choice: int, call: FunctionCall) -> ToolCallDelta:
        number = self._calls.get(choice, 0)
        self._calls[choice] = number + 1
        return ToolCallDelta(index=number, id=call_id(), function=call)

    def _logprobs(self, sampled: Sequence[SampledToken]) -> ChatLogprobs | None:
        if self._generation.top is None:
            return None
        return ChatLogprobs(content=token_logprobs(self._generation.vocabulary, sampled, as_ids=self._as_ids))


def token_logprobs(
    vocabulary: Vocabulary, sampled: Sequence[SampledToken], *, as_ids: bool = False
) -> list[ChatTokenLogprob]:
    """Sampled tokens with their alternatives; `as_ids` names them by their ids instead of their texts."""

    def describe(token: int, logprob: float) -> dict[str, Any]:
        name = vocabulary.name(token, as_id=as_ids)
        return {"token": name, "logprob": logprob, "bytes": list(vocabulary.piece(token))}

    return [
        ChatTokenLogprob(
            **describe(each.token, each.logprob or 0.0),
            top_logprobs=[TokenLogprob(**describe(token, logprob)) for token, logprob in each.top or ()],
        )
        for each in sampled
    ]


def _chat_finish(delta: ChoiceDelta, has_calls: bool) -> ChatFinish | None:
    """`tool_calls` only if the model has ended the reply itself."""
    return "tool_calls" if has_calls and delta.finish == "stop" else delta.finish


def call_id() -> str:
    """A new id of a tool call."""
    return f"call_{uuid.uuid4().hex[:24]}"
