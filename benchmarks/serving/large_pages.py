"""How long pages take over runs that are larger than most people's: 10,000 runs, 100,000 steps with 10,000
checkpoints, and rollouts of 30,000 tokens.

    python -m benchmarks.serving.large_pages [TIMES]

Writes the runs into a folder that is removed at the end, serves them with `mint dashboard` (with `mint serve` for the
page of the service), and opens each page in chromium. "cold" is the first request of a server that has just started,
with nothing cached in the browser. "fresh" has nothing cached either, at a server that has read all runs.
"next" goes to the page in a tab that has shown it before, as a reader does: medians and worst of TIMES. `load` is the
load event; `shown` is when the page holds what it promises, charts and coloured tokens included, and the next frame is
drawn. `cpu` is what the server and all processes of the browser take for one page of "next". The load of the machine
stands at the end: compare times only of a quiet one.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx

from tests.generated_runs import write_long, write_many, write_wide

RUNS, STEPS, GROUPS, SAMPLES, TOKENS = 10_000, 100_000, 256, 16, 30_000
VIEWPORT = {"width": 1440, "height": 900}
CHARTS = "document.querySelector('#charts[aria-busy=false] canvas')"
ROLLOUTS = "performance.getEntriesByName('rollouts shown').length"
PAGES = {
    "runs": ("/", "document.querySelectorAll('#rows tr').length === 50"),
    "run": ("/runs/long", CHARTS),
    "compare": ("/compare?run=long&run=run-00001&run=run-09999", CHARTS),
    "diagnosis": ("/runs/long/diagnosis", "document.querySelector('#verdict')"),
    "diagnosis, wide": ("/runs/wide/diagnosis", "document.querySelector('#verdict')"),
    "checkpoints": ("/runs/long/checkpoints", "document.querySelectorAll('#kept tr[data-step]').length > 1"),
    "rollouts": ("/runs/wide/rollouts?step=1&group=7", ROLLOUTS),
    "rollouts, 30k": ("/runs/wide/rollouts?step=1&group=0", ROLLOUTS),
}
SERVICE = {"service": ("/service", "document.querySelector('#tenants')")}
WATCH = """
addEventListener("load", () => { window.loadedAt = performance.now(); });
const look = () => {
  let isShown = false;
  try { isShown = document.readyState !== "loading" && Boolean(%s); } catch { isShown = false; }
  if (isShown) requestAnimationFrame(() => { window.shownAt ??= performance.now(); });
  else setTimeout(look, 4);
};
look();
"""
READ = """
() => window.shownAt && window.loadedAt
  ? { load: loadedAt, shown: shownAt, nodes: document.querySelectorAll("*").length } : null
"""


@contextmanager
def served(command: str, home: Path) -> Generator[str]:
    """`mint COMMAND` over a data folder, just started: its address."""
    arguments = [command, "--data-dir", str(home), "--port", "0"]
    program = [sys.executable, "-c", "from mint.cli.main import app; app()", *arguments]
    environment = {**os.environ, "MINT_HOME": str(home), "HF_HUB_OFFLINE": "1"}
    with (home / "log").open("w") as log:
        process = subprocess.Popen(program, stdout=subprocess.PIPE, stderr=log, text=True, env=environment)
    try:
        assert process.stdout is not None
        yield next(word for word in process.stdout.readline().split() if word.startswith("http://")).rstrip("/")
    finally:
        process.terminate()
        process.wait()


def new_tab(chromium: Any, shown: str) -> Any:
    """A tab with nothing cached, whose pages note when they show what they promise."""
    tab = chromium.new_context(viewport=VIEWPORT).new_page()
    tab.add_init_script(WATCH % shown)
    return tab


def opened(tab: Any, url: str) -> dict[str, float]:
    """Milliseconds from the start of the navigation, and the number of elements."""
    tab.goto(url)
    while (read := tab.evaluate(READ)) is None:
        tab.wait_for_timeout(20)
    return read


def measure(chromium: Any, command: str, home: Path, pages: dict[str, tuple[str, str]], times: int) -> None:
    for name, (path, shown) in pages.items():
        with served(command, home) as address:
            tab = new_tab(chromium, shown)
            rows = {"cold": [opened(tab, address + path)]}
            tab.context.close()
            while not httpx.get(f"{address}/dashboard/v1/runs", timeout=60).json()["is_whole"]:
                time.sleep(0.2)
            rows["fresh"] = []
            for _ in range(times):
                tab = new_tab(chromium, shown)
                rows["fresh"].append(opened(tab, address + path))
                tab.context.close()
            tab = new_tab(chromium, shown)
            opened(tab, address + path)
            before, rows["next"] = children_cpu_s(), []
            for _ in range(times):
                rows["next"].append(opened(tab, address + path))
            cpu_ms = 1e3 * (children_cpu_s() - before) / times
            tab.context.close()
        cells = [name, *map(cell, rows.values()), f"{cpu_ms:.0f}", f"{rows['next'][-1]['nodes']:,.0f}"]
        print(f"| {' | '.join(cells)} |", flush=True)


def children_cpu_s() -> float:
    """User and system time of all processes that this one has started, and of those that they have started."""
    spent: dict[int, float] = {}
    parents: dict[int, int] = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):  # it has ended
            fields = path.read_text().rpartition(")")[2].split()
            parents[int(path.parent.name)] = int(fields[1])
            spent[int(path.parent.name)] = (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    def is_ours(pid: int) -> bool:
        return pid in parents and (parents[pid] == os.getpid() or is_ours(parents[pid]))

    return sum(seconds for pid, seconds in spent.items() if is_ours(pid))


def cell(rows: list[dict[str, float]]) -> str:
    """`load` and `shown`: the median, and the worst where there are several."""
    parts = []
    for what in ("load", "shown"):
        taken = [row[what] for row in rows]
        parts.append(f"{statistics.median(taken):.0f}" + (f" ({max(taken):.0f})" if len(taken) > 1 else ""))
    return " / ".join(parts)


def main(times: int = 7) -> None:
    from playwright.sync_api import sync_playwright  # deferred: the usage is readable without a browser

    with tempfile.TemporaryDirectory() as folder, sync_playwright() as playwright:
        home = Path(folder)
        write_many(home / "runs", RUNS)
        write_long(home / "runs" / "long", steps=STEPS, checkpoint_every=10, eval_every=100)
        write_wide(home / "runs" / "wide", groups=GROUPS, samples=SAMPLES, tokens=TOKENS)
        chromium = playwright.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"])
        print(
            "| page | cold: load / shown, ms | fresh | next | cpu of next, ms | elements |\n|---|---|---|---|---|---|"
        )
        measure(chromium, "dashboard", home, PAGES, times)
        measure(chromium, "serve", home, SERVICE, times)
        chromium.close()
    print(f"\nload of the machine over the last minute: {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores")


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
