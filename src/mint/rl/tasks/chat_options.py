"""Options of a model's chat template (`enable_thinking=False`), given to every prompt that a tokenizer renders.

A template ignores a variable that it does not have. So an option that the template does not mention is refused.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Mapping
from functools import partial
from typing import Any

from mint.errors import InvalidRequestError

ChatOption = bool | int | float | str


def with_chat_options(tokenizer: Any, options: Mapping[str, ChatOption]) -> Any:
    """The tokenizer, with `options` as the defaults of its `apply_chat_template`; the one that is given is not changed.

    Raises:
        InvalidRequestError: the tokenizer has no chat template, or it does not mention an option.
    """
    if not options:
        return tokenizer
    template = template_text(tokenizer)
    for name in options:
        if re.search(rf"\b{re.escape(name)}\b", template) is None:
            raise InvalidRequestError(
                "is not in the model's chat template" if template else "is given, but the model has no chat template",
                field="chat_options",
                value=name,
                remedy="Remove it, or look up the variables of this model's template",
            )
    configured = copy.copy(tokenizer)
    configured.apply_chat_template = partial(tokenizer.apply_chat_template, **options)
    return configured


def template_text(tokenizer: Any) -> str:
    """The text of the chat template, of all templates if there are several; empty if there is none."""
    template = getattr(tokenizer, "chat_template", None) or ""
    return "\n".join(map(str, template.values())) if isinstance(template, Mapping) else str(template)
