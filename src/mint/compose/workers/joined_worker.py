"""`mint worker --join URL`: this machine samples for a server, until a signal or until the server refuses it."""

from __future__ import annotations

import logging
import secrets
import socket
from collections.abc import Callable
from urllib.parse import urlsplit

from mint.cluster.worker.membership import Membership
from mint.cluster.worker.routes import WorkerRoutes
from mint.cluster.worker.sampling_thread import SamplingThread
from mint.compose.embedded import torch_engine
from mint.compose.http_server import HttpServer, http_config, url_of
from mint.config import Settings
from mint.errors import InvalidRequestError
from mint.models.registry import resolve
from mint.server.ops.preflight import open_socket
from mint.tokenizer import token_bytes

log = logging.getLogger(__name__)

DRAIN_S = 60.0
"""How long a worker that was told to end goes on with the jobs that it has."""


def work(
    settings: Settings, url: str, *, model: str, host: str | None, port: int, announce: Callable[[str], None]
) -> None:
    """Joins the server at `url` and samples for it. `host` None: the address under which this machine reaches it.

    Raises:
        InvalidRequestError: the server refuses the worker, or nothing can be served here.
    """
    refusals: list[InvalidRequestError] = []
    folder = resolve(model, settings.model_aliases)
    host = host or own_address(url)
    with open_socket(host, port) as bound:
        address = url_of(host, bound)
        key = secrets.token_urlsafe(32)
        member = Membership(url, api_key=settings.api_key, address=address, key=key)
        engine = torch_engine(settings)
        base = engine.load_base(model, str(folder))
        thread = SamplingThread(engine)
        routes = WorkerRoutes(thread, base, str(folder), vocabulary=token_bytes(folder), key=key, fetch=member.fetch)
        server = HttpServer(http_config(routes.app(), drain_s=DRAIN_S), finish=member.leave)

        def refused(error: InvalidRequestError) -> None:
            refusals.append(error)
            server.should_exit = True

        def started() -> None:
            joined = f"mint worker at {address} samples {model} for {url}"
            member.keep(lambda: announce(joined), refused)

        server.on_started = started
        server.run(sockets=[bound])
    if refusals:
        raise refusals[0]


def own_address(url: str) -> str:
    """The address of this machine on its way to a server. Sends nothing.

    Raises:
        InvalidRequestError: there is no way.
    """
    parts = urlsplit(url)
    try:
        found = socket.getaddrinfo(parts.hostname, parts.port or 80, type=socket.SOCK_DGRAM)
        family, kind, protocol, _, target = found[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.connect(target)
            return str(probe.getsockname()[0])
    except OSError as error:
        raise InvalidRequestError(
            f"cannot be reached: {error}", field="--join", value=url, remedy="Give the address of a mint server"
        ) from error
