"""Makes the pictures of docs/dashboard.md anew, in a browser, from runs that are made for them.

    python scripts/dashboard_pictures.py [HOME]

Needs playwright and a chromium (`apt-get install chromium`). HOME keeps the runs, which take some three
minutes of one core; one that is there is not made again.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from playwright.sync_api import sync_playwright

DOCS = Path(__file__).parents[1] / "docs"
MINT = (sys.executable, "-m", "mint.cli.main")
SIZE = {"width": 1440, "height": 900}
FEW_COLORS = 256
"""Of the palette of a picture: pages have few colours, and the files are in the repository."""

HIDE_PLACE = """
document.querySelector(".kept-note code").textContent = "mint train rl --run-dir ~/.mint/runs/math --resume"
"""
"""A picture does not show where its runs were made."""

RUNS = {
    "math": ("task=math", "steps=80", "eval_every=10", "save_every=10"),
    "tools": ("task=tools", "steps=6", "heldout_size=64"),
    "math-too-fast": (
        *("task=math", "steps=24", "batch_size=16", "heldout_size=64"),
        *("learning_rate=0.03", "lr_schedule=linear"),
    ),
}
"""Name → settings of `mint train rl`."""


def make_runs(home: Path) -> None:
    environment = {**os.environ, "MINT_HOME": str(home)}
    for name, settings in RUNS.items():
        folder = home / "runs" / name
        if not folder.exists():
            subprocess.run([*MINT, "train", "rl", *settings, "--run-dir", folder], env=environment, check=True)


@contextmanager
def served(home: Path, *arguments: str) -> Iterator[str]:
    """The address of `mint dashboard --start-runs` over `home`, or of what `arguments` start."""
    command = [*MINT, *(arguments or ("dashboard", "--start-runs")), "--data-dir", str(home), "--port", "0"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        yield next(word for word in process.stdout.readline().split() if word.startswith("http://")).rstrip("/")
    finally:
        process.terminate()
        process.wait()


def take(page: Any, name: str) -> None:
    from PIL import Image  # deferred: comes with matplotlib

    path = DOCS / f"dashboard-{name}.png"
    page.screenshot(path=path)
    with Image.open(path) as picture:
        picture.convert("RGB").quantize(FEW_COLORS).save(path, optimize=True)
    print(path)


def take_all(address: str, browser: Any) -> None:
    # Without the policy of the pages, which forbids the expressions that this script waits for.
    light = browser.new_context(viewport=SIZE, color_scheme="light", bypass_csp=True).new_page()
    light.goto(f"{address}/runs/math")
    light.wait_for_selector("#charts[aria-busy=false]", state="attached")
    take(light, "run")

    samples = f"{address}/runs/tools/rollouts?step=2&group=1"
    light.goto(samples)
    light.wait_for_function("performance.getEntriesByName('rollouts shown').length > 0")
    take(light, "rollouts")

    light.goto(f"{address}/runs/math-too-fast/diagnosis")
    light.wait_for_load_state("networkidle")
    take(light, "diagnosis")

    light.goto(f"{address}/runs/math/checkpoints")
    light.wait_for_function("document.querySelector('#compare textarea').value !== ''")
    light.locator("#compare-go").click()
    light.wait_for_function("!document.querySelector('#compare-go').disabled", timeout=300_000)
    light.evaluate(HIDE_PLACE)
    take(light, "checkpoints")

    light.goto(address)
    light.locator("#start summary").click()
    light.wait_for_load_state("load")
    take(light, "start")

    light.goto(f"{address}/compare?run=math&run=math-too-fast")
    light.wait_for_selector("#charts[aria-busy=false]", state="attached")
    take(light, "compare")

    dark = browser.new_context(viewport=SIZE, color_scheme="dark", bypass_csp=True).new_page()
    dark.goto(samples)
    dark.wait_for_function("performance.getEntriesByName('rollouts shown').length > 0")
    dark.locator(".tok").nth(3).hover()
    take(dark, "dark")


def take_service(address: str, browser: Any, home: Path) -> None:
    """The page of a server while two clients train on it."""
    environment = {**os.environ, "MINT_HOME": str(home), "MINT_BASE_URL": address}
    tasks = ("math", "tools")
    clients = [
        subprocess.Popen([*MINT, "train", "rl", f"task={task}", "steps=4", "heldout_size=0"], env=environment)
        for task in tasks
    ]
    page = browser.new_context(viewport=SIZE, color_scheme="light", bypass_csp=True).new_page()
    page.goto(f"{address}/service")
    for client in clients:
        client.wait()
    page.wait_for_timeout(2000)  # the next numbers
    take(page, "service")


def main(home: Path) -> None:
    make_runs(home)
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"])
        with served(home) as address:
            take_all(address, browser)
        with tempfile.TemporaryDirectory() as folder, served(Path(folder), "serve") as address:
            take_service(address, browser, Path(folder))
        browser.close()


if __name__ == "__main__":
    if len(sys.argv) > 1:
        main(Path(sys.argv[1]).resolve())
    else:
        with tempfile.TemporaryDirectory() as folder:
            main(Path(folder))
