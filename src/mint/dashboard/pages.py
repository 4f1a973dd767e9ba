"""The pages, written by templates. A page carries its frame and what its script needs to ask for the rest.

Every template gets `page` (its name), `run` (a run's name, or None), `asks_keys` and `version`; those of one run get
`summary` too, and the list gets `summaries`: both as the JSON of the API has them. Knows no file of a run.
"""

from __future__ import annotations

from dataclasses import asdict
from functools import cache
from pathlib import Path
from typing import Any
from urllib.parse import urlencode, urlsplit

import jinja2
from starlette.requests import Request

from mint.dashboard import api
from mint.dashboard.dashboard import Dashboard
from mint.dashboard.evidence import CHECKED, EVIDENCE, evidence_of
from mint.errors import MintError, NotFoundError
from mint.rl.analysis.run_analysis import BISECT_METRICS
from mint.version import VERSION

MAX_COMPARED = 8


def runs(dashboard: Dashboard, request: Request) -> str:
    """All runs."""
    summaries = [asdict(summary) for summary in dashboard.readers.summaries().values()]
    return _write(dashboard, "runs", None, summaries=summaries)


def run(dashboard: Dashboard, request: Request) -> str:
    """The curves of one run, under its headline numbers."""
    reader = dashboard.readers.of(request.path_params["run"])
    logged = {"config": reader.config, "evaluations": reader.evaluations(), "findings": reader.findings()}
    return _of_run(dashboard, request, "run", **logged)


def compare(dashboard: Dashboard, request: Request) -> str:
    """Several runs in the same charts: the page of a run, over those of `?run=a&run=b`."""
    names = list(dict.fromkeys(request.query_params.getlist("run")))[:MAX_COMPARED]
    for name in names:
        dashboard.readers.folders.folder(name)
    if not names:
        raise NotFoundError("names no run to compare", field="run", value="(none)", remedy="Choose some in the list")
    return _write(dashboard, "compare", None, template="run", runs=names)


def rollouts(dashboard: Dashboard, request: Request) -> str:
    """What the policy wrote; the step and the group that are asked for are there before any script runs."""
    reader = dashboard.readers.of(request.path_params["run"])
    asked = request.query_params
    first = api.opening(reader, step=asked.get("step", ""), group=asked.get("group", ""))
    return _of_run(dashboard, request, "rollouts", first=first)


def diagnosis(dashboard: Dashboard, request: Request) -> str:
    """What looks wrong in a run, as far as that is known at once, and where its tokens went."""
    name = request.path_params["run"]
    found = [evidence_of(finding) for finding in dashboard.diagnoses.at_hand(name)]
    checked = {topic: [(code, EVIDENCE[code].means) for code in codes] for topic, codes in CHECKED.items()}
    return _of_run(dashboard, request, "diagnosis", findings=found, ledger=api.ledger(dashboard, name), checked=checked)


def checkpoints(dashboard: Dashboard, request: Request) -> str:
    """What a run saved, to try and to compare."""
    reader = dashboard.readers.of(request.path_params["run"])
    listed = api.checkpoints(dashboard, request)["checkpoints"]
    readings = reader.evaluations()
    return _of_run(
        dashboard,
        request,
        "checkpoints",
        config=reader.config,
        folder=reader.folder,
        checkpoints=listed,
        readings=len(readings),
        before=api.reading_at(readings, 0),
        metrics=BISECT_METRICS,
        can_search=dashboard.bisections.can_search,
    )


def service(dashboard: Dashboard, request: Request) -> str:
    """What the service does."""
    return _write(dashboard, "service", None, service=api.service(dashboard, request))


def login(dashboard: Dashboard, request: Request) -> str:
    """Where a key is asked for."""
    place = safe_place(request.query_params.get("next", ""))
    return login_page(asks_keys=dashboard.door.login is not None, place=place)


def login_page(*, asks_keys: bool, place: str, problem: str | None = None) -> str:
    """The same, with what was wrong with the last key."""
    return _template("login").render(
        page="login", run=None, version=VERSION, asks_keys=asks_keys, query=urlencode({"next": place}), problem=problem
    )


def error_page(error: MintError) -> str:
    """What is shown instead of a page."""
    return _template("error").render(page="error", run=None, asks_keys=False, version=VERSION, error=error.to_wire())


def safe_place(place: str) -> str:
    """Where to go after the login: a page of this server, and nothing that a browser could take for another."""
    parts = urlsplit(place) if place.isprintable() and "\\" not in place else urlsplit("")
    if parts.scheme or parts.netloc or not parts.path.startswith("/") or parts.path.startswith(("//", "/login")):
        return "/"
    return place


def _of_run(dashboard: Dashboard, request: Request, page: str, **values: Any) -> str:
    name = request.path_params["run"]
    return _write(dashboard, page, name, summary=asdict(dashboard.readers.summary(name)), **values)


def _write(dashboard: Dashboard, page: str, run: str | None, *, template: str | None = None, **values: Any) -> str:
    return _template(template or page).render(
        page=page, run=run, version=VERSION, asks_keys=dashboard.door.login is not None, **values
    )


@cache
def _environment() -> jinja2.Environment:
    folder = Path(__file__).parent / "templates"
    return jinja2.Environment(loader=jinja2.FileSystemLoader(folder), autoescape=True)


def _template(name: str) -> jinja2.Template:
    return _environment().get_template(f"{name}.html")
