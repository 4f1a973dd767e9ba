"""What `mint plan --model` predicts beside what is then measured, on a CPU.

    python -m benchmarks.memory.plan [--malloc server]

Random models in six shapes. Each measurement is a process of its own: the memory that base and lora take
after the first step, and the peak of resident memory beyond both in a pass over one sequence and in sampling from one
prompt. malloc gives each freed block back at once, so that the peak is what is alive; with `--malloc server` it keeps
freed memory, as in a server. Prints predicted and measured MiB and their ratio.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np

from mint.config import read_settings
from mint.engine.devices import Device
from mint.engine.memory.machine_memory import hand_back_freed_memory, keep_freed_memory
from mint.engine.memory.plan import MemoryPlan, plan_memory
from mint.engine.model.config import read_decoder_config
from mint.engine.protocol import AdamSpec, LoraSpec, SampleJob, StopRule, TrainDatum, resolve_loss
from mint.engine.torch_engine import DTYPES, TorchEngine
from mint.models.folder import ModelFolder
from mint.models.random_base import ModelShape, write_random_base

LORA = LoraSpec(16, 0, train_attn=True, train_mlp=True, train_unembed=False)
NEW_TOKENS = 8

MALLOC, BLOCK_BYTES = "MALLOC_MMAP_THRESHOLD_", "65536"
"""glibc gives blocks from this size on back to the system as soon as they are freed."""

WAYS = ("kept", "recomputed", "offloaded", "sampled")
DType = Literal["float32", "bfloat16"]


@dataclass(frozen=True)
class Case:
    """A model and a length of its sequence; `dtype` of the base."""

    shape: ModelShape
    dtype: DType


CASES = {
    "wide": Case(ModelShape(512, 2, 4, 2, 128, 1536, vocabulary=8192, context=4096), "float32"),
    "bfloat16": Case(ModelShape(384, 4, 6, 2, 64, 1152, vocabulary=16384, context=4096), "bfloat16"),
    "narrow": Case(ModelShape(256, 6, 8, 4, 32, 768, context=3072), "float32"),
    "deep": Case(ModelShape(192, 14, 6, 3, 32, 512, vocabulary=2048, context=2560), "float32"),
    "words": Case(ModelShape(320, 3, 5, 1, 64, 1024, vocabulary=49152, context=1536), "bfloat16"),
    "long": Case(ModelShape(448, 4, 7, 7, 64, 1344, vocabulary=4096, context=6144), "bfloat16"),
}
"""The plan's arithmetic was written beside the first three; the others came later, and nothing was changed for them."""


def predict(folder: Path, dtype: DType, tokens: int) -> MemoryPlan:
    """The plan for this machine."""
    opened = ModelFolder(folder)
    config = read_decoder_config(opened.config)
    device = Device("cpu", read_settings().native_folder, gpu_kernels=False)
    return plan_memory(
        config,
        opened.tensors(),
        device.operations(config, DTYPES[dtype]),
        LORA,
        context=tokens,
        group=8,
        memory_bytes=device.memory_bytes,
        free_bytes=device.free_bytes,
    )


def status_bytes(field: str) -> int:
    """A line of this process's status, such as VmHWM: the most that was resident."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{field}:"):
            return int(line.split()[1]) * 1024
    raise RuntimeError(f"this system does not tell {field}")


def measure(folder: str, dtype: DType, way: str, tokens: int) -> None:
    """Prints one JSON object: bytes of the base, of the lora, and of the peak."""
    if MALLOC not in os.environ:
        keep_freed_memory()
    engine = TorchEngine(
        dtype=dtype,
        threads=1,
        device="cpu",
        native=read_settings().native_folder,
        recompute=way in ("recomputed", "offloaded"),
        offload_activations=way == "offloaded",
    )
    ids = np.random.default_rng(0).integers(2, 512, tokens + 1)
    loss = resolve_loss("cross_entropy")
    start = status_bytes("RssAnon")
    engine.load_base("base", folder)
    hand_back_freed_memory()
    base = status_bytes("RssAnon") - start
    engine.create_model("m", "base", LORA)
    engine.forward_backward("m", [TrainDatum(ids[:40], ids[1:41], np.ones(40, np.float32))], loss)
    engine.optim_step("m", AdamSpec(1e-4, 0.9, 0.95, 1e-8, 0.0, 0.0))
    engine.publish("m", "w")
    engine.sample([_job(ids[:8])])
    hand_back_freed_memory()
    lora = status_bytes("RssAnon") - start - base
    Path("/proc/self/clear_refs").write_text("5")  # VmHWM begins anew
    before = status_bytes("VmRSS")
    if way == "sampled":
        (result,) = engine.sample([_job(ids[: tokens - NEW_TOKENS])])
        if result.error is not None:
            raise RuntimeError(result.error)
    else:
        engine.forward_backward("m", [TrainDatum(ids[:-1], ids[1:], np.ones(tokens, np.float32))], loss)
    print(json.dumps({"base": base, "lora": lora, "peak": status_bytes("VmHWM") - before}))


def _job(prompt: np.ndarray) -> SampleJob:
    return SampleJob("base", "w", prompt, 1, NEW_TOKENS, 1.0, -1, 1.0, 0, StopRule())


def main() -> None:
    """Prints one line for each prediction."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--case", choices=sorted(CASES), action="append", help="all, if not given")
    parser.add_argument("--malloc", choices=["alive", "server"], default="alive")
    parser.add_argument("--measure", nargs=2, metavar=("FOLDER", "WAY"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    environment = {**os.environ, **({MALLOC: BLOCK_BYTES} if options.malloc == "alive" else {})}
    for name in options.case or CASES:
        case = CASES[name]
        tokens = case.shape.context
        if options.measure:
            measure(options.measure[0], case.dtype, options.measure[1], tokens)
            return
        with tempfile.TemporaryDirectory() as folder:
            write_random_base(Path(folder), case.shape, seed=0)
            plan = predict(Path(folder), case.dtype, tokens)
            peaks = {
                "kept": plan.kept,
                "recomputed": plan.recomputed,
                "offloaded": plan.offloaded,
                "sampled": plan.kv_token * tokens + plan.prompt,
            }
            for way in WAYS:
                command = [sys.executable, "-m", "benchmarks.memory.plan", "--case", name, "--measure", folder, way]
                done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, env=environment)
                found = json.loads(done.stdout)
                whole = plan.base + plan.model
                if way == WAYS[0]:
                    _print(name, "base and lora", whole, found["base"] + found["lora"])
                _print(name, way, peaks[way], found["peak"])
                _print(name, f"{way}, with base and lora", whole + peaks[way], sum(found.values()))


def _print(name: str, what: str, predicted: int, measured: int) -> None:
    ratio = predicted / measured
    print(f"{name:9} {what:30} {predicted / (1 << 20):8.1f} {measured / (1 << 20):8.1f} {ratio:6.2f}", flush=True)


if __name__ == "__main__":
    main()
