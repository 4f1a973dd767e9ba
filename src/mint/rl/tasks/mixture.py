"""A mixture of tasks: the items of several tasks in the shares of their weights, each graded by its own task."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from mint.errors import InvalidRequestError
from mint.rl.adapter import MessageEnvAdapter, RLAdapter, Task, as_task, task_name
from mint.rl.message_env import MessageEnv

log = logging.getLogger(__name__)

MAX_REPEATS = 100
MAX_ITEMS = 100_000
"""A mixture's dataset has at most so many times its tasks' items, and at most so many items, or as many as its tasks
have together. A large task with a small weight then gives only some of its items, and at least one."""


@dataclass(frozen=True)
class MixedItem:
    """An item with the name of its task."""

    task: str
    item: Any

    def __str__(self) -> str:
        return f"{self.task}: {self.item}"


class _Mixture(Task):
    """The base of both kinds of mixture. `tasks` by name; `weights` by name, 1 where none is given."""

    def __init__(self, tasks: Mapping[str, Task], weights: Mapping[str, float], seed: int) -> None:
        self.tasks = dict(tasks)
        self.weights = {name: float(weights.get(name, 1.0)) for name in tasks}
        self.seed = seed
        self.success_reward = max(task.success_reward for task in self.tasks.values())
        ranges = [task.reward_range for task in self.tasks.values()]
        declared = [one for one in ranges if one is not None]
        if len(declared) == len(ranges):
            self.reward_range = min(low for low, _ in declared), max(high for _, high in declared)

    def build_dataset(self) -> Sequence[MixedItem]:
        """Each task's items in its share, repeated as often as needed; whole rounds of a task come in a drawn order."""
        total_weight = sum(self.weights.values())
        shares = {name: weight / total_weight for name, weight in self.weights.items() if weight}
        items = {name: list(self.tasks[name].build_dataset()) for name in shares}
        empty = [name for name, own in items.items() if not own]
        if empty:
            raise InvalidRequestError(
                "has no items", field="mixture.tasks", value=empty[0], remedy="Return at least one, or leave it out"
            )
        total = sum(map(len, items.values()))
        most = max(total, min(MAX_REPEATS * total, MAX_ITEMS))
        size = min(most, max(len(items[name]) / share for name, share in shares.items()))
        random = np.random.default_rng(self.seed)
        mixed = []
        for name, share in shares.items():
            count = max(1, round(size * share))
            if count < len(items[name]):
                log.warning(
                    "the mixture leaves out %d of the %d items of %s, because of the weights: give it a larger weight, "
                    "or fewer items",
                    len(items[name]) - count,
                    len(items[name]),
                    name,
                )
            rounds = math.ceil(count / len(items[name]))
            order = np.concatenate([random.permutation(len(items[name])) for _ in range(rounds)])[:count]
            mixed += [MixedItem(name, items[name][place]) for place in order]
        return mixed

    def build_heldout(self) -> Sequence[MixedItem]:
        """The held-out items of all tasks in turn, so that a part of them has some of each task."""
        of_tasks = [[MixedItem(name, item) for item in task.build_heldout()] for name, task in self.tasks.items()]
        longest = max(map(len, of_tasks))
        return [own[place] for place in range(longest) for own in of_tasks if place < len(own)]

    def item_key(self, item: MixedItem, /) -> str:
        """The key that its own task gives it."""
        return f"{item.task}\0{self.tasks[item.task].item_key(item.item)}"

    def task_of(self, item: MixedItem, /) -> Task:
        """The task that grades it."""
        return self.tasks[item.task].task_of(item.item)

    def category(self, item: MixedItem, /) -> str:
        """The name of its task."""
        return item.task

    def demonstrate(self, item: MixedItem, /) -> str | None:
        """That of its own task."""
        return self.tasks[item.task].demonstrate(item.item)

    def close(self) -> None:
        """Closes every task."""
        for task in self.tasks.values():
            task.close()


class MixtureAdapter(_Mixture, RLAdapter):
    """A mixture of tasks of one prompt and one completion."""

    def make_prompt(self, item: MixedItem, tokenizer: Any, /) -> list[int]:
        return _of_one_turn(self.tasks[item.task]).make_prompt(item.item, tokenizer)

    def compute_reward(self, response: str, item: MixedItem, /) -> Any:
        return _of_one_turn(self.tasks[item.task]).compute_reward(response, item.item)

    def compute_group_rewards(self, responses: Sequence[str], item: MixedItem, /) -> Any:
        return _of_one_turn(self.tasks[item.task]).compute_group_rewards(responses, item.item)


class EpisodeMixtureAdapter(_Mixture, MessageEnvAdapter):
    """A mixture of tasks of many turns."""

    def make_env(self, item: MixedItem, /) -> MessageEnv:
        task = self.tasks[item.task]
        if not isinstance(task, MessageEnvAdapter):
            raise InvalidRequestError(
                "is of one turn", field="mixture", value=item.task, remedy="Ask task_of(item) which kind it is"
            )
        return task.make_env(item.item)


class MixtureOfTurnsAdapter(MixtureAdapter, EpisodeMixtureAdapter):
    """A mixture of tasks of one turn and of many: each item is rolled out as its own task asks."""


def _of_one_turn(task: Task) -> RLAdapter:
    """Raises InvalidRequestError for a task of many turns."""
    if isinstance(task, RLAdapter):
        return task
    raise InvalidRequestError(
        "is of many turns", field="mixture", value=task_name(task), remedy="Ask task_of(item) which kind it is"
    )


def mixture(
    tasks: Mapping[str, Task], *, weights: Mapping[str, float] | None = None, seed: int = 0
) -> RLAdapter | MessageEnvAdapter:
    """A task whose items come from `tasks` in the shares of `weights` (1 where none is given).

    An epoch has every item of each task, and repeats the items of tasks that are too small for their share, up to
    `MAX_REPEATS`. Tasks of one turn and of many may stand together, and each keeps its own `success_reward` and
    `reward_range`. The metrics of each task are logged under its name (`Task.category`). `seed` draws the order of
    repeated items.

    Raises:
        InvalidRequestError: no tasks, an object that is no task, a task with `compute_batch_rewards`, or a weight that
            is negative or of no task, or all 0.
    """
    weights = weights or {}
    wrong = _refusal(tasks, weights)
    if wrong is not None:
        raise wrong
    checked = {name: as_task(task) for name, task in tasks.items()}
    has_one_turn = any(isinstance(task, RLAdapter) for task in checked.values())
    has_many = any(isinstance(task, MessageEnvAdapter) for task in checked.values())
    if has_one_turn and has_many:
        return MixtureOfTurnsAdapter(checked, weights, seed)
    return EpisodeMixtureAdapter(checked, weights, seed) if has_many else MixtureAdapter(checked, weights, seed)


def _refusal(tasks: Mapping[str, Task], weights: Mapping[str, float]) -> InvalidRequestError | None:
    if not isinstance(tasks, Mapping):
        return InvalidRequestError(
            "gives the tasks no names",
            field="mixture.tasks",
            value=type(tasks).__name__,
            remedy='Give a dict, such as {"sums": SumsAdapter(), "words": WordsAdapter()}',
        )
    if not tasks:
        return InvalidRequestError("has no tasks", field="mixture.tasks", value={}, remedy="Name at least one task")
    unnamed = [name for name in tasks if not str(name).strip()]
    if unnamed:
        return InvalidRequestError(
            "has a task without a name",
            field="mixture.tasks",
            value=repr(unnamed[0]),
            remedy="Give each task a text as its name: its metrics are logged under it",
        )
    batched = [name for name, task in tasks.items() if isinstance(task, RLAdapter) and _grades_batches(task)]
    if batched:
        return InvalidRequestError(
            "grades whole batches, and a batch of a mixture has items of other tasks, too",
            field="mixture.tasks",
            value=batched[0],
            remedy="Let it have compute_reward or compute_group_rewards instead",
        )
    bad = {name: weight for name, weight in weights.items() if name not in tasks or not _is_weight(weight)}
    if bad or not any(weights.get(name, 1.0) for name in tasks):
        return InvalidRequestError(
            "must be numbers of at least 0, by the names of the tasks, and not all 0",
            field="mixture.weights",
            value=bad or dict(weights),
            remedy=f"The tasks are {', '.join(tasks)}",
        )
    return None


def _is_weight(given: Any) -> bool:
    return isinstance(given, int | float | np.number) and 0 <= given < math.inf


def _grades_batches(task: RLAdapter) -> bool:
    return type(task).compute_batch_rewards is not RLAdapter.compute_batch_rewards
