"""Direct preference optimisation (Rafailov 2023, arXiv 2305.18290): when replies can be compared but not scored.

loss = −log σ(β · [(log π(c) − log π_ref(c)) − (log π(r) − log π_ref(r))]), c chosen, r rejected, π_ref the weights at
the start. Computed here, through `forward_backward_custom`; the server knows only its gradient.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import mint
from mint import types
from mint.recipes.data.demonstrations import batch_places, check_disjoint, completion_datum, reply_ids
from mint.rl.estimate import interval
from mint.runs.log import RunLog
from mint.runs.process import recorded_process


@dataclass(frozen=True)
class DPOConfig:
    """One run. `beta` weighs the pull back to the reference; `learning_rate` suits the bundled model."""

    run_dir: Path
    base_model: str = "mint/tiny"
    rank: int = 16
    learning_rate: float = 5e-4
    beta: float = 0.1
    batch_size: int = 16
    epochs: int = 1
    save_every: int = 50
    seed: int = 0
    init_from: str | None = None


@dataclass(frozen=True)
class Preference:
    """A prompt as token ids, the better reply and the worse."""

    prompt: list[int]
    chosen: str
    rejected: str


@dataclass(frozen=True)
class PairReading:
    """On held-out pairs: `loss` (log 2 at the start), `accuracy` (share of pairs whose chosen reply the policy finds
    the likelier), each as (mean, low, high) with 95 % intervals over `n` pairs."""

    loss: tuple[float, float, float]
    accuracy: tuple[float, float, float]
    n: int


@dataclass(frozen=True)
class DPOResult:
    """`checkpoint` can be trained on, `sampler_checkpoint` sampled from."""

    checkpoint: str
    sampler_checkpoint: str
    before: PairReading
    after: PairReading


def run_dpo(
    preferences: Sequence[Preference],
    heldout: Sequence[Preference],
    config: DPOConfig,
    *,
    service_client: mint.ServiceClient | None = None,
) -> DPOResult:
    """Trains on `preferences`, reads `heldout` before and after; every step is a line of `metrics.jsonl`.

    Raises:
        InvalidRequestError: there is nothing to train on, or a prompt is both trained on and held out.
    """
    if service_client is None:
        with mint.ServiceClient() as owned:
            return run_dpo(preferences, heldout, config, service_client=owned)
    check_disjoint(preferences, heldout)
    log = RunLog(config.run_dir)
    log.start({**asdict(config), "task": "dpo", "preferences": len(preferences)}, resume=False)
    with recorded_process(log.folder):
        return _train(preferences, heldout, config, service_client, log)


def _train(
    preferences: Sequence[Preference],
    heldout: Sequence[Preference],
    config: DPOConfig,
    service_client: mint.ServiceClient,
    log: RunLog,
) -> DPOResult:
    if config.init_from is not None:
        trainer = service_client.create_training_client_from_state(config.init_from)
    else:
        trainer = service_client.create_lora_training_client(config.base_model, rank=config.rank, seed=config.seed)
    tokenizer = trainer.get_tokenizer()
    data, closed = pair_datums(preferences, tokenizer), pair_datums(heldout, tokenizer)
    reference, closed_reference = reply_logprobs(trainer, data), reply_logprobs(trainer, closed)

    before = read_pairs(trainer, closed, closed_reference, config.beta)
    log.append("evaluations.jsonl", {"step": 0, "when": "before", **asdict(before)})
    steps = config.epochs * -(-len(preferences) // config.batch_size)
    for step in range(1, steps + 1):
        places = batch_places(len(preferences), config.batch_size, step, config.seed)
        rows = [row for place in places for row in (2 * place, 2 * place + 1)]
        loss = preference_loss([reference[row] for row in rows], config.beta)
        passed = trainer.forward_backward_custom([data[row] for row in rows], loss)
        stepped = trainer.optim_step(types.AdamParams(learning_rate=config.learning_rate, grad_clip_norm=1.0))
        metrics = {f"train/{name}": passed.result().metrics[name] for name in ("pair_loss", "pair_accuracy", "margin")}
        log.append("metrics.jsonl", {"step": step, **metrics, "optim/grad_norm": stepped.result().metrics["grad_norm"]})
        if step % config.save_every == 0 and step < steps:
            trainer.save_state(f"dpo-{step:06d}", overwrite=True).result()
    after = read_pairs(trainer, closed, closed_reference, config.beta)
    log.append("evaluations.jsonl", {"step": steps, "when": "after", **asdict(after)})
    checkpoint = trainer.save_state("dpo-final", overwrite=True).result().path
    sampler_checkpoint = trainer.save_weights_for_sampler("dpo-final").result().path or ""
    return DPOResult(checkpoint, sampler_checkpoint, before, after)


def preference_loss(reference: Sequence[float], beta: float) -> Any:
    """The loss for `forward_backward_custom`, summed over pairs; rows are chosen, rejected, chosen, rejected, …

    `reference` holds log π_ref of each row's reply. The rows of logprobs are torch tensors, one number per target.
    """

    def loss(data: list[types.Datum], logprobs: list[Any]) -> tuple[Any, dict[str, float]]:
        policy = [
            (row * datum.loss_fn_inputs["weights"].to_torch()).sum() for row, datum in zip(logprobs, data, strict=True)
        ]
        gains = [ours - theirs for ours, theirs in zip(policy, reference, strict=True)]
        margins = [beta * (chosen - rejected) for chosen, rejected in zip(gains[::2], gains[1::2], strict=True)]
        # log(1 + exp(−m)), in the form that does not overflow
        losses = [(-margin).logaddexp(0 * margin) for margin in margins]
        preferred = [chosen > rejected for chosen, rejected in zip(policy[::2], policy[1::2], strict=True)]
        count = len(margins)
        metrics = {
            "pair_loss": float(sum(losses).detach()) / count,
            "pair_accuracy": sum(map(bool, preferred)) / count,
            "margin": float(sum(margins).detach()) / count,
        }
        return sum(losses), metrics

    return loss


def pair_datums(preferences: Sequence[Preference], tokenizer: Any) -> list[types.Datum]:
    """Two datums per pair, the chosen reply first."""
    replies = [(each.prompt, reply) for each in preferences for reply in (each.chosen, each.rejected)]
    return [completion_datum(prompt, reply_ids(reply, tokenizer)) for prompt, reply in replies]


def reply_logprobs(trainer: mint.TrainingClient, data: list[types.Datum]) -> list[float]:
    """log π of each datum's reply under the weights as they are now."""
    if not data:
        return []
    outputs = trainer.forward(data, "cross_entropy").result().loss_fn_outputs
    weights = [datum.loss_fn_inputs["weights"].to_numpy() for datum in data]
    return [float(out["logprobs"].to_numpy() @ weight) for out, weight in zip(outputs, weights, strict=True)]


def read_pairs(
    trainer: mint.TrainingClient, data: list[types.Datum], reference: Sequence[float], beta: float
) -> PairReading:
    """Loss and accuracy on held-out pairs."""
    policy = reply_logprobs(trainer, data)
    gains = [ours - theirs for ours, theirs in zip(policy, reference, strict=True)]
    margins = [beta * (chosen - rejected) for chosen, rejected in zip(gains[::2], gains[1::2], strict=True)]
    losses = [max(-margin, 0.0) + math.log1p(math.exp(-abs(margin))) for margin in margins]
    right = [float(chosen > rejected) for chosen, rejected in zip(policy[::2], policy[1::2], strict=True)]
    return PairReading(interval(losses), interval(right), len(right))
