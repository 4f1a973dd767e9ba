"""Requests and results as bytes, in JSON or protobuf. `requests` and `responses` have messages, `codec` the encodings.

Knows no HTTP, no routes and no meaning of a message.
"""

from __future__ import annotations

from mint.wire.codec import (
    API_PREFIX,
    APPLIED,
    MEDIA_TYPE,
    PREFER,
    WAIT,
    Encoding,
    Message,
    decode,
    decode_error,
    decode_result,
    encode,
    encode_error,
    encode_result,
    is_same,
    read_identity,
    result_as_json,
)

__all__ = [
    "API_PREFIX",
    "APPLIED",
    "MEDIA_TYPE",
    "PREFER",
    "WAIT",
    "Encoding",
    "Message",
    "decode",
    "decode_error",
    "decode_result",
    "encode",
    "encode_error",
    "encode_result",
    "is_same",
    "read_identity",
    "result_as_json",
]
