"""Everything to measure when a GPU is available: one command for each stage, of nine minutes at most.

    PYTHONPATH=src python3 -m benchmarks.gpu_session STAGE OUT

Works from a checkout, with no network: peers run with the same Python, which must have torch, transformers and PEFT. If
it lacks the packages of mint's service, mint's side is the engine without it. Figures go to OUT/STAGE.jsonl, one JSON
line for each as soon as it is known; base models are written to a folder of their own and kept. With `--device cpu
--shape tiny` every stage runs anywhere, which shows that this script works and nothing else. See docs/gpu.md.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any, get_args

import torch

from benchmarks.compare.base_models import adapter_files, base_model_folder
from benchmarks.compare.contenders import BENCH_BASE, Transport
from benchmarks.compare.sample import run_sample_bench, step_spec
from benchmarks.compare.shapes import GrpoShape
from benchmarks.compare.train import run_train_bench, train_spec
from benchmarks.gpu_predictions import PRIME_RL, model_of
from benchmarks.peers.mint_engine import SampleSide, TrainSide
from mint.engine.quantized.number_formats import Quantization
from mint.errors import MintError
from mint.models.random_base import SHAPES, ModelShape

ROOT = Path(__file__).resolve().parent.parent

SERVICE = ("pydantic", "pydantic_settings", "starlette", "python_multipart", "zstandard")
"""Packages without which mint's service does not run."""

STAGE_S = 480.0
"""After which no further figure of a stage is begun."""

LONG_TOKENS = 16_384

STAGES = {
    "parity": "",
    "bench-0.6b": "qwen3-0.6b",
    "bench-4b": "qwen3-4b",
    "bench-8b": "qwen3-8b",
    "long": "qwen3-0.6b",
    "long-4b": "qwen3-4b",
    "long-8b": "qwen3-8b",
    "profile": "qwen3-0.6b",
}
"""Stages, and the shapes of their base models."""


@dataclass(frozen=True)
class Options:
    """The command line, read; on a CPU sequences are few and short."""

    stage: str
    out: Path
    home: Path
    device: str
    model: ModelShape
    repeats: int
    threads: int
    only: Sequence[str]
    batch_invariant: bool
    quantize: Quantization | None

    @property
    def small(self) -> bool:
        return self.device == "cpu"

    @property
    def dtype(self) -> str:
        return "float32" if self.small else "bfloat16"

    @property
    def transport(self) -> Transport:
        """The whole service where it can be had."""
        return "embedded" if all(find_spec(name) for name in SERVICE) else "engine"


@dataclass(frozen=True)
class Figure:
    """One benchmark of a stage."""

    name: str
    work: str
    shape: GrpoShape
    peers: Sequence[str]


def figures(options: Options) -> list[Figure]:
    """The benchmarks of a stage, the most wanted first."""
    model = options.model
    if options.stage.startswith("long"):
        length = 96 if options.small else LONG_TOKENS
        alone = {"prompts": 1, "group": 1, "prompt_tokens": 1, "max_tokens": length - 1}
        peers = ["hf-best"] if options.stage == "long" else []
        return [Figure("train-long", "train", GrpoShape(model=replace(model, context=length), **alone), peers)]
    tokens = {"prompt_tokens": 12, "max_tokens": 6} if options.small else {"prompt_tokens": 128, "max_tokens": 64}
    groups = {"prompts": 2, "group": 2} if options.small else {"prompts": 8, "group": 8}
    full = GrpoShape(model=model, **groups, **tokens)
    alone = GrpoShape(model=model, prompts=1, group=1, **tokens)
    if options.stage == "bench-8b":  # writing and loading 15 GB takes minutes: mint alone
        return [
            Figure("sample-64", "sample", full, []),
            Figure("sample-256", "sample", replace(full, group=4 * full.group), []),
            Figure("train-64", "train", full, []),
        ]
    return [
        Figure("sample-64", "sample", full, ["hf-best", "hf-shared"]),
        Figure("train-64", "train", full, ["hf-best"]),
        Figure("sample-1", "sample", alone, ["hf-best"]),
        Figure("sample-256", "sample", replace(full, group=4 * full.group), []),
        Figure("sample-64-compiled", "sample", full, ["hf-static"]),
    ]


def measure(figure: Figure, options: Options) -> list[dict[str, Any]]:
    shared: dict[str, Any] = {
        "peers": figure.peers,
        "shape": figure.shape,
        "dtype": options.dtype,
        "repeats": options.repeats,
        "threads": options.threads,
        "home": options.home,
        "say": say,
        "device": options.device,
        "transport": options.transport,
        "peer_python": Path(sys.executable),
    }
    train = figure.work == "train"
    rows = run_train_bench(peer_prompts=None, **shared) if train else run_sample_bench(**shared)
    published = PRIME_RL.get(model_of(asdict(figure.shape.model)) or "")
    if figure.name == "train-long" and published is not None:
        rows[0]["ratio_to_prime_rl"] = rows[0]["tokens_per_second"] / published
    return rows


def bench(options: Options) -> Iterator[dict[str, Any]]:
    """A line for each side of each figure; what fails is a line, too, after which mint is measured alone."""
    began_s = time.monotonic()
    for figure in figures(options):
        about = {"stage": options.stage, "figure": figure.name, "shape": asdict(figure.shape)}
        if time.monotonic() - began_s > STAGE_S:
            yield about | {"left_out": f"the stage has taken more than {STAGE_S:g} s"}
            continue
        for tried in (figure, replace(figure, peers=[])):
            try:
                yield from [about | row for row in measure(tried, options)]
                break
            except MintError:
                yield about | {"failure": traceback.format_exc()}


def parity(options: Options) -> Iterator[dict[str, Any]]:
    """The engine's tests on that device, by pytest."""
    chosen = ["-k", "cuda"] if options.device == "cuda" else []
    files = ["tests/engine"] if options.device == "cuda" else ["tests/engine/test_cuda_attention.py"]
    log = options.out / "parity.log"
    command = [sys.executable, "-m", "pytest", *files, *chosen, "-m", "not slow", "-p", "no:cacheprovider", "-rA"]
    with log.open("w") as output:
        done = subprocess.run(command, cwd=ROOT, stdout=output, stderr=subprocess.STDOUT, check=False)
    results = [
        line for line in log.read_text().splitlines() if line.startswith(("PASSED", "FAILED", "ERROR", "SKIPPED"))
    ]
    counts = {kind: sum(line.startswith(kind) for line in results) for kind in ("PASSED", "FAILED", "ERROR", "SKIPPED")}
    failed = [line for line in results if line.startswith(("FAILED", "ERROR"))]
    yield {"stage": "parity", "exit_code": done.returncode, "counts": counts, "failed": failed}


def profile(options: Options) -> Iterator[dict[str, Any]]:
    """Where the time of a step goes, by operation: a table for people beside the line."""
    _, train, *_ = figures(replace(options, stage="bench"))
    base = base_model_folder(options.home, options.model, seed=0, say=say)
    adapter = adapter_files(options.home, train.shape, seed=0, base_name=BENCH_BASE)
    settings: dict[str, Any] = {"base_model": base, "steps": 3, "threads": options.threads}
    settings |= {"dtype": options.dtype, "device": options.device}
    kinds = [torch.profiler.ProfilerActivity.CPU]
    if options.device == "cuda":
        kinds.append(torch.profiler.ProfilerActivity.CUDA)
    for name, side, spec in (
        ("train", TrainSide, train_spec(train.shape, **settings)),
        ("sample", SampleSide, step_spec("sample", train.shape, **settings)),
    ):
        worker = side(spec | {"adapter": str(adapter.folder)})
        for index in range(2):
            worker.step(index)
        with torch.profiler.profile(activities=kinds) as profiled:
            began_s = time.perf_counter()
            worker.step(2)
            taken_s = time.perf_counter() - began_s
        by = "self_cuda_time_total" if options.device == "cuda" else "self_cpu_time_total"
        events = profiled.key_averages()
        (options.out / f"profile-{name}.txt").write_text(events.table(sort_by=by, row_limit=60))
        launches = sum(event.count for event in events if event.key in {"cudaLaunchKernel", "cuLaunchKernel"})
        waits = sum(event.count for event in events if event.key in {"cudaStreamSynchronize", "cudaDeviceSynchronize"})
        on_device_s = sum(getattr(event, "self_device_time_total", 0.0) for event in events) / 1e6
        yield {"stage": "profile", "figure": name, "seconds": taken_s, "device_seconds": on_device_s} | {
            "launches": launches,
            "waits": waits,
        }


def say(text: str) -> None:
    print(f"{time.strftime('%H:%M:%S')} {text}", file=sys.stderr, flush=True)


def facts(options: Options) -> dict[str, Any]:
    """The machine and the versions."""
    on_gpu = options.device == "cuda"
    return {
        "stage": options.stage,
        "device": torch.cuda.get_device_name() if on_gpu else "cpu",
        "memory_bytes": torch.cuda.get_device_properties(0).total_memory if on_gpu else None,
        "torch": torch.__version__,
        "python": sys.version.split()[0],
        "mint_side": options.transport,
        "missing_packages": [name for name in (*SERVICE, "transformers", "peft", "triton") if not find_spec(name)],
    }


def read_options(arguments: Sequence[str] | None = None) -> Options:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("stage", choices=STAGES)
    parser.add_argument("out", type=Path)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--shape", choices=SHAPES, help="instead of the stage's own")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--threads", type=int, default=8)
    parser.add_argument("--only", nargs="+", default=(), help="names of figures, of gpu_short alone")
    parser.add_argument("--batch-invariant", action="store_true", help="mint's engine in this mode, in gpu_short alone")
    parser.add_argument("--quantize", choices=get_args(Quantization), help="mint's base, in gpu_short alone")
    parser.add_argument("--home", type=Path, default=Path(tempfile.gettempdir()) / "mint-gpu", help="for base models")
    given = parser.parse_args(arguments)
    model = SHAPES[given.shape or STAGES[given.stage] or "tiny"]
    return Options(
        given.stage,
        given.out.resolve(),
        given.home.resolve(),
        given.device,
        model,
        given.repeats,
        given.threads,
        given.only,
        given.batch_invariant,
        given.quantize,
    )


def main() -> None:
    options = read_options()
    options.out.mkdir(parents=True, exist_ok=True)
    work = {"parity": parity, "profile": profile}.get(options.stage, bench)
    failed = False
    with (options.out / f"{options.stage}.jsonl").open("w") as file:
        print(json.dumps(facts(options)), file=file, flush=True)
        for line in work(options):
            print(json.dumps(line), file=file, flush=True)
            failed |= "failure" in line or bool(line.get("exit_code"))
            say(json.dumps({name: value for name, value in line.items() if name not in {"shape", "seconds"}})[:600])
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main()
