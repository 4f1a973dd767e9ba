"""The matrix with an SDK from the future: the newest one, made to call itself 0.99.0 and to send fields nobody knows.

Run as `drive_sdk.py` is. Every JSON request gets an unknown field, its settings get unknown ones at their rest values,
and every protobuf request an unknown field number; the results must be the same, and the SDK's log must hold a warning.
"""

from __future__ import annotations

import importlib.metadata
import sys
from pathlib import Path
from typing import Any

VERSION = "0.99.0"
UNKNOWN = {"field_of_tomorrow": {"level": 3}, "another_one": None}
AT_REST = {"setting_of_tomorrow": False, "another_setting": 0}
UNKNOWN_PROTO_FIELD = b"\xa2\x06\x03new"
"""Field number 100, three bytes."""

SETTINGS = ("lora_config", "sampling_params", "adam_params")

_real_version = importlib.metadata.version
importlib.metadata.version = lambda name: VERSION if name == "tinker" else _real_version(name)

import drive_sdk  # noqa: E402 (the version above is read while the SDK is imported)
from tinker import _base_client  # noqa: E402

CASES = (
    "get_info",
    "SFT lowers the loss",
    "GRPO loop: ppo",
    "n, max_tokens",
    "continues with the same bits",
    "ephemeral",
    "get_training_run",
    "prompt logprobs",
    "tinker version",
)


def with_unknown_fields(body: Any) -> Any:
    """A request as a newer SDK might send it."""
    if isinstance(body, bytes):
        return body + UNKNOWN_PROTO_FIELD
    if not isinstance(body, dict):
        return body
    parts = {name: {**value, **AT_REST} for name, value in body.items() if name in SETTINGS}
    return {**body, **parts, **UNKNOWN}


_real_build = _base_client.BaseClient._build_request


def _build_request(self: Any, options: Any, **rest: Any) -> Any:
    unknown = options.model_copy(update={"json_data": with_unknown_fields(options.json_data)})
    return _real_build(self, unknown, **rest)


_base_client.BaseClient._build_request = _build_request

if __name__ == "__main__":
    drive_sdk.main(Path(sys.argv[1]), sys.argv[2], list(CASES))
