"""Reads a run folder, also while it is being written: metrics, queries over rollouts, and the state of the run.

Reads only what is new since the last call; of a long log, at first only the steps that are asked for. Keeps the metrics
as columns, 56 bytes per rollout, and the text of each token id; never the rollouts themselves. Writes nothing: a run
may be writing the same files.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import threading
import time
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice, pairwise
from pathlib import Path
from typing import Any, BinaryIO, Literal

import numpy as np

from mint.errors import InvalidRequestError, NotFoundError
from mint.runs.damage import check_rows, read_config
from mint.runs.interrupt import is_stop_requested
from mint.runs.json_lines import Tail, decode_lines
from mint.runs.labels import read_labels
from mint.runs.log import EFFECTIVE
from mint.runs.metric_columns import MetricColumns, finite_or_none
from mint.runs.metric_lines import MetricLines
from mint.runs.process import PROCESS, RunProcess, State, is_stale, read_process, run_state, state_notice
from mint.runs.rollout_index import FLAGS, INDEX, RolloutIndex, flag_names
from mint.runs.rollout_lines import ROLLOUTS, TOKENS, light_row, shortened_row, token_count
from mint.runs.rollout_query import SORTS, RolloutPage, RolloutQuery, TextSearch, select

__all__ = ["FLAGS", "SORTS", "RolloutPage", "RolloutQuery", "RunReader", "RunSummary", "unreadable_summary"]

LOGS = (
    "metrics.jsonl",
    ROLLOUTS,
    "evaluations.jsonl",
    "findings.jsonl",
    "checkpoints.jsonl",
    "warnings.jsonl",
    "tokens.jsonl",
    INDEX,
    PROCESS,
)
EXCERPT_CHARACTERS = 400
SEARCH_BYTES = 256 << 20
"""The most bytes that one page of a text search reads."""

SEARCH_S = 0.25
"""The longest time that it takes."""

HEAD_BYTES = 2_048
RECENT_STEPS = 10
EXAMPLES = b', "examples": ['
BATCH_LINES = 256
FEW_STEPS = 1_000
FEW_COLUMNS = 6
"""Up to so many steps or metrics of a long log are decoded alone; for more of them, the whole log is."""


@dataclass(frozen=True)
class RunSummary:
    """A run in one row.

    `step` is the last finished one of `steps`; `reward` and `success` are those of that step, `best_reward` is that of
    the best step. `heldout` is the latest held-out evaluation, at temperature 1 if there is one. `tokens_per_s` counts
    sampled tokens over the time of the last ten steps, including training. Times are unix seconds. `is_stale`: it runs,
    but has been silent for long. `notice` is one sentence about a state that needs attention, mostly empty. `models`
    are the ids of the service's models that it trained, as its checkpoints name them: one, and another for each resume.
    The last four are its `RunLabels`.
    """

    name: str
    folder: str
    state: State | Literal["unreadable"]
    task: str
    base_model: str
    step: int
    steps: int
    reward: float | None
    best_reward: float | None
    success: float | None
    heldout: dict[str, Any] | None
    tokens_per_s: float | None
    findings: dict[str, int]
    began_at: float
    updated_at: float
    error: str | None
    is_stale: bool = False
    notice: str = ""
    models: tuple[str, ...] = ()
    title: str = ""
    tags: tuple[str, ...] = ()
    note: str = ""
    is_archived: bool = False


def _task_of(config: Mapping[str, Any]) -> str:
    """The task's name on the command line; for a run started from Python, its class."""
    spec = config.get("task_spec")
    return str(spec["task"] if isinstance(spec, dict) and "task" in spec else config.get("task", ""))


def latest_findings(rows: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """One finding of each code, the latest: a finding that became more severe was noted again."""
    return list({row.get("code"): row for row in rows}.values())


def unreadable_summary(folder: Path, reason: str) -> RunSummary:
    """The row of a run whose folder is damaged; `reason` says which file to mend."""
    try:
        updated_at = (folder / "config.json").stat().st_mtime
    except OSError:  # the folder was removed meanwhile
        updated_at = 0.0
    return RunSummary(
        name=folder.name,
        folder=str(folder),
        state="unreadable",
        task="",
        base_model="",
        step=0,
        steps=0,
        reward=None,
        best_reward=None,
        success=None,
        heldout=None,
        tokens_per_s=None,
        findings=dict.fromkeys(("error", "warning", "info"), 0),
        began_at=updated_at,
        updated_at=updated_at,
        error=reason,
        notice=f"It cannot be read: {reason}",
    )


class RunReader:
    """Reads one run. Thread-safe; every call sees all that has been written before it.

    A call that meets a damaged log raises InvalidRequestError, which names the file. So does the next one, until the
    file is mended.
    """

    def __init__(self, folder: Path, *, search_bytes: int = SEARCH_BYTES, search_s: float = SEARCH_S) -> None:
        """`search_bytes` and `search_s` limit one page of a text search.

        Raises:
            NotFoundError: the folder holds no run.
            InvalidRequestError: its config.json is damaged.
        """
        self.folder = Path(folder)
        self.config = read_config(self.folder)
        self.search_bytes = search_bytes
        self.search_s = search_s
        self._config_at = (self.folder / "config.json").stat().st_mtime
        self._lock = threading.RLock()
        self._process: RunProcess | None = None
        self._process_seen: tuple[int, int] | None = None
        self._restart()

    def _restart(self) -> None:
        self._tails = {name: Tail(self.folder / name) for name in LOGS}
        self._logs: dict[str, list[dict[str, Any]]] = {}
        self._example_offsets: list[int] = []
        self._metrics = MetricColumns()
        self._lines: MetricLines | None = None
        self._pieces: dict[int, dict[str, Any]] = {}
        self._index = RolloutIndex(self.folder)

    def effective(self) -> dict[str, Any]:
        """The settings that took effect on the server; empty if the run has not written them."""
        try:
            found = json.loads((self.folder / EFFECTIVE).read_text())
        except (OSError, ValueError):
            return {}
        return found if isinstance(found, dict) else {}

    # --- the run as a whole --------------------------------------------------------------------------------------

    def version(self) -> str:
        """A hash that changes when a log grows or the run's state changes; takes microseconds."""
        with self._current():
            seen = [(status.st_size, status.st_mtime_ns) for status in self._statuses()]
            return hashlib.blake2s(repr((seen, self._state_of_process())).encode(), digest_size=8).hexdigest()

    def summary(self) -> RunSummary:
        """The run in one row."""
        with self._current():
            metrics = self._sought_metrics()
            last = metrics.row(-1) if len(metrics) else {}
            recent = _recent_steps(metrics)
            state = self._state(last)
            updated_at = self._updated_at()
            silent_s = time.time() - updated_at
            stale = is_stale(state, silent_s=silent_s, slowest_step_s=_slowest_step_s(recent))
            step = int(last.get("step", 0))
            error = self._process.error if self._process else None
            severities = [finding.get("severity", "info") for finding in latest_findings(self._log("findings.jsonl"))]
            return RunSummary(
                name=self.folder.name,
                folder=str(self.folder),
                state=state,
                task=_task_of(self.config),
                base_model=str(self.config.get("base_model", "")),
                step=step,
                steps=int(self.config.get("steps") or 0),
                reward=finite_or_none(last.get("reward/mean")),
                best_reward=_best_reward(metrics),
                success=finite_or_none(last.get("success/rate")),
                heldout=self._latest_evaluation(),
                tokens_per_s=_tokens_per_s(recent),
                findings={severity: severities.count(severity) for severity in ("error", "warning", "info")},
                began_at=self._began_at(metrics),
                updated_at=updated_at,
                error=error,
                is_stale=stale,
                notice=state_notice(
                    state,
                    step=step,
                    error=error,
                    stale_for_s=silent_s if stale else None,
                    is_ending=is_stop_requested(self.folder),
                ),
                models=self.models(),
                **vars(read_labels(self.folder)),
            )

    def _state_of_process(self) -> State | None:
        """The state of the run's process; None if none was recorded."""
        if self._process is None:
            return None
        return run_state(self._process, is_complete=False, updated_at=self._updated_at(), now=time.time())

    def _state(self, last: dict[str, Any]) -> State:
        evaluations = self._log("evaluations.jsonl")
        is_over = any(row.get("when") == "after" for row in evaluations)
        planned = self.config.get("steps")
        is_complete = is_over or (bool(planned) and last.get("step") == planned)
        return self._state_of_process() or run_state(None, is_complete=is_complete, updated_at=0.0, now=0.0)

    def _latest_evaluation(self) -> dict[str, Any] | None:
        evaluations = [row for row in self._log("evaluations.jsonl") if finite_or_none(row.get("mean")) is not None]
        if not evaluations:
            return None
        last = evaluations[-1]
        latest = [row for row in evaluations if row["step"] == last["step"] and row["when"] == last["when"]]
        sampled = [row for row in latest if row.get("temperature") == 1.0]
        chosen = (sampled or latest)[-1]
        return {
            name: chosen.get(name)
            for name in ("step", "when", "temperature", "metric", "mean", "low", "high", "n", "success")
            if name in chosen
        }

    def _began_at(self, metrics: MetricColumns | MetricLines) -> float:
        first = finite_or_none(metrics.row(0).get("time/unix_s")) if len(metrics) else None
        begun = [self._config_at] if first is None else [self._config_at, first]
        return min([*begun, self._process.began_at] if self._process else begun)

    def _updated_at(self) -> float:
        return max([self._config_at, *(status.st_mtime for status in self._statuses())])

    def _statuses(self) -> Iterator[os.stat_result]:
        place = str(self.folder)
        for name in LOGS:
            try:
                yield os.stat(f"{place}/{name}")  # noqa: PTH116
            except FileNotFoundError:
                continue

    # --- its logs ------------------------------------------------------------------------------------------------

    def metrics(self, since: int = 0) -> list[dict[str, Any]]:
        """The metrics of the steps after `since`."""
        with self._current():
            metrics = self._sought_metrics() if since else self._refreshed_metrics()
            places = metrics.places(since)
            if len(places) > FEW_STEPS:
                metrics = self._refreshed_metrics()
            return [metrics.row(place) for place in places]

    def step_count(self) -> int:
        """How many steps have metrics."""
        with self._current():
            return len(self._sought_metrics())

    def last_step(self) -> int:
        """The last step that has metrics; 0 if there is none."""
        with self._current():
            metrics = self._sought_metrics()
            return int(metrics.row(-1)["step"]) if len(metrics) else 0

    def metric_names(self) -> list[str]:
        """The names of all metrics that a step has, in the order of their first appearance."""
        with self._current():
            return self._refreshed_metrics().names

    def columns(
        self,
        names: Sequence[str] | None = None,
        since: int = 0,
        until: float = math.inf,
        most: int | None = None,
    ) -> dict[str, list[float | None]]:
        """One list per metric over the steps after `since` up to `until`, always including `step`.

        A missing or infinite number is None.

        `names` None selects all metrics. Of more than `most` steps, every nth one is chosen, and the last.
        """
        with self._current():
            is_part = most is not None or (names is not None and len(names) <= FEW_COLUMNS)
            metrics = self._sought_metrics() if is_part else self._refreshed_metrics()
            wanted = metrics.names if names is None else names
            places = metrics.places(since, until, most)
            return metrics.columns(list(dict.fromkeys(["step", *wanted])), places)

    def evaluations(self) -> list[dict[str, Any]]:
        """The held-out evaluations, oldest first, without their `examples`."""
        with self._current():
            return [dict(row) for row in self._log("evaluations.jsonl")]

    def examples(self, place: int) -> list[dict[str, Any]]:
        """The examples of one evaluation, by its place in `evaluations()`; each is a row like that of a rollout.

        Raises:
            NotFoundError: there is no such evaluation.
        """
        with self._current():
            evaluations = self._log("evaluations.jsonl")
            if not 0 <= place < len(evaluations):
                raise NotFoundError(
                    "has no such evaluation", field="run", value=str(self.folder), remedy="List the evaluations first"
                )
            with (self.folder / "evaluations.jsonl").open("rb") as file:
                file.seek(self._example_offsets[place])
                return list(json.loads(file.readline()).get("examples", ()))

    def findings(self) -> list[dict[str, Any]]:
        """The findings noted while the run ran, oldest first."""
        with self._current():
            return [dict(row) for row in self._log("findings.jsonl")]

    def checkpoints(self) -> list[dict[str, Any]]:
        """The saved steps, oldest first."""
        with self._current():
            return [dict(row) for row in self._log("checkpoints.jsonl")]

    def models(self) -> tuple[str, ...]:
        """The ids of the service's models in the paths of its checkpoints, oldest first."""
        with self._current():
            paths = (str(row.get("checkpoint")) for row in self._log("checkpoints.jsonl"))
            ids = (path.partition("://")[2].partition("/")[0] for path in paths)
            return tuple(dict.fromkeys(model for model in ids if model))

    def warnings(self) -> list[dict[str, Any]]:
        """The server's warnings by step, oldest first."""
        with self._current():
            return [dict(row) for row in self._log("warnings.jsonl")]

    def pieces(self, ids: Iterable[int]) -> list[dict[str, Any]]:
        """The text of each token id, and whether it is special; `⟨id⟩` for an id that this run has not logged.

        An id that is a part of a character also has its `bytes` in hexadecimal.
        """
        with self._current():
            for rows in self._new_rows("tokens.jsonl", self._pieces.clear):
                self._pieces.update(
                    (row["id"], {name: row[name] for name in ("text", "special", "bytes") if name in row})
                    for row in rows
                )
            return [dict(self._pieces.get(one) or {"text": f"⟨{one}⟩", "special": False}) for one in ids]

    # --- its rollouts --------------------------------------------------------------------------------------------

    def steps(self) -> list[int]:
        """The steps that have rollouts, in order."""
        with self._current():
            self._index.refresh()
            return self._index.steps()

    def items(self) -> list[int]:
        """The items of the dataset that have rollouts, in order."""
        with self._current():
            self._index.refresh()
            return np.unique(self._index.entries["item"]).tolist()

    def group_rows(self, step: int, group: int, *, together: int) -> list[dict[str, Any]]:
        """The rows of one group as `rows` has them, with the first tokens and logprobs of each: all together have at
        most `together` tokens. `length` says how many a row has."""
        with self._current():
            self._index.refresh()
            entries = self._index.of_step(step)
        lines = self._lines_of(entries[entries["group"] == group])
        lengths = [token_count(line) for line in lines]
        try:
            if sum(lengths) <= together:
                rows = decode_lines(lines)
            else:
                rows = [shortened_row(line, max(1, together // len(lines))) for line in lines]
        except ValueError:
            return []  # The run was resumed from before this step meanwhile, and its rows were cut off.
        places = (int(at) for at in entries["row"][entries["group"] == group])
        found = zip(rows, places, lengths, strict=True)
        return [
            {**row, "row": place, "length": max(length, len(row.get("tokens") or ()))}
            for row, place, length in found
            if row.get("step") == step
        ]

    def has_rollouts(self, step: int) -> bool:
        """Whether a step has rollouts."""
        with self._current():
            self._index.refresh()
            return bool(len(self._index.of_step(step)))

    def rows(
        self, step: int, *, light: bool = False, group: int | None = None, row: int | None = None
    ) -> list[dict[str, Any]]:
        """The rows of a step as they were logged, each with its place as `row`; empty for a step without rollouts.

        `group` and `row` select those of one group, or one row.

        `light` is several times faster: `tokens` is a range of the same length, `logprobs` is empty.
        """
        with self._current():
            self._index.refresh()
            entries = self._index.of_step(step)
        if group is not None or row is not None:
            return self._chosen_rows(entries, step, light=light, group=group, row=row)
        if not len(entries):
            return []
        # The rows of a step lie together in the file: one read gets all of them.
        with (self.folder / ROLLOUTS).open("rb") as file:
            file.seek(entries["offset"][0])
            block = file.read(int(entries["size"].sum()))
        ends = entries["size"].cumsum().tolist()
        lines = [block[start:end] for start, end in pairwise([0, *ends])]
        try:
            rows = [light_row(line) for line in lines] if light else decode_lines(lines)
        except ValueError:
            return []  # The run was resumed from before this step meanwhile, and its rows were cut off.
        return [{**row, "row": place} for place, row in enumerate(rows) if row.get("step") == step]

    def _chosen_rows(
        self, entries: np.ndarray, step: int, *, light: bool, group: int | None, row: int | None
    ) -> list[dict[str, Any]]:
        wanted = np.ones(len(entries), dtype=bool)
        if group is not None:
            wanted &= entries["group"] == group
        if row is not None:
            wanted &= entries["row"] == row
        places = np.flatnonzero(wanted)
        if not len(places):
            return []
        lines = self._lines_of(entries[places])
        try:
            rows = [light_row(line) for line in lines] if light else decode_lines(lines)
        except ValueError:
            return []  # The run was resumed from before this step meanwhile, and its rows were cut off.
        numbered = zip(rows, (int(at) for at in entries["row"][places]), strict=True)
        return [{**found, "row": place} for found, place in numbered if found.get("step") == step]

    def _lines_of(self, entries: np.ndarray) -> list[bytes]:
        if not len(entries):
            return []
        with (self.folder / ROLLOUTS).open("rb") as file:
            return [os.pread(file.fileno(), int(at["size"]), int(at["offset"])) for at in entries]

    def rollouts(self, query: RolloutQuery) -> RolloutPage:
        """A page of the rollouts that a query selects: numbers, names of flags, and the beginnings of the texts."""
        with self._current():
            self._index.refresh()
            entries = self._index.entries
        places = select(entries, query)
        total = len(places)
        if not total:
            return RolloutPage(0, [], None)
        next_offset = query.offset + query.limit
        with (self.folder / ROLLOUTS).open("rb") as file:
            if query.text:
                return self._search(file, entries, places[query.offset :], query)
            rows = [_excerpt(entry, row) for entry, row in _read(file, entries[places[query.offset : next_offset]])]
        return RolloutPage(total, rows, next_offset if next_offset < total else None)

    def _search(self, file: BinaryIO, entries: np.ndarray, places: np.ndarray, query: RolloutQuery) -> RolloutPage:
        search = TextSearch(query.text)
        began = time.monotonic()
        read = 0
        found: list[dict[str, Any]] = []
        for count, place in enumerate(places):
            if len(found) == query.limit:
                return RolloutPage(None, found, query.offset + count)
            # `count and`: every page makes some progress, however slow the disk.
            if count and (read > self.search_bytes or time.monotonic() - began > self.search_s):
                return RolloutPage(None, found, query.offset + count, is_complete=False)
            head = _line_head(file, entries[place])
            read += len(head)
            if search.found_in(head):
                found += [_excerpt(entry, row) for entry, row in _read(file, entries[place : place + 1])]
        return RolloutPage(len(found) if query.offset == 0 else None, found, None)

    def item_history(self, item: int) -> list[dict[str, Any]]:
        """Every visit to one item of the dataset, in order: step, group, places of the rows, and their rewards."""
        with self._current():
            self._index.refresh()
            entries = self._index.entries[self._index.entries["item"] == item]
        visits: dict[tuple[int, int], dict[str, Any]] = {}
        for entry in entries:
            step = int(entry["step"])
            group = int(entry["group"])
            visit = visits.setdefault((step, group), {"step": step, "group": group, "rows": [], "rewards": []})
            visit["rows"].append(int(entry["row"]))
            visit["rewards"].append(finite_or_none(float(entry["reward"])))
        return list(visits.values())

    # --- reading what is new -----------------------------------------------------------------------------------------

    @contextmanager
    def _current(self) -> Generator[None]:
        """Holds the lock. Starts over when another process has resumed the run, because it may have cut the logs."""
        with self._lock:
            try:
                status = (self.folder / PROCESS).stat()
                seen = status.st_ino, status.st_mtime_ns
            except FileNotFoundError:
                seen = None
            if seen != self._process_seen:
                before = self._process
                self._process = read_process(self.folder)
                if _identity(before) != _identity(self._process):
                    self._restart()
                self._process_seen = seen
            yield

    def _refreshed_metrics(self) -> MetricColumns:
        def restart() -> None:
            self._metrics = MetricColumns()

        self._lines = None
        for rows in self._new_rows("metrics.jsonl", restart):
            self._metrics.add(rows)
        return self._metrics

    def _sought_metrics(self) -> MetricColumns | MetricLines:
        """The metrics for a question about few steps: of a long log that was never read, only those are decoded."""
        if self._tails["metrics.jsonl"].inode is not None:
            return self._refreshed_metrics()
        if self._lines is None:
            self._lines = MetricLines.open(self.folder / "metrics.jsonl")
        return self._lines if self._lines is not None and self._lines.is_current() else self._refreshed_metrics()

    def _log(self, name: str) -> list[dict[str, Any]]:
        """All rows of a small log, up to date."""
        rows = self._logs.setdefault(name, [])
        if name == "evaluations.jsonl":
            self._read_evaluations(rows)
        else:
            for new in self._new_rows(name, rows.clear):
                rows += new
        return rows

    def _read_evaluations(self, rows: list[dict[str, Any]]) -> None:
        tail = self._tails["evaluations.jsonl"]
        is_void, lines = tail.poll()
        if is_void:
            rows.clear()
            self._example_offsets.clear()
        for line in lines:
            row = _without_examples(line)
            if row is not None:
                self._check("evaluations.jsonl", [row])
                rows.append(row)
                self._example_offsets.append(tail.offset - len(line))

    def _new_rows(self, name: str, restart: Callable[[], None]) -> Iterator[list[dict[str, Any]]]:
        """The new rows of a log, in batches; calls `restart` first if the earlier rows are void."""
        is_void, lines = self._tails[name].poll()
        if is_void:
            restart()
        while batch := list(islice(lines, BATCH_LINES)):
            rows = [row for row in decode_lines(batch) if isinstance(row, dict)]
            self._check(name, rows)
            yield rows

    def _check(self, name: str, rows: Sequence[Mapping[str, Any]]) -> None:
        try:
            check_rows(self.folder / name, rows)
        except InvalidRequestError:
            self._restart()  # the next call reads these rows again, and is refused, too
            raise


def _identity(process: RunProcess | None) -> tuple[int, float] | None:
    return None if process is None else (process.pid, process.began_at)


def _best_reward(metrics: MetricColumns | MetricLines) -> float | None:
    """The highest mean reward of a step of which at least one rollout was graded."""
    rewards = metrics.column("reward/mean")
    best = max((reward for reward in rewards if reward is not None), default=None)
    if best is None or _is_graded(metrics.row(rewards.index(best))):
        return best
    # A step without a graded rollout has the mean 0, which may lie above all others.
    counts, ungraded = metrics.column("rollouts/count"), metrics.column("rollouts/ungraded")
    graded = [
        reward
        for reward, count, failed in zip(rewards, counts, ungraded, strict=True)
        if reward is not None and (count is None or count > (failed or 0))
    ]
    return max(graded, default=None)


def _is_graded(row: Mapping[str, Any]) -> bool:
    count = finite_or_none(row.get("rollouts/count"))
    return count is None or count > (finite_or_none(row.get("rollouts/ungraded")) or 0)


def _recent_steps(metrics: MetricColumns | MetricLines) -> list[dict[str, Any]]:
    count = len(metrics)
    return [metrics.row(place) for place in range(max(0, count - RECENT_STEPS), count)]


def _slowest_step_s(recent: Sequence[Mapping[str, Any]]) -> float:
    took = (sum(row.get(name) or 0.0 for name in ("time/rollouts_s", "time/train_s")) for row in recent)
    return max(took, default=0.0)


def _tokens_per_s(recent: Sequence[Mapping[str, Any]]) -> float | None:
    seconds = sum(row.get("time/rollouts_s", 0.0) + row.get("time/train_s", 0.0) for row in recent)
    tokens = sum(row.get("rollouts/tokens", 0.0) for row in recent)
    return tokens / seconds if seconds > 0 else None


def _without_examples(line: bytes) -> dict[str, Any] | None:
    """An evaluation without its examples, which are the last and largest field; None for a line that cannot be read."""
    cut = line.find(EXAMPLES)
    try:
        row = json.loads(line if cut < 0 else line[:cut] + b"}")
    except ValueError:
        return None
    return {name: value for name, value in row.items() if name != "examples"} if isinstance(row, dict) else None


def _read(file: BinaryIO, entries: np.ndarray) -> Iterator[tuple[np.void, dict[str, Any]]]:
    """The rows of index entries. Leaves out rows that a resume has cut off meanwhile."""
    for entry in entries:
        line = os.pread(file.fileno(), int(entry["size"]), int(entry["offset"]))
        try:
            row = light_row(line)
        except ValueError:
            continue
        if row.get("step") == entry["step"]:
            yield entry, row


def _line_head(file: BinaryIO, entry: np.void) -> bytes:
    """The line of an entry up to and with the key of its tokens."""
    size = int(entry["size"])
    offset = int(entry["offset"])
    head = os.pread(file.fileno(), min(size, HEAD_BYTES), offset)
    cut = head.find(TOKENS)
    if cut < 0 and size > HEAD_BYTES:
        head += os.pread(file.fileno(), size - HEAD_BYTES, offset + HEAD_BYTES)
        cut = head.find(TOKENS)
    return head if cut < 0 else head[: cut + len(TOKENS)]


def _excerpt(entry: np.void, row: dict[str, Any]) -> dict[str, Any]:
    return {
        **{name: int(entry[name]) for name in ("step", "row", "group", "item")},
        "reward": finite_or_none(float(entry["reward"])),
        "advantage": finite_or_none(float(entry["advantage"])),
        "length": int(entry["length"]),
        "flags": flag_names(int(entry["flags"])),
        "prompt": str(row.get("prompt") or "")[:EXCERPT_CHARACTERS],
        "text": str(row.get("text") or "")[:EXCERPT_CHARACTERS],
        "stop_reason": row.get("stop_reason"),
        "error": None if row.get("error") is None else str(row["error"])[:EXCERPT_CHARACTERS],
    }
