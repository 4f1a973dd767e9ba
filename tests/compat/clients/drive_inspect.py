"""inspect-ai: a task is evaluated over chat completions, and every reply is the one that a plain request gets."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import openai
from checks import check, report, target

TARGET = target()
PAIRS = [(3, 4), (2, 2), (5, 1), (6, 7)]
TASK = f"""
from inspect_ai import Task, task
from inspect_ai.dataset import Sample
from inspect_ai.scorer import includes
from inspect_ai.solver import generate

@task
def additions():
    samples = [Sample(input=f"What is {{a}} + {{b}}?", target=str(a + b)) for a, b in {PAIRS}]
    return Task(dataset=samples, solver=generate(), scorer=includes())
"""


@check("inspect eval: replies, scores")
def evaluate() -> None:
    Path("additions.py").write_text(TASK)
    command = [str(Path(sys.executable).with_name("inspect")), "eval", "additions.py"]
    command += ["--model", f"openai-api/local/{TARGET.model}", "--temperature", "0", "--max-tokens", "16"]
    command += ["--display", "plain", "--log-format", "json", "--log-dir", "logs"]
    named = {"LOCAL_API_KEY": TARGET.key, "LOCAL_BASE_URL": TARGET.url, "HOME": str(Path.cwd())}
    ran = subprocess.run(command, env={**os.environ, **named}, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stdout[-3000:] + ran.stderr[-3000:]
    (log,) = (json.loads(file.read_text()) for file in Path("logs").glob("*.json"))
    assert log["status"] == "success" and len(log["samples"]) == len(PAIRS), log
    with openai.OpenAI(max_retries=0) as client:
        for sample in log["samples"]:
            asked = [{"role": "user", "content": sample["input"]}]
            got = client.chat.completions.create(model=TARGET.model, messages=asked, max_tokens=16, temperature=0)
            assert sample["output"]["choices"][0]["message"]["content"] == got.choices[0].message.content
    right = [sample["scores"]["includes"]["value"] == "C" for sample in log["samples"]]
    (metric,) = (one["metrics"]["accuracy"]["value"] for one in log["results"]["scores"])
    assert abs(metric - sum(right) / len(right)) < 1e-9


if __name__ == "__main__":
    report("inspect_ai", "openai")
