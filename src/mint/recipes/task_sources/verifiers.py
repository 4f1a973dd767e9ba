"""Tasks of the `verifiers` package (0.4, `verifiers.v1`): the questions and rewards of a taskset.

Here are tasksets of one turn: one prompt, one completion, scored by the task's own `@reward` methods and judges. A
taskset that brings an environment of its own is played in many turns (`verifiers_episodes`). What needs more is refused
with the reason: a container, tool servers, a harness of its own, a reward that reads the agent's runtime. Those run in
verifiers' own harnesses, which sample over HTTP.
"""

from __future__ import annotations

import importlib
import inspect
import itertools
import json
from collections.abc import Sequence
from typing import Any

from mint.errors import InvalidRequestError, MissingExtraError
from mint.extras import install_command
from mint.recipes.question_task import Prompt, PromptStyle, Question, QuestionAdapter, hash_share, one_side
from mint.recipes.task_sources.verifiers_episodes import VerifiersEpisodesAdapter, trace_task
from mint.rl.adapter import Task
from mint.rl.reward import Reward

ROLES = ("system", "user", "assistant")


def load_verifiers_task(
    name: str,
    *,
    seed: int = 0,
    limit: int = 4096,
    heldout: float = 0.1,
    prompt_style: PromptStyle = "chat",
    **options: Any,
) -> Task:
    """An installed taskset by its id: in many turns if it brings an environment of its own, else in one turn.

    Loads up to `limit` tasks; `options` are fields of the taskset's config. `heldout` is the share of held-out tasks.
    `prompt_style` is for one turn. `seed` has no effect: the run shuffles the tasks.

    Raises:
        MissingExtraError: verifiers is not installed.
        InvalidRequestError: no such taskset, an option that it does not take, or it needs what mint does not start.
    """
    v1 = _import_v1()
    _load_taskset(name, options)  # refuses an unknown name or option
    loaders = importlib.import_module("verifiers.v1.utils.loaders")
    if loaders.environment_class(name) is v1.SingleAgentEnv:
        return VerifiersAdapter(name, seed=seed, limit=limit, heldout=heldout, prompt_style=prompt_style, **options)
    environment = loaders.load_environment(loaders.resolve_env_config({"taskset": {"id": name, **options}}))
    _check_environment(name, environment)
    sides: dict[bool, dict[str, Any]] = {True: {}, False: {}}
    for task in itertools.islice(environment.taskset, limit):
        _check_hooks(name, task)
        sides[hash_share(task.key) < heldout].setdefault(task.key, task)
    return VerifiersEpisodesAdapter(
        environment,
        list(sides[False].values()),
        list(sides[True].values()),
        heldout_name=f"verifiers {name}, {heldout:.0%} held out by hash",
    )


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
            task=trace_task(v1, task),
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
            "verifiers tasks need the verifiers package, 0.4 or newer", remedy=install_command("verifiers")
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
    if importlib.import_module("verifiers.v1.utils.loaders").environment_class(name) is not v1.SingleAgentEnv:
        raise _unsupported(name, "brings an environment of its own", remedy="Load it with load_task")
    _check_taskset(name, taskset)


def _check_environment(name: str, environment: Any) -> None:
    """Raises InvalidRequestError unless our policy alone can play in this environment."""
    v1 = _import_v1()
    kind, agents = type(environment), list(environment.config.agent_harnesses())
    obstacles = {
        f"has {len(agents)} agents ({', '.join(agents)}), and mint plays one": len(agents) != 1,
        "starts resources of its own": kind.start is not v1.Env.start or kind.stop is not v1.Env.stop,
    }
    for obstacle in (text for text, there in obstacles.items() if there):
        raise _unsupported(name, obstacle)
    _check_taskset(name, environment.taskset)


def _check_taskset(name: str, taskset: Any) -> None:
    """Raises InvalidRequestError if a task needs more than messages and a score."""
    v1 = _import_v1()
    loaders = importlib.import_module("verifiers.v1.utils.loaders")
    kind = taskset.task_type()
    config = taskset.config
    obstacles = {
        "brings a harness of its own": loaders.default_harness_id(name) == name,
        "needs a container": kind.NEEDS_CONTAINER,
        "has tool servers": bool(type(taskset).toolsets(config)) or bool(kind.toolsets(config.task)),
        "prepares the agent's runtime": kind.setup is not v1.Task.setup or kind.finalize is not v1.Task.finalize,
    }
    for obstacle in (text for text, there in obstacles.items() if there):
        raise _unsupported(name, obstacle)


def _question(name: str, task: Any) -> Question:
    data = task.data
    if not data.prompt:
        raise _unsupported(name, "lets a simulated user open the conversation")
    _check_rewards(name, task)
    asked = [{"role": "user", "content": data.prompt}] if isinstance(data.prompt, str) else _plain(name, data.prompt)
    messages = [{"role": "system", "content": data.system_prompt}, *asked] if data.system_prompt else asked
    answer = getattr(data, "answer", None)
    prompt: Prompt = data.prompt if isinstance(data.prompt, str) and not data.system_prompt else tuple(messages)
    return Question(prompt, answer if isinstance(answer, str) else json.dumps(answer, default=str), source=task)


def _check_rewards(name: str, task: Any) -> None:
    needing = [function.__name__ for function in task.hooks("reward") if _needs_runtime(function)]
    if needing:
        raise _unsupported(name, f"scores {', '.join(needing)} in the agent's runtime")


def _check_hooks(name: str, task: Any) -> None:
    """Raises InvalidRequestError if a task of many turns reads or changes what only verifiers' own rollout has."""
    _check_rewards(name, task)
    intercepting = importlib.import_module("verifiers.v1.utils.decorators").discover_decorated(task, "intercept")
    stopping = [function.__name__ for function in (*task.hooks("stop"), *intercepting)]
    if stopping:
        raise _unsupported(name, f"stops or changes turns in {', '.join(stopping)}")


def _plain(name: str, messages: Sequence[Any]) -> list[dict[str, str]]:
    for message in messages:
        if message.role not in ROLES or not isinstance(message.content, str):
            raise _unsupported(name, f"opens with a {message.role} message that is not plain text")
    return [{"role": message.role, "content": message.content} for message in messages]


def _needs_runtime(function: Any) -> bool:
    parameter = inspect.signature(function).parameters.get("runtime")
    return parameter is not None and parameter.default is inspect.Parameter.empty


def _messages(prompt: Prompt) -> Sequence[Any]:
    return [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt


def _unsupported(
    name: str,
    obstacle: str,
    *,
    remedy: str = "Write a mint.rl.MessageEnvAdapter for it, or run it in verifiers' own harness",
) -> InvalidRequestError:
    return InvalidRequestError(
        f"cannot be played here: it {obstacle}", field="task", value=f"verifiers:{name}", remedy=remedy
    )
