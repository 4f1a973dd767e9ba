"""Scripts as users have them, each a program of its own, against a server that only the environment names."""

from __future__ import annotations

import os
import random
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from default_engine import fake_engine
from http_server import http_server

from mint.recipes.chat import ChatAdapter
from mint.recipes.code import CodeAdapter
from mint.recipes.math import MathAdapter
from mint.rl import RLConfig, run_grpo

SCRIPTS = Path(__file__).parent / "scripts"
SETTINGS = ("MINT_", "TINKER_")


def start(script: str, folder: Path, **variables: str) -> subprocess.Popen[str]:
    """A script in a folder of its own, without any setting but those given."""
    bare = {name: value for name, value in os.environ.items() if not name.startswith(SETTINGS)}
    return subprocess.Popen(
        [sys.executable, SCRIPTS / script],
        cwd=folder,
        env={**bare, "MINT_HOME": str(folder / "home"), "PYTHONPATH": os.pathsep.join(sys.path), **variables},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


@pytest.fixture(scope="module")
def torch_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with http_server(tmp_path_factory.mktemp("server")) as url:
        yield url


def test_a_quickstart_with_a_dotenv_file_trains_and_reinforces(torch_server: str, tmp_path: Path) -> None:
    (tmp_path / ".env").write_text(f"MINT_BASE_URL={torch_server}/\nMINT_API_KEY=sk-mine\nMINT_BASE_MODEL=mint/tiny\n")
    copied = tmp_path / "quickstart.py"
    copied.write_text((SCRIPTS / "quickstart.py").read_text())  # load_dotenv looks beside the script
    script = start(str(copied), tmp_path)
    out, errors = script.communicate(timeout=600)
    assert script.returncode == 0, errors
    assert "SFT saved mint://" in out and "RL datums 8" in out
    losses = [float(line.split()[-1]) for line in out.splitlines() if line.startswith("SFT loss")]
    assert losses[1] < losses[0]
    assert (tmp_path / "home" / "tokenizers").is_dir() and not (tmp_path / "home" / "checkpoints").exists()


def steps_of(script: subprocess.Popen[str], *, kill_after: int | None = None) -> list[list[str]]:
    assert script.stdout is not None
    lines = []
    for line in script.stdout:
        lines.append(line.split())
        if len(lines) == kill_after:
            script.kill()
            break
    script.wait(timeout=600)
    return lines


@pytest.mark.slow
def test_a_run_that_is_killed_at_random_and_resumed_ends_with_the_same_bits(tmp_path: Path) -> None:
    with http_server(tmp_path / "server", engine=fake_engine()) as url:
        calm = steps_of(start("resume.py", tmp_path, MINT_BASE_URL=url))
        assert len(calm) == 6
        dice, lines, interruptions = random.Random(4), [], 0
        while len(lines) < 6:
            resume = {"MINT_RESUME_PATH": lines[-1][2]} if lines else {}
            kill_after = dice.randint(1, 3)
            lines += steps_of(start("resume.py", tmp_path, MINT_BASE_URL=url, **resume), kill_after=kill_after)
            interruptions += 1
    assert interruptions >= 3
    assert [line[:2] for line in lines] == [line[:2] for line in calm]


@pytest.mark.parametrize(
    "adapter", [MathAdapter, *(pytest.param(other, marks=pytest.mark.slow) for other in (ChatAdapter, CodeAdapter))]
)
def test_the_three_adapters_run_over_http(
    adapter: type[Any], torch_server: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MINT_BASE_URL", torch_server)
    config = RLConfig(
        base_model="mint/tiny",
        steps=1,
        batch_size=2,
        group_size=2,
        max_tokens=8,
        heldout_size=2,
        run_dir=tmp_path / "run",
    )
    result = run_grpo(adapter(), config)
    assert result.sampler_checkpoint.startswith("mint://")
    assert (tmp_path / "run" / "metrics.jsonl").read_text().count("\n") >= 1
