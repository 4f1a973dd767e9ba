"""A file of prompts and answers as a task: JSON lines, or any format that the `datasets` library opens.

A hash of the prompt decides which rows are held out.
"""

from __future__ import annotations

import codecs
import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from mint.errors import InvalidRequestError, MissingExtraError
from mint.extras import install_command
from mint.recipes.question_task import (
    PromptStyle,
    Question,
    QuestionAdapter,
    checked_prompt,
    one_side,
    split_last_reply,
    text_of_reply,
)
from mint.rl.tasks.math_grader import MathGrader

PROMPT_KEYS = ("prompt", "question", "messages")
ANSWER_KEYS = ("answer", "gold", "solution", "completion")

GRADERS: dict[str, Callable[[str, str], bool]] = {
    "exact": lambda response, answer: response.strip() == answer.strip(),
    "contains": lambda response, answer: answer.strip() in response,
    "regex": lambda response, answer: re.search(answer, response) is not None,
}
"""Name → function of (response, answer) that says whether it is right. For `regex` the answer is a pattern."""

MATH = "math"
"""The grader that compares mathematical expressions in any notation, in a process pool."""

FORMATS = {".parquet": "parquet", ".csv": "csv", ".json": "json", ".arrow": "arrow"}


class FileAdapter(QuestionAdapter):
    """Rows with a prompt (text or messages) and an answer; reward 1 for a right completion, 0 otherwise."""

    reward_range = (0.0, 1.0)

    def __init__(
        self,
        path: str | Path,
        *,
        seed: int = 0,
        grader: str = "exact",
        prompt_key: str | None = None,
        answer_key: str | None = None,
        heldout: float = 0.1,
        prompt_style: PromptStyle = "chat",
    ) -> None:
        """`heldout` is the share of prompts that are held out. Keys of None are looked for in `PROMPT_KEYS` and
        `ANSWER_KEYS`; without an answer, the reply at the end of a conversation is the answer. `seed` has no effect:
        rows keep the file's order, and the run shuffles them.

        Raises:
            InvalidRequestError: no such file or grader, no rows, or one without a prompt or answer: names its line.
            MissingExtraError: the format needs the `datasets` library, which is not installed.
        """
        super().__init__(prompt_style=prompt_style)
        if grader not in {*GRADERS, MATH}:
            raise InvalidRequestError(
                "is not a grader", field="grader", value=grader, remedy=f"Choose one of {', '.join([*GRADERS, MATH])}"
            )
        if not 0 <= heldout < 1:
            raise InvalidRequestError("is not in [0, 1)", field="heldout", value=heldout, remedy="Try 0.1")
        self.path = Path(path)
        self.share = heldout
        self._math = MathGrader() if grader == MATH else None
        self._grade = self._math.equal_answers if self._math else GRADERS[grader]
        self.heldout_name = f"{self.path.name}, {heldout:.0%} held out by hash"
        self._questions = [
            _question(row, where, prompt_key, answer_key, grader) for where, row in _read_rows(self.path)
        ]
        if not self._questions:
            raise InvalidRequestError(
                "has no rows", field="path", value=str(path), remedy='Write one {"prompt": …, "answer": …} a line'
            )

    def build_dataset(self) -> Sequence[Question]:
        """The training rows, without repetitions."""
        return one_side(self._questions, heldout=False, share=self.share)

    def build_heldout(self) -> Sequence[Question]:
        """The held-out rows, without repetitions."""
        return one_side(self._questions, heldout=True, share=self.share)

    def compute_reward(self, response: str, item: Question) -> float:
        """1 if the grader says that the response is right, else 0."""
        return float(self._grade(response, item.answer))

    def close(self) -> None:
        """Ends the math grader's processes."""
        if self._math is not None:
            self._math.close()


def _read_rows(path: Path) -> Iterator[tuple[str, Any]]:
    """The place (`file:line`) and the content of every row."""
    if not path.exists():
        raise InvalidRequestError(
            "does not exist", field="path", value=str(path), remedy="Give a .jsonl, .parquet or .csv file, or a folder"
        )
    if path.suffix == ".jsonl" and not path.is_dir():
        yield from read_json_lines(path)
        return
    if not path.is_dir() and path.suffix not in FORMATS:
        raise InvalidRequestError(
            "has no ending that mint reads",
            field="path",
            value=str(path),
            remedy=f"Give .jsonl, {', '.join(FORMATS)}, or a folder written by save_to_disk",
        )
    for number, row in enumerate(_open_dataset(path), start=1):
        yield f"{path}: row {number}", row


def read_json_lines(path: Path) -> Iterator[tuple[str, Any]]:
    """The place (`file:line`) and the value of every line that is not blank; a byte order mark is left out.

    Raises:
        InvalidRequestError: a line is not JSON in UTF-8, or a text in it is not; names the line. Or the file cannot be
            opened.
    """
    try:
        opened = path.open("rb")
    except OSError as error:
        raise InvalidRequestError(
            f"cannot be opened ({error.strerror})", field="path", value=str(path), remedy="Give a file that can be read"
        ) from error
    with opened as file:
        for number, line in enumerate(file, start=1):
            content = line.removeprefix(codecs.BOM_UTF8) if number == 1 else line
            if content.strip():
                yield f"{path}:{number}", _parse(content, f"{path}:{number}")


def _parse(line: bytes, where: str) -> Any:
    shown = line.decode("utf-8", "replace").strip()
    try:
        row = json.loads(line.decode())
        if b"\\u" in line:
            json.dumps(row, ensure_ascii=False).encode()
    except UnicodeEncodeError as error:
        raise InvalidRequestError(
            f"has half of a character, \\u{ord(error.object[error.start]):04x}",
            field=where,
            value=shown,
            remedy="Leave it out, or write the other half, too: a text was cut in the middle of a character",
        ) from error
    except (ValueError, RecursionError) as error:  # the second: too many brackets within each other
        raise InvalidRequestError(
            f"is not JSON in UTF-8 ({error})", field=where, value=shown, remedy="Write one JSON object per line"
        ) from error
    return row


def _open_dataset(path: Path) -> Any:
    try:
        import datasets  # deferred: an optional extra, seconds to import
        from datasets.exceptions import DatasetsError
    except ImportError as error:
        raise MissingExtraError(
            f"{path.name} needs the datasets library", remedy=f"{install_command('tasks')}, or convert it to .jsonl"
        ) from error
    try:
        if path.is_dir():
            loaded = datasets.load_from_disk(str(path))
        else:
            loaded = datasets.load_dataset(FORMATS[path.suffix], data_files=str(path), split="train")
    except (OSError, ValueError, DatasetsError) as error:
        reason = error.__cause__ or error  # what the library raises may only announce its cause
        raise InvalidRequestError(
            f"cannot be opened by the datasets library ({reason})",
            field="path",
            value=str(path),
            remedy=f"Give .jsonl, {', '.join(FORMATS)}, or a folder written by save_to_disk",
        ) from error
    if isinstance(loaded, datasets.DatasetDict):
        if "train" not in loaded:
            raise InvalidRequestError("has no split `train`", field="path", value=str(path), remedy="Save one split")
        return loaded["train"]
    return loaded


def _question(row: Any, where: str, prompt_key: str | None, answer_key: str | None, grader: str) -> Question:
    if not isinstance(row, Mapping):
        raise InvalidRequestError("is not an object", field=where, value=row, remedy='Write {"prompt": …, "answer": …}')
    prompt = row[_key(row, prompt_key, PROMPT_KEYS, where, "prompt_key")]
    conversation = split_last_reply(prompt)
    if conversation is not None and answer_key is None and not any(key in row for key in ANSWER_KEYS):
        prompt, answer = conversation
    else:
        answer = text_of_reply(row[_key(row, answer_key, ANSWER_KEYS, where, "answer_key")])
    if isinstance(answer, bool) or not isinstance(answer, str | int | float):
        raise InvalidRequestError(
            "is not a text or a number",
            field=f"{where}: answer",
            value="null" if answer is None else answer,
            remedy="Give the right answer as text",
        )
    if grader == "regex":
        _check_pattern(str(answer), where)
    return Question(checked_prompt(prompt, where), str(answer), source=row)


def _key(row: Mapping[str, Any], wanted: str | None, known: Sequence[str], where: str, option: str) -> str:
    found = [key for key in (known if wanted is None else [wanted]) if key in row]
    if not found:
        raise InvalidRequestError(
            f"has no field {wanted or ' or '.join(known)}",
            field=where,
            value=f"fields {', '.join(map(str, row))}",
            remedy=f"Name the field with {option}=…",
        )
    return found[0]


def _check_pattern(pattern: str, where: str) -> None:
    try:
        re.compile(pattern)
    except re.error as error:
        raise InvalidRequestError(
            f"is not a regular expression ({error})",
            field=f"{where}: answer",
            value=pattern,
            remedy="Correct the pattern",
        ) from error
