"""Environments of the `openenv` package (0.10), each on a server of its own that speaks OpenEnv's protocol.

An episode is one session of the server: `reset(seed=…)`, then one `step` for each message of the policy, until the
environment says that it is done. Held-out episodes are other seeds.
"""

from __future__ import annotations

import importlib
import json
import random
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from mint.errors import InvalidRequestError, MissingExtraError
from mint.extras import install_command
from mint.rl import MessageEnvAdapter
from mint.rl.message_env import Message, MessageEnv, MessageStepResult
from mint.rl.reward import UnsupportedError

SCHEMA_TIMEOUT_S = 30.0
NOT_SHOWN = ("done", "reward", "metadata")
"""Fields of an observation that every environment has; the policy does not read them."""

MCP_ACTIONS = ("Action", "CallToolAction", "ListToolsAction")
"""Titles of the action schema of environments whose actions are calls of MCP tools."""


@dataclass(frozen=True)
class Reset:
    """One episode: the environment at this address, reset with this seed (odd: held out)."""

    url: str
    seed: int


class OpenEnvAdapter(MessageEnvAdapter):
    """The environment of the server at `url`; the reward is the sum of its rewards."""

    def __init__(
        self,
        url: str,
        *,
        seed: int = 0,
        train_size: int = 4096,
        heldout_size: int = 128,
        instruction: str = "",
        **reset: Any,
    ) -> None:
        """`reset` are further arguments of the environment's `reset`; `instruction` is put behind its first
        observation. `seed` draws the training seeds; the held-out ones are the same for every seed.

        Raises:
            MissingExtraError: openenv is not installed.
            InvalidRequestError: no server of OpenEnv answers there, or its actions are calls of MCP tools.
        """
        _import_client()
        self.url = url.rstrip("/")
        self.seed = seed
        self.train_size = train_size
        self.heldout_size = heldout_size
        self.instruction = instruction
        self.reset = reset
        self.heldout_name = f"{self.url}, other seeds"
        self._actions = Actions(_action_schema(self.url))

    def build_dataset(self) -> Sequence[Reset]:
        """`train_size` even seeds."""
        rng = random.Random(f"openenv {self.seed}")
        return [Reset(self.url, 2 * rng.getrandbits(30)) for _ in range(self.train_size)]

    def build_heldout(self) -> Sequence[Reset]:
        """The same `heldout_size` odd seeds for every seed of the run."""
        rng = random.Random("openenv held-out")
        return [Reset(self.url, 2 * rng.getrandbits(30) + 1) for _ in range(self.heldout_size)]

    def make_env(self, item: Reset) -> MessageEnv:
        """A session, which is opened with the first observation."""
        client = _import_client()(base_url=item.url)
        return OpenEnvEpisode(client, self._actions, {**self.reset, "seed": item.seed}, self.instruction)


class Actions:
    """The actions of an environment, by their JSON schema."""

    def __init__(self, schema: Mapping[str, Any]) -> None:
        fields = {name: each for name, each in schema.get("properties", {}).items() if name != "metadata"}
        required = [name for name in schema.get("required", ()) if name in fields]
        self._fields = fields
        self._only = (required or list(fields))[0] if len(required or fields) == 1 else None

    def read(self, text: str) -> dict[str, Any]:
        """The action that the policy's message stands for: a JSON object with its fields, or, where an action has one
        field, the value of that field.

        Raises:
            ValueError: it is neither; says what is asked for.
        """
        text = text.strip()
        try:
            value = json.loads(text)
        except (ValueError, RecursionError):
            value = None
        if isinstance(value, dict) and value.keys() <= self._fields.keys():
            return value
        if self._only is None:
            raise ValueError(f"Write a JSON object with the fields {', '.join(self._fields)}")
        is_text = self._fields[self._only].get("type") == "string" or value is None
        return {self._only: text if is_text else value}


class OpenEnvEpisode(MessageEnv):
    """One session. Its methods are called in one event loop, where its connection lives."""

    def __init__(self, client: Any, actions: Actions, reset: Mapping[str, Any], instruction: str) -> None:
        self._client = client
        self._actions = actions
        self._reset = reset
        self._instruction = instruction

    async def initial_observation(self) -> Sequence[Message]:
        """Opens the session; the first observation.

        Raises:
            InvalidRequestError: the server has no place for another session.
            UnsupportedError: the episode is over before it began.
        """
        try:
            result = await self._client.reset(**self._reset)
        except RuntimeError as error:
            if "CAPACITY_REACHED" not in str(error):
                raise
            raise InvalidRequestError(
                f"has no place for another session ({error})",
                field="openenv server",
                value=self._client.base_url,
                remedy="Start it with max_concurrent_envs of at least batch_size * group_size, and 128 for evaluation",
            ) from error
        if result.done:
            raise UnsupportedError("the environment has ended before the policy's first turn")
        return [{"role": "user", "content": _as_text(result.observation) + self._instruction}]

    async def step(self, message: Message) -> MessageStepResult:
        """Makes the policy's move. One that is no action of the environment earns nothing; the policy reads why."""
        try:
            result = await self._client.step(self._actions.read(message["content"]))
        except ValueError as error:
            return _refused(str(error))
        except RuntimeError as error:
            if "VALIDATION_ERROR" not in str(error):
                raise
            return _refused(str(error))
        following = [] if result.done else [{"role": "user", "content": _as_text(result.observation)}]
        return MessageStepResult(float(result.reward or 0.0), bool(result.done), following)

    async def close(self) -> None:
        """Ends the session, so that the server has its place again."""
        await self._client.close()


def _refused(why: str) -> MessageStepResult:
    return MessageStepResult(0.0, False, [{"role": "user", "content": f"error: {why}"}], metrics={"invalid_actions": 1})


def _as_text(observation: Mapping[str, Any]) -> str:
    """The observation as the policy reads it: its text if that is all, else JSON."""
    shown = {name: value for name, value in observation.items() if name not in NOT_SHOWN}
    values = list(shown.values())
    return values[0] if len(values) == 1 and isinstance(values[0], str) else json.dumps(shown, ensure_ascii=False)


def _action_schema(url: str) -> dict[str, Any]:
    try:
        with urllib.request.urlopen(f"{url}/schema", timeout=SCHEMA_TIMEOUT_S) as answer:
            schema = json.loads(answer.read())["action"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise InvalidRequestError(
            f"is not the address of a server of OpenEnv ({error})",
            field="task",
            value=f"openenv:{url}",
            remedy="Start the environment's server and name it: openenv:http://localhost:8000",
        ) from error
    if schema.get("title") in MCP_ACTIONS:
        raise InvalidRequestError(
            "offers MCP tools, which are not supported here",
            field="task",
            value=f"openenv:{url}",
            remedy="Write a ToolEnv whose tools call them, or play it with verifiers:openenv",
        )
    return schema


def _import_client() -> Any:
    try:
        return importlib.import_module("openenv.core.generic_client").GenericEnvClient  # an optional extra
    except ImportError as error:
        raise MissingExtraError("openenv tasks need the openenv package", remedy=install_command("openenv")) from error
