"""How fast the dashboard shows a long run, what its server keeps in memory, and what a run pays for being looked at.

    python -m benchmarks.serving.big_run make SMALL_RUN BIG_RUN        2,000 steps x 64 rollouts
    python -m benchmarks.serving.dashboard pages BIG_RUN [TIMES]
    python -m benchmarks.serving.dashboard writing [STEPS]

`pages` starts `mint dashboard` over the run and opens its pages in chromium, each time in a fresh context (with nothing
cached), medians and worst of TIMES; then it walks through 200 pages and reads the server's memory before, after
and at its highest. `writing` makes a run at the tiny shape and sums what its steps spend on their record, and on what.
"""

from __future__ import annotations

import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx

from mint.recipes.tools import DEMO, ToolsAdapter
from mint.rl import loop, run_grpo
from mint.runs.log import RunLog

API = "/dashboard/v1"
PARTS = {
    "rows": "rollouts as rows",
    "files": "encoding and writing rows, index, pieces, metrics",
    "diagnosis": "live diagnosis",
    "record": "all of a step's record",
}
WALKED = 200
TINY = {"batch_size": 8, "group_size": 8, "max_tokens": 32}
"""As many rollouts as a step of `python -m benchmarks grpo` has at this shape, here of two turns with a tool."""
PAINTED = "performance.getEntriesByName('first-contentful-paint')[0]?.startTime ?? null"


@contextmanager
def dashboard(run: Path) -> Generator[tuple[str, int]]:
    """`mint dashboard` over one run: its address and process id."""
    with tempfile.TemporaryDirectory() as home:
        command = [sys.executable, "-c", "from mint.cli.main import app; app()", "dashboard", str(run), "--port", "0"]
        environment = {**os.environ, "MINT_HOME": home}
        process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment)
        try:
            assert process.stdout is not None
            words = process.stdout.readline().split()
            yield next(word for word in words if word.startswith("http://")).rstrip("/"), process.pid
        finally:
            process.terminate()
            process.wait()


def memory_mb(pid: int) -> tuple[float, float]:
    """A process's memory now, and its peak."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    sizes = {line.split(":")[0]: int(line.split()[1]) / 1024 for line in lines if line.startswith(("VmRSS", "VmHWM"))}
    return sizes["VmRSS"], sizes["VmHWM"]


def pages(run: Path, times: int = 7) -> None:
    """Prints milliseconds of each page and of what is done in it, and the server's memory."""
    from playwright.sync_api import sync_playwright  # deferred: `writing` needs no browser

    with dashboard(run) as (address, pid), sync_playwright() as playwright:
        began = memory_mb(pid)[0]
        chromium = playwright.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"])
        own = f"{address}/runs/{run.name}"
        steps = httpx.get(f"{address}{API}/runs/{run.name}/steps", timeout=60).json()["steps"]
        middle = steps[len(steps) // 2]
        print("| what | median ms | worst ms |\n|---|---|---|")
        rows: dict[str, Callable[[Any], dict[str, float]]] = {
            "runs": lambda tab: opened(tab, f"{address}/", "document.querySelector('#live[data-state]')"),
            "run": lambda tab: opened(tab, own, "document.querySelector('#charts[aria-busy=false] canvas')"),
            "rollouts": lambda tab: opened(tab, f"{own}/rollouts?step={middle}", "document.querySelector('.sample')"),
            "filtered": lambda tab: opened(
                tab, f"{own}/rollouts?flag=used&reward_min=0.5&length_min=100&sort=-length", FOUND
            ),
            "text, common": lambda tab: opened(tab, f"{own}/rollouts?text=sample+7.", FOUND),
            "text, rare": lambda tab: opened(tab, f"{own}/rollouts?text=Step+{middle},+sample+63.", MARKED),
            "diagnosis": lambda tab: opened(tab, f"{own}/diagnosis", "document.querySelector('#verdict')"),
            "checkpoints": lambda tab: opened(tab, f"{own}/checkpoints", "document.querySelector('#kept')"),
            "in the page": lambda tab: walked(tab, f"{own}/rollouts?step={middle}"),
        }
        for name, ask in rows.items():
            print_times(name, [in_fresh_context(chromium, ask) for _ in range(times)])
        before = memory_mb(pid)[0]
        walk_through(chromium, own, steps)
        after, highest = memory_mb(pid)
        chromium.close()
    size = sum(path.stat().st_size for path in run.iterdir()) / 1e6
    print(
        f"\nserver memory, MB: {began:.0f} at first, {before:.0f} after these pages, {after:.0f} after {WALKED} more,"
    )
    print(f"{highest:.0f} at its highest; the run folder has {size:.0f} MB")


FOUND = "/found$/i.test(document.querySelector('#list-title')?.textContent) && document.querySelector('.entry, .empty')"

MARKED = "document.querySelector('#entries .entry mark')"


def in_fresh_context(chromium: Any, ask: Callable[[Any], dict[str, float]]) -> dict[str, float]:
    context = chromium.new_context(viewport={"width": 1440, "height": 900})
    try:
        return ask(context.new_page())
    finally:
        context.close()


def wait_until(tab: Any, condition: str) -> None:
    """Asks the page again and again: its policy allows no script that would."""
    give_up_at = time.perf_counter() + 60
    while not tab.evaluate(f"Boolean({condition})"):
        assert time.perf_counter() < give_up_at, condition
        time.sleep(0.004)


def opened(tab: Any, url: str, done: str) -> dict[str, float]:
    """Milliseconds from asking for a page to its first paint, and to all that it shows at first."""
    began = time.perf_counter()
    tab.goto(url, wait_until="commit")
    wait_until(tab, done)
    shown = (time.perf_counter() - began) * 1e3
    wait_until(tab, f"{PAINTED} !== null")
    return {"first paint": tab.evaluate(PAINTED), "complete": shown}


def walked(tab: Any, url: str) -> dict[str, float]:
    """Milliseconds of the next step, of the next group, and of a filter, in a page that is open."""
    opened(tab, url, "document.querySelector('.sample')")
    taken = {}
    for name, key in (("next step", "]"), ("next group", "J")):
        title = tab.locator("#stage-head h2").inner_text()
        began = time.perf_counter()
        tab.keyboard.press(key)
        wait_until(tab, f"document.querySelector('#stage-head h2').textContent !== {json.dumps(title)}")
        taken[name] = (time.perf_counter() - began) * 1e3
    began = time.perf_counter()
    tab.locator("#finder-more summary").click()
    tab.locator(".flag[data-flag=truncated]").click()
    wait_until(tab, FOUND)
    return {**taken, "a flag": (time.perf_counter() - began) * 1e3}


def print_times(name: str, measured: list[dict[str, float]]) -> None:
    for what in measured[0]:
        taken = sorted(one[what] for one in measured)
        print(f"| {name}: {what} | {statistics.median(taken):.0f} | {taken[-1]:.0f} |", flush=True)


def walk_through(chromium: Any, own: str, steps: list[int]) -> None:
    """Looks at pages all over a run: steps far from each other, groups, found rollouts."""
    context = chromium.new_context()
    tab = context.new_page()
    for place in range(WALKED):
        step = steps[place * 7919 % len(steps)]
        query = f"step={step}&group={place % 8}" if place % 4 else f"reward_min=0.5&first_step={step}&sort=-reward"
        tab.goto(f"{own}/rollouts?{query}", wait_until="commit")
        wait_until(tab, "document.querySelector('.sample')")
    context.close()


def writing(steps: int = 30) -> None:
    """Prints what a step spends on its log, as a share of the step: by the clock."""
    seconds: dict[str, float] = defaultdict(float)
    entered: set[str] = set()

    def timed(owner: Any, method: str, name: str) -> None:
        whole = getattr(owner, method)

        def measured(*args: Any, **kwargs: Any) -> Any:
            if name in entered:
                return whole(*args, **kwargs)
            entered.add(name)
            began = time.perf_counter()
            try:
                return whole(*args, **kwargs)
            finally:
                seconds[name] += time.perf_counter() - began
                entered.remove(name)

        setattr(owner, method, measured)

    timed(RunLog, "append_all", "files")
    timed(RunLog, "append_rollouts", "files")
    timed(loop, "rollout_rows", "rows")
    timed(loop, "diagnose", "diagnosis")
    timed(loop._RLRun, "_record", "record")
    with tempfile.TemporaryDirectory() as home:
        os.environ["MINT_HOME"] = home
        settings = {**TINY, "steps": steps, "run_dir": Path(home) / "runs" / "timed"}
        began = time.perf_counter()
        run_grpo(ToolsAdapter(heldout_size=16), DEMO.changed(**settings))
        rows = [json.loads(line) for line in (Path(home) / "runs" / "timed" / "metrics.jsonl").read_text().splitlines()]
        whole = sum(row["time/rollouts_s"] + row["time/train_s"] for row in rows) + seconds["record"]
    print(f"{steps} steps of {TINY['batch_size']} x {TINY['group_size']} in {time.perf_counter() - began:.1f} s")
    print("| | ms per step | share of the step |\n|---|---|---|")
    for name, what in PARTS.items():
        print(f"| {what} | {1e3 * seconds[name] / steps:.2f} | {100 * seconds[name] / whole:.2f} % |")
    print(f"| the step | {1e3 * whole / steps:.1f} | |")


if __name__ == "__main__":
    what, *words = sys.argv[1:]
    if what == "pages":
        pages(Path(words[0]).resolve(), *map(int, words[1:]))
    else:
        writing(*map(int, words))
