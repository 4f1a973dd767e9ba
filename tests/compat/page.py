"""The generated tables of docs/compatibility.md: outcomes in, Markdown out. Runs nothing."""

from __future__ import annotations

import datetime
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

PAGE = Path(__file__).resolve().parents[2] / "docs" / "compatibility.md"

MARKS = {"ok": "✓", "refused": "refused", "absent": "–", "failed": "**fails**"}

Outcomes = Sequence[Mapping[str, Any]]


def matrix(results: Mapping[str, Outcomes]) -> str:
    """Versions × methods, a table for each section, and what stands behind every cell that is not a plain ✓ or –."""
    newest = list(results.values())[-1]
    sections = list(dict.fromkeys(row["section"] for row in newest))
    lines = []
    for section in sections:
        lines += [f"### {section}", "", f"| | {' | '.join(results)} |", f"|---|{'---|' * len(results)}"]
        for name in [row["name"] for row in newest if row["section"] == section]:
            cells = [MARKS[_cell(rows, name)["outcome"]] for rows in results.values()]
            lines.append(f"| {_escaped(name)} | {' | '.join(cells)} |")
        lines.append("")
    return "\n".join([*lines, *_notes(results)])


def client_table(results: Mapping[str, Mapping[str, Any]]) -> str:
    """A row for each client package: its version, the day of the run, and the checks that passed or failed."""
    lines = ["| client | version | run on | what ran |", "|---|---|---|---|"]
    for name, result in results.items():
        package, *others = [f"{other} {version}" for other, version in result["versions"].items()]
        over = f" over {', '.join(others)}" if others else ""
        ran = "; ".join(f"{MARKS[row['outcome']]} {_escaped(row['name'])}" for row in result["rows"])
        lines.append(f"| {name} | {package}{over} | {result['date']} | {ran} |")
    return "\n".join(lines)


def recipe_table(
    recipes: Mapping[str, Sequence[str]], results: Mapping[str, str], not_run: Mapping[str, str], before: str
) -> str:
    """A row for each recipe, with its options, the day of its run and the result; below, the programs that are not run,
    with the reason. The row of a recipe without a result is that of `before`, the tables of an earlier run."""
    programs = {module for module, *_ in recipes.values()}
    lines = [
        f"Of {len(programs) + len(not_run)} programs, {len(programs)} run, in {len(recipes)} ways:",
        "",
        "| recipe | options | run on | result |",
        "|---|---|---|---|",
    ]
    earlier = before.splitlines()
    for name, (module, *options) in recipes.items():
        row = f"| {name} (`{module}`) | {' '.join(options)} |"
        old = next((line for line in earlier if line.startswith(row)), f"{row} – | not run yet |")
        lines.append(f"{row} {results[name]} |" if name in results else old)
    lines += ["", f"Not run, {len(not_run)} programs:", "", "| program | why |", "|---|---|"]
    lines += [f"| `{module}` | {reason} |" for module, reason in not_run.items()]
    return "\n".join(lines)


def tutorial_table(results: Mapping[str, str], versions: Mapping[str, str], day: datetime.date) -> str:
    """A row for each tutorial and its result; above, the day of the run and the versions of the packages."""
    packages = ", ".join(f"{name} {version}" for name, version in versions.items())
    lines = [
        f"Run on {day.isoformat()} with {packages}: {len(results)} of {len(results)} tutorials.",
        "",
        "| tutorial | result |",
        "|---|---|",
    ]
    return "\n".join([*lines, *(f"| `tutorials/{name}.py` | {result} |" for name, result in results.items())])


def _cell(rows: Outcomes, name: str) -> Mapping[str, Any]:
    return next((row for row in rows if row["name"] == name), {"outcome": "failed", "detail": "the driver ended early"})


def _notes(results: Mapping[str, Outcomes]) -> list[str]:
    said: dict[tuple[str, str, str], list[str]] = {}
    for version, rows in results.items():
        for row in rows:
            if row["outcome"] in ("refused", "failed"):
                reason = _reason(row["detail"])
                said.setdefault((row["outcome"], row["name"], reason), []).append(version)
    if not said:
        return []
    lines = ["### The cells without a tick", "", "| method | versions | answer |", "|---|---|---|"]
    for (outcome, name, reason), versions in said.items():
        lines.append(f"| {_escaped(name)} | {', '.join(versions)} | {MARKS[outcome]}: {_escaped(reason)} |")
    return lines


def _reason(detail: str) -> str:
    """Without what differs from run to run: ids, request numbers, places in the SDK's code."""
    short = re.sub(r"\[[\w.:< -]+\]$", "", detail)
    short = re.sub(r"sess-[0-9a-f]+(:\w+:[\d:]+)?", "…", short)
    short = re.sub(r" for self\.request_id=.*", "", short)
    short = re.sub(r"Error code: \d+ - \{'error': ['\"](.*?)['\"], 'category.*", r"\1", short)
    return short.strip()[:220]


def _escaped(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ").replace("<", "&lt;")
