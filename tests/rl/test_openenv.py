"""Environments of OpenEnv: its own echo environment and one that ends, on real servers of the package."""

from __future__ import annotations

import json
import subprocess
import sys
import sysconfig
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from ports import free_port

import mint
from mint.errors import InvalidRequestError
from mint.recipes.task_registry import load_task
from mint.recipes.task_sources.openenv import Actions

ROOT = Path(__file__).resolve().parents[2]
VERSION = "0.10.0"

NUMBER = '''
"""A number to guess: the seed modulo ten. Ends with the right guess; a guess above 99 breaks the environment."""
from openenv.core.env_server.http_server import create_app
from openenv.core.env_server.interfaces import Environment
from openenv.core.env_server.types import Action, Observation, State

class Guess(Action):
    guess: int

class Hint(Observation):
    text: str

class Number(Environment):
    SUPPORTS_CONCURRENT_SESSIONS = True

    def reset(self, seed=None, episode_id=None, offset=0, **kwargs):
        self.number = (seed + offset) % 10
        return Hint(text="Which number?")

    def step(self, action, **kwargs):
        if action.guess > 99:
            raise OverflowError("too large a guess")
        right = action.guess == self.number
        hint = "right" if right else "higher" if action.guess < self.number else "lower"
        return Hint(text=hint, done=right, reward=1.0 if right else -0.25)

    @property
    def state(self):
        return State()

app = create_app(Number, Guess, Hint, env_name="number", max_concurrent_envs=16)
narrow = create_app(Number, Guess, Hint, env_name="number", max_concurrent_envs=1)
'''

USE_THEM = """
import asyncio, json, sys
from pathlib import Path
import mint
from mint.recipes.task_registry import load_task
from mint.rl import run_grpo
from mint.rl.rollouts.episodes import EpisodeLimits

echo_url, number_url, narrow_url, folder = *sys.argv[1:4], Path(sys.argv[4])
echo = load_task(f"openenv:{echo_url}", train_size=16, heldout_size=4, instruction=" Say something.").adapter
number = load_task(f"openenv:{number_url}/", train_size=16, heldout_size=8, offset=3).adapter

async def play(task, *replies, item=None):
    env = task.make_env(item or task.build_heldout()[0])
    said = [message["content"] for message in await env.initial_observation()]
    rewards, metrics, done = [], {}, False
    try:
        for reply in replies:
            result = await env.step({"role": "assistant", "content": reply})
            rewards.append(result.reward)
            said += [message["content"] for message in result.next_messages]
            metrics, done = {**metrics, **result.metrics}, result.episode_done
    except RuntimeError as error:
        said.append(str(error))
    finally:
        await env.close()
    return said, rewards, metrics, done

async def two_at_once():
    task = load_task(f"openenv:{narrow_url}").adapter
    first, second = (task.make_env(item) for item in task.build_dataset()[:2])
    await first.initial_observation()
    try:
        await second.initial_observation()
    except mint.errors.InvalidRequestError as error:
        refused = str(error)
    await second.close()
    await first.close()
    for _ in range(50):  # the server notices the end of a session a moment later
        try:
            await first.initial_observation()
            return refused, True
        except mint.errors.InvalidRequestError:
            await asyncio.sleep(0.1)
    return refused, False

item = number.build_heldout()[0]
right = (item.seed + 3) % 10
wrong = 9 if right < 9 else 0
config = load_task("math").config.changed(
    steps=2, batch_size=2, group_size=4, max_tokens=24, max_turns=2, heldout_size=4, temperature=1.0
)
with mint.ServiceClient(data_dir=folder / "service") as service:
    run_grpo(echo, config.changed(run_dir=folder / "run"), service_client=service)
rows = [json.loads(line) for line in (folder / "run" / "rollouts.jsonl").read_text().splitlines()]
print(json.dumps({
    "echo": asyncio.run(play(echo, "hello there", '{"message": "hi"}', '{"message": 3}')),
    "number": asyncio.run(play(number, str(wrong), "no number", '{"guess": %d}' % right)),
    "fails": asyncio.run(play(number, "100")),
    "hint": "lower" if wrong > right else "higher",
    "narrow": asyncio.run(two_at_once()),
    "apart": not {one.seed for one in number.build_dataset()} & {one.seed for one in number.build_heldout()},
    "errors": [row["error"] for row in rows if row["error"]],
    "rewards": sorted({row["reward"] for row in rows if row["stop_reason"] == "max_turns"}),
    "stop_reasons": sorted({row["stop_reason"] for row in rows}),
}))
"""


@contextmanager
def server(python: Path, folder: Path, app: str) -> Iterator[str]:
    """The address of an environment's server."""
    port = free_port()
    words = [python, "-m", "uvicorn", app, "--port", str(port), "--log-level", "warning"]
    with subprocess.Popen(words, cwd=folder) as process:
        url = f"http://127.0.0.1:{port}"
        try:
            while True:
                assert process.poll() is None, "the server has ended"
                try:
                    urllib.request.urlopen(f"{url}/health", timeout=5).close()
                    break
                except OSError:
                    time.sleep(0.2)
            yield url
        finally:
            process.terminate()


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_environments_of_openenv_are_played_on_their_own_servers(tmp_path: Path) -> None:
    """Installs openenv (about 470 MB with what it needs) beside this environment's packages."""
    environment = tmp_path / "venv"
    subprocess.run([sys.executable, "-m", "venv", str(environment)], check=True)
    python = environment / "bin" / "python"
    install = [python, "-m", "pip", "install", "--quiet", f"openenv=={VERSION}"]
    installed = subprocess.run(install, capture_output=True, text=True, check=False)
    if installed.returncode:
        pytest.skip(f"no package registry: {installed.stderr[-300:]}")
    made = subprocess.run(
        [python.with_name("openenv"), "init", "echo_test"], cwd=tmp_path, capture_output=True, text=True
    )
    assert made.returncode == 0, made.stderr
    app = tmp_path / "echo_test" / "server" / "app.py"
    text = app.read_text()
    assert "max_concurrent_envs=1," in text
    app.write_text(text.replace("max_concurrent_envs=1,", "max_concurrent_envs=32,"))
    (tmp_path / "number.py").write_text(NUMBER)
    script = tmp_path / "use_them.py"
    script.write_text(USE_THEM)
    site = next((environment / "lib").glob("python*/site-packages"))
    # This environment's own packages (torch, …), found after those of the new one.
    (site / "zz_mint.pth").write_text(f"{ROOT / 'src'}\n{sysconfig.get_path('purelib')}\n")
    with (
        server(python, tmp_path / "echo_test", "server.app:app") as echo,
        server(python, tmp_path, "number:app") as number,
        server(python, tmp_path, "number:narrow") as narrow,
    ):
        words = [python, script, echo, number, narrow, tmp_path]
        ran = subprocess.run(words, capture_output=True, text=True, check=False, cwd=tmp_path)
    assert ran.returncode == 0, ran.stderr[-3000:]
    seen = json.loads(ran.stdout.splitlines()[-1])
    said, rewards, metrics, done = seen["echo"]
    assert said[0] == '{"echoed_message": "Echo Test environment ready!", "message_length": 0} Say something.'
    assert said[1] == '{"echoed_message": "hello there", "message_length": 11}'
    assert "VALIDATION_ERROR" in said[3]
    assert (rewards, metrics, done) == ([1.0, pytest.approx(0.2), 0.0], {"invalid_actions": 1}, False)
    said, rewards, metrics, done = seen["number"]
    assert said[:2] == ["Which number?", seen["hint"]]
    assert (rewards, metrics, done) == ([-0.25, 0.0, 1.0], {"invalid_actions": 1}, True)
    assert "too large a guess" in seen["fails"][0][-1]
    refusal, free_again = seen["narrow"]
    assert "has no place for another session" in refusal
    assert "max_concurrent_envs of at least batch_size * group_size" in refusal
    assert free_again
    assert seen["apart"]
    assert seen["errors"] == []
    assert set(seen["stop_reasons"]) <= {"length", "max_turns"}
    assert not seen["rewards"] or seen["rewards"][-1] > 0


def test_a_missing_package_is_named_with_its_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "openenv", None)
    with pytest.raises(mint.errors.MissingExtraError, match=r"pip install .*\[openenv\]'"):
        load_task("openenv:http://localhost:1")


ONE = {"properties": {"metadata": {"type": "object"}, "message": {"type": "string"}}, "required": ["message"]}
NUMERIC = {"properties": {"column": {"type": "integer"}}, "required": ["column"]}
OPTIONAL = {"properties": {"row": {"type": "integer"}, "note": {"type": "string"}}, "required": ["row"]}
TWO = {"properties": {"row": {"type": "integer"}, "column": {"type": "integer"}}, "required": ["row", "column"]}


@pytest.mark.parametrize(
    ("schema", "text", "action"),
    [
        (ONE, " hello\n", {"message": "hello"}),
        (ONE, '{"message": "hello"}', {"message": "hello"}),
        (ONE, '{"other": "hello"}', {"message": '{"other": "hello"}'}),
        (ONE, "12", {"message": "12"}),
        (NUMERIC, "12", {"column": 12}),
        (NUMERIC, "twelve", {"column": "twelve"}),
        (OPTIONAL, "3", {"row": 3}),
        (OPTIONAL, '{"row": 3, "note": "x"}', {"row": 3, "note": "x"}),
        (TWO, '{"row": 1, "column": 2}', {"row": 1, "column": 2}),
        (NUMERIC, "[" * 100_000, {"column": "[" * 100_000}),
    ],
)
def test_a_message_is_an_action_as_json_or_as_its_only_field(
    schema: dict[str, Any], text: str, action: dict[str, Any]
) -> None:
    assert Actions(schema).read(text) == action


@pytest.mark.parametrize("text", ["1 2", "[1, 2]", '{"line": 1}', ""])
def test_a_message_that_is_no_action_is_told_its_fields(text: str) -> None:
    with pytest.raises(ValueError, match="JSON object with the fields row, column"):
        Actions(TWO).read(text)


def test_an_address_without_a_server_of_openenv_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    class Client:
        GenericEnvClient = None

    monkeypatch.setitem(sys.modules, "openenv", Client)
    monkeypatch.setitem(sys.modules, "openenv.core", Client)
    monkeypatch.setitem(sys.modules, "openenv.core.generic_client", Client)
    with pytest.raises(InvalidRequestError, match="not the address of a server of OpenEnv"):
        load_task(f"openenv:http://127.0.0.1:{free_port()}")
