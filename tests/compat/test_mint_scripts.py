"""Scripts as MinT's users have them run over HTTP with nothing but an address and a key in a `.env` file."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import mint
from tests.compat.served import Served, mint_serve

pytestmark = pytest.mark.slow

HERE = Path(__file__).parent


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    with mint_serve(tmp_path_factory.mktemp("served")) as running:
        yield running


def start_script(served: Served, name: str, work_dir: Path, *arguments: str) -> subprocess.Popen[str]:
    """A script that runs in a folder with a `.env`; its environment names no server."""
    (work_dir / ".env").write_text(f"MINT_BASE_URL={served.url}/\nMINT_API_KEY={served.key(name)}\n")
    environment = {key: value for key, value in os.environ.items() if not key.startswith(("MINT_", "TINKER_"))}
    return subprocess.Popen(
        [sys.executable, str(HERE / name), *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=work_dir,
        env={**environment, "MINT_HOME": str(work_dir / "home"), "PYTHONPATH": str(Path(mint.__file__).parents[1])},
    )


def run_script(served: Served, name: str, work_dir: Path, *arguments: str) -> dict[str, Any]:
    """The last line of a script."""
    process = start_script(served, name, work_dir, *arguments)
    try:
        said, complained = process.communicate(timeout=280)
    finally:
        process.kill()
    assert process.returncode == 0, complained[-3000:]
    return json.loads(said.splitlines()[-1])


def test_the_calls_of_mints_scripts_learn_by_sft_and_go_on_by_rl(served: Served, tmp_path: Path) -> None:
    said = run_script(served, "mint_quickstart.py", tmp_path)
    first, *_, last = said["losses"][:6]
    assert last < 0.7 * first and said["losses"][6] < last, said
    assert len(said["rewards"]) == 4 and said["rl"].endswith("/sampler_weights/rl-final") and said["tokens"] >= 1


def test_a_downloaded_archive_is_uploaded_and_trained_on_with_its_optimizer(served: Served, tmp_path: Path) -> None:
    said = run_script(served, "mint_archive.py", tmp_path)
    assert said["measured"] == said["expected"], said


def test_the_queue_status_of_an_invented_session_can_be_read(served: Served, tmp_path: Path) -> None:
    said = run_script(served, "mint_queue_status.py", tmp_path)
    assert said["loss"] > 0 and said["statuses"], said
    for status in said["statuses"]:
        assert status["state"] == "active" and status["retry_after"] >= 1
        assert {"x-queue-depth", "x-queue-position", "x-queue-status"} <= status["x_queue"].keys()
        assert ("x-queue-eta-s" in status["x_queue"]) == (status["estimated_wait_s"] is not None)
        assert status["depth"] >= 1 and status["position"] >= 0


def test_the_openai_client_lists_and_completes(served: Served, tmp_path: Path) -> None:
    said = run_script(served, "mint_openai_smoke.py", tmp_path)
    assert "mint/tiny" in said["models"] and said["path"] in said["texts"], said
    assert said["role"] == "assistant" and all(said["texts"].values())


@pytest.mark.parametrize("name", ["math", "chat", "code"])
def test_the_adapters_of_the_rl_library_run_over_http(served: Served, name: str, tmp_path: Path) -> None:
    said = run_script(served, "mint_adapters.py", tmp_path, name, "2", str(tmp_path / "run"))
    assert said["steps"] == [1, 2] and len(said["rewards"]) == 2 * 4 * 8


def test_a_run_that_is_killed_again_and_again_ends_with_the_same_bits(served: Served, tmp_path: Path) -> None:
    whole = run_script(served, "mint_adapters.py", tmp_path, "math", "8", str(tmp_path / "whole"))
    random_s = random.Random(4)
    kills = 0
    for _ in range(6):
        metrics = tmp_path / "broken" / "metrics.jsonl"
        before = len(metrics.read_text().splitlines()) if metrics.exists() else 0
        process = start_script(served, "mint_adapters.py", tmp_path, "math", "8", str(tmp_path / "broken"))
        while process.poll() is None and (not metrics.exists() or len(metrics.read_text().splitlines()) <= before):
            time.sleep(0.01)
        time.sleep(random_s.uniform(0, 0.3))
        kills += process.poll() is None
        process.kill()
        process.communicate()
    broken = run_script(served, "mint_adapters.py", tmp_path, "math", "8", str(tmp_path / "broken"))
    assert kills >= 2
    assert broken["steps"] == whole["steps"] == list(range(1, 9))
    assert (broken["rewards"], broken["tokens"]) == (whole["rewards"], whole["tokens"])
