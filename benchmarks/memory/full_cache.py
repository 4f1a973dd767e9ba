"""A group of samples in a KV cache that is too small for it: the same tokens and logprobs, and what the turns cost.

    python -m benchmarks.memory.full_cache [--samples 8] [--tokens 4096] [--cache-mib 64]

A random model of two layers with eight key heads of 32 numbers: 4 KiB of keys and values a token in float32, so 8
samples of 4,096 tokens take 128 MiB. The group is sampled in a cache of twice that, and in the small one. The engine
alone, on one thread; CPU seconds.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from pathlib import Path

import numpy as np

from mint.config import read_settings
from mint.engine.protocol import SampleJob, SampleResult, StopRule
from mint.engine.torch_engine import TorchEngine
from mint.models.random_base import ModelShape, write_random_base

PROMPT_TOKENS = 64


def sample(folder: Path, cache_mib: int, samples: int, tokens: int) -> tuple[SampleResult, float, dict[str, int]]:
    """The result, CPU seconds, and the engine's counters."""
    engine = TorchEngine(
        dtype="float32",
        threads=1,
        device="cpu",
        native=read_settings().native_folder,
        kv_cache_bytes=cache_mib << 20,
    )
    engine.load_base("base", str(folder))
    group = SampleJob(
        base="base",
        weights_id=None,
        prompt=np.arange(2, 2 + PROMPT_TOKENS),
        num_samples=samples,
        max_tokens=tokens - PROMPT_TOKENS,
        temperature=1.0,
        top_k=-1,
        top_p=1.0,
        seed=1,
        stop=StopRule(),
    )
    started_s = time.process_time()
    (result,) = engine.sample([group])
    return result, time.process_time() - started_s, engine.sampling_counters()


def main() -> None:
    """Prints one line for each cache, and whether the bits are equal."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--samples", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=4096, help="of each sequence, with its prompt")
    parser.add_argument("--cache-mib", type=int, default=64)
    options = parser.parse_args()
    shape = ModelShape(hidden=64, layers=2, heads=8, kv_heads=8, head_size=32, mlp=128, context=options.tokens)
    position_bytes = shape.layers * 2 * shape.kv_heads * shape.head_size * 4
    large_mib = 2 * options.samples * options.tokens * position_bytes >> 20
    bits = []
    with tempfile.TemporaryDirectory() as folder:
        write_random_base(Path(folder), shape, seed=0)
        for cache_mib in (large_mib, options.cache_mib):
            result, seconds, counters = sample(Path(folder), cache_mib, options.samples, options.tokens)
            if result.error is not None:
                raise RuntimeError(result.error)
            print(f"{cache_mib} MiB: {seconds:.1f} CPU s, {counters}", flush=True)
            bits.append([(one.tokens.tobytes(), one.logprobs.tobytes()) for one in result.samples])
    print("equal tokens and logprobs:", bits[0] == bits[1])


if __name__ == "__main__":
    main()
