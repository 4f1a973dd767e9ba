"""Structured outputs as grammars over a model's tokens, by llguidance.

llguidance bounds the work of a grammar and of each token. A grammar beyond its limits is refused when it is read, or
excludes every token where that shows only later.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import Tokenizer

from mint.errors import InvalidRequestError, MissingExtraError
from mint.tokenizer import special_token_ids, token_bytes
from mint.types import StructuredOutputs

FIELD = "structured_outputs"
KEPT_GRAMMARS, KEPT_VOCABULARIES = 64, 4
KEPT_TEXTS = 1024
"""Forced texts of a vocabulary whose tokens are remembered: all samples of a schema have the same, such as its keys."""
MAX_GRAMMAR_CHARACTERS = 1 << 18

WHITE_SPACE = r"( |\n[ \t]{0,32})"
"""Between the parts of JSON, as programs write it. With any white space, a model that is unsure of the next part may go
on with blanks for ever."""


class TokenGrammar:
    """The engine's `Grammar`."""

    def __init__(self, matcher: Any, ends: frozenset[int]) -> None:
        self._matcher = matcher
        self.ends = ends

    def start(self) -> TokenGrammarState:
        """The state of an empty text."""
        return TokenGrammarState(self._matcher.deep_copy())


class TokenGrammarState:
    """The engine's `GrammarState`."""

    def __init__(self, matcher: Any) -> None:
        self._matcher = matcher

    def allowed(self, bits: np.ndarray) -> None:
        """Writes the tokens that may come next; none once a limit of llguidance was reached."""
        self._matcher.unsafe_compute_mask_ptr(bits.ctypes.data, bits.nbytes)
        if self._matcher.is_error():
            bits[:] = 0

    def advance(self, token: int) -> None:
        """Adds a token."""
        self._matcher.consume_token(token)


def compile_grammar(wanted: StructuredOutputs, folder: Path, ends: Sequence[int], vocab_size: int) -> TokenGrammar:
    """The grammar over the tokens of a base model in `folder`, whose texts end with one of `ends`.

    Raises:
        InvalidRequestError: not exactly one field is given, or it cannot be read, or is too large.
        MissingExtraError: llguidance is not installed.
    """
    try:
        import llguidance  # an extra
    except ImportError as error:
        remedy = "pip install 'mint[structured]', where the model runs"
        raise MissingExtraError("structured outputs need llguidance", remedy=remedy) from error
    field, value = _given(wanted)
    text = json.dumps(value) if not isinstance(value, str) else value
    if len(text) > MAX_GRAMMAR_CHARACTERS:
        problem = f"has {len(text)} characters"
        raise _refusal(field, f"{text[:100]}…", problem, f"At most {MAX_GRAMMAR_CHARACTERS} are compiled")
    if not ends:
        raise _refusal(field, "(any)", "needs an end token, and the model has none", "Use a model with an end token")
    try:
        grammar = _as_llguidance(llguidance.LLMatcher, field, value)
    except (ValueError, RecursionError) as error:
        raise _refusal(field, text[:200], f"cannot be read: {error}", "Correct it") from error
    matcher, problem = _compiled(folder, tuple(ends), vocab_size, grammar)
    if problem:
        raise _refusal(field, text[:200], f"cannot be compiled: {problem}", "Correct it, or leave out that part")
    return TokenGrammar(matcher, frozenset(ends))


def _given(wanted: StructuredOutputs) -> tuple[str, Any]:
    given = {name: value for name, value in wanted if value is not None and value is not False}
    if len(given) != 1:
        names = ", ".join(StructuredOutputs.model_fields)
        raise InvalidRequestError("is ambiguous", field=FIELD, value=[*given], remedy=f"Give exactly one of {names}")
    return next(iter(given.items()))


def _as_llguidance(compiler: Any, field: str, value: Any) -> str:
    """The grammar in llguidance's own form."""
    spaces = {"whitespace_pattern": WHITE_SPACE}
    if field == "json_object":
        return compiler.grammar_from_json_schema({"type": "object"}, overrides=spaces)
    if field == "json_schema":
        return compiler.grammar_from_json_schema(value, overrides=spaces)
    if field == "regex":
        return compiler.grammar_from_regex(value)
    if field == "choice":
        if not value:
            raise ValueError("it is empty")
        return compiler.grammar_from_lark(f"start: {' | '.join(map(json.dumps, value))}")
    if "::=" in value:
        from llguidance.gbnf_to_lark import GbnfToLarkError, gbnf_to_lark  # an extra

        try:
            value = gbnf_to_lark(value)
        except GbnfToLarkError as error:
            raise ValueError(str(error)) from error
    return compiler.grammar_from_lark(value)


@lru_cache(KEPT_GRAMMARS)
def _compiled(folder: Path, ends: tuple[int, ...], vocab_size: int, grammar: str) -> tuple[Any, str]:
    """A matcher at the beginning of a text, and what is wrong with its grammar."""
    import llguidance  # an extra

    matcher = llguidance.LLMatcher(_vocabulary(folder, ends, vocab_size), grammar, log_level=0)
    if not matcher.is_error():
        matcher.compute_bitmask()  # some limits show here first
    return matcher, matcher.get_error().split("\n<state>")[0] if matcher.is_error() else ""


@lru_cache(KEPT_VOCABULARIES)
def _vocabulary(folder: Path, ends: tuple[int, ...], vocab_size: int) -> Any:
    import llguidance  # an extra

    pieces = list(token_bytes(folder))[:vocab_size]
    pieces += [b""] * (vocab_size - len(pieces))
    special = sorted(token for token in special_token_ids(folder) | set(ends) if token < vocab_size)
    wrapped = llguidance.TokenizerWrapper(_Vocabulary(folder, pieces, special, ends[0]))
    return llguidance.LLTokenizer(wrapped, n_vocab=vocab_size, eos_token=list(ends))


class _Vocabulary:
    """A model's tokenizer, with the members that llguidance reads. llguidance calls it for the tokens of a text that a
    grammar forces: it allows only these tokens there."""

    bos_token_id = None

    def __init__(self, folder: Path, tokens: list[bytes], special_token_ids: list[int], eos_token_id: int) -> None:
        self.tokens = tokens
        self.special_token_ids = special_token_ids
        self.eos_token_id = eos_token_id
        self._tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
        self._encode = lru_cache(KEPT_TEXTS)(self._encode_anew)

    def __call__(self, text: str) -> list[int]:
        return self._encode(text)

    def _encode_anew(self, text: str) -> list[int]:
        found: list[int] = self._tokenizer.encode(text, add_special_tokens=False).ids
        return found


def _refusal(field: str, value: str, problem: str, remedy: str) -> InvalidRequestError:
    return InvalidRequestError(problem, field=f"{FIELD}.{field}", value=value, remedy=remedy)
