"""The request and response bodies of OpenAI's Responses API, and the events of its streams.

No field is ignored in silence, as on the other routes: see `server/strict_fields.py`.
"""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from pydantic import (
    BaseModel,
    BeforeValidator,
    Discriminator,
    Field,
    Tag,
    ValidationError,
    ValidatorFunctionWrapHandler,
    WrapValidator,
    model_validator,
)

from mint.errors import InvalidRequestError
from mint.server.openai.schemas import (
    MAX_TOP_LOGPROBS,
    OPTIONAL,
    ChatTokenLogprob,
    ErrorDetails,
    SamplingOptions,
)
from mint.server.strict_fields import Refusals, StrictFields

LOGPROBS = "message.output_text.logprobs"
"""The one value of `include` that is honoured."""

_ONLY_TEXT = "Only text goes in and out"
_NO_STORE = "Leave it out, and send the whole conversation as `input`: no response is stored"
_NO_TURNS = "Leave it out: requests of all owners take turns"
_NO_PROGRAMS = "Leave it out: your program calls the functions"

_REFUSED: Refusals = {
    "conversation": ((), _NO_STORE),
    "previous_response_id": ((), _NO_STORE),
    "reasoning": (
        ({}, {"effort": None}, {"effort": "none"}),
        "Pass what the chat template reads in chat_template_kwargs",
    ),
    "truncation": (("disabled",), "Shorten the conversation on your side"),
}
"""Of a conversation."""

_REFUSED_IN_RESPONSES: Refusals = {
    "access_programs": ((), "Leave it out: there are no such programs here"),
    "background": ((False,), "Leave it out, and stream the response"),
    "background_options": (({},), "Leave it out, and stream the response"),
    "context_management": (([],), "Shorten the conversation on your side"),
    "image": (({},), _ONLY_TEXT),
    "max_tool_calls": ((), "Leave it out: it limits tools that run on the server, and there are none"),
    "moderation": ((), "Check the text on your side"),
    "prompt": ((), "Pass the text as `input`: no prompts are stored"),
    "prompt_cache_options": (({},), "Leave it out: prompts are cached in any case"),
    "service_tier": (("auto", "default"), _NO_TURNS),
    "store": ((False,), _NO_STORE),
}
"""Of a request for a reply."""

_LABELS = frozenset({"prompt_cache_key", "prompt_cache_retention", "safety_identifier", "user"})
"""Labels for the records of a provider, and hints for its cache."""

ItemStatus = Literal["in_progress", "completed", "incomplete"]


def _refuse_type(value: object, field: str, remedy: str) -> InvalidRequestError:
    return InvalidRequestError("is not supported", field=field, value=value, remedy=remedy)


class TextPart(StrictFields):
    """A part of a message or of a function's output. `logprobs` of a part that was received is not read again."""

    refused: ClassVar[Refusals] = {"annotations": (([],), "Leave it out: the chat template reads texts")}
    labels: ClassVar[frozenset[str]] = frozenset({"logprobs", "prompt_cache_breakpoint"})

    type: Literal["input_text", "output_text"]
    text: str

    @model_validator(mode="before")
    @classmethod
    def _only_text(cls, fields: Any) -> Any:
        kind = fields.get("type") if isinstance(fields, dict) else None
        if isinstance(kind, str) and kind not in ("input_text", "output_text"):
            raise _refuse_type(kind, "type", _ONLY_TEXT)
        return fields


def _as_parts(content: Any) -> Any:
    return [{"type": "input_text", "text": content}] if isinstance(content, str) else content


Content = Annotated[list[TextPart], BeforeValidator(_as_parts, json_schema_input_type=str | list[TextPart])]


class InputMessage(StrictFields):
    """A message of the conversation. `id` and `status` of a message that was received are not read again."""

    refused: ClassVar[Refusals] = {"phase": ((), "Leave it out: the chat template reads roles and texts")}
    labels: ClassVar[frozenset[str]] = frozenset({"id", "status"})

    type: Literal["message"] = "message"
    role: Literal["system", "developer", "user", "assistant"]
    content: Content


class FunctionCallItem(StrictFields):
    """A call that the model has asked for. `id` and `status` of a call that was received are not read again."""

    refused: ClassVar[Refusals] = {
        "async": ((False,), _NO_PROGRAMS),
        "caller": (({"type": "direct"},), _NO_PROGRAMS),
        "namespace": ((), "Write it into the function's name"),
    }
    labels: ClassVar[frozenset[str]] = frozenset({"id", "status"})

    type: Literal["function_call"]
    call_id: str
    name: str
    arguments: str


class FunctionOutputItem(StrictFields):
    """What the function of a call has returned."""

    refused: ClassVar[Refusals] = {
        "caller": (({"type": "direct"},), _NO_PROGRAMS),
        "namespace": ((), "Write it into the function's name"),
    }
    labels: ClassVar[frozenset[str]] = frozenset({"id", "status"})

    type: Literal["function_call_output"]
    call_id: str
    output: Content
    name: str | None = None


_ITEM_REMEDIES = {
    "item_reference": "Send the item itself: no response is stored",
    "reasoning": "Leave it out, or write it into the message as the chat template does",
}


def _kind_of_item(item: Any) -> str:
    kind = item.get("type") if isinstance(item, dict) else getattr(item, "type", None)
    if kind is None:
        return "(message)"
    if kind not in ("message", "function_call", "function_call_output"):
        remedy = "Pass messages, function_call and function_call_output"
        raise _refuse_type(kind, "input.type", _ITEM_REMEDIES.get(str(kind), remedy))
    return f"({kind})"


InputItem = Annotated[
    Annotated[InputMessage, Tag("(message)")]
    | Annotated[FunctionCallItem, Tag("(function_call)")]
    | Annotated[FunctionOutputItem, Tag("(function_call_output)")],
    Discriminator(_kind_of_item),
]


def _as_items(given: Any) -> Any:
    return [{"role": "user", "content": given}] if isinstance(given, str) else given


class FunctionTool(StrictFields):
    """A function that the model may call. `strict` is a hint: a call that is forced keeps to the schema."""

    refused: ClassVar[Refusals] = {
        "allowed_callers": ((["direct"], []), _NO_PROGRAMS),
        "async": ((False,), _NO_PROGRAMS),
        "defer_loading": ((False,), "Leave it out: the chat template describes all tools"),
        "output_schema": ((), "Describe it in `description`"),
    }
    labels: ClassVar[frozenset[str]] = frozenset({"strict"})

    type: Literal["function"]
    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None

    @model_validator(mode="before")
    @classmethod
    def _only_functions(cls, fields: Any) -> Any:
        kind = fields.get("type") if isinstance(fields, dict) else None
        if isinstance(kind, str) and kind != "function":
            raise _refuse_type(kind, "type", "Pass functions, and run them on your side")
        return fields


class NamedFunction(StrictFields):
    """Names a function."""

    type: Literal["function"]
    name: str


class AllowedTools(StrictFields):
    """The functions that may be called, or with the mode `required` the functions of which one has to be called."""

    type: Literal["allowed_tools"]
    mode: Literal["auto", "required"]
    tools: list[NamedFunction]


def _one_of_three(value: Any, read: ValidatorFunctionWrapHandler) -> Any:
    """One error instead of three."""
    try:
        return read(value)
    except ValidationError as error:
        remedy = 'Pass "auto", "none", "required", {"type": "function", "name": …} or {"type": "allowed_tools", …}'
        raise InvalidRequestError("is no choice", field="tool_choice", value=value, remedy=remedy) from error


FunctionChoice = Annotated[
    Literal["auto", "none", "required"] | NamedFunction | AllowedTools, WrapValidator(_one_of_three)
]


class TextFormat(StrictFields):
    """The format of the text. `strict` is a hint: a reply always keeps to the schema."""

    labels: ClassVar[frozenset[str]] = frozenset({"description", "name", "strict"})

    type: Literal["text", "json_object", "json_schema"] = "text"
    schema_: dict[str, Any] | None = Field(default=None, alias="schema")

    @model_validator(mode="after")
    def _check(self) -> TextFormat:
        if (self.type == "json_schema") != (self.schema_ is not None):
            remedy = 'Pass it with {"type": "json_schema"}, and only there'
            raise InvalidRequestError("does not belong to the type", field="schema", value=self.type, remedy=remedy)
        return self


class TextOptions(StrictFields):
    """The form of the text."""

    refused: ClassVar[Refusals] = {"verbosity": (("medium",), "Ask for it in `instructions`")}

    format: TextFormat = Field(default_factory=TextFormat)


class ResponseStreamOptions(StrictFields):
    """Options of a stream."""

    refused: ClassVar[Refusals] = {"include_obfuscation": ((False,), "Leave it out: events are not padded")}


class InputTokensRequest(StrictFields):
    """Asks for the number of tokens of a conversation. `chat_template_kwargs` is vLLM's."""

    refused: ClassVar[Refusals] = {
        **_REFUSED,
        "personality": ((), "Describe it in `instructions`"),
    }

    model: str
    input: Annotated[
        list[InputItem],
        Field(min_length=1),
        BeforeValidator(_as_items, json_schema_input_type=str | list[InputItem]),
    ]
    instructions: str | None = None
    tools: list[FunctionTool] = Field(default_factory=list)
    tool_choice: FunctionChoice = "auto"
    parallel_tool_calls: bool = True
    text: TextOptions = Field(default_factory=TextOptions)
    chat_template_kwargs: dict[str, Any] = Field(default_factory=dict)

    @model_validator(mode="after")
    def _check_choice(self) -> InputTokensRequest:
        known = {tool.name for tool in self.tools}
        wrong = next((name for name in self._chosen_names if name not in known), None)
        if wrong is not None:
            remedy = "Name one of `tools`"
            raise InvalidRequestError("is none of the tools", field="tool_choice", value=wrong, remedy=remedy)
        return self

    @property
    def offered_tools(self) -> list[FunctionTool]:
        """The functions that the model may call."""
        if isinstance(self.tool_choice, AllowedTools):
            return [tool for tool in self.tools if tool.name in self._chosen_names]
        return self.tools

    @property
    def _chosen_names(self) -> list[str]:
        if isinstance(self.tool_choice, NamedFunction):
            return [self.tool_choice.name]
        return [tool.name for tool in self.tool_choice.tools] if isinstance(self.tool_choice, AllowedTools) else []


class ResponsesRequest(InputTokensRequest, SamplingOptions):
    """Asks for the next message, or the next calls, of a conversation.

    What `SamplingOptions` has besides OpenAI's fields is vLLM's.
    """

    refused: ClassVar[Refusals] = {**_REFUSED, **_REFUSED_IN_RESPONSES}
    labels: ClassVar[frozenset[str]] = _LABELS

    max_output_tokens: Annotated[int, Field(ge=1)] | None = None
    include: list[str] = Field(default_factory=list)
    top_logprobs: int = Field(default=0, ge=0, le=MAX_TOP_LOGPROBS)
    stream: bool = False
    stream_options: ResponseStreamOptions | None = None
    metadata: dict[str, str] = Field(default_factory=dict)

    @model_validator(mode="after")
    def _check(self) -> ResponsesRequest:
        unknown = next((name for name in self.include if name != LOGPROBS), None)
        if unknown is not None:
            remedy = f'Leave it out: only "{LOGPROBS}" can be included'
            raise InvalidRequestError("is not supported", field="include", value=unknown, remedy=remedy)
        if self.top_logprobs and LOGPROBS not in self.include:
            remedy = f'Pass include=["{LOGPROBS}"] with it'
            raise InvalidRequestError("needs logprobs", field="top_logprobs", value=self.top_logprobs, remedy=remedy)
        return self


# --- answers -------------------------------------------------------------------------------------------------------


class OutputText(BaseModel):
    """A text of the model. `logprobs` holds every sampled token of it, with the one that ended it."""

    type: Literal["output_text"] = "output_text"
    text: str
    annotations: list[Any] = Field(default_factory=list)
    logprobs: list[ChatTokenLogprob] | None = OPTIONAL


class OutputMessage(BaseModel):
    """A message of the model."""

    id: str
    type: Literal["message"] = "message"
    role: Literal["assistant"] = "assistant"
    status: ItemStatus = "in_progress"
    content: list[OutputText] = Field(default_factory=list)


class OutputFunctionCall(BaseModel):
    """A call that the model asks for; `arguments` are JSON text."""

    id: str
    type: Literal["function_call"] = "function_call"
    status: ItemStatus = "in_progress"
    call_id: str
    name: str
    arguments: str = ""


OutputItem = OutputMessage | OutputFunctionCall


class InputTokensDetails(BaseModel):
    """Of the tokens that were read, those that were not computed anew."""

    cached_tokens: int
    cache_write_tokens: int = 0


class OutputTokensDetails(BaseModel):
    """Reasoning is part of the text, and is not counted by itself."""

    reasoning_tokens: int = 0


class ResponseUsage(BaseModel):
    """Tokens read and sampled."""

    input_tokens: int
    input_tokens_details: InputTokensDetails
    output_tokens: int
    output_tokens_details: OutputTokensDetails = Field(default_factory=OutputTokensDetails)
    total_tokens: int


class IncompleteDetails(BaseModel):
    """Why a response broke off."""

    reason: Literal["max_output_tokens"] = "max_output_tokens"


ResponseStatus = Literal["in_progress", "completed", "incomplete", "failed"]


class ModelResponse(BaseModel):
    """The response of `/v1/responses`, with the settings of its request."""

    id: str
    object: Literal["response"] = "response"
    created_at: int
    status: ResponseStatus = "in_progress"
    background: Literal[False] = False
    completed_at: int | None = None
    error: ErrorDetails | None = None
    incomplete_details: IncompleteDetails | None = None
    instructions: str | None
    max_output_tokens: int | None
    metadata: dict[str, str]
    model: str
    output: list[OutputItem] = Field(default_factory=list)
    parallel_tool_calls: bool
    previous_response_id: None = None
    store: Literal[False] = False
    temperature: float
    text: dict[str, Any]
    tool_choice: Any
    tools: list[dict[str, Any]]
    top_logprobs: int
    top_p: float
    truncation: Literal["disabled"] = "disabled"
    usage: ResponseUsage | None = None


class ResponseEvent(BaseModel):
    """One event of a streamed response. Its type says which of the other fields it has."""

    type: str
    sequence_number: int
    response: ModelResponse | None = OPTIONAL
    item_id: str | None = OPTIONAL
    output_index: int | None = OPTIONAL
    content_index: int | None = OPTIONAL
    item: OutputItem | None = OPTIONAL
    part: OutputText | None = OPTIONAL
    delta: str | None = OPTIONAL
    text: str | None = OPTIONAL
    name: str | None = OPTIONAL
    arguments: str | None = OPTIONAL
    logprobs: list[ChatTokenLogprob] | None = OPTIONAL


class InputTokens(BaseModel):
    """How many tokens a conversation has."""

    object: Literal["response.input_tokens"] = "response.input_tokens"
    input_tokens: int
