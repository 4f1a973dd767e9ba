"""What a script prints of a result, and what a notebook shows."""

from __future__ import annotations

import base64
import re
from pathlib import Path

import pytest
from digits_task import ManyDigits

from mint.recipes.sft import SFTConfig, run_sft
from mint.recipes.supervised import Demonstration
from mint.rl import RLConfig, run_grpo

pytestmark = pytest.mark.learns


def pictures(html: str) -> list[bytes]:
    return [base64.b64decode(found) for found in re.findall(r'src="data:image/png;base64,([^"]*)"', html)]


def test_an_rl_run_prints_its_curve_its_heldout_reward_and_its_findings(tmp_path: Path) -> None:
    config = RLConfig(
        base_model="mint/tiny", steps=3, batch_size=2, group_size=4, max_tokens=6, heldout_size=0, run_dir=tmp_path
    )
    result = run_grpo(ManyDigits(), config)
    lines = str(result).splitlines()
    assert re.fullmatch(r"reward/mean +[▁-█]{3}  \d\.\d{3} → \d\.\d{3} in 3 steps", lines[0])
    assert f"checkpoint   {result.checkpoint}" in lines and f"run folder   {tmp_path}" in lines
    assert all(len(line) < 400 for line in lines)
    html = result._repr_html_() or ""
    assert result.checkpoint in html and html.count("<tr>") == len(lines)
    assert [picture[:8] for picture in pictures(html)] == [b"\x89PNG\r\n\x1a\n"]


def test_a_python_prompt_shows_an_rl_run_in_one_short_line(tmp_path: Path) -> None:
    task = ManyDigits()
    task.build_heldout = lambda: ["7", "8"]
    config = RLConfig(base_model="mint/tiny", steps=1, batch_size=1, group_size=2, max_tokens=2, run_dir=tmp_path)
    result = run_grpo(task, config)
    rewards = [
        f"held-out reward at temperature {name} {before.mean:.3f} → {after.mean:.3f}"
        for name, before, after in zip("01", result.heldout_before.values(), result.heldout_after.values(), strict=True)
    ]
    assert repr(result) == f"<RunResult {tmp_path}: 1 step, {', '.join(rewards)}>"


def test_a_supervised_run_prints_its_loss_and_its_heldout_scores(tmp_path: Path) -> None:
    examples = [Demonstration([5, 6, 7 + place], "yes") for place in range(6)]
    result = run_sft(examples[:4], examples[4:], SFTConfig(batch_size=2, run_dir=tmp_path))
    lines = str(result).splitlines()
    assert re.fullmatch(r"held-out loss +\d+\.\d{3} \(.* to .*\) → \d+\.\d{3} \(.* to .*\)", lines[0])
    assert any(line.startswith("train/loss") for line in lines)
    assert len(pictures(result._repr_html_() or "")) == 1


def test_text_of_a_run_cannot_break_out_of_its_cell(tmp_path: Path) -> None:
    folder = tmp_path / "<script>alert(1)<"
    config = RLConfig(base_model="mint/tiny", steps=1, batch_size=1, group_size=2, heldout_size=0, run_dir=folder)
    html = run_grpo(ManyDigits(), config)._repr_html_() or ""
    assert "<script>" not in html and "&lt;script&gt;alert(1)&lt;" in html
