"""A run in the terminal: one screen where there is a terminal, plain lines where there is none, and nothing obeyed."""

from __future__ import annotations

import io
from collections.abc import Callable, Sequence
from typing import Any

import pytest
from rich.console import Console
from scripted_policy import tiny_tokenizer

from mint.recipes.math import DEMO, MathAdapter
from mint.recipes.sft import SFTConfig, run_sft
from mint.recipes.supervised import Demonstration
from mint.rl import LiveProgress, run_grpo
from mint.rl.run_config import RunConfig
from mint.rl.tracking.progress import step_line
from mint.runs.terminal_text import head, one_line, paragraph, sample_lines, sparkline, tail

HOSTILE = "\x1b[2J\x1b]0;owned\x07\u202eabc\u200b\r\x00\n\tend"


def step(number: int, reward: float, **changes: float) -> dict[str, Any]:
    return {
        "step": float(number), "reward/mean": reward, "success/rate": reward, "groups/used": 3.0, "groups/total": 4.0,
        "groups/all_good": 1.0, "groups/all_bad": 0.0, "datums": 12.0, "optim/grad_norm": 1.5, "train/entropy": 0.25,
        "mismatch/max_abs_logprob_diff": 0.0, "rollouts/mean_length": 7.5, "rollouts/truncated_share": 0.25,
        "rollouts/tokens": 120.0, "time/rollouts_s": 0.4, "time/train_s": 0.2, **changes,
    }  # fmt: skip


def samples(text: str, count: int) -> dict[str, Any]:
    row = {"prompt": f"Q{text}", "text": text, "reward": 1.0, "parts": {}, "tokens": [1, 2], "tool_calls": 0}
    return {"step": 1, "rows": [row], "count": count}


READING = {
    "when": "before", "step": 0, "temperature": 0.0, "mean": 0.5, "low": 0.4, "high": 0.6, "n": 64, "success": 0.5,
}  # fmt: skip
FINDING = {"code": "truncation", "severity": "error", "step": 2, "evidence": f"cut {HOSTILE}", "remedy": "raise it"}


def shown(*, terminal: bool) -> str:
    """What a run of two steps leaves on the console."""
    console = Console(file=io.StringIO(), force_terminal=terminal, width=120, color_system=None)
    with LiveProgress(2, console=console, title="a run") as progress:
        progress("evaluation", READING)
        progress("step", step(1, 0.25))
        progress("samples", samples(HOSTILE, 1))
        progress("finding", FINDING)
        progress("step", step(2, 0.75))
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


@pytest.mark.parametrize("terminal", [True, False])
def test_progress_evaluations_findings_and_a_sample_are_there(terminal: bool) -> None:
    text = shown(terminal=terminal)
    reading = "greedy 0.500 (0.400 to 0.600)" if terminal else "0.500  (95 %: 0.400 to 0.600"
    for expected in ("a run", "0.750", "3/4", "before", reading, "truncation", "reward 1.00; 2 tokens"):
        assert expected in text, expected


def test_without_a_terminal_every_step_is_a_line_and_no_line_moves_the_cursor() -> None:
    lines = shown(terminal=False).splitlines()
    assert [line.split()[1] for line in lines if line.strip().startswith("step ")] == ["1/2", "2/2"]
    assert "\x1b" not in "".join(lines)


def test_on_a_terminal_the_curve_of_the_reward_is_drawn_from_the_first_step_to_the_last() -> None:
    text = shown(terminal=True)
    assert "▁█" in text and "from 0.250, best 0.750 at step 2" in text


@pytest.mark.parametrize("terminal", [True, False])
def test_what_a_model_wrote_cannot_steer_the_terminal(terminal: bool) -> None:
    text = shown(terminal=terminal)
    assert "\x1b]" not in text and "\x1b[2J" not in text and "\u202e" not in text and "\x07" not in text
    assert "␛[2J" in text and "⟨202E⟩abc⟨200B⟩" in text


def test_a_step_without_a_signal_says_why_no_update_was_made() -> None:
    console = Console(file=io.StringIO(), width=120)
    with LiveProgress(1, console=console) as progress:
        progress("step", step(1, 1.0, datums=0.0, **{"groups/used": 0.0, "groups/all_good": 4.0}))
    assert isinstance(console.file, io.StringIO)
    assert "no step taken: every group had equal rewards (4 all successes, 0 without one)" in console.file.getvalue()


def test_a_step_whose_groups_were_left_out_does_not_say_that_rewards_were_equal() -> None:
    numbers = {"groups/used": 0.0, "groups/untrained": 3.0, "groups/all_good": 1.0}
    line = step_line(step(1, 0.5, datums=0.0, **numbers))
    assert line.endswith("no step taken: nothing of 3 groups with unequal rewards went into the loss")


def test_text_is_shown_sign_by_sign() -> None:
    assert one_line(HOSTILE) == "␛[2J␛]0;owned␇⟨202E⟩abc⟨200B⟩␍␀⏎⇥end"
    assert paragraph("a\n\tb") == "a\n    b"
    assert (head("abcdef", 3), head("abc", 3), tail("abcdef", 3), tail("abc", 3)) == ("abc…", "abc", "…def", "abc")
    assert len(head("x" * 10_000_000, 100)) == 101


def test_the_samples_of_a_step_do_not_depend_on_their_rewards() -> None:
    (row,) = samples("a", 1)["rows"]
    places = [str(place) for place in range(8)]

    def drawn(sign: int, count: int, at_step: int) -> list[str]:
        rows = [{**row, "text": place, "reward": sign * float(place)} for place in places]
        return [line.partition(" → ")[2][0] for line in sample_lines(rows, count, at_step)]

    shown = [drawn(1, 1, at_step) for at_step in range(200)]
    assert shown == [drawn(-1, 1, at_step) for at_step in range(200)]
    assert {place for (place,) in shown} == set(places)
    assert len(set(drawn(1, 3, 1))) == 3 and sorted(drawn(1, 99, 1)) == places
    assert sample_lines([{**row, "reward": None}], 1, 1) == []


def test_a_sparkline_runs_from_the_least_to_the_greatest_value_in_at_most_its_width() -> None:
    assert sparkline([], 8) == ""
    assert sparkline([0.5, 0.5], 8) == "▁▁"
    assert sparkline([float(value) for value in range(8)], 8) == "▁▂▃▄▅▆▇█"
    assert len(sparkline([float(value % 7) for value in range(1000)], 40)) == 40


def demonstrations(texts: Sequence[str]) -> list[Demonstration]:
    tokenizer = tiny_tokenizer()
    return [Demonstration(tokenizer.encode(f"Q: {text}\nA:"), f" {text}") for text in texts]


def test_a_run_in_a_script_prints_a_line_per_step_and_evaluation_unless_it_is_told_not_to(
    capsys: pytest.CaptureFixture[str],
) -> None:
    def lines_of(run: Callable[..., Any], config: RunConfig, *arguments: Any, **others: Any) -> list[str]:
        run(*arguments, config, **others)
        printed = capsys.readouterr()
        assert printed.out == ""
        return printed.err.splitlines()

    rl = DEMO.changed(steps=2, batch_size=2, group_size=2, heldout_size=2)
    lines = lines_of(run_grpo, rl, MathAdapter(seed=0))
    assert lines[0].startswith("math: ")
    assert [line.split()[1] for line in lines if line.startswith("  step ")] == ["1/2", "2/2"]
    assert sum("[reward " in line for line in lines) == 2, "one sample of each step"
    assert sum("held-out before" in line for line in lines) == 2
    without_samples = lines_of(run_grpo, rl.changed(print_samples=0), MathAdapter(seed=0))
    assert not any("[reward " in line for line in without_samples)
    assert lines_of(run_grpo, rl.changed(print_progress=False), MathAdapter(seed=0)) == []
    assert lines_of(run_grpo, rl, MathAdapter(seed=0), on_progress=lambda event, fields: None) == []
    sft = SFTConfig(batch_size=2, epochs=1)
    lines = lines_of(run_sft, sft, demonstrations(["a", "b", "c"]), demonstrations(["d"]))
    assert [line.split()[1] for line in lines if line.startswith("  step ")] == ["1/2", "2/2"]
    assert "loss " in lines[-3]
    assert lines_of(run_sft, sft.changed(print_progress=False), demonstrations(["a"]), []) == []
