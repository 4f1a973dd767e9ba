"""The ids of a rendered conversation, for code that was written for transformers 4 and for transformers 5."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache, wraps
from typing import Any


class PromptIds(list[int]):
    """The token ids of a rendered conversation: a list, as transformers 4 gives it. Its keys and attributes `input_ids`
    and `attention_mask` are those of transformers 5, whose result is a dictionary."""

    def __getitem__(self, key: Any) -> Any:
        return getattr(self, key) if key in ("input_ids", "attention_mask") else super().__getitem__(key)

    @property
    def input_ids(self) -> list[int]:
        """The ids as a plain list."""
        return list(self)

    @property
    def attention_mask(self) -> list[int]:
        """1 for each id."""
        return [1] * len(self)


@cache
def with_prompt_ids(kind: type) -> type:
    """A subclass of a tokenizer's class, under the same name, whose `apply_chat_template` serves code that was written
    for transformers 4 and for transformers 5.

    The versions differ in what they give for one conversation: ids, or a dictionary that holds them, whose length is
    the number of its keys.
    """
    original: Any = kind

    @wraps(original.apply_chat_template)
    def apply_chat_template(self: Any, conversation: Any, *args: Any, **options: Any) -> Any:
        rendered = original.apply_chat_template(self, conversation, *args, **options)
        chosen = options.keys() & {"return_dict", "return_tensors"}
        if chosen or not isinstance(rendered, Mapping):
            return rendered
        ids = rendered["input_ids"]
        return PromptIds(ids) if all(isinstance(token, int) for token in ids) else rendered

    def reduce_ex(self: Any, protocol: int) -> tuple[Any, ...]:  # pickle and copy find no class of this name
        _, (_, *arguments), *rest = original.__reduce_ex__(self, max(2, protocol))
        return _remade, (kind, *arguments), *rest

    members = {"apply_chat_template": apply_chat_template, "__reduce_ex__": reduce_ex, "__module__": kind.__module__}
    return type(kind.__name__, (original,), members)


def _remade(kind: type, *arguments: Any) -> Any:
    """A tokenizer of a class of transformers, of which a copy or a pickle fills in the state."""
    made = with_prompt_ids(kind)
    return made.__new__(made, *arguments)
