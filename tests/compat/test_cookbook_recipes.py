"""Recipes of tinker-cookbook run to their end at their own settings, with its default loss `stable_reinforce`."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.compat.sdk_environments import cookbook_python
from tests.compat.served import Served, mint_serve
from tests.compat.stand_in_model import make_stand_in

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]

HERE = Path(__file__).parent
MODELS = ("Qwen/Qwen3.5-9B", "Qwen/Qwen3.5-9B-Base")
"""What the recipes name."""

RECIPES = {
    "rl_loop": ("tinker_cookbook.recipes.rl_loop", "max_steps=2"),
    "math_rl": ("tinker_cookbook.recipes.math_rl.train", "max_steps=3"),
    "math_rl, sampling ahead": ("tinker_cookbook.recipes.math_rl.train", "max_steps=3", "max_steps_off_policy=1"),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the recipes run: the models' names are folders there, so that their tokenizers are found."""
    return tmp_path_factory.mktemp("work")


@pytest.fixture(scope="module")
def served(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    options = []
    for name in MODELS:
        options += ["--model", f"{name}={make_stand_in(folder, name)}"]
    with mint_serve(tmp_path_factory.mktemp("served"), *options) as running:
        yield running


@pytest.mark.parametrize("name", RECIPES)
def test_a_recipe_trains_at_its_own_settings(served: Served, folder: Path, name: str) -> None:
    log_path = folder / "logs" / name.replace(" ", "_")
    module, *options = RECIPES[name]
    arguments = [module, f"log_path={log_path}", *options]
    done = served.run(
        cookbook_python(), HERE / "cookbook_recipe.py", *arguments, owner="recipes", cwd=folder, timeout_s=900
    )
    assert done.returncode == 0, done.stderr[-3000:]
    config = json.loads((log_path / "config.json").read_text())
    loss = config["loss_fn"] if "off_policy" not in str(options) else config["async_config"]["loss_fn"]
    assert loss == "stable_reinforce"
    rows = [json.loads(line) for line in (log_path / "metrics.jsonl").read_text().splitlines()]
    trained = [row for row in rows if row.get("update_norm", row.get("optim/update_norm", 0)) > 0]
    assert len(trained) >= 2, rows
    assert "final" in (log_path / "checkpoints.jsonl").read_text()
