"""A browser tab that is watched: whatever goes wrong on a page, and whatever a page asks of another address."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import quote, urlsplit

from waiting import HANG_S, wait_until

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
RUN_PAGES = ("", "/rollouts", "/diagnosis", "/checkpoints")
HERE = ("data", "blob", "about")
"""Schemes of addresses that no request is sent to."""

WATCH = """
window.violations = [];
document.addEventListener("securitypolicyviolation", (event) =>
  window.violations.push(`${event.violatedDirective}: ${event.blockedURI}`));
"""


ROLLOUTS_SHOWN = """
performance.getEntriesByName("rollouts shown").length > 0 || !document.querySelector("#notice").hidden
"""
"""Whether the script of the page of rollouts has drawn it, or has said why it cannot."""


class Tab:
    """One tab at one server. `check` says that nothing went wrong in it, and that it has asked nobody else."""

    def __init__(self, context: Any, address: str) -> None:
        context.add_init_script(WATCH)
        self.page = context.new_page()
        self.address = address.rstrip("/")
        self.faults: list[str] = []
        self.dialogs: list[str] = []
        self.asked: list[str] = []
        self.page.on("console", lambda said: said.type in ("error", "warning") and self.faults.append(said.text))
        self.page.on("pageerror", lambda error: self.faults.append(str(error)))
        self.page.on("dialog", self._refuse)
        context.on("request", lambda request: self.asked.append(request.url))

    def _refuse(self, dialog: Any) -> None:
        self.dialogs.append(dialog.message)
        dialog.dismiss()

    def open(self, path: str) -> Any:
        """The page, when its script has drawn what it has to draw."""
        answer = self.page.goto(self.address + path)
        assert answer is not None
        assert answer.ok, f"{path}: {answer.status}"
        policy = answer.headers["content-security-policy"]
        assert "default-src 'none'" in policy
        assert "unsafe" not in policy
        self.settled()
        return self.page

    def settled(self) -> None:
        """Waits until no request is under way but the stream of events, for a moment."""
        self.page.wait_for_load_state("load")
        if self.page.locator("#charts").count():
            self.page.wait_for_selector("#charts[aria-busy=false]", state="attached")
        if self.page.locator("#stage").count():
            # Samples alone say nothing: the server writes them, too, for readers without scripts.
            wait_until(lambda: self.page.evaluate(ROLLOUTS_SHOWN))
        count, still_since = -1, time.monotonic()
        while time.monotonic() - still_since < 0.25:
            if len(self.asked) != count:
                count, still_since = len(self.asked), time.monotonic()
            self.page.wait_for_timeout(25)

    @property
    def strangers(self) -> list[str]:
        """Addresses beyond the server's that were asked for."""
        own = urlsplit(self.address).netloc
        return [url for url in self.asked if urlsplit(url).netloc != own and urlsplit(url).scheme not in HERE]

    def check(self) -> None:
        """That this tab has seen no error, dialog, forbidden script or foreign request."""
        assert self.faults == []
        assert self.dialogs == []
        assert self.strangers == []
        assert self.page.evaluate("window.violations") == []
        assert self.page.evaluate("typeof HACKED") == "undefined"


@contextmanager
def started(*arguments: str, home: Path) -> Iterator[tuple[str, int]]:
    """A `mint` command that serves, as a process of its own: its address and process id."""
    command = [sys.executable, "-c", "from mint.cli.main import app; app()", *arguments]
    environment = {**os.environ, "MINT_HOME": str(home), "MINT_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    log = home / f"{arguments[0]}.log"
    with log.open("w") as file:
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=file, text=True, env=environment)
    try:
        assert process.stdout is not None
        line = process.stdout.readline()
        words = [word for word in line.split() if word.startswith("http://")]
        assert words, f"{line}{log.read_text()}"
        yield words[0].rstrip("/"), process.pid
    finally:
        process.terminate()
        assert process.wait(HANG_S) is not None


def path_of(run: str, page: str = "") -> str:
    """The address of a page of a run."""
    return f"/runs/{quote(run, safe='')}{page}"


def lines(folder: Path, name: str) -> list[dict[str, Any]]:
    """What a file of a run folder holds, read without mint."""
    path = folder / name
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def texts(page: Any, selector: str) -> list[str]:
    """The texts of all elements."""
    return [text.strip() for text in page.locator(selector).all_inner_texts()]


def number(text: str) -> float:
    """A number as a page writes it."""
    return float(text.replace("−", "-").replace(",", "").replace("+", "").replace("%", "").strip())


def location(page: Any) -> str:
    """What the address bar says now; `page.url` is what it said when playwright last heard of it."""
    return page.evaluate("location.href")


def is_too_wide(page: Any) -> bool:
    """Whether a page has to be scrolled sideways."""
    return page.evaluate("document.documentElement.scrollWidth > document.documentElement.clientWidth")
