"""The JSON API of the dashboard: one function per URL. They run in threads.

Those below `changes` change a run; the others only read.

`mint.runs.reader` reads the runs; these functions select and combine.
"""

from __future__ import annotations

import json
import math
import shlex
from collections.abc import Mapping, Sequence
from typing import Any
from urllib.parse import parse_qsl

from starlette.datastructures import QueryParams
from starlette.requests import Request

from mint.dashboard.event_streams import EventCursor, cursor_of
from mint.dashboard.finding_evidence import EVIDENCE, NO_EVIDENCE, evidence_of
from mint.dashboard.run_list import MAX_PAGE_RUNS, PAGE_RUNS, RunQuery, parse_sort
from mint.dashboard.state import DashboardState
from mint.errors import BodyTooLargeError, InvalidRequestError, NotFoundError
from mint.rl.analysis.run_analysis import BISECT_METRICS, require_bisect_metric
from mint.runs.interrupt import request_stop
from mint.runs.labels import changed_labels, read_labels, write_labels
from mint.runs.metric_columns import unknown_metric
from mint.runs.reader import RolloutQuery, RunReader, latest_findings

ROOT = "/dashboard/v1"
MAX_ROWS = 500
CHART_POINTS = 1000
"""Steps that a chart gets at once; of a longer run every nth, and a zoom asks for those between."""

PAGE_CHECKPOINTS = 20
GROUP_TOKENS = 16_000
"""The samples of a group come with at most this many tokens together; a single rollout has all of its own."""

PER_TOKEN = frozenset({"tokens", "logprobs", "entropies", "token_advantages"})
LISTED_PROMPT = 4_000
"""A list of groups shows the last characters of each prompt, because prompts of a task begin alike."""

MAX_STEP_ROWS = 1_000_000
WHOLE_NUMBERS = ("step", "first_step", "last_step", "group", "item", "length_min", "length_max", "offset", "limit")
NUMBERS = ("reward_min", "reward_max")
SAMPLED = 1.0
EXPORTS = ("peft", "hf", "gguf-ready")


def runs(dashboard: DashboardState, request: Request) -> dict[str, Any]:
    """A page of the runs that the query selects. Not `is_whole`: some runs were not read yet."""
    return vars(dashboard.runs.page(parse_run_query(request)))


def run(dashboard: DashboardState, request: Request) -> dict[str, Any]:
    """The summary and the settings of one run; `effective` are those that took effect on the server."""
    name, reader = _reader(dashboard, request)
    return {"summary": dashboard.readers.summary(name), "config": reader.config, "effective": reader.effective()}


def columns(dashboard: DashboardState, request: Request) -> dict[str, Any]:
    """The metrics of all steps, or of every nth if there are more than `points`, one list per metric; `cursor` is where
    the live stream continues."""
    name, reader = _reader(dashboard, request)
    wanted = request.query_params.get("names", "")
    names = wanted.split(",") if wanted else None
    since = _whole_number(request.query_params, "since") or 0
    until = _whole_number(request.query_params, "until")
    points = _whole_number(request.query_params, "points")
    # Taken before the logs are read: rows written meanwhile are sent twice rather than never.
    cursor = cursor_of(reader)
    chosen = reader.columns(names, since, math.inf if until is None else until, points)
    if names is not None:
        _require_metrics(reader, [name for name in names if all(value is None for value in chosen[name])])
    return {
        "columns": chosen,
        "evaluations": reader.evaluations(),
        "findings": latest_findings(reader.findings()),
        "summary": dashboard.readers.summary(name),
        "cursor": str(cursor),
    }


def steps(dashboard: DashboardState, request: Request) -> dict[str, Any]:
    """The steps that have rollouts."""
    return {"steps": _reader(dashboard, request)[1].steps()}


def rollouts(dashboard: DashboardState, request: Request) -> dict[str, Any]:
    """A page of the rollouts that the query selects, with the beginnings of their texts."""
    _, reader = _reader(dashboard, request)
    return vars(reader.rollouts(parse_query(dashboard, request)))


def rollout(dashboard: DashboardState, request: Request) -> dict[str, Any]:
    """One whole rollout."""
    _, reader = _reader(dashboard, request)
    step = request.path_params["step"]
    row = request.path_params["row"]
    found = reader.rows(step, row=row)
    if not found and not reader.has_rollouts(step):
        raise _no_rollouts(reader, step)
    if not found:
        raise NotFoundError("is not a rollout of this run", field="rollout", value=f"step {step}, row {row}")
    [whole] = _whole(reader, step, found)
    return {
        **whole,
        "length": len(whole.get("tokens") or ()),
        "is_shortened": False,
        "pieces": _pieces(reader, [whole]),
    }


def groups(dashboard: DashboardState, request: Request) -> dict[str, Any]:
    """The groups of one step: the prompt of each, and the rewards of its samples."""
    _, reader = _reader(dashboard, request)
    return {"groups": _groups(reader, request.path_params["step"])}


def _groups(reader: RunReader, step: int) -> list[dict[str, Any]]:
    found = reader.rows(step, light=True)
    if not found:
        raise _no_rollouts(reader, step)
    return _grouped(found)


def _grouped(found: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    by_group: dict[int, dict[str, Any]] = {}
    for row in found:
        known = by_group.setdefault(
            row["group"],
            {
                "group": row["group"],
                "item": row.get("item"),
                "prompt": row.get("prompt", "")[-LISTED_PROMPT:],
                "rewards": [],
                "rows": [],
                "error": None,
            },
        )
        known["rewards"].append(row.get("reward"))
        known["rows"].append(row["row"])
        known["error"] = known["error"] or row.get("error")
    return [by_group[group] for group in sorted(by_group)]


def group(dashboard: DashboardState, request: Request) -> dict[str, Any]:
    """The whole samples of one group, best first."""
    _, reader = _reader(dashboard, request)
    return _group(reader, request.path_params["step"], request.path_params["group"])


def opening(reader: RunReader, *, step: str, group: str) -> dict[str, Any] | None:
    """What the page of rollouts starts with: the groups of a step, and the samples of one group.

    The last step and its first group with unequal rewards, unless the request names others that exist; None if there
    are no rollouts yet. `missing` is the number of a step that was asked for and has no rollouts, else None.
    """
    steps = reader.steps()
    if not steps:
        return None
    at = int(step) if step.isdecimal() and int(step) in steps else steps[-1]
    rows = reader.rows(at, light=True)
    listed = _grouped(rows)
    if not listed:
        return None  # the run was resumed from before this step meanwhile
    numbers = [one["group"] for one in listed]
    with_signal = (
        one["group"] for one in listed if len({reward for reward in one["rewards"] if reward is not None}) > 1
    )
    chosen = int(group) if group.isdecimal() and int(group) in numbers else next(with_signal, numbers[0])
    return {
        "step": at,
        "groups": listed,
        "group": _sorted_group(at, [row for row in rows if row["group"] == chosen]),
        "missing": int(step) if step.isdecimal() and int(step) != at else None,
        "first_step": steps[0],
        "last_step": steps[-1],
    }


def _group(reader: RunReader, step: int, number: int) -> dict[str, Any]:
    found = reader.group_rows(step, number, together=GROUP_TOKENS)
    if not found and not reader.has_rollouts(step):
        raise _no_rollouts(reader, step)
    if not found:
        raise NotFoundError("is not a group of this run", field="group", value=f"step {step}, group {number}")
    rows = _whole(reader, step, _cut_rows(found))
    return {**_sorted_group(step, rows), "pieces": _pieces(reader, rows)}


def _sorted_group(step: int, rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The rows of one group, best first, and what they share."""
    best_first = sorted(rows, key=lambda row: (row.get("reward") is None, -(row.get("reward") or 0.0), row["row"]))
    first = best_first[0]
    shared = {"item": first.get("item"), "prompt": first.get("prompt", ""), "sample": first.get("sample", "")}
    return {"step": step, "group": first["group"], **shared, "rows": best_first}


def _pieces(reader: RunReader, rows: Sequence[Mapping[str, Any]]) -> dict[int, dict[str, Any]]:
    """The text of each token id that the rows have: once, because a sample has the same ids again and again."""
    ids = list({one for row in rows for one in row.get("tokens") or ()})
    return dict(zip(ids, reader.pieces(ids), strict=True))


def _cut_rows(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The rows of `RunReader.group_rows`, with the other values of each token cut, too; `is_shortened` says which."""
    return [_cut(row) | {"is_shortened": row["length"] > len(row.get("tokens") or ())} for row in rows]


def _cut(row: dict[str, Any]) -> dict[str, Any]:
    most = len(row.get("tokens") or ())
    if most >= row["length"]:
        return row
    cut = {name: values[:most] for name, values in row.items() if name in PER_TOKEN and values}
    return {**row, **cut, "text": str(row.get("text") or "")[:LISTED_PROMPT]}


def item(dashboard: DashboardState, request: Request) -> dict[str, Any]:
    """Every visit to one item of the dataset, with its rewards."""
    _, reader = _reader(dashboard, request)
    wanted = request.path_params["item"]
    return {"item": wanted, "visits": reader.item_history(wanted)}


def examples(dashboard: DashboardState, request: Request) -> dict[str, Any]:
    """The rollouts of one held-out evaluation, by its place in the list of evaluations."""
    _, reader = _reader(dashboard, request)
    return {"rows": reader.examples(request.path_params["place"])}


def findings(dashboard: DashboardState, request: Request) -> dict[str, Any]:
    """The findings, each with metrics to plot and the query for its rollouts. If not `is_whole`, ask again later."""
    name, _ = _reader(dashboard, request)
    found, is_whole = dashboard.diagnoses.of(name)
    return {"findings": [evidence_of(finding) for finding in found], "is_whole": is_whole}


def checkpoints(dashboard: DashboardState, request: Request) -> dict[str, Any]:
    """A page of the checkpoints, newest first, with their held-out evaluations; and the best one of all.

    The best one is the one that the run saved as its best; otherwise, of several evaluated ones, that with the highest
    mean. A single evaluation has nothing to be compared with: then none is the best.
    """
    _, reader = _reader(dashboard, request)
    evaluations = reader.evaluations()
    by_path: dict[str, dict[str, Any]] = {}
    for row in reader.checkpoints():
        by_path[row["checkpoint"]] = {"step": row["step"], "checkpoint": row["checkpoint"]}
    # A run saves its best weights under their own name, which only the evaluations mention.
    for row in evaluations:
        if row.get("checkpoint"):
            by_path[row["checkpoint"]] = {"step": row["step"], "checkpoint": row["checkpoint"]}
    newest = sorted(by_path.values(), key=lambda saved: saved["step"])[::-1]
    by_step = _evaluations_by_step(evaluations)
    for saved in newest:
        saved["heldout"] = evaluation_of(by_step.get(saved["step"], ()))
    named = next((row["checkpoint"] for row in reversed(evaluations) if row.get("checkpoint")), None)
    evaluated = [saved for saved in newest if saved["heldout"] is not None]
    best = by_path.get(named)
    if best is None and len(evaluated) > 1:
        best = max(reversed(evaluated), key=lambda saved: saved["heldout"]["mean"])
    offset = _whole_number(request.query_params, "offset") or 0
    limit = min(_whole_number(request.query_params, "limit") or PAGE_CHECKPOINTS, MAX_ROWS)

    def row_of(saved: Mapping[str, Any]) -> dict[str, Any]:
        return {**saved, **_commands(reader.config, saved), "is_best": saved is best}

    return {
        "checkpoints": [row_of(saved) for saved in newest[offset : offset + limit]],
        "best": None if best is None else row_of(best),
        "total": len(newest),
        "offset": offset,
        "limit": limit,
    }


def bisection(dashboard: DashboardState, request: Request) -> dict[str, Any]:
    """The state of the search for the checkpoint where a metric fell."""
    name, _ = _reader(dashboard, request)
    return dashboard.bisections.state(name)


def launches(dashboard: DashboardState, request: Request) -> dict[str, Any]:
    """The processes that the pages have started, newest first, with the state of each."""
    return {"launches": dashboard.launches.entries()}


def service(dashboard: DashboardState, request: Request) -> Mapping[str, Any]:
    """The numbers of the service, if one runs in this process."""
    return {"available": False} if dashboard.service is None else dashboard.service()


# --- changes ----------------------------------------------------------------------------------------------------------


def label(dashboard: DashboardState, request: Request, body: bytes) -> dict[str, Any]:
    """Changes title, tags, note or archived of a run."""
    name = request.path_params["run"]
    folder = dashboard.readers.folders.folder(name)
    write_labels(folder, changed_labels(read_labels(folder), _parse_json(body)))
    return {"summary": dashboard.readers.summary(name)}


def stop(dashboard: DashboardState, request: Request, body: bytes) -> dict[str, Any]:
    """Asks a run to end after its step and to save it."""
    name = request.path_params["run"]
    if dashboard.readers.summary(name).state != "running":
        raise InvalidRequestError("is not running", field="run", value=name, remedy="There is nothing to stop")
    request_stop(dashboard.readers.folders.folder(name))
    return {"summary": dashboard.readers.summary(name)}


def start(dashboard: DashboardState, request: Request, body: bytes) -> dict[str, Any]:
    """Starts a run, with the recipe, task and settings of the body."""
    return {"launch": dashboard.launches.start(_parse_json(body))}


def resume(dashboard: DashboardState, request: Request, body: bytes) -> dict[str, Any]:
    """Goes on with a run that has ended."""
    return {"launch": dashboard.launches.resume(request.path_params["run"])}


def evaluate(dashboard: DashboardState, request: Request, body: bytes) -> dict[str, Any]:
    """Evaluates a checkpoint of a run on its task."""
    return {"launch": dashboard.launches.evaluate(request.path_params["run"], _parse_json(body))}


def delete(dashboard: DashboardState, request: Request, body: bytes) -> dict[str, Any]:
    """Deletes a run; `entry` brings it back for a week."""
    return {"entry": dashboard.deleted.delete(request.path_params["run"])}


def restore(dashboard: DashboardState, request: Request, body: bytes) -> dict[str, Any]:
    """Brings a deleted run back."""
    return {"run": dashboard.deleted.restore(request.path_params["entry"])}


# --- parsing requests -------------------------------------------------------------------------------------------------


def parse_run_query(request: Request) -> RunQuery:
    """The query of a list of runs.

    Raises:
        InvalidRequestError: a parameter cannot be parsed; names it.
    """
    given = request.query_params
    return RunQuery(
        words=tuple(given.get("q", "").casefold().split()),
        state=given.get("state", ""),
        sort=parse_sort(given.get("sort", "")),
        offset=_whole_number(given, "offset") or 0,
        limit=min(_whole_number(given, "limit") or PAGE_RUNS, MAX_PAGE_RUNS),
    )


def parse_query(dashboard: DashboardState, request: Request) -> RolloutQuery:
    """The query of a request. `finding` selects the rollouts that show it; the other parameters narrow it further.

    Raises:
        InvalidRequestError: a parameter cannot be parsed; names it.
    """
    given = request.query_params
    values = _shown_by(dashboard, request.path_params["run"], given.get("finding", ""))
    for name in WHOLE_NUMBERS:
        number = _whole_number(given, name)
        if number is not None:
            values[name] = number
    for name in NUMBERS:
        if given.get(name, "") != "":
            values[name] = _number(given, name)
    for name, field in (("flag", "flags"), ("without", "without")):
        values[field] = frozenset(values.get(field, ())) | {flag for flag in given.getlist(name) if flag}
    for name in ("text", "sort"):
        if given.get(name, "") != "":
            values[name] = given[name]
    values["limit"] = min(values.get("limit", 50), MAX_ROWS)
    return RolloutQuery(**values)


def parse_cursor(text: str) -> EventCursor | None:
    """Where a live stream continues: `STEP`, or `STEP-EVALUATIONS-FINDINGS` from an event id. None for an empty text.

    Raises:
        InvalidRequestError: the text is neither.
    """
    if not text:
        return None
    parts = text.split("-")
    if len(parts) not in (1, 3) or not all(part.isascii() and part.isdigit() and len(part) < 16 for part in parts):
        raise InvalidRequestError(
            "is not a position in a run", field="since", value=text, remedy="Give the number of a step"
        )
    numbers = [int(part) for part in parts]
    return EventCursor(*numbers) if len(numbers) == 3 else EventCursor(numbers[0], None, None)


def parse_metric(body: bytes) -> str:
    """The metric of a bisection, from the body of its request.

    Raises:
        InvalidRequestError: the body is not JSON, or names another metric.
    """
    given = _parse_json(body)
    metric = given.get("metric", BISECT_METRICS[0]) if isinstance(given, dict) else None
    return require_bisect_metric(metric)


def _parse_json(body: bytes) -> object:
    try:
        return json.loads(body or b"{}")
    except ValueError as error:
        raise InvalidRequestError(f"is not JSON: {error}", field="body", value="(not shown)") from error


def parse_form(text: str) -> dict[str, str]:
    """The fields of a form."""
    return dict(parse_qsl(text, keep_blank_values=True, max_num_fields=16))


def too_large(most_bytes: int) -> BodyTooLargeError:
    """The error for a body of more than `most_bytes`."""
    return BodyTooLargeError(f"is larger than {most_bytes} bytes", field="body", value="(not shown)")


def _whole_number(given: QueryParams, name: str) -> int | None:
    text = given.get(name, "")
    if not text:
        return None
    if not (text.isascii() and text.isdigit() and len(text) < 16):
        digits = text.removeprefix("-")
        is_whole = digits.isascii() and digits.isdigit()
        what = "is not a whole number" if not is_whole else "is below 0" if text != digits else "has too many digits"
        raise InvalidRequestError(what, field=name, value=text, remedy="Give 0 or more, with at most 15 digits")
    return int(text)


def _require_metrics(reader: RunReader, names: Sequence[str]) -> None:
    """Refuses names that no step of the run has. A run without steps may get them yet.

    Raises:
        InvalidRequestError: a name is unknown.
    """
    known = reader.metric_names() if names else []
    for name in names:
        if known and name not in known:
            raise unknown_metric(name, known)


def _number(given: QueryParams, name: str) -> float:
    try:
        return float(given[name])
    except ValueError as error:
        raise InvalidRequestError("is not a number", field=name, value=given[name], remedy="Give a number") from error


def _shown_by(dashboard: DashboardState, run: str, code: str) -> dict[str, Any]:
    """The fields of a query for the rollouts that show a finding of this run; none for an empty code.

    Raises:
        InvalidRequestError: the run has no such finding.
    """
    if not code:
        return {}
    for finding in dashboard.diagnoses.of(run)[0]:
        if finding["code"] == code:
            return _samples_of(finding)
    raise InvalidRequestError("is not a finding of this run", field="finding", value=code, remedy="See its diagnosis")


# --- selecting rows --------------------------------------------------------------------------------------------------


def _reader(dashboard: DashboardState, request: Request) -> tuple[str, RunReader]:
    name = request.path_params["run"]
    return name, dashboard.readers.of(name)


def _no_rollouts(reader: RunReader, step: int) -> NotFoundError:
    steps = reader.steps()
    have = f"those from {steps[0]} to {steps[-1]}" if steps else "none yet"
    return NotFoundError("has no rollouts", field="step", value=step, remedy=f"The run has {have}")


def _whole(reader: RunReader, step: int, rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Logged rows, with the names of their flags."""
    group = rows[0]["group"] if len({row["group"] for row in rows}) == 1 else None
    page = reader.rollouts(RolloutQuery(step=step, group=group, limit=MAX_STEP_ROWS))
    flags = {indexed["row"]: indexed["flags"] for indexed in page.rows}
    return [{**row, "flags": flags.get(row["row"], [])} for row in rows]


def _samples_of(finding: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of a `RolloutQuery` for the rollouts that show a finding."""
    return EVIDENCE.get(finding["code"], NO_EVIDENCE).samples(int(finding["step"]))


def _commands(config: Mapping[str, Any], saved: Mapping[str, Any]) -> dict[str, Any]:
    """The commands that export a checkpoint and that continue from it. Quoted, because a log may come from anywhere."""
    checkpoint = str(saved["checkpoint"])
    path = shlex.quote(checkpoint)
    origin = shlex.quote(f"init_from={checkpoint}")
    exports = {
        form: f"mint export {path} --format {form} --output step-{int(saved['step']):06d}-{form}" for form in EXPORTS
    }
    task = (config.get("task_spec") or {}).get("task") or "TASK"
    return {
        "export": exports["peft"],
        "exports": exports,
        "train_on": f"mint train rl {shlex.quote(f'task={task}')} {origin}",
    }


def _evaluations_by_step(evaluations: Sequence[dict[str, Any]]) -> dict[int, list[dict[str, Any]]]:
    by_step: dict[int, list[dict[str, Any]]] = {}
    for row in evaluations:
        by_step.setdefault(row["step"], []).append(row)
    return by_step


def evaluation_of(found: Sequence[dict[str, Any]]) -> dict[str, Any] | None:
    """Returns one evaluation of a step: the last at temperature 1, or else the last; None if there is none."""
    sampled = [row for row in found if row.get("temperature") == SAMPLED]
    return (sampled or [*found] or [None])[-1]
