"""inspect-ai, installed from the registry into an environment of its own, evaluates over this endpoint."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest
from openai_server import MODEL, Server
from own_environment import install

HARNESS = ("inspect-ai==0.3.285", "openai")
PAIRS = [(3, 4), (2, 2), (5, 1), (6, 7)]

TASK = """
from inspect_ai import Task, task
from inspect_ai.dataset import Sample
from inspect_ai.scorer import includes
from inspect_ai.solver import generate

@task
def additions():
    samples = [Sample(input=f"What is {a} + {b}?", target=str(a + b)) for a, b in PAIRS]
    return Task(dataset=samples, solver=generate(), scorer=includes())
""".replace("PAIRS", str(PAIRS))


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_inspect_gets_the_replies_that_the_openai_client_gets(server: Server, tmp_path: Path) -> None:
    programs = install(tmp_path / "venv", *HARNESS)
    (tmp_path / "additions.py").write_text(TASK)
    command = [programs / "inspect", "eval", "additions.py", "--model", f"openai-api/local/{MODEL}"]
    command += ["--temperature", "0", "--max-tokens", "16", "--display", "plain"]
    command += ["--log-format", "json", "--log-dir", str(tmp_path / "logs")]
    environment = {
        "LOCAL_API_KEY": server.keys["ada"], "LOCAL_BASE_URL": f"{server.url}/v1", "HOME": str(tmp_path),
        "PATH": "/usr/bin:/bin",
    }  # fmt: skip
    harness = subprocess.run(command, env=environment, capture_output=True, text=True, cwd=tmp_path, check=False)
    assert harness.returncode == 0, harness.stdout[-3000:] + harness.stderr[-3000:]
    (log,) = (json.loads(file.read_text()) for file in (tmp_path / "logs").glob("*.json"))
    assert log["status"] == "success", log
    assert len(log["samples"]) == len(PAIRS)
    with server.client() as client:
        for sample in log["samples"]:
            asked = [{"role": "user", "content": sample["input"]}]
            got = client.chat.completions.create(model=MODEL, messages=asked, max_tokens=16, temperature=0)
            assert sample["output"]["choices"][0]["message"]["content"] == got.choices[0].message.content
    right = [sample["scores"]["includes"]["value"] == "C" for sample in log["samples"]]
    (metric,) = (one["metrics"]["accuracy"]["value"] for one in log["results"]["scores"])
    assert metric == pytest.approx(sum(right) / len(right))
