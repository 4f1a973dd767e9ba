"""The replay of rare successes: what is kept, what it replaces, and that a run goes on with it."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mint.rl import Group, RLAdapter, RLConfig, Rollout, run_grpo
from mint.rl.rollout import RolloutBatch, Turn
from mint.rl.rollouts.replay_buffer import ReplayBuffer


class Lucky(RLAdapter):
    """A success is a reply that the bundled model rarely gives."""

    def build_dataset(self) -> Sequence[str]:
        return ["1 + 1", "2 + 5", "3 + 3", "4 + 4"]

    def make_prompt(self, item: str, tokenizer: Any) -> list[int]:
        return tokenizer.encode(f"Q: What is {item}?\nA:")

    def compute_reward(self, response: str, item: str) -> float:
        return float(response.strip() not in {"2", "12", "7", "17", "6", "16", "8", "18"})


def rollout(reward: float | None, token: int = 2) -> Rollout:
    return Rollout([Turn([1], [token], [-1.0])], "x", "stop", reward=reward)


def group(index: int, *rewards: float | None) -> Group:
    return Group("item", index, [1], [rollout(reward, place) for place, reward in enumerate(rewards)])


def buffer(**fields: Any) -> ReplayBuffer:
    return ReplayBuffer(Lucky(), RLConfig(**{"replay_size": 2, "replay_below": 0.25, **fields}))


def rewards(batch: RolloutBatch) -> list[list[float | None]]:
    return [[one.reward for one in each.rollouts] for each in batch.groups]


def test_a_rare_success_takes_the_place_of_a_failure_of_its_own_item() -> None:
    kept = buffer()
    kept.add([group(0, 0, 1, 0, 0), group(1, 1, 1, 0, 0), group(2, 0, 0, 0, 0)])
    batch, count = kept.replay(RolloutBatch(2, [group(0, 0, 0, 0, None), group(1, 0, 0), group(0, 0, 1, 0)]))
    assert rewards(batch) == [[0, 0, 1, None], [0, 0], [0, 1, 0]]
    assert (count, batch.groups[0].rollouts[2].tokens) == (1, [1])


def test_the_newest_success_of_each_item_is_kept_and_the_oldest_item_goes_first() -> None:
    kept = buffer()
    for index in (0, 1, 0, 2):
        kept.add([group(index, 0, 0, 0, 1)])
    assert [row["item"] for row in kept.to_dict()] == [0, 2]
    restored = buffer()
    restored.restore(json.loads(json.dumps(kept.to_dict())))
    again = RolloutBatch(9, [group(0, 0, 0), group(1, 0, 0), group(2, 0, 0)])
    assert rewards(restored.replay(again)[0]) == [[0, 1], [0, 0], [0, 1]]
    assert json.dumps(restored.to_dict()) == json.dumps(kept.to_dict())


def test_a_success_of_another_prompt_is_not_replayed_and_a_size_of_0_keeps_nothing() -> None:
    kept = buffer()
    kept.add([group(0, 0, 0, 0, 1)])
    other = replace(group(0, 0, 0), prompt=[5])
    assert kept.replay(RolloutBatch(2, [other]))[1] == 0
    none = buffer(replay_size=0)
    none.add([group(0, 0, 0, 0, 1)])
    assert none.to_dict() == []


@pytest.mark.learns
def test_a_run_replays_and_logs_what_was_sampled(tmp_path: Path) -> None:
    config = RLConfig(
        base_model="mint/tiny", steps=8, batch_size=4, group_size=8, max_tokens=4, temperature=2.0, heldout_size=0,
        learning_rate=1e-3, replay_size=8, save_every=3, print_progress=False, run_dir=tmp_path,
    )  # fmt: skip
    result = run_grpo(Lucky(), config)
    rows = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert sum(row["replay/used"] for row in rows) > 0
    rollouts = [json.loads(line) for line in (tmp_path / "rollouts.jsonl").read_text().splitlines()]
    for row in rows:
        sampled = [each["reward"] for each in rollouts if each["step"] == row["step"]]
        assert len(sampled) == 32
        assert row["reward/mean"] == pytest.approx(np.mean(sampled)), "replayed rollouts are not counted again"
    plain = run_grpo(Lucky(), config.changed(replay_size=0, run_dir=tmp_path / "plain"))
    assert plain.state_digest != result.state_digest
