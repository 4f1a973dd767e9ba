"""What a batch of sequences with as many loras costs, beside the same batch with one lora.

    python -m benchmarks.serving.many_loras [--shape tiny] [--dtype float32] [--loras 64] [--rounds 7]

The engine alone, on one thread. Batches of 64 prompts with one sample each take turns, with 1, 8 and `--loras` loras of
rank 16 on all seven linear layers; a ratio is the median over the rounds of CPU seconds over those with one lora.
"""

from __future__ import annotations

import argparse
import time
from statistics import median

import numpy as np

from benchmarks.compare.base_models import base_model_folder
from mint.config import read_settings
from mint.engine.protocol import LoraSpec, ModelState, SampleJob, StopRule
from mint.engine.torch_engine import TorchEngine
from mint.models.random_base import SHAPES

SEQUENCES = 64


def random_lora(engine: TorchEngine, name: str, seed: int) -> None:
    """Publishes a lora whose B is not zero."""
    engine.create_model("model", "base", LoraSpec(16, seed, train_attn=True, train_mlp=True, train_unembed=False))
    rng = np.random.default_rng(seed)
    weights = engine.read_state("model").weights
    drawn = {key: rng.normal(0, 0.01, array.shape).astype(np.float32) for key, array in weights.items()}
    engine.write_state("model", ModelState(drawn))
    engine.publish("model", name)
    engine.drop_model("model")


def sampling_seconds(engine: TorchEngine, prompts: np.ndarray, loras: int, max_tokens: int) -> float:
    """CPU seconds of one batch in which sequence i has lora i modulo `loras`."""
    jobs = [
        SampleJob(
            *("base", f"lora-{index % loras}", prompt),
            temperature=1.0,
            top_k=-1,
            top_p=1.0,
            stop=StopRule(),
            num_samples=1,
            seed=index,
            max_tokens=max_tokens,
        )
        for index, prompt in enumerate(prompts)
    ]
    started_s = time.process_time()
    engine.sample(jobs)
    return time.process_time() - started_s


def main() -> None:
    """Prints one line for each number of loras."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=tuple(SHAPES), default="tiny")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--loras", type=int, default=SEQUENCES)
    parser.add_argument("--prompt-tokens", type=int, default=48)
    parser.add_argument("--new", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=7)
    options = parser.parse_args()
    settings = read_settings()
    engine = TorchEngine(dtype=options.dtype, threads=1, native=settings.native_folder)
    engine.load_base("base", str(base_model_folder(settings.home_dir, SHAPES[options.shape], seed=0, say=print)))
    for index in range(options.loras):
        random_lora(engine, f"lora-{index}", index)
    rng = np.random.default_rng(0)
    sizes = sorted({1, min(8, options.loras), options.loras})
    seconds: dict[int, list[float]] = {size: [] for size in sizes}
    for turn in range(1 + options.rounds):  # the first is not counted
        prompts = rng.integers(1, SHAPES[options.shape].vocabulary, (SEQUENCES, options.prompt_tokens))
        for size in sizes if turn % 2 else reversed(sizes):
            seconds[size].append(sampling_seconds(engine, prompts, size, options.new))
    for size in sizes:
        ratio = median(many / one for many, one in zip(seconds[size][1:], seconds[1][1:], strict=True))
        print(f"{size} loras: {median(seconds[size][1:]):.3f} CPU s a batch, {ratio:.2f} of one lora's")


if __name__ == "__main__":
    main()
