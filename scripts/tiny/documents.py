"""The nouns of the synthetic text: a document to train on, and a task to be graded on.

Knows the special tokens and the ChatML layout as plain strings; does not know token ids, any one skill, or the model.
"""

import hashlib
from collections.abc import Callable
from dataclasses import dataclass

END = "<|im_end|>"
START = "<|im_start|>"
PAD = "<|endoftext|>"
CALL_OPEN, CALL_CLOSE = "<tool_call>", "</tool_call>"
RESPONSE_OPEN, RESPONSE_CLOSE = "<tool_response>", "</tool_response>"
SPECIAL_TOKENS = (PAD, START, END, CALL_OPEN, CALL_CLOSE, RESPONSE_OPEN, RESPONSE_CLOSE)

HELDOUT_ONE_IN = 8


@dataclass(frozen=True)
class Document:
    """Text to train on: segments in order, each a prompt (low loss weight) or a completion (full loss weight)."""

    segments: tuple[tuple[str, bool], ...]

    @property
    def text(self) -> str:
        """All segments as one text."""
        return "".join(text for text, _ in self.segments)


@dataclass(frozen=True)
class Task:
    """A held-out prompt and how to judge a reply to it.

    `grade` maps the reply (without its end token) to a score from 0 to 1, where 1 counts as a success. Where the reply
    calls for a second turn, `follow_up` maps it to the prompt of that turn, or to None when the reply earns no second
    turn and fails; `grade` then judges the reply to the follow-up.
    """

    prompt: str
    grade: Callable[[str], float]
    follow_up: Callable[[str], str | None] | None = None


def document(prompt: str, completion: str) -> Document:
    """A prompt and its completion, closed with the end token."""
    return Document(((prompt, False), (completion + END, True)))


def turn(role: str, content: str) -> str:
    """One closed ChatML turn."""
    return f"{START}{role}\n{content}{END}\n"


def chat_prompt(*turns: str) -> str:
    """Closed turns followed by the opening of the assistant's reply."""
    return "".join(turns) + f"{START}assistant\n"


def is_heldout_key(key: str) -> bool:
    """Whether a prompt known by this key is one of the 1 in 8 that the corpus never contains (a stable hash)."""
    return hashlib.sha256(key.encode()).digest()[0] % HELDOUT_ONE_IN == 0
