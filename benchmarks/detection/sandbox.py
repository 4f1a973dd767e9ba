"""The sandbox table: hostile program or hack × engine × verdict × ms, and what an honest verdict costs on each engine.

    python -m benchmarks.detection.sandbox

Times are of this machine in this moment; the load average is printed with them.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path

from mint.recipes.datasets.python_functions import ARGUMENT_NAMES, KINDS, PythonFunction, edge_inputs
from mint.sandbox import Sandbox, sandbox_level

TRIAL = Path(__file__).resolve().parents[2] / "tests" / "sandbox" / "trial.py"
RUNS = 8


def hostile_table() -> None:
    """One row per program, from the same trial as the tests."""
    done = subprocess.run([sys.executable, str(TRIAL), "monty", "zygote"], capture_output=True, text=True, check=True)
    report = json.loads(done.stdout)
    after_programs = report.pop("after_programs")
    print("| program | engine | verdict | ms | what it came to |\n|---|---|---|---|---|")
    for name, row in report.items():
        verdict = "HARM" if row["harm"] else "WON" if row["won"] else "refused"
        came_to = (row["error"] or row["value"]).replace("|", "/")[:60]
        print(f"| {name} | {row['engine']} | {verdict} | {row['ms']:.1f} | {row['status']}: {came_to} |")
    bad = sum(bool(row["harm"] or row["won"]) for row in report.values())
    print(
        f"\n{len(report)} programs, {bad} got through; stray processes {after_programs['strays']}; "
        f"uid {after_programs['user']}"
    )


def honest_table() -> None:
    """Median and 95th percentile of a verdict on an honest one-line function with five to ten inputs."""
    functions = [PythonFunction(kind, kind.names[0], ARGUMENT_NAMES[kind.argument][0], 4) for kind in KINDS]
    print("\n| honest one-line functions | median ms | p95 ms | runs |\n|---|---|---|---|")
    for engines in (("monty",), ("zygote",), ("monty", "zygote")):
        with Sandbox(engines=engines, workers=1) as sandbox:
            if sandbox.level.engines != engines:
                print(f"| {' + '.join(engines)} | not here: {sandbox.level.missing} | | |")
                continue
            times_ms = []
            for function in functions * RUNS:
                source, inputs = function.source(function.kind.body), [(value,) for value in edge_inputs(function)]
                began = time.perf_counter()
                outcome = sandbox.run(source, function.name, inputs)
                times_ms.append((time.perf_counter() - began) * 1000)
                assert outcome.status == "ok", outcome
        times_ms.sort()
        p95 = times_ms[int(0.95 * len(times_ms))]
        print(f"| {' + '.join(engines)} | {statistics.median(times_ms):.2f} | {p95:.2f} | {len(times_ms)} |")


if __name__ == "__main__":
    level = sandbox_level()
    print(f"engines {level.engines}, Landlock ABI {level.landlock_abi}, load average {os.getloadavg()[0]:.1f}\n")
    hostile_table()
    honest_table()
    print(f"\nload average {os.getloadavg()[0]:.1f} at the end, {os.cpu_count()} cores")
