"""The bytes that each token id stands for, and which ids are special tokens.

Reads `tokenizer.json`, or asks a loaded tokenizer. Does not encode or decode text.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

from mint.errors import InvalidRequestError


@cache
def token_bytes(folder: Path) -> tuple[bytes, ...]:
    """The bytes of each token id; b"" for ids without a token.

    Reads byte-level vocabularies (GPT-2's mapping of bytes to letters: Qwen, Llama 3) and SentencePiece's
    (`▁` and `<0x0A>`).

    Raises:
        InvalidRequestError: the folder has no readable `tokenizer.json`, so stop strings cannot be matched.
    """
    path = folder / "tokenizer.json"
    try:
        content = json.loads(path.read_bytes())
        vocabulary = dict[str, int](content["model"]["vocab"])
        added = list[dict[str, Any]](content.get("added_tokens") or [])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise InvalidRequestError(
            f"cannot be used: {path} cannot be read ({error})", field="stop", remedy="Stop on token ids instead"
        ) from error
    size = max([*vocabulary.values(), *(token["id"] for token in added)], default=-1) + 1
    table: list[bytes] = [b"" for _ in range(size)]
    letters = _byte_of_letter()
    byte_level = "ByteLevel" in json.dumps([content.get("pre_tokenizer"), content.get("decoder")])
    for text, token in vocabulary.items():
        table[token] = _byte_level(text, letters) if byte_level else _sentencepiece(text)
    for token in added:
        table[token["id"]] = str(token["content"]).encode()
    return tuple(table)


def special_token_ids(folder: Path) -> frozenset[int]:
    """The tokens that are no text, such as the marks of a turn, by the folder's `tokenizer.json`; none without one."""
    try:
        added = json.loads((folder / "tokenizer.json").read_bytes()).get("added_tokens") or []
    except (OSError, ValueError):
        return frozenset()
    return frozenset(token["id"] for token in added if token.get("special"))


def token_pieces(tokenizer: Any, ids: Sequence[int]) -> list[tuple[bytes, bool]]:
    """For each id its bytes, and whether it is a special token, from a loaded tokenizer.

    Unlike `token_bytes` this needs no folder and looks at the given ids only. b"" for an id without a token. A
    tokenizer that is not based on the `tokenizers` library decodes each id by itself.
    """
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        return [(tokenizer.decode([one]).encode(), False) for one in ids]
    added = tokenizer.added_tokens_decoder
    byte_level = "ByteLevel" in f"{backend.pre_tokenizer} {backend.decoder}"
    letters = _byte_of_letter()
    found = []
    for one, text in zip(ids, tokenizer.convert_ids_to_tokens(list(ids)), strict=True):
        if one in added:
            found.append((str(added[one]).encode(), bool(added[one].special)))
        elif text is None:
            found.append((b"", False))
        else:
            found.append((_byte_level(text, letters) if byte_level else _sentencepiece(text), False))
    return found


def _byte_level(text: str, letters: dict[str, int]) -> bytes:
    if all(letter in letters for letter in text):
        return bytes(letters[letter] for letter in text)
    return text.encode()


def _sentencepiece(text: str) -> bytes:
    if len(text) == 6 and text.startswith("<0x") and text.endswith(">"):
        return bytes([int(text[3:5], 16)])
    return text.replace("\u2581", " ").encode()


@cache
def _byte_of_letter() -> dict[str, int]:
    """GPT-2's table: printable bytes stand for themselves, the others for letters from U+0100 on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    table = {chr(byte): byte for byte in printable}
    hidden = [byte for byte in range(256) if byte not in set(printable)]
    return {**table, **{chr(0x100 + index): byte for index, byte in enumerate(hidden)}}
