"""The reader of run folders answers as a full read of the files does: while they grow, after kills, when resumed."""

from __future__ import annotations

import json
import math
import shutil
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from mint.errors import InvalidRequestError, NotFoundError
from mint.recipes.tools import DEMO, ToolsAdapter
from mint.rl import RLAdapter, RLConfig, UnsupportedError, run_grpo
from mint.runs.log import RunLog
from mint.runs.metric_columns import MetricColumns
from mint.runs.process import recorded_process
from mint.runs.reader import RunReader, latest_findings
from mint.runs.rollout_index import ENTRY, FLAGS, RolloutIndex, step_entries
from mint.runs.rollout_lines import light_row, shortened_row, token_count
from mint.runs.rollout_query import SORTS, RolloutQuery

Row = dict[str, Any]


class Mixed(RLAdapter):
    """Everything that a row can be: graded, not judged, failed, cut off, said twice, and a group without rollouts."""

    def build_dataset(self) -> Sequence[str]:
        return ["1 + 1", "2 + 2", "3 + 3", "4 + 4", "5 + 5", "6 + 6"]

    def build_heldout(self) -> Sequence[str]:
        return ["7 + 7", "8 + 8"]

    def make_prompt(self, item: str, tokenizer: Any) -> list[int]:
        prompt = tokenizer.encode(f'Q: What is "{item}"?\nA:')
        return prompt * 1000 if item == "6 + 6" else prompt

    def compute_reward(self, response: str, item: str) -> float:
        if item == "5 + 5":
            raise UnsupportedError("no judge for fives")
        if item == "4 + 4":
            raise ValueError("a grader's \udcff words")
        return 0.0 if item == "3 + 3" else sum(character.isdigit() for character in response) / 3


MIXED = RLConfig(
    base_model="mint/tiny",
    steps=5,
    batch_size=6,
    group_size=4,
    max_tokens=4,
    temperature=1.3,
    learning_rate=2e-3,
    save_every=2,
    eval_every=2,
    kl_penalty_coef=0.1,
)


def at_step(step: int, act: Callable[[], None]) -> Callable[[str, Mapping[str, Any]], None]:
    def on_progress(event: str, fields: Mapping[str, Any]) -> None:
        if event == "step" and fields["step"] == step:
            act()

    return on_progress


def interrupt() -> None:
    raise KeyboardInterrupt


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Path]]:
    """`tools`: multi-turn episodes. `mixed`: interrupted in its third step and resumed. `cut`: as it was in between.
    `old`: `mixed` as it would have been logged before there was an index."""
    folder = tmp_path_factory.mktemp("runs")
    found = {name: folder / name for name in ("tools", "mixed", "cut", "old")}
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("MINT_HOME", str(folder / "home"))
        environment.setenv("MINT_THREADS", "1")
        small = {"steps": 2, "batch_size": 4, "group_size": 4, "heldout_size": 8, "run_dir": found["tools"]}
        run_grpo(ToolsAdapter(seed=0), DEMO.changed(**small))
        mixed = MIXED.changed(run_dir=found["mixed"])
        with pytest.raises(KeyboardInterrupt):
            run_grpo(Mixed(), mixed, on_progress=at_step(3, interrupt))
        shutil.copytree(found["mixed"], found["cut"])
        run_grpo(Mixed(), mixed, resume=True)
    shutil.copytree(found["mixed"], found["old"])
    for name in ("rollouts.index", "tokens.jsonl", "process.json"):
        (found["old"] / name).unlink()
    yield found


NAMES = ("tools", "mixed", "cut", "old")


def read_all(folder: Path, name: str = "rollouts.jsonl") -> list[Row]:
    """Every complete line, parsed."""
    if not (folder / name).exists():
        return []
    lines = (folder / name).read_bytes().split(b"\n")[:-1]
    return [json.loads(line) for line in lines]


def by_step(rows: Sequence[Row]) -> dict[int, list[Row]]:
    steps: dict[int, list[Row]] = {}
    for row in rows:
        steps.setdefault(row["step"], []).append(row)
    return steps


def naive_entries(rows: Sequence[Row]) -> list[Row]:
    """What a page says of each rollout, from all rows at once."""
    entries = []
    for step, of_step in by_step(rows).items():
        for place, row in enumerate(of_step):
            group = {one["reward"] for one in of_step if one["group"] == row["group"] and one.get("reward") is not None}
            flags = {
                "truncated": row.get("truncated", False),
                "error": row.get("reward") is None,
                "timed_out": row.get("timed_out", False),
                "unsupported": row.get("unsupported", False),
                "used": row.get("used", False),
                "duplicate": "text" in row and any(one.get("text") == row["text"] for one in of_step[:place]),
                "no_signal": len(group) == 1,
                "tool_calls": row.get("tool_calls", 0) > 0,
            }
            entries.append(
                {
                    "step": step,
                    "row": place,
                    "group": row["group"],
                    "item": row["item"],
                    "reward": row.get("reward"),
                    "advantage": row.get("advantage"),
                    "length": len(row.get("tokens", ())),
                    "flags": [name for name in FLAGS if flags[name]],
                    "prompt": row.get("prompt", "")[:400],
                    "text": row.get("text", "")[:400],
                    "stop_reason": row.get("stop_reason"),
                    "error": row["error"][:400] if row.get("error") else None,
                }
            )
    return entries


def naive_query(rows: Sequence[Row], query: RolloutQuery) -> list[Row]:
    def within(value: float | None, low: float | None, high: float | None) -> bool:
        if value is None:
            return low is None and high is None
        return (low is None or value >= low) and (high is None or value <= high)

    said = {(row["step"], place): row for of_step in by_step(rows).values() for place, row in enumerate(of_step)}
    kept = [
        entry
        for entry in naive_entries(rows)
        if query.step in (None, entry["step"])
        and query.group in (None, entry["group"])
        and query.item in (None, entry["item"])
        and within(entry["step"], query.first_step, query.last_step)
        and within(entry["reward"], query.reward_min, query.reward_max)
        and within(entry["length"], query.length_min, query.length_max)
        and query.flags <= set(entry["flags"])
        and not query.without & set(entry["flags"])
        and any(
            query.text.lower() in said[entry["step"], entry["row"]].get(name, "").lower() for name in ("prompt", "text")
        )
    ]
    if query.sort == "step":
        return kept
    name, sign = query.sort.removeprefix("-"), -1 if query.sort.startswith("-") else 1
    return sorted(kept, key=lambda entry: (entry[name] is None, sign * (entry[name] or 0)))


def assert_answers_as_a_full_read(reader: RunReader, folder: Path) -> None:
    rows = read_all(folder)
    steps = by_step(rows)
    assert reader.steps() == sorted(steps)
    for step, of_step in steps.items():
        assert reader.rows(step) == [{**row, "row": place} for place, row in enumerate(of_step)]
    page = reader.rollouts(RolloutQuery(limit=10_000))
    assert page.rows == naive_entries(rows)
    assert (page.total, page.next_offset, page.is_complete) == (len(rows), None, True)
    metrics = read_all(folder, "metrics.jsonl")
    assert reader.metrics() == metrics
    assert reader.columns(["reward/mean"]) == {name: [row[name] for row in metrics] for name in ("step", "reward/mean")}
    evaluations = read_all(folder, "evaluations.jsonl")
    assert reader.evaluations() == [{name: row[name] for name in row if name != "examples"} for row in evaluations]
    assert [reader.examples(place) for place in range(len(evaluations))] == [row["examples"] for row in evaluations]
    assert reader.findings() == read_all(folder, "findings.jsonl")
    assert reader.checkpoints() == read_all(folder, "checkpoints.jsonl")
    assert reader.warnings() == read_all(folder, "warnings.jsonl")


@pytest.mark.parametrize("name", NAMES)
def test_all_that_a_run_holds_is_read_as_a_full_read_of_its_files_has_it(runs: dict[str, Path], name: str) -> None:
    assert_answers_as_a_full_read(RunReader(runs[name]), runs[name])


def test_the_runs_of_this_test_have_every_kind_of_row(runs: dict[str, Path]) -> None:
    flags = {flag for name in NAMES for entry in naive_entries(read_all(runs[name])) for flag in entry["flags"]}
    assert flags >= FLAGS.keys() - {"timed_out"}
    assert any("tokens" not in row for row in read_all(runs["mixed"]))


numbers = st.none() | st.sampled_from([-0.5, 0.0, 1 / 3, 0.5, 1.0])
counts = st.none() | st.integers(0, 6)
flag_sets = st.frozensets(st.sampled_from(sorted(FLAGS)), max_size=2)
texts = st.sampled_from(["", "", "", "IS", ' "1', "a:", "\n", '"', "text", "7", "calculator", "nothing like it", "É"])
queries = st.builds(
    RolloutQuery,
    step=counts,
    first_step=counts,
    last_step=counts,
    group=counts,
    item=counts,
    reward_min=numbers,
    reward_max=numbers,
    length_min=counts,
    length_max=counts,
    flags=flag_sets,
    without=flag_sets,
    text=texts,
    sort=st.sampled_from(SORTS),
    limit=st.integers(1, 30),
)


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(name=st.sampled_from(NAMES), query=queries, search_bytes=st.sampled_from([1, 3_000, 1 << 30]))
def test_the_pages_of_a_query_are_the_rows_that_a_filter_over_all_of_them_leaves(
    runs: dict[str, Path], name: str, query: RolloutQuery, search_bytes: int
) -> None:
    reader = RunReader(runs[name], search_bytes=search_bytes, search_s=math.inf)
    expected = naive_query(read_all(runs[name]), query)
    found: list[Row] = []
    offset: int | None = 0
    while offset is not None:
        page = reader.rollouts(replace(query, offset=offset))
        assert len(page.rows) <= query.limit
        assert page.total in ((len(expected),) if not query.text else (None, len(expected)))
        assert page.is_complete or (query.text and page.next_offset is not None)
        found += page.rows
        assert page.next_offset is None or page.next_offset > offset
        offset = page.next_offset
    assert found == expected


def test_a_text_is_found_whatever_its_script_and_case(tmp_path: Path) -> None:
    said = ["Straße nach KÖLN", "Москва", '<script>alert("x")</script>', "tab\tand \\ back", "💥 boom", "plain"]
    rows = [
        {"step": 1, "group": 0, "item": 0, "prompt": "p", "text": text, "tokens": [1], "logprobs": [0.0], "reward": 1.0}
        for text in said
    ]
    reader = RunReader(written(tmp_path, {1: rows}))
    for needle, place in (("köln", 0), ("МОСКВА", 1), ('ALERT("x")', 2), ("TAB\tand \\", 3), ("💥", 4), ("PLAIN", 5)):
        assert [row["row"] for row in reader.rollouts(RolloutQuery(text=needle)).rows] == [place]
    assert reader.rollouts(RolloutQuery(text='", "')).rows == []


def written(folder: Path, steps: Mapping[int, list[Row]]) -> Path:
    """A run folder with these rollouts."""
    log = RunLog(folder)
    log.start({"steps": len(steps), "task": "t", "base_model": "m"}, resume=False)
    for step, rows in steps.items():
        log.append_rollouts(step, rows)
    return folder


def plain_row(step: int, place: int, **fields: Any) -> Row:
    return {
        "step": step,
        "group": place // 2,
        "item": place,
        "prompt": "p",
        "text": f"{step}.{place}",
        "tokens": [1] * place,
        "logprobs": [-0.5] * place,
        "reward": 0.5,
        "advantage": 0.0,
        **fields,
    }


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_a_reader_keeps_up_with_logs_that_grow_by_any_number_of_bytes(
    runs: dict[str, Path], tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    source, folder = runs["mixed"], tmp_path_factory.mktemp("live")
    shutil.copy(source / "config.json", folder)
    reader = RunReader(folder)
    names = [
        "rollouts.jsonl",
        "rollouts.index",
        "metrics.jsonl",
        "evaluations.jsonl",
        "findings.jsonl",
        "checkpoints.jsonl",
        "tokens.jsonl",
    ]
    seen = set()
    for share in [*sorted(data.draw(st.lists(st.floats(0, 1), max_size=4))), 1.0]:
        for name in names:
            whole = (source / name).read_bytes()
            # The index comes after its rows, as it is written.
            part = share * 0.99 if name == "rollouts.index" and share < 1 else share
            (folder / name).write_bytes(whole[: int(part * len(whole))])
        assert_answers_as_a_full_read(reader, folder)
        seen.add(reader.version())
    assert reader.rollouts(RolloutQuery(limit=1)).total == len(read_all(source))
    assert reader.version() in seen


def test_a_resumed_run_is_read_anew_even_if_its_log_is_longer_than_when_it_was_cut(
    runs: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MINT_HOME", str(runs["cut"].parent / "home"))
    folder = tmp_path / "run"
    shutil.copytree(runs["cut"], folder)
    config = MIXED.changed(run_dir=folder)
    reader = RunReader(folder)
    assert_answers_as_a_full_read(reader, folder)
    before = reader.version()
    run_grpo(Mixed(), config, resume=True)
    assert reader.version() != before
    assert_answers_as_a_full_read(reader, folder)
    assert (reader.summary().state, reader.summary().step) == ("finished", 5)


def test_rows_that_were_cut_off_while_they_are_being_read_are_left_out(tmp_path: Path) -> None:
    folder = written(tmp_path, {step: [plain_row(step, place) for place in range(4)] for step in (1, 2)})
    reader = RunReader(folder)
    assert reader.rollouts(RolloutQuery()).total == 8
    first_step = (folder / "rollouts.jsonl").read_bytes().splitlines(keepends=True)[:4]
    with (folder / "rollouts.jsonl").open("r+b") as file:
        file.truncate(len(b"".join(first_step)) + 5)
    assert [row["step"] for row in reader.rollouts(RolloutQuery()).rows] == [1] * 4
    assert reader.rows(2) == []


@pytest.mark.parametrize("entries", [0, 1, 4, 5, 8])
def test_rows_that_the_index_lacks_are_read_all_the_same(tmp_path: Path, entries: int) -> None:
    folder = written(tmp_path, {step: [plain_row(step, place) for place in range(4)] for step in (1, 2, 3)})
    index = folder / "rollouts.index"
    index.write_bytes(index.read_bytes()[: entries * ENTRY.itemsize + 7])
    assert_reads_rows(RunReader(folder), folder)


def test_an_index_that_points_beyond_its_rows_is_not_believed(tmp_path: Path) -> None:
    folder = written(tmp_path, {step: [plain_row(step, place) for place in range(4)] for step in (1, 2, 3)})
    rollouts = folder / "rollouts.jsonl"
    lines = rollouts.read_bytes().splitlines(keepends=True)
    rollouts.write_bytes(b"".join(lines[:6]) + lines[6][:20])
    reader = RunReader(folder)
    assert_reads_rows(reader, folder)
    assert reader.rollouts(RolloutQuery()).total == 6


@pytest.mark.parametrize("field", ["offset", "size", "row", "step_rows"])
def test_an_index_entry_that_contradicts_its_neighbours_is_not_believed(tmp_path: Path, field: str) -> None:
    folder = written(tmp_path, {step: [plain_row(step, place) for place in range(4)] for step in (1, 2)})
    index = folder / "rollouts.index"
    entries = np.fromfile(index, dtype=ENTRY)
    entries[field][5] += 1
    index.write_bytes(entries.tobytes())
    assert_reads_rows(RunReader(folder), folder)


def test_an_index_of_zeros_is_not_believed(tmp_path: Path) -> None:
    """A loss of power can leave a file of the right length without its content."""
    folder = written(tmp_path, {step: [plain_row(step, place) for place in range(4)] for step in (1, 2)})
    index = folder / "rollouts.index"
    index.write_bytes(bytes(index.stat().st_size))
    assert_reads_rows(RunReader(folder), folder)


def assert_reads_rows(reader: RunReader, folder: Path) -> None:
    rows = read_all(folder)
    assert reader.steps() == sorted(by_step(rows))
    assert reader.rollouts(RolloutQuery(limit=1_000)).rows == naive_entries(rows)


def test_a_step_that_is_still_being_written_grows_until_its_index_entries_come(tmp_path: Path) -> None:
    folder = written(tmp_path, {1: [plain_row(1, place) for place in range(4)]})
    reader, rows = RunReader(folder), [plain_row(2, place, text="same") for place in range(4)]
    lines = [json.dumps(row) + "\n" for row in rows]
    start = (folder / "rollouts.jsonl").stat().st_size
    for place, line in enumerate(lines):
        with (folder / "rollouts.jsonl").open("a") as file:
            file.write(line[:10])
        assert reader.rollouts(RolloutQuery()).total == 4 + place
        with (folder / "rollouts.jsonl").open("a") as file:
            file.write(line[10:])
        assert_reads_rows(reader, folder)
    with (folder / "rollouts.index").open("ab") as file:
        file.write(step_entries(2, rows, [len(line) for line in lines], start).tobytes())
    assert_reads_rows(reader, folder)
    RunLog(folder).append_rollouts(3, [plain_row(3, 0)])
    assert_reads_rows(reader, folder)


@pytest.mark.parametrize("most", [1, 2, 3, 1_000])
def test_a_shortened_row_is_the_row_with_its_first_tokens(runs: dict[str, Path], most: int) -> None:
    lines = [line for run in runs.values() for line in (run / "rollouts.jsonl").read_bytes().splitlines()]
    assert lines
    for line in lines:
        whole = json.loads(line)
        cut = {name: whole[name][:most] for name in ("tokens", "logprobs") if name in whole}
        assert shortened_row(line, most) == {**whole, **cut}
        assert token_count(line) == len(whole.get("tokens", ()))


def test_a_light_row_is_the_row_without_its_ids_and_logprobs(runs: dict[str, Path]) -> None:
    for line in (runs["mixed"] / "rollouts.jsonl").read_bytes().splitlines(keepends=True):
        whole, light = json.loads(line), light_row(line)
        assert len(light.pop("tokens", ())) == len(whole.pop("tokens", ()))
        assert not light.pop("logprobs", ())
        assert light == {name: value for name, value in whole.items() if name != "logprobs"}


def test_no_more_than_64_bytes_are_kept_of_a_rollout(tmp_path: Path) -> None:
    steps = {step: [plain_row(step, place % 8, text="x" * 100) for place in range(64)] for step in range(1, 320)}
    folder = written(tmp_path, steps)
    for is_indexed in (True, False):
        if not is_indexed:
            (folder / "rollouts.index").unlink()
        index = RolloutIndex(folder)
        index.refresh()
        assert len(index.entries) == 64 * 319
        assert (index.entries if index.entries.base is None else index.entries.base).nbytes <= 64 * 64 * 319


def test_the_history_of_an_item_has_every_visit_with_its_rewards(runs: dict[str, Path]) -> None:
    reader, rows = RunReader(runs["mixed"]), read_all(runs["mixed"])
    for item in {row["item"] for row in rows}:
        visits = reader.item_history(item)
        found = [(visit["step"], visit["group"], row) for visit in visits for row in visit["rows"]]
        assert found == [
            (row["step"], row["group"], place)
            for of_step in by_step(rows).values()
            for place, row in enumerate(of_step)
            if row["item"] == item
        ]
        for visit in visits:
            of_step = by_step(rows)[visit["step"]]
            assert visit["rewards"] == [of_step[place].get("reward") for place in visit["rows"]]
    assert reader.item_history(10**6) == []


def test_the_pieces_of_a_rollout_join_to_what_it_said(runs: dict[str, Path]) -> None:
    reader = RunReader(runs["mixed"])
    rows = [row for row in read_all(runs["mixed"]) if row.get("tokens")]
    assert rows
    for row in rows:
        pieces = reader.pieces(row["tokens"])
        plain = "".join(piece["text"] for piece in pieces if not piece["special"])
        assert plain == row["text"] or "\ufffd" in plain
    assert reader.pieces([10**7]) == [{"text": "⟨10000000⟩", "special": False}]


def test_the_summary_says_where_a_run_stands(runs: dict[str, Path]) -> None:
    metrics, evaluations = read_all(runs["mixed"], "metrics.jsonl"), read_all(runs["mixed"], "evaluations.jsonl")
    summary = RunReader(runs["mixed"]).summary()
    assert (summary.name, summary.state, summary.error) == ("mixed", "finished", None)
    assert (summary.task, summary.base_model, summary.step, summary.steps) == ("Mixed", "mint/tiny", 5, 5)
    assert (summary.reward, summary.success) == (metrics[-1]["reward/mean"], metrics[-1]["success/rate"])
    assert summary.best_reward == max(row["reward/mean"] for row in metrics)
    assert summary.heldout is not None
    assert summary.heldout == {name: evaluations[-1][name] for name in summary.heldout}
    assert (summary.heldout["when"], summary.heldout["temperature"]) == ("after", 1.0)
    tokens, seconds = (
        sum(sum(row[name] for name in names) for row in metrics)
        for names in (["rollouts/tokens"], ["time/rollouts_s", "time/train_s"])
    )
    assert summary.tokens_per_s == pytest.approx(tokens / seconds)
    findings = read_all(runs["mixed"], "findings.jsonl")
    assert sum(summary.findings.values()) == len({row["code"] for row in findings}) > 0
    assert summary.began_at <= metrics[0]["time/unix_s"] <= metrics[-1]["time/unix_s"] <= summary.updated_at
    cut = RunReader(runs["cut"]).summary()
    assert (cut.state, cut.error, cut.step) == ("stopped", "interrupted by Ctrl-C", 3)
    assert RunReader(runs["old"]).summary().state == "finished"


def test_a_run_that_fails_says_why(tmp_path: Path) -> None:
    def fail() -> None:
        raise RuntimeError("the disk is full")

    config = MIXED.changed(run_dir=tmp_path, steps=3, batch_size=2, heldout_size=0)
    with pytest.raises(RuntimeError, match="disk"):
        run_grpo(Mixed(), config, on_progress=at_step(1, fail))
    summary = RunReader(tmp_path).summary()
    assert (summary.state, summary.error, summary.step) == ("failed", "RuntimeError: the disk is full", 1)
    with pytest.raises(InvalidRequestError, match="resume=True"):
        run_grpo(Mixed(), config)
    assert RunReader(tmp_path).summary() == summary, "a refusal is not an end of that run"


def test_a_run_that_has_just_begun_has_a_summary(tmp_path: Path) -> None:
    RunLog(tmp_path).start({"task": "t", "base_model": "m", "steps": 3}, resume=False)
    reader = RunReader(tmp_path)
    assert reader.summary().state == "died"
    with recorded_process(tmp_path):
        summary = reader.summary()
    assert (summary.state, summary.step, summary.reward, summary.heldout) == ("running", 0, None, None)
    assert reader.summary().state == "finished"
    assert (reader.steps(), reader.metrics(), reader.rows(1), reader.pieces([])) == ([], [], [], [])
    assert reader.rollouts(RolloutQuery()).rows == []
    assert reader.columns(["reward/mean"]) == {"step": [], "reward/mean": []}


@settings(max_examples=60, deadline=None)
@given(
    rows=st.lists(
        st.dictionaries(
            st.sampled_from(["a", "b", "c"]),
            st.floats(-1e300, 1e300)
            | st.sampled_from([math.nan, math.inf, -math.inf])
            | st.integers(-(2**40), 2**40)
            | st.none()
            | st.text(max_size=3)
            | st.just(10**400),
        ),
        max_size=12,
    ),
    size=st.integers(1, 5),
    since=st.integers(0, 12),
)
def test_metrics_come_back_as_they_were_whatever_a_step_has(rows: list[Row], size: int, since: int) -> None:
    rows = [{"step": float(step), **row} for step, row in enumerate(rows, 1)]
    columns = MetricColumns()
    for first in range(0, len(rows), size):
        columns.add(rows[first : first + size])
    found = [columns.row(place) for place in columns.places(since)]
    assert [row.keys() for row in found] == [row.keys() for row in rows[since:]]
    for one, other in zip(found, rows[since:], strict=True):
        assert all(one[name] == value or value != value for name, value in other.items())
    for name in ("step", "a", "b", "c"):
        charted = [row.get(name) for row in rows[since:]]
        assert columns.column(name, columns.places(since)) == [
            value if isinstance(value, float | int) and abs(value) < 1e308 else None for value in charted
        ]


def test_threads_read_a_run_that_is_being_written(tmp_path: Path) -> None:
    folder = written(tmp_path, {1: [plain_row(1, place) for place in range(8)]})
    reader, log, done = RunReader(folder), RunLog(folder), threading.Event()
    wrong: list[BaseException] = []

    def watch() -> None:
        try:
            while not done.is_set():
                page = reader.rollouts(RolloutQuery(sort="-length", limit=1_000))
                assert page.total == len(page.rows)
                assert page.total % 8 == 0
                assert {len(reader.rows(step)) for step in reader.steps()} == {8}
                steps = reader.columns()["step"]
                assert steps == list(range(2, 2 + len(steps)))
        except BaseException as error:
            wrong.append(error)
            raise

    watchers = [threading.Thread(target=watch) for _ in range(4)]
    for watcher in watchers:
        watcher.start()
    for step in range(2, 40):
        log.append_rollouts(step, [plain_row(step, place) for place in range(8)])
        log.append("metrics.jsonl", {"step": float(step)})
    done.set()
    for watcher in watchers:
        watcher.join()
    assert not wrong
    assert_reads_rows(reader, folder)


@pytest.mark.parametrize(
    "fields",
    [{"flags": frozenset({"bad"})}, {"without": frozenset({"x"})}, {"sort": "name"}, {"offset": -1}, {"limit": -1}],
)
def test_a_question_that_makes_no_sense_is_refused(fields: Row) -> None:
    with pytest.raises(InvalidRequestError, match=next(iter(fields))):
        RolloutQuery(**fields)


def test_a_folder_without_a_run_is_not_found(tmp_path: Path) -> None:
    with pytest.raises(NotFoundError, match=r"config\.json"):
        RunReader(tmp_path)
    RunLog(tmp_path).start({"steps": 1}, resume=False)
    with pytest.raises(NotFoundError, match="evaluation"):
        RunReader(tmp_path).examples(0)


def test_numbers_that_are_none_are_gaps_in_charts(tmp_path: Path) -> None:
    log = RunLog(written(tmp_path, {}))
    log.append_all(
        "metrics.jsonl", [{"step": 1, "a": math.nan}, {"step": 2, "a": math.inf}, {"step": 3}, {"step": 4, "a": 2}]
    )
    reader = RunReader(tmp_path)
    assert reader.columns(["a", "b"], since=1) == {"step": [2, 3, 4], "a": [None, None, 2], "b": [None, None, None]}
    assert np.isnan(reader.metrics()[0]["a"])


def test_a_finding_that_became_more_severe_is_counted_once(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({"task": "math", "steps": 9}))
    noted = [("truncation", "warning", 1), ("few_prompts", "info", 1), ("truncation", "error", 3)]
    rows = [
        {"code": code, "severity": severity, "step": step, "evidence": "", "remedy": ""}
        for code, severity, step in noted
    ]
    (folder / "findings.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    reader = RunReader(folder)
    assert reader.summary().findings == {"error": 1, "warning": 0, "info": 1}
    assert [row["step"] for row in latest_findings(reader.findings())] == [3, 1]
