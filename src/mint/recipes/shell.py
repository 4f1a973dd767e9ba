"""Shell RL: an agent with a bash tool looks for a setting among several files and changes it.

The reward compares all files with what they should be, so that a change of anything else earns nothing. For models that
can call tools; `mint/tiny` learns it from demonstrations first (`benchmarks/learning/shell_agent.py`).
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import sha256

from mint.recipes.question_task import hash_share
from mint.rl import MessageEnvAdapter, RLConfig
from mint.rl.message_env import Message
from mint.rl.tasks.tool_calls import tool
from mint.rl.tasks.tool_env import Costs, ToolEnv
from mint.sandbox import Shell, ShellLimits
from mint.sandbox.shell_sandboxes import DEFAULT_IMAGE, SandboxName, find_sandbox

DEMO = RLConfig(
    base_model="Qwen/Qwen3-0.6B",
    group_size=8,
    batch_size=8,
    steps=40,
    max_tokens=256,
    max_turns=6,
    temperature=1.0,
    learning_rate=1e-4,
    heldout_size=64,
    grader_concurrency=16,
)
"""Each command starts processes, so that more of them at once would only wait for one another."""

COSTS = Costs(per_violation=0.1, at_most=0.5)
SERVICES = ("auth", "billing", "cache", "gateway", "mail", "queue", "search", "storage")
SETTINGS = ("timeout", "port", "workers", "retries")
FILES = 4
HELDOUT_SHARE = 0.125
LISTING = "find . -type f -exec sha256sum -- {} + -o ! -type d -printf '%P?\\n'"
"""Prints a line for each file: its hash and its path, or its path and a question mark if it is not a regular file."""

GRACE_S = 10.0
"""How much longer than its own limit a command may take: the start and the end of its sandbox."""


@dataclass(frozen=True)
class Edit:
    """One request: the files before and after it, by path."""

    text: str
    before: tuple[tuple[str, str], ...]
    after: tuple[tuple[str, str], ...]


def draw_edits(seed: int, count: int, *, heldout: bool) -> list[Edit]:
    """`count` distinct requests from one side of the split, which is a hash of their text."""
    rng = random.Random(f"shell {seed} {heldout}")
    edits: dict[str, Edit] = {}
    while len(edits) < count:
        edit = _draw(rng)
        if (hash_share(edit.text) < HELDOUT_SHARE) == heldout:
            edits.setdefault(edit.text, edit)
    return list(edits.values())


class ShellAdapter(MessageEnvAdapter):
    """`Set timeout of the service mail to 45` → commands that find and edit its file → a last message."""

    heldout_name = "edits held-out (1 in 8 by hash, never trained on)"
    reward_range = COSTS.range_of((0.0, 1.0))

    def __init__(
        self,
        *,
        seed: int = 0,
        train_size: int = 1024,
        heldout_size: int = 128,
        sandbox: SandboxName = "auto",
        image: str = DEFAULT_IMAGE,
        command_s: float = 10.0,
    ) -> None:
        """`seed` draws the requests; the split does not depend on it. `sandbox` runs the commands, each for at most
        `command_s` seconds; `image` is that of Docker.

        Raises:
            MissingExtraError: the sandbox does not run on this machine; names what to install.
        """
        self.seed = seed
        self.train_size = train_size
        self.heldout_size = heldout_size
        self.sandbox = find_sandbox(sandbox, image).name
        self.image = image
        self.limits = ShellLimits(wall_s=command_s)

    def build_dataset(self) -> Sequence[Edit]:
        """Training requests."""
        return draw_edits(self.seed, self.train_size, heldout=False)

    def build_heldout(self) -> Sequence[Edit]:
        """Held-out requests, the same for every seed."""
        return draw_edits(0, self.heldout_size, heldout=True)

    def item_key(self, item: Edit) -> str:
        """The request."""
        return item.text

    def make_env(self, item: Edit) -> EditEnv:
        """A fresh working folder with the files."""
        return EditEnv(item, Shell(dict(item.before), sandbox=self.sandbox, image=self.image, limits=self.limits))


class EditEnv(ToolEnv):
    """One episode with a shell of its own."""

    def __init__(self, item: Edit, shell: Shell) -> None:
        super().__init__(
            [{"role": "user", "content": item.text}],
            [tool(shell.bash)],
            self._compare,
            costs=COSTS,
            tool_timeout_s=shell.limits.wall_s + GRACE_S,
        )
        self._shell = shell
        self._after = dict(item.after)

    def close(self) -> None:
        """Removes the working folder."""
        self._shell.close()

    async def _compare(self, text: str, results: Sequence[Message]) -> float:
        """1 if the folder has the expected files and no others, else 0. One command, since each starts a sandbox."""
        found = await self._shell.run(LISTING)
        expected = [f"{sha256(text.encode()).hexdigest()}  ./{path}" for path, text in self._after.items()]
        return float(sorted(found.output.splitlines()) == sorted(expected))


def _draw(rng: random.Random) -> Edit:
    services = rng.sample(SERVICES, FILES)
    settings = {service: {name: rng.randrange(1, 100) for name in SETTINGS} for service in services}
    names = {service: f"conf.d/{number}.conf" for number, service in enumerate(services, 1)}
    chosen, name = rng.choice(services), rng.choice(SETTINGS)
    value = rng.choice([number for number in range(1, 100) if number != settings[chosen][name]])
    before = {names[service]: _file(service, own) for service, own in settings.items()}
    changed = {**settings[chosen], name: value}
    after = {**before, names[chosen]: _file(chosen, changed)}
    text = (
        f"Each file in the folder conf.d has the settings of one service. Set {name} of the service {chosen} to "
        f"{value} and change nothing else. Then answer: done."
    )
    return Edit(text, tuple(before.items()), tuple(after.items()))


def _file(service: str, settings: dict[str, int]) -> str:
    lines = itertools.chain([f"service = {service}"], (f"{name} = {value}" for name, value in settings.items()))
    return "".join(f"{line}\n" for line in lines)
