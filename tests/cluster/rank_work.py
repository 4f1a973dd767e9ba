"""What the processes of a test do, each as one rank of a gloo group."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
import torch.distributed as dist
from engine_data import ADAM, LORA, random_data

from mint.cluster.collectives.parallelism import ALIKE, Parallelism
from mint.cluster.sums import Ranks
from mint.engine import training_pass
from mint.engine.protocol import MicroBatching, ModelState, PassResult, resolve_loss
from mint.engine.reductions.division import Peers
from mint.engine.reductions.gradient_sum import partial_sums
from mint.engine.torch_engine import TorchEngine

ROWS = 40
STEPS = 3
WAIT = timedelta(seconds=240)


def run_rank(rank: int, world: int, store: Path, function: Callable[..., Any], arguments: Sequence[Any]) -> Any:
    """Calls the function in a gloo group of its own. If a rank is lost, the others fail after `WAIT`."""
    torch.set_num_threads(1)
    joined = dist.FileStore(str(store), world)
    dist.init_process_group("gloo", timeout=WAIT, store=joined, rank=rank, world_size=world)
    try:
        result = function(*arguments)
        dist.barrier()  # another rank may still be connecting, if the function exchanges nothing
        return result
    finally:
        dist.destroy_process_group()


def total_of(leaves: np.ndarray, costs: Sequence[int]) -> tuple[range, np.ndarray]:
    """The range of this rank, and the sum of all `leaves` [count, size]."""
    division = Ranks(ALIKE).divide(costs)
    sums = partial_sums(len(leaves), division.own, lambda index: torch.from_numpy(leaves[index]))
    return division.own, division.total(sums, leaves.shape[1], None).numpy()


def join_of(values: Sequence[np.ndarray], costs: Sequence[int]) -> np.ndarray:
    """The values of all micro-batches, from those of this rank."""
    division = Ranks(ALIKE).divide(costs)
    own = np.concatenate([np.empty(0), *(values[index] for index in division.own)])
    return division.join(own, [len(each) for each in values])


def engine_with(
    peers: Peers, folder: Path, *, rows: int = ROWS, dtype: Any = "float32", native: Path | None = None, **options: Any
) -> TorchEngine:
    """An engine with base `base` and model `m`, whose passes run with `peers`."""
    given = {"dtype": dtype, "micro_batch_rows": rows, "native": native, **options}
    engine = TorchEngine(threads=1, device="cpu", peers=peers, **given)
    engine.load_base("base", str(folder))
    engine.create_model("m", "base", LORA)
    return engine


def train_steps(
    engine: TorchEngine, start: int = 0, state: ModelState | None = None
) -> tuple[list[str], list[PassResult], ModelState]:
    """The digests and results of some steps, and the state after them."""
    if state is not None:
        engine.write_state("m", state)
    digests, results = [], []
    for step in range(start, start + STEPS):
        data = random_data(step, count=24, shared=8, policy=True)
        results.append(engine.forward_backward("m", data, resolve_loss("importance_sampling")))
        engine.optim_step("m", ADAM)
        digests.append(engine.state_digest("m"))
    return digests, results, engine.read_state("m")


def train_on_ranks(
    folder: Path, *arguments: Any, parallelism: Parallelism = ALIKE, **options: Any
) -> tuple[list[str], list[PassResult], ModelState]:
    return train_steps(engine_with(Ranks(parallelism), folder, **options), *arguments)


def train_while(folder: Path, rank: int, error: Exception) -> tuple[MicroBatching | None, str, str]:
    """Runs a step in which the first micro-batch of one rank raises an error.

    Returns how the pass was cut, the digest after the step, and that of a step without the error that was cut so. If
    the pass fails: None, the type of what is raised, and its text.
    """
    plain, calls = training_pass._run, 0

    def fails(*arguments: Any, **named: Any) -> None:
        nonlocal calls
        calls += 1
        plain(*arguments, **named)
        if dist.get_rank() == rank and calls == 1:
            raise error

    engine = engine_with(Ranks(ALIKE), folder, rows=512)
    data = random_data(3, count=64, policy=True)
    loss = resolve_loss("importance_sampling")
    with patch.object(training_pass, "_run", fails):
        try:
            used = engine.forward_backward("m", data, loss).micro_batching
        except RuntimeError as raised:
            return None, type(raised).__name__, str(raised)
    engine.optim_step("m", ADAM)
    found = engine.state_digest("m")
    engine.create_model("m", "base", LORA)
    engine.forward_backward("m", data, loss, micro_batching=used)
    engine.optim_step("m", ADAM)
    return used, found, engine.state_digest("m")
