"""What a run's state is, in a word and in a sentence, for every way in which a run can end, hang or not have begun."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from tests.dashboard.dashboard_harness import API, showing
from tests.generated_runs import write_states

NOTICES = {
    "failed-at-once": "It failed before its first step: RequestFailedError: the base model cannot be loaded",
    "failed": "It failed after step 5: RequestFailedError: the base model cannot be loaded",
    "stopped-at-once": "It was stopped before its first step.",
    "stopped": "It was stopped after step 5 by a request to stop.",
    "died": "Its process ended after step 5 without a word",
    "stale": "Its process lives, but has written nothing for 12",
    "waiting": "The first step is not done yet.",
}


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> Iterator[httpx.Client]:
    home = tmp_path_factory.mktemp("home")
    write_states(home / "runs")
    with showing(home) as (_, client):
        yield client


def summaries(client: httpx.Client) -> dict[str, Any]:
    return {run["name"]: run for run in client.get(f"{API}/runs").json()["runs"]}


def test_every_state_has_a_word(client: httpx.Client) -> None:
    found = {name: (run["state"], run["is_stale"]) for name, run in summaries(client).items()}
    assert found == {
        "failed-at-once": ("failed", False),
        "failed": ("failed", False),
        "stopped-at-once": ("stopped", False),
        "stopped": ("stopped", False),
        "died": ("died", False),
        "stale": ("running", True),
        "waiting": ("running", False),
    }


@pytest.mark.parametrize("name", NOTICES)
def test_the_page_of_a_run_says_in_a_sentence_what_happened(client: httpx.Client, name: str) -> None:
    assert summaries(client)[name]["notice"].startswith(NOTICES[name])
    html = client.get(f"/runs/{name}").text
    assert NOTICES[name] in html
    assert f'data-state="{summaries(client)[name]["state"]}"' in html


def test_a_stale_run_is_not_shown_as_running(client: httpx.Client) -> None:
    html = client.get("/runs/stale").text
    assert ">stale</span>" in html and "tag--running" not in html
