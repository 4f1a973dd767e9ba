"""The memory that one long sequence takes in training, with and without activation recomputation, and in sampling.

    python -m benchmarks.memory.long_context [--tokens 32768] [--hidden 64] [--layers 8]

A random model in float32, the engine alone on one thread. Each measurement is a process of its own: its peak resident
memory beyond what it had once the base and the lora were loaded. Logits exist a chunk at a time in all of them.
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

from mint.config import read_settings
from mint.engine.protocol import LoraSpec, SampleJob, StopRule, TrainDatum, resolve_loss
from mint.engine.torch_engine import TorchEngine
from mint.models.random_base import ModelShape, write_random_base

WAYS = ("kept", "recomputed", "sampled")
NEW_TOKENS = 16


def peak_bytes() -> int:
    """The most resident memory that this process has had."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def measure(folder: str, way: str, tokens: int) -> None:
    """Prints one JSON object."""
    engine = TorchEngine(
        dtype="float32",
        threads=1,
        device="cpu",
        native=read_settings().native_folder,
        recompute=way == "recomputed",
    )
    engine.load_base("base", folder)
    engine.create_model("m", "base", LoraSpec(16, 0, train_attn=True, train_mlp=True, train_unembed=False))
    ids = np.random.default_rng(0).integers(2, 512, tokens + 1)
    before = peak_bytes()
    started_s = time.process_time()
    if way == "sampled":
        prompt = ids[: tokens - NEW_TOKENS]
        job = SampleJob("base", None, prompt, 1, NEW_TOKENS, 1.0, -1, 1.0, 0, StopRule())
        (result,) = engine.sample([job])
        if result.error is not None:
            raise RuntimeError(result.error)
    else:
        datum = TrainDatum(ids[:-1], ids[1:], np.ones(tokens, np.float32))
        engine.forward_backward("m", [datum], resolve_loss("cross_entropy"))
    seconds = time.process_time() - started_s
    print(json.dumps({"way": way, "mib": (peak_bytes() - before) >> 20, "cpu_s": round(seconds, 1)}))


def main() -> None:
    """Prints one line for each way."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=32768)
    parser.add_argument("--hidden", type=int, default=64)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--measure", nargs=2, metavar=("FOLDER", "WAY"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.measure:
        measure(*options.measure, options.tokens)
        return
    shape = ModelShape(
        hidden=options.hidden,
        layers=options.layers,
        heads=options.hidden // 32,
        kv_heads=1,
        head_size=32,
        mlp=3 * options.hidden,
        context=options.tokens,
    )
    with tempfile.TemporaryDirectory() as folder:
        write_random_base(Path(folder), shape, seed=0)
        for way in WAYS:
            command = [sys.executable, "-m", "benchmarks.memory.long_context", "--tokens", str(options.tokens)]
            subprocess.run([*command, "--measure", folder, way], check=True)


if __name__ == "__main__":
    main()
