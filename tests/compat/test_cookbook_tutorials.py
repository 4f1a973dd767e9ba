"""The tutorials of tinker-cookbook run unmodified, each to its last cell, against `mint serve`; the page names all.

They are marimo notebooks of the source distribution, run as `python FILE`. Data and models are stand-ins. A cell that
stops ends those after it in silence, so that the last words are checked.
"""

from __future__ import annotations

import datetime
import json
import re
import subprocess
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.compat.cookbook_models import EXPORTED
from tests.compat.page import PAGE, tutorial_table
from tests.compat.sdk_environments import cookbook_python, cookbook_source
from tests.compat.served import MINT, Served
from tests.generated_page import replace_part

pytestmark = [pytest.mark.slow, pytest.mark.timeout(7200)]

HERE = Path(__file__).parent
PACKAGES = ("tinker_cookbook", "tinker", "marimo")
"""Whose versions the page names."""


@dataclass(frozen=True)
class Tutorial:
    """What shows that a tutorial ran to its end."""

    prints: str
    """A regular expression: what its last cell that prints anything prints."""
    losses: tuple[int, ...] = ()
    """The steps of each of its training loops, of which every loss is printed."""
    runs: int = 0
    """How many training runs of the cookbook it makes: folders with metrics and a final checkpoint."""


TUTORIALS = {
    "101_hello_tinker": Tutorial(r"Sample 2: The three largest"),
    "102_first_sft": Tutorial(r"(?s)Model: moonshotai.*Q: What is Tinker\?\nA: ", losses=(15, 10)),
    "103_async_patterns": Tutorial(r"Total: 32 completions"),
    "104_first_rl": Tutorial(r"Step  9 \| reward: "),
    "201_rendering": Tutorial(r"Registered renderers: \['MyOrg/custom_format'\]"),
    "202_loss_functions": Tutorial(r"Custom loss metrics: .*'logprob_sq': "),
    "203_completers": Tutorial(r"Parsed score: "),
    "204_evaluations": Tutorial(r"Accuracy evaluation: .*'eval/correct': "),
    "301_cookbook_abstractions": Tutorial(r"Step 3: mean_reward="),
    "302_custom_environment": Tutorial(r"\[(PASS|FAIL)\] Format: haiku"),
    "303_sft_with_config": Tutorial(r"  metrics\.jsonl", runs=1),
    "304_rl_with_config": Tutorial(r"  metrics\.jsonl", runs=1),
    "401_sl_hyperparams": Tutorial(r"128 +291,635,200"),
    "402_rl_hyperparams": Tutorial(r"Kept rewards: \[\[0\.0, 1\.0, 0\.0, 1\.0\]\]"),
    "403_dpo_preferences": Tutorial(r"beta=0\.50: loss=0\.4305"),
    "404_sequence_extension": Tutorial(r"Datum 1: 4 tokens, mask="),
    "405_multi_agent": Tutorial(r"Rewards are zero-sum"),
    "406_prompt_distillation": Tutorial(r"Student accuracy \(no system prompt\): \d+/12", losses=(10,)),
    "407_rlhf_pipeline": Tutorial(r"=== RLHF Model ===\nWhat is the most", runs=3),
    "501_export_hf": Tutorial(r"Vocab size: +1026"),
    "502_lora_adapter": Tutorial(r'"task_type": "CAUSAL_LM"'),
    "503_publish_hub": Tutorial(r"- tinker-cookbook: "),
}

LOSS = re.compile(r"^Step +(\d+): loss = ([\d.]+)", re.MULTILINE)
EXPORT = "501_export_hf"

RESULTS: dict[str, str] = {}


@pytest.mark.parametrize("name", TUTORIALS)
def test_a_tutorial_runs_to_its_last_cell(cookbook_served: Served, cookbook_folder: Path, name: str) -> None:
    tutorial = TUTORIALS[name]
    served, folder = cookbook_served, cookbook_folder
    runs_dir = folder / "runs" / name
    done = served.run(
        cookbook_python(),
        HERE / "cookbook_program.py",
        str(cookbook_source() / "tutorials" / f"{name}.py"),
        owner="tutorials",
        cwd=folder,
        timeout_s=6000,
        more_variables={"TINKER_COOKBOOK_RUNS_DIR": str(runs_dir), "MPLBACKEND": "Agg"},
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert re.search(tutorial.prints, done.stdout), done.stdout[-3000:]
    said = ["to its last cell"]

    printed = [(int(step), float(loss)) for step, loss in LOSS.findall(done.stdout)]
    assert len(printed) == sum(tutorial.losses)
    for steps in tutorial.losses:
        loop, printed = printed[:steps], printed[steps:]
        assert loop[-1][1] < loop[0][1], loop
        said.append(f"{steps} steps, the loss falls")

    logs = sorted(runs_dir.rglob("metrics.jsonl"))
    assert len(logs) == tutorial.runs, logs
    assert all("final" in (log.parent / "checkpoints.jsonl").read_text() for log in logs)
    if logs:
        rows = sum(len(log.read_text().splitlines()) for log in logs)
        said.append(f"{rows} rows of metrics, {len(logs)} final checkpoint{'s' if len(logs) > 1 else ''}")

    if name == EXPORT:
        check_merged(served, folder, runs_dir, done.stdout)
        said.append("the merged model has the weights that `mint export` writes")
    RESULTS[name] = f"✓ {'; '.join(said)}"


def check_merged(served: Served, folder: Path, runs_dir: Path, printed: str) -> None:
    """The weights that the cookbook merged are, to the rounding of their dtype, those of `mint export --format hf`."""
    [path] = re.findall(r"Checkpoint: +(tinker://\S+)", printed)
    ours = folder / "exported"
    command = [*MINT, "export", path, "--format", "hf", "--output", str(ours), "--data-dir", str(served.data_dir)]
    subprocess.run(command, check=True, capture_output=True, cwd=folder)
    [theirs] = runs_dir.rglob("merged_model")
    merged, wanted, base = (weights(part) for part in (theirs, ours, folder / EXPORTED))
    torch.testing.assert_close(merged, wanted, rtol=2**-8, atol=0)
    assert not torch.equal(merged["lm_head.weight"], base["lm_head.weight"])


def weights(model: Path) -> dict[str, torch.Tensor]:
    """The tensors of a model's folder."""
    return {name: tensor.float() for path in model.glob("*.safetensors") for name, tensor in load_file(path).items()}


def test_every_tutorial_of_the_cookbook_is_run() -> None:
    files = {path.stem for path in (cookbook_source() / "tutorials").glob("*.py")}
    assert files == TUTORIALS.keys()


def test_the_page_shows_which_tutorials_were_run() -> None:
    """Last of this file: writes the table if every tutorial has run."""
    if RESULTS.keys() != TUTORIALS.keys():
        pytest.skip("not every tutorial has run")
    code = "import importlib.metadata, json, sys; print(json.dumps([*map(importlib.metadata.version, sys.argv[1:])]))"
    printed = subprocess.run([cookbook_python(), "-c", code, *PACKAGES], capture_output=True, text=True, check=True)
    versions = dict(zip(PACKAGES, json.loads(printed.stdout), strict=True))
    replace_part(PAGE, "tutorials", tutorial_table(RESULTS, versions, datetime.datetime.now(datetime.UTC).date()))
