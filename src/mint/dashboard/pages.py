"""The HTML pages, rendered from templates. A page holds its frame and the data that its script starts from.

Every template gets `page` (its name), `run` (a run's name, or None), `asks_keys` and `version`. Pages of one run also
get `summary`, and the list gets `summaries`; both are as in the JSON API.
"""

from __future__ import annotations

import hashlib
import math
import re
import shlex
from collections.abc import Mapping
from dataclasses import asdict
from decimal import ROUND_HALF_UP, Decimal
from functools import cache, lru_cache
from pathlib import Path
from typing import Any
from urllib.parse import quote, urlencode, urlsplit

import jinja2
from starlette.requests import Request

from mint.dashboard import api
from mint.dashboard.finding_evidence import CHECKED, EVIDENCE, evidence_of
from mint.dashboard.state import DashboardState
from mint.errors import MintError, NotFoundError
from mint.rl.analysis.run_analysis import BISECT_METRICS
from mint.runs.log import DATA_SOURCE
from mint.runs.reader import latest_findings
from mint.version import VERSION

MAX_COMPARED = 8
ASSETS = Path(__file__).parent / "assets"
IMPORTED = re.compile(r'from "\./(\w+)\.js"')


def runs(dashboard: DashboardState, request: Request) -> str:
    """The first page of the list of runs that the address selects."""
    query = api.parse_run_query(request)
    page = dashboard.runs.page(query)
    kept = {name: value for name, value in request.query_params.items() if name != "offset"}
    before, after = (urlencode({**kept, "offset": max(0, query.offset + by)}) for by in (-query.limit, query.limit))
    summaries = [asdict(run) for run in page.runs]
    return _write(
        dashboard,
        "runs",
        None,
        listed=page,
        wanted=[] if request.query_params else [_address("runs")],
        query=query,
        before=before,
        after=after,
        summaries=summaries,
        choices=dashboard.launches.choices(),
        to_start=_to_start(dashboard, request),
    )


def _to_start(dashboard: DashboardState, request: Request) -> str:
    """The command of a dashboard whose pages start runs. Over a server, its runs train on that server."""
    command = f"mint dashboard --start-runs --data-dir {shlex.quote(str(dashboard.readers.folders.roots[0]))}"
    if dashboard.service is None:
        return command
    address = shlex.quote(str(request.base_url).rstrip("/"))
    key = "MINT_API_KEY=… " if dashboard.access.login is not None else ""
    return f"MINT_BASE_URL={address} {key}{command}"


def run(dashboard: DashboardState, request: Request) -> str:
    """One run: its main numbers and its curves."""
    name = request.path_params["run"]
    reader = dashboard.readers.of(name)
    return _of_run(
        dashboard,
        request,
        "run",
        wanted=[_columns_of(name)],
        points=api.CHART_POINTS,
        config=reader.config,
        effective=reader.effective(),
        evaluations=reader.evaluations(),
        findings=latest_findings(reader.findings()),
    )


def compare(dashboard: DashboardState, request: Request) -> str:
    """Several runs in the same charts: the page of a run for `?run=a&run=b`."""
    names = list(dict.fromkeys(request.query_params.getlist("run")))[:MAX_COMPARED]
    for name in names:
        dashboard.readers.folders.folder(name)
    if not names:
        raise NotFoundError("names no run to compare", field="run", value="(none)", remedy="Choose some in the list")
    wanted = [address for name in names for address in (_columns_of(name), _address("runs", name))]
    return _write(dashboard, "compare", None, template="run", runs=names, wanted=wanted, points=api.CHART_POINTS)


def rollouts(dashboard: DashboardState, request: Request) -> str:
    """The rollouts; the requested step and group are in the page before any script runs."""
    name = request.path_params["run"]
    asked = request.query_params
    first = api.opening(dashboard.readers.of(name), step=asked.get("step", ""), group=asked.get("group", ""))
    wanted = [_address("runs", name, "steps")]
    if first is not None:
        step, group = str(first["step"]), str(first["group"]["group"])
        groups = ("runs", name, "steps", step, "groups")
        is_asked = asked.get("step", "") in ("", step) and asked.get("group", "") in ("", group)
        if is_asked and asked.keys() <= {"step", "group", "row"}:
            wanted += [_address(*groups), _address(*groups, group)]
    return _of_run(dashboard, request, "rollouts", first=first, wanted=wanted)


def diagnosis(dashboard: DashboardState, request: Request) -> str:
    """The findings of a run that are known without waiting, and what became of its tokens."""
    name = request.path_params["run"]
    found = [evidence_of(finding) for finding in dashboard.diagnoses.known(name)]
    checked = {topic: [(code, EVIDENCE[code].means) for code in codes] for topic, codes in CHECKED.items()}
    ledger, counted = dashboard.ledger.of(name)
    return _of_run(
        dashboard,
        request,
        "diagnosis",
        findings=found,
        ledger=ledger,
        counted=counted,
        checked=checked,
        wanted=[_columns_of(name), _address("runs", name, "findings")],
        points=api.CHART_POINTS,
    )


def checkpoints(dashboard: DashboardState, request: Request) -> str:
    """The checkpoints of a run, to try and to compare."""
    reader = dashboard.readers.of(request.path_params["run"])
    listed = api.checkpoints(dashboard, request)
    evaluations = reader.evaluations()
    before, after = (urlencode({"offset": max(0, listed["offset"] + by)}) for by in (-listed["limit"], listed["limit"]))
    return _of_run(
        dashboard,
        request,
        "checkpoints",
        config=reader.config,
        folder=reader.folder,
        recipe=_recipe_of(reader.config),
        command_folder=shlex.quote(str(reader.folder)),
        listed=listed,
        checkpoints=listed["checkpoints"],
        newer=before,
        older=after,
        evaluations=len(evaluations),
        before=api.evaluation_of([row for row in evaluations if row["step"] == 0]),
        metrics=BISECT_METRICS,
        can_search=dashboard.bisections.can_search,
    )


def _recipe_of(config: Mapping[str, Any]) -> str | None:
    """The recipe with which `mint train` resumes a run by its folder alone; None if the folder does not say enough."""
    source = config.get(DATA_SOURCE)
    if isinstance(source, Mapping):
        return source.get("recipe") if source.get("recipe") in ("sft", "dpo", "distill") else None
    return "rl" if isinstance(config.get("task_spec"), Mapping) else None


def service(dashboard: DashboardState, request: Request) -> str:
    """The numbers of the service."""
    return _write(dashboard, "service", None, service=api.service(dashboard, request))


def login(dashboard: DashboardState, request: Request) -> str:
    """The login page."""
    place = safe_place(request.query_params.get("next", ""))
    return login_page(asks_keys=dashboard.access.login is not None, place=place)


def login_page(*, asks_keys: bool, place: str, problem: str | None = None) -> str:
    """The login page, with what was wrong with the last key."""
    return _render(
        "login",
        page="login",
        run=None,
        version=VERSION,
        asks_keys=asks_keys,
        query=urlencode({"next": place}),
        problem=problem,
    )


def error_page(error: MintError) -> str:
    """The page that shows an error."""
    return _render("error", page="error", run=None, asks_keys=False, version=VERSION, error=error.to_wire())


def safe_place(place: str) -> str:
    """Where to go after the login: a path on this server, and nothing that a browser could read as another origin."""
    parts = urlsplit(place) if place.isprintable() and "\\" not in place else urlsplit("")
    if parts.scheme or parts.netloc or not parts.path.startswith("/") or parts.path.startswith(("//", "/login")):
        return "/"
    return place


def _columns_of(run: str) -> str:
    return _address("runs", run, "columns", points=api.CHART_POINTS)


def _address(*parts: str, **query: object) -> str:
    """An address of the JSON API, letter by letter as the scripts write it."""
    path = "/".join(quote(part, safe="!'()*") for part in parts)
    return f"{api.ROOT}/{path}" + (f"?{urlencode(query)}" if query else "")


def _of_run(dashboard: DashboardState, request: Request, page: str, **values: Any) -> str:
    name = request.path_params["run"]
    return _write(dashboard, page, name, summary=asdict(dashboard.readers.summary(name)), **values)


def _write(dashboard: DashboardState, page: str, run: str | None, *, template: str | None = None, **values: Any) -> str:
    asks_keys = dashboard.access.login is not None
    can_start = dashboard.launches.can_start
    return _render(
        template or page, page=page, run=run, version=VERSION, asks_keys=asks_keys, can_start=can_start, **values
    )


def assets_version() -> str:
    """Changes with any script or style. Their addresses hold it, so that a browser need not ask for them again."""
    files = [(file.name, file.stat().st_size, file.stat().st_mtime_ns) for file in sorted(ASSETS.iterdir())]
    return hashlib.blake2b(repr(files).encode(), digest_size=8).hexdigest()


@lru_cache(maxsize=64)
def _imported(script: str, _version: str) -> list[str]:
    """The modules that a script imports, and those that they import: a browser that knows them asks for all at once."""
    found: list[str] = []
    waiting = [script]
    while waiting:
        source = (ASSETS / f"{waiting.pop()}.js").read_text()
        new = [name for name in IMPORTED.findall(source) if name not in found and name != script]
        found += dict.fromkeys(new)
        waiting += dict.fromkeys(new)
    return sorted(found)


def _render(template: str, **values: Any) -> str:
    version = assets_version()
    return _template(template).render(
        assets=f"/assets/{version}", imported=lambda script: _imported(script, version), **values
    )


@cache
def _environment() -> jinja2.Environment:
    folder = Path(__file__).parent / "templates"
    environment = jinja2.Environment(loader=jinja2.FileSystemLoader(folder), autoescape=True)
    environment.filters["decimals"] = _decimals
    return environment


def _decimals(value: float, digits: int) -> str:
    """A number with `digits` decimals, a half away from zero: as `toFixed` of the scripts writes it."""
    if not math.isfinite(value):
        return "–"
    return str(Decimal(value).quantize(Decimal(1).scaleb(-digits), rounding=ROUND_HALF_UP))


def compile_templates() -> None:
    """Compiles all templates, which takes a fifth of a second: more than a page may take."""
    for name in _environment().list_templates():
        _environment().get_template(name)


def _template(name: str) -> jinja2.Template:
    return _environment().get_template(f"{name}.html")
