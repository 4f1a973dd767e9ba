"""The public tinker-cookbook trains against `mint serve`, unmodified: supervised, RL, preferences; the page says so."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.compat.sdk_environments import cookbook_python
from tests.compat.served import Served, link_tiny, mint_serve

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]

HERE = Path(__file__).parent
SAVED = re.compile(r"tinker://sess-\w+:train:\d+/weights/final")


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    with mint_serve(tmp_path_factory.mktemp("served")) as running:
        yield running


def train(served: Served, name: str, work_dir: Path, *options: str) -> dict[str, Any]:
    """What a run says at its end; the cookbook is started in a folder where `mint/tiny` is the model's."""
    link_tiny(work_dir)
    done = served.run(
        cookbook_python(), HERE / name, str(work_dir), "mint/tiny", *options, owner=name, cwd=work_dir, timeout_s=600
    )
    assert done.returncode == 0, done.stderr[-3000:]
    said = json.loads(done.stdout.splitlines()[-1])
    assert SAVED.fullmatch(said["checkpoint"]["state_path"]), said
    return said


def test_supervised_training_lowers_the_loss(served: Served, tmp_path: Path) -> None:
    said = train(served, "cookbook_supervised.py", tmp_path)
    assert said["steps"] == 5 and said["last"] < 0.7 * said["first"], said


def test_rl_training_raises_the_reward(served: Served, tmp_path: Path) -> None:
    said = train(served, "cookbook_rl.py", tmp_path)
    assert said["steps"] == 6 and max(said["rewards"][3:]) > said["rewards"][0], said


def test_rl_training_with_samples_a_step_ahead_raises_the_reward(served: Served, tmp_path: Path) -> None:
    said = train(served, "cookbook_rl.py", tmp_path, "ppo")
    assert said["steps"] == 6 and max(said["rewards"][3:]) > said["rewards"][0], said


def test_preference_training_lowers_the_dpo_loss(served: Served, tmp_path: Path) -> None:
    said = train(served, "cookbook_dpo.py", tmp_path)
    assert said["steps"] == 5 and abs(said["first"] - 0.6931) < 1e-3 and said["last"] < said["first"], said
