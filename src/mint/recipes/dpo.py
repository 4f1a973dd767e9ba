"""Direct preference optimisation (Rafailov 2023, arXiv 2305.18290): for replies that can be compared but not scored.

loss = −log σ(β · [(log π(c) − log π_ref(c)) − (log π(r) − log π_ref(r))]), c chosen, r rejected, π_ref the weights at
the start. The loss is computed here and sent by `forward_backward_custom`; the server sees only its gradient.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pydantic import Field

import mint
from mint import types
from mint.recipes.supervised import (
    TRAINED_ONLY,
    ConfidenceInterval,
    SupervisedConfig,
    SupervisedResult,
    batch_places,
    check_disjoint,
    completion_datum,
    data_digest,
    reply_ids,
    run_steps,
    steps_per_epoch,
)
from mint.rl.estimate import interval
from mint.rl.run_frame import ProgressHook, make_trainer, open_run
from mint.runs.log import DATA_SOURCE


class DPOConfig(SupervisedConfig):
    """One run. `beta` weighs the pull towards the reference; `learning_rate` suits the bundled model."""

    learning_rate: float = Field(5e-4, ge=0, allow_inf_nan=False)
    beta: float = Field(0.1, gt=0, allow_inf_nan=False)
    """How strongly the policy is held to the reference, the weights at the start: β of the loss."""
    epochs: int = Field(1, ge=1)
    """How often the pairs are trained on."""


@dataclass(frozen=True)
class Preference:
    """A prompt as token ids, the better reply and the worse."""

    prompt: list[int]
    chosen: str
    rejected: str


@dataclass(frozen=True)
class DPOResult(SupervisedResult):
    """Of `before` and `after`, `loss` is that of a pair (log 2 at the start), and `accuracy` is the share of pairs
    whose chosen reply is the more likely one."""


def run_dpo(
    preferences: Sequence[Preference],
    heldout: Sequence[Preference],
    config: DPOConfig,
    *,
    service_client: mint.ServiceClient | None = None,
    resume: bool = False,
    on_progress: ProgressHook | None = None,
    data_source: Mapping[str, Any] | None = None,
) -> DPOResult:
    """Trains on `preferences` and evaluates on `heldout` before and after.

    `resume` continues the run in `config.run_dir` from its last checkpoint, to the same bits as without a break.
    `data_source` says in `config.json` how `mint train` makes the data again.

    Raises:
        InvalidRequestError: there is nothing to train on, an item is not a `Preference`, a prompt is both trained on
            and held out, or `run_dir` holds another run.
    """
    check_disjoint(preferences, heldout, Preference)
    steps = config.epochs * steps_per_epoch(len(preferences), config.batch_size)
    described = {"task": "dpo", "steps": steps, "data": data_digest(preferences, heldout), DATA_SOURCE: data_source}
    with open_run(
        config, service_client, name="dpo", described=described, resume=resume, on_progress=on_progress
    ) as run:
        trainer = run.trainer
        tokenizer = trainer.get_tokenizer()
        data = pair_datums(preferences, tokenizer)
        heldout_data = pair_datums(heldout, tokenizer)
        # The weights at the start: those of the trainer, unless it resumes from later ones.
        start = trainer if run.point is None else make_trainer(run.service, config, None)
        reference = reply_logprobs(start, data)
        heldout_reference = reply_logprobs(start, heldout_data)

        def evaluate_now() -> Mapping[str, ConfidenceInterval]:
            return evaluate(trainer, heldout_data, heldout_reference, config)

        def train_step(step: int) -> Mapping[str, float]:
            places = batch_places(len(preferences), config.batch_size, step, config.seed)
            rows = [row for place in places for row in (2 * place, 2 * place + 1)]
            loss = preference_loss([reference[row] for row in rows], config.beta)
            passed = trainer.forward_backward_custom([data[row] for row in rows], loss, trained_only=True)
            stepped = trainer.optim_step(config.adam_params(step, steps))
            metrics = passed.result().metrics
            return {
                "train/pair_loss": metrics["pair_loss"],
                "train/pair_accuracy": metrics["pair_accuracy"],
                "train/margin": metrics["margin"],
                "optim/grad_norm": stepped.result().metrics["grad_norm"],
            }

        trained = run_steps(run, steps, train_step, evaluate_now, heldout=len(heldout))
        return DPOResult.of(trained, len(heldout))


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
    """log π of each datum's reply under the trainer's present weights."""
    if not data:
        return []
    outputs = trainer.forward(data, "cross_entropy", TRAINED_ONLY).result().loss_fn_outputs
    weights = [datum.loss_fn_inputs["weights"].to_numpy() for datum in data]
    return [float(out["logprobs"].to_numpy() @ weight) for out, weight in zip(outputs, weights, strict=True)]


def evaluate(
    trainer: mint.TrainingClient, data: list[types.Datum], reference: Sequence[float], config: DPOConfig
) -> dict[str, ConfidenceInterval]:
    """Loss and accuracy on held-out pairs."""
    policy = reply_logprobs(trainer, data)
    gains = [ours - theirs for ours, theirs in zip(policy, reference, strict=True)]
    margins = [config.beta * (chosen - rejected) for chosen, rejected in zip(gains[::2], gains[1::2], strict=True)]
    losses = [max(-margin, 0.0) + math.log1p(math.exp(-abs(margin))) for margin in margins]
    right = [float(chosen > rejected) for chosen, rejected in zip(policy[::2], policy[1::2], strict=True)]
    return {"loss": interval(losses), "accuracy": interval(right, proportion=True)}
