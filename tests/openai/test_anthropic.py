"""The `anthropic` package, installed from the registry into an environment of its own, over `/v1/messages`."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import openai
import pytest
from openai_server import MODEL, Server
from own_environment import install

HERE = Path(__file__).parent
ANTHROPIC = "anthropic==2.12.0"


@pytest.fixture(scope="module")
def programs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return install(tmp_path_factory.mktemp("anthropic") / "venv", ANTHROPIC)


def run(programs: Path, *arguments: object) -> str:
    command = [programs / "python", *map(str, arguments)]
    ran = subprocess.run(command, env={"PATH": "/usr/bin:/bin"}, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr[-3000:]
    return ran.stdout


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_anthropics_client_gets_the_replies_of_chat(server: Server, client: openai.OpenAI, programs: Path) -> None:
    found = json.loads(run(programs, HERE / "drive_anthropic.py", server.url, server.keys["ada"], MODEL))
    question = [{"role": "user", "content": "What is 31 + 44?"}]
    chat = client.chat.completions.create(model=MODEL, messages=question, temperature=0, max_tokens=60)
    assert found["text"] == found["streamed"] == "".join(found["pieces"]) == chat.choices[0].message.content
    assert found["usage"] == found["streamed_usage"] == [chat.usage.prompt_tokens, chat.usage.completion_tokens]
    assert found["stop_reason"] == "end_turn"
    assert len(found["pieces"]) > 1
    assert found["use"] == ["calculator", {"expression": "31 + 44"}, "tool_use"]
    assert found["use_in_stream"] == found["use"][:2]
    assert "75" in found["answer"]
    assert "75" in found["run"]
    assert found["parsed"].keys() == {"left", "right"}
    assert found["counted"] == chat.usage.prompt_tokens
    assert found["errors"] == [
        ["NotFoundError", 404, "not_found_error"],
        ["BadRequestError", 400, "invalid_request_error"],
        ["AuthenticationError", 401, "authentication_error"],
    ]


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_the_fields_that_are_tested_are_those_of_anthropics_package(programs: Path) -> None:
    assert run(programs, HERE / "anthropic_fields.py") == (HERE / "anthropic_fields.json").read_text()
