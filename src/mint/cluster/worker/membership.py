"""What a worker says to the server that it works for: that it is there, that it leaves; and it fetches loras there."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable

import httpx

from mint.errors import InvalidRequestError

log = logging.getLogger(__name__)

PATH = "/api/v1/samplers"

HEARTBEAT_S = 3.0
"""How often a worker says that it is there: a server that was started again learns of it so."""

JOIN_S = 300.0
"""The longest time of an answer: the server compares the worker's numbers with its own meanwhile."""

LEAVE_S = 5.0
"""The longest time of an answer to a worker that leaves."""

LEAVE_EVERY_S = 0.1
"""How often a worker that leaves asks whether it has jobs yet."""

FETCH_S = 60.0


class Membership:
    """A worker at `address` that works for the server at `url`."""

    def __init__(self, url: str, *, api_key: str | None, address: str, key: str) -> None:
        """`api_key` is an operator's at the server; `key` is what the server must send to the worker."""
        self._address = address
        self._key = key
        headers = {} if api_key is None else {"X-API-Key": api_key}
        self._url = url.rstrip("/")
        self._headers = headers
        self._client = httpx.Client(base_url=self._url, headers=headers, timeout=httpx.Timeout(JOIN_S, connect=5.0))
        self._async = httpx.AsyncClient(base_url=self._url, headers=headers, timeout=FETCH_S)
        self._left = threading.Event()

    def keep(self, joined: Callable[[], None], refused: Callable[[InvalidRequestError], None]) -> None:
        """Says again and again that the worker is there, on a thread of its own. `joined` is called once; `refused` if
        the server does not take it, and then no more is said."""

        def work() -> None:
            is_known = False
            while not self._left.is_set():
                try:
                    self._join()
                    if not is_known:
                        joined()
                    is_known = True
                except InvalidRequestError as error:
                    refused(error)
                    return
                except httpx.HTTPError as error:
                    log.warning("%s does not answer: %s", self._url, error or type(error).__name__)
                self._left.wait(HEARTBEAT_S)

        threading.Thread(target=work, name="mint-membership", daemon=True).start()

    def _join(self) -> None:
        response = self._client.post(PATH, json={"address": self._address, "key": self._key})
        if (
            response.status_code >= httpx.codes.INTERNAL_SERVER_ERROR
            or response.status_code == httpx.codes.TOO_MANY_REQUESTS
        ):
            response.raise_for_status()
        if response.status_code != httpx.codes.OK:
            raise InvalidRequestError(
                f"does not take this worker: it answered {response.status_code}: {response.text[:600]}",
                field="--join",
                value=self._url,
                remedy="Start the server with --sampler workers, and set MINT_API_KEY to an operator's key",
            )

    async def leave(self) -> None:
        """Tells the server to send no more jobs, and returns once the worker has none, or the server does not answer.

        A job that the server has given to the worker may not have reached it: it would be lost if the worker took no
        more connections.
        """
        self._left.set()
        wanted = {"address": self._address, "key": self._key, "leaves": True}
        try:
            while True:
                answer = await self._async.post(PATH, json=wanted, timeout=LEAVE_S)
                if answer.is_error or not (answer.json().get("cluster") or {}).get("jobs"):
                    return
                await asyncio.sleep(LEAVE_EVERY_S)
        except (httpx.HTTPError, ValueError) as error:
            log.warning("%s was not told that this worker leaves: %s", self._url, error or type(error).__name__)

    async def fetch(self, name: str) -> bytes:
        """The archive of a lora.

        Raises:
            httpx.HTTPError: it does not come.
        """
        response = await self._async.get(f"{PATH}/loras/{name}")
        response.raise_for_status()
        return response.content
