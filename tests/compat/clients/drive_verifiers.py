"""verifiers: `vf-eval` plays a taskset's prompts over chat completions, in a subprocess, and scores the replies."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import openai
from checks import check, report, target

TARGET = target()
ROLLOUTS = 2
PROMPTS = [f"What is {number} + {number}?" for number in range(1, 5)]
TASKSET = f"""
import verifiers.v1 as vf

__all__ = ["SumsTaskset"]

class SumsTask(vf.Task[vf.TaskData]):
    @vf.reward
    async def length(self, trace: vf.Trace) -> float:
        return float(len(trace.last_reply))

class SumsTaskset(vf.Taskset[SumsTask, vf.TasksetConfig]):
    def load(self):
        for prompt in {PROMPTS}:
            yield SumsTask(vf.TaskData(prompt=prompt), self.config.task)
"""


@check("vf-eval: replies, rewards")
def evaluate() -> None:
    Path("sums_taskset.py").write_text(TASKSET)
    scripts = Path(sys.executable).parent
    command = [
        str(scripts / "vf-eval"),
        "sums_taskset",
        "-m",
        TARGET.model,
        "-r",
        str(ROLLOUTS),
        "--no-push",
        "--no-rich",
    ]
    command += ["--env.agent.harness.id", "null", "--env.agent.runtime.type", "subprocess"]
    command += ["--client.base-url", TARGET.url, "--client.api-key-var", "OPENAI_API_KEY"]
    command += ["--sampling.max-tokens", "12", "--sampling.temperature", "0"]
    named = {"PATH": f"{scripts}:{os.environ['PATH']}", "PYTHONPATH": str(Path.cwd())}
    ran = subprocess.run(command, env={**os.environ, **named}, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stdout[-3000:] + ran.stderr[-3000:]
    (found,) = Path("outputs").glob("*/traces.jsonl")
    episodes = [json.loads(line) for line in found.read_text().splitlines()]
    errors = [error for row in episodes for part in (row, *row["traces"]) for error in part["errors"]]
    assert len(episodes) == ROLLOUTS * len(PROMPTS) and not errors, errors[:1]
    with openai.OpenAI(max_retries=0) as client:
        for prompt in PROMPTS:
            asked = [{"role": "user", "content": prompt}]
            got = client.chat.completions.create(model=TARGET.model, messages=asked, max_tokens=12, temperature=0)
            for trace in (row["traces"][0] for row in episodes if row["task"]["data"]["prompt"] == prompt):
                reply = trace["nodes"][-1]["message"]["content"]
                assert reply == got.choices[0].message.content
                assert trace["rewards"]["length"]["score"] in (len(reply), len(reply.strip()))


if __name__ == "__main__":
    report("verifiers", "openai")
