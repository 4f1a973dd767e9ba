"""Reads and checks the results, journal, files and logs of a case after it has ended."""

from __future__ import annotations

import json
from collections.abc import Mapping
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

from mint.chaos.fault_points import FOLDERS
from mint.chaos.outcome import Hits
from mint.server.store.database import check_file
from mint.server.store.journal import JOURNAL_FILE, Journal

LOG_LINES = 4


def read_values(results: Path) -> tuple[dict[str, Any], list[str]]:
    """The values that a program has noted, by name, and the names of those that came again with other bits."""
    values: dict[str, Any] = {}
    changed = []
    for line in results.read_text().splitlines():
        with suppress(ValueError):  # a kill has cut it short
            name, value = json.loads(line)
            if values.setdefault(name, value) != value:
                changed.append(name)
    return values, changed


def check_jobs(data_dir: Path, sessions: Mapping[str, str]) -> tuple[dict[str, int], list[str]]:
    """How many jobs each tenant's session (tenant → session id) has, and what is wrong with them.

    Every request that was accepted must be there once, in order, and done.
    """
    counts: dict[str, int] = {}
    wrong = []
    with closing(Journal(data_dir / JOURNAL_FILE)) as journal:
        for tenant, session_id in sessions.items():
            counts[tenant] = 0
            for model in journal.models_of(session_id):
                jobs = journal.jobs(model.model_id, after=-1)
                counts[tenant] += len(jobs)
                numbers = [job.seq_id for job in jobs]
                if numbers != list(range(len(jobs))):
                    wrong.append(f"{tenant}: the journal of {model.model_id} has gaps: {numbers}")
                if model.applied_seq != len(jobs) - 1:
                    wrong.append(f"{tenant}: {model.applied_seq + 1} of {len(jobs)} jobs applied")
                undone = [f"{job.seq_id} {job.kind} {job.status}" for job in jobs if job.status != "done"]
                if undone:
                    wrong.append(f"{tenant}: not done: {', '.join(undone)}")
    return counts, wrong


def check_folder(data_dir: Path) -> list[str]:
    """The problems of a data directory, after its processes have ended."""
    wrong = []
    _, verdict = check_file(data_dir / JOURNAL_FILE)
    if verdict != "ok":
        wrong.append(f"the journal is damaged: {verdict}")
    with closing(Journal(data_dir / JOURNAL_FILE)) as journal:
        named = [name for name in journal.named_files() if name.partition("/")[0] in FOLDERS]
    missing = sorted(name for name in named if not (data_dir / name).exists())
    if missing:
        wrong.append(f"rows name files that are gone: {missing}")
    return wrong


def read_hits(file: Path) -> Hits:
    """The fault points that one life has reached."""
    if not file.exists():
        return []
    lines = [line.split(" ") for line in file.read_text().splitlines()]
    return [(line[0], line[1]) for line in lines if len(line) == 2]


def last_lines(folder: Path) -> str:
    """The ends of the logs of a case, for a report."""
    found = []
    for log in sorted(folder.glob("*.log")):
        lines = [line for line in log.read_text(errors="replace").splitlines() if line.strip()]
        found += [f"{log.name}: {line}" for line in lines[-LOG_LINES:]]
    return "\n".join(found)
