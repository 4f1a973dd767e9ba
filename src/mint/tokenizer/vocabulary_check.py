"""Checks that the tokens of a model's tokenizer have a row in its embedding.

Reads `tokenizer.json` alone, and does not know the library that tokenizes.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from mint.errors import InvalidRequestError


def require_within_vocabulary(folder: Path, vocab_size: int) -> None:
    """Refuses a tokenizer that makes ids which the model, of `vocab_size` tokens, does not have.

    A special token that no chat template writes may lie beyond: the text models of models with images have such ones. A
    file that cannot be read is not refused here: a client that sends token ids needs none.

    Raises:
        InvalidRequestError: names the token with the largest id.
    """
    try:
        content = json.loads((folder / "tokenizer.json").read_bytes())
        tokens = _tokens(content, _templates(folder))
    except (OSError, ValueError, RecursionError, TypeError, KeyError, AttributeError):
        return
    token, largest = max(tokens.items(), key=lambda item: item[1], default=("", -1))
    if largest >= vocab_size:
        raise InvalidRequestError(
            f"has the token {token!r} with the id {largest}, and config.json gives the model {vocab_size} tokens",
            field="base_model",
            value=str(folder / "tokenizer.json"),
            remedy="Give the tokenizer that belongs to these weights, or make room in them with "
            "resize_token_embeddings() of transformers",
        )


def _tokens(content: dict[str, Any], templates: str) -> dict[str, int]:
    """Each token that text can become, with its id."""
    vocabulary = content["model"]["vocab"]
    pairs = vocabulary.items() if isinstance(vocabulary, dict) else _numbered(vocabulary)
    added = content.get("added_tokens") or ()
    unwritten = {own["content"] for own in added if own.get("special") and own["content"] not in templates}
    found = [*pairs, *((own["content"], own["id"]) for own in added)]
    return {str(token): int(place) for token, place in found if token not in unwritten}


def _numbered(vocabulary: list[tuple[str, float]]) -> list[tuple[str, int]]:
    """The tokens of a Unigram model, which are pairs of token and score."""
    return [(token, place) for place, (token, _) in enumerate(vocabulary)]


def _templates(folder: Path) -> str:
    """The text of the files that may hold a chat template."""
    files = (folder / "chat_template.jinja", folder / "tokenizer_config.json")
    template, config = (file.read_text("utf-8") if file.is_file() else "" for file in files)
    return template + str(json.loads(config or "{}").get("chat_template") or "")
