"""An RL task, as the user writes it: data, prompt, reward."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Mapping, Sequence
from typing import Any

from mint.errors import InvalidRequestError
from mint.rl.message_env import MessageEnv
from mint.rl.reward import Reward, RewardRange

SUCCESS_TOLERANCE = 1e-9
"""What a sum of named parts may lose to rounding."""

Graded = float | Reward
"""What a grader returns for one completion."""


class Task(ABC):
    """What the two kinds of task share: `RLAdapter` and `MessageEnvAdapter`.

    An *item* is whatever `build_dataset` yields. It is handed back unchanged as a positional argument, so overrides may
    name it as they like. It is written to the rollout log with `str()`, and a hash of its `item_key` keeps held-out
    items out of the training set.
    """

    heldout_name: str = "held-out"
    """Names the held-out set in the output."""

    reward_range: RewardRange | None = None
    """The declared bounds of a reward. One outside is a grader's error and trains nothing; None declares no bounds."""

    success_reward: float = 1.0
    """A rollout counts as a success from this reward on."""

    spec: Mapping[str, Any] | None = None
    """How the command line names this task (`task`, `seed`, `options`), so that a finished run can be read again."""

    @abstractmethod
    def build_dataset(self) -> Sequence[Any]:
        """The training items; called once. Order does not matter: each epoch is shuffled with the run's seed."""

    def build_heldout(self) -> Sequence[Any]:
        """Items that are evaluated before and after the run and never trained on. Empty: nothing is measured."""
        return ()

    def demonstrate(self, item: Any, /) -> str | None:
        """A completion that would earn full reward, if one is known; `mint train sft` trains on it."""
        return None

    def item_key(self, item: Any, /) -> str:
        """The text that identifies an item: two items with equal keys are the same. `repr` by default."""
        return repr(item)

    def category(self, item: Any, /) -> str | None:
        """A name under which the reward and the success of this item are logged, besides those of all items."""
        return None

    def task_of(self, item: Any, /) -> Task:
        """The task that this item belongs to, whose `success_reward` and `reward_range` count: of a mixture, one of its
        tasks."""
        return self

    def is_success(self, reward: float) -> bool:
        """Whether a rollout with this reward has solved its item."""
        return reward >= self.success_reward - SUCCESS_TOLERANCE

    def solved_share(self, reward: float) -> float:
        """How far a rollout with this reward has solved its item, from 0 to 1.

        A success is 1. Partial credit is counted from the low end of `reward_range`, or from 0 if none is declared, up
        to `success_reward`. Without room between the two, what is not a success is 0.
        """
        if self.is_success(reward):
            return 1.0
        floor = self.reward_range[0] if self.reward_range is not None else 0.0
        if floor >= self.success_reward:
            return 0.0
        return max(0.0, (reward - floor) / (self.success_reward - floor))

    def evaluate(self, step: int, rewards: list[float], num_datums: int) -> None:
        """Called after each step with all rewards of the step and the number of datums trained on."""
        return

    def close(self) -> None:
        """Called once at the end of a run; ends what the task has started (processes, connections)."""
        return


class RLAdapter(Task):
    """A task of one prompt, one completion and one reward."""

    @abstractmethod
    def make_prompt(self, item: Any, tokenizer: Any, /) -> list[int]:
        """Token ids that the policy continues."""

    @abstractmethod
    def compute_reward(self, response: str, item: Any, /) -> Graded | Awaitable[Graded]:
        """The reward of one completion: a finite number, or a `Reward` with named parts. Best kept in [0, 1].

        May be `async`. An exception or a time-out costs this completion alone: it is left out of its group, counted
        and shown; `UnsupportedError` says that it cannot be judged here. A plain function is called from several
        threads at once, an `async` one many times at once in one event loop, which it must not block.
        """

    def compute_group_rewards(
        self, responses: Sequence[str], item: Any, /
    ) -> Sequence[Graded | None] | Awaitable[Sequence[Graded | None]] | None:
        """The rewards of a whole group at once, in order, for judges that compare (None: not graded).

        Returning None, as here, means that each completion is judged alone by `compute_reward`. Held-out completions
        are always judged alone. May be `async`; one exception costs the group.
        """
        return None

    def compute_batch_rewards(
        self, responses: Sequence[Sequence[str]], items: Sequence[Any], /
    ) -> Sequence[Sequence[Graded | None]] | Awaitable[Sequence[Sequence[Graded | None]]] | None:
        """The rewards of all groups of a batch at once, in order, for graders that compare prompts or batch their work.

        `responses[b]` are the completions of `items[b]`. Called when the last of them is sampled, in place of
        `compute_group_rewards`; None, as here, leaves the grading to that. May be `async`; one exception costs all.
        """
        return None


class MessageEnvAdapter(Task):
    """A task of many turns: each rollout is an episode of an environment that speaks messages."""

    @abstractmethod
    def make_env(self, item: Any, /) -> MessageEnv:
        """A fresh environment for one episode; called once per rollout, from several threads at once. May be
        `async`."""


def as_task(adapter: Any) -> RLAdapter | MessageEnvAdapter:
    """The adapter as a task; an object that only has the methods of an `RLAdapter` is wrapped.

    Raises:
        InvalidRequestError: it is a class; a method is missing, or has its old name `sample_key`; `reward_range` or
            `success_reward` is not what it must be.
    """
    if isinstance(adapter, type):
        raise InvalidRequestError(
            "is a class where an object belongs",
            field="adapter",
            value=adapter.__name__,
            remedy=f"Make one: {adapter.__name__}()",
        )
    if hasattr(adapter, "sample_key"):  # ignored, it would let held-out items into the training set
        raise InvalidRequestError(
            "has the old name of item_key", field="adapter.sample_key", value=type(adapter).__name__, remedy="Rename it"
        )
    _check_reward_range(adapter)
    if isinstance(adapter, RLAdapter | MessageEnvAdapter):
        return adapter
    missing = missing_methods(adapter)
    if missing:
        raise InvalidRequestError(
            f"has no {', '.join(missing)}",
            field="adapter",
            value=type(adapter).__name__,
            remedy="Derive it from mint.rl.RLAdapter or mint.rl.MessageEnvAdapter",
        )
    return _WrappedAdapter(adapter)


def _check_reward_range(adapter: Any) -> None:
    declared, success = getattr(adapter, "reward_range", None), getattr(adapter, "success_reward", 1.0)
    low, high = -math.inf, math.inf
    name = type(adapter).__name__
    if declared is not None:
        try:
            low, high = map(float, declared)
        except (TypeError, ValueError):
            low = high = math.nan
        if isinstance(declared, str) or not low < high:
            raise InvalidRequestError(
                "is not a pair of numbers, the lower one first",
                field=f"{name}.reward_range",
                value=declared,
                remedy="Declare (lowest, highest), or None without bounds",
            )
    if not math.isfinite(success):
        raise InvalidRequestError(
            "is a reward that no rollout can have",
            field=f"{name}.success_reward",
            value=success,
            remedy="Set it to the reward from which an item counts as solved",
        )
    if not low - SUCCESS_TOLERANCE <= success <= high + SUCCESS_TOLERANCE:
        raise InvalidRequestError(
            f"is outside reward_range, {low:g} to {high:g}, so that every rollout or none would be a success",
            field=f"{name}.success_reward",
            value=success,
            remedy="Set it to the reward from which an item counts as solved, within reward_range",
        )


def missing_methods(adapter: Any) -> list[str]:
    """The methods that `adapter`, an object or a class, lacks to be a task; none, and it is one."""
    cls = adapter if isinstance(adapter, type) else type(adapter)
    if issubclass(cls, Task):
        return sorted(getattr(cls, "__abstractmethods__", ()))
    return [name for name in ("build_dataset", "make_prompt", "compute_reward") if not hasattr(adapter, name)]


class _WrappedAdapter(RLAdapter):
    """Wraps an adapter that was written without our base class."""

    def __init__(self, inner: Any) -> None:
        self.inner = inner
        self.heldout_name = getattr(inner, "heldout_name", RLAdapter.heldout_name)
        self.reward_range = getattr(inner, "reward_range", None)
        self.success_reward = getattr(inner, "success_reward", RLAdapter.success_reward)
        self.spec = getattr(inner, "spec", None)

    def build_dataset(self) -> Sequence[Any]:
        return self.inner.build_dataset()

    def make_prompt(self, item: Any, tokenizer: Any) -> list[int]:
        return self.inner.make_prompt(item, tokenizer)

    def compute_reward(self, response: str, item: Any) -> Any:
        return self.inner.compute_reward(response, item)

    def build_heldout(self) -> Sequence[Any]:
        return self.inner.build_heldout() if hasattr(self.inner, "build_heldout") else ()

    def category(self, item: Any) -> str | None:
        return self.inner.category(item) if hasattr(self.inner, "category") else None

    def evaluate(self, step: int, rewards: list[float], num_datums: int) -> None:
        if hasattr(self.inner, "evaluate"):
            self.inner.evaluate(step, rewards, num_datums)


def task_name(task: Task) -> str:
    """The name of the class that the user wrote."""
    return type(task.inner if isinstance(task, _WrappedAdapter) else task).__name__
