"""Supervised fine-tuning: cross-entropy on demonstrations, for a model that hardly ever succeeds.

Only completions are trained on; prompts have weight 0. `RLConfig(init_from=…)` continues from the checkpoint with RL.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pydantic import Field

import mint
from mint import types
from mint.recipes.supervised import (
    TRAINED_ONLY,
    ConfidenceInterval,
    Demonstration,
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
from mint.rl.run_config import ScheduleName
from mint.rl.run_frame import ProgressHook, open_run
from mint.rl.seeds import mix_seed
from mint.runs.log import DATA_SOURCE


class SFTConfig(SupervisedConfig):
    """One run. `learning_rate` suits the bundled model; a large one wants about 1e-4, ten times that of full
    fine-tuning."""

    learning_rate: float = Field(2e-3, ge=0, allow_inf_nan=False)
    lr_schedule: ScheduleName = "linear"
    epochs: int = Field(2, ge=1)
    """How often the demonstrations are trained on."""
    max_tokens: int = Field(32, ge=1)
    """Tokens of a greedy reply, when accuracy is measured."""


@dataclass(frozen=True)
class SFTResult(SupervisedResult):
    """Of `before` and `after`, `loss` is in nats per completion token, and `accuracy` is the share of greedy replies
    equal to the demonstration."""


def run_sft(
    demonstrations: Sequence[Demonstration],
    heldout: Sequence[Demonstration],
    config: SFTConfig,
    *,
    service_client: mint.ServiceClient | None = None,
    resume: bool = False,
    on_progress: ProgressHook | None = None,
    data_source: Mapping[str, Any] | None = None,
) -> SFTResult:
    """Trains on `demonstrations` and evaluates on `heldout` before and after.

    `resume` continues the run in `config.run_dir` from its last checkpoint, to the same bits as without a break.
    `data_source` says in `config.json` how `mint train` makes the data again.

    Raises:
        InvalidRequestError: there is nothing to train on, an item is not a `Demonstration`, a prompt is both trained on
            and held out, or `run_dir` holds another run.
    """
    check_disjoint(demonstrations, heldout, Demonstration)
    steps = config.epochs * steps_per_epoch(len(demonstrations), config.batch_size)
    described = {"task": "sft", "steps": steps, "data": data_digest(demonstrations, heldout), DATA_SOURCE: data_source}
    with open_run(
        config, service_client, name="sft", described=described, resume=resume, on_progress=on_progress
    ) as run:
        trainer = run.trainer
        tokenizer = trainer.get_tokenizer()
        data = [completion_datum(each.prompt, reply_ids(each.completion, tokenizer)) for each in demonstrations]

        def evaluate_now() -> Mapping[str, ConfidenceInterval]:
            return evaluate(trainer, tokenizer, heldout, config)

        def train_step(step: int) -> Mapping[str, float]:
            batch = [data[place] for place in batch_places(len(data), config.batch_size, step, config.seed)]
            passed = trainer.forward_backward(batch, "cross_entropy", TRAINED_ONLY)
            stepped = trainer.optim_step(config.adam_params(step, steps))
            tokens = sum((float(datum.loss_fn_inputs["weights"].values.sum(dtype=float)) for datum in batch), start=0.0)
            return {
                "train/loss": passed.result().metrics["loss:sum"] / tokens,
                "optim/grad_norm": stepped.result().metrics["grad_norm"],
            }

        trained = run_steps(run, steps, train_step, evaluate_now, heldout=len(heldout))
        return SFTResult.of(trained, len(heldout))


def evaluate(
    trainer: mint.TrainingClient, tokenizer: Any, heldout: Sequence[Demonstration], config: SFTConfig
) -> dict[str, ConfidenceInterval]:
    """Loss and greedy accuracy on the held-out demonstrations."""
    replies = [reply_ids(each.completion, tokenizer) for each in heldout]
    data = [completion_datum(each.prompt, reply) for each, reply in zip(heldout, replies, strict=True)]
    outputs = trainer.forward(data, "cross_entropy", TRAINED_ONLY).result().loss_fn_outputs
    losses = [
        -float(out["logprobs"].to_numpy()[-len(reply) :].mean()) for out, reply in zip(outputs, replies, strict=True)
    ]
    sampler = trainer.save_weights_and_get_sampling_client()
    params = types.SamplingParams(max_tokens=config.max_tokens, temperature=0.0, seed=mix_seed(config.seed))
    samples = [sampler.sample(types.ModelInput.from_ints(each.prompt), 1, params) for each in heldout]
    right = [
        float(sample.result().sequences[0].tokens == reply) for sample, reply in zip(samples, replies, strict=True)
    ]
    return {"loss": interval(losses), "accuracy": interval(right, proportion=True)}
