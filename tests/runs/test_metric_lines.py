"""A long log of metrics that is not decoded answers as one that is: while it grows, and when its rows differ."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mint.errors import InvalidRequestError
from mint.runs import metric_lines
from mint.runs.json_lines import encode_line
from mint.runs.metric_columns import MetricColumns
from mint.runs.metric_lines import MetricLines
from mint.runs.reader import RunReader

NAMES = ["reward/mean", 'a "quoted" name', "größe", "mean"]
NUMBERS = st.floats(allow_nan=True, allow_infinity=True) | st.integers(-(2**53), 2**53)


@pytest.fixture(autouse=True)
def _every_log_is_long(monkeypatch: pytest.MonkeyPatch) -> None:
    """And is read in many blocks, whose ends lie anywhere in a line."""
    monkeypatch.setattr(metric_lines, "LONG_LOG_BYTES", 1)
    monkeypatch.setattr(metric_lines, "BLOCK_BYTES", 150)


def written(folder: Path, rows: list[dict[str, Any]], *, end: bytes = b"") -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text('{"steps": 9}')
    path = folder / "metrics.jsonl"
    path.write_bytes(b"".join(map(encode_line, rows)) + end)
    return path


def row_of(step: int, **values: float) -> dict[str, float]:
    return {"step": step, "reward/mean": 0.5 + 0.1 * (step % 3), "time/train_s": 1.0, **values}


@settings(max_examples=80, deadline=None)
@given(
    values=st.lists(st.tuples(*[NUMBERS] * len(NAMES)), min_size=1, max_size=30),
    since=st.integers(0, 30),
    until=st.integers(0, 30),
    most=st.none() | st.integers(1, 8),
)
def test_all_questions_have_the_answers_of_decoded_columns(
    tmp_path_factory: pytest.TempPathFactory, values: list[Any], since: int, until: int, most: int | None
) -> None:
    rows = [{"step": step, **dict(zip(NAMES, row, strict=True))} for step, row in enumerate(values, 1)]
    lines = MetricLines.open(written(tmp_path_factory.mktemp("run"), rows, end=b'{"step": 99, "rew'))
    columns = MetricColumns()
    columns.add(rows)
    assert lines is not None
    assert (len(lines), lines.names) == (len(columns), columns.names)
    places = lines.places(since, until, most)
    assert list(places) == list(columns.places(since, until, most))
    for chosen in (None, places):
        assert lines.columns([*NAMES, "missing"], chosen) == columns.columns([*NAMES, "missing"], chosen)
    for place in (*places, -1):
        assert json.dumps(lines.row(place)) == json.dumps(rows[place])


def test_names_that_are_escaped_more_than_they_must_be_are_found(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text("".join(json.dumps({"step": step, "größe": step / 2}) + "\n" for step in range(1, 9)))
    lines = MetricLines.open(path)
    assert lines is not None
    assert lines.column("größe") == [step / 2 for step in range(1, 9)]


def test_a_log_whose_rows_differ_is_decoded(tmp_path: Path) -> None:
    rows = [row_of(step) for step in range(1, 6)]
    rows[2] |= {"extra": 1.0}
    assert MetricLines.open(written(tmp_path, rows)) is None
    assert RunReader(tmp_path).columns(["step"], most=3)["step"] == [1.0, 4.0, 5.0]


@pytest.mark.parametrize("odd", [None, {"reward/mean": 1.0}, "text"])
def test_a_log_with_something_else_than_a_number_is_refused(tmp_path: Path, odd: Any) -> None:
    rows: list[dict[str, Any]] = [row_of(step) for step in range(1, 6)]
    rows[2]["time/train_s"] = odd
    written(tmp_path, rows)
    with pytest.raises(InvalidRequestError, match=r"metrics\.jsonl: .*has no number as `time/train_s`"):
        RunReader(tmp_path).columns(["step"], most=3)


def test_a_reader_of_a_long_log_keeps_up_when_it_grows(tmp_path: Path) -> None:
    rows = [row_of(step) for step in range(1, 8)]
    path = written(tmp_path, rows)
    reader = RunReader(tmp_path)
    assert (reader.step_count(), reader.last_step(), reader.summary().step) == (7, 7, 7)
    with path.open("ab") as file:
        file.write(encode_line(row_of(8, late=2.0)))
    assert (reader.step_count(), reader.last_step(), reader.summary().step) == (8, 8, 8)
    assert reader.columns(most=100)["late"] == [None] * 7 + [2.0]
    assert reader.metrics(6) == [row_of(7), row_of(8, late=2.0)]
    written(tmp_path, rows[:3])
    assert (reader.step_count(), len(reader.metrics())) == (3, 3)


def test_the_best_reward_of_a_long_log_is_of_a_step_that_was_graded(tmp_path: Path) -> None:
    counts = {"rollouts/count": 4.0, "rollouts/ungraded": 0.0}
    rows = [row_of(step) | counts for step in range(1, 8)]
    rows[3] |= {"reward/mean": 0.9, "rollouts/ungraded": 4.0}
    written(tmp_path, rows)
    best = max(row["reward/mean"] for place, row in enumerate(rows) if place != 3)
    assert RunReader(tmp_path).summary().best_reward == best
    assert math.isclose(best, 0.7)


def test_a_damaged_line_is_refused_where_it_is_decoded(tmp_path: Path) -> None:
    rows: list[dict[str, Any]] = [row_of(step) for step in range(1, 6)]
    rows[-1]["step"] = "five"
    written(tmp_path, rows)
    with pytest.raises(InvalidRequestError, match=r"metrics\.jsonl"):
        RunReader(tmp_path).summary()
