"""Tasks of the `verifiers` package (0.4, `verifiers.v1`): the questions and rewards of a taskset.

Single-turn tasksets: one prompt, one completion, scored by the task's own `@reward` methods and judges. Tasksets that
need more are refused with the reason: a container, tool servers, a simulated user who starts, a reward that reads the
agent's runtime. Those run in verifiers' own harnesses, which sample over HTTP.
"""

from __future__ import annotations

import importlib
import inspect
import itertools
import json
from collections.abc import Sequence
from typing import Any

from mint.errors import InvalidRequestError, MissingExtraError
from mint.recipes.question_task import Prompt, PromptStyle, Question, QuestionAdapter, one_side
from mint.rl.reward import Reward

ROLES = ("system", "user", "assistant")


class VerifiersAdapter(QuestionAdapter):
    """An installed taskset by its id. Rewards are sums of weighted parts, as in the package, without bounds."""

    def __init__(
        self,
        name: str,
        *,
        seed: int = 0,
        limit: int = 4096,
        heldout: float = 0.1,
        prompt_style: PromptStyle = "chat",
        **options: Any,
    ) -> None:
        """Loads up to `limit` tasks; `options` are fields of the taskset's config. `heldout` is the share of held-out
        prompts. `seed` has no effect: the run shuffles the tasks.

        Raises:
            MissingExtraError: verifiers is not installed.
            InvalidRequestError: no such taskset, an option that it does not take, or it is not single-turn.
        """
        super().__init__(prompt_style=prompt_style)
        self.share = heldout
        self.heldout_name = f"verifiers {name}, {heldout:.0%} held out by hash"
        self._v1 = _import_v1()
        taskset = _load_taskset(name, options)
        _check_single_turn(name, taskset)
        self._questions = [_question(name, task) for task in itertools.islice(taskset, limit)]

    def build_dataset(self) -> Sequence[Question]:
        """The training tasks."""
        return one_side(self._questions, heldout=False, share=self.share)

    def build_heldout(self) -> Sequence[Question]:
        """The held-out tasks."""
        return one_side(self._questions, heldout=True, share=self.share)

    async def compute_reward(self, response: str, item: Question) -> Reward:
        """The task's rewards and judges on the conversation that ends with `response`; metrics go to `info`."""
        task = item.source
        trace = self._trace(response, item)
        await task.score(trace)
        parts = {name: float(reward.value) for name, reward in trace.rewards.items() if reward is not None}
        return Reward(sum(parts.values()), parts, {"metrics": dict(trace.metrics)} if trace.metrics else {})

    def _trace(self, response: str, item: Question) -> Any:
        """The trace of a finished one-turn conversation, like that of verifiers' own rollouts."""
        v1 = self._v1
        task = item.source
        kinds = {"system": v1.SystemMessage, "user": v1.UserMessage, "assistant": v1.AssistantMessage}
        asked = [kinds[message["role"]](content=message["content"]) for message in _messages(item.prompt)]
        nodes = [
            v1.MessageNode(parent=place - 1 if place else None, message=message) for place, message in enumerate(asked)
        ]
        nodes.append(v1.MessageNode(parent=len(asked) - 1, message=v1.AssistantMessage(content=response), sampled=True))
        return v1.Trace(
            task=v1.TraceTask(type=type(task).__name__, data=task.data, key=task.key, hash=task.hash),
            agent=v1.AgentInfo(config=v1.AgentConfig()),
            state=importlib.import_module("verifiers.v1.state").state_cls(type(task))(),
            nodes=nodes,
            is_completed=True,
            ok=True,
            stop_condition="agent_completed",
        )


def _import_v1() -> Any:
    try:
        return importlib.import_module("verifiers.v1")  # an optional extra, seconds to import
    except ImportError as error:
        raise MissingExtraError(
            "verifiers tasks need the verifiers package, 0.4 or newer", remedy="pip install 'mint[verifiers]'"
        ) from error


def _load_taskset(name: str, options: dict[str, Any]) -> Any:
    loaders = importlib.import_module("verifiers.v1.utils.loaders")
    try:
        return loaders.load_taskset(loaders.taskset_config_type(name)(id=name, **options))
    except (ModuleNotFoundError, AttributeError, TypeError, ValueError) as error:
        raise InvalidRequestError(
            f"cannot be loaded as a verifiers taskset ({error})",
            field="task",
            value=f"verifiers:{name}",
            remedy="Install the package that exports the taskset, and give it only options of its config",
        ) from error


def _check_single_turn(name: str, taskset: Any) -> None:
    v1 = _import_v1()
    loaders = importlib.import_module("verifiers.v1.utils.loaders")
    kind = taskset.task_type()
    config = taskset.config
    obstacles = {
        "brings an environment of its own": loaders.environment_class(name) is not v1.SingleAgentEnv,
        "brings a harness of its own": loaders.default_harness_id(name) == name,
        "needs a container": kind.NEEDS_CONTAINER,
        "has tool servers": bool(type(taskset).toolsets(config)) or bool(kind.toolsets(config.task)),
        "prepares the agent's runtime": kind.setup is not v1.Task.setup or kind.finalize is not v1.Task.finalize,
    }
    for obstacle in (text for text, there in obstacles.items() if there):
        raise _not_single_turn(name, obstacle)


def _question(name: str, task: Any) -> Question:
    data = task.data
    if not data.prompt:
        raise _not_single_turn(name, "lets a simulated user open the conversation")
    needing = [function.__name__ for function in task.hooks("reward") if _needs_runtime(function)]
    if needing:
        raise _not_single_turn(name, f"scores {', '.join(needing)} in the agent's runtime")
    asked = [{"role": "user", "content": data.prompt}] if isinstance(data.prompt, str) else _plain(name, data.prompt)
    messages = [{"role": "system", "content": data.system_prompt}, *asked] if data.system_prompt else asked
    answer = getattr(data, "answer", None)
    prompt: Prompt = data.prompt if isinstance(data.prompt, str) and not data.system_prompt else tuple(messages)
    return Question(prompt, answer if isinstance(answer, str) else json.dumps(answer, default=str), source=task)


def _plain(name: str, messages: Sequence[Any]) -> list[dict[str, str]]:
    for message in messages:
        if message.role not in ROLES or not isinstance(message.content, str):
            raise _not_single_turn(name, f"opens with a {message.role} message that is not plain text")
    return [{"role": message.role, "content": message.content} for message in messages]


def _needs_runtime(function: Any) -> bool:
    parameter = inspect.signature(function).parameters.get("runtime")
    return parameter is not None and parameter.default is inspect.Parameter.empty


def _messages(prompt: Prompt) -> Sequence[Any]:
    return [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt


def _not_single_turn(name: str, obstacle: str) -> InvalidRequestError:
    return InvalidRequestError(
        f"is not a single-turn taskset: it {obstacle}",
        field="task",
        value=f"verifiers:{name}",
        remedy="Write a mint.rl.MessageEnvAdapter for it, or run it in verifiers' own harness",
    )
