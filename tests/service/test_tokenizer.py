"""The bytes of each token add up to the text, so that stop strings are matched exactly."""

from __future__ import annotations

from pathlib import Path

import pytest

import mint
from mint.errors import InvalidRequestError
from mint.tokenizer import load_tokenizer, token_bytes

TINY = Path(mint.__file__).parent / "models" / "tiny"


@pytest.mark.parametrize("text", ["Q: What is 3 + 5?\nA: 8", "naïve café — 日本語 🎉", "\tdef f(x):\n    return x\r\n"])
def test_token_bytes_add_up_to_the_text(text: str) -> None:
    tokens = load_tokenizer(str(TINY), "mint/tiny").encode(text, add_special_tokens=False)
    assert b"".join(token_bytes(TINY)[token] for token in tokens) == text.encode()


def test_special_tokens_have_their_text() -> None:
    tokenizer = load_tokenizer(str(TINY), "mint/tiny")
    assert token_bytes(TINY)[tokenizer.eos_token_id] == tokenizer.eos_token.encode()


def test_a_folder_without_a_tokenizer_says_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(InvalidRequestError, match="token ids"):
        token_bytes(tmp_path)
