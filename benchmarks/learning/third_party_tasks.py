"""Two reasoning-gym tasks, named before training (docs/tasks.md says why these): does RL move the held-out reward?

    python -m benchmarks.learning.third_party_tasks [--task chain_sum|basic_arithmetic|all] [--seed 0] [--json]

The doctor first: where the base model hardly ever succeeds, supervised fine-tuning on a few generated training items,
and the doctor again. RL starts from that checkpoint, and is measured from it.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from pathlib import Path
from typing import Any

import mint
from mint.recipes.sft import SFTConfig, run_sft
from mint.recipes.supervised import Demonstration
from mint.recipes.task_registry import load_task
from mint.recipes.task_sources.reasoning_gym import ReasoningGymAdapter
from mint.rl import run_grpo
from mint.rl.analysis.doctor import examine

TASKS: dict[str, dict[str, Any]] = {
    "chain_sum": {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 2},
    "basic_arithmetic": {
        "min_terms": 2,
        "max_terms": 2,
        "min_digits": 1,
        "max_digits": 2,
        "operators": ["+", "-"],
        "allow_parentheses": False,
        "allow_negation": False,
    },
}
"""Generator → its options."""

DEMONSTRATIONS = 512
"""Training items shown before RL; after them the doctor says `go` for both."""


def run_task(name: str, *, seed: int, folder: Path) -> dict[str, Any]:
    """Doctor, SFT if the doctor says so, RL; the numbers before and after RL."""
    choice = load_task(f"reasoning_gym:{name}", seed=seed, prompt_style="plain", **TASKS[name])
    config = choice.config.changed(run_dir=folder / f"{name}-rl")
    with mint.ServiceClient(data_dir=folder / "service") as service:
        base = examine(choice.adapter, config, service_client=service)
        if base.verdict == "sft_first":
            config = config.changed(init_from=fine_tune(name, choice.adapter, service, folder, seed))
        start = examine(choice.adapter, config, service_client=service)
        began = time.monotonic()
        result = run_grpo(choice.adapter, config, service_client=service)
        seconds = time.monotonic() - began
    return {
        "task": name,
        "seed": seed,
        "doctor_base": f"{base.verdict}: {base.reason}",
        "doctor_start": f"{start.verdict}: {start.reason}",
        "before": {f"{temperature:g}": reading.to_dict() for temperature, reading in result.heldout_before.items()},
        "after": {f"{temperature:g}": reading.to_dict() for temperature, reading in result.heldout_after.items()},
        "findings": [finding.to_dict() for finding in result.findings],
        "seconds": round(seconds, 1),
    }


def fine_tune(name: str, adapter: Any, service: mint.ServiceClient, folder: Path, seed: int) -> str:
    """A checkpoint after one pass over a few generated training items; the held-out ones stay unseen."""
    assert isinstance(adapter, ReasoningGymAdapter)
    tokenizer = service.create_sampling_client(base_model="mint/tiny").get_tokenizer()
    shown = [
        Demonstration(adapter.make_prompt(question, tokenizer), adapter.demonstrate(question) or "")
        for question in adapter.build_dataset()[:DEMONSTRATIONS]
    ]
    config = SFTConfig(run_dir=folder / f"{name}-sft", epochs=1, seed=seed)
    return run_sft(shown, [], config, service_client=service).checkpoint


def print_row(row: dict[str, Any]) -> None:
    """The two verdicts, and the held-out reward before and after RL."""
    print(f"\n{row['task']} (seed {row['seed']}, {row['seconds']} s of RL and evaluations)")
    print(f"  base model   {row['doctor_base']}\n  start of RL  {row['doctor_start']}")
    for temperature, before in row["before"].items():
        after = row["after"][temperature]
        cells = [f"{each['mean']:.3f} ({each['low']:.3f} to {each['high']:.3f})" for each in (before, after)]
        apart = "apart" if before["high"] < after["low"] else "overlap"
        print(f"  temperature {temperature}: {cells[0]} → {cells[1]}, n={after['n']}, intervals {apart}")
    for finding in row["findings"]:
        print(f"  {finding['severity']} {finding['code']} (step {finding['step']}): {finding['evidence']}")


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--task", choices=[*TASKS, "all"], default="all")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    for name in TASKS if arguments.task == "all" else [arguments.task]:
        with tempfile.TemporaryDirectory() as folder:
            row = run_task(name, seed=arguments.seed, folder=Path(folder))
        print(json.dumps(row)) if arguments.json else print_row(row)


if __name__ == "__main__":
    main()
