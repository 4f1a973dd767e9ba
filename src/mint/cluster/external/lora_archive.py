"""A version of weights as bytes, for a worker that shares no disk with the server: one line of JSON, then float32."""

from __future__ import annotations

import json
from dataclasses import asdict

import numpy as np

from mint.cluster.versions import Version, unpacked
from mint.engine.protocol import LoraSpec


def write_archive(version: Version) -> bytes:
    """The content that `read_archive` reads."""
    header = {"lora": asdict(version.lora), "layout": [[name, list(shape)] for name, shape in version.layout]}
    return json.dumps(header).encode() + b"\n" + np.ascontiguousarray(version.stored, np.float32).tobytes()


def read_archive(content: bytes) -> tuple[LoraSpec, dict[str, np.ndarray]]:
    """The shape and the weights by name."""
    line, _, rest = content.partition(b"\n")
    header = json.loads(line)
    layout = [(name, tuple(shape)) for name, shape in header["layout"]]
    vector = np.frombuffer(rest, np.float32)
    return LoraSpec(**header["lora"]), dict(unpacked(layout, vector))
