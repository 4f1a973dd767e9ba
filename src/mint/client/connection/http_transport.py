"""Requests to a server over sockets, with httpx. Retries are `server_connection`'s."""

from __future__ import annotations

import httpx

from mint.client.connection.transport import Request, Response, TransportError

CONNECT_TIMEOUT_S = 5.0
LOOPBACK = ("127.0.0.1", "localhost", "::1")
"""The hosts that are this machine."""


class HttpTransport:
    """One pool of connections. It must be used on the event loop on which it was made."""

    def __init__(self, base_url: str) -> None:
        """`base_url` ends with a slash. The proxies of the environment are for other machines only."""
        self._base_url = base_url
        # Each awaited result is a long poll that holds a connection. With httpx's limit of 100, a hundred of them would
        # keep the next request from being sent.
        self._client = httpx.AsyncClient(
            base_url=base_url,
            limits=httpx.Limits(max_connections=None, max_keepalive_connections=100),
            trust_env=httpx.URL(base_url).host not in LOOPBACK,
        )

    async def send(self, request: Request) -> Response:
        """See `Transport.send`."""
        timeout = httpx.Timeout(request.timeout_s, connect=CONNECT_TIMEOUT_S)
        built = self._client.build_request(
            request.method, request.url, headers=dict(request.headers), content=request.content or None, timeout=timeout
        )
        try:
            found = await self._client.send(built, stream=True)
            try:
                if request.sink is not None and found.status_code == httpx.codes.OK:
                    async for piece in found.aiter_bytes():
                        request.sink(piece)
                    content = b""
                else:
                    content = await found.aread()
            finally:
                await found.aclose()
        except httpx.TransportError as error:
            lost = TransportError(
                f"{self._base_url} cannot be reached: {type(error).__name__}: {error}",
                remedy="Is the server running? Check MINT_BASE_URL",
            )
            # Without a connection nothing was sent. Any other error may have come after the server had read it all.
            lost.may_have_arrived = not isinstance(error, httpx.ConnectError | httpx.ConnectTimeout)
            raise lost from error
        return Response(found.status_code, found.headers, content, str(built.url))

    async def close(self) -> None:
        """Closes the connections."""
        await self._client.aclose()
