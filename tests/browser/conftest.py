"""Real runs, `mint dashboard` over them as a process of its own, and a chromium: made once for all tests here."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from mint.recipes.math import DEMO as MATH
from mint.recipes.math import MathAdapter
from mint.recipes.tools import DEMO as TOOLS
from mint.recipes.tools import ToolsAdapter
from mint.rl import RLConfig, run_grpo
from tests.browser.browser_harness import CHROMIUM, Tab, started
from tests.browser.hostile_run import add_hostile_model, write_hostile_run

SMALL = {"group_size": 4, "batch_size": 4, "steps": 6, "eval_every": 3, "save_every": 3}


@pytest.fixture(scope="session")
def home(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A data folder with runs that were made here: tools (parts, traces, a KL penalty), math, one that cannot learn."""
    folder = tmp_path_factory.mktemp("browser-home")
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("MINT_HOME", str(folder))
        environment.setenv("MINT_THREADS", "1")
        train(folder, "tools", ToolsAdapter(train_size=8, heldout_size=16), TOOLS, kl_penalty_coef=0.05)
        train(folder, "math", MathAdapter(heldout_size=16), MATH)
        train(folder, "stuck", _Stuck(heldout_size=8), MATH, steps=3, max_tokens=2, learning_rate=0.05)
        add_hostile_model(write_hostile_run(folder / "runs" / "tools", folder / "runs" / "hostile <b> & co"))
        yield folder


class _Stuck(MathAdapter):
    """Nothing is ever right: a run that gives its diagnosis something to say."""

    def compute_reward(self, response: Any, item: Any) -> float:
        """No reward for anything."""
        return 0.0


def train(home: Path, name: str, adapter: Any, config: RLConfig, **settings: Any) -> Path:
    """A short run, into the home's `runs`."""
    folder = home / "runs" / name
    run_grpo(adapter, config.changed(**(SMALL | settings), run_dir=folder))
    return folder


@pytest.fixture(scope="session")
def server(home: Path) -> Iterator[tuple[str, int]]:
    """`mint dashboard` over the home, whose pages may start runs: its address and process id."""
    with started("dashboard", "--data-dir", str(home), "--port", "0", "--start-runs", home=home) as found:
        yield found


@pytest.fixture(scope="session")
def address(server: tuple[str, int]) -> str:
    """Of `mint dashboard`."""
    return server[0]


@pytest.fixture(scope="module")
def chromium() -> Iterator[Any]:
    """The browser; skips where none is installed. Not for the whole session: while it is open, its event loop counts as
    running, and tests of other folders need their own."""
    sync_api = pytest.importorskip("playwright.sync_api", reason="needs playwright: pip install 'mint[dev]'")
    if CHROMIUM is None:
        pytest.skip("needs a chromium: apt-get install chromium")
    with sync_api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield browser
        browser.close()


@pytest.fixture
def tab(chromium: Any, address: str) -> Iterator[Tab]:
    """A watched tab on a large screen; the test fails where anything went wrong in it."""
    context = chromium.new_context(viewport={"width": 1440, "height": 900})
    tab = Tab(context, address)
    yield tab
    tab.check()
    context.close()
