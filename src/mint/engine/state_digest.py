"""The digest of a model's state: equal digests mean equal bits of weights, moments and step count.

The form `b1` is defined by names, shapes and values alone. Any number of threads and any device give the same digest,
and whoever holds some of the arrays, or whole blocks of one, can hash them alone:

1. Each array is cut into blocks of 65,536 float32 values in row-major order, little-endian; the last may be shorter.
   Each block is hashed with SHA-256.
2. The digest is `b1:` and the first 32 hexadecimal digits of the SHA-256 of a line of JSON, such as
   `{"arrays": [["lm_head.lora_A.weight", [8, 64]], ...], "step": 3}`, a newline, and all the blocks' digests (32 bytes
   each): of the weights, then of the first moments, then of the second, each array by array as in that list, which is
   in the order of the names.

A digest without a prefix is of an older form: BLAKE2b of the three vectors as the engine stores them.

Knows vectors and where the arrays lie in them; nothing of models or files.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache

import numpy as np
import torch
from torch import Tensor

from mint.engine.protocol import ModelState
from mint.engine.reductions.state_division import StateDivision

BLOCK = 65_536
"""Float32 values of a block."""

_SERIAL_BYTES = 4 << 20
"""Less is hashed on the calling thread: to wake others takes longer."""

_TASK_BYTES = 2 << 20


Arrays = Mapping[str, tuple[slice, tuple[int, ...]]]
"""Where each array lies within a vector, and its shape."""


def digest_of(step: int, arrays: Arrays, vectors: Sequence[Tensor]) -> str:
    """The digest in the form `b1`. Each of `vectors` is float32 and holds all `arrays` at the given places."""
    whole = _begun(step, arrays)
    for digests in _hash_blocks(_bounds(arrays), vectors):
        whole.update(digests)
    return f"b1:{whole.hexdigest()[:32]}"


def digest_of_divided(step: int, arrays: Arrays, parts: Sequence[Tensor], division: StateDivision) -> str:
    """The same of vectors of which each process keeps the given part; all processes call it."""
    whole = _begun(step, arrays)
    blocks, first = blocks_of(arrays), division.own.start
    places = {bounds: place for place, bounds in enumerate(blocks)}
    own = [(start - first, stop - first) for start, stop in blocks if first <= start < division.own.stop]
    for part in parts:
        gathered = division.gather_digests(b"".join(_hash_blocks(own, [part])))
        size = len(gathered) // len(blocks)
        for bounds in _bounds(arrays):
            whole.update(gathered[places[bounds] * size :][:size])
    return f"b1:{whole.hexdigest()[:32]}"


def blocks_of(arrays: Arrays) -> list[tuple[int, int]]:
    """Where the blocks of all arrays start and stop, in the order of the vector."""
    return sorted(_bounds(arrays))


def _begun(step: int, arrays: Arrays) -> hashlib._Hash:
    header = {"arrays": [[name, list(arrays[name][1])] for name in sorted(arrays)], "step": step}
    return hashlib.sha256(json.dumps(header).encode() + b"\n")


def _bounds(arrays: Arrays) -> list[tuple[int, int]]:
    """Where the blocks of all arrays start and stop, in the order of the digest."""
    bounds: list[tuple[int, int]] = []
    for name in sorted(arrays):
        place = arrays[name][0]
        bounds += [(start, min(start + BLOCK, place.stop)) for start in range(place.start, place.stop, BLOCK)]
    return bounds


def digest_of_state(state: ModelState) -> str:
    """The digest in the form `b1` of a state with both moments."""
    arrays: dict[str, tuple[slice, tuple[int, ...]]] = {}
    start = 0
    for name, array in state.weights.items():
        arrays[name] = slice(start, start + array.size), array.shape
        start += array.size
    vectors = [
        torch.cat([torch.from_numpy(np.ascontiguousarray(part[name])).flatten() for name in arrays])
        for part in (state.weights, state.exp_avg or {}, state.exp_avg_sq or {})
    ]
    return digest_of(state.step, arrays, vectors)


def old_digest_of(step: int, vectors: Sequence[Tensor]) -> str:
    """The digest as mint made it before `b1`: for journals of that time."""
    digest = hashlib.blake2b(step.to_bytes(8, "little"), digest_size=16)
    for vector in vectors:
        digest.update(_bytes_of(vector))
    return digest.hexdigest()


def is_old(digest: str) -> bool:
    """Whether a digest is of the form before `b1`."""
    return ":" not in digest


def _hash_blocks(bounds: Sequence[tuple[int, int]], vectors: Sequence[Tensor]) -> list[bytes]:
    """The digests of all blocks in order, joined in some parts. `bounds` are the blocks of each vector."""
    size = 4 * sum(vector.numel() for vector in vectors)
    threads = torch.get_num_threads()
    if size <= _SERIAL_BYTES or threads == 1:
        return [_hash_some(_bytes_of(vector), bounds) for vector in vectors]
    pool, futures = _pool(threads), []
    for vector in vectors:
        values = _bytes_of(vector)  # copies from a GPU, while the threads hash the vector before
        futures += [pool.submit(_hash_some, values, some) for some in _tasks(bounds)]
    return [future.result() for future in futures]


def _tasks(bounds: Sequence[tuple[int, int]]) -> list[Sequence[tuple[int, int]]]:
    """`bounds` in runs of about `_TASK_BYTES`."""
    tasks, first, size = [], 0, 0
    for index, (start, stop) in enumerate(bounds, 1):
        size += 4 * (stop - start)
        if size >= _TASK_BYTES or index == len(bounds):
            tasks.append(bounds[first:index])
            first, size = index, 0
    return tasks


def _hash_some(values: memoryview, bounds: Sequence[tuple[int, int]]) -> bytes:
    return b"".join(hashlib.sha256(values[4 * start : 4 * stop]).digest() for start, stop in bounds)


def _bytes_of(vector: Tensor) -> memoryview:
    return memoryview(vector.detach().cpu().numpy()).cast("B")


@cache
def _pool(threads: int) -> ThreadPoolExecutor:
    return ThreadPoolExecutor(threads, thread_name_prefix="mint-hash")
