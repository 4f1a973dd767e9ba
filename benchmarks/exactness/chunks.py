"""What it costs one process to cut layers into chunks, which several processes could divide.

    python -m benchmarks.exactness.chunks [--shape tiny] [--layers N] [--dtype float32] [--turns 9] [--rank 32]

The request of `gradient_order`, forward and backward on one thread, by an engine with whole layers and by one whose
layers are cut, in turns; every second round goes in the opposite order. The figures are CPU times, because other work
on the machine disturbs them less: the median of the ratios of a round, with the smallest and the largest. How far the
two gradients are from each other is printed, too. With `--sample`, both also sample 64 sequences of 32 tokens.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np

from benchmarks.exactness.gradient_order import request
from mint.config import read_settings
from mint.engine.protocol import AdamSpec, LoraSpec, SampleJob, StopRule, TrainDatum, resolve_loss
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
    parser.add_argument("--sample", action="store_true")
    given = parser.parse_args(arguments)
    shape = SHAPES[given.shape]
    if given.layers is not None:
        shape = replace(shape, layers=given.layers)
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
    data, loss = request(vocab_size), resolve_loss("importance_sampling", {"trained_only": 1})
    print(f"{given.shape}, {given.dtype}, rank {given.rank}, {chunks} chunks")
    _report("training", measure([partial(e.forward_backward, "m", data, loss) for e in engines], given.turns))
    for engine in engines:
        engine.clear_gradient("m")
    print(f"gradients differ by {distance(engines, data):.1e} of their norm")
    if given.sample:
        stop = StopRule()
        prompt = np.arange(48)
        job = SampleJob("base", "w", prompt, 64, 32, 1.0, -1, 1.0, 0, stop)
        for engine in engines:
            engine.publish("m", "w")
        _report("sampling", measure([partial(engine.sample, [job]) for engine in engines], given.turns))


def measure(calls: Sequence[Callable[[], object]], turns: int) -> list[list[float]]:
    """CPU seconds of each of two calls in each round, after one that does not count."""
    seconds: list[list[float]] = [[] for _ in calls]
    for turn in range(turns + 1):
        for place in (0, 1) if turn % 2 else (1, 0):
            began = time.process_time()
            calls[place]()
            if turn:
                seconds[place].append(time.process_time() - began)
    return seconds


def _report(what: str, seconds: Sequence[Sequence[float]]) -> None:
    ratios = [cut / whole for whole, cut in zip(*seconds, strict=True)]
    print(
        f"{what}: {statistics.median(seconds[0]):.3f} s of CPU whole; cut/whole {statistics.median(ratios):.3f} "
        f"({min(ratios):.3f} to {max(ratios):.3f})"
    )


def distance(engines: Sequence[TorchEngine], data: Sequence[TrainDatum]) -> float:
    """How far the gradients of the two engines are from each other, as a share of their norm."""
    loss = resolve_loss("importance_sampling", {"trained_only": 1})
    gradients = []
    for engine in engines:
        engine.forward_backward("m", data, loss)
        engine.optim_step("m", AdamSpec(0.0, 0.0, 0.9, 1e-8, 0.0, 0.0))  # the first moment is the gradient then
        moment = engine.read_state("m").exp_avg
        assert moment is not None
        gradients.append(np.concatenate([array.reshape(-1) for array in moment.values()]))
    whole, cut = gradients
    return float(np.linalg.norm(whole - cut) / np.linalg.norm(whole))


if __name__ == "__main__":
    main()
