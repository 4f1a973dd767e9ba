"""Writes pieces of choices down as OpenAI's messages: whole answers, and the events of a stream.

Knows what clients read; knows nothing of how tokens come about, and no HTTP.
"""

from __future__ import annotations

import hashlib
import time
import uuid
from collections.abc import Sequence
from typing import Any

from mint.errors import AuthenticationError, MintError, NotFoundError, OverloadedError, PromptTooLongError
from mint.server.openai.completions import Order, Piece, Sampled
from mint.server.openai.messages import (
    AssistantMessage,
    ChatChoice,
    ChatChunk,
    ChatCompletion,
    ChatFinish,
    ChatLogprobs,
    ChatRequest,
    ChatTokenLogprob,
    ChunkChoice,
    Completion,
    CompletionChoice,
    CompletionLogprobs,
    CompletionRequest,
    Delta,
    ErrorBody,
    ErrorDetails,
    FunctionCall,
    TokenLogprob,
    ToolCall,
    ToolCallDelta,
    Usage,
)


class Counts:
    """Tokens read and sampled, as pieces go by."""

    def __init__(self, order: Order) -> None:
        self._prompt = sum(len(prompt) for prompt in order.prompts)
        self._sampled = 0

    def note(self, piece: Piece) -> None:
        """Counts a piece."""
        self._sampled += len(piece.sampled)

    @property
    def usage(self) -> Usage:
        """The counts so far."""
        total = self._prompt + self._sampled
        return Usage(prompt_tokens=self._prompt, completion_tokens=self._sampled, total_tokens=total)


class _Writer:
    """What all messages of one request share."""

    def __init__(self, request: CompletionRequest | ChatRequest, order: Order, kind: str) -> None:
        self._request = request
        self._order = order
        self._as_ids = request.return_tokens_as_token_ids
        self.counts = Counts(order)
        weights = order.weights.weights_id or order.weights.base_model
        # the same as long as the same weights answer, and another one once a run has published newer ones
        fingerprint = f"fp_{hashlib.sha256(weights.encode()).hexdigest()[:12]}"
        self._head: dict[str, Any] = {
            "id": f"{kind}-{uuid.uuid4().hex}",
            "created": int(time.time()),
            "model": request.model,
            "system_fingerprint": fingerprint,
        }

    def _name(self, token: int) -> str:
        return self._order.vocabulary.name(token, as_id=self._as_ids)

    def _ids(self, sampled: Sequence[Sampled]) -> list[int] | None:
        return [each.token for each in sampled] if self._request.return_token_ids else None

    def _by_choice(self, pieces: Sequence[Piece]) -> list[Piece]:
        """All pieces of each choice as one."""
        parts: dict[int, list[Piece]] = {}
        for piece in pieces:
            parts.setdefault(piece.choice, []).append(piece)
        return [
            Piece(
                index,
                "".join(piece.text for piece in own),
                [call for piece in own for call in piece.calls],
                [each for piece in own for each in piece.echoed],
                [each for piece in own for each in piece.sampled],
                own[-1].finish,
            )
            for index, own in sorted(parts.items())
        ]


class CompletionWriter(_Writer):
    """Writes `/v1/completions`."""

    def __init__(self, request: CompletionRequest, order: Order) -> None:
        super().__init__(request, order, "cmpl")
        self._started: set[int] = set()

    def whole(self, pieces: Sequence[Piece]) -> Completion:
        """The answer."""
        choices = [self._choice(piece, is_first=True) for piece in self._by_choice(pieces)]
        return Completion(**self._head, choices=choices, usage=self.counts.usage)

    def event(self, piece: Piece) -> Completion | None:
        """The next event of a stream; None where a piece says nothing."""
        if not (piece.text or piece.finish or piece.echoed or self._shows_tokens(piece)):
            return None
        is_first = piece.choice not in self._started
        self._started.add(piece.choice)
        return Completion(**self._head, choices=[self._choice(piece, is_first=is_first)])

    def last(self) -> Completion:
        """The event that has the counts."""
        return Completion(**self._head, choices=[], usage=self.counts.usage)

    def _shows_tokens(self, piece: Piece) -> bool:
        return bool(piece.sampled) and (self._order.top is not None or self._request.return_token_ids)

    def _choice(self, piece: Piece, *, is_first: bool) -> CompletionChoice:
        shows_prompt = is_first and self._request.return_token_ids
        prompt = list(self._order.prompts[piece.choice // self._order.n])
        return CompletionChoice(
            index=piece.choice,
            text=piece.text,
            logprobs=self._logprobs([*piece.echoed, *piece.sampled]),
            finish_reason=piece.finish,
            token_ids=self._ids(piece.sampled),
            prompt_token_ids=prompt if shows_prompt else None,
        )

    def _logprobs(self, sampled: Sequence[Sampled]) -> CompletionLogprobs | None:
        if self._order.top is None:
            return None
        return CompletionLogprobs(
            tokens=[self._name(each.token) for each in sampled],
            token_logprobs=[each.logprob for each in sampled],
            top_logprobs=[self._top(each) for each in sampled] if self._order.top else None,
            text_offset=[each.offset for each in sampled],
        )

    def _top(self, sampled: Sampled) -> dict[str, float] | None:
        """The alternatives and the token itself, whose logprob stands here to the bit as it stands there."""
        if sampled.logprob is None:
            return None
        top = {self._name(token): logprob for token, logprob in sampled.top or ()}
        return {**top, self._name(sampled.token): sampled.logprob}


class ChatWriter(_Writer):
    """Writes `/v1/chat/completions`."""

    def __init__(self, request: ChatRequest, order: Order) -> None:
        super().__init__(request, order, "chatcmpl")
        self._calls: dict[int, int] = {}  # choice → how many calls of it have been written

    def whole(self, pieces: Sequence[Piece]) -> ChatCompletion:
        """The answer."""
        choices = []
        for piece in self._by_choice(pieces):
            calls = [ToolCall(id=_call_id(), function=call) for call in piece.calls]
            message = AssistantMessage(content=piece.text or (None if calls else ""), tool_calls=calls or None)
            choices.append(
                ChatChoice(
                    index=piece.choice,
                    message=message,
                    logprobs=self._logprobs(piece.sampled),
                    finish_reason=_chat_finish(piece, bool(calls)) or "length",
                    token_ids=self._ids(piece.sampled),
                )
            )
        return ChatCompletion(**self._head, choices=choices, usage=self.counts.usage, prompt_token_ids=self._prompt)

    def first(self, choice: int) -> ChatChunk:
        """The event that opens a message."""
        delta = Delta(role="assistant", content="")
        chunk = ChunkChoice(index=choice, delta=delta)
        return ChatChunk(**self._head, choices=[chunk], prompt_token_ids=self._prompt if choice == 0 else None)

    def event(self, piece: Piece) -> ChatChunk | None:
        """The next event of a stream; None where a piece says nothing."""
        shows_tokens = bool(piece.sampled) and (self._order.top is not None or self._request.return_token_ids)
        if not (piece.text or piece.calls or piece.finish or shows_tokens):
            return None
        calls = [self._delta(piece.choice, call) for call in piece.calls]
        delta = Delta(content=piece.text or None, tool_calls=calls or None)
        chunk = ChunkChoice(
            index=piece.choice,
            delta=delta,
            logprobs=self._logprobs(piece.sampled),
            finish_reason=_chat_finish(piece, piece.choice in self._calls),
            token_ids=self._ids(piece.sampled),
        )
        return ChatChunk(**self._head, choices=[chunk])

    def last(self) -> ChatChunk:
        """The event that has the counts."""
        return ChatChunk(**self._head, choices=[], usage=self.counts.usage)

    @property
    def _prompt(self) -> list[int] | None:
        return list(self._order.prompts[0]) if self._request.return_token_ids else None

    def _delta(self, choice: int, call: FunctionCall) -> ToolCallDelta:
        number = self._calls.get(choice, 0)
        self._calls[choice] = number + 1
        return ToolCallDelta(index=number, id=_call_id(), function=call)

    def _logprobs(self, sampled: Sequence[Sampled]) -> ChatLogprobs | None:
        if self._order.top is None:
            return None
        content = [
            ChatTokenLogprob(
                **self._token(each.token, each.logprob or 0.0),
                top_logprobs=[TokenLogprob(**self._token(token, logprob)) for token, logprob in each.top or ()],
            )
            for each in sampled
        ]
        return ChatLogprobs(content=content)

    def _token(self, token: int, logprob: float) -> dict[str, Any]:
        return {
            "token": self._name(token),
            "logprob": logprob,
            "bytes": list(self._order.vocabulary.piece(token)),
        }


def _chat_finish(piece: Piece, has_calls: bool) -> ChatFinish | None:
    """Calls are what a reply ends for only where the model has ended it."""
    return "tool_calls" if has_calls and piece.finish == "stop" else piece.finish


def _call_id() -> str:
    return f"call_{uuid.uuid4().hex[:24]}"


def describe_error(error: MintError) -> ErrorBody:
    """An error in OpenAI's shape. `param` is the field, `code` what clients tell errors apart by."""
    kind, code = "invalid_request_error", None
    if error.status >= 500:
        kind = "server_error"
    elif isinstance(error, OverloadedError):
        kind, code = "rate_limit_error", "rate_limit_exceeded"
    elif isinstance(error, AuthenticationError):
        kind, code = "authentication_error", "invalid_api_key"
    elif isinstance(error, PromptTooLongError):
        code = "context_length_exceeded"
    elif isinstance(error, NotFoundError) and error.field == "model":
        code = "model_not_found"
    param = None if error.field is None else _param(error.field)
    return ErrorBody(error=ErrorDetails(message=str(error), type=kind, param=param, code=code))


def _param(field: str) -> str:
    """The name as the client has sent it: pydantic's complaints begin with the message's own name."""
    first, _, rest = field.partition(".")
    return rest if rest and first.endswith("Request") else field
