"""The tokenizer of a model's folder, where transformers is not installed: the methods that users call.

The `tokenizers` library encodes and decodes, as it does inside transformers' fast tokenizers. The results are those of
transformers' generic class (`PreTrainedTokenizerFast`). What is not here (tensors, padding, truncation, training a
vocabulary) needs transformers, and an error says so.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer

from mint.errors import InvalidRequestError, MissingExtraError
from mint.tokenizer.chat_template import render_conversation
from mint.tokenizer.prompt_ids import PromptIds

NAMED_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
"""The special tokens that every tokenizer may have; a model can name others, as `image_token`."""

UNLIMITED = int(1e30)
"""`model_max_length` where the model's files name none: transformers' value."""

_NOT_TEXT_BEFORE = (" .", " ?", " !", " ,", " n't", " 'm", " 's", " 've", " 're")


class Encoded(dict[str, Any]):
    """What `ModelTokenizer.__call__` gives: a dictionary whose keys are attributes, too."""

    def __getattr__(self, name: str) -> Any:
        try:
            return self[name]
        except KeyError:
            raise AttributeError(name) from None


class _TokenId:
    """The id of a special token, beside its text: `eos_token_id` for `eos_token`."""

    def __set_name__(self, owner: type, name: str) -> None:
        self._token = name.removesuffix("_id")

    def __get__(self, tokenizer: ModelTokenizer | None, owner: type) -> Any:
        token = None if tokenizer is None else getattr(tokenizer, self._token)
        return None if tokenizer is None or token is None else tokenizer.convert_tokens_to_ids(token)

    def __set__(self, tokenizer: ModelTokenizer, token_id: int | None) -> None:
        setattr(tokenizer, self._token, None if token_id is None else tokenizer.convert_ids_to_tokens(token_id))


class ModelTokenizer:
    """Text ⇄ token ids of one model, and its conversations as text or ids."""

    is_fast = True
    bos_token: str | None
    eos_token: str | None
    unk_token: str | None
    sep_token: str | None
    pad_token: str | None
    cls_token: str | None
    mask_token: str | None
    bos_token_id = _TokenId()
    eos_token_id = _TokenId()
    unk_token_id = _TokenId()
    sep_token_id = _TokenId()
    pad_token_id = _TokenId()
    cls_token_id = _TokenId()
    mask_token_id = _TokenId()

    def __init__(self, folder: Path, *, name_or_path: str | None = None) -> None:
        """Reads the folder's `tokenizer.json`, and, if they are there, `tokenizer_config.json`, `chat_template.jinja`
        and the older `special_tokens_map.json` and `added_tokens.json`.

        Raises:
            OSError: there is no `tokenizer.json`, or a file cannot be read.
            ValueError: a file is damaged.
        """
        config = _read_json(folder / "tokenizer_config.json")
        self.name_or_path = str(folder) if name_or_path is None else name_or_path
        self.backend_tokenizer = _read_vocabulary(folder / "tokenizer.json")
        self.model_max_length: int = config.get("model_max_length") or UNLIMITED
        self.padding_side: str = config.get("padding_side") or "right"
        self.model_input_names = list(config.get("model_input_names") or ("input_ids", "attention_mask"))
        self.clean_up_tokenization_spaces = bool(config.get("clean_up_tokenization_spaces"))
        self.chat_template: str | dict[str, str] | None = _chat_template(folder, config)
        if "added_tokens_decoder" not in config:  # written by transformers before 4.34
            config |= _read_json(folder / "special_tokens_map.json")
        extra: Any = config.get("extra_special_tokens") or config.get("additional_special_tokens") or []
        self._more_tokens = {
            name: _content(value)
            for name, value in config.items()
            if name.endswith("_token") and name not in NAMED_TOKENS and isinstance(value, (str, Mapping))
        } | ({name: _content(value) for name, value in extra.items()} if isinstance(extra, Mapping) else {})
        self.extra_special_tokens = [] if isinstance(extra, Mapping) else [_content(token) for token in extra]
        for name in NAMED_TOKENS:
            setattr(self, name, None if config.get(name) is None else _content(config[name]))
        self._add_tokens(config, _read_json(folder / "added_tokens.json"))

    # --- text → ids ----------------------------------------------------------------------------------------------

    def encode(self, text: str, *, add_special_tokens: bool = True, **unsupported: Any) -> list[int]:
        """The ids of a text [T]."""
        _require_supported("encode", unsupported)
        return self._encodings([text], add_special_tokens)[0].ids

    def tokenize(self, text: str, *, add_special_tokens: bool = False, **unsupported: Any) -> list[str]:
        """The tokens of a text [T], as the vocabulary writes them."""
        _require_supported("tokenize", unsupported)
        return self._encodings([text], add_special_tokens)[0].tokens

    def __call__(
        self,
        text: str | Sequence[str],
        *,
        add_special_tokens: bool = True,
        return_attention_mask: bool | None = None,
        return_offsets_mapping: bool = False,
        **unsupported: Any,
    ) -> Encoded:
        """`input_ids` [T] and `attention_mask` [T] of a text; lists of them for several. Nothing is padded or cut.

        With `return_offsets_mapping` also `offset_mapping` [T, 2]: where each token begins and ends, in characters.
        """
        _require_supported("__call__", unsupported)
        encodings = self._encodings([text] if isinstance(text, str) else text, add_special_tokens)
        columns: dict[str, list[Any]] = {"input_ids": [encoding.ids for encoding in encodings]}
        if "token_type_ids" in self.model_input_names:
            columns["token_type_ids"] = [encoding.type_ids for encoding in encodings]
        if "attention_mask" in self.model_input_names if return_attention_mask is None else return_attention_mask:
            columns["attention_mask"] = [encoding.attention_mask for encoding in encodings]
        if return_offsets_mapping:
            columns["offset_mapping"] = [encoding.offsets for encoding in encodings]
        return Encoded({name: rows[0] for name, rows in columns.items()} if isinstance(text, str) else columns)

    def convert_tokens_to_ids(self, tokens: str | Sequence[str]) -> Any:
        """The id of a token, or the ids of several; that of the unknown token (or None) for what is no token."""
        if not isinstance(tokens, str):
            return [self.convert_tokens_to_ids(token) for token in tokens]
        found = self.backend_tokenizer.token_to_id(tokens)
        if found is not None or tokens == self.unk_token:
            return found
        return self.unk_token_id

    # --- ids → text ----------------------------------------------------------------------------------------------

    def decode(
        self,
        token_ids: Any,
        skip_special_tokens: bool = False,
        clean_up_tokenization_spaces: bool | None = None,
        **unsupported: Any,
    ) -> Any:
        """The text of an id or of a sequence of ids; a list of texts for a sequence of sequences."""
        _require_supported("decode", unsupported)
        ids = token_ids.tolist() if hasattr(token_ids, "tolist") else token_ids
        if isinstance(ids, Mapping):
            ids = ids["input_ids"]
        if not isinstance(ids, int) and len(ids) and not isinstance(ids[0], int) and hasattr(ids[0], "__len__"):
            return [self.decode(row, skip_special_tokens, clean_up_tokenization_spaces) for row in ids]
        text = self.backend_tokenizer.decode(
            [ids] if isinstance(ids, int) else [int(one) for one in ids], skip_special_tokens=skip_special_tokens
        )
        wanted = (
            self.clean_up_tokenization_spaces if clean_up_tokenization_spaces is None else clean_up_tokenization_spaces
        )
        # transformers ignores the wish for BPE, whose spaces are part of the text
        return _cleaned(text) if wanted and type(self.backend_tokenizer.model).__name__ != "BPE" else text

    def batch_decode(
        self,
        sequences: Sequence[Any],
        skip_special_tokens: bool = False,
        clean_up_tokenization_spaces: bool | None = None,
        **unsupported: Any,
    ) -> list[str]:
        """The text of each sequence of ids."""
        _require_supported("batch_decode", unsupported)
        return [self.decode(ids, skip_special_tokens, clean_up_tokenization_spaces) for ids in sequences]

    def convert_ids_to_tokens(self, ids: Any, skip_special_tokens: bool = False) -> Any:
        """The token of an id, or the tokens of several, as the vocabulary writes them; None where there is none."""
        if isinstance(ids, int):
            return self.backend_tokenizer.id_to_token(ids)
        skipped = set(self.all_special_ids) if skip_special_tokens else set()
        return [self.backend_tokenizer.id_to_token(int(one)) for one in ids if int(one) not in skipped]

    def convert_tokens_to_string(self, tokens: Sequence[str]) -> str:
        """The text of tokens as the vocabulary writes them."""
        decoder = self.backend_tokenizer.decoder
        return " ".join(tokens) if decoder is None else decoder.decode(list(tokens))

    # --- conversations -------------------------------------------------------------------------------------------

    def apply_chat_template(
        self,
        conversation: Sequence[Any],
        tools: Sequence[Mapping[str, Any]] | None = None,
        documents: Sequence[Mapping[str, Any]] | None = None,
        chat_template: str | None = None,
        add_generation_prompt: bool = False,
        continue_final_message: bool = False,
        tokenize: bool = True,
        return_dict: bool | None = None,
        **variables: Any,
    ) -> Any:
        """A conversation as the model's template writes it: `PromptIds`, or text with `tokenize=False`.

        `return_dict=True` gives `Encoded`, False a plain list of ids. For a list of conversations each of these is a
        list, in `Encoded` if `return_dict` is not False. `tools` are JSON schemas. `variables` go to the template.

        Raises:
            InvalidRequestError: there is no template, or the conversation does not fit (`render_conversation`).
            MissingExtraError: an option needs transformers.
        """
        _require_supported("apply_chat_template", {name: variables[name] for name in _RENDERING & variables.keys()})
        if any(callable(tool) for tool in tools or ()):
            raise _needs_transformers("the schema of a Python function", "tools", "Pass the tool's JSON schema")
        template = self.get_chat_template(chat_template, tools)
        several = bool(conversation) and (
            isinstance(conversation[0], (list, tuple)) or hasattr(conversation[0], "messages")
        )
        texts = [
            render_conversation(
                template,
                getattr(one, "messages", one),
                tools=tools,
                documents=documents,
                add_generation_prompt=add_generation_prompt,
                continue_final_message=continue_final_message,
                **{**self.special_tokens_map, **variables},
            )
            for one in (conversation if several else [conversation])
        ]
        shown = texts if several else texts[0]
        if not tokenize:
            return shown
        encoded = self(shown, add_special_tokens=False)
        if return_dict is None and not several:
            return PromptIds(encoded["input_ids"])
        return encoded["input_ids"] if return_dict is False else encoded

    def get_chat_template(
        self, chat_template: str | None = None, tools: Sequence[Mapping[str, Any]] | None = None
    ) -> str:
        """The template to use: that of this name, this text itself, or the model's own (its `tool_use`, with tools).

        Raises:
            InvalidRequestError: the model has none, or several and none of this name.
        """
        own = self.chat_template
        if isinstance(own, dict):
            chosen = None if chat_template is None else own.get(chat_template, chat_template)
            chosen = chosen or (own.get("tool_use") if tools is not None else None) or own.get("default")
        else:
            chosen = chat_template or own
        if chosen is None:
            raise InvalidRequestError(
                f"is not given, and {self.name_or_path} has no default",
                field="chat_template",
                value=sorted(own) if isinstance(own, dict) else own,
                remedy="Pass chat_template, or use a model that was trained for conversations",
            )
        return chosen

    # --- the vocabulary ------------------------------------------------------------------------------------------

    @property
    def vocab_size(self) -> int:
        """How many tokens the vocabulary has, without those that were added to it."""
        return self.backend_tokenizer.get_vocab_size(with_added_tokens=False)

    def __len__(self) -> int:
        return self.backend_tokenizer.get_vocab_size(with_added_tokens=True)

    def __bool__(self) -> bool:
        return True

    def get_vocab(self) -> dict[str, int]:
        """Token → id, added tokens included."""
        return self.backend_tokenizer.get_vocab(with_added_tokens=True)

    @property
    def vocab(self) -> dict[str, int]:
        """As `get_vocab`."""
        return self.get_vocab()

    @property
    def added_tokens_decoder(self) -> dict[int, AddedToken]:
        """Id → token of the tokens that were added to the vocabulary."""
        return self.backend_tokenizer.get_added_tokens_decoder()

    @property
    def added_tokens_encoder(self) -> dict[str, int]:
        """Text → id of the added tokens, by id."""
        return {token.content: place for place, token in sorted(self.added_tokens_decoder.items())}

    def get_added_vocab(self) -> dict[str, int]:
        """As `added_tokens_encoder`."""
        return self.added_tokens_encoder

    @property
    def special_tokens_map(self) -> dict[str, str]:
        """Name → text of the special tokens that have a name."""
        named = {name: getattr(self, name) for name in NAMED_TOKENS}
        return {name: token for name, token in (named | self._more_tokens).items() if token is not None}

    @property
    def all_special_tokens(self) -> list[str]:
        """The special tokens that the model's files name, each once."""
        return list(dict.fromkeys([*self.special_tokens_map.values(), *self.extra_special_tokens]))

    @property
    def all_special_ids(self) -> list[int]:
        """The ids of `all_special_tokens`."""
        return self.convert_tokens_to_ids(self.all_special_tokens)

    def __repr__(self) -> str:
        return f"ModelTokenizer({self.name_or_path!r}, {len(self)} tokens)"

    def __getattr__(self, name: str) -> Any:
        more = self.__dict__.get("_more_tokens", {})
        if name.removesuffix("_id") in more:
            token = more[name.removesuffix("_id")]
            return self.convert_tokens_to_ids(token) if name.endswith("_id") else token
        raise AttributeError(f"ModelTokenizer has no {name}. transformers' tokenizers may: pip install transformers")

    def _encodings(self, texts: Sequence[str], add_special_tokens: bool) -> list[Any]:
        for text in texts:
            if not isinstance(text, str):
                raise InvalidRequestError(
                    "is no text", field="text", value=text, remedy="Pass a str, or a list of them"
                )
        return self.backend_tokenizer.encode_batch(list(texts), add_special_tokens=add_special_tokens)

    def _add_tokens(self, config: Mapping[str, Any], older: Mapping[str, int]) -> None:
        """Adds the tokens that the other files name to those of `tokenizer.json`, in the order of transformers."""
        listed = config.get("added_tokens_decoder") or {}
        special = set(self.all_special_tokens)
        tokens = [AddedToken(**_fields(listed[place])) for place in sorted(listed, key=int)]
        known = {*self.added_tokens_encoder, *(token.content for token in tokens)}
        for text in sorted(older, key=lambda text: older[text]):
            if text not in known:
                tokens.append(AddedToken(text, normalized=text not in special, special=text in special))
                known.add(text)
        tokens += [AddedToken(text, special=True) for text in self.all_special_tokens if text not in known]
        self.backend_tokenizer.add_tokens(tokens)


_RENDERING = frozenset(
    {
        *("padding", "truncation", "max_length", "return_tensors", "return_assistant_tokens_mask"),
        *("sanitize_control_tokens", "tokenizer_kwargs"),
    }
)
"""Options of transformers' `apply_chat_template` that are not variables of a template."""


def _read_vocabulary(path: Path) -> Tokenizer:
    content = path.read_bytes()
    try:
        vocabulary = Tokenizer.from_buffer(content)
    except Exception as error:  # tokenizers raises Exception itself
        raise ValueError(f"{path} cannot be read: {error}") from error
    vocabulary.no_truncation()
    vocabulary.no_padding()
    return vocabulary


def _read_json(path: Path) -> dict[str, Any]:
    return json.loads(path.read_bytes()) if path.is_file() else {}


def _chat_template(folder: Path, config: Mapping[str, Any]) -> str | dict[str, str] | None:
    """The file's template, before that in the configuration, which may be several with names."""
    path = folder / "chat_template.jinja"
    if path.is_file():
        return path.read_text("utf-8")
    found = config.get("chat_template")
    return {each["name"]: each["template"] for each in found} if isinstance(found, list) else found


def _content(token: Any) -> str:
    """The text of a special token, which files write as a text or as a dictionary."""
    return token["content"] if isinstance(token, Mapping) else str(token)


def _fields(token: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in token.items() if name != "__type"}


def _cleaned(text: str) -> str:
    """WordPiece's text without the spaces before punctuation and contractions."""
    for spaced in _NOT_TEXT_BEFORE[:4]:
        text = text.replace(spaced, spaced[1:])
    text = text.replace(" ' ", "'")
    for spaced in _NOT_TEXT_BEFORE[4:]:
        text = text.replace(spaced, spaced[1:])
    return text


def _require_supported(method: str, options: Mapping[str, Any]) -> None:
    """Refuses what only transformers does. An option that is switched off asks for nothing."""
    for name, value in options.items():
        if value not in (None, False):
            raise _needs_transformers(f"{name} of {method}", name, f"Leave out {name}")


def _needs_transformers(what: str, name: str, instead: str) -> MissingExtraError:
    return MissingExtraError(
        f"{what} needs transformers", field=name, remedy=f"{instead}, or: pip install transformers"
    )
