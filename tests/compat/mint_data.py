"""Stand-ins for the data that MinT's experiments download from a hub: a few made-up rows in the same form."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

LAW_TASKS = {
    "1-2": ("legal-qa", "memory", "正确答案：A"),
    "2-5": ("reading-comprehension", "understanding", "回答:甲"),
    "2-7": ("public-opinion-summary", "understanding", "甲起诉乙。"),
    "3-3": ("charge-prediction", "application", "罪名:盗窃"),
    "3-4": ("sentence-prediction-without-statute", "application", "刑期:12个月"),
}
"""Task id → name, level and expected answer, of the five tasks of LawBench's smoke slice."""


def write_data(experiment: Path) -> None:
    """Writes what the live tests of an experiment expect to be there; nothing for those that bring their data."""
    data = experiment / "data"
    if experiment.name == "fingpt":
        choices = [
            {
                "id": f"row-{n}",
                "instruction": "Answer with A, B, C or D.",
                "input": f"{n} + 1 = ? A. {n} B. {n + 1}",
                "output": "B",
            }
            for n in range(1, 5)
        ]
        for train, test in (("smoke_train", "smoke_eval"), ("fingpt-fineval/train", "fingpt-fineval/test")):
            _write(data / f"{train}.jsonl", choices[2:])
            _write(data / f"{test}.jsonl", choices[:2])
        moods = [
            {"instruction": "What is the sentiment of this news?", "input": f"Sales {verb}.", "output": mood}
            for verb, mood in (("rose", "positive"), ("fell", "negative"), ("stayed", "neutral"))
        ]
        _write(data / "benchmarks" / "sentiment" / "fpb" / "test.jsonl", moods)
    if experiment.name == "lawbench":
        _write(data / "eval" / "smoke.jsonl", _law_rows("eval"))
        _write(data / "train" / "smoke.jsonl", _law_rows("train"))


def _law_rows(part: str) -> list[dict[str, Any]]:
    return [
        {
            "example_id": f"{part}-{task_id}",
            "task_id": task_id,
            "task_name": name,
            "cognitive_level": level,
            "prompt": f"{part} 任务 {task_id}",
            "expected": expected,
            "assistant_text": expected,
        }
        for task_id, (name, level, expected) in LAW_TASKS.items()
    ]


def _write(path: Path, rows: Iterable[dict[str, Any]]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows))
