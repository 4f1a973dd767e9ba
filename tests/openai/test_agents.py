"""openai-agents, installed from the registry into an environment of its own, runs over the Responses API."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest
from openai_server import MODEL, Server
from own_environment import install

DRIVER = Path(__file__).parent / "drive_agents.py"
AGENTS = ("openai-agents==0.24.0", "openai==3.54.0")


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_openai_agents_runs_with_its_default_model(server: Server, tmp_path: Path) -> None:
    programs = install(tmp_path / "venv", *AGENTS)
    command = [programs / "python", DRIVER, server.url, server.keys["ada"], MODEL]
    ran = subprocess.run(command, env={"PATH": "/usr/bin:/bin"}, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr[-3000:]
    found = json.loads(ran.stdout)
    assert found["model"] == "OpenAIResponsesModel"
    assert found["items"] == ["ToolCallItem", "ToolCallOutputItem", "MessageOutputItem"]
    assert "75" in found["reply"]
    assert found["streamed"] == found["reply"]
    assert found["events"] > 10
    assert isinstance(found["second"], str)
    assert found["value"].keys() == {"left", "right"}
