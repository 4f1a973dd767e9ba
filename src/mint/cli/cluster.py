"""`mint status`, `mint scale` and `mint worker`: what the processes of a server do, how many there are to be, and one
more on this machine."""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from collections.abc import Mapping
from typing import Annotated, Any

import typer
from rich.text import Text

from mint.cli.terminal import Json, fail, print_pairs
from mint.errors import ConnectionLostError, InvalidRequestError, MintError
from mint.runs.terminal_text import counted

DEFAULT_URL = "http://127.0.0.1:8500"
"""The address of `mint serve` without options."""

TIMEOUT_S = 15.0
"""Longer than the server's own check of its journal takes."""


Url = Annotated[str | None, typer.Option(help=f"the server's address; MINT_BASE_URL if not given, else {DEFAULT_URL}")]


def status(url: Url = None, as_json: Json = False) -> None:
    """Whether a server is ready, and its ranks, replicas, versions and LoRAs. The exit status is 1 if it is not."""
    try:
        address, health = _ask(url, "/readyz")
    except MintError as error:
        fail(error, as_json=as_json)
    _show(address, health, as_json)
    if health["status"] != "ok":
        raise typer.Exit(1)


def scale(
    trainers: Annotated[int | None, typer.Option(min=1, max=64, help="how many processes train")] = None,
    samplers: Annotated[int | None, typer.Option(min=1, max=64, help="how many processes sample")] = None,
    url: Url = None,
    as_json: Json = False,
) -> None:
    """Changes how many processes of a server train and sample, while it runs. Results do not depend on it."""
    try:
        if trainers is None and samplers is None:
            remedy = "Give --trainers, --samplers or both"
            raise InvalidRequestError("are not given", field="numbers", value="(none)", remedy=remedy)
        address, health = _ask(url, "/api/v1/cluster", {"trainers": trainers, "samplers": samplers})
    except MintError as error:
        fail(error, as_json=as_json)
    _show(address, health, as_json)


def worker(
    join: Annotated[str, typer.Option(help="the address of the server, which runs with --sampler workers")],
    model: Annotated[str, typer.Option(help="the base model, the same as the server's")] = "mint/tiny",
    host: Annotated[
        str | None, typer.Option(help="the address to listen on; if not given, the one that the server sees")
    ] = None,
    port: Annotated[int, typer.Option(help="0 takes a free one")] = 0,
) -> None:
    """Samples on this machine for a server elsewhere, until a signal. MINT_API_KEY: the key of one of its operators."""
    from mint.compose.workers.joined_worker import work  # deferred: loads torch
    from mint.config import read_settings
    from mint.server.ops.logs import configure_logs

    configure_logs(format="console", level="info")
    try:
        if not join.startswith(("http://", "https://")):
            remedy = "Write http://HOST:PORT or https://HOST"
            raise InvalidRequestError("is not the address of a server", field="--join", value=join, remedy=remedy)
        work(read_settings(), join, model=model, host=host, port=port, announce=typer.echo)
    except MintError as error:
        fail(error)


def _show(address: str, health: Mapping[str, Any], as_json: bool) -> None:
    if as_json:
        typer.echo(json.dumps({"url": address, **health}))
    else:
        print_pairs([(name, Text(text)) for name, text in [("server", address), *described(health)]])


def described(health: Mapping[str, Any]) -> list[tuple[str, str]]:
    """What `GET /readyz` says, as names and sentences."""
    lines = [("state", "ready" if health["status"] == "ok" else health["status"])]
    lines += [("problem", problem) for problem in health.get("problems") or ()]
    lines += [("warning", warning) for warning in health.get("warnings") or ()]
    mirror = health.get("mirror")
    if mirror:
        lines.append(("mirror", f"{mirror['lag_s']:.0f} s behind{'' if mirror['works'] else ', cannot be written'}"))
    cluster = health.get("cluster")
    if not cluster:
        return [*lines, ("cluster", "none: one process trains and samples")]
    external = _external(cluster["external"]) if "external" in cluster else []
    if "ranks" not in cluster:
        return lines + external
    processes = ", ".join(map(str, cluster["ranks"]))
    ranks = f"{cluster['running']} of {cluster['trainers']} train"
    lines.append(
        ("ranks", f"{ranks}{f' (processes {processes})' if processes else ''}, lost {counted(cluster['lost'], 'time')}")
    )
    if "samplers" not in cluster:
        return lines + (external or [("replicas", "none: the server's own process samples")])
    lines.append(
        (
            "replicas",
            f"{cluster['sampling']} of {cluster['samplers']} sample, lost {counted(cluster['samplers_lost'], 'time')}; "
            f"{counted(cluster['versions'], 'version')} of weights; "
            f"{counted(cluster['waiting'], 'request')} waiting for a replica",
        )
    )
    return lines + [(f"process {own['process']}", _replica(own)) for own in cluster["replicas"]] + external


def _external(state: Mapping[str, Any]) -> list[tuple[str, str]]:
    """What external samplers have, and how far they are from the trainer."""
    gap = state["gap"]
    return [
        *((f"sampler {host['address']}", _host(host)) for host in state["hosts"]),
        ("versions", f"{state['versions']} of weights; {counted(state['waiting'], 'request')} waiting for a sampler"),
        (
            "sampler − trainer",
            f"|Δ logprob| {gap['mean']:.2g} in the mean and {gap['max']:.2g} at most, "
            f"over {counted(gap['tokens'], 'token')}; too large {counted(gap['alarms'], 'time')}",
        ),
    ]


def _host(host: Mapping[str, Any]) -> str:
    lost = f"lost {counted(host['lost'], 'time')}"
    if not host["up"]:
        return f"is not reached: {host['problem']}; {lost}"
    return f"{_work(host)}, {counted(host['loras'], 'LoRA')}; {lost}"


def _replica(own: Mapping[str, Any]) -> str:
    return f"{_work(own)}, {counted(own['loras'], 'LoRA')} ({own['lora_bytes'] / 2**20:.1f} MiB)"


def _work(own: Mapping[str, Any]) -> str:
    return f"{counted(own['jobs'], 'request')}, {counted(own['sequences'], 'sequence')}"


def _ask(url: str | None, path: str, content: Mapping[str, Any] | None = None) -> tuple[str, dict[str, Any]]:
    """The server's address and its answer, also that of a server which is not ready; a POST with `content`.

    Raises:
        InvalidRequestError: the address is none of a mint server.
        ConnectionLostError: nobody answers there.
        MintError: what the server refuses with.
    """
    from mint.client.connection.server_errors import error_of  # deferred: `mint --help` answers at once
    from mint.config import read_settings

    settings = read_settings()
    address = (url or settings.base_url or DEFAULT_URL).rstrip("/")
    remedy = "Give the address of a mint server with --url or MINT_BASE_URL"
    if not address.startswith(("http://", "https://")):
        raise InvalidRequestError("is no http address", field="--url", value=address, remedy=remedy)
    headers = {"Content-Type": "application/json"}
    if settings.api_key is not None:
        headers["X-API-Key"] = settings.api_key
    body = None if content is None else json.dumps({name: value for name, value in content.items() if value}).encode()
    request = urllib.request.Request(f"{address}{path}", body, headers)
    try:
        with urllib.request.urlopen(request, timeout=TIMEOUT_S) as response:
            code, answer = response.status, response.read()
    except urllib.error.HTTPError as error:  # it has a body, too
        code, answer = error.code, error.read()
    except (OSError, ValueError) as error:
        reason = getattr(error, "reason", error)
        raise ConnectionLostError(f"no server answers at {address}: {reason}", remedy="Start mint serve") from error
    try:
        found = json.loads(answer)
    except ValueError:
        found = None
    if isinstance(found, dict) and isinstance(found.get("status"), str):
        return address, found
    if isinstance(found, dict) and isinstance(found.get("error"), str):
        raise error_of(code, answer, f"{address}{path}")
    raise InvalidRequestError("is not a mint server", field="--url", value=address, remedy=remedy)
