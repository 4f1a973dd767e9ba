"""Files over the connections of a session: archives of checkpoints, up and down, never whole in memory.

Knows httpx, addresses and files; it does not know what is in them.
"""

from __future__ import annotations

import asyncio
import secrets
import tempfile
import time
from collections.abc import Mapping
from datetime import UTC, datetime, timedelta
from email.utils import parsedate_to_datetime
from pathlib import Path
from typing import IO

import httpx

from mint.client.responses import error_of, is_error
from mint.errors import ConnectionLostError, InvalidRequestError
from mint.types.records import CheckpointArchiveUrlResponse

NOT_BUILT_YET = frozenset({409, 425, 503})
BUILD_PATIENCE_S = 600.0
BUILD_POLL_S = 2.0
URL_LIFETIME = timedelta(minutes=15)
TRANSFER_TIMEOUT = httpx.Timeout(300.0, connect=5.0)
"""Between two pieces of a file, not for all of it."""


async def archive_url(http: httpx.AsyncClient, path: str) -> CheckpointArchiveUrlResponse:
    """Where the archive is that the route `path` redirects to; waits while the server makes it.

    Raises:
        MintError: what the server says.
        ConnectionLostError: it cannot be reached.
    """
    give_up_at = time.monotonic() + BUILD_PATIENCE_S
    while True:
        try:
            response = await http.get(path, headers={"accept": "application/gzip"}, follow_redirects=False)
        except httpx.TransportError as error:
            raise _lost(http, error) from error
        location = response.headers.get("location")
        if response.is_redirect and location:
            url = str(response.request.url.join(location))
            return CheckpointArchiveUrlResponse(url=url, expires=_expires(response.headers.get("expires")))
        if response.status_code not in NOT_BUILT_YET or time.monotonic() > give_up_at:
            raise error_of(max(response.status_code, 400), response.content, str(response.request.url))
        await asyncio.sleep(BUILD_POLL_S)


async def fetch(http: httpx.AsyncClient, url: str, output: Path) -> Path:
    """Writes what lies at `url` to `output`: all of it or nothing. The key is not shown: the URL is enough.

    Raises:
        InvalidRequestError: `output` cannot be written.
        ConnectionLostError: the server cannot be reached, or the file broke off.
        MintError: what the server says.
    """
    request = http.build_request("GET", url, headers={"accept-encoding": "identity"}, timeout=TRANSFER_TIMEOUT)
    for name in ("x-api-key", "authorization", "content-type"):
        request.headers.pop(name, None)
    try:
        output.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=output.parent, prefix=f".{output.name}.", delete=False) as part:
            staging = Path(part.name)
            try:
                await _receive(http, request, part)
                staging.chmod(0o644)
                staging.replace(output)
            finally:
                staging.unlink(missing_ok=True)
    except httpx.TransportError as error:
        raise _lost(http, error) from error
    except OSError as error:
        raise InvalidRequestError(
            f"cannot be written: {error.strerror}", field="output", value=str(output), remedy="Name another file"
        ) from error
    return output


async def _receive(http: httpx.AsyncClient, request: httpx.Request, part: IO[bytes]) -> None:
    response = await http.send(request, stream=True, follow_redirects=False)
    try:
        if response.status_code != 200:
            await response.aread()
            raise error_of(max(response.status_code, 400), response.content, str(request.url.copy_with(query=None)))
        async for chunk in response.aiter_bytes():
            part.write(chunk)
        part.flush()
    finally:
        await response.aclose()


async def send(http: httpx.AsyncClient, path: str, file: Path, fields: Mapping[str, str]) -> bytes:
    """Sends a file as the form field `file`, with other fields beside it; what the server answers.

    Raises:
        InvalidRequestError: the file cannot be read.
        ConnectionLostError: the server cannot be reached.
        MintError: what the server says.
    """
    boundary = secrets.token_hex(16)
    headers = {"content-type": f"multipart/form-data; boundary={boundary}"}
    try:
        with file.open("rb") as content:
            response = await http.post(
                path,
                data=dict(fields),
                files={"file": (file.name, content, "application/gzip")},
                headers=headers,
                timeout=TRANSFER_TIMEOUT,
            )
    except OSError as error:
        raise InvalidRequestError(
            f"cannot be read: {error.strerror}", field="path", value=str(file), remedy="Name a .tar.gz"
        ) from error
    except httpx.TransportError as error:
        raise _lost(http, error) from error
    if is_error(response.status_code, response.content):
        raise error_of(response.status_code, response.content, str(response.request.url))
    return response.content


def _expires(header: str | None) -> datetime:
    """An HTTP date as an aware time; a quarter of an hour from now where there is none."""
    try:
        moment = parsedate_to_datetime(header or "")
    except ValueError:
        return datetime.now(UTC) + URL_LIFETIME
    return moment if moment.tzinfo is not None else moment.replace(tzinfo=UTC)


def _lost(http: httpx.AsyncClient, error: httpx.TransportError) -> ConnectionLostError:
    return ConnectionLostError(
        f"{http.base_url} cannot be reached: {type(error).__name__}: {error}",
        remedy="Is the server running? Check MINT_BASE_URL",
    )
