"""RL of an agent with a shell: mint/tiny is shown commands (SFT), half of them wrong, then learns by GRPO.

    python -m benchmarks.learning.shell_agent [--seed N …] [--demonstrations N] [--epochs N] [--steps N] > rows.jsonl
    python -m benchmarks.learning.shell_agent --read rows.jsonl

The task is `task=shell`: set one setting of one service, whose file the agent must find among four. The base model
cannot write a command. Half of the demonstrations change the setting in all files, which is wrong. A reward is that
of a whole episode in the sandbox: 1 if all files are as they should be, else 0, less the cost of malformed calls.
Settings were chosen on the seed 100. Prints a JSON line for each seed, or a table.
"""

from __future__ import annotations

import argparse
import json
import random
import re
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import mint
from mint.recipes.sft import SFTConfig, run_sft
from mint.recipes.shell import Edit, ShellAdapter, draw_edits
from mint.recipes.supervised import Demonstration
from mint.rl import RLConfig, run_grpo
from mint.rl.tasks.chat_format import ChatFormat
from mint.runs.log import RunLog

MODEL = "mint/tiny"
RANK = 32
SEEDS = (200, 201, 202)
DEMONSTRATION_SEED = 10_000
"""Added to the seed of a run, so that its demonstrations are not its training requests."""

LAST_MESSAGES = 4
"""One of so many demonstrations goes on to the last message."""

COMMANDS = (
    "sed -i '/{service}/,$s/{name}.*/{name} = {value}/' conf.d/*",
    "sed -i 's/{name}.*/{name} = {value}/' conf.d/*",
)
"""The first is right: it changes the lines from the name of the service to the end of the file. The second changes all
files."""


def command(edit: Edit, template: str) -> str:
    """The command for a request."""
    asked = re.search(r"Set (\w+) of the service (\w+) to (\d+)", edit.text)
    assert asked is not None
    name, service, value = asked.groups()
    return template.format(name=name, service=service, value=value)


def demonstrations(task: ShellAdapter, edits: Sequence[Edit], tokenizer: Any) -> list[Demonstration]:
    """For each request a call with one of the commands, and for some also the last message."""
    drawn = random.Random(task.seed)
    shown = []
    for place, edit in enumerate(edits):
        env = task.make_env(edit)
        form = ChatFormat(tokenizer, env.tools)
        opening = env.initial_observation()
        env.close()
        arguments = json.dumps({"command": command(edit, drawn.choice(COMMANDS))})
        call = f'<tool_call>{{"name": "bash", "arguments": {arguments}}}</tool_call>'
        shown.append(Demonstration(form.prompt(opening), call))
        if place % LAST_MESSAGES == 0:
            answers = [{"role": "assistant", "content": call}, {"role": "tool", "name": "bash", "content": ""}]
            shown.append(Demonstration(form.prompt([*opening, *answers]), "done."))
    return shown


def run(seed: int, count: int, epochs: int, steps: int, learning_rate: float) -> dict[str, Any]:
    """SFT on `count` requests, then GRPO on others, as a row of the output."""
    task = ShellAdapter(seed=seed, heldout_size=96)
    cpu, began = time.process_time(), time.monotonic()
    with tempfile.TemporaryDirectory() as folder, mint.ServiceClient(data_dir=Path(folder) / "service") as service:
        tokenizer = service.create_sampling_client(base_model=MODEL).get_tokenizer()
        sft = SFTConfig(
            base_model=MODEL,
            rank=RANK,
            seed=seed,
            epochs=epochs,
            batch_size=32,
            learning_rate=4e-3,
            run_dir=Path(folder) / "sft",
            print_progress=False,
        )
        edits = draw_edits(DEMONSTRATION_SEED + seed, count, heldout=False)
        shown = run_sft(demonstrations(task, edits, tokenizer), [], sft, service_client=service)
        sft_cpu = time.process_time() - cpu
        config = RLConfig(
            base_model=MODEL,
            init_from=shown.checkpoint,
            rank=RANK,
            seed=seed,
            batch_size=8,
            group_size=8,
            steps=steps,
            max_tokens=80,
            max_turns=3,
            temperature=1.0,
            learning_rate=learning_rate,
            lr_schedule="linear",
            heldout_size=task.heldout_size,
            grader_concurrency=8,
            run_dir=Path(folder) / "rl",
        )
        result = run_grpo(task, config, service_client=service)
        rewards = [round(row["reward/mean"], 3) for row in RunLog(result.run_dir).read("metrics.jsonl")]
    return {
        "seed": seed,
        "demonstrations": count,
        "epochs": epochs,
        "steps": steps,
        "before": {f"{temperature:g}": reading.to_dict() for temperature, reading in result.heldout_before.items()},
        "after": {f"{temperature:g}": reading.to_dict() for temperature, reading in result.heldout_after.items()},
        "rewards": rewards,
        "findings": [finding.code for finding in result.findings],
        "seconds": round(time.monotonic() - began),
        "sft_cpu_seconds": round(sft_cpu),
        "cpu_seconds": round(time.process_time() - cpu),
    }


def print_table(rows: Sequence[Mapping[str, Any]]) -> None:
    """Held-out reward before → after with 95 % intervals, and CPU seconds."""
    print("| seed | greedy before → after | temperature 1 before → after | CPU s of SFT | of RL |")
    print("|---|---|---|---|---|")
    for row in rows:
        pairs = [[_reading(row[when][temperature]) for when in ("before", "after")] for temperature in ("0", "1")]
        cells = " | ".join(f"{before} → {after}" for before, after in pairs)
        seconds = f"{row['sft_cpu_seconds']} | {row['cpu_seconds'] - row['sft_cpu_seconds']}"
        print(f"| {row['seed']} | {cells} | {seconds} |")


def _reading(estimate: Mapping[str, float]) -> str:
    return f"{estimate['mean']:.2f} ({estimate['low']:.2f}–{estimate['high']:.2f})"


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", action="append", type=int, help=f"default: {', '.join(map(str, SEEDS))}")
    parser.add_argument("--demonstrations", type=int, default=1024, help="requests that are demonstrated")
    parser.add_argument("--epochs", type=int, default=4, help="of the SFT")
    parser.add_argument("--steps", type=int, default=12, help="of the RL")
    parser.add_argument("--learning-rate", type=float, default=5e-4, help="of the RL")
    parser.add_argument("--read", type=Path, metavar="ROWS", help="no runs: a table of the rows of earlier ones")
    options = parser.parse_args()
    if options.read is not None:
        print_table([json.loads(line) for line in options.read.read_text().splitlines()])
        return
    for seed in options.seed or SEEDS:
        row = run(seed, options.demonstrations, options.epochs, options.steps, options.learning_rate)
        print(json.dumps(row), flush=True)


if __name__ == "__main__":
    main()
