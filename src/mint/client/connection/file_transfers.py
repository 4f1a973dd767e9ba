"""Archives of checkpoints, up and down, in pieces. Knows addresses and files; it does not know what is in them."""

from __future__ import annotations

import asyncio
import secrets
import tempfile
import time
from collections.abc import AsyncIterator, Mapping
from datetime import UTC, datetime, timedelta
from email.utils import parsedate_to_datetime
from pathlib import Path
from typing import IO
from urllib.parse import urljoin

from mint.client.connection.server_connection import ServerConnection
from mint.client.connection.server_errors import error_of, is_error
from mint.client.connection.transport import Request, Response
from mint.errors import ConnectionLostError, InvalidRequestError
from mint.types.records import CheckpointArchiveUrlResponse

NOT_BUILT_YET = frozenset({409, 425, 503})
BUILD_PATIENCE_S = 600.0
BUILD_POLL_S = 2.0
URL_LIFETIME = timedelta(minutes=15)
TRANSFER_TIMEOUT_S = 300.0
"""Between two pieces of a file, not for all of it."""
PIECE_BYTES = 1 << 16


async def archive_url(server: ServerConnection, path: str) -> CheckpointArchiveUrlResponse:
    """The URL of the archive that the route `path` redirects to; waits while the server makes the archive.

    Raises:
        MintError: the error that the server answers.
        ConnectionLostError: it cannot be reached.
    """
    give_up_at = time.monotonic() + BUILD_PATIENCE_S
    request = Request("GET", path, {**server.headers, "accept": "application/gzip"})
    while True:
        response = await server.send(request)
        location = response.headers.get("location")
        if 300 <= response.status_code < 400 and location is not None:
            return CheckpointArchiveUrlResponse(
                url=urljoin(response.url, location), expires=_expires(response.headers.get("expires"))
            )
        if response.status_code not in NOT_BUILT_YET or time.monotonic() > give_up_at:
            raise _error_of(response)
        await asyncio.sleep(BUILD_POLL_S)


def exists_already(output: Path) -> InvalidRequestError:
    """The error for a download whose file is there, and was not to be overwritten."""
    remedy = "Name another file, or pass overwrite=True (--overwrite on the command line)"
    return InvalidRequestError(f"exists already in {output.parent}", field="output", value=output.name, remedy=remedy)


async def download(server: ServerConnection, url: str, output: Path) -> Path:
    """Writes the file at `url` to `output`: all of it or nothing. No key is sent: the URL is enough.

    Raises:
        InvalidRequestError: `output` cannot be written.
        ConnectionLostError: the server cannot be reached, or the file broke off.
        MintError: the error that the server answers.
    """
    try:
        output.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=output.parent, prefix=f".{output.name}.", delete=False) as part:
            staging = Path(part.name)
            try:
                await _receive(server, url, part)
                staging.chmod(0o644)  # temporary files are made for their owner only
                staging.replace(output)
            finally:
                staging.unlink(missing_ok=True)
    except ConnectionLostError:  # an OSError, too, but not of this file
        raise
    except OSError as error:
        raise InvalidRequestError(
            f"cannot be written: {error.strerror}", field="output", value=str(output), remedy="Name another file"
        ) from error
    return output


async def _receive(server: ServerConnection, url: str, part: IO[bytes]) -> None:
    # `identity`: a server that calls the .gz itself an encoding would have it unpacked on the way.
    headers = {"accept-encoding": "identity", "user-agent": server.headers["user-agent"]}
    response = await server.send(Request("GET", url, headers, timeout_s=TRANSFER_TIMEOUT_S, sink=part.write))
    if response.status_code != 200:
        raise _error_of(response)
    part.flush()


async def upload(server: ServerConnection, path: str, file: Path, fields: Mapping[str, str]) -> bytes:
    """Sends a file as the form field `file`, with other fields beside it; the body of the answer.

    Raises:
        InvalidRequestError: the file cannot be read.
        ConnectionLostError: the server cannot be reached.
        MintError: the error that the server answers.
    """
    boundary = secrets.token_hex(16)
    head = b"".join(_part(boundary, f'name="{name}"', value.encode()) for name, value in fields.items())
    # The file's bytes follow the head of its part, and the line end that closes the part is in `tail`.
    head += _part(boundary, f'name="file"; filename="{_quoted(file.name)}"', b"", "application/gzip").removesuffix(
        b"\r\n"
    )
    tail = f"\r\n--{boundary}--\r\n".encode()
    try:
        size = len(head) + file.stat().st_size + len(tail)
        headers = {
            **server.headers,
            "content-type": f"multipart/form-data; boundary={boundary}",
            "content-length": str(size),
        }
        with file.open("rb") as content:
            pieces = _pieces(head, content, tail)
            response = await server.send(Request("POST", path, headers, pieces, TRANSFER_TIMEOUT_S))
    except ConnectionLostError:  # an OSError, too, but not of this file
        raise
    except OSError as error:
        raise InvalidRequestError(
            f"cannot be read: {error.strerror}", field="path", value=str(file), remedy="Name a .tar.gz"
        ) from error
    if is_error(response.status_code, response.content):
        raise _error_of(response)
    return response.content


def _part(boundary: str, disposition: str, value: bytes, media_type: str | None = None) -> bytes:
    """One field of a form (RFC 7578)."""
    kind = "" if media_type is None else f"Content-Type: {media_type}\r\n"
    return f"--{boundary}\r\nContent-Disposition: form-data; {disposition}\r\n{kind}\r\n".encode() + value + b"\r\n"


def _quoted(name: str) -> str:
    return name.replace("\\", "\\\\").replace('"', "%22").replace("\r", "%0D").replace("\n", "%0A")


async def _pieces(head: bytes, content: IO[bytes], tail: bytes) -> AsyncIterator[bytes]:
    yield head
    while piece := content.read(PIECE_BYTES):
        yield piece
    yield tail


def _error_of(response: Response) -> Exception:
    url = response.url.partition("?")[0]  # the signature of a URL is as good as a key
    return error_of(max(response.status_code, 400), response.content, url)


def _expires(header: str | None) -> datetime:
    """An HTTP date as an aware time; a quarter of an hour from now where there is none."""
    try:
        moment = parsedate_to_datetime(header or "")
    except ValueError:
        return datetime.now(UTC) + URL_LIFETIME
    return moment if moment.tzinfo is not None else moment.replace(tzinfo=UTC)
