"""Questions with checkable answers: how they are put to any model, and which of them are held out.

What data of others (a file, a generator, another package's tasks) have in common. Knows no grader and no file format.
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
"""For tasks of this kind on the bundled model; a large model wants a learning rate near the table's 2e-5."""

PromptStyle = Literal["chat", "plain"]
"""`chat`: through the tokenizer's chat template where it has one. `plain`: the text as it is."""

Prompt = str | Sequence[Mapping[str, Any]]
"""A text, or messages as chat templates take them."""


@dataclass(frozen=True)
class Question:
    """One prompt with its reference answer; `source` is whatever else its grader wants to see."""

    prompt: Prompt
    answer: str
    source: Any = field(default=None, repr=False, compare=False)

    @property
    def text(self) -> str:
        """The prompt as text: what makes a question the same as another, whatever its recorded answer."""
        if isinstance(self.prompt, str):
            return self.prompt
        return "\n".join(f"{message['role']}: {message['content']}" for message in self.prompt)


class QuestionAdapter(RLAdapter):
    """A task over `Question`s; a subclass gives `load_questions` and `compute_reward`."""

    def __init__(self, *, prompt_style: PromptStyle = "chat") -> None:
        """`prompt_style` says how texts are put to the model.

        Raises:
            InvalidRequestError: the style is unknown.
        """
        if prompt_style not in ("chat", "plain"):
            raise InvalidRequestError(
                "is no prompt style", field="prompt_style", value=prompt_style, remedy="Choose chat or plain"
            )
        self.prompt_style: PromptStyle = prompt_style

    def make_prompt(self, sample: Question, tokenizer: Any) -> list[int]:
        """The question in this task's style."""
        return encode_prompt(sample.prompt, tokenizer, self.prompt_style)

    def demonstrate(self, sample: Question) -> str | None:
        """The reference answer, after a blank where the prompt is plain text."""
        return sample.answer if self.prompt_style == "chat" else f" {sample.answer}"

    def item_key(self, sample: Question) -> str:
        """The prompt alone: the same question with another answer recorded must not cross the split."""
        return sample.text


def encode_prompt(prompt: Prompt, tokenizer: Any, style: PromptStyle) -> list[int]:
    """Token ids of a text or of messages, ready to be continued by the assistant.

    Raises:
        InvalidRequestError: messages were given and the tokenizer has no chat template.
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
            value=type(tokenizer).__name__,
            remedy="Take a chat model, or give prompts as plain text",
        )
    rendered = tokenizer.apply_chat_template(
        [dict(message) for message in prompt], add_generation_prompt=True, tokenize=False
    )
    return [int(token) for token in tokenizer.encode(rendered, add_special_tokens=False)]


def is_heldout(question: Question, share: float) -> bool:
    """Whether a hash of the prompt puts the question among the `share` that is never trained on."""
    digest = hashlib.sha256(question.text.encode()).digest()
    return int.from_bytes(digest[:8], "big") < share * 2**64


def one_side(questions: Iterable[Question], *, heldout: bool, share: float, limit: int | None = None) -> list[Question]:
    """The distinct questions of one side of the split, in order, at most `limit`; reads no further than it needs."""
    found: dict[str, Question] = {}
    for question in questions:
        if limit is not None and len(found) >= limit:
            break
        if is_heldout(question, share) == heldout:
            found.setdefault(question.text, question)
    return list(found.values())
