"""The address of this server in links that it signs: never one that only the sender of a request has named.

Who has a signed link can fetch the file without a key. A link that led to a host of somebody else's choice would hand
it to that host.
"""

from __future__ import annotations

from starlette.requests import Request

from mint.errors import ForeignPageError
from mint.server.http.auth import is_loopback_name, name_of_host


def public_address(request: Request, configured: str | None) -> str:
    """The address to which links lead, without a slash at the end: `configured`, or the one that the sender has called.

    The latter counts if it is the address at which the request arrived, or a name of the sender's own machine. For
    another name (one of a name server) it is the address at which the request arrived.

    Raises:
        ForeignPageError: the request came through a proxy on this machine, under a name that is not configured.
    """
    if configured is not None:
        return configured.rstrip("/")
    called = str(request.base_url).rstrip("/")
    name = name_of_host(request.headers.get("host", ""))
    host, port = request.scope.get("server") or ("", None)
    if is_loopback_name(name) or name == host:
        return called
    if port is None or is_loopback_name(host):
        raise ForeignPageError(
            "is not a name under which this server is known, and links would lead there",
            field="host",
            value=name or "(none)",
            remedy="If it is the name of your proxy: mint serve --public-url https://NAME",
        )
    return f"{request.url.scheme}://{f'[{host}]' if ':' in host else host}:{port}"
