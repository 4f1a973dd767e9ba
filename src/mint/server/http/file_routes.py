"""The routes for weights as files: signed addresses, the downloads behind them, and uploads.

A file is named by its checkpoint and one of a few names, never by a path. What the files contain is decided in
`service/downloads` and `service/uploads`.
"""

from __future__ import annotations

import asyncio
import tempfile
import threading
import time
from collections import Counter
from collections.abc import AsyncGenerator, Generator, Mapping
from contextlib import contextmanager
from datetime import UTC, datetime
from email.utils import format_datetime
from typing import TYPE_CHECKING, BinaryIO
from urllib.parse import quote, urlencode

from python_multipart.exceptions import FormParserError, MultipartParseError
from python_multipart.multipart import MultipartParser, parse_options_header
from starlette.requests import ClientDisconnect
from starlette.responses import Response, StreamingResponse

import mint.wire as wire
from mint.errors import AuthenticationError, BodyTooLargeError, InvalidRequestError, NotFoundError, OverloadedError
from mint.models.peft_files import CONFIG_FILE
from mint.models.untrusted_files import MAX_UPLOAD_BYTES
from mint.server.http.public_address import public_address
from mint.server.http.route_table import Call, RouteRow, respond, respond_json
from mint.server.http.signed_urls import LIFETIME_S, Signer
from mint.server.service.downloads import ARCHIVE, PEFT_FILES, open_file
from mint.server.service.uploads import SCRATCH_FOLDER, report_storage_faults
from mint.server.storage_reservations import Reservation
from mint.server.store import checkpoint_folders, checkpoints
from mint.server.store.rows import CheckpointRow
from mint.types.checkpoint_path import CheckpointPath
from mint.types.records import ExternalWeightsUrlsResponse, UploadCheckpointResponse

if TYPE_CHECKING:
    from python_multipart.multipart import MultipartCallbacks  # not there at run time

MAX_UPLOADS = 8
CHUNK_TIMEOUT_S = 60.0
SLOWEST_BYTES_S = 64 * 1024
"""An upload is waited for as long as this rate takes, and `CHUNK_TIMEOUT_S` more."""

MAX_FIELD_BYTES = 4096
FILE_FIELD = "file"
TEXT_FIELDS = ("base_model", "name")


class UploadSlots:
    """The uploads under way, and whose they are. Any thread may call.

    An owner gets another slot only while more slots are free than the owner has. So one owner alone has up to half of
    them, and there is a slot for everyone who comes later (the dynamic thresholds of Choudhury and Hahne, 1998).
    """

    def __init__(self, slots: int) -> None:
        self._slots = slots
        self._lock = threading.Lock()
        self._held: Counter[str] = Counter()

    @contextmanager
    def take(self, owner: str) -> Generator[None]:
        """A slot for one upload.

        Raises:
            OverloadedError: there is none now, or none for this owner.
        """
        with self._lock:
            free = self._slots - self._held.total()
            if free <= self._held[owner]:
                raise OverloadedError(
                    f"uploads of yours are under way, and {free} more of {self._slots} are free for all owners",
                    field="uploads",
                    value=self._held[owner],
                    remedy="Try again when one of them has ended",
                )
            self._held[owner] += 1
        try:
            yield
        finally:
            with self._lock:
                self._held[owner] -= 1
                if not self._held[owner]:
                    del self._held[owner]


_uploads = UploadSlots(MAX_UPLOADS)


# --- down --------------------------------------------------------------------------------------------------------


def archive(call: Call) -> Response:
    """302 to a signed address of the checkpoint as a .tar.gz: PEFT's files, and the optimizer if it has one."""
    row = _readable(call)
    expires_at = int(time.time()) + LIFETIME_S
    expires = format_datetime(datetime.fromtimestamp(expires_at, UTC), usegmt=True)
    location = _signed_url(call, row, ARCHIVE, expires_at)
    return respond_json(b"{}", status=302, headers={"location": location, "expires": expires})


def external_weights_urls(call: Call) -> Response:
    """Signed addresses of a lora's files in PEFT's format, for `tinker checkpoint download`."""
    row = _readable(call, kind=checkpoints.EXTERNAL)
    expires_at = int(time.time()) + LIFETIME_S
    urls = {name: _signed_url(call, row, name, expires_at) for name in PEFT_FILES}
    return respond(ExternalWeightsUrlsResponse(urls=urls, expires=datetime.fromtimestamp(expires_at, UTC)))


def download(call: Call) -> Response:
    """The file behind a signed address."""
    service = call.service
    query = call.request.query_params
    name = call.request.path_params["file"]
    try:
        # For any reader: whoever has a signed address may read the file.
        row = service.find_checkpoint(_path(call), reader=None)
    except (NotFoundError, InvalidRequestError):
        row = None  # the same error as for a wrong signature: another one would tell what others have
    Signer(service.data_dir).check(
        "" if row is None else row.folder,
        name,
        expires_at=query.get("expires", ""),
        signature=query.get("signature", ""),
        now=time.time(),
    )
    if row is None or name not in (ARCHIVE, *PEFT_FILES):
        raise AuthenticationError("the address is not one that this server has signed", remedy="Ask for a new one")
    size, content = open_file(service.data_dir / row.folder, name)
    headers = {
        "content-length": str(size),
        "content-disposition": f'attachment; filename="{name}"',
        "cache-control": "private, no-store",
        "x-content-type-options": "nosniff",
    }
    media_type = {ARCHIVE: "application/gzip", CONFIG_FILE: "application/json"}
    return StreamingResponse(content, media_type=media_type.get(name, "application/octet-stream"), headers=headers)


def _path(call: Call, kind: str | None = None) -> str:
    parts = call.request.path_params
    return CheckpointPath(parts["run_id"], kind or parts["kind"], parts["name"]).uri


def _readable(call: Call, kind: str | None = None) -> CheckpointRow:
    """The row of a checkpoint that the caller may read; checks that its files are undamaged."""
    row = call.service.find_checkpoint(_path(call, kind), reader=call.caller.owner)
    folder = call.service.data_dir / row.folder
    manifest = checkpoint_folders.read_manifest(folder)
    checkpoint_folders.check_files(folder, manifest, manifest.files)
    return row


def _signed_url(call: Call, row: CheckpointRow, file: str, expires_at: int) -> str:
    """The signed address of a file, below the server's own address."""
    address = public_address(call.request, call.request.app.state.public_url)
    signature = Signer(call.service.data_dir).sign(row.folder, file, expires_at=expires_at)
    place = "/".join(quote(part, safe=":") for part in (row.model_id, row.kind, row.name, file))
    query = urlencode({"expires": expires_at, "signature": signature})
    return f"{address}{wire.API_PREFIX}/downloads/{place}?{query}"


# --- up ----------------------------------------------------------------------------------------------------------


async def upload(call: Call) -> Response:
    """Makes a checkpoint of the multipart part `file`: a .tar.gz or .tar of PEFT's files, or an archive of this server.
    Form fields `base_model` (if the lora does not name one that is known here) and `name`."""
    with _uploads.take(call.caller.owner):
        scratch = call.service.data_dir / SCRATCH_FOLDER
        await asyncio.to_thread(scratch.mkdir, 0o700, parents=True, exist_ok=True)
        quota = call.caller.quotas.max_checkpoint_bytes
        with (
            call.service.reservations.open(call.caller.owner, quota) as reservation,
            report_storage_faults(),
            tempfile.TemporaryFile(dir=scratch) as spool,
        ):
            fields = await _receive(call, spool, reservation)
            row = await asyncio.to_thread(_import, call, spool, fields, reservation)
    path = CheckpointPath(row.model_id, row.kind, row.name).uri
    notes = (row.user_metadata or {}).get("notes", [])
    alias = checkpoints.alias_of(row.folder)
    return respond(UploadCheckpointResponse(path=path, checkpoint_id=alias, notes=notes))


def _import(call: Call, spool: BinaryIO, fields: Mapping[str, str], reservation: Reservation) -> CheckpointRow:
    base_model, name = (fields.get(field) or None for field in TEXT_FIELDS)
    return call.service.import_checkpoint(call.caller, spool, base_model=base_model, name=name, reservation=reservation)


async def _receive(call: Call, spool: BinaryIO, reservation: Reservation) -> dict[str, str]:
    """Writes the part `file` of a multipart body to `spool`; the text fields. Reserves what the body announces, or what
    has arrived of one that announces nothing; ends when the disk is filled up to its reserve."""
    headers = call.request.headers
    media_type, options = parse_options_header(headers.get("content-type"))
    boundary = options.get(b"boundary", b"")
    if media_type != b"multipart/form-data" or not boundary:
        remedy = "Send multipart/form-data with a part named file: curl -F file=@lora.tar.gz"
        raise InvalidRequestError(
            "is not that of an upload", field="content-type", value=headers.get("content-type", ""), remedy=remedy
        )
    if headers.get("content-encoding", "identity").lower() != "identity":
        raise InvalidRequestError(
            "is not taken here", field="content-encoding", value=headers["content-encoding"], remedy="Leave it out"
        )
    form = _Form(spool)
    try:
        parser = MultipartParser(boundary, form.callbacks())
    except FormParserError as error:
        raise InvalidRequestError(
            f"cannot be used: {error}", field="boundary", value=boundary.decode("latin-1"), remedy="Send a shorter one"
        ) from error
    try:
        quota = call.caller.quotas.max_checkpoint_bytes
        most = MAX_UPLOAD_BYTES if quota is None else min(MAX_UPLOAD_BYTES, quota)
        length = headers.get("content-length", "")
        announced = int(length) if length.isascii() and length.isdigit() else 0
        written = 0

        def take(chunk: bytes) -> None:
            total = max(announced, written + len(chunk))
            if total > most:
                remedy = f"Send at most {most} bytes"
                raise BodyTooLargeError("is too large", field="body", value=f"{total} bytes", remedy=remedy)
            reservation.announce(total, total - written)
            parser.write(chunk)

        await asyncio.to_thread(take, b"")  # refused before the body is read
        async for chunk in _chunks(call):
            await asyncio.to_thread(take, chunk)
            written += len(chunk)
        parser.finalize()
    except MultipartParseError as error:
        raise InvalidRequestError(
            f"is not whole multipart/form-data: {error}", field="body", value="the upload", remedy="Send it again"
        ) from error
    return form.fields()


async def _chunks(call: Call) -> AsyncGenerator[bytes]:
    """The chunks of the body, while it comes fast enough; the time that writing them takes does not count."""
    stream = call.request.stream().__aiter__()
    waited_s, received_bytes = 0.0, 0
    while True:
        left_s = CHUNK_TIMEOUT_S + received_bytes / SLOWEST_BYTES_S - waited_s
        began_at = time.monotonic()
        try:
            async with asyncio.timeout(min(CHUNK_TIMEOUT_S, left_s)):
                chunk = await anext(stream, None)
        except ClientDisconnect:
            raise InvalidRequestError("broke off", field="body", value="the upload", remedy="Send it again") from None
        except TimeoutError:
            raise InvalidRequestError(
                f"came too slowly: {received_bytes} bytes in {waited_s + time.monotonic() - began_at:.0f} s",
                field="body",
                value="the upload",
                remedy=f"Send it again, at {SLOWEST_BYTES_S} bytes a second or faster",
            ) from None
        if chunk is None:
            return
        waited_s += time.monotonic() - began_at
        received_bytes += len(chunk)
        yield chunk


class _Form:
    """Reads a multipart body part by part: the file goes to the disk, short text fields to memory."""

    def __init__(self, spool: BinaryIO) -> None:
        self._spool = spool
        self._header = bytearray()
        self._value = bytearray()
        self._disposition = b""
        self._name = ""
        self._texts: dict[str, bytearray] = {}
        self._ended = False
        self._seen: set[str] = set()

    def callbacks(self) -> MultipartCallbacks:
        """The callbacks of the parser."""
        return {
            "on_part_begin": self._begin,
            "on_header_field": lambda data, start, end: self._collect(self._header, data[start:end]),
            "on_header_value": lambda data, start, end: self._collect(self._value, data[start:end]),
            "on_header_end": self._end_header,
            "on_headers_finished": self._name_part,
            "on_part_data": lambda data, start, end: self._take(data[start:end]),
            "on_end": self._end,
        }

    def fields(self) -> dict[str, str]:
        """The text fields, after the whole body.

        Raises:
            InvalidRequestError: the body ended early, or had no file.
        """
        if not self._ended or FILE_FIELD not in self._seen:
            problem = "has no part named file" if self._ended else "ends in the middle"
            raise InvalidRequestError(problem, field="body", value="the upload", remedy="curl -F file=@lora.tar.gz")
        return {name: text.decode("utf-8", "replace") for name, text in self._texts.items()}

    def _begin(self) -> None:
        self._disposition = b""

    def _collect(self, target: bytearray, data: bytes) -> None:
        if len(target) + len(data) > MAX_FIELD_BYTES:
            raise InvalidRequestError(
                f"is longer than {MAX_FIELD_BYTES} bytes", field="body", value="a header or field", remedy="Shorten it"
            )
        target += data

    def _end_header(self) -> None:
        if bytes(self._header).lower() == b"content-disposition":
            self._disposition = bytes(self._value)
        self._header.clear()
        self._value.clear()

    def _name_part(self) -> None:
        _, options = parse_options_header(self._disposition)
        self._name = options.get(b"name", b"").decode("utf-8", "replace")
        if self._name in self._seen or self._name not in (FILE_FIELD, *TEXT_FIELDS):
            wanted = ", ".join((FILE_FIELD, *TEXT_FIELDS))
            raise InvalidRequestError(
                "is not a part of an upload", field="part", value=self._name, remedy=f"Send {wanted}, once each"
            )
        self._seen.add(self._name)
        if self._name != FILE_FIELD:
            self._texts[self._name] = bytearray()

    def _take(self, data: bytes) -> None:
        if self._name == FILE_FIELD:
            self._spool.write(data)
        else:
            self._collect(self._texts[self._name], data)

    def _end(self) -> None:
        self._ended = True


_CHECKPOINTS = f"{wire.API_PREFIX}/training_runs/{{run_id}}/checkpoints"

ROUTES: tuple[RouteRow, ...] = (
    RouteRow("GET", f"{_CHECKPOINTS}/{{kind}}/{{name}}/archive", archive),
    RouteRow(
        "GET",
        f"{_CHECKPOINTS}/external_weights/{{name}}/external_weights_urls",
        external_weights_urls,
        response=ExternalWeightsUrlsResponse,
    ),
    RouteRow("GET", f"{wire.API_PREFIX}/downloads/{{run_id}}/{{kind}}/{{name}}/{{file}}", download, is_open=True),
    RouteRow(
        "POST",
        f"{wire.API_PREFIX}/checkpoints/upload",
        upload,
        response=UploadCheckpointResponse,
        streams_body=True,
    ),
)
