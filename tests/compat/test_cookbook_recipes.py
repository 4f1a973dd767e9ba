"""Recipes of tinker-cookbook run at their own settings but for the number of steps; the page names all of them."""

from __future__ import annotations

import datetime
import json
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.compat.page import PAGE, recipe_table
from tests.compat.sdk_environments import cookbook_python
from tests.compat.served import Served, mint_serve
from tests.compat.stand_in_model import make_stand_in
from tests.generated_page import replace_part

pytestmark = [pytest.mark.slow, pytest.mark.timeout(3600)]

HERE = Path(__file__).parent
ROOM = "tinker_cookbook.recipes"
MODELS = (
    *("Qwen/Qwen3-8B", "Qwen/Qwen3.5-4B", "Qwen/Qwen3.5-9B", "Qwen/Qwen3.5-9B-Base", "Qwen/Qwen3.5-397B-A17B"),
    *("Qwen/Qwen3.6-27B", "Qwen/Qwen3.6-35B-A3B"),
)
"""What the recipes name."""

RECIPES = {
    "rl_loop": ("rl_loop", "max_steps=2"),
    "math_rl": ("math_rl.train", "max_steps=3"),
    "math_rl, sampling ahead": ("math_rl.train", "max_steps=3", "max_steps_off_policy=1"),
    "sl_loop": ("sl_loop", "max_steps=2"),
    "sl_basic": ("sl_basic", "max_steps=2"),
    "chat_sl": ("chat_sl.train", "max_steps=2"),
    "dpo": ("preference.dpo.train", "max_steps=2"),
    "shorter": ("preference.shorter.train", "max_steps=2"),
}
"""Name → module below `ROOM`, and its options."""

_OFFLINE = "not tried yet: it should run with a data stand-in"
_SOUND = "sound: mint's models read text only"
_IMAGES = "images: mint's models read text only"
_SANDBOX = "runs programs in containers of a service (Harbor, Modal, SandboxFusion)"
_HUB_FILE = "downloads a CSV file from the hub; not tried with a stand-in"
_OLD_VERIFIERS = "imports modules that verifiers 0.4 does not have"
_EXAMINES = "examines results of other runs"
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
    "code_rl.lcb_utils": _SANDBOX,
    "code_rl.train": _SANDBOX,
    "harbor_rl.scripts.eval_harbor_rl": _SANDBOX,
    "harbor_rl.scripts.train_terminal_bench": _SANDBOX,
    "distillation.on_policy_distillation_harbor_multi_turn": _SANDBOX,
    "search_tool.offline_eval": "asks a Chroma database, with embeddings of Gemini",
    "search_tool.train": "asks a Chroma database, with embeddings of Gemini",
    "verifiers_rl.evaluate": _OLD_VERIFIERS,
    "verifiers_rl.train": _OLD_VERIFIERS,
    "forecasting.data": _HUB_FILE,
    "forecasting.train": _HUB_FILE,
    "decisions.forecasting": _HUB_FILE,
    "chat_sl.sweep.analyze": _EXAMINES,
    "true_thinking_score.analyze": _EXAMINES,
    "chat_sl.sweep.cli": "starts chat_sl many times",
    "chat_sl.sweep.launch_all": "starts chat_sl many times",
    "chat_sl.sweep.runner": "starts chat_sl many times",
    "multiplayer_rl.text_arena.play": "a person plays",
    "rubric.debug_env": _OFFLINE,
    "decisions.demo": _OFFLINE,
    "distillation.off_policy_reasoning": _OFFLINE,
    "distillation.on_policy_distillation": _OFFLINE,
    "distillation.on_policy_multi_teacher": _OFFLINE,
    "multiplayer_rl.guess_number.train": _OFFLINE,
    "multiplayer_rl.text_arena.train": _OFFLINE,
    "multiplayer_rl.twenty_questions.train": _OFFLINE,
    "preference.rlhf.rlhf_pipeline": _OFFLINE,
    "prompt_distillation.create_data": _OFFLINE,
    "prompt_distillation.train": _OFFLINE,
    "rl_basic": _OFFLINE,
    "rl_numerics_check.train": _OFFLINE,
    "rubric.generate_data": _OFFLINE,
    "rubric.prometheus_experimental": _OFFLINE,
    "rubric.train": _OFFLINE,
    "sdft.benchmark": _OFFLINE,
    "sdft.run_continual_learning": _OFFLINE,
    "sdft.train": _OFFLINE,
    "true_thinking_score.run_small_experiment": _OFFLINE,
}
"""Programs below `ROOM` that are not run, and why."""

RESULTS: dict[str, str] = {}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the recipes run: the models' names are folders there, so that their tokenizers are found."""
    work = tmp_path_factory.mktemp("work")
    first, *others = MODELS
    made = make_stand_in(work, first)
    for name in others:
        (work / name).symlink_to(made)
    return work


@pytest.fixture(scope="module")
def served(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    options = [option for name in MODELS for option in ("--model", f"{name}={(folder / name).resolve()}")]
    with mint_serve(tmp_path_factory.mktemp("served"), *options) as running:
        yield running


@pytest.mark.parametrize("name", RECIPES)
def test_a_recipe_trains_at_its_own_settings(served: Served, folder: Path, name: str) -> None:
    log_path = folder / "logs" / name.replace(" ", "_")
    module, *options = RECIPES[name]
    arguments = [f"{ROOM}.{module}", f"log_path={log_path}", *options]
    RESULTS[name] = "**fails**"
    done = served.run(
        cookbook_python(), HERE / "cookbook_recipe.py", *arguments, owner="recipes", cwd=folder, timeout_s=1800
    )
    assert done.returncode == 0, done.stderr[-3000:]
    rows = [json.loads(line) for line in (log_path / "metrics.jsonl").read_text().splitlines()]
    assert "final" in (log_path / "checkpoints.jsonl").read_text()
    if module in ("rl_loop", "math_rl.train"):
        config = json.loads((log_path / "config.json").read_text())
        ahead = "max_steps_off_policy=1" in options
        assert (config["async_config"] if ahead else config)["loss_fn"] == "stable_reinforce"
        trained = [row for row in rows if row.get("update_norm", row.get("optim/update_norm", 0)) > 0]
        assert len(trained) >= 2, rows
    RESULTS[name] = f"✓ {len(rows)} rows of metrics, a final checkpoint"


def test_every_program_of_the_cookbooks_recipes_is_run_or_named() -> None:
    """By the files of the installed package that can be started."""
    code = "import tinker_cookbook.recipes as room; print(next(iter(room.__path__)))"
    printed = subprocess.run([cookbook_python(), "-c", code], capture_output=True, text=True, check=True).stdout
    recipes = Path(printed.strip())
    programs = {
        ".".join(path.relative_to(recipes).with_suffix("").parts)
        for path in recipes.rglob("*.py")
        if "__main__" in path.read_text() and not path.name.endswith("_test.py")
    }
    run = {module for module, *_ in RECIPES.values()}
    assert programs == run | NOT_RUN.keys()
    assert not run & NOT_RUN.keys()


def test_the_page_shows_which_recipes_were_run() -> None:
    """Last of this file: writes the tables if every recipe has run."""
    if RESULTS.keys() != RECIPES.keys():
        pytest.skip("not every recipe has run")
    date = datetime.datetime.now(datetime.UTC).date().isoformat()
    replace_part(PAGE, "recipes", f"Run on {date}.\n\n{recipe_table(RECIPES, RESULTS, NOT_RUN)}")
