"""`mint status`: whether a server is ready, and what its ranks and replicas do. It asks `GET /readyz`."""

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

DEFAULT_URL = "http://127.0.0.1:8500"
"""The address of `mint serve` without options."""

TIMEOUT_S = 15.0
"""Longer than the server's own check of its journal takes."""


def status(
    url: Annotated[
        str | None, typer.Option(help=f"the server's address; MINT_BASE_URL if not given, else {DEFAULT_URL}")
    ] = None,
    as_json: Json = False,
) -> None:
    """Whether a server is ready, and its ranks, replicas, versions and LoRAs. The exit status is 1 if it is not."""
    from mint.config import read_settings  # deferred: `mint --help` answers at once

    try:
        address = (url or read_settings().base_url or DEFAULT_URL).rstrip("/")
        health = _ask(address)
    except MintError as error:
        fail(error, as_json=as_json)
    if as_json:
        typer.echo(json.dumps({"url": address, **health}))
    else:
        print_pairs([(name, Text(text)) for name, text in [("server", address), *described(health)]])
    if health["status"] != "ok":
        raise typer.Exit(1)


def described(health: Mapping[str, Any]) -> list[tuple[str, str]]:
    """What `GET /readyz` says, as names and sentences."""
    lines = [("state", "ready" if health["status"] == "ok" else health["status"])]
    lines += [("problem", problem) for problem in health.get("problems") or ()]
    lines += [("warning", warning) for warning in health.get("warnings") or ()]
    cluster = health.get("cluster")
    if not cluster:
        return [*lines, ("cluster", "none: one process trains and samples")]
    processes = ", ".join(map(str, cluster["ranks"]))
    ranks = f"{cluster['running']} of {cluster['trainers']} train"
    lines.append(("ranks", f"{ranks}{f' (processes {processes})' if processes else ''}, lost {cluster['lost']} times"))
    if "samplers" not in cluster:
        return [*lines, ("replicas", "none: the server's own process samples")]
    lines.append(
        (
            "replicas",
            f"{cluster['sampling']} of {cluster['samplers']} sample, lost {cluster['samplers_lost']} times; "
            f"{cluster['versions']} versions of weights; {cluster['waiting']} requests wait for a replica",
        )
    )
    return lines + [(f"process {own['process']}", _replica(own)) for own in cluster["replicas"]]


def _replica(own: Mapping[str, Any]) -> str:
    loras = f"{own['loras']} LoRAs ({own['lora_bytes'] / 2**20:.1f} MiB)"
    return f"{own['jobs']} requests, {own['sequences']} sequences, {loras}"


def _ask(address: str) -> dict[str, Any]:
    """The answer of `GET /readyz`, also that of a server which is not ready.

    Raises:
        InvalidRequestError: the address is none of a mint server.
        ConnectionLostError: nobody answers there.
    """
    remedy = "Give the address of a mint server with --url or MINT_BASE_URL"
    if not address.startswith(("http://", "https://")):
        raise InvalidRequestError("is no http address", field="--url", value=address, remedy=remedy)
    try:
        with urllib.request.urlopen(f"{address}/readyz", timeout=TIMEOUT_S) as answer:
            body = answer.read()
    except urllib.error.HTTPError as error:  # 503 has a body, too
        body = error.read()
    except (OSError, ValueError) as error:
        reason = getattr(error, "reason", error)
        raise ConnectionLostError(f"no server answers at {address}: {reason}", remedy="Start mint serve") from error
    try:
        health = json.loads(body)
    except ValueError:
        health = None
    if not isinstance(health, dict) or not isinstance(health.get("status"), str):
        raise InvalidRequestError("is not a mint server", field="--url", value=address, remedy=remedy)
    return health
