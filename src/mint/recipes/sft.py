"""Supervised fine-tuning: cross-entropy on demonstrations, the first lever where a model hardly ever succeeds.

Only completions are trained on; prompts have weight 0. The checkpoint goes to `RLConfig(init_from=…)`. Knows nothing of
rewards.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import mint
from mint import types
from mint.recipes.data.demonstrations import Demonstration, batch_places, check_disjoint, completion_datum, reply_ids
from mint.rl.estimate import interval
from mint.rl.seeds import mix_seed
from mint.runs.log import RunLog
from mint.runs.process import recorded_process


@dataclass(frozen=True)
class SFTConfig:
    """One run. `learning_rate` suits the bundled model; a large one wants about 10× that of full fine-tuning, 1e-4."""

    run_dir: Path
    base_model: str = "mint/tiny"
    rank: int = 16
    learning_rate: float = 2e-3
    batch_size: int = 16
    epochs: int = 2
    max_tokens: int = 32
    save_every: int = 50
    seed: int = 0
    init_from: str | None = None


@dataclass(frozen=True)
class Reading:
    """Held-out `loss` (nats per completion token) and `accuracy` (greedy replies equal to the demonstration), each as
    (mean, low, high) with 95 % intervals over `n` demonstrations."""

    loss: tuple[float, float, float]
    accuracy: tuple[float, float, float]
    n: int


@dataclass(frozen=True)
class SFTResult:
    """`checkpoint` can be trained on, `sampler_checkpoint` sampled from."""

    checkpoint: str
    sampler_checkpoint: str
    before: Reading
    after: Reading


def run_sft(
    demonstrations: Sequence[Demonstration],
    heldout: Sequence[Demonstration],
    config: SFTConfig,
    *,
    service_client: mint.ServiceClient | None = None,
) -> SFTResult:
    """Trains on `demonstrations`, reads `heldout` before and after; every step is a line of `metrics.jsonl`.

    Raises:
        InvalidRequestError: there is nothing to train on, or a demonstration is both trained on and held out.
    """
    if service_client is None:
        with mint.ServiceClient() as owned:
            return run_sft(demonstrations, heldout, config, service_client=owned)
    check_disjoint(demonstrations, heldout)
    log = RunLog(config.run_dir)
    log.start({**asdict(config), "task": "sft", "demonstrations": len(demonstrations)}, resume=False)
    with recorded_process(log.folder):
        return _train(demonstrations, heldout, config, service_client, log)


def _train(
    demonstrations: Sequence[Demonstration],
    heldout: Sequence[Demonstration],
    config: SFTConfig,
    service_client: mint.ServiceClient,
    log: RunLog,
) -> SFTResult:
    if config.init_from is not None:
        trainer = service_client.create_training_client_from_state(config.init_from)
    else:
        trainer = service_client.create_lora_training_client(config.base_model, rank=config.rank, seed=config.seed)
    tokenizer = trainer.get_tokenizer()
    data = [completion_datum(each.prompt, reply_ids(each.completion, tokenizer)) for each in demonstrations]

    before = read_heldout(trainer, tokenizer, heldout, config)
    log.append("evaluations.jsonl", {"step": 0, "when": "before", **asdict(before)})
    steps = config.epochs * -(-len(data) // config.batch_size)
    for step in range(1, steps + 1):
        batch = [data[place] for place in batch_places(len(data), config.batch_size, step, config.seed)]
        passed = trainer.forward_backward(batch, "cross_entropy")
        stepped = trainer.optim_step(
            types.AdamParams(learning_rate=config.learning_rate * (1 - (step - 1) / steps), grad_clip_norm=1.0)
        )
        tokens = sum((float(datum.loss_fn_inputs["weights"].values.sum(dtype=float)) for datum in batch), start=0.0)
        loss = passed.result().metrics["loss:sum"] / tokens
        log.append(
            "metrics.jsonl",
            {"step": step, "train/loss": loss, "optim/grad_norm": stepped.result().metrics["grad_norm"]},
        )
        if step % config.save_every == 0 and step < steps:
            trainer.save_state(f"sft-{step:06d}", overwrite=True).result()
    after = read_heldout(trainer, tokenizer, heldout, config)
    log.append("evaluations.jsonl", {"step": steps, "when": "after", **asdict(after)})
    checkpoint = trainer.save_state("sft-final", overwrite=True).result().path
    sampler_checkpoint = trainer.save_weights_for_sampler("sft-final").result().path or ""
    return SFTResult(checkpoint, sampler_checkpoint, before, after)


def read_heldout(
    trainer: mint.TrainingClient, tokenizer: Any, heldout: Sequence[Demonstration], config: SFTConfig
) -> Reading:
    """Loss and greedy accuracy on the held-out demonstrations."""
    if not heldout:
        return Reading((0.0, 0.0, 0.0), (0.0, 0.0, 1.0), 0)
    replies = [reply_ids(each.completion, tokenizer) for each in heldout]
    data = [completion_datum(each.prompt, reply) for each, reply in zip(heldout, replies, strict=True)]
    outputs = trainer.forward(data, "cross_entropy").result().loss_fn_outputs
    losses = [
        -float(out["logprobs"].to_numpy()[-len(reply) :].mean()) for out, reply in zip(outputs, replies, strict=True)
    ]
    sampler = trainer.save_weights_and_get_sampling_client()
    params = types.SamplingParams(max_tokens=config.max_tokens, temperature=0.0, seed=mix_seed(config.seed))
    samples = [sampler.sample(types.ModelInput.from_ints(each.prompt), 1, params) for each in heldout]
    right = [
        float(sample.result().sequences[0].tokens == reply) for sample, reply in zip(samples, replies, strict=True)
    ]
    return Reading(interval(losses), interval(right), len(heldout))
