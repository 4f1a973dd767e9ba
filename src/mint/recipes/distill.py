"""On-policy distillation: the student samples, a teacher marks every token.

The reward of a token is log π_teacher − log π_student, so that the policy gradient descends the reverse KL(student ‖
teacher) on the student's own samples ("On-Policy Distillation", Thinking Machines Lab, 2025; GKD, arXiv 2306.13649).
Each token answers for itself: nothing flows back from later tokens. Dense where an outcome reward gives one number.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

import mint
from mint import types
from mint.recipes.data.demonstrations import batch_places
from mint.rl.estimate import interval
from mint.rl.seeds import mix_seed
from mint.rl.training.datums import policy_datum
from mint.runs.log import RunLog
from mint.runs.process import recorded_process

HELDOUT_STREAM = 0x48454C44


@dataclass(frozen=True)
class DistillConfig:
    """One run of the student. `learning_rate` suits the bundled model."""

    run_dir: Path
    base_model: str = "mint/tiny"
    rank: int = 16
    learning_rate: float = 2e-3
    batch_size: int = 16
    group_size: int = 4
    steps: int = 20
    max_tokens: int = 16
    temperature: float = 1.0
    save_every: int = 50
    seed: int = 0
    init_from: str | None = None


@dataclass(frozen=True)
class DistillResult:
    """Reverse KL per token on held-out prompts, as (mean, low, high) with 95 % intervals over prompts."""

    checkpoint: str
    sampler_checkpoint: str
    before: tuple[float, float, float]
    after: tuple[float, float, float]


@dataclass(frozen=True)
class Marked:
    """One completion of the student, and what the teacher thinks of each of its tokens."""

    prompt: list[int]
    tokens: list[int]
    student: np.ndarray
    teacher: np.ndarray

    @property
    def reverse_kl(self) -> np.ndarray:
        """log π_student − log π_teacher of each token [T]: in the mean the reverse KL."""
        return self.student - self.teacher


def run_distill(
    prompts: Sequence[list[int]],
    heldout: Sequence[list[int]],
    teacher: mint.SamplingClient,
    config: DistillConfig,
    *,
    service_client: mint.ServiceClient | None = None,
) -> DistillResult:
    """Moves the student towards `teacher` on its own replies to `prompts` (token ids).

    Raises:
        InvalidRequestError: there are no prompts, or the teacher has another tokenizer.
    """
    if service_client is None:
        with mint.ServiceClient() as owned:
            return run_distill(prompts, heldout, teacher, config, service_client=owned)
    log = RunLog(config.run_dir)
    log.start({**asdict(config), "task": "distill", "prompts": len(prompts)}, resume=False)
    with recorded_process(log.folder):
        return _train(prompts, heldout, teacher, config, service_client, log)


def _train(
    prompts: Sequence[list[int]],
    heldout: Sequence[list[int]],
    teacher: mint.SamplingClient,
    config: DistillConfig,
    service_client: mint.ServiceClient,
    log: RunLog,
) -> DistillResult:
    if config.init_from is not None:
        trainer = service_client.create_training_client_from_state(config.init_from)
    else:
        trainer = service_client.create_lora_training_client(config.base_model, rank=config.rank, seed=config.seed)
    check_prompts(prompts, trainer, teacher)

    before = read_reverse_kl(trainer, teacher, heldout, config)
    log.append("evaluations.jsonl", {"step": 0, "when": "before", "reverse_kl": before})
    for step in range(1, config.steps + 1):
        sampler = trainer.save_weights_and_get_sampling_client()
        batch = [prompts[place] for place in batch_places(len(prompts), config.batch_size, step, config.seed)]
        marked = mark(
            sampler, teacher, batch, config, seeds=[mix_seed(config.seed, step, at) for at in range(len(batch))]
        )
        data = [
            policy_datum(each.prompt, each.tokens, logprobs_T=each.student.tolist(), advantages_T=-each.reverse_kl)
            for each in marked
        ]
        passed = trainer.forward_backward(data, "importance_sampling")
        stepped = trainer.optim_step(types.AdamParams(learning_rate=config.learning_rate, grad_clip_norm=1.0))
        kl = float(np.concatenate([each.reverse_kl for each in marked]).mean())
        log.append(
            "metrics.jsonl",
            {
                "step": step,
                "train/reverse_kl": kl,
                "train/loss": passed.result().metrics["loss:sum"],
                "optim/grad_norm": stepped.result().metrics["grad_norm"],
            },
        )
        if step % config.save_every == 0 and step < config.steps:
            trainer.save_state(f"distill-{step:06d}", overwrite=True).result()
    after = read_reverse_kl(trainer, teacher, heldout, config)
    log.append("evaluations.jsonl", {"step": config.steps, "when": "after", "reverse_kl": after})
    checkpoint = trainer.save_state("distill-final", overwrite=True).result().path
    sampler_checkpoint = trainer.save_weights_for_sampler("distill-final").result().path or ""
    return DistillResult(checkpoint, sampler_checkpoint, before, after)


def mark(
    student: mint.SamplingClient,
    teacher: mint.SamplingClient,
    prompts: Sequence[list[int]],
    config: DistillConfig,
    *,
    seeds: Sequence[int],
) -> list[Marked]:
    """`group_size` completions of the student for each prompt, with the teacher's logprobs of the same tokens."""
    futures = [
        student.sample(
            types.ModelInput.from_ints(prompt),
            config.group_size,
            types.SamplingParams(max_tokens=config.max_tokens, temperature=config.temperature, seed=seed),
        )
        for prompt, seed in zip(prompts, seeds, strict=True)
    ]
    said = [
        (prompt, sequence)
        for prompt, future in zip(prompts, futures, strict=True)
        for sequence in future.result().sequences
    ]
    marks = [
        teacher.compute_logprobs(types.ModelInput.from_ints([*prompt, *sequence.tokens])) for prompt, sequence in said
    ]
    return [
        Marked(
            prompt,
            sequence.tokens,
            np.asarray(sequence.logprobs),
            np.asarray(future.result()[len(prompt) :], dtype=np.float64),
        )
        for (prompt, sequence), future in zip(said, marks, strict=True)
    ]


def read_reverse_kl(
    trainer: mint.TrainingClient, teacher: mint.SamplingClient, heldout: Sequence[list[int]], config: DistillConfig
) -> tuple[float, float, float]:
    """The mean reverse KL per token over held-out prompts, with its 95 % interval; always the same draws."""
    sampler = trainer.save_weights_and_get_sampling_client()
    seeds = [mix_seed(config.seed, HELDOUT_STREAM, place) for place in range(len(heldout))]
    marked = mark(sampler, teacher, heldout, config, seeds=seeds)
    per_prompt = [marked[at : at + config.group_size] for at in range(0, len(marked), config.group_size)]
    return interval([float(np.concatenate([each.reverse_kl for each in group]).mean()) for group in per_prompt])


def check_prompts(prompts: Sequence[list[int]], trainer: mint.TrainingClient, teacher: mint.SamplingClient) -> None:
    """Refuses an empty training set, and a teacher that reads tokens differently."""
    if not prompts:
        raise mint.errors.InvalidRequestError("is empty", field="prompts", value=[], remedy="Give at least one")
    if trainer.get_tokenizer().get_vocab() != teacher.get_tokenizer().get_vocab():
        raise mint.errors.InvalidRequestError(
            "has another tokenizer than the student",
            field="teacher",
            value=teacher.get_base_model(),
            remedy="Take a teacher of the same family",
        )
