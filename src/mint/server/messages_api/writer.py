"""Writes a generated reply as a message of the Messages API: whole, and as the events of a stream.

Both come from the same blocks, so they cannot differ.
"""

from __future__ import annotations

import json
import uuid
from collections.abc import Iterator

from mint.errors import MintError
from mint.server.messages_api.errors import describe_error
from mint.server.messages_api.schemas import (
    BlockDelta,
    EndReason,
    MessageEnd,
    MessageEvent,
    MessagesRequest,
    ReplyBlock,
    ReplyMessage,
    ReplyText,
    ReplyToolUse,
    ReplyUsage,
)
from mint.server.openai.delivery import event
from mint.server.openai.generation import ChoiceDelta, TokenCounter
from mint.server.openai.generation_requests import GenerationRequest
from mint.server.openai.schemas import FunctionCall


class MessageWriter:
    """Writes `/v1/messages`. A text and each call are blocks of their own, in the order of the reply."""

    def __init__(self, request: MessagesRequest, generation: GenerationRequest) -> None:
        self._counts = TokenCounter(generation)
        self._message = ReplyMessage(id=f"msg_{uuid.uuid4().hex}", model=request.model, usage=self._usage)
        self._has_begun = False
        self._text: ReplyText | None = None  # the last block, as long as it grows

    def whole(self, deltas: list[ChoiceDelta]) -> ReplyMessage:
        """The whole message."""
        for delta in deltas:
            for _event in self._advance(delta):
                pass
        return self._finished()

    def events(self, delta: ChoiceDelta) -> Iterator[bytes]:
        """The next events of a stream; before the first, the one that begins the message."""
        if not self._has_begun:
            self._has_begun = True
            yield self._encoded(MessageEvent(type="message_start", message=self._message))
        for each in self._advance(delta):
            yield self._encoded(each)

    def end(self) -> Iterator[bytes]:
        """Why the message ended, with the token counts, and its end."""
        message = self._finished()
        assert message.stop_reason is not None  # the last delta has said why
        ended = MessageEnd(stop_reason=message.stop_reason, stop_sequence=message.stop_sequence)
        yield self._encoded(MessageEvent(type="message_delta", delta=ended, usage=message.usage))
        yield self._encoded(MessageEvent(type="message_stop"))

    def fail(self, error: MintError) -> Iterator[bytes]:
        """The event that ends a stream with an error."""
        yield event(describe_error(error), name="error")

    def _advance(self, delta: ChoiceDelta) -> Iterator[MessageEvent]:
        self._counts.add(delta)
        if delta.text:
            yield from self._write(delta.text)
        for call in delta.calls:
            yield from self._close()
            yield from self._call(call)
        if delta.finish is not None:
            yield from self._close()
            self._message.stop_reason = self._end_reason(delta)
            self._message.stop_sequence = delta.stop if self._message.stop_reason == "stop_sequence" else None

    def _write(self, text: str) -> Iterator[MessageEvent]:
        if self._text is None:
            self._text = ReplyText(text="")
            yield self._started(self._text)
        self._text.text += text
        yield self._event("content_block_delta", delta=BlockDelta(type="text_delta", text=text))

    def _call(self, call: FunctionCall) -> Iterator[MessageEvent]:
        """A call is complete once it is certain, so its input is one piece."""
        block = ReplyToolUse(id=f"toolu_{uuid.uuid4().hex[:24]}", name=call.name)
        yield self._started(block)
        piece = BlockDelta(type="input_json_delta", partial_json=call.arguments)
        block.input = json.loads(call.arguments)
        yield self._event("content_block_delta", delta=piece)
        yield self._event("content_block_stop")

    def _close(self) -> Iterator[MessageEvent]:
        """Ends the text that grows."""
        if self._text is not None:
            self._text = None
            yield self._event("content_block_stop")

    def _started(self, block: ReplyBlock) -> MessageEvent:
        self._message.content.append(block)
        return self._event("content_block_start", block=block)

    def _event(self, kind: str, *, block: ReplyBlock | None = None, delta: BlockDelta | None = None) -> MessageEvent:
        """An event of the last block."""
        return MessageEvent(type=kind, index=len(self._message.content) - 1, content_block=block, delta=delta)

    def _end_reason(self, delta: ChoiceDelta) -> EndReason:
        if delta.finish == "length":
            return "max_tokens"
        if any(isinstance(block, ReplyToolUse) for block in self._message.content):
            return "tool_use"
        return "end_turn" if delta.stop is None else "stop_sequence"

    def _finished(self) -> ReplyMessage:
        return self._message.model_copy(update={"usage": self._usage})

    @property
    def _usage(self) -> ReplyUsage:
        return ReplyUsage(input_tokens=self._counts.prompt, output_tokens=self._counts.sampled)

    def _encoded(self, message: MessageEvent) -> bytes:
        return event(message, name=message.type)
