"""Bodies and responses of the dashboard: JSON that every browser reads, entity tags, compression."""

from __future__ import annotations

import gzip
import hashlib
import json

import pydantic_core
from starlette.requests import Request
from starlette.responses import Response

COMPRESSED_FROM_BYTES = 16 * 1024


def json_bytes(value: object) -> bytes:
    """A value as JSON in UTF-8. `inf` and `nan` become null, and half of a surrogate pair becomes `?`."""
    try:
        return pydantic_core.to_json(value, inf_nan_mode="null")
    except pydantic_core.PydanticSerializationError:
        plain = pydantic_core.to_jsonable_python(value, inf_nan_mode="null")
        return json.dumps(plain, ensure_ascii=False).encode("utf-8", "replace")


def conditional_response(request: Request, body: bytes, media_type: str) -> Response:
    """The body, compressed if it is large; or 304 if the browser has it already."""
    tag = f'W/"{hashlib.blake2b(body, digest_size=12).hexdigest()}"'
    headers = {"etag": tag, "cache-control": "no-cache", "vary": "accept-encoding, cookie"}
    if request.headers.get("if-none-match") == tag:
        return Response(status_code=304, headers=headers)
    if len(body) >= COMPRESSED_FROM_BYTES and "gzip" in request.headers.get("accept-encoding", ""):
        body = gzip.compress(body, compresslevel=1)
        headers["content-encoding"] = "gzip"
    return Response(body, media_type=media_type, headers=headers)
