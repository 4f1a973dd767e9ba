"""Archives, honest and not, built byte by byte."""

from __future__ import annotations

import gzip
import io
import json
import tarfile
import zlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

HIDDEN, RANK = 192, 4
Q_PROJ = "base_model.model.model.layers.0.self_attn.q_proj"
BLOCK = 512


def config(**changes: Any) -> bytes:
    plain = {"peft_type": "LORA", "r": RANK, "lora_alpha": 32, "base_model_name_or_path": "mint/tiny", "bias": "none"}
    return json.dumps({**plain, **changes}).encode()


def lora(module: str = Q_PROJ, rank: int = RANK, inputs: int = HIDDEN, outputs: int = HIDDEN) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    a, b = rng.normal(size=(rank, inputs)), rng.normal(size=(outputs, rank))
    return {f"{module}.lora_A.weight": a.astype(np.float32), f"{module}.lora_B.weight": b.astype(np.float32)}


def safetensors(arrays: Mapping[str, np.ndarray], metadata: Mapping[str, Any] | None = None) -> bytes:
    header, data = entries(arrays)
    if metadata is not None:
        header["__metadata__"] = dict(metadata)
    return raw_safetensors(header, data)


def entries(arrays: Mapping[str, np.ndarray]) -> tuple[dict[str, Any], bytes]:
    header: dict[str, Any] = {}
    data = b""
    for name, array in arrays.items():
        content = array.tobytes()
        dtype = {"float32": "F32", "float16": "F16", "int64": "I64"}[array.dtype.name]
        place = [len(data), len(data) + len(content)]
        header[name] = {"dtype": dtype, "shape": list(array.shape), "data_offsets": place}
        data += content
    return header, data


def raw_safetensors(header: Any, data: bytes) -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + data


def adapter(**files: bytes) -> dict[str, bytes]:
    """The two files of a good adapter; keywords replace or add, with `__` for a dot."""
    good = {"adapter_config.json": config(), "adapter_model.safetensors": safetensors(lora())}
    return good | {name.replace("__", "."): content for name, content in files.items()}


def entry(name: str, content: bytes = b"", **fields: Any) -> bytes:
    """One tar entry, header and padded content; `fields` are those of `TarInfo`."""
    info = tarfile.TarInfo(name)
    info.size = len(content)
    for key, value in fields.items():
        setattr(info, key, value)
    return info.tobuf(tarfile.GNU_FORMAT) + content + b"\0" * (-len(content) % BLOCK)


def tar(files: Mapping[str, bytes] | Sequence[tuple[str, bytes]], *more: bytes) -> bytes:
    pairs = files.items() if isinstance(files, Mapping) else files
    return b"".join(entry(name, content) for name, content in pairs) + b"".join(more) + b"\0" * (2 * BLOCK)


def tar_gz(files: Mapping[str, bytes] | Sequence[tuple[str, bytes]], *more: bytes) -> bytes:
    return gzip.compress(tar(files, *more), 1)


def python_tar_gz(files: Mapping[str, bytes], folder: str = "") -> bytes:
    """As Python's tarfile writes it, with its extended headers."""
    target = io.BytesIO()
    with tarfile.open(fileobj=target, mode="w:gz") as archive:
        for name, content in files.items():
            info = tarfile.TarInfo(folder + name)
            info.size, info.mtime = len(content), 1_700_000_000.25
            archive.addfile(info, io.BytesIO(content))
    return target.getvalue()


def bomb(start: bytes, mebibytes: int) -> bytes:
    """Gzip of `start` and then so many MiB of zeros, in a thousandth of the space."""
    squeeze = zlib.compressobj(9, zlib.DEFLATED, 16 + zlib.MAX_WBITS)
    first = squeeze.compress(start) + squeeze.flush(zlib.Z_FULL_FLUSH)
    block = zlib.compressobj(9, zlib.DEFLATED, -zlib.MAX_WBITS)
    zeros = block.compress(bytes(2**20)) + block.flush(zlib.Z_FULL_FLUSH)
    return first + zeros * mebibytes


def header_of_size(name: str, size: int) -> bytes:
    info = tarfile.TarInfo(name)
    info.size = size
    return info.tobuf(tarfile.GNU_FORMAT)


def multipart(content: bytes, *, part: str = "file", more: Sequence[tuple[str, bytes]] = ()) -> tuple[bytes, str]:
    """A body and its content type."""
    boundary = "frontier-3f1c"
    body = b"".join(_parts([(part, content), *more], boundary)) + f"--{boundary}--\r\n".encode()
    return body, f"multipart/form-data; boundary={boundary}"


def _parts(parts: Sequence[tuple[str, bytes]], boundary: str) -> Iterator[bytes]:
    for name, content in parts:
        filename = '; filename="a.tar.gz"' if name == "file" else ""
        yield f'--{boundary}\r\nContent-Disposition: form-data; name="{name}"{filename}\r\n\r\n'.encode()
        yield content + b"\r\n"
