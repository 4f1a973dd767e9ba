"""Adapters of MinT's public demos run unchanged, configured by their environment variables."""

from __future__ import annotations

import random
import re
from typing import Any

import pytest

from mint import rl, rl_core
from mint.errors import InvalidRequestError

VARIABLES = {
    "MINT_BASE_MODEL": "mint/tiny", "MINT_LORA_RANK": "8", "MINT_RL_STEPS": "2", "MINT_RL_BATCH": "3",
    "MINT_RL_GROUP": "5", "MINT_RL_LR": "1e-3", "MINT_RL_MAX_TOKENS": "7", "MINT_RL_TEMPERATURE": "0.9",
}  # fmt: skip


class Sums:
    """An adapter of the demos' shape, without a base class."""

    def __init__(self) -> None:
        self.evaluated: list[tuple[int, int, int]] = []

    def build_dataset(self) -> list:
        pairs = [(random.randint(0, 99), random.randint(0, 99)) for _ in range(50)]
        return [(f"Q: What is {a} + {b}?\nA:", a + b) for a, b in pairs]

    def make_prompt(self, item: tuple[str, int], tokenizer: Any) -> list[int]:
        return tokenizer.encode(item[0])

    def compute_reward(self, response: str, item: tuple[str, int]) -> float:
        match = re.search(r"-?\d+", response)
        return 1.0 if match and int(match.group()) == item[1] else 0.0

    def evaluate(self, step: int, rewards: list[float], num_datums: int) -> None:
        self.evaluated.append((step, len(rewards), num_datums))


@pytest.fixture
def _variables(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in VARIABLES.items():
        monkeypatch.setenv(name, value)


@pytest.mark.usefixtures("_variables")
def test_the_environment_configures_a_run_without_a_config() -> None:
    adapter = Sums()
    result = rl.run_grpo(adapter)
    assert [(step, rewards) for step, rewards, _ in adapter.evaluated] == [(1, 15), (2, 15)]
    assert result.samples == 30


@pytest.mark.usefixtures("_variables")
def test_the_demos_names_return_the_path_of_the_final_weights(capsys: pytest.CaptureFixture[str]) -> None:
    class Own(rl_core.RLAdapter):
        build_dataset, make_prompt, compute_reward = Sums.build_dataset, Sums.make_prompt, Sums.compute_reward

    cfg = rl_core.RLConfig.from_env()
    assert (cfg.model, cfg.rank, cfg.steps, cfg.batch, cfg.group) == ("mint/tiny", 8, 2, 3, 5)
    assert (cfg.lr, cfg.max_tokens, cfg.temperature) == (1e-3, 7, 0.9)
    cfg.steps = 1
    path = rl_core.run_grpo(Own(), cfg)
    assert path.startswith("mint://")
    printed = capsys.readouterr().out
    assert "Step 1: accuracy=" in printed
    assert "Saved: mint://" in printed


def test_a_variable_that_is_no_number_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MINT_RL_STEPS", "many")
    with pytest.raises(InvalidRequestError, match="MINT_RL_STEPS"):
        rl.RLConfig.from_env()


def test_what_is_no_task_is_refused_by_the_method_that_it_lacks() -> None:
    with pytest.raises(InvalidRequestError, match="compute_reward"):
        rl.run_grpo(object(), rl.RLConfig(base_model="mint/tiny"))


def test_the_old_name_of_item_key_is_refused_for_it_would_let_held_out_items_into_training() -> None:
    class Old(Sums):
        def sample_key(self, sample: object) -> str:
            return ""

    with pytest.raises(InvalidRequestError, match="sample_key"):
        rl.run_grpo(Old(), rl.RLConfig(base_model="mint/tiny"))
