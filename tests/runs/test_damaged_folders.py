"""A damaged run folder is refused with the file and the remedy, each time it is read; a mended one is read again."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from mint.errors import InvalidRequestError
from mint.recipes.task_registry import open_task_of_run
from mint.rl.analysis.run_analysis import bisect_run, diagnose_run
from mint.runs.log import RunLog
from mint.runs.reader import RunReader

GOOD = {
    "config.json": {"task": "math", "base_model": "mint/tiny", "steps": 2, "task_spec": None},
    "metrics.jsonl": {"step": 1, "reward/mean": 0.5},
    "evaluations.jsonl": {
        "step": 1,
        "when": "during",
        "set": "heldout",
        "temperature": 0.0,
        "mean": 0.5,
        "low": 0.4,
        "high": 0.6,
        "n": 8,
        "success": 0.5,
    },
    "findings.jsonl": {"code": "collapse", "severity": "error", "step": 1, "evidence": "some", "remedy": "none"},
    "checkpoints.jsonl": {"step": 1, "checkpoint": "mint://one"},
    "warnings.jsonl": {"step": 1, "warning": "some"},
}


def write(folder: Path, **damaged: str) -> Path:
    """A run of one step; a damaged file has this text in the place of its own, a log this line after its own."""
    folder.mkdir(parents=True)
    for file, row in GOOD.items():
        line = json.dumps(row) + "\n"
        own = "" if file == "config.json" and "config" in damaged else line
        (folder / file).write_text(own + damaged.get(file.split(".")[0], ""))
    return folder


DAMAGED_CONFIGS = [
    *('{"a":', "[3]", "3", "\udcff", '{"steps": "many"}', '{"max_tokens": [1]}', '{"grader_timeout_s": {}}'),
    *('{"task_spec": [1]}', '{"reward_range": 3}'),
]
DAMAGED_ROWS = [
    ("metrics", '{"reward/mean": 1}\n'),
    ("metrics", '{"step": "two"}\n'),
    ("metrics", '{"step": NaN}\n'),
    ("metrics", '{"step": 2, "reward/mean": "many"}\n'),
    ("metrics", '{"step": 2, "time/train_s": null}\n'),
    ("evaluations", json.dumps({**GOOD["evaluations.jsonl"], "low": None}) + "\n"),
    ("evaluations", json.dumps({**GOOD["evaluations.jsonl"], "set": None}) + "\n"),
    ("evaluations", json.dumps({**GOOD["evaluations.jsonl"], "temperature": "hot"}) + "\n"),
    ("evaluations", json.dumps({**GOOD["evaluations.jsonl"], "checkpoint": [1]}) + "\n"),
    ("evaluations", '{"step": "two", "when": "during", "mean": 1.0}\n'),
    ("evaluations", '{"step": 2, "mean": 1.0}\n'),
    ("findings", '{"step": 2}\n'),
    ("checkpoints", '{"step": 2}\n'),
    ("warnings", '{"warning": "some"}\n'),
]


@pytest.mark.parametrize("text", DAMAGED_CONFIGS)
def test_a_damaged_config_is_refused_with_file_and_remedy(tmp_path: Path, text: str) -> None:
    folder = write(tmp_path / "run", config="")
    (folder / "config.json").write_bytes(text.encode("utf-8", "surrogateescape"))
    with pytest.raises(InvalidRequestError, match=r"file = .*/run/config.json: .*Restore it from a copy, or remove"):
        RunReader(folder)
    with pytest.raises(InvalidRequestError, match=r"config\.json"), open_task_of_run(folder, "math"):
        pass
    with pytest.raises(InvalidRequestError, match=r"config\.json"):
        RunLog(folder).start({}, resume=True)


@pytest.mark.parametrize(("log", "line"), DAMAGED_ROWS)
def test_a_damaged_row_is_refused_each_time_until_it_is_mended(tmp_path: Path, log: str, line: str) -> None:
    folder = write(tmp_path / "run", **{log: line})
    reader = RunReader(folder)
    for _ in range(2):
        with pytest.raises(InvalidRequestError, match=rf"file = .*/{log}.jsonl: is damaged: .*Correct this line"):
            getattr(reader, log)()
    with pytest.raises(InvalidRequestError, match=f"{log}.jsonl"):
        RunLog(folder).start(GOOD["config.json"], resume=True)
    (folder / f"{log}.jsonl").write_text(json.dumps(GOOD[f"{log}.jsonl"]) + "\n")
    assert len(getattr(reader, log)()) == 1
    assert reader.summary().step == 1 and diagnose_run(folder)


def test_a_bisection_of_a_damaged_run_names_the_file(tmp_path: Path) -> None:
    for log in ("checkpoints", "evaluations"):
        folder = write(tmp_path / log, **{log: '{"step": "two"}\n'})
        with (folder / "checkpoints.jsonl").open("a") as file:
            file.write('{"step": 2, "checkpoint": "mint://two"}\n')
        with pytest.raises(InvalidRequestError, match=f"{log}.jsonl"):
            bisect_run(folder, "heldout", lambda path: {})


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ('{"step":', "cannot be read"),
        ('{"step": 1, "checkpoint": "mint://one"}', "has no object as `totals`"),
        ('{"step": 1, "checkpoint": "mint://one", "totals": {"samples": "many"}}', "as `totals`, not numbers"),
        ('{"step": 1, "checkpoint": "mint://one", "totals": {}, "state": 3}', "has no object as `state`"),
    ],
)
def test_a_run_is_not_resumed_from_a_damaged_state(tmp_path: Path, text: str, said: str) -> None:
    folder = write(tmp_path / "run")
    (folder / "state.json").write_text(text)
    with pytest.raises(InvalidRequestError, match=f"file = .*/state.json: .*{said}.*delete it"):
        RunLog(folder).start(GOOD["config.json"], resume=True)
    assert RunReader(folder).summary().step == 1, "a folder with a damaged state can be read"


@pytest.mark.parametrize("field", ["pid", "began_at", "outcome", "error"])
def test_a_damaged_record_of_the_process_is_like_none(tmp_path: Path, field: str) -> None:
    folder = write(tmp_path / "run")
    process = {"pid": 1, "host": "h", "began_at": 1.0, "ended_at": 2.0, "outcome": "failed", "error": "some"}
    (folder / "process.json").write_text(json.dumps(process))
    assert RunReader(folder).summary().state == "failed"
    (folder / "process.json").write_text(json.dumps({**process, field: {"a": 1}}))
    assert RunReader(folder).summary().state == "died"


def test_a_supervised_run_has_no_findings_of_rewards(tmp_path: Path) -> None:
    folder = write(tmp_path / "run")
    loss = {"step": 1, "when": "after", "metric": "loss", "mean": 0.5, "low": 0.4, "high": 0.6, "n": 8}
    (folder / "evaluations.jsonl").write_text(
        json.dumps({**loss, "step": 0, "when": "before"}) + "\n" + json.dumps(loss)
    )
    (folder / "metrics.jsonl").write_text('{"step": 1, "train/loss": 0.5}\n')
    (folder / "findings.jsonl").unlink()
    assert diagnose_run(folder) == []


def test_a_task_that_is_not_that_of_the_run_is_refused(tmp_path: Path) -> None:
    folder = write(tmp_path / "run")
    spec = {"task": "math", "seed": 0, "options": {}}
    (folder / "config.json").write_text(json.dumps({**GOOD["config.json"], "task_spec": spec}))
    said = "--task = maths: is not the task of the run, which is math"
    with pytest.raises(InvalidRequestError, match=said), open_task_of_run(folder, "maths"):
        pass
