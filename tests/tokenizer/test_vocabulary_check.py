"""A tokenizer whose tokens the model does not have is refused; what no text becomes may lie beyond."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from mint.errors import InvalidRequestError
from mint.tokenizer.vocabulary_check import require_within_vocabulary

WORDS = {"a": 0, "b": 1, "c": 2}


def _write(folder: Path, vocabulary: object, added: list[dict[str, Any]], template: str = "") -> Path:
    content = {"model": {"vocab": vocabulary}, "added_tokens": added}
    (folder / "tokenizer.json").write_text(json.dumps(content))
    if template:
        (folder / "chat_template.jinja").write_text(template)
    return folder


def _added(content: str, token: int, *, special: bool) -> dict[str, Any]:
    return {"content": content, "id": token, "special": special}


@pytest.mark.parametrize(
    ("vocabulary", "added", "template", "named"),
    [
        (WORDS | {"d": 3}, [], "", "'d' with the id 3"),
        (
            [["a", -1.0], ["b", -2.0], ["c", -3.0], ["d", -4.0], ["e", -5.0]],
            [],
            "",
            "'e' with the id 4",
        ),
        (WORDS, [_added("<new>", 7, special=False)], "", "'<new>' with the id 7"),
        (WORDS, [_added("<|im_end|>", 3, special=True)], "{{ text }}<|im_end|>", r"'<\|im_end\|>' with the id 3"),
    ],
)
def test_a_token_beyond_the_vocabulary_is_named(
    vocabulary: object, added: list[dict[str, Any]], template: str, named: str, tmp_path: Path
) -> None:
    with pytest.raises(
        InvalidRequestError,
        match=rf"tokenizer\.json: has the token {named}, .* gives the model 3 tokens\. Give the tokenizer",
    ):
        require_within_vocabulary(_write(tmp_path, vocabulary, added, template), 3)


@pytest.mark.parametrize("vocabulary", [WORDS, WORDS | {"<image>": 3}], ids=["added alone", "also among the words"])
def test_a_special_token_that_no_template_writes_may_lie_beyond(vocabulary: object, tmp_path: Path) -> None:
    require_within_vocabulary(_write(tmp_path, vocabulary, [_added("<image>", 3, special=True)], "{{ text }}"), 3)


@pytest.mark.parametrize("text", ["", "{}", "[]", '{"model": {"vocab": {"a": "x"}}}', '{"model": {"vocab": 5}}'])
def test_a_damaged_tokenizer_is_left_to_those_who_need_one(text: str, tmp_path: Path) -> None:
    require_within_vocabulary(tmp_path, 3)
    (tmp_path / "tokenizer.json").write_text(text)
    require_within_vocabulary(tmp_path, 3)
