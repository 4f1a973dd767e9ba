"""The request and response bodies of OpenAI's completions and chat protocol, with a few fields that vLLM adds.

No field is ignored in silence. Each is honoured, or is a label or hint that asks for nothing (`_LABELS`), or is refused
by name, unless its value asks for nothing.
"""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from pydantic import (
    BaseModel,
    Field,
    ValidationError,
    ValidatorFunctionWrapHandler,
    WrapValidator,
    model_validator,
)

from mint.errors import InvalidRequestError
from mint.server.strict_fields import Refusals, StrictFields
from mint.types.sampling import LogitBiases
from mint.types.training import MAX_SEED

MAX_TOP_LOGPROBS = 20
MAX_CHOICES = 128
MAX_PROMPTS = 1024
MAX_TOKEN = 2**31 - 1

_NO_PROCESSORS = "Leave it out, or use allowed_token_ids, logit_bias or a penalty"
_NO_AUDIO = "Only text goes in and out"
_OWN_TEMPLATE = "Leave it out: the chat template of the model renders the conversation"

_LABELS = frozenset(
    {"metadata", "prompt_cache_key", "prompt_cache_retention", "request_id", "safety_identifier", "user"}
)
"""Fields that change no reply: labels for the records of a provider, and hints for its cache. Prompts are cached here
without them."""

_REFUSED: Refusals = {
    "bad_words": (([],), _NO_PROCESSORS),
    "best_of": ((), "Sample with n, and choose"),
    "cache_salt": ((), "Leave it out: prompts are cached for each owner of a key alone"),
    "documents": (([],), "Write them into a message"),
    "echo": ((False,), "Ask /v1/completions with the rendered conversation"),
    "include_stop_str_in_output": ((False,), "Leave it out; `return_token_ids` returns every sampled token"),
    "length_penalty": ((1,), _NO_PROCESSORS),
    "logits_processors": (([],), _NO_PROCESSORS),
    "moderation": ((), "Check the text on your side"),
    "priority": ((0,), "Leave it out: requests of all owners take turns"),
    "prompt_cache_options": (({},), "Leave it out: prompts are cached in any case"),
    "service_tier": (("auto", "default"), "Leave it out: requests of all owners take turns"),
    "spaces_between_special_tokens": ((True,), "Leave it out; `return_token_ids` returns every sampled token"),
    "store": ((False,), "Leave it out, and keep the reply on your side: no reply is stored"),
    "suffix": (("",), "Leave it out: only the end of a text can be completed"),
    "truncate_prompt_tokens": ((), "Shorten the prompt on your side"),
    "use_beam_search": ((False,), "Leave it out: sample with n, and choose"),
}
"""Of both kinds of request."""

_REFUSED_IN_CHAT: Refusals = {
    "add_generation_prompt": ((True,), "Leave it out: the reply of the assistant is asked for"),
    "add_special_tokens": ((False,), _OWN_TEMPLATE),
    "audio": ((), _NO_AUDIO),
    "chat_template": ((), _OWN_TEMPLATE),
    "continue_final_message": ((False,), "Ask /v1/completions with the rendered conversation"),
    "function_call": (("none",), "Pass `tools` and `tool_choice`"),
    "functions": (([],), "Pass `tools`"),
    "mm_processor_kwargs": (({},), _NO_AUDIO),
    "modalities": ((["text"],), _NO_AUDIO),
    "prediction": ((), "Leave it out: no reply is predicted"),
    "reasoning_effort": (("none",), "Pass what the chat template reads in chat_template_kwargs"),
    "verbosity": (("medium",), "Ask for it in a message"),
    "web_search_options": ((), "Pass `tools`, and run them on your side"),
}
"""Of chat alone."""

_REFUSED_IN_MESSAGES: Refusals = {
    "annotations": (([],), "Leave it out: the chat template reads texts and tool calls"),
    "audio": ((), _NO_AUDIO),
    "function_call": ((), "Pass `tool_calls`"),
    "reasoning": ((), "Leave it out, or write it into the content as the chat template does"),
    "reasoning_content": ((), "Leave it out, or write it into the content as the chat template does"),
    "refusal": ((), "Pass it as content"),
}
"""Of a message: clients send back the messages that they got, with all fields of OpenAI's."""


class StreamOptions(StrictFields):
    """Options of a stream."""

    refused: ClassVar[Refusals] = {
        "continuous_usage_stats": ((False,), "Pass include_usage"),
        "include_obfuscation": ((False,), "Leave it out: events are not padded"),
    }

    include_usage: bool = False


class JsonSchemaFormat(StrictFields):
    """A schema with a name. `strict` is a hint: a reply always keeps to the schema."""

    labels: ClassVar[frozenset[str]] = frozenset({"description", "name", "strict"})

    schema_: dict[str, Any] | None = Field(default=None, alias="schema")


class ResponseFormat(StrictFields):
    """The format of a reply."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchemaFormat | None = None


class StructuredOutputsOptions(StrictFields):
    """vLLM's `structured_outputs`; exactly one field is given."""

    json_: dict[str, Any] | str | None = Field(default=None, alias="json")
    json_object: bool | None = None
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None


class SamplingOptions(StrictFields):
    """How to sample, as all requests for replies have it; `SamplingParams` says what the fields mean. OpenAI's are
    `temperature`, `top_p`, `seed`, `stop`, `logit_bias` and two penalties; the others are vLLM's."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    seed: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool = False
    skip_special_tokens: bool = True
    allowed_token_ids: list[int] | None = None
    logit_bias: LogitBiases | None = None
    min_tokens: int = 0
    repetition_penalty: float = 1.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    min_p: float = 0.0

    @property
    def stop_strings(self) -> list[str]:
        """The strings to stop at; an empty list means none, unlike in mint's own protocol."""
        return [self.stop] if isinstance(self.stop, str) else list(self.stop or [])

    @property
    def sampling_seed(self) -> int | None:
        """The seed in the engine's range; negative seeds are allowed."""
        return None if self.seed is None else self.seed % (MAX_SEED + 1)


class _SamplingRequest(SamplingOptions):
    """The fields of completions and chats. `return_token_ids`, `return_tokens_as_token_ids`, `prompt_logprobs`,
    `structured_outputs` and the `guided_…` fields are vLLM's."""

    refused: ClassVar[Refusals] = _REFUSED
    labels: ClassVar[frozenset[str]] = _LABELS

    model: str
    n: int = Field(default=1, ge=1, le=MAX_CHOICES)
    stream: bool = False
    stream_options: StreamOptions | None = None
    return_token_ids: bool = False
    return_tokens_as_token_ids: bool = False
    prompt_logprobs: Annotated[int, Field(ge=0, le=MAX_TOP_LOGPROBS)] | None = None
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputsOptions | None = None
    guided_json: dict[str, Any] | str | None = None
    guided_regex: str | None = None
    guided_choice: list[str] | None = None
    guided_grammar: str | None = None

    @model_validator(mode="after")
    def _check_stream(self) -> _SamplingRequest:
        if self.stream and self.prompt_logprobs is not None:
            remedy = "Leave out stream: the logprobs of a prompt are in a whole response"
            value = self.prompt_logprobs
            raise InvalidRequestError("cannot be streamed", field="prompt_logprobs", value=value, remedy=remedy)
        return self

    @property
    def wants_usage(self) -> bool:
        """Whether a stream ends with the token counts."""
        return self.stream_options is not None and self.stream_options.include_usage


def _wrong_number_of_prompts(count: int) -> InvalidRequestError:
    remedy = f"Pass 1 to {MAX_PROMPTS} prompts at once"
    return InvalidRequestError("is not served", field="prompt", value=f"{count} prompts", remedy=remedy)


def _one_of_four(value: Any, read: ValidatorFunctionWrapHandler) -> Any:
    """One error instead of four. Counts first: each of the four would read them all."""
    if isinstance(value, list) and len(value) > MAX_PROMPTS and not isinstance(value[0], int):
        raise _wrong_number_of_prompts(len(value))
    try:
        return read(value)
    except ValidationError as error:
        remedy = "Pass a text, a list of texts, token ids, or a list of lists of token ids"
        raise InvalidRequestError("is no prompt", field="prompt", value=value, remedy=remedy) from error


Prompt = Annotated[str | list[str] | list[int] | list[list[int]], WrapValidator(_one_of_four)]


class CompletionRequest(_SamplingRequest):
    """Continues one prompt or several, each given as text or as token ids."""

    prompt: Prompt
    max_tokens: int = Field(default=16, ge=0)
    best_of: int | None = None
    logprobs: Annotated[int, Field(ge=0, le=MAX_TOP_LOGPROBS)] | None = None
    echo: bool = False
    add_special_tokens: bool = True

    @model_validator(mode="after")
    def _check(self) -> CompletionRequest:
        if self.best_of not in (None, self.n):
            remedy = "Leave it out, or pass the same as n: samples are not ranked"
            raise InvalidRequestError("is not n", field="best_of", value=self.best_of, remedy=remedy)
        if not self.prompts:
            raise _wrong_number_of_prompts(0)
        for prompt in self.prompts:
            wrong = next((token for token in prompt if isinstance(token, int) and not 0 <= token <= MAX_TOKEN), None)
            if wrong is not None:
                remedy = "Pass ids of the model's own tokenizer"
                raise InvalidRequestError("is no token id", field="prompt", value=wrong, remedy=remedy)
        return self

    @property
    def prompts(self) -> list[str] | list[list[int]]:
        """Every prompt."""
        prompt = self.prompt
        if isinstance(prompt, str):
            return [prompt]
        if prompt and isinstance(prompt[0], int):
            return [[token for token in prompt if isinstance(token, int)]]
        return prompt  # ty: ignore[invalid-explicit-return]


class ContentPart(StrictFields):
    """A part of a message. `prompt_cache_breakpoint` is a hint."""

    labels: ClassVar[frozenset[str]] = frozenset({"prompt_cache_breakpoint"})

    type: str
    text: str | None = None

    @model_validator(mode="before")
    @classmethod
    def _only_text(cls, fields: Any) -> Any:
        kind = fields.get("type") if isinstance(fields, dict) else None
        if isinstance(kind, str) and kind != "text":
            raise InvalidRequestError("is no text", field="type", value=kind, remedy=_NO_AUDIO)
        return fields


class FunctionCall(StrictFields):
    """Which function, and its arguments as JSON text."""

    name: str
    arguments: str = "{}"


class ChatToolCall(StrictFields):
    """A call that the assistant has asked for. `index`, which streams add, is its place in the list."""

    labels: ClassVar[frozenset[str]] = frozenset({"index"})

    id: str
    type: Literal["function"] = "function"
    function: FunctionCall


class ChatMessage(StrictFields):
    """One message of a conversation."""

    refused: ClassVar[Refusals] = _REFUSED_IN_MESSAGES

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[ContentPart] | None = None
    name: str | None = None
    tool_calls: list[ChatToolCall] | None = None
    tool_call_id: str | None = None

    @property
    def text(self) -> str:
        """The content as one text.

        Raises:
            InvalidRequestError: a part of it is no text.
        """
        if self.content is None or isinstance(self.content, str):
            return self.content or ""
        for part in self.content:
            if part.text is None:
                raise InvalidRequestError(
                    "is missing", field="messages.content.text", value="(missing)", remedy=_NO_AUDIO
                )
        return "".join(part.text or "" for part in self.content)


class FunctionDefinition(StrictFields):
    """The description of a function for the model; `parameters` is a JSON schema.

    `strict` is a hint: the model reads the schema, and nothing makes it keep to it.
    """

    labels: ClassVar[frozenset[str]] = frozenset({"strict"})

    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None


class ChatTool(StrictFields):
    """A function that the model may call."""

    type: Literal["function"]
    function: FunctionDefinition


class FunctionName(StrictFields):
    """Names a function."""

    name: str


class NamedTool(StrictFields):
    """The function that has to be called."""

    type: Literal["function"]
    function: FunctionName


def _one_of_two(value: Any, read: ValidatorFunctionWrapHandler) -> Any:
    """One error instead of two."""
    try:
        return read(value)
    except ValidationError as error:
        remedy = 'Pass "auto", "none", "required" or {"type": "function", "function": {"name": …}}'
        raise InvalidRequestError("is no choice", field="tool_choice", value=value, remedy=remedy) from error


ToolChoice = Annotated[Literal["auto", "none", "required"] | NamedTool, WrapValidator(_one_of_two)]


class ChatRequest(_SamplingRequest):
    """Asks for the next message of a conversation. `chat_template_kwargs`, vLLM's, go to the chat template."""

    refused: ClassVar[Refusals] = {**_REFUSED, **_REFUSED_IN_CHAT}

    messages: list[ChatMessage] = Field(min_length=1)
    max_tokens: Annotated[int, Field(ge=1)] | None = None
    max_completion_tokens: Annotated[int, Field(ge=1)] | None = None
    logprobs: bool = False
    top_logprobs: int = Field(default=0, ge=0, le=MAX_TOP_LOGPROBS)
    tools: list[ChatTool] | None = None
    tool_choice: ToolChoice = "auto"
    parallel_tool_calls: bool = True
    chat_template_kwargs: dict[str, Any] = Field(default_factory=dict)

    @model_validator(mode="after")
    def _check(self) -> ChatRequest:
        if self.tool_choice not in ("auto", "none") and not self.forced_tools:
            remedy = "Name one of `tools`"
            value = self.tool_choice if isinstance(self.tool_choice, str) else self.tool_choice.function.name
            raise InvalidRequestError("is none of the tools", field="tool_choice", value=value, remedy=remedy)
        if self.top_logprobs and not self.logprobs:
            remedy = "Pass logprobs=true with it"
            raise InvalidRequestError("needs logprobs", field="top_logprobs", value=self.top_logprobs, remedy=remedy)
        return self

    @property
    def offered_tools(self) -> list[ChatTool]:
        """The tools that the model may call."""
        return [] if self.tool_choice == "none" else self.tools or []

    @property
    def forced_tools(self) -> list[ChatTool]:
        """The tools of which one has to be called; none where the model may answer."""
        choice = self.tool_choice
        if isinstance(choice, NamedTool):
            return [tool for tool in self.tools or () if tool.function.name == choice.function.name]
        return (self.tools or []) if choice == "required" else []

    @property
    def token_limit(self) -> int | None:
        """The most tokens of a reply; None for as many as the context holds."""
        return self.max_completion_tokens or self.max_tokens


class TokenizeRequest(StrictFields):
    """Asks for the tokens of a text (`prompt`) or of a conversation (`messages`)."""

    refused: ClassVar[Refusals] = {
        "add_generation_prompt": _REFUSED_IN_CHAT["add_generation_prompt"],
        "chat_template": _REFUSED_IN_CHAT["chat_template"],
        "continue_final_message": _REFUSED_IN_CHAT["continue_final_message"],
        "mm_processor_kwargs": _REFUSED_IN_CHAT["mm_processor_kwargs"],
    }

    model: str
    prompt: str | None = None
    messages: Annotated[list[ChatMessage], Field(min_length=1)] | None = None
    add_special_tokens: bool | None = None
    return_token_strs: bool = False
    tools: list[ChatTool] | None = None
    chat_template_kwargs: dict[str, Any] = Field(default_factory=dict)

    @model_validator(mode="after")
    def _check(self) -> TokenizeRequest:
        if (self.prompt is None) == (self.messages is None):
            problem = "is missing" if self.prompt is None else "cannot be combined with messages"
            remedy = "Pass either prompt or messages"
            raise InvalidRequestError(problem, field="prompt", value=self.prompt, remedy=remedy)
        for name in ("tools", "chat_template_kwargs"):
            given = getattr(self, name)
            if self.prompt is not None and bool(given):
                remedy = "Leave it out, or pass messages"
                raise InvalidRequestError("belongs to messages", field=name, value=given, remedy=remedy)
        return self


class DetokenizeRequest(StrictFields):
    """Asks for the text of tokens."""

    model: str
    tokens: list[Annotated[int, Field(ge=0, le=MAX_TOKEN)]]


class LoadLoraRequest(StrictFields):
    """Gives a name to a checkpoint. With `load_inplace`, the name may have stood for another one."""

    refused: ClassVar[Refusals] = {"is_3d_lora_weight": ((False,), "Leave it out: the checkpoint says what it holds")}

    lora_name: str
    lora_path: str
    load_inplace: bool = False
    base_model_name: str | None = None


class UnloadLoraRequest(StrictFields):
    """Takes a name back."""

    refused: ClassVar[Refusals] = {"lora_int_id": ((), "Leave it out: a name is enough")}

    lora_name: str


def _is_none(value: object) -> bool:
    return value is None


OPTIONAL: Any = Field(default=None, exclude_if=_is_none)
"""A field that is left out of the response, instead of being null, unless it was asked for."""

# --- answers -------------------------------------------------------------------------------------------------------


class Usage(BaseModel):
    """Tokens read and sampled; a prompt counts once, however many choices it has."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int


class CompletionLogprobs(BaseModel):
    """Every sampled token, with the one that ended the text; before them the prompt's tokens, if it is echoed."""

    tokens: list[str] = Field(default_factory=list)
    token_logprobs: list[float | None] = Field(default_factory=list)
    top_logprobs: list[dict[str, float] | None] | None = None
    text_offset: list[int] = Field(default_factory=list)


class PromptLogprob(BaseModel):
    """A token at one place of the prompt, as vLLM describes it; `rank` is 1 for the most probable, and None for a token
    that is not among the alternatives asked for."""

    logprob: float
    rank: int | None
    decoded_token: str


PromptLogprobs = list[dict[int, PromptLogprob] | None]
"""For each token of the prompt, by token id: the token itself, and the most probable ones. None for the first token."""


class CompletionChoice(BaseModel):
    """One continuation, or the next piece of it."""

    index: int
    text: str
    logprobs: CompletionLogprobs | None = None
    finish_reason: Literal["stop", "length"] | None = None
    token_ids: list[int] | None = OPTIONAL
    prompt_token_ids: list[int] | None = OPTIONAL
    prompt_logprobs: PromptLogprobs | None = OPTIONAL


class Completion(BaseModel):
    """The response of `/v1/completions`; in a stream, one event of it."""

    id: str
    object: Literal["text_completion"] = "text_completion"
    created: int
    model: str
    system_fingerprint: str
    choices: list[CompletionChoice]
    usage: Usage | None = OPTIONAL


class TokenLogprob(BaseModel):
    """One token of the vocabulary at one place."""

    token: str
    logprob: float
    bytes: list[int]


class ChatTokenLogprob(TokenLogprob):
    """A sampled token with the most probable ones at its place."""

    top_logprobs: list[TokenLogprob] = Field(default_factory=list)


class ChatLogprobs(BaseModel):
    """Every sampled token, with the one that ended the message."""

    content: list[ChatTokenLogprob]


class AssistantMessage(BaseModel):
    """The model's reply."""

    role: Literal["assistant"] = "assistant"
    content: str | None
    tool_calls: list[ChatToolCall] | None = OPTIONAL


class ToolCallDelta(ChatToolCall):
    """A complete call in a stream; `index` counts the calls of the message."""

    index: int


class Delta(BaseModel):
    """What an event adds to a message."""

    role: Literal["assistant"] | None = OPTIONAL
    content: str | None = OPTIONAL
    tool_calls: list[ToolCallDelta] | None = OPTIONAL


ChatFinish = Literal["stop", "length", "tool_calls"]


class ChatChoice(BaseModel):
    """One reply."""

    index: int
    message: AssistantMessage
    logprobs: ChatLogprobs | None = None
    finish_reason: ChatFinish
    token_ids: list[int] | None = OPTIONAL


class ChatCompletion(BaseModel):
    """The response of `/v1/chat/completions`."""

    id: str
    object: Literal["chat.completion"] = "chat.completion"
    created: int
    model: str
    system_fingerprint: str
    choices: list[ChatChoice]
    usage: Usage
    prompt_token_ids: list[int] | None = OPTIONAL
    prompt_logprobs: PromptLogprobs | None = OPTIONAL


class ChunkChoice(BaseModel):
    """The next piece of one reply."""

    index: int
    delta: Delta
    logprobs: ChatLogprobs | None = None
    finish_reason: ChatFinish | None = None
    token_ids: list[int] | None = OPTIONAL


class ChatChunk(BaseModel):
    """One event of a streamed chat completion."""

    id: str
    object: Literal["chat.completion.chunk"] = "chat.completion.chunk"
    created: int
    model: str
    system_fingerprint: str
    choices: list[ChunkChoice]
    usage: Usage | None = OPTIONAL
    prompt_token_ids: list[int] | None = OPTIONAL


class TokenizedText(BaseModel):
    """The tokens of a text; `token_strs` names each, if that was asked for."""

    count: int
    max_model_len: int | None
    tokens: list[int]
    token_strs: list[str] | None


class DetokenizedText(BaseModel):
    """The text of tokens."""

    prompt: str


class ModelCard(BaseModel):
    """Something that can be sampled from. `root` is its base model, if that is known; `max_model_len` the longest text
    in tokens."""

    id: str
    object: Literal["model"] = "model"
    created: int
    owned_by: str
    root: str | None = OPTIONAL
    max_model_len: int | None = OPTIONAL


class ModelList(BaseModel):
    """Everything that the caller can sample from by name."""

    object: Literal["list"] = "list"
    data: list[ModelCard]


class ErrorDetails(BaseModel):
    """An error in OpenAI's shape."""

    message: str
    type: str
    param: str | None = None
    code: str | None = None


class ErrorBody(BaseModel):
    """The body of an error response."""

    error: ErrorDetails
