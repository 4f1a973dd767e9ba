"""Completion and chat requests as what the engine needs: prompts of token ids, and sampling settings.

Finds the model, and tokenizes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from mint.errors import InvalidRequestError
from mint.server.callers import Caller
from mint.server.openai.chat_template import render_conversation, template_text
from mint.server.openai.detokenizer import Vocabulary, read_vocabulary
from mint.server.openai.models import find_weights
from mint.server.openai.schemas import ChatRequest, ChatTool, CompletionRequest
from mint.server.openai.structured import chat_grammar, format_field, structured_outputs
from mint.server.openai.tool_parser import THINK_OPEN
from mint.server.service.service import Service
from mint.server.store.rows import SamplerRow
from mint.types import SamplingParams, StructuredOutputs
from mint.types.tool_call_formats import ToolCallFormat, tool_call_format

MAX_SEQUENCES = 4096

MAX_ALTERNATIVES = 1 << 18
"""Alternatives to tokens in one reply: written as JSON, they take some 20 MB."""


@dataclass(frozen=True)
class GenerationRequest:
    """`n` choices of each prompt.

    `hidden` tokens give no text. `top` is the number of alternatives with each logprob, None for no logprobs.
    `echoes` are the texts of the prompts, if the response repeats them. `prompt_top` is the number of alternatives with
    each logprob of the prompt, None where these are not asked for. Calls of `tools` are read in `call_format`,
    with `single_call` only the first, after which the reply has no text. `format_field` asked for the format of the
    replies.
    """

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
    prompt_top: int | None = None
    tools: Sequence[ChatTool] = ()
    call_format: ToolCallFormat = "hermes"
    single_call: bool = False
    format_field: str = ""
    is_thinking: bool = False

    @property
    def needs_whole_result(self) -> bool:
        """Whether the response holds something that is known only at the end, so that nothing can be streamed."""
        return bool(self.top) or (self.echoes is not None and self.top is not None)


def read_completion(service: Service, caller: Caller, request: CompletionRequest) -> GenerationRequest:
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
    generation = GenerationRequest(
        caller=caller,
        weights=weights,
        vocabulary=vocabulary,
        hidden=hidden | frozenset(request.stop_token_ids or ()),
        prompts=prompts,
        n=request.n,
        params=_params(request, request.max_tokens, structured_outputs(request)),
        stops=request.stop_strings,
        top=request.logprobs,
        echoes=echoes if request.echo else None,
        prompt_top=request.prompt_logprobs,
        format_field=format_field(request),
    )
    _require_short_reply(service, generation)
    return generation


def read_chat(
    service: Service, caller: Caller, request: ChatRequest, *, format_name: str = "response_format"
) -> GenerationRequest:
    """Reads a chat request; slow (tokenizer). `format_name` is what its protocol calls `response_format`.

    Raises:
        NotFoundError: there is no such model for this caller.
        InvalidRequestError: the model has no chat template, or it cannot render the conversation.
    """
    weights = find_weights(service, caller, request.model)
    vocabulary = read_vocabulary(service.base_models.folder(weights.base_model))
    text = render_conversation(vocabulary.tokenizer, request)
    tools = request.offered_tools
    template = template_text(vocabulary.tokenizer, tools)
    written_as = tool_call_format(template, vocabulary.tokenizer.get_added_vocab())
    is_thinking = text.rstrip().endswith(THINK_OPEN)
    wanted = chat_grammar(request, vocabulary, written_as, is_thinking=is_thinking)
    hidden = vocabulary.hidden(skip_special=request.skip_special_tokens, calls=bool(tools))
    generation = GenerationRequest(
        caller=caller,
        weights=weights,
        vocabulary=vocabulary,
        hidden=hidden | frozenset(request.stop_token_ids or ()),
        prompts=[vocabulary.tokenizer.encode(text, add_special_tokens=False)],
        n=request.n,
        params=_params(request, request.token_limit, wanted),
        stops=request.stop_strings,
        top=request.top_logprobs if request.logprobs else None,
        prompt_top=request.prompt_logprobs,
        format_field=format_field(request, format_name),
        tools=tools,
        call_format=written_as,
        single_call=not request.parallel_tool_calls,
        is_thinking=is_thinking,
    )
    _require_short_reply(service, generation)
    return generation


def _require_short_reply(service: Service, generation: GenerationRequest) -> None:
    """Checks how many alternatives to tokens the reply will have. Each choice has those of its prompt, too.

    Raises:
        InvalidRequestError: too many.
    """
    top, prompt_top = generation.top or 0, generation.prompt_top or 0
    if generation.echoes is not None:
        prompt_top += top
    limit = generation.params.max_tokens
    if limit is None:
        limit = service.base_models.context_length(generation.weights.base_model) or 0
    written = sum(prompt_top * len(prompt) + top * limit for prompt in generation.prompts)
    if written * generation.n > MAX_ALTERNATIVES:
        name = "prompt_logprobs" if prompt_top > top else "logprobs"
        raise InvalidRequestError(
            f"asks for {written * generation.n} alternatives in one reply, and {MAX_ALTERNATIVES} are the most",
            field=name,
            value=max(top, prompt_top),
            remedy="Ask for fewer alternatives, choices, prompts or tokens at once",
        )


def _params(
    request: CompletionRequest | ChatRequest, max_tokens: int | None, wanted: StructuredOutputs | None
) -> SamplingParams:
    return SamplingParams(
        max_tokens=max_tokens,
        temperature=request.temperature,
        top_p=request.top_p,
        top_k=request.top_k or -1,
        seed=request.sampling_seed,
        stop=request.stop_strings or None,
        stop_token_ids=request.stop_token_ids,
        ignore_eos=request.ignore_eos,
        allowed_token_ids=request.allowed_token_ids,
        logit_bias=request.logit_bias,
        min_tokens=request.min_tokens,
        repetition_penalty=request.repetition_penalty,
        frequency_penalty=request.frequency_penalty,
        presence_penalty=request.presence_penalty,
        min_p=request.min_p,
        structured_outputs=wanted,
    )
