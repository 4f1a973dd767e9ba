"""The request and response bodies of Anthropic's Messages API, and the events of its streams.

No field is ignored in silence, as on OpenAI's routes: see `server/strict_fields.py`.
"""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from pydantic import BaseModel, BeforeValidator, Discriminator, Field, Tag, model_validator

from mint.errors import InvalidRequestError
from mint.server.openai.schemas import OPTIONAL, SamplingOptions
from mint.server.strict_fields import Refusals, StrictFields

_ONLY_TEXT = "Pass text, tool_use and tool_result: only text goes in and out"
_NO_PROGRAMS = "Leave it out: your program calls the tools"
_NO_TURNS = "Leave it out: requests of all owners take turns"
_NO_PROVIDER = "Leave it out: it belongs to the records of a provider"

_REFUSED: Refusals = {
    "context_management": (({}, {"edits": []}), "Shorten the conversation on your side"),
    "speed": (("standard",), _NO_TURNS),
    "thinking": (({"type": "disabled"},), "Pass what the chat template reads in chat_template_kwargs"),
    "user_profile_id": ((), _NO_PROVIDER),
    "workspace_id": ((), _NO_PROVIDER),
}
"""Of a conversation."""

_REFUSED_IN_MESSAGES: Refusals = {
    "container": ((), "Leave it out: the server runs no programs"),
    "diagnostics": (({}, {"previous_message_id": None}), "Leave it out: no message is stored"),
    "inference_geo": (("global",), "Leave it out: the model runs on this server"),
    "mcp_servers": (([],), "Pass `tools`, and run them on your side"),
    "service_tier": (("auto", "standard_only"), _NO_TURNS),
    "thread": ((False,), "Send the whole conversation as `messages`: no message is stored"),
}
"""Of a request for a reply."""

_CACHE_HINT = frozenset({"cache_control"})


class TextBlock(StrictFields):
    """A text. `cache_control` is a hint: prompts are cached in any case."""

    refused: ClassVar[Refusals] = {"citations": (([],), "Leave it out: the chat template reads texts")}
    labels: ClassVar[frozenset[str]] = _CACHE_HINT

    type: Literal["text"] = "text"
    text: str


def _refuse_other_kinds(blocks: Any, *known: str) -> None:
    for block in blocks if isinstance(blocks, list) else ():
        kind = block.get("type", "text") if isinstance(block, dict) else "text"
        if kind not in known:
            raise InvalidRequestError("is not supported", field="content.type", value=kind, remedy=_ONLY_TEXT)


def _as_texts(given: Any) -> Any:
    _refuse_other_kinds(given, "text")
    return [{"type": "text", "text": given}] if isinstance(given, str) else given


Texts = Annotated[list[TextBlock], BeforeValidator(_as_texts, json_schema_input_type=str | list[TextBlock])]


class ToolUseBlock(StrictFields):
    """A call that the model has asked for."""

    refused: ClassVar[Refusals] = {
        "caller": (({"type": "direct"},), _NO_PROGRAMS),
        "toolset_name": ((), "Write it into the tool's name"),
    }
    labels: ClassVar[frozenset[str]] = _CACHE_HINT

    type: Literal["tool_use"]
    id: str
    name: str
    input: dict[str, Any]


class ToolResultBlock(StrictFields):
    """What a tool has returned. With `is_error`, the model reads "Error: " before it."""

    refused: ClassVar[Refusals] = {"toolset_name": ((), "Write it into the tool's name")}
    labels: ClassVar[frozenset[str]] = _CACHE_HINT

    type: Literal["tool_result"]
    tool_use_id: str
    content: Texts = Field(default_factory=list)
    is_error: bool = False


def _kind_of_block(block: Any) -> str:
    kind = block.get("type") if isinstance(block, dict) else getattr(block, "type", None)
    return f"({kind})" if isinstance(kind, str) else "(text)"


Block = Annotated[
    Annotated[TextBlock, Tag("(text)")]
    | Annotated[ToolUseBlock, Tag("(tool_use)")]
    | Annotated[ToolResultBlock, Tag("(tool_result)")],
    Discriminator(_kind_of_block),
]


def _as_blocks(given: Any) -> Any:
    _refuse_other_kinds(given, "text", "tool_use", "tool_result")
    return [{"type": "text", "text": given}] if isinstance(given, str) else given


Blocks = Annotated[list[Block], BeforeValidator(_as_blocks, json_schema_input_type=str | list[Block])]


class InputTurn(StrictFields):
    """One message of the conversation."""

    role: Literal["user", "assistant", "system"]
    content: Blocks

    @model_validator(mode="after")
    def _check(self) -> InputTurn:
        for block in self.content:
            belongs_to = {"tool_use": "assistant", "tool_result": "user"}.get(block.type, self.role)
            if self.role != belongs_to:
                remedy = f"Pass it in a message of the role {belongs_to}"
                raise InvalidRequestError("is in a wrong message", field="content", value=block.type, remedy=remedy)
        return self


class CustomTool(StrictFields):
    """A tool that the model may call. `strict` is a hint, as is how its input would be streamed."""

    refused: ClassVar[Refusals] = {
        "allowed_callers": ((["direct"], []), _NO_PROGRAMS),
        "defer_loading": ((False,), "Leave it out: the chat template describes all tools"),
        "input_examples": (([],), "Write them into `description`"),
    }
    labels: ClassVar[frozenset[str]] = frozenset({"cache_control", "eager_input_streaming", "strict"})

    type: Literal["custom"] = "custom"
    name: str
    description: str | None = None
    input_schema: dict[str, Any]

    @model_validator(mode="before")
    @classmethod
    def _only_custom(cls, fields: Any) -> Any:
        kind = fields.get("type") if isinstance(fields, dict) else None
        if isinstance(kind, str) and kind != "custom":
            remedy = "Pass tools with an input_schema, and run them on your side"
            raise InvalidRequestError("is not supported", field="type", value=kind, remedy=remedy)
        return fields


class ToolUseChoice(StrictFields):
    """Which tool to call: with `any` one of them, with `tool` the one of that `name`."""

    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool = False

    @model_validator(mode="after")
    def _check(self) -> ToolUseChoice:
        if (self.type == "tool") != (self.name is not None):
            remedy = 'Pass it with {"type": "tool"}, and only there'
            raise InvalidRequestError("does not belong to the type", field="name", value=self.type, remedy=remedy)
        return self


class OutputFormat(StrictFields):
    """A schema of the reply."""

    type: Literal["json_schema"]
    schema_: dict[str, Any] = Field(alias="schema")


class OutputConfig(StrictFields):
    """The form of the reply."""

    refused: ClassVar[Refusals] = {"effort": ((), "Pass what the chat template reads in chat_template_kwargs")}

    format: OutputFormat | None = None


class TokenCountRequest(StrictFields):
    """Asks for the number of tokens of a conversation. `chat_template_kwargs` is vLLM's."""

    refused: ClassVar[Refusals] = _REFUSED
    labels: ClassVar[frozenset[str]] = _CACHE_HINT

    model: str
    messages: list[InputTurn] = Field(min_length=1)
    system: Texts = Field(default_factory=list)
    tools: list[CustomTool] = Field(default_factory=list)
    tool_choice: ToolUseChoice = Field(default_factory=lambda: ToolUseChoice(type="auto"))
    output_config: OutputConfig = Field(default_factory=OutputConfig)
    chat_template_kwargs: dict[str, Any] = Field(default_factory=dict)

    @model_validator(mode="after")
    def _check(self) -> TokenCountRequest:
        if self.messages[-1].role == "assistant":
            remedy = "End with a message of the user: a message that the assistant has begun cannot be continued"
            raise InvalidRequestError("is the assistant's last", field="messages", value="assistant", remedy=remedy)
        return self


class MessagesRequest(TokenCountRequest, SamplingOptions):
    """Asks for the next message of a conversation.

    Of `SamplingOptions`, `temperature`, `top_p` and `top_k` are Anthropic's; the others are vLLM's.
    """

    refused: ClassVar[Refusals] = {**_REFUSED, **_REFUSED_IN_MESSAGES}
    labels: ClassVar[frozenset[str]] = frozenset({"cache_control", "metadata"})

    max_tokens: int = Field(ge=1)
    stop_sequences: list[Annotated[str, Field(min_length=1)]] = Field(default_factory=list)
    stream: bool = False


# --- answers -------------------------------------------------------------------------------------------------------


class ReplyText(BaseModel):
    """A text of the model."""

    type: Literal["text"] = "text"
    text: str
    citations: None = None


class ReplyToolUse(BaseModel):
    """A call that the model asks for."""

    type: Literal["tool_use"] = "tool_use"
    id: str
    name: str
    input: dict[str, Any] = Field(default_factory=dict)


ReplyBlock = ReplyText | ReplyToolUse

EndReason = Literal["end_turn", "max_tokens", "stop_sequence", "tool_use"]


class ReplyUsage(BaseModel):
    """Tokens read and sampled. Those of the prompt that were cached are part of `input_tokens`."""

    input_tokens: int
    output_tokens: int
    cache_creation_input_tokens: int | None = None
    cache_read_input_tokens: int | None = None


class ReplyMessage(BaseModel):
    """The response of `/v1/messages`."""

    id: str
    type: Literal["message"] = "message"
    role: Literal["assistant"] = "assistant"
    model: str
    content: list[ReplyBlock] = Field(default_factory=list)
    stop_reason: EndReason | None = None
    stop_sequence: str | None = None
    usage: ReplyUsage


class BlockDelta(BaseModel):
    """What an event adds to a block: a text, or the JSON of a tool's input."""

    type: Literal["text_delta", "input_json_delta"]
    text: str | None = OPTIONAL
    partial_json: str | None = OPTIONAL


class MessageEnd(BaseModel):
    """Why a message ended."""

    stop_reason: EndReason
    stop_sequence: str | None = None


class MessageEvent(BaseModel):
    """One event of a streamed message. Its type says which of the other fields it has."""

    type: str
    message: ReplyMessage | None = OPTIONAL
    index: int | None = OPTIONAL
    content_block: ReplyBlock | None = OPTIONAL
    delta: BlockDelta | MessageEnd | None = OPTIONAL
    usage: ReplyUsage | None = OPTIONAL


class TokenCount(BaseModel):
    """How many tokens a conversation has."""

    input_tokens: int


class ErrorCode(BaseModel):
    """What programs know an error by."""

    error_code: str
    unsupported: list[str]


class MessageErrorDetails(BaseModel):
    """What is wrong."""

    type: str
    message: str
    details: ErrorCode | None = OPTIONAL


class MessageError(BaseModel):
    """An error in Anthropic's shape."""

    type: Literal["error"] = "error"
    error: MessageErrorDetails
