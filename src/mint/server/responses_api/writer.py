"""Writes a generated reply as a response of the Responses API: whole, and as the events of a stream.

Both come from the same output items, so they cannot differ.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Iterator
from typing import Any

from mint.errors import MintError, OverloadedError
from mint.server.openai.delivery import event
from mint.server.openai.errors import describe_error
from mint.server.openai.generation import ChoiceDelta, SampledToken, TokenCounter
from mint.server.openai.generation_requests import GenerationRequest
from mint.server.openai.schemas import FunctionCall
from mint.server.openai.writers import call_id, token_logprobs
from mint.server.responses_api.schemas import (
    IncompleteDetails,
    InputTokensDetails,
    ItemStatus,
    ModelResponse,
    OutputFunctionCall,
    OutputItem,
    OutputMessage,
    OutputText,
    ResponseEvent,
    ResponsesRequest,
    ResponseUsage,
)


class ResponseWriter:
    """Writes `/v1/responses`. A text and each call are output items of their own, in the order of the reply."""

    def __init__(self, request: ResponsesRequest, generation: GenerationRequest) -> None:
        self._generation = generation
        self._counts = TokenCounter(generation)
        self._response = ModelResponse(
            id=f"resp_{uuid.uuid4().hex}",
            created_at=int(time.time()),
            instructions=request.instructions,
            max_output_tokens=request.max_output_tokens,
            metadata=request.metadata,
            model=request.model,
            parallel_tool_calls=request.parallel_tool_calls,
            temperature=request.temperature,
            text=request.text.model_dump(by_alias=True, exclude_none=True),
            tool_choice=request.model_dump(include={"tool_choice"})["tool_choice"],
            tools=[tool.model_dump() for tool in request.tools],
            top_logprobs=request.top_logprobs,
            top_p=request.top_p,
        )
        self._events = 0
        self._text: OutputText | None = None  # that of the last item, as long as it grows
        self._unwritten: list[SampledToken] = []  # tokens whose text is not certain yet
        self._is_cut = False

    def whole(self, deltas: list[ChoiceDelta]) -> ModelResponse:
        """The whole response."""
        for delta in deltas:
            for _event in self._advance(delta):
                pass
        return self._finished()

    def events(self, delta: ChoiceDelta) -> Iterator[bytes]:
        """The next events of a stream; before the first, those that begin the response."""
        if not self._events:
            for kind in ("response.created", "response.in_progress"):
                yield self._encoded(self._event(kind, response=self._response))
        for each in self._advance(delta):
            yield self._encoded(each)

    def end(self) -> Iterator[bytes]:
        """The event that ends a stream, with the whole response."""
        finished = self._finished()
        yield self._encoded(self._event(f"response.{finished.status}", response=finished))

    def fail(self, error: MintError) -> Iterator[bytes]:
        """The event that ends a stream with an error."""
        code = "server_error" if error.status >= 500 else "invalid_prompt"
        code = "rate_limit_exceeded" if isinstance(error, OverloadedError) else code
        failure = describe_error(error).error.model_copy(update={"code": code})
        failed = self._response.model_copy(update={"status": "failed", "error": failure})
        yield self._encoded(self._event("response.failed", response=failed))

    def _advance(self, delta: ChoiceDelta) -> Iterator[ResponseEvent]:
        self._counts.add(delta)
        if self._generation.top is not None:
            self._unwritten += delta.sampled
        if delta.text:
            yield from self._write(delta.text)
        for call in delta.calls:
            self._unwritten.clear()  # the tokens of a call have no place in the response
            yield from self._close("completed")
            yield from self._call(call)
        if delta.finish is None:
            return
        self._is_cut = delta.finish == "length"
        if not self._response.output:
            yield from self._write("")
        yield from self._close("incomplete" if self._is_cut else "completed")

    def _write(self, text: str) -> Iterator[ResponseEvent]:
        if self._text is None:
            message = OutputMessage(id=f"msg_{uuid.uuid4().hex}")
            yield self._added(message)
            self._text = OutputText(text="", logprobs=None if self._generation.top is None else [])
            yield self._event("response.content_part.added", **self._place, part=self._text)
            message.content.append(self._text)
        if not text:
            return
        logprobs = token_logprobs(self._generation.vocabulary, self._unwritten)
        self._unwritten.clear()
        self._text.text += text
        if self._text.logprobs is not None:
            self._text.logprobs += logprobs
        yield self._event("response.output_text.delta", **self._place, delta=text, logprobs=logprobs)

    def _call(self, call: FunctionCall) -> Iterator[ResponseEvent]:
        """A call is complete once it is certain, so its arguments are one piece."""
        item = OutputFunctionCall(id=f"fc_{uuid.uuid4().hex}", call_id=call_id(), name=call.name)
        yield self._added(item)
        place = {"item_id": item.id, "output_index": len(self._response.output) - 1}
        yield self._event("response.function_call_arguments.delta", **place, delta=call.arguments)
        item.arguments = call.arguments
        done = {"name": item.name, "arguments": item.arguments}
        yield self._event("response.function_call_arguments.done", **place, **done)
        item.status = "completed"
        yield self._event("response.output_item.done", output_index=place["output_index"], item=item)

    def _close(self, status: ItemStatus) -> Iterator[ResponseEvent]:
        """Ends the text that grows."""
        text = self._text
        if text is None:
            return
        if text.logprobs is not None:
            text.logprobs += token_logprobs(self._generation.vocabulary, self._unwritten)
        place = self._place
        yield self._event("response.output_text.done", **place, text=text.text, logprobs=text.logprobs or [])
        yield self._event("response.content_part.done", **place, part=text)
        item = self._response.output[-1]
        item.status = status
        self._text = None
        yield self._event("response.output_item.done", output_index=place["output_index"], item=item)

    def _added(self, item: OutputItem) -> ResponseEvent:
        self._response.output.append(item)
        return self._event("response.output_item.added", output_index=len(self._response.output) - 1, item=item)

    @property
    def _place(self) -> dict[str, Any]:
        """Where the text that grows is."""
        output = self._response.output
        return {"item_id": output[-1].id, "output_index": len(output) - 1, "content_index": 0}

    def _finished(self) -> ModelResponse:
        counts = self._counts
        usage = ResponseUsage(
            input_tokens=counts.prompt,
            input_tokens_details=InputTokensDetails(cached_tokens=counts.cached),
            output_tokens=counts.sampled,
            total_tokens=counts.prompt + counts.sampled,
        )
        ended: dict[str, Any] = {"status": "completed", "completed_at": int(time.time())}
        if self._is_cut:
            ended = {"status": "incomplete", "incomplete_details": IncompleteDetails()}
        return self._response.model_copy(update={**ended, "usage": usage})

    def _event(self, kind: str, **fields: Any) -> ResponseEvent:
        self._events += 1
        return ResponseEvent(type=kind, sequence_number=self._events - 1, **fields)

    def _encoded(self, message: ResponseEvent) -> bytes:
        return event(message, name=message.type)
