"""What dividing a large LoRA between two ranks saves and costs: a step, divided and whole.

    python -m benchmarks.exactness.divided_loras [--rank 512] [--turns 7]

Two processes of one thread each train two models on one base of the shape `tiny`, in turns: of one, each process has a
part of weights, gradient and moments; of the other, each has all. A step is a pass over 8 prompts of 48 tokens with 8
samples of 32 tokens each, an optimizer step and a digest. The figures are seconds by the clock on the first process
(the median, with the smallest and the largest), the bytes that it keeps of a model, and whether the digests are the
same.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
import torch.distributed.distributed_c10d as dist

from benchmarks.exactness import gradient_order
from mint.cluster.collectives.parallelism import ALIKE
from mint.cluster.sums import Ranks
from mint.engine.protocol import AdamSpec, LoraSpec, resolve_loss
from mint.engine.reductions import state_division
from mint.engine.torch_engine import TorchEngine
from mint.models.random_base import SHAPES, write_random_base

RANKS = 2
ADAM = AdamSpec(learning_rate=1e-3, beta1=0.9, beta2=0.95, eps=1e-8, weight_decay=0.0, grad_clip_norm=0.0)
NEVER = 1 << 62


def run_rank(rank: int, folder: str, lora: LoraSpec, turns: int) -> dict[str, dict[str, Any]]:
    """Seconds and digests of each turn, and the bytes at the end, of both models; the first turn does not count."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=RANKS)
    engine = TorchEngine(dtype="float32", threads=1, device="cpu", micro_batch_rows=1024, peers=Ranks(ALIKE))
    vocab_size = engine.load_base("base", f"{folder}/base").vocab_size
    for name, divided_from in (("divided", state_division.DIVIDED_FROM), ("whole", NEVER)):
        state_division.DIVIDED_FROM = divided_from
        engine.create_model(name, "base", lora)
    data, loss = gradient_order.request(vocab_size), resolve_loss("importance_sampling")
    found: dict[str, dict[str, Any]] = {name: {"seconds": [], "digests": []} for name in ("divided", "whole")}
    for turn in range(turns + 1):
        for name in found if turn % 2 else reversed(found):
            dist.barrier()
            began = time.perf_counter()
            engine.forward_backward(name, data, loss)
            engine.optim_step(name, ADAM)
            found[name]["digests"].append(engine.state_digest(name))
            if turn:
                found[name]["seconds"].append(time.perf_counter() - began)
    for name, own in found.items():
        model = engine._models[name]
        vectors = (model.weights, model.gradient, model.adam.exp_avg, model.adam.exp_avg_sq)
        own["bytes"] = sum(vector.untyped_storage().nbytes() for vector in vectors)
        own["numbers"] = model.layout.size
    dist.destroy_process_group()
    return found


def main(arguments: Sequence[str] | None = None) -> None:
    """Prints one line for each side."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rank", type=int, default=512)
    parser.add_argument("--turns", type=int, default=7)
    given = parser.parse_args(arguments)
    lora = LoraSpec(given.rank, 7, train_attn=True, train_mlp=True, train_unembed=False)
    with tempfile.TemporaryDirectory() as folder, ProcessPoolExecutor(RANKS, mp_context=get_context("spawn")) as pool:
        write_random_base(Path(folder) / "base", SHAPES["tiny"], seed=1)
        ranks = [pool.submit(run_rank, rank, folder, lora, given.turns) for rank in range(RANKS)]
        found, _ = (rank.result() for rank in ranks)
    print(f"a LoRA of {found['whole']['numbers']:,} numbers")
    for name, side in found.items():
        own = sorted(side["seconds"])
        spread = f"{own[0]:.3f} to {own[-1]:.3f}"
        print(f"{name}: {statistics.median(own):.3f} s ({spread}), {side['bytes'] / 2**20:.0f} MiB a rank")
    pairs = zip(found["divided"]["seconds"], found["whole"]["seconds"], strict=True)
    ratios = sorted(divided / whole for divided, whole in pairs)
    same = "the same" if found["whole"]["digests"] == found["divided"]["digests"] else "OTHER"
    print(f"divided/whole {statistics.median(ratios):.2f} ({ratios[0]:.2f} to {ratios[-1]:.2f}); {same} digests")


if __name__ == "__main__":
    main()
