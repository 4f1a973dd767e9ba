"""Text as the tokens of a model, and back, as vLLM's `/tokenize` and `/detokenize` have it."""

from __future__ import annotations

from mint.server.callers import Caller
from mint.server.openai.chat_template import render_conversation
from mint.server.openai.detokenizer import read_vocabulary
from mint.server.openai.models import find_weights
from mint.server.openai.schemas import (
    ChatRequest,
    DetokenizedText,
    DetokenizeRequest,
    TokenizedText,
    TokenizeRequest,
)
from mint.server.service.service import Service


def tokenize(service: Service, caller: Caller, request: TokenizeRequest) -> TokenizedText:
    """The tokens of a text or of a conversation, as a completion or a chat would have them; slow (tokenizer).

    Raises:
        NotFoundError: there is no such model for this caller.
        InvalidRequestError: the model has no chat template, or it cannot render the conversation.
    """
    base = find_weights(service, caller, request.model).base_model
    vocabulary = read_vocabulary(service.base_models.folder(base))
    encode = vocabulary.tokenizer.encode
    if request.messages is None:
        tokens = encode(request.prompt or "", add_special_tokens=request.add_special_tokens is not False)
    else:
        chat = ChatRequest(
            model=request.model,
            messages=request.messages,
            tools=request.tools,
            chat_template_kwargs=request.chat_template_kwargs,
        )
        text = render_conversation(vocabulary.tokenizer, chat)
        tokens = encode(text, add_special_tokens=request.add_special_tokens is True)
    names = [vocabulary.name(token, as_id=False) for token in tokens] if request.return_token_strs else None
    length = service.base_models.context_length(base)
    return TokenizedText(count=len(tokens), max_model_len=length, tokens=list(tokens), token_strs=names)


def detokenize(service: Service, caller: Caller, request: DetokenizeRequest) -> DetokenizedText:
    """The text of tokens, with the special ones; slow (tokenizer).

    Raises:
        NotFoundError: there is no such model for this caller.
    """
    base = find_weights(service, caller, request.model).base_model
    vocabulary = read_vocabulary(service.base_models.folder(base))
    return DetokenizedText(prompt=vocabulary.text(request.tokens, frozenset()))
