"""The two training loops that `mint chaos` runs: one supervised, one GRPO, with every kind of operation in them.

They hold no code for faults of the server. They resume after the death of their own process, as a user's program does:
the supervised one from the path of its last saved state, the other one with `run_grpo(..., resume=True)`.
"""

from __future__ import annotations

import json
import time
import zlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from mint.client.futures import APIFuture
from mint.client.service_client import ServiceClient
from mint.client.training_client import TrainingClient
from mint.errors import ConnectionLostError, JournalError
from mint.rl.adapter import RLAdapter
from mint.rl.config import RLConfig
from mint.rl.loop import run_grpo
from mint.types import AdamParams, Datum, ForwardBackwardOutput, ModelInput, SamplingParams

BASE = "mint/tiny"
RANK = 4
STEPS = 4
TRANSFER_PAUSE_S = 0.05

Record = Callable[[str, Any], None]
"""Notes a value of the run by its name. A name comes again, with the same value, if a program does a step again."""


def supervised(client: ServiceClient, folder: Path, record: Record) -> None:
    """Steps on made-up sentences, each saved; then everything that is done with checkpoints."""
    saved = _read_saved(folder)
    if saved:
        training = client.create_training_client_from_state_with_optimizer(saved[-1])
    else:
        training = client.create_lora_training_client(BASE, rank=RANK, seed=1)
    for step in range(len(saved), STEPS):
        saved.append(_supervised_step(client, training, step, record))
        _write_saved(folder, saved)
    training.load_state_with_optimizer(saved[1]).result()
    record("loaded", _step(training, STEPS))
    training.load_state(saved[2]).result()
    record("loaded without optimizer", _step(training, STEPS))
    _move_checkpoints(client, training, saved, folder, record)


def _supervised_step(client: ServiceClient, training: TrainingClient, step: int, record: Record) -> str:
    """One step, pipelined; the path of the state it led to."""
    first = training.forward_backward(_data(step), "cross_entropy")
    second = training.forward_backward(_data(step + 100), "cross_entropy")
    stepped = training.optim_step(AdamParams(learning_rate=1e-3))
    looked = training.forward(_data(step), "cross_entropy")
    state = training.save_state(f"step-{step}")
    weights = training.save_weights_for_sampler(f"weights-{step}")
    record(f"losses {step}", [_metrics(passed) for passed in (first, second, looked)])
    record(f"logprobs {step}", [row["logprobs"].tolist() for row in looked.result().loss_fn_outputs])
    record(f"digest {step}", stepped.result().state_digest)
    sampler = client.create_sampling_client(model_path=weights.result().path)
    params = SamplingParams(max_tokens=6, temperature=1.0, seed=step)
    sampled = sampler.sample(ModelInput.from_ints([5, 6, 7 + step]), 2, params)
    prompt = sampler.compute_logprobs(ModelInput.from_ints([5, 6, 7 + step]))
    record(f"samples {step}", [[sequence.tokens, sequence.logprobs] for sequence in sampled.result().sequences])
    record(f"prompt {step}", prompt.result())
    return state.result().path


def _metrics(passed: APIFuture[ForwardBackwardOutput]) -> dict[str, float]:
    """The metrics, without the count of tries for want of memory."""
    return {name: value for name, value in passed.result().metrics.items() if name != "memory_retries:sum"}


def _step(training: TrainingClient, step: int) -> str | None:
    training.forward_backward(_data(step), "cross_entropy")
    return training.optim_step(AdamParams(learning_rate=1e-3)).result().state_digest


def _move_checkpoints(
    client: ServiceClient, training: TrainingClient, saved: Sequence[str], folder: Path, record: Record
) -> None:
    """Exports, downloads, uploads, overwrites and deletes."""
    rest = client.create_rest_client()
    training.save_weights_external("external").result()
    training.save_state("last").result()
    last = training.save_state("last", overwrite=True).result().path
    archive = _transfer(lambda: rest.download_checkpoint(saved[-1], folder / "state.tar.gz").result())
    uploaded = _transfer(lambda: rest.upload_checkpoint(archive, name="again").result()).path
    other = client.create_training_client_from_state_with_optimizer(uploaded)
    record("uploaded", _step(other, STEPS + 1))
    rest.delete_checkpoint_from_tinker_path(last).result()
    record("checkpoints", sorted(checkpoint.checkpoint_id for checkpoint in training.get_checkpoint_metadata())[:1])


def _transfer(transfer: Callable[[], Any]) -> Any:
    """Repeats a transfer of a file until it succeeds.

    The SDK does not repeat it, because it does not keep the bytes; a user's program must. A transfer fails if the
    server dies, and while the server has no disk space or no file descriptor.
    """
    while True:
        try:
            return transfer()
        except (ConnectionLostError, JournalError):
            time.sleep(TRANSFER_PAUSE_S)


class Parity(RLAdapter):
    """Rewards completions by their letters, so that groups differ."""

    def build_dataset(self) -> list[int]:
        return list(range(8))

    def make_prompt(self, item: int, tokenizer: Any) -> list[int]:
        return [5, 6, 7 + item]

    def compute_reward(self, response: str, item: int) -> float:
        return (zlib.crc32(response.encode()) % 5) / 4


def grpo(client: ServiceClient, folder: Path, record: Record) -> None:
    """A run of `mint.rl`, saved after every step."""
    config = RLConfig(
        base_model=BASE,
        rank=RANK,
        seed=3,
        steps=STEPS,
        batch_size=2,
        group_size=4,
        max_tokens=6,
        temperature=1.0,
        learning_rate=1e-3,
        save_every=1,
        run_dir=folder / "run",
    )
    result = run_grpo(Parity(), config, service_client=client, resume=True)
    rows = [json.loads(line) for line in (folder / "run" / "rollouts.jsonl").read_text().splitlines()]
    record("rollouts", [[row.get(name) for name in ("step", "tokens", "logprobs", "reward")] for row in rows])
    record("digest", result.state_digest)
    record("totals", [result.steps, result.samples, result.tokens])


WORKLOADS: dict[str, Callable[[ServiceClient, Path, Record], None]] = {"sft": supervised, "grpo": grpo}


def _data(step: int) -> list[Datum]:
    def sentence(start: int, length: int) -> Datum:
        tokens = [(start + 31 * place) % 1000 + 3 for place in range(length + 1)]
        return Datum(model_input=ModelInput.from_ints(tokens[:-1]), loss_fn_inputs={"target_tokens": tokens[1:]})

    return [sentence(17 * step, 12), sentence(19 * step + 5, 7)]


def _read_saved(folder: Path) -> list[str]:
    file = folder / "saved.json"
    return json.loads(file.read_text()) if file.exists() else []


def _write_saved(folder: Path, paths: Sequence[str]) -> None:
    fresh = folder / "saved.json.new"
    fresh.write_text(json.dumps(paths))
    fresh.rename(folder / "saved.json")
