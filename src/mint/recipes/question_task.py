"""Tasks of questions with reference answers: encoding prompts for any model, and the held-out split.

Shared by all `task_sources`.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from mint.errors import InvalidRequestError
from mint.rl import RLAdapter, RLConfig

DEMO = RLConfig(
    base_model="mint/tiny",
    group_size=8,
    batch_size=32,
    steps=60,
    max_tokens=16,
    temperature=1.0,
    learning_rate=3e-3,
    lr_schedule="linear",
)
"""For such tasks on the bundled model; a large model needs a learning rate near the default 2e-5."""

PromptStyle = Literal["chat", "plain"]
"""`chat`: with the tokenizer's chat template if it has one. `plain`: the text as it is."""

Prompt = str | Sequence[Mapping[str, Any]]
"""A text, or messages for a chat template."""


@dataclass(frozen=True)
class Question:
    """One prompt with its reference answer; `source` is further data for the grader."""

    prompt: Prompt
    answer: str
    source: Any = field(default=None, repr=False, compare=False)

    @property
    def text(self) -> str:
        """The prompt as text. Questions with the same text are the same, even with another answer."""
        if isinstance(self.prompt, str):
            return self.prompt
        return "\n".join(f"{message['role']}: {message['content']}" for message in self.prompt)


class QuestionAdapter(RLAdapter):
    """A task over `Question`s; a subclass gives `load_questions` and `compute_reward`."""

    def __init__(self, *, prompt_style: PromptStyle = "chat") -> None:
        """`prompt_style` says how text prompts are encoded.

        Raises:
            InvalidRequestError: the style is unknown.
        """
        self.prompt_style: PromptStyle = checked_prompt_style(prompt_style)

    def make_prompt(self, item: Question, tokenizer: Any) -> list[int]:
        """The question in the task's `prompt_style`."""
        return encode_prompt(item.prompt, tokenizer, self.prompt_style)

    def demonstrate(self, item: Question) -> str | None:
        """The reference answer, after a space if the prompt is plain text."""
        return item.answer if self.prompt_style == "chat" else f" {item.answer}"

    def item_key(self, item: Question) -> str:
        """The prompt without the answer, so that a question with two answers stays on one side of the split."""
        return item.text


def checked_prompt_style(given: PromptStyle) -> PromptStyle:
    """The style.

    Raises:
        InvalidRequestError: it is unknown.
    """
    if given not in ("chat", "plain"):
        raise InvalidRequestError(
            "is not a prompt style", field="prompt_style", value=given, remedy="Choose chat or plain"
        )
    return given


def checked_prompt(given: Any, where: str) -> Prompt:
    """The prompt of a row of a file; `where` names the row.

    Raises:
        InvalidRequestError: it is neither a text nor a list of messages.
    """
    if isinstance(given, str) and given:
        return given
    if isinstance(given, list) and given and all(_is_message(message) for message in given):
        return tuple(given)
    raise InvalidRequestError(
        "is neither a text nor a list of messages",
        field=f"{where}: prompt",
        value=given,
        remedy='Write a text, or [{"role": "user", "content": "…"}]',
    )


def text_of_reply(given: Any) -> Any:
    """The text of a reply that is written as a message or as a list of one, as in the conversational rows of TRL;
    anything else as it is."""
    message = given[0] if isinstance(given, list) and len(given) == 1 else given
    return message["content"] if _is_message(message) and message["role"] == "assistant" else given


def split_last_reply(messages: Any) -> tuple[list[Any], str] | None:
    """The messages before the assistant's reply at the end, and its text; None if there are none that end so."""
    if not isinstance(messages, list) or len(messages) < 2 or not all(map(_is_message, messages)):
        return None
    *before, last = messages
    return (before, last["content"]) if last["role"] == "assistant" else None


def _is_message(message: Any) -> bool:
    return isinstance(message, Mapping) and all(isinstance(message.get(key), str) for key in ("role", "content"))


def encode_prompt(prompt: Prompt, tokenizer: Any, style: PromptStyle) -> list[int]:
    """Token ids of a text or of messages, up to where the assistant replies.

    Raises:
        InvalidRequestError: messages were given and the tokenizer has no chat template, or it has one that fails.
    """
    has_template = bool(getattr(tokenizer, "chat_template", None))
    if isinstance(prompt, str):
        if style == "plain" or not has_template:
            return [int(token) for token in tokenizer.encode(prompt)]
        prompt = [{"role": "user", "content": prompt}]
    elif not has_template:
        raise InvalidRequestError(
            "has no chat template, and the prompt is a list of messages",
            field="base_model",
            value=getattr(tokenizer, "name_or_path", None) or type(tokenizer).__name__,
            remedy="Take a chat model, put a chat_template.jinja into its folder, or give prompts as plain text",
        )
    try:
        rendered = tokenizer.apply_chat_template(
            [dict(message) for message in prompt], add_generation_prompt=True, tokenize=False
        )
    except Exception as error:  # a template is a program that comes with the model, and may raise anything
        roles = ", ".join(str(message.get("role")) for message in prompt)
        raise InvalidRequestError(
            f"has a chat template that cannot render messages of {roles} ({str(error).rstrip('.')})",
            field="base_model",
            value=getattr(tokenizer, "name_or_path", None) or type(tokenizer).__name__,
            remedy="Use roles, and an order of them, that the template knows; or mend the chat_template.jinja of the "
            "model; or give prompts as text, with prompt_style=plain",
        ) from error
    return [int(token) for token in tokenizer.encode(rendered, add_special_tokens=False)]


def is_heldout(question: Question, share: float) -> bool:
    """Whether a hash of the prompt puts the question into the held-out `share`."""
    return hash_share(question.text) < share


def hash_share(key: str) -> float:
    """A number in [0, 1) from a hash of `key`: a share of it holds out the same items in every run."""
    return int.from_bytes(hashlib.sha256(key.encode()).digest()[:8], "big") / 2**64


def one_side(questions: Iterable[Question], *, heldout: bool, share: float, limit: int | None = None) -> list[Question]:
    """The distinct questions of one side of the split, in order, up to `limit`; stops reading there."""
    found: dict[str, Question] = {}
    for question in questions:
        if limit is not None and len(found) >= limit:
            break
        if is_heldout(question, share) == heldout:
            found.setdefault(question.text, question)
    return list(found.values())
