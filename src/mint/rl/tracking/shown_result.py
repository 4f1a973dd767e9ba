"""How the result of a run shows itself: lines when it is printed, a table with the curve in a notebook."""

from __future__ import annotations

import base64
import html
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mint.errors import MintError
from mint.rl.tracking.plot import curve_name, plot_curve
from mint.runs.log import RunLog, is_run
from mint.runs.terminal_text import counted, evaluation_name, interval_text, sparkline

CURVE_WIDTH = 40


@dataclass(frozen=True)
class ShownResult:
    """The base of the results of all recipes. What it shows it reads from the run folder.

    `checkpoint` holds the final weights and optimizer.
    """

    run_dir: Path
    checkpoint: str

    def __str__(self) -> str:
        if not is_run(self.run_dir):
            return repr(self)
        rows = self._rows()
        width = max(len(name) for name, _ in rows) + 2
        return "\n".join(f"{name:<{width}}{text}" for name, text in rows)

    def _repr_html_(self) -> str | None:
        if not is_run(self.run_dir):
            return None
        cells = "".join(
            f'<tr><td style="text-align:left"><b>{html.escape(name)}</b></td>'
            f'<td style="text-align:left">{html.escape(text)}</td></tr>'
            for name, text in self._rows()
        )
        return f"<table>{cells}</table>{self._picture()}"

    def _rows(self) -> list[tuple[str, str]]:
        log = RunLog(self.run_dir)
        metrics = log.read("metrics.jsonl")
        rows = _heldout_rows(log.read("evaluations.jsonl"))
        curve = curve_name(metrics)
        if curve is not None:
            values = [float(row[curve]) for row in metrics]
            ends = f"{values[0]:.3f} → {values[-1]:.3f}"
            rows.append((curve, f"{sparkline(values, CURVE_WIDTH)}  {ends} in {counted(len(values), 'step')}"))
        rows += [
            ("finding", f"{row['severity']}: {row['code']} at step {row['step']}. {row['evidence']}. {row['remedy']}")
            for row in log.read("findings.jsonl")
        ]
        return [
            *rows,
            ("run folder", str(self.run_dir)),
            ("checkpoint", self.checkpoint),
            ("look at it", f"mint dashboard {self.run_dir}"),
        ]

    def _picture(self) -> str:
        """The curve as an image; nothing without matplotlib or before the first step."""
        log = RunLog(self.run_dir)
        with tempfile.TemporaryDirectory() as folder:
            picture = Path(folder) / "curve.png"
            try:
                plot_curve(picture, log.read("metrics.jsonl"), log.read("evaluations.jsonl"), title=self.run_dir.name)
            except MintError:
                return ""
            data = base64.b64encode(picture.read_bytes()).decode()
        return f'<img alt="the curve of the run" src="data:image/png;base64,{data}">'


def _heldout_rows(evaluations: Sequence[Mapping[str, Any]]) -> list[tuple[str, str]]:
    """Before → after of each metric, or of the reward at each temperature."""
    shown: dict[str, list[str]] = {}
    for row in evaluations:
        if row["when"] in ("before", "after"):
            shown.setdefault(f"held-out {evaluation_name(row)}", []).append(interval_text(row))
    return [(name, " → ".join(texts)) for name, texts in shown.items()]
