"""`mint demo` and `mint export` as scripts see them: exit codes, the last line of stdout, the files."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

CONTRACT = {
    "task",
    "base_model",
    "seed",
    "steps",
    "seconds",
    "seconds_setup",
    "samples",
    "tokens",
    "heldout_before",
    "heldout_after",
    "sampler_trainer_max_abs_logprob_diff",
    "findings",
    "checkpoint",
    "run_dir",
}


def mint(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", "from mint.cli.main import app; app()", *arguments],
        capture_output=True,
        text=True,
        check=False,
        timeout=800,
    )


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, object], str]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MINT_HOME", str(tmp_path_factory.mktemp("home")))
        run = mint("demo", "math", "--steps", "2", "--seed", "5", "--json")
    assert run.returncode == 0, run.stderr
    return json.loads(run.stdout.splitlines()[-1]), run.stderr


def test_the_last_line_is_the_contract_s_object(demo: tuple[dict[str, object], str]) -> None:
    report, _ = demo
    assert report.keys() >= CONTRACT
    assert (report["task"], report["base_model"], report["seed"], report["steps"]) == ("math", "mint/tiny", 5, 2)
    assert report["samples"] == 2 * 32 * 8
    for when in ("heldout_before", "heldout_after", "heldout_before_sampled", "heldout_after_sampled"):
        reading = report[when]
        assert isinstance(reading, dict)
        assert reading["n"] == 512
        assert 0 <= reading["low"] <= reading["mean"] <= reading["high"] <= 1
    assert isinstance(report["sampler_trainer_max_abs_logprob_diff"], float)
    assert report["sampler_trainer_max_abs_logprob_diff"] <= 1e-5


def test_people_see_the_held_out_set_by_name_before_and_after_and_three_examples(
    demo: tuple[dict[str, object], str],
) -> None:
    _, shown = demo
    for text in ("arithmetic held-out", "before RL", "after RL", "greedy", "temperature 1", "reward"):
        assert text in shown
    assert shown.count("Q: What is") == 2 + 3  # a sample of each of the two steps, and the examples


def test_the_run_folder_holds_metrics_rollouts_and_a_picture(demo: tuple[dict[str, object], str]) -> None:
    report, _ = demo
    folder = Path(str(report["run_dir"]))
    assert len((folder / "metrics.jsonl").read_text().splitlines()) == 2
    assert len((folder / "rollouts.jsonl").read_text().splitlines()) == 512
    assert (folder / "curve.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("form", ["peft", "hf"])
def test_a_checkpoint_of_the_demo_is_exported(
    demo: tuple[dict[str, object], str], form: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    report, _ = demo
    monkeypatch.setenv("MINT_HOME", str(Path(str(report["run_dir"])).parents[1]))
    output = tmp_path / form
    run = mint("export", str(report["checkpoint"]), "--format", form, "--output", str(output))
    assert run.returncode == 0, run.stderr
    expected = {"peft": "adapter_model.safetensors", "hf": "model.safetensors"}[form]
    assert (output / expected).stat().st_size > 0


def test_an_unknown_checkpoint_is_one_line_not_a_traceback(tmp_path: Path) -> None:
    run = mint("export", "mint://nobody:train:0/weights/none", "--output", str(tmp_path / "out"))
    assert run.returncode == 1
    assert "NotFoundError" in run.stderr
    assert "Traceback" not in run.stderr
    assert not (tmp_path / "out").exists()
