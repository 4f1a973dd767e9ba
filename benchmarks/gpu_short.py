"""A GPU session of four minutes, for a card that is lent for minutes only.

    PYTHONPATH=src python3 -m benchmarks.gpu_short OUT [--only sample-64 train-64] [--batch-invariant]
        [--quantize nf4]

The figures of `gpu_session` that one base serves, and a long sequence of a larger one, by mint's engine and by
transformers + PEFT ("hf-best"), one after another in one process: no worker starts again, and a base is written
once. So the sides take no turns, and what one leaves on the card is freed before the next. Losses, gradients
and the logprob of a fixed sequence are in the lines, to be compared. The time to load of the first line
contains the self-check, which compiles. In the batch-invariant mode, and on a quantized base, mint computes alone.
Lines go to OUT/short.jsonl; see docs/gpu.md.
"""

from __future__ import annotations

import gc
import json
import sys
import time
import traceback
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch

from benchmarks.compare.base_models import adapter_files, base_model_folder
from benchmarks.compare.contenders import BENCH_BASE
from benchmarks.compare.sample import PEERS, step_spec
from benchmarks.compare.shapes import GrpoShape
from benchmarks.compare.train import peers_of, train_spec
from benchmarks.gpu_predictions import PRIME_RL, model_of
from benchmarks.gpu_session import LONG_TOKENS, Options, facts, figures, read_options, say
from benchmarks.peers import hf, mint_engine
from mint.models.random_base import SHAPES

PEER = "hf-best"

LARGE = "qwen3-4b"
"""The model of the last figure, which mint computes alone."""


@dataclass(frozen=True)
class Figure:
    """One benchmark, and who computes it in turn."""

    name: str
    work: str
    shape: GrpoShape
    sides: Sequence[str] = ("mint", PEER)


def short_figures(options: Options) -> list[Figure]:
    """The figures of all stages that one base serves, and a long sequence on a larger one."""
    length = 96 if options.small else LONG_TOKENS
    model = replace(options.model, context=max(options.model.context, length))
    by_name = {figure.name: replace(figure.shape, model=model) for figure in figures(options)}
    alone = {"prompts": 1, "group": 1, "prompt_tokens": 1, "max_tokens": length - 1}
    large = options.model if options.small else SHAPES[LARGE]
    found = [
        Figure("sample-64", "sample", by_name["sample-64"]),
        Figure("sample-256", "sample", by_name["sample-256"], ("mint",)),
        Figure("sample-1", "sample", by_name["sample-1"]),
        Figure("train-64", "train", by_name["train-64"]),
        Figure("train-long", "train", GrpoShape(model=model, **alone)),
        Figure("train-long", "train", GrpoShape(model=replace(large, context=length), **alone), ("mint",)),
    ]
    if options.only:
        found = [figure for figure in found if figure.name in options.only]
    is_alone = options.batch_invariant or options.quantize is not None
    return [replace(figure, sides=("mint",)) for figure in found] if is_alone else found


def measure(figure: Figure, side: str, options: Options) -> dict[str, Any]:
    """A line: the time of each step, of which the first compiles, and what shows that the sides did the same work."""
    base = base_model_folder(options.home, figure.shape.model, seed=0, say=say)
    adapter = adapter_files(options.home, figure.shape, seed=0, base_name=BENCH_BASE)
    settings: dict[str, Any] = {"base_model": base, "steps": 1 + options.repeats, "threads": options.threads}
    settings |= {"dtype": options.dtype, "device": options.device}
    is_training = figure.work == "train"
    spec = train_spec(figure.shape, **settings) if is_training else step_spec("sample", figure.shape, **settings)
    spec |= {"adapter": str(adapter.folder), "batch_invariant": options.batch_invariant, "quantize": options.quantize}
    began_s = time.perf_counter()
    worker: Any
    if side == "mint":
        worker = (mint_engine.TrainSide if is_training else mint_engine.SampleSide)(spec)
    else:
        known = peers_of(figure.shape, "cpu" if options.small else "cuda") if is_training else PEERS
        worker = (hf.TrainSide if is_training else hf.SampleSide)({**spec, **known[side].overrides})
    loaded_s = time.perf_counter() - began_s
    loaded_mib = None if options.small else torch.cuda.memory_allocated() >> 20
    seconds: list[float] = []
    done: dict[str, Any] = {}
    for index in range(1 + options.repeats):
        began_s = time.perf_counter()
        done = worker.step(index)
        seconds.append(time.perf_counter() - began_s)
    median_s = sorted(seconds[1:])[options.repeats // 2]
    return {
        "contender": side,
        "seconds_to_load": loaded_s,
        "seconds_first": seconds[0],
        "seconds": seconds[1:],
        "tokens_per_second": done["tokens"] / median_s,
        "loaded_device_mib": loaded_mib,
        "peak_device_mib": None if options.small else torch.cuda.max_memory_allocated() >> 20,
        "same_work": {name: found for name, found in done.items() if isinstance(found, float)}
        | worker.ready()
        | worker.finished(),
    }


def lines(options: Options) -> Iterator[dict[str, Any]]:
    """A line for each side of each figure; what fails is a line, too."""
    for figure in short_figures(options):
        for side in figure.sides:
            about = {"stage": "short", "figure": figure.name, "shape": asdict(figure.shape)}
            found: dict[str, Any]
            try:
                found = measure(figure, side, options)
            except Exception:  # noqa: BLE001  the next figure does not need this one
                found = {"contender": side, "failure": traceback.format_exc()}
            published = PRIME_RL.get(model_of(asdict(figure.shape.model)) or "")
            if figure.name == "train-long" and published is not None and "failure" not in found:
                found["ratio_to_prime_rl"] = found["tokens_per_second"] / published
            yield about | found
            gc.collect()
            if not options.small:
                torch.cuda.empty_cache()
                torch.cuda.reset_peak_memory_stats()


def main() -> None:
    options = read_options(["bench-0.6b", *sys.argv[1:]])
    options.out.mkdir(parents=True, exist_ok=True)
    failed = False
    with (options.out / "short.jsonl").open("w") as file:
        print(json.dumps(facts(options) | {"stage": "short", "mint_side": "engine"}), file=file, flush=True)
        for line in lines(options):
            print(json.dumps(line), file=file, flush=True)
            failed |= "failure" in line
            say(json.dumps({name: value for name, value in line.items() if name != "shape"})[:600])
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main()
