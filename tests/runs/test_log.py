"""A run folder survives a kill at any line, refuses another run's settings, and says who ran it and how that ended."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import mint
from mint.errors import InvalidRequestError
from mint.runs.interrupt import RunInterrupted
from mint.runs.json_lines import encode_line
from mint.runs.log import ResumePoint, RunLog, is_run
from mint.runs.process import RunProcess, lives, read_process, recorded_process, run_state
from mint.runs.rollout_index import ENTRY, FLAGS, step_entries
from mint.runs.tokens import TokenPieces
from mint.tokenizer import load_tokenizer, token_bytes

TINY = Path(mint.__file__).parent / "models" / "tiny"
CONFIG = {"seed": 1}


def test_resuming_drops_what_came_after_the_checkpoint_and_a_half_line(tmp_path: Path) -> None:
    log = RunLog(tmp_path)
    assert log.start({"seed": 1}, resume=False) is None
    for step in range(1, 6):
        log.append("metrics.jsonl", {"step": step})
    log.save_point(ResumePoint(3, "mint://m/weights/step-3", {"samples": 3}))
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 6, "rew')
    point = RunLog(tmp_path).start({"seed": 1}, resume=True)
    assert point == ResumePoint(3, "mint://m/weights/step-3", {"samples": 3})
    assert [row["step"] for row in log.read("metrics.jsonl")] == [1, 2, 3]


def test_a_folder_with_a_run_is_not_overwritten(tmp_path: Path) -> None:
    RunLog(tmp_path).start({"seed": 1}, resume=False)
    with pytest.raises(InvalidRequestError, match="resume=True"):
        RunLog(tmp_path).start({"seed": 1}, resume=False)


@pytest.mark.parametrize("resume", [False, True])
def test_a_run_is_not_started_in_the_folder_of_a_base_model(tmp_path: Path, resume: bool) -> None:
    model = '{"model_type": "qwen3", "vocab_size": 10}'
    (tmp_path / "config.json").write_text(model)
    assert not is_run(tmp_path)
    with pytest.raises(InvalidRequestError, match=r"run_dir = .*holds a base model.*Name another folder"):
        RunLog(tmp_path).start({"steps": 3}, resume=resume)
    assert (tmp_path / "config.json").read_text() == model


def test_a_run_is_not_resumed_with_other_settings(tmp_path: Path) -> None:
    RunLog(tmp_path).start({"seed": 1, "betas": (0.9, 0.999)}, resume=False)
    assert RunLog(tmp_path).start({"seed": 1, "betas": (0.9, 0.999)}, resume=True) is None
    with pytest.raises(InvalidRequestError, match="another value of `seed`: 1, not 2"):
        RunLog(tmp_path).start({"seed": 2, "betas": (0.9, 0.999)}, resume=True)


def test_a_run_is_resumed_with_another_spelling_of_its_base_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("model", "other"):
        (tmp_path / name).mkdir()
    monkeypatch.chdir(tmp_path)
    RunLog(tmp_path / "run").start({"base_model": "./model"}, resume=False)
    for spelling in ("model", str(tmp_path / "model"), "other/../model"):
        RunLog(tmp_path / "run").start({"base_model": spelling}, resume=True)
    for other in ("other", "missing", "Qwen/Qwen3-0.6B", "~nobody-here/model"):
        with pytest.raises(InvalidRequestError, match=r"another value of `base_model`: \./model"):
            RunLog(tmp_path / "run").start({"base_model": other}, resume=True)
    (tmp_path / "small.gguf").touch()
    RunLog(tmp_path / "second").start({"base_model": "small.gguf"}, resume=False)
    RunLog(tmp_path / "second").start({"base_model": str(tmp_path / "small.gguf")}, resume=True)


def test_a_run_is_resumed_with_another_number_of_printed_samples(tmp_path: Path) -> None:
    RunLog(tmp_path).start({"seed": 1, "print_samples": 0, "data_source": None}, resume=False)
    assert RunLog(tmp_path).start({"seed": 1, "print_samples": 2}, resume=True) is None


def rows_of(step: int) -> list[dict[str, Any]]:
    return [
        {
            "step": step,
            "group": place // 2,
            "item": place // 2,
            "text": f"ä{step}.{place}",
            "tokens": [place],
            "logprobs": [0.0],
            "reward": float(place % 2),
            "advantage": 0.5,
            "used": True,
        }
        for place in range(4)
    ]


def logged(folder: Path, steps: int) -> RunLog:
    log = RunLog(folder)
    log.start(CONFIG, resume=False)
    for step in range(1, steps + 1):
        log.append_rollouts(step, rows_of(step))
    return log


def assert_index_is_right(log: RunLog) -> None:
    lines = (log.folder / "rollouts.jsonl").read_bytes().splitlines(keepends=True)
    by_step: dict[int, list[bytes]] = {}
    for line in lines:
        by_step.setdefault(json.loads(line)["step"], []).append(line)
    expected, start = b"", 0
    for step, of_step in by_step.items():
        sizes = list(map(len, of_step))
        expected += step_entries(step, list(map(json.loads, of_step)), sizes, start).tobytes()
        start += sum(sizes)
    assert (log.folder / "rollouts.index").read_bytes() == expected


def test_each_rollout_has_its_entry_in_the_index(tmp_path: Path) -> None:
    log = logged(tmp_path, 3)
    assert_index_is_right(log)
    entries = np.fromfile(log.folder / "rollouts.index", dtype=ENTRY)
    assert entries["step"].tolist() == [1] * 4 + [2] * 4 + [3] * 4
    assert entries["group"].tolist() == entries["item"].tolist() == [0, 0, 1, 1] * 3
    assert (entries["reward"].tolist(), entries["length"].tolist()) == ([0.0, 1.0] * 6, [1] * 12)
    assert entries["flags"].tolist() == [FLAGS["used"]] * 12


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_a_resume_repairs_rollouts_and_index_wherever_a_kill_has_cut_them(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    saved = data.draw(st.integers(0, 3), label="saved")
    log = logged(tmp_path_factory.mktemp("run"), 5)
    rollouts, index = log.folder / "rollouts.jsonl", log.folder / "rollouts.index"
    if saved:
        log.save_point(ResumePoint(saved, "mint://m/weights/step", {}))
    kept = sum(len(encode_line(row)) for step in range(1, saved + 1) for row in rows_of(step))
    # A checkpoint is saved after its rollouts, so those are whole; the index may have lost anything.
    os.truncate(rollouts, data.draw(st.integers(kept, rollouts.stat().st_size), label="rollouts"))
    if data.draw(st.booleans(), label="has an index"):
        os.truncate(index, data.draw(st.integers(0, index.stat().st_size), label="index"))
    else:
        index.unlink()
    RunLog(log.folder).start(CONFIG, resume=True)
    assert log.read("rollouts.jsonl") == [row for step in range(1, saved + 1) for row in rows_of(step)]
    assert_index_is_right(log)
    for step in range(saved + 1, 6):
        log.append_rollouts(step, rows_of(step))
    assert log.read("rollouts.jsonl") == [row for step in range(1, 6) for row in rows_of(step)]
    assert_index_is_right(log)


def test_words_that_are_no_unicode_do_not_stop_a_run(tmp_path: Path) -> None:
    log = RunLog(tmp_path)
    log.append("findings.jsonl", {"step": 1, "evidence": "not \udcff text"})
    assert log.read("findings.jsonl") == [{"step": 1, "evidence": "not ? text"}]


# --- tokens ----------------------------------------------------------------------------------------------------------


def test_each_token_is_written_down_in_the_step_that_first_sampled_it(tmp_path: Path) -> None:
    tokenizer = load_tokenizer(str(TINY), "mint/tiny")
    pieces = TokenPieces(tokenizer)
    assert [row["id"] for row in pieces.new_rows(1, [[5, 300, 5], [], [2]])] == [2, 5, 300]
    assert [(row["step"], row["id"]) for row in pieces.new_rows(2, [[300, 301], [2]])] == [(2, 301)]
    assert pieces.new_rows(3, [[301], []]) == pieces.new_rows(4, []) == []
    resumed = TokenPieces(tokenizer, [2, 5, 300])
    assert [row["id"] for row in resumed.new_rows(2, [[300, 301], [2]])] == [301]


def test_a_piece_has_the_bytes_of_its_token_and_says_whether_that_is_special() -> None:
    tokenizer, table = load_tokenizer(str(TINY), "mint/tiny"), token_bytes(TINY)
    rows = TokenPieces(tokenizer).new_rows(1, [range(len(table)), [len(table) + 7]])
    for row, piece in zip(rows, table, strict=False):
        assert row["text"] == piece.decode("utf-8", "replace")
        assert bytes.fromhex(row["bytes"]) == piece if "bytes" in row else row["text"].encode() == piece
    assert [row["id"] for row in rows if row["special"]] == sorted(tokenizer.added_tokens_decoder)
    assert any("bytes" in row for row in rows)
    assert rows[-1]["text"] == f"⟨{len(table) + 7}⟩"


# --- the process -----------------------------------------------------------------------------------------------------


def test_a_run_says_how_it_ended(tmp_path: Path) -> None:
    with recorded_process(tmp_path):
        process = read_process(tmp_path)
        assert process is not None
        assert (process.pid, process.host, process.outcome) == (os.getpid(), socket.gethostname(), None)
        assert run_state(process, is_complete=False, updated_at=0, now=time.time()) == "running"
    ended = read_process(tmp_path)
    assert ended is not None
    assert (ended.outcome, ended.error, ended.began_at) == ("finished", None, process.began_at)
    assert ended.ended_at is not None
    assert ended.ended_at >= ended.began_at


@pytest.mark.parametrize(
    ("error", "outcome", "words"),
    [
        (ValueError("no \udcff luck"), "failed", "ValueError: no ? luck"),
        (KeyboardInterrupt(), "stopped", "interrupted"),
        (RunInterrupted(Path("run"), saved_step=3, steps=6), "stopped", "interrupted by Ctrl-C"),
        (SystemExit(3), "failed", "SystemExit: 3"),
        (RuntimeError("x" * 10_000), "failed", "RuntimeError: xxx"),
    ],
)
def test_a_run_that_an_exception_ends_says_which(
    tmp_path: Path, error: BaseException, outcome: str, words: str
) -> None:
    with pytest.raises(type(error)), recorded_process(tmp_path):
        raise error
    process = read_process(tmp_path)
    assert process is not None
    assert process.outcome == outcome
    assert process.error is not None
    assert process.error.startswith(words)
    assert len(process.error) <= 2_000


KILLED = """
import sys, time
from pathlib import Path
from mint.runs.process import recorded_process
with recorded_process(Path(sys.argv[1])):
    print("up", flush=True)
    time.sleep(600)
"""


def test_a_run_whose_process_was_killed_has_died(tmp_path: Path) -> None:
    with subprocess.Popen([sys.executable, "-c", KILLED, str(tmp_path)], stdout=subprocess.PIPE, text=True) as child:
        assert child.stdout is not None
        assert child.stdout.readline() == "up\n"
        process = read_process(tmp_path)
        assert process is not None
        assert run_state(process, is_complete=False, updated_at=0, now=time.time()) == "running"
        child.send_signal(signal.SIGKILL)
        deadline = time.monotonic() + 120
        while lives(process.pid, process.began_at) and time.monotonic() < deadline:
            time.sleep(0.01)  # it is not waited for until here: a zombie is dead, too
        assert run_state(process, is_complete=True, updated_at=0, now=time.time()) == "died"


def test_an_id_that_another_process_has_got_since_does_not_keep_a_run_alive() -> None:
    assert lives(os.getpid(), time.time())
    assert not lives(os.getpid(), 1_000_000_000.0)


def test_a_run_on_another_machine_lives_as_long_as_it_writes() -> None:
    away = RunProcess(1, "elsewhere.example", began_at=0.0)
    assert run_state(away, is_complete=False, updated_at=1_000.0, now=1_500.0) == "running"
    assert run_state(away, is_complete=False, updated_at=1_000.0, now=1_601.0) == "died"
    assert run_state(replace(away, outcome="failed"), is_complete=True, updated_at=1_000.0, now=1_001.0) == "failed"


def test_a_run_from_before_processes_were_recorded_is_finished_if_its_log_is() -> None:
    assert run_state(None, is_complete=True, updated_at=0, now=0) == "finished"
    assert run_state(None, is_complete=False, updated_at=0, now=0) == "died"


def test_a_process_file_that_cannot_be_read_is_none(tmp_path: Path) -> None:
    for content in ("", "{", "[]", '{"pid": 1}'):
        (tmp_path / "process.json").write_text(content)
        assert read_process(tmp_path) is None


def test_a_row_is_written_whatever_values_a_task_puts_in_it() -> None:
    deep: list[object] = []
    for _ in range(5000):
        deep = [deep]
    within: list[object] = []
    within += [within, within]
    row = {"big": 10**5000, "deep": deep, "within": within, (1, 2): {3: {4}}, "text": "\ud800", "step": 7}
    written = json.loads(encode_line(row))
    assert written["big"] == hex(10**5000)
    assert written["within"] == ["…", "…"]
    assert written["[1, 2]"] == {"3": "{4}"}
    assert (written["text"], written["step"]) == ("?", 7)
