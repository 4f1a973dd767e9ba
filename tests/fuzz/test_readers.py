"""Mutated bytes against all that reads a stranger's: codecs, archives, tensor files. They are read, or refused.

Each case mutates a good message or file by bytes, lengths, repetition and splices; messages also by values, as a tree.
Nothing but a refusal is raised, a message that is read means the same when it is written and read again, and time and
memory stay in proportion. Seeded, without a process.
"""

from __future__ import annotations

import gzip
import io
import json
import random
import sys
import time
import tracemalloc
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from mint import wire
from mint.errors import InvalidRequestError
from mint.models.untrusted_files import UntrustedFiles
from mint.models.untrusted_tensors import UntrustedTensors
from mint.server.service.request_reader import REQUESTS, RequestReader
from mint.types import ForwardBackwardOutput, SampleResponse
from mint.wire.codec import Encoding
from mint.wire.requests import CreateSessionRequest, ForwardBackwardRequest, RetrieveFuturesRequest, SampleRequest

sys.path += [str(Path(__file__).parents[1] / folder) for folder in ("wire", "weights")]

from archive_maker import adapter, lora, python_tar_gz, safetensors, tar, tar_gz
from wire_examples import OUTPUT, SAMPLE, SDK_REQUEST

MOST_CPU_S = 5.0
PEAK_PER_BYTE = 100
PEAK_BESIDE = 4_000_000
"""Bytes: the pieces in which archives are read, exceptions with their tracebacks."""

PASS = json.loads(wire.encode(wire.decode(ForwardBackwardRequest, SDK_REQUEST, Encoding.PROTO)))
SAMPLE_REQUEST = {
    "sampling_session_id": "s:sample:0",
    "seq_id": 3,
    "prompt": {"chunks": [{"type": "encoded_text", "tokens": [5, 6]}]},
    "sampling_params": {"max_tokens": 3, "stop": ["a"], "temperature": 0.5, "top_p": 0.9},
    "num_samples": 2,
}
MESSAGES: list[tuple[type, Any]] = [
    (ForwardBackwardRequest, PASS),
    (SampleRequest, SAMPLE_REQUEST),
    (REQUESTS["create_model"], {"session_id": "s", "model_seq_id": 0, "base_model": "b", "lora_config": {"rank": 4}}),
    (REQUESTS["optim_step"], {"model_id": "s:train:0", "seq_id": 2, "adam_params": {"learning_rate": 0.1}}),
    (REQUESTS["save_weights"], {"model_id": "s:train:0", "seq_id": 2, "path": "a", "ttl_seconds": 60}),
    (REQUESTS["load_weights"], {"model_id": "s:train:0", "seq_id": 2, "path": "mint://s:train:0/weights/a"}),
    (CreateSessionRequest, {"tags": ["a"], "sdk_version": "0.1.0", "user_metadata": {"a": 1}}),
    (RetrieveFuturesRequest, {"target": {"sampling_session_id": "s"}, "prev_cursor": 0, "timeout": 1}),
    (ForwardBackwardOutput, json.loads(wire.encode(OUTPUT))),
    (SampleResponse, json.loads(wire.encode(SAMPLE))),
]
PROTO_MESSAGES: list[tuple[type, bytes]] = [
    (ForwardBackwardRequest, SDK_REQUEST),
    (ForwardBackwardOutput, wire.encode(OUTPUT, Encoding.PROTO)),
    (SampleResponse, wire.encode(SAMPLE, Encoding.PROTO)),
]
VALUES: list[Any] = [
    None,
    True,
    0,
    -1,
    2**31,
    2**63,
    10**400,
    0.5,
    -0.0,
    float("nan"),
    float("inf"),
    "",
    "NaN",
    "\x00",
    "é\U0001f600",
    "x" * 3000,
    [],
    [[]],
    {},
    {"": None},
    [0] * 500,
    {"data": [1], "dtype": "float32", "shape": [2**40]},
    {"data": [1], "dtype": "int64", "shape": [2**20, 2**20], "sparse_crow_indices": [0, 1], "sparse_col_indices": [0]},
]
SPLICES = [b"\x00" * 8, b"\xff" * 8, b"[" * 5000, b'{"a":' * 500, b'"', b"\\ud800", b"NaN", b"1e999", b"-", b"9" * 5000]


def mutated(content: bytes, rng: random.Random) -> bytes:
    for _ in range(rng.choice([1, 1, 1, 2, 4])):
        place = rng.randrange(len(content) + 1)
        end = min(len(content), place + rng.choice([1, 4, 8, 40, 512]))
        match rng.randrange(7):
            case 0:
                content = content[:place] + bytes([rng.randrange(256)]) + content[place + 1 :]
            case 1 if place < len(content):
                content = content[:place] + bytes([content[place] ^ 1 << rng.randrange(8)]) + content[place + 1 :]
            case 2:
                content = content[:place] + content[end:]
            case 3:
                content = content[:place]
            case 4:
                content = content[:end] + content[place:end] * rng.choice([1, 10, 100]) + content[end:]
            case 5:
                content = content[:place] + rng.choice(SPLICES) + content[place:]
            case _:
                content = content[:place] + rng.randbytes(end - place) + content[end:]
    return content


def with_other_value(tree: Any, rng: random.Random) -> Any:
    """A copy in which something is replaced, repeated, renamed or gone."""
    if isinstance(tree, dict) and tree and rng.random() < 0.85:
        key = rng.choice(list(tree))
        copy = {**tree, key: with_other_value(tree[key], rng)}
        if rng.random() < 0.1:
            copy[rng.choice(["other", "type", "__class__", key + "\u0000"])] = copy.pop(key)
        if rng.random() < 0.05:
            copy.pop(key, None)
        return copy
    if isinstance(tree, list) and tree and rng.random() < 0.85:
        place = rng.randrange(len(tree))
        return [*tree[:place], with_other_value(tree[place], rng), *tree[place + 1 - rng.randrange(2) :]]
    return rng.choice(VALUES)


def read_json(rng: random.Random) -> str:
    kind, good = rng.choice(MESSAGES)
    if rng.random() < 0.7:
        for _ in range(rng.choice([1, 1, 2, 3])):
            good = with_other_value(good, rng)
        body = json.dumps(good).encode()
    else:
        body = mutated(json.dumps(good).encode(), rng)
    return within_proportion(len(body), lambda: read_message(kind, body, Encoding.JSON))


def read_proto(rng: random.Random) -> str:
    kind, good = rng.choice(PROTO_MESSAGES)
    body = mutated(good, rng)
    return within_proportion(len(body), lambda: read_message(kind, body, Encoding.PROTO))


def read_message(kind: type, body: bytes, encoding: Encoding) -> None:
    route = next((name for name, request in REQUESTS.items() if request is kind), None)
    for look in (
        lambda: wire.read_identity(body, "model_id", "seq_id", encoding),
        lambda: wire.decode_error(body),
        lambda: RequestReader().read_sample(body),
        lambda: None if route is None else RequestReader().read_training(route, body, encoding),
    ):
        with suppress(InvalidRequestError):
            look()
    message = wire.decode(kind, body, encoding)
    again = wire.decode(kind, wire.encode(message, encoding), encoding)
    assert wire.is_same(message, again), body


def read_archive(scratch: Path) -> Callable[[random.Random], str]:
    good = adapter()
    sources = [tar(good), tar_gz(good), python_tar_gz(good), python_tar_gz(good, "folder/")]

    def read(rng: random.Random) -> str:
        source = rng.choice(sources)
        if rng.random() < 0.5 and source[:2] == b"\x1f\x8b":
            archive = gzip.compress(mutated(gzip.decompress(source), rng), 1)
        elif rng.random() < 0.5:
            header = 512 * rng.randrange(3)
            archive = source[:header] + mutated(source[header : header + 512], rng) + source[header + 512 :]
        else:
            archive = mutated(source, rng)

        def look() -> None:
            with UntrustedFiles(io.BytesIO(archive), scratch) as files:
                for name, file in files.files.items():
                    if name.endswith(".safetensors"):
                        read_tensors(file)
                    else:
                        files.read(name)

        return within_proportion(max(len(archive), len(source)), look)

    return read


def read_tensors(file: Any) -> None:
    tensors = UntrustedTensors(file, "adapter_model.safetensors")
    for name, entry in tensors.entries.items():
        assert tensors.read(name).shape == entry.shape


def read_safetensors(rng: random.Random) -> str:
    header, data = TENSORS
    if rng.random() < 0.6:
        text = json.dumps(with_other_value(json.loads(header), rng)).encode()
        content = len(text).to_bytes(8, "little") + text + data
    elif rng.random() < 0.5:
        text = mutated(header, rng)
        content = len(text).to_bytes(8, "little") + text + data
    else:
        content = mutated(len(header).to_bytes(8, "little") + header + data, rng)
    return within_proportion(len(content), lambda: read_tensors(io.BytesIO(content)))


def _header_and_data() -> tuple[bytes, bytes]:
    file = safetensors(lora(rank=1, inputs=8, outputs=8), {"step": "3"})
    end = 8 + int.from_bytes(file[:8], "little")
    return file[8:end], file[end:]


TENSORS = _header_and_data()


def within_proportion(size: int, look: Callable[[], None]) -> str:
    """Whether the input was read or refused; nothing else may be raised, nor time or memory be out of proportion."""
    before = 0
    if tracemalloc.is_tracing():
        tracemalloc.reset_peak()
        before = tracemalloc.get_traced_memory()[0]
    began = time.process_time()
    try:
        look()
        outcome = "read"
    except InvalidRequestError as error:
        assert str(error)
        outcome = "refused"
    assert time.process_time() - began < MOST_CPU_S
    if tracemalloc.is_tracing():
        peak = tracemalloc.get_traced_memory()[1] - before
        assert peak <= PEAK_PER_BYTE * size + PEAK_BESIDE, (peak, size)
    return outcome


def fuzz(read: Callable[[random.Random], str], cases: int, seed: int, *, with_memory: bool) -> Counter[str]:
    rng = random.Random(seed)
    if with_memory:
        tracemalloc.start()
    try:
        return Counter(read(rng) for _ in range(cases))
    finally:
        tracemalloc.stop()


@pytest.fixture(params=["json", "protobuf", "archive", "safetensors"])
def reader(request: pytest.FixtureRequest, tmp_path: Path) -> Callable[[random.Random], str]:
    readers = {"json": read_json, "protobuf": read_proto, "archive": read_archive(tmp_path / "scratch")}
    return readers.get(request.param, read_safetensors)


def test_strangers_bytes_are_read_or_refused(reader: Callable[[random.Random], str]) -> None:
    outcomes = fuzz(reader, 300, 1, with_memory=True)
    assert outcomes.keys() == {"read", "refused"}


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_strangers_bytes_are_read_or_refused_in_100_000_cases(reader: Callable[[random.Random], str]) -> None:
    outcomes = fuzz(reader, 5_000, 2, with_memory=True) + fuzz(reader, 20_000, 3, with_memory=False)
    print(outcomes)
    assert outcomes.total() == 25_000  # of each of four readers
    assert min(outcomes["read"], outcomes["refused"]) >= 250
