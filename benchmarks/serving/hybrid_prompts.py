"""A group of samples on hybrid models of transformers: the prompt computed once, beside once for each sample.

    python -m benchmarks.serving.hybrid_prompts [--prompt-tokens 512] [--group 8] [--new 16] [--rounds 3]

The engine alone, on one thread, with random models of a width of 256 and 4 layers. The sides take turns; a ratio is
that of the medians of CPU seconds. Both must draw the same tokens.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any
from unittest.mock import patch

import numpy as np

from mint.engine.protocol import SampleJob, SampleResult, StopRule
from mint.engine.torch_engine import TorchEngine
from mint.engine.transformers.decoder import ModelCache
from tests.small_models import write_other_model

PROMPTS = 4

WIDTH = {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 4, "max_position_embeddings": 4096}
FAMILIES: dict[str, dict[str, Any]] = {
    "falcon_h1": {"mamba_n_heads": 8, "mamba_d_head": 64, "mamba_d_ssm": 512, "mamba_d_state": 32,
                  "mamba_chunk_size": 64},
    "lfm2": {},
    "olmo_hybrid": {},
}  # fmt: skip


def engine_of(folder: Path, *, repeats_caches: bool) -> TorchEngine:
    """An engine that has measured at load whether caches can be repeated, or has found that they cannot."""
    engine = TorchEngine(dtype="float32", threads=1, device="cpu")
    with patch.object(ModelCache, "repeat", ModelCache.repeat if repeats_caches else _refuse):
        engine.load_base("base", str(folder))
    wanted = "shared prompt" if repeats_caches else "separate prompts"
    assert engine.load_base("base", "").settings["sampling_cache"] == wanted
    return engine


def _refuse(_cache: ModelCache, _copies: int) -> None:
    raise AttributeError("caches are not repeated on this side")


def sample(engine: TorchEngine, seed: int, options: argparse.Namespace) -> tuple[float, list[SampleResult]]:
    """CPU seconds of a batch of groups, and the samples."""
    rng = np.random.default_rng(seed)
    jobs = [
        SampleJob(
            *("base", None, rng.integers(3, 97, options.prompt_tokens)),
            temperature=1.0,
            top_k=-1,
            top_p=1.0,
            stop=StopRule(),
            num_samples=options.group,
            seed=index,
            max_tokens=options.new,
        )
        for index in range(PROMPTS)
    ]
    started_s = time.process_time()
    results = engine.sample(jobs)
    return time.process_time() - started_s, results


def tokens_of(results: list[SampleResult]) -> list[list[int]]:
    """The tokens of all samples."""
    return [sample.tokens.tolist() for result in results for sample in result.samples]


def main() -> None:
    """Prints one line for each family."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompt-tokens", type=int, default=512)
    parser.add_argument("--group", type=int, default=8)
    parser.add_argument("--new", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    for family, sizes in FAMILIES.items():
        with tempfile.TemporaryDirectory() as folder:
            write_other_model(Path(folder), family, **WIDTH, **sizes)
            engines = [engine_of(Path(folder), repeats_caches=repeats) for repeats in (True, False)]
        times: list[list[float]] = [[], []]
        for seed in range(1 + options.rounds):  # the first is not counted
            answers = [sample(engine, seed, options) for engine in engines]
            assert tokens_of(answers[0][1]) == tokens_of(answers[1][1])
            for own, (seconds, _) in zip(times, answers, strict=True):
                own += [seconds] * (seed > 0)
        shared, separate = map(median, times)
        print(f"{family}: {shared:.2f} s, once for each sample {separate:.2f} s, {separate / shared:.1f} times")


if __name__ == "__main__":
    main()
