"""Grammars over a model's tokens, by llguidance.

llguidance bounds the work of each token, and a text's share of a processor is bounded here: a grammar beyond one of
these limits excludes every token. Nothing bounds the work of the compiler, therefore `trial` comes first.
"""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import Tokenizer

from mint.errors import InvalidRequestError, MissingExtraError
from mint.extras import install_command
from mint.tokenizer import special_token_ids, token_bytes
from mint.types import StructuredOutputs

FIELD = "structured_outputs"
KEPT_GRAMMARS, KEPT_VOCABULARIES = 16, 4
KEPT_TEXTS = 1024
"""Forced texts of a vocabulary whose tokens are remembered: all samples of a schema have the same, such as its keys."""

FORCED_CHARACTERS = 256
"""Of a longer text that a grammar forces, only the beginning is tokenized at once: llguidance asks again after each
token."""

ITEMS_IN_A_STATE = 500
"""Of llguidance's parser: the time of a token grows with them. A schema of 60 properties with 30 values has 250."""

FIRST_S, TOKEN_S = 0.05, 0.001
"""The time of a processor that a text may take: so much, and so much for each token. A schema takes 0.1 ms a token,
and a long text that is forced 0.14 ms. A busy machine takes longer, because processors share caches and threads."""

SHOWN_CHARACTERS = 200
MAX_GRAMMAR_CHARACTERS = 1 << 18

WHITE_SPACE = r"( |\n[ \t]{0,32})"
"""Between the parts of JSON, as programs write it. With any white space, a model that is unsure of the next part may go
on with blanks for ever."""


@dataclass(frozen=True)
class _Source:
    """What a grammar is compiled from: its `text`, in llguidance's form, and the tokens of a base model."""

    owner: str
    folder: Path
    ends: tuple[int, ...]
    vocab_size: int
    text: str


class TokenGrammar:
    """The engine's `Grammar`."""

    def __init__(self, matcher: Any, source: _Source) -> None:
        self._matcher = matcher
        self._source = source
        self.ends = frozenset(source.ends)
        self._first: dict[int, np.ndarray] = {}  # which tokens may come first, by the size of the mask

    def start(self) -> TokenGrammarState:
        """The state of an empty text."""
        return TokenGrammarState(self._matcher.deep_copy(), self._first)

    def __reduce__(self) -> tuple[Any, ...]:
        """Another process compiles it again."""
        return _compile_again, (self._source,)


class TokenGrammarState:
    """The engine's `GrammarState`."""

    def __init__(self, matcher: Any, first: dict[int, np.ndarray]) -> None:
        """The state of an empty text. All texts of a grammar share `first`, which holds their first masks by size."""
        self._matcher = matcher
        self._first: dict[int, np.ndarray] | None = first
        self._left_s = FIRST_S

    def allowed(self, bits: np.ndarray) -> None:
        """Writes the tokens that may come next; none once a limit was reached."""
        first = self._first
        if first is not None and bits.nbytes in first:
            bits[:] = first[bits.nbytes]
            return
        if self._left_s > 0:
            began = time.thread_time()
            self._matcher.unsafe_compute_mask_ptr(bits.ctypes.data, bits.nbytes)
            self._left_s -= time.thread_time() - began
        if self._left_s <= 0 or self._matcher.is_error():
            bits[:] = 0
        if first is not None:
            first[bits.nbytes] = bits.copy()

    def advance(self, token: int) -> None:
        """Adds a token."""
        self._first = None
        began = time.thread_time()
        self._matcher.consume_token(token)
        self._left_s += TOKEN_S - (time.thread_time() - began)


def compile_grammar(
    wanted: StructuredOutputs, folder: Path, ends: Sequence[int], vocab_size: int, *, owner: str
) -> TokenGrammar:
    """The grammar over the tokens of a base model in `folder`, whose texts end with one of `ends`.

    Compiled grammars are kept for each owner alone.

    Raises:
        InvalidRequestError: not exactly one field is given, or it cannot be read, or is too large.
        MissingExtraError: llguidance is not installed.
    """
    field, value = field_and_value(wanted)
    require_short(field, value)
    if not ends:
        raise refusal(field, "(any)", "needs an end token, and the model has none", "Use a model with an end token")
    try:
        text = grammar_text(field, value)
    except (ValueError, RecursionError) as error:
        raise refusal(field, value, f"cannot be read: {error}", "Correct it") from error
    source = _Source(owner, folder, tuple(ends), vocab_size, text)
    matcher, problem = _compiled(source)
    if problem:
        raise refusal(field, value, f"cannot be compiled: {problem}", "Correct it, or leave out that part")
    return TokenGrammar(matcher, source)


def require_llguidance() -> None:
    """Checks that the compiler is installed.

    Raises:
        MissingExtraError: it is not.
    """
    try:
        import llguidance  # noqa: F401 - an extra
    except ImportError as error:
        remedy = f"Where the model runs: {install_command('structured')}"
        raise MissingExtraError("structured outputs need llguidance", remedy=remedy) from error


def field_and_value(wanted: StructuredOutputs) -> tuple[str, Any]:
    """The one field that is given.

    Raises:
        InvalidRequestError: there are several, or none.
    """
    given = {name: value for name, value in wanted if value is not None and value is not False}
    if len(given) != 1:
        names = ", ".join(StructuredOutputs.model_fields)
        raise InvalidRequestError("is ambiguous", field=FIELD, value=[*given], remedy=f"Give exactly one of {names}")
    return next(iter(given.items()))


def require_short(field: str, value: Any) -> None:
    """Checks the length of a grammar.

    Raises:
        InvalidRequestError: it is too long.
    """
    length = len(_as_text(value))
    if length > MAX_GRAMMAR_CHARACTERS:
        raise refusal(field, value, f"has {length} characters", f"At most {MAX_GRAMMAR_CHARACTERS} are compiled")


def refusal(field: str, value: Any, problem: str, remedy: str) -> InvalidRequestError:
    """The error that names the field, and the beginning of its value."""
    text = _as_text(value)
    shown = text if len(text) <= SHOWN_CHARACTERS else f"{text[:SHOWN_CHARACTERS]}…"
    return InvalidRequestError(problem, field=f"{FIELD}.{field}", value=shown, remedy=remedy)


def _as_text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)


def grammar_text(field: str, value: Any) -> str:
    """The grammar in llguidance's own form.

    Raises:
        ValueError, RecursionError: it cannot be read.
        MissingExtraError: llguidance is not installed.
    """
    require_llguidance()
    from llguidance import LLMatcher

    return _as_llguidance(LLMatcher, field, value)


def _as_llguidance(compiler: Any, field: str, value: Any) -> str:
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
        # One terminal: the lexer takes any number of texts, the parser would have an item for each.
        return compiler.grammar_from_lark(f"start: TEXT\nTEXT: {' | '.join(map(json.dumps, value))}")
    if "::=" in value:
        from llguidance.gbnf_to_lark import GbnfToLarkError, gbnf_to_lark  # an extra

        try:
            value = gbnf_to_lark(value)
        except GbnfToLarkError as error:
            raise ValueError(str(error)) from error
    return compiler.grammar_from_lark(value)


@lru_cache(KEPT_GRAMMARS)
def _compiled(source: _Source) -> tuple[Any, str]:
    return first_state(_vocabulary(source.folder, source.ends, source.vocab_size), source.text)


def _compile_again(source: _Source) -> TokenGrammar:
    matcher, _ = _compiled(source)
    return TokenGrammar(matcher, source)


def first_state(tokens: Any, grammar: str) -> tuple[Any, str]:
    """A matcher at the beginning of a text, and what is wrong with its grammar."""
    import llguidance  # an extra

    limits = llguidance.LLParserLimits(max_items_in_row=ITEMS_IN_A_STATE)
    matcher = llguidance.LLMatcher(tokens, grammar, log_level=0, limits=limits)
    if not matcher.is_error():
        matcher.compute_bitmask()  # some limits show here first
    return matcher, matcher.get_error().split("\n<state>")[0] if matcher.is_error() else ""


def vocabulary(folder: Path) -> Any:
    """The tokens of the base model in `folder`, to try a grammar with. Token 0 stands for the end of a text: which one
    ends it is known once the model is loaded, and makes no difference to the work."""
    return _vocabulary(folder, (0,), len(token_bytes(folder)))


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
        tokens = self._encode(text[:FORCED_CHARACTERS])
        # The last ones may be others where the text goes on.
        return tokens if len(text) <= FORCED_CHARACTERS else tokens[: max(1, len(tokens) // 2)]

    def _encode_anew(self, text: str) -> list[int]:
        found: list[int] = self._tokenizer.encode(text, add_special_tokens=False).ids
        return found
