"""Every sampled token is accounted for, and the stages are parts of one another."""

from __future__ import annotations

import io

import numpy as np
from rich.console import Console

from mint.rl.config import RLConfig
from mint.rl.rollout import Group, Rollout, RolloutBatch, Turn
from mint.rl.tracking.step_log import rollout_rows
from mint.rl.tracking.token_counts import (
    TokenCounts,
    token_counts_by_item,
    token_counts_of_steps,
    token_counts_table,
    token_metrics,
)
from mint.rl.training.advantages import rollout_advantages
from mint.rl.training.policy_update import PolicyUpdate, TrainedRollout


class Words:
    """A tokenizer that is only asked for text."""

    def decode(self, tokens: list[int]) -> str:
        return " ".join(map(str, tokens))


def rollout(tokens: int, reward: float | None) -> Rollout:
    turns = [Turn([1, 2], list(range(tokens)), [-0.5] * tokens)]
    return Rollout(turns, "text", "stop", reward, error=None if reward is not None else "the judge is away")


def group(item: int, *rollouts: Rollout) -> Group:
    return Group(f"sample {item}", item, [1, 2], list(rollouts))


GROUPS = [
    group(7, rollout(3, 1.0), rollout(5, 0.0), rollout(4, 0.5)),  # all inform; the middle one has advantage 0
    group(8, rollout(2, 1.0), rollout(2, 1.0)),  # equal rewards
    group(9, rollout(6, None), rollout(1, 0.0)),  # one ungraded
]
REPLACED = [group(7, rollout(10, 0.0), rollout(10, 0.0))]


def step() -> tuple[RolloutBatch, PolicyUpdate]:
    batch = RolloutBatch(1, GROUPS, REPLACED)
    counted = rollout_advantages(GROUPS, RLConfig())
    trained = [
        TrainedRollout(one.rollout, one.advantage, np.full(len(one.rollout.tokens), one.advantage), None)
        for one in counted
        if one.advantage
    ]
    return batch, PolicyUpdate(
        counted, trained, metrics={"train/clip_low_fraction": 0.25, "train/clip_high_fraction": 0.25}
    )


def test_a_step_counts_tokens_from_sampled_to_trained() -> None:
    ledger = token_metrics(*step())
    assert ledger == {
        "ledger/generated": 43.0,  # 12 + 4 + 7 + 20 refilled
        "ledger/graded": 37.0,  # without the ungraded 6
        "ledger/informative": 12.0,
        "ledger/trained": 8.0,  # without the 4 tokens of advantage 0
        "ledger/gradient": 4.0,  # half of them clipped
    }


def test_the_ledgers_of_all_items_add_up_to_that_of_the_step() -> None:
    batch, update = step()
    by_item = token_counts_by_item(rollout_rows(batch, update, Words()))
    assert by_item[7] == TokenCounts(generated=32, graded=32, informative=12, trained=8)
    assert by_item[9] == TokenCounts(generated=7, graded=1, informative=0, trained=0)
    assert list(by_item) == [7, 9, 8]
    assert sum(by_item.values(), TokenCounts()) == token_counts_of_steps([token_metrics(batch, update)])


def test_a_group_that_could_not_be_sampled_costs_nothing() -> None:
    batch = RolloutBatch(1, [Group("sample", 3, [1], [], error="too long")])
    assert token_metrics(batch, PolicyUpdate([]))["ledger/generated"] == 0.0
    assert token_counts_by_item(rollout_rows(batch, PolicyUpdate([]), Words())) == {}


def test_the_table_shows_counts_and_shares() -> None:
    console = Console(file=io.StringIO(), width=100)
    console.print(token_counts_table({7: TokenCounts(32, 32, 12, 8)}, title="tokens"))
    text = console.file.getvalue()
    assert "12 (38%)" in text
    assert "8 (25%)" in text
