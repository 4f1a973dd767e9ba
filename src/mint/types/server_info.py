"""What a server says of itself and of a session: promises, base models, tokenizers."""

from __future__ import annotations

from mint.types.value_classes import Result


class UntypedPromise(Result):
    """An accepted request; its result is fetched by `request_id`."""

    request_id: str
    model_id: str | None = None
    sample_sequence_ids: list[str] | None = None


class CreateSessionResponse(Result):
    """A new session; the messages are for people."""

    session_id: str
    info_message: str | None = None
    warning_message: str | None = None
    error_message: str | None = None
    type: str = "create_session"


class SupportedModel(Result):
    """A base model that this server can train and sample."""

    model_name: str
    max_context_length: int | None = None
    trainable: bool = True
    sampleable: bool = True


class GetServerCapabilitiesResponse(Result):
    """What this server offers."""

    supported_models: list[SupportedModel]


class TokenizerFilesResponse(Result):
    """The files of a base model's tokenizer: file name → text."""

    base_model: str
    files: dict[str, str]
