"""How long a step waits for slow graders: rewards that take a fixed time, and when each group was sampled and graded.

`python -m benchmarks.learning.slow_graders [CASE …]` runs the cases on the bundled model and prints a table. It
measures the wall clock, so the machine must be quiet.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from mint.recipes.math import DEMO, MathAdapter
from mint.rl import Reward, RLAdapter, RLConfig, run_grpo

CASES = {
    "128 rewards of 0.25 s": (0.25, {"batch_size": 8, "group_size": 16}),
    "1,024 verdicts of 2 s": (2.0, {"batch_size": 64, "group_size": 16}),
    "1,024 verdicts of 2 s, 256 at once": (2.0, {"batch_size": 64, "group_size": 16, "grader_concurrency": 256}),
}
STEPS = 5


class SlowMath(RLAdapter):
    """The math task, whose grader waits first."""

    def __init__(self, seconds: float) -> None:
        self.math = MathAdapter(seed=0)
        self.seconds = seconds
        self.in_flight = 0
        self.most_in_flight = 0

    def build_dataset(self) -> Sequence[Any]:
        """The items of the math task."""
        return self.math.build_dataset()

    def make_prompt(self, item: Any, tokenizer: Any) -> list[int]:
        """The prompt of the math task."""
        return self.math.make_prompt(item, tokenizer)

    async def compute_reward(self, response: str, item: Any) -> Reward:
        """The math reward after the wait. It may take half a second of another process: not in the event loop."""
        self.in_flight += 1
        self.most_in_flight = max(self.most_in_flight, self.in_flight)
        await asyncio.sleep(self.seconds)
        self.in_flight -= 1
        return await asyncio.to_thread(self.math.compute_reward, response, item)

    def close(self) -> None:
        """Ends the processes of the math task."""
        self.math.close()


def measure(seconds: float, config: RLConfig) -> list[dict[str, Any]]:
    """The metrics of each step but the first, with how many groups were graded early, and the most verdicts at once."""
    task = SlowMath(seconds)
    with tempfile.TemporaryDirectory() as folder:
        result = run_grpo(task, config.changed(run_dir=Path(folder) / "run"))
        metrics = [json.loads(line) for line in (result.run_dir / "metrics.jsonl").read_text().splitlines()]
        timeline = [json.loads(line) for line in (result.run_dir / "timeline.jsonl").read_text().splitlines()]
    task.close()
    return [
        {**row, "early": _graded_early(row["step"], timeline), "in_flight": task.most_in_flight} for row in metrics[1:]
    ]


def _graded_early(step: int, timeline: Sequence[dict[str, Any]]) -> int:
    """Groups whose grading began before the last group of their step was sampled."""
    rows = [row for row in timeline if row["step"] == step]
    last = max(row["sampling"][1] for row in rows)
    return sum(row["grading"][0] < last for row in rows)


def main() -> None:
    """Prints a table."""
    table = Table(
        "case",
        "rollout phase s",
        "sampling s",
        "after sampling s",
        "groups graded before the last sampled",
        "most verdicts in flight",
    )
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("case", nargs="*", default=list(CASES), help=" · ".join(CASES))
    for name in parser.parse_args().case:
        seconds, settings = CASES[name]
        for row in measure(seconds, DEMO.changed(steps=STEPS, heldout_size=0, **settings)):
            table.add_row(
                name,
                f"{row['time/rollouts_s']:.2f}",
                f"{row['time/sampling_s']:.2f}",
                f"{row['time/grading_after_sampling_s']:.2f}",
                f"{row['early']} of {settings['batch_size']}",
                str(row["in_flight"]),
            )
    Console().print(table)


if __name__ == "__main__":
    main()
