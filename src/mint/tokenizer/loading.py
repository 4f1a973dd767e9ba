"""Loads the tokenizer of a model: by transformers where that is installed, else by `tokenizers` alone.

Knows folders with a `tokenizer.json`. Does not know which folder a base model stands for, and reads no weights.
"""

from __future__ import annotations

import json
import threading
from pathlib import Path
from typing import Any

from mint.errors import InvalidRequestError, MintError, NotFoundError
from mint.tokenizer.prompt_ids import with_prompt_ids

TOKENIZER_FILES = frozenset(
    {"tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "chat_template.jinja"}
)
"""The files of a tokenizer; no other file of a model's folder is needed for it."""

_TOKENIZERS: dict[str, Any] = {}
_LOADING = threading.Lock()


def load_tokenizer(tokenizer_id: str, base_model: str) -> Any:
    """The tokenizer in the folder `tokenizer_id`, or that of `base_model` if there is no such folder here.

    It is transformers' where that is installed, else a `ModelTokenizer`. Loaded once per process. Its
    `apply_chat_template` gives `PromptIds` where it was not told what to give.

    Raises:
        NotFoundError: `base_model` is neither a folder with a tokenizer nor a model in the local cache.
        InvalidRequestError: the files of the tokenizer are damaged, or of a kind that the library does not know.
    """
    source = tokenizer_id if tokenizer_id and Path(tokenizer_id).is_dir() else base_model
    with _LOADING:  # two threads that import transformers at the same time can see it half imported
        if source not in _TOKENIZERS:
            try:
                _TOKENIZERS[source] = _usable(_load(source))
            except (MintError, ImportError):
                raise
            except Exception as error:  # the library checks little: a damaged file raises whatever it meets first
                if (Path(source) / "tokenizer.json").is_file():
                    raise _damaged(source, error) from error
                raise NotFoundError(
                    f"has no tokenizer that can be loaded ({error})",
                    field="tokenizer_id",
                    value=source,
                    remedy="Name a folder with tokenizer.json, or a Hugging Face model in the local cache",
                ) from error
        return _TOKENIZERS[source]


def _usable(tokenizer: Any) -> Any:
    """The tokenizer, if its longest text is a number: the library compares it with each text, and not before."""
    longest = tokenizer.model_max_length
    if not isinstance(longest, int | float):
        raise ValueError(f"model_max_length in tokenizer_config.json is {longest!r}, and no number")
    return tokenizer


def _damaged(source: str, error: Exception) -> InvalidRequestError:
    cause = next(iter(str(error).strip().splitlines()), "")[:200]
    return InvalidRequestError(
        f"has a tokenizer that cannot be loaded ({type(error).__name__}: {cause})",
        field="base_model",
        value=source,
        remedy="Write tokenizer.json and tokenizer_config.json of the folder again, with save_pretrained or a download",
    )


def _load(source: str) -> Any:
    try:
        if _is_generic(Path(source)):
            from transformers import PreTrainedTokenizerFast as Loader  # deferred: 0.6 s; without torch
        else:
            from transformers import AutoTokenizer as Loader  # deferred: 2 s, and it imports torch if installed
    except ModuleNotFoundError as error:
        if error.name != "transformers":
            raise
        from mint.tokenizer.model_tokenizer import ModelTokenizer  # deferred: `import mint` needs no tokenizers

        return ModelTokenizer(_folder(source), name_or_path=source)
    tokenizer = Loader.from_pretrained(source, trust_remote_code=False)
    tokenizer.__class__ = with_prompt_ids(type(tokenizer))
    return tokenizer


def _folder(source: str) -> Path:
    """The folder itself, or that of a model of the Hugging Face hub with the files of its tokenizer."""
    if Path(source).is_dir():
        return Path(source)
    from huggingface_hub import snapshot_download  # deferred: 0.3 s

    return Path(snapshot_download(source, allow_patterns=sorted(TOKENIZER_FILES)))


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
