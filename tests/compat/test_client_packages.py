"""Clients of OpenAI's and Anthropic's protocols, unmodified, against `mint serve`; the page lists what ran.

`clients/drive_*.py` hold the checks. The environments come from the package registry, once (`sdk_environments`).
"""

from __future__ import annotations

import datetime
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.compat.page import PAGE, client_table
from tests.compat.sdk_environments import CLIENTS, client_python
from tests.compat.served import Served, link_tiny, mint_serve
from tests.generated_page import replace_part

pytestmark = [pytest.mark.slow, pytest.mark.timeout(2400)]

DRIVERS = Path(__file__).parent / "clients"
DRIVER = {"openai 2": "drive_openai.py", "openai 3": "drive_openai.py", "lm-eval": "drive_lm_eval.py"}
DRIVER |= {"inspect-ai": "drive_inspect.py", "openai-agents": "drive_agents.py"}

RESULTS: dict[str, dict[str, Any]] = {}


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    with mint_serve(tmp_path_factory.mktemp("served")) as running:
        yield running


@pytest.mark.parametrize("name", CLIENTS)
def test_a_client_package_runs_unmodified(served: Served, name: str, tmp_path: Path) -> None:
    link_tiny(tmp_path)
    driver = DRIVERS / DRIVER.get(name, f"drive_{name}.py")
    done = served.run(
        client_python(name),
        driver,
        "mint/tiny",
        owner="clients",
        cwd=tmp_path,
        timeout_s=1200,
        variables="OPENAI",
        path="/v1",
    )
    assert done.returncode == 0, done.stderr[-3000:]
    said, *rows = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    date = datetime.datetime.now(datetime.UTC).date().isoformat()
    RESULTS[name] = {"versions": said["versions"], "date": date, "rows": rows}
    assert rows and {row["name"]: row["detail"] for row in rows if row["outcome"] != "ok"} == {}


def test_the_page_shows_which_clients_were_run() -> None:
    """Last of this file: writes the table if every client has run."""
    if RESULTS.keys() != set(CLIENTS):
        pytest.skip("not every client has run")
    replace_part(PAGE, "clients", client_table(RESULTS))
