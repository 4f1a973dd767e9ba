"""Rare successes, kept for replay: in a group without a success, that of its item takes the place of a failure.

Replay of verified successes (RLEP, arXiv 2507.07451). A replayed rollout keeps the logprobs of the weights that sampled
it, so that the ratios of the loss correct for its age. Knows nothing of items but their places in the dataset.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any

from mint.rl.adapter import Task
from mint.rl.config import RLConfig
from mint.rl.rollout import Group, Rollout, RolloutBatch, Turn


class ReplayBuffer:
    """The newest rare success of each item, of at most `config.replay_size` items; those kept longest go first."""

    def __init__(self, task: Task, config: RLConfig) -> None:
        self.task = task
        self.size = config.replay_size
        self.below = config.replay_below
        self._kept: dict[int, Rollout] = {}

    def add(self, groups: Sequence[Group]) -> None:
        """Keeps a success of each group in which at most the share `replay_below` succeeded."""
        if not self.size:
            return
        for group in groups:
            successes = self._successes(group)
            if successes and len(successes) <= self.below * len(group.graded):
                self._kept.pop(group.index, None)
                self._kept[group.index] = successes[0]
        for index in list(self._kept)[: max(0, len(self._kept) - self.size)]:
            del self._kept[index]

    def replay(self, batch: RolloutBatch) -> tuple[RolloutBatch, int]:
        """The batch with a kept success in each group of its item that has none, and their number.

        It takes the place of the last graded rollout. Where the prompt has changed, nothing is replayed.
        """
        groups = [self._with_success(group) for group in batch.groups]
        count = sum(one is not other for one, other in zip(groups, batch.groups, strict=True))
        return replace(batch, groups=groups), count

    def to_dict(self) -> list[dict[str, Any]]:
        """The state that a resumed run needs, for JSON."""
        return [{"item": item, "rollout": asdict(rollout)} for item, rollout in self._kept.items()]

    def restore(self, state: Sequence[Mapping[str, Any]]) -> None:
        """Continues from the state of `to_dict`."""
        self._kept = {}
        for row in state:
            fields: dict[str, Any] = dict(row["rollout"])
            fields["turns"] = [Turn(**turn) for turn in fields["turns"]]
            self._kept[int(row["item"])] = Rollout(**fields)

    def _successes(self, group: Group) -> list[Rollout]:
        task = self.task.task_of(group.item)
        return [one for one in group.graded if one.reward is not None and task.is_success(one.reward)]

    def _with_success(self, group: Group) -> Group:
        kept = self._kept.get(group.index)
        graded = group.graded
        if kept is None or len(graded) < 2 or self._successes(group) or kept.turns[0].prompt != group.prompt:
            return group
        return replace(group, rollouts=[kept if one is graded[-1] else one for one in group.rollouts])
