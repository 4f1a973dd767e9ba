"""Each notebook in examples/notebooks runs from its first cell to its last, shows what it says, and is stored bare."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

NOTEBOOKS = sorted((Path(__file__).resolve().parent.parent / "examples" / "notebooks").glob("*.ipynb"))
SHOWS = {
    "01_first_loop": "assert losses[-1] < losses[0] / 4 and '7' in reply and trained_logprobs == sequence.logprobs",
    "02_own_reward": (
        "assert examination.verdict == 'go'\n"
        "assert result.heldout_after[1.0].low > result.heldout_before[1.0].high and '<table>' in result._repr_html_()"
    ),
    "03_not_learning": (
        "def codes(result):\n    return {finding.code for finding in result.findings}\n"
        "assert 'learning_rate_too_low' in codes(too_low) and 'grader_failures' in codes(broken)\n"
        "assert 'no_learning_signal_all_wrong' in codes(hopeless) and examination.verdict == 'sft_first'\n"
        "assert mended.heldout_after[1.0].low > mended.heldout_before[1.0].high"
    ),
    "04_sft_and_export": (
        "assert result.after.accuracy[1] > result.before.accuracy[2]\nassert here == elsewhere == ' 54'"
    ),
    "05_intervals": (
        "assert few[2].difference.verdict == many[2].difference.verdict == 'better'\n"
        "assert width(many[0]) < width(few[0])"
    ),
}
"""What holds at the end of each notebook."""


def cells(notebook: Path) -> list[dict[str, Any]]:
    return [cell for cell in json.loads(notebook.read_text())["cells"] if cell["cell_type"] == "code"]


def test_each_notebook_is_checked_and_stored_without_outputs() -> None:
    assert [notebook.stem for notebook in NOTEBOOKS] == list(SHOWS)
    kept = [notebook.name for notebook in NOTEBOOKS for cell in cells(notebook) if cell["outputs"]]
    assert kept == []


@pytest.mark.slow
@pytest.mark.parametrize("notebook", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_runs_and_shows_what_it_says(notebook: Path, tmp_path: Path) -> None:
    program = tmp_path / "notebook.py"
    program.write_text("\n".join(["".join(cell["source"]) for cell in cells(notebook)] + [SHOWS[notebook.stem]]))
    done = subprocess.run([sys.executable, str(program)], capture_output=True, text=True, check=False, cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
