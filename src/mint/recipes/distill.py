"""On-policy distillation: the student samples, and a teacher scores every token.

The advantage of a token is log π_teacher − log π_student, so that the policy gradient descends the reverse KL(student ‖
teacher) on the student's own samples ("On-Policy Distillation", Thinking Machines Lab, 2025; GKD, arXiv 2306.13649).
A token's advantage holds nothing of later tokens. An outcome reward gives one number per completion; this gives one per
token.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from pydantic import Field

import mint
from mint import types
from mint.errors import InvalidRequestError
from mint.recipes.supervised import (
    TRAINED_ONLY,
    ConfidenceInterval,
    SupervisedConfig,
    batch_places,
    check_items,
    data_digest,
    run_steps,
)
from mint.rl.estimate import interval
from mint.rl.run_frame import ProgressHook, open_run
from mint.rl.seeds import mix_seed
from mint.rl.tracking.shown_result import ShownResult
from mint.rl.training.datums import policy_datum
from mint.runs.log import DATA_SOURCE

HELDOUT_STREAM = 0x48454C44


class DistillConfig(SupervisedConfig):
    """One run of the student. `learning_rate` suits the bundled model."""

    learning_rate: float = Field(2e-3, ge=0, allow_inf_nan=False)
    group_size: int = Field(4, ge=1, le=1024)
    """Completions per prompt."""
    steps: int = Field(20, ge=0)
    """Training steps; each samples completions of one batch of prompts."""
    max_tokens: int = Field(16, ge=1)
    """The most tokens of a completion."""
    temperature: float = Field(1.0, gt=0, allow_inf_nan=False)
    """The sampling temperature of the student."""


@dataclass(frozen=True)
class DistillResult(ShownResult):
    """`checkpoint` can be trained on, `sampler_checkpoint` sampled from. `before` and `after` are the reverse KL per
    token on held-out prompts, None if there are none; the interval is over prompts."""

    sampler_checkpoint: str
    before: ConfidenceInterval | None
    after: ConfidenceInterval | None


@dataclass(frozen=True)
class ScoredCompletion:
    """One completion of the student with T tokens, and their logprobs [T] under the student and the teacher."""

    prompt: list[int]
    tokens: list[int]
    student: np.ndarray
    teacher: np.ndarray

    @property
    def reverse_kl(self) -> np.ndarray:
        """log π_student − log π_teacher of each token [T]; its mean estimates the reverse KL."""
        return self.student - self.teacher


def run_distill(
    prompts: Sequence[list[int]],
    heldout: Sequence[list[int]],
    teacher: mint.SamplingClient,
    config: DistillConfig,
    *,
    service_client: mint.ServiceClient | None = None,
    resume: bool = False,
    on_progress: ProgressHook | None = None,
    data_source: Mapping[str, Any] | None = None,
) -> DistillResult:
    """Moves the student towards `teacher` on its own completions of `prompts` (token ids).

    `resume` continues the run in `config.run_dir` from its last checkpoint, to the same bits as without a break. The
    teacher must be the same checkpoint or base model; a teacher that was not saved by name counts as its base model.
    `data_source` says in `config.json` how `mint train` makes the data again.

    Raises:
        InvalidRequestError: there are no prompts, the teacher has another tokenizer, or `run_dir` holds another run.
    """
    for name, items in (("prompts", prompts), ("heldout", heldout)):
        check_items(items, list, field=name, remedy="Give each prompt as a list of token ids")
    if not prompts:
        raise InvalidRequestError("is empty", field="prompts", value=[], remedy="Give at least one")
    described = {
        "task": "distill",
        "data": data_digest(prompts, heldout),
        DATA_SOURCE: data_source,
        "teacher": teacher.get_model_path() or teacher.get_base_model(),
    }
    with open_run(
        config, service_client, name="distill", described=described, resume=resume, on_progress=on_progress
    ) as run:
        trainer = run.trainer
        check_tokenizers(trainer, teacher)

        def evaluate_now() -> Mapping[str, ConfidenceInterval]:
            return evaluate(trainer, teacher, heldout, config)

        def train_step(step: int) -> Mapping[str, float]:
            sampler = trainer.save_weights_and_get_sampling_client()
            batch = [prompts[place] for place in batch_places(len(prompts), config.batch_size, step, config.seed)]
            seeds = [mix_seed(config.seed, step, place) for place in range(len(batch))]
            scored = score(sampler, teacher, batch, config, seeds=seeds)
            data = [
                policy_datum(each.prompt, each.tokens, logprobs_T=each.student.tolist(), advantages_T=-each.reverse_kl)
                for each in scored
            ]
            passed = trainer.forward_backward(data, "importance_sampling", TRAINED_ONLY)
            stepped = trainer.optim_step(config.adam_params(step, config.steps))
            return {
                "train/reverse_kl": float(np.concatenate([each.reverse_kl for each in scored]).mean()),
                "train/loss": passed.result().metrics["loss:sum"],
                "optim/grad_norm": stepped.result().metrics["grad_norm"],
            }

        trained = run_steps(run, config.steps, train_step, evaluate_now, heldout=len(heldout))
        return DistillResult(
            run_dir=trained.run_dir,
            checkpoint=trained.checkpoint,
            sampler_checkpoint=trained.sampler_checkpoint,
            before=trained.before.get("reverse_kl"),
            after=trained.after.get("reverse_kl"),
        )


def score(
    student: mint.SamplingClient,
    teacher: mint.SamplingClient,
    prompts: Sequence[list[int]],
    config: DistillConfig,
    *,
    seeds: Sequence[int],
) -> list[ScoredCompletion]:
    """`group_size` completions of the student for each prompt, with the teacher's logprobs of the same tokens."""
    futures = [
        student.sample(
            types.ModelInput.from_ints(prompt),
            config.group_size,
            types.SamplingParams(max_tokens=config.max_tokens, temperature=config.temperature, seed=seed),
        )
        for prompt, seed in zip(prompts, seeds, strict=True)
    ]
    completions = [
        (prompt, sequence)
        for prompt, future in zip(prompts, futures, strict=True)
        for sequence in future.result().sequences
    ]
    scores = [
        teacher.compute_logprobs(types.ModelInput.from_ints([*prompt, *sequence.tokens]))
        for prompt, sequence in completions
    ]
    return [
        ScoredCompletion(
            prompt,
            sequence.tokens,
            np.asarray(sequence.logprobs),
            np.asarray(future.result()[len(prompt) :], dtype=np.float64),
        )
        for (prompt, sequence), future in zip(completions, scores, strict=True)
    ]


def evaluate(
    trainer: mint.TrainingClient, teacher: mint.SamplingClient, heldout: Sequence[list[int]], config: DistillConfig
) -> dict[str, ConfidenceInterval]:
    """The reverse KL per token over held-out prompts, always from the same seeds."""
    sampler = trainer.save_weights_and_get_sampling_client()
    seeds = [mix_seed(config.seed, HELDOUT_STREAM, place) for place in range(len(heldout))]
    scored = score(sampler, teacher, heldout, config, seeds=seeds)
    per_prompt = [scored[at : at + config.group_size] for at in range(0, len(scored), config.group_size)]
    means = [float(np.concatenate([each.reverse_kl for each in group]).mean()) for group in per_prompt]
    return {"reverse_kl": interval(means)}


def check_tokenizers(trainer: mint.TrainingClient, teacher: mint.SamplingClient) -> None:
    """Refuses a teacher whose token ids mean something else.

    Raises:
        InvalidRequestError: the vocabularies differ.
    """
    if trainer.get_tokenizer().get_vocab() != teacher.get_tokenizer().get_vocab():
        raise InvalidRequestError(
            "has another tokenizer than the student",
            field="teacher",
            value=teacher.get_base_model(),
            remedy="Take a teacher of the same family",
        )
