"""What it costs one process to cut layers into chunks, which several processes could divide.

    python -m benchmarks.exactness.chunks [--shape tiny] [--layers N] [--dtype float32] [--turns 9] [--rank 32]

The request of `gradient_order`, forward and backward on one thread, by an engine whose layers are whole and by one whose
layers are cut, in turns; every second round goes in the opposite order. The figures are CPU times, because other work
on the machine disturbs them less: the median of the ratios of a round, with the smallest and the largest. How far the
two gradients are from each other is printed, too.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from benchmarks.exactness.gradient_order import request
from mint.config import read_settings
from mint.engine.protocol import AdamSpec, LoraSpec, resolve_loss
from mint.engine.torch_engine import TorchEngine
from mint.models.random_base import SHAPES, write_random_base


def main(arguments: Sequence[str] | None = None) -> None:
    """Measures and prints one line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=list(SHAPES), default="tiny")
    parser.add_argument("--layers", type=int, help="so many of the layers of the shape")
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32")
    parser.add_argument("--turns", type=int, default=9)
    parser.add_argument("--rank", type=int, default=32)
    given = parser.parse_args(arguments)
    shape = SHAPES[given.shape]
    if given.layers is not None:
        shape = replace(shape, num_hidden_layers=given.layers)
    engines, chunks, vocab_size = [], None, 0
    with tempfile.TemporaryDirectory() as folder:
        write_random_base(Path(folder), shape, seed=1)
        for chunked in (False, True):
            native = read_settings().native_folder
            engine = TorchEngine(
                dtype=given.dtype, threads=1, device="cpu", native=native, micro_batch_rows=1024, chunked=chunked
            )
            info = engine.load_base("base", folder)
            chunks, vocab_size = info.settings["tensor_chunks"], info.vocab_size
            engine.create_model("m", "base", LoraSpec(given.rank, 7, True, True, False))
            engines.append(engine)
    seconds, distance = measure(engines, vocab_size, given.turns)
    ratios = [cut / whole for whole, cut in zip(*seconds, strict=True)]
    print(
        f"{given.shape}, {given.dtype}, rank {given.rank}, {chunks} chunks: {statistics.median(seconds[0]):.3f} s of "
        f"CPU whole; cut/whole {statistics.median(ratios):.3f} ({min(ratios):.3f} to {max(ratios):.3f}); "
        f"gradients differ by {distance:.1e} of their norm"
    )


def measure(engines: Sequence[TorchEngine], vocab_size: int, turns: int) -> tuple[list[list[float]], float]:
    """CPU seconds of each engine in each round, after one that does not count, and the distance of the gradients."""
    data, loss = request(vocab_size), resolve_loss("importance_sampling", {"trained_only": 1})
    seconds: list[list[float]] = [[] for _ in engines]
    for turn in range(turns + 1):
        for place in (0, 1) if turn % 2 else (1, 0):
            began = time.process_time()
            engines[place].forward_backward("m", data, loss)
            elapsed = time.process_time() - began
            if turn:
                seconds[place].append(elapsed)
                engines[place].clear_gradient("m")
    gradients = []
    for engine in engines:
        engine.forward_backward("m", data, loss)
        engine.optim_step("m", AdamSpec(0.0, 0.0, 0.9, 1e-8, 0.0, 0.0))  # the first moment is the gradient then
        moment = engine.read_state("m").exp_avg
        assert moment is not None
        gradients.append(np.concatenate([array.reshape(-1) for array in moment.values()]))
    whole, cut = gradients
    return seconds, float(np.linalg.norm(whole - cut) / np.linalg.norm(whole))


if __name__ == "__main__":
    main()
