"""Recipes of tinker-cookbook run at their own settings but for the size of a run; the page names all of them."""

from __future__ import annotations

import csv
import datetime
import json
import re
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.compat.page import PAGE, recipe_table
from tests.compat.sdk_environments import cookbook_python
from tests.compat.served import Served
from tests.generated_page import read_part, replace_part

pytestmark = [pytest.mark.slow, pytest.mark.timeout(3600)]

HERE = Path(__file__).parent
ROOM = "tinker_cookbook.recipes"


@dataclass(frozen=True)
class Recipe:
    """A program below `ROOM`, its options, and what shows that it ran to its end."""

    module: str
    options: tuple[str, ...] = ()
    runs: int = 0
    """How many training runs it makes: folders with metrics and a final checkpoint."""
    writes: str = ""
    """A file that it writes where it is started, or below its folder of runs."""
    asked: str = ""
    """What a person would type."""
    prints: str = ""
    """A regular expression of what it prints."""
    moves: bool = False
    """Whether its steps move the weights: with rewards that are all equal, those of RL do not."""


_TWO_STEPS = "max_steps=2"
_NO_EVALUATION = "eval_every=0"
_FORECASTS = "prophet.csv"

RECIPES = {
    "rl_loop": Recipe("rl_loop", (_TWO_STEPS,), runs=1, moves=True),
    "rl_basic": Recipe("rl_basic", (_TWO_STEPS,), runs=1),
    "math_rl": Recipe("math_rl.train", ("max_steps=3",), runs=1, moves=True),
    "math_rl, sampling ahead": Recipe("math_rl.train", ("max_steps=3", "max_steps_off_policy=1"), runs=1, moves=True),
    "sl_loop": Recipe("sl_loop", (_TWO_STEPS,), runs=1, moves=True),
    "sl_basic": Recipe("sl_basic", (_TWO_STEPS,), runs=1, moves=True),
    "chat_sl": Recipe("chat_sl.train", (_TWO_STEPS,), runs=1, moves=True),
    "chat_sl, a sweep": Recipe(
        "chat_sl.sweep.cli",
        ("recipe=sft", "training_budget_examples=640", "learning_rates=[1e-4, 1e-3]", "lora_ranks=[32]"),
        runs=2,
        moves=True,
    ),
    "dpo": Recipe("preference.dpo.train", (_TWO_STEPS,), runs=1),
    "shorter": Recipe("preference.shorter.train", (_TWO_STEPS,), runs=1),
    "rlhf: SFT, a reward model, RL": Recipe(
        "preference.rlhf.rlhf_pipeline", (_TWO_STEPS, "batch_size=16", _NO_EVALUATION), runs=3
    ),
    "off-policy distillation": Recipe("distillation.off_policy_reasoning", (_TWO_STEPS,), runs=1, moves=True),
    "on-policy distillation": Recipe(
        "distillation.on_policy_distillation", (_TWO_STEPS, "groups_per_batch=16"), runs=1, moves=True
    ),
    "on-policy distillation, two teachers": Recipe(
        "distillation.on_policy_multi_teacher",
        (_TWO_STEPS, "deepmath_groups_per_batch=8", "tulu3_groups_per_batch=8"),
        runs=1,
        moves=True,
    ),
    "self-distillation": Recipe("sdft.train", (_TWO_STEPS, _NO_EVALUATION), runs=1, moves=True),
    "self-distillation, benchmark": Recipe(
        "sdft.benchmark", (_TWO_STEPS, "sft_max_steps=2"), runs=2, writes="benchmark_summary_science.json"
    ),
    "self-distillation, continual learning": Recipe(
        "sdft.run_continual_learning", ("learning_rates=1e-3",), runs=6, writes="stage1_checkpoints.json"
    ),
    "prompt distillation, data": Recipe("prompt_distillation.create_data", writes="prompt_distillation_lang.jsonl"),
    "prompt distillation": Recipe(
        "prompt_distillation.train", (_TWO_STEPS, "file_path=languages.jsonl"), runs=1, moves=True
    ),
    "rubric, data": Recipe("rubric.generate_data", writes="example_rubric_train.jsonl"),
    "rubric": Recipe("rubric.train", (_TWO_STEPS, "groups_per_batch=8", _NO_EVALUATION), runs=1),
    "rubric, Prometheus": Recipe(
        "rubric.prometheus_experimental", (_TWO_STEPS, "groups_per_batch=8", _NO_EVALUATION), runs=1
    ),
    "rubric, one episode": Recipe("rubric.debug_env", prints="Extracted Score"),
    "guess the number": Recipe(
        "multiplayer_rl.guess_number.train", (_TWO_STEPS, "batch_size=4", _NO_EVALUATION), runs=1
    ),
    "twenty questions": Recipe(
        "multiplayer_rl.twenty_questions.train", (_TWO_STEPS, "batch_size=4", _NO_EVALUATION), runs=1
    ),
    "tic-tac-toe": Recipe("multiplayer_rl.text_arena.train", (_TWO_STEPS, "batch_size=8", _NO_EVALUATION), runs=1),
    "numerics of RL": Recipe("rl_numerics_check.train", (_TWO_STEPS, "groups_per_batch=4"), runs=1),
    "forecasting, data": Recipe("forecasting.data", ("--data-path", _FORECASTS), prints="validation: 128 examples"),
    "forecasting": Recipe(
        "forecasting.train",
        (_TWO_STEPS, "groups_per_batch=2", "max_tokens=256", _NO_EVALUATION, f"data_path={_FORECASTS}"),
        runs=1,
    ),
    "decisions": Recipe(
        "decisions.demo",
        ("--model_name=Qwen/Qwen3.6-27B",),
        asked="How do I pick a learning rate?\n\n",
        prints=r'"sdk": 0\.\d+',
    ),
    "decisions, trained": Recipe("decisions.forecasting", (f"data_path={_FORECASTS}",), runs=1),
    "true thinking score": Recipe("true_thinking_score.run_small_experiment", writes="tts_results.json"),
    "true thinking score of a data set": Recipe(
        "true_thinking_score.analyze",
        ("n_problems=8",),
        writes="tts_per_problem.jsonl",
        prints="Problems: 8/8 succeeded",
    ),
}
"""Name → program. The options make a run short, or name a file of made-up data."""

STABLE = ("rl_loop", "math_rl.train")
"""What trains with `stable_reinforce` by default, and with groups that have a signal."""

_SOUND = "sound: mint's models read text only"
_IMAGES = "images: mint's models read text only"
_SANDBOX = "runs programs in containers of a service (Harbor, Modal, SandboxFusion)"
_CHROMA = "asks a Chroma database, with embeddings of Gemini"
NOT_RUN = {
    "audio.asr.rl_train": _SOUND,
    "audio.asr.sl_train": _SOUND,
    "audio.emotion.evaluate": _SOUND,
    "audio.emotion.prepare_data": _SOUND,
    "audio.emotion.rl_train": _SOUND,
    "audio.emotion.sl_train": _SOUND,
    "audio.medical_asr.train": _SOUND,
    "vlm_classifier.eval": _IMAGES,
    "vlm_classifier.eval_sweep": _IMAGES,
    "vlm_classifier.sweep": _IMAGES,
    "vlm_classifier.train": _IMAGES,
    "code_rl.train": _SANDBOX,
    "harbor_rl.scripts.eval_harbor_rl": _SANDBOX,
    "harbor_rl.scripts.train_terminal_bench": _SANDBOX,
    "distillation.on_policy_distillation_harbor_multi_turn": _SANDBOX,
    "search_tool.offline_eval": _CHROMA,
    "search_tool.train": _CHROMA,
    "verifiers_rl.evaluate": "evaluates, then fails in the cookbook: it gives verifiers 0.1.9 an empty list of errors",
    "verifiers_rl.train": "fails in the cookbook: its rollouts do not take the trainer's argument `termination`",
    "chat_sl.sweep.analyze": "reads runs from Weights & Biases",
    "chat_sl.sweep.launch_all": "starts `chat_sl.sweep` in processes of its own, which load data sets of the hub",
    "multiplayer_rl.text_arena.play": "a person plays",
}
"""Programs below `ROOM` that are not run, and why."""

RESULTS: dict[str, str] = {}
TODAY = datetime.datetime.now(datetime.UTC).date().isoformat()


SENTENCES = 32
"""Of the 2,100 in the cookbook's example file: the bundled model writes up to 1,000 tokens about each."""
FORECAST_COLUMNS = (
    *("submission_id", "event_ticker", "title", "snapshot_time", "close_time"),
    *("market_outcome", "category", "markets", "sources"),
)


def write_data(work_dir: Path) -> None:
    """Files that recipes read where they are started: the cookbook's own examples, and made-up ones."""
    installed = subprocess.run(
        [cookbook_python(), "-c", "import tinker_cookbook as room; print(next(iter(room.__path__)))"],
        capture_output=True,
        text=True,
        check=True,
    )
    examples = work_dir / "tinker_cookbook" / "example_data"
    shutil.copytree(Path(installed.stdout.strip()) / "example_data", examples)
    sentences = (examples / "multilingual.txt").read_text().splitlines()
    (examples / "multilingual.txt").write_text("\n".join(sentences[:SENTENCES]))
    with (work_dir / "languages.jsonl").open("w") as file:
        for number in range(1024):
            asked, answered = f"Number {number} is here.", "en"
            messages = [{"role": "user", "content": asked}, {"role": "assistant", "content": answered}]
            file.write(json.dumps({"messages": messages}) + "\n")
    with (work_dir / _FORECASTS).open("w", newline="") as file:
        table = csv.writer(file)
        table.writerow(FORECAST_COLUMNS)
        for number in range(256):
            month = "09" if number < 128 else "11"  # before and after the recipe's split
            times = (f"2025-{month}-01T00:00:00Z", f"2025-{month}-08T00:00:00Z")
            sources = [{"title": "A title", "summary": "A summary.", "ranking": 1}]
            market = f"Is {number} even?"
            outcome = {market: 1 - number % 2}
            row = (f"s{number}", f"e{number}", f"Number {number}", *times)
            table.writerow((*row, json.dumps(outcome), "numbers", json.dumps([market]), json.dumps(sources)))


@pytest.fixture(scope="module")
def folder(cookbook_folder: Path) -> Path:
    """Where the recipes run, with the data that they read."""
    write_data(cookbook_folder)
    return cookbook_folder


@pytest.mark.parametrize("name", RECIPES)
def test_a_recipe_runs_to_its_end_at_its_own_settings(cookbook_served: Served, folder: Path, name: str) -> None:
    recipe = RECIPES[name]
    runs_dir = folder / "runs" / re.sub(r"\W+", "_", name)
    RESULTS[name] = f"{TODAY} | **fails**"
    done = cookbook_served.run(
        cookbook_python(),
        HERE / "cookbook_program.py",
        f"{ROOM}.{recipe.module}",
        *recipe.options,
        owner="recipes",
        cwd=folder,
        timeout_s=1800,
        typed=recipe.asked,
        more_variables={"TINKER_COOKBOOK_RUNS_DIR": str(runs_dir)},
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert re.search(recipe.prints, done.stdout + done.stderr), done.stdout[-3000:]
    said = []
    if recipe.runs:
        logs = sorted(runs_dir.rglob("metrics.jsonl"))
        assert len(logs) == recipe.runs, logs
        rows = [json.loads(line) for log in logs for line in log.read_text().splitlines()]
        assert all("final" in (log.parent / "checkpoints.jsonl").read_text() for log in logs)
        said.append(f"{len(rows)} rows of metrics, {_counted(recipe.runs, 'final checkpoint')}")
        norms = [row.get("update_norm", row.get("optim/update_norm", 0.0)) for row in rows]
        assert not recipe.moves or sum(norm > 0 for norm in norms) >= 2, norms
        if recipe.module in STABLE:
            config = json.loads((logs[0].parent / "config.json").read_text())
            ahead = "max_steps_off_policy=1" in recipe.options
            assert (config["async_config"] if ahead else config)["loss_fn"] == "stable_reinforce"
    if recipe.writes:
        [written] = [path for top in (runs_dir, folder / "tinker_cookbook") for path in top.rglob(recipe.writes)]
        assert "error" not in written.read_text()
        said.append(f"writes {recipe.writes}")
    if recipe.prints:
        said.append("prints its result")
    RESULTS[name] = f"{TODAY} | ✓ {', '.join(said)}"


def _counted(number: int, noun: str) -> str:
    return f"a {noun}" if number == 1 else f"{number} {noun}s"


def test_every_program_of_the_cookbooks_recipes_is_run_or_named() -> None:
    """By the files of the installed package that can be started."""
    code = "import tinker_cookbook.recipes as room; print(next(iter(room.__path__)))"
    printed = subprocess.run([cookbook_python(), "-c", code], capture_output=True, text=True, check=True).stdout
    recipes = Path(printed.strip())
    programs = {
        ".".join(path.relative_to(recipes).with_suffix("").parts)
        for path in recipes.rglob("*.py")
        if re.search('^if __name__ == "__main__"', path.read_text(), re.MULTILINE)
        and not path.name.endswith("_test.py")
    }
    run = {recipe.module for recipe in RECIPES.values()}
    assert programs == run | NOT_RUN.keys()
    assert not run & NOT_RUN.keys()


def test_the_page_shows_which_recipes_were_run() -> None:
    """Last of this file: writes the rows of those that have run; the others keep theirs."""
    programs = {name: (recipe.module, *recipe.options) for name, recipe in RECIPES.items()}
    replace_part(PAGE, "recipes", recipe_table(programs, RESULTS, NOT_RUN, read_part(PAGE, "recipes")))
