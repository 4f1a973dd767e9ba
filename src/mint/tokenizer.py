"""A model's tokenizer: the Hugging Face object for users, and the bytes of each token for stop strings.

Knows folders with a `tokenizer.json`. Does not know which folder a base model stands for, and reads no weights.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Mapping, Sequence
from functools import cache, wraps
from pathlib import Path
from typing import Any

from mint.errors import InvalidRequestError, MissingExtraError, NotFoundError

TOKENIZER_FILES = frozenset(
    {"tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "chat_template.jinja"}
)
"""The files of a tokenizer; no other file of a model's folder is needed for it."""

_TOKENIZERS: dict[str, Any] = {}
_LOADING = threading.Lock()


def load_tokenizer(tokenizer_id: str, base_model: str) -> Any:
    """The Hugging Face tokenizer in the folder `tokenizer_id`, or that of `base_model` if there is no such folder here.

    Loaded once per process. Its `apply_chat_template` gives `PromptIds` where it was not told what to give.

    Raises:
        MissingExtraError: transformers is not installed.
        NotFoundError: `base_model` is neither a folder with a tokenizer nor a model in the local cache.
    """
    source = tokenizer_id if tokenizer_id and Path(tokenizer_id).is_dir() else base_model
    with _LOADING:  # two threads that import transformers at the same time can see it half imported
        if source not in _TOKENIZERS:
            tokenizer = _load(source)
            tokenizer.__class__ = _with_prompt_ids(type(tokenizer))
            _TOKENIZERS[source] = tokenizer
        return _TOKENIZERS[source]


def _load(source: str) -> Any:
    try:
        if _is_generic(Path(source)):
            from transformers import PreTrainedTokenizerFast as Loader  # deferred: 0.6 s; without torch
        else:
            from transformers import AutoTokenizer as Loader  # deferred: 2 s, and it imports torch if installed
    except ImportError as error:
        raise MissingExtraError("get_tokenizer() needs transformers", remedy="pip install transformers") from error
    try:
        return Loader.from_pretrained(source, trust_remote_code=False)
    except (OSError, ValueError) as error:
        raise NotFoundError(
            f"has no tokenizer that can be loaded ({error})",
            field="tokenizer_id",
            value=source,
            remedy="Name a folder with tokenizer.json, or a Hugging Face model in the local cache",
        ) from error


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
def _with_prompt_ids(kind: type) -> type:
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
    made = _with_prompt_ids(kind)
    return made.__new__(made, *arguments)


def tokenizer_files(folder: Path) -> dict[str, str]:
    """The files of the tokenizer in a model's folder, as name → text.

    Raises:
        NotFoundError: the folder has no `tokenizer.json` that can be read.
    """
    try:
        found = {name: (folder / name).read_text("utf-8") for name in TOKENIZER_FILES if (folder / name).is_file()}
    except (OSError, ValueError) as error:
        raise NotFoundError(f"has a tokenizer that cannot be read ({error})", field="base_model") from error
    if "tokenizer.json" not in found:
        raise NotFoundError("has no tokenizer.json", field="base_model", remedy="Load the tokenizer on the client")
    return found


def _is_generic(folder: Path) -> bool:
    """Whether `tokenizer.json` is the whole tokenizer, so that it needs no class of its own."""
    try:
        config = json.loads((folder / "tokenizer_config.json").read_bytes())
    except (OSError, ValueError):
        return False
    return config.get("tokenizer_class") in ("PreTrainedTokenizerFast", "TokenizersBackend")


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
