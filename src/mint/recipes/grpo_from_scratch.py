"""GRPO in one file over the SDK alone, with nothing of `mint.rl`. Copy it and bend it.

    python -m mint.recipes.grpo_from_scratch

Sample a group per prompt, score, centre the rewards within the group, one importance-sampling step; again. `mint.rl`
does the same and adds what this leaves out: held-out readings, checkpoints, a run log, findings, failing graders.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

import mint
from mint import types
from mint.recipes.data.arithmetic import Problem, draw_problems


@dataclass(frozen=True)
class Config:
    """The parameter table of the RL overview; the learning rate suits the bundled model."""

    base_model: str = "mint/tiny"
    rank: int = 16
    steps: int = 20
    batch_size: int = 32
    group_size: int = 8
    max_tokens: int = 8
    temperature: float = 1.0
    learning_rate: float = 3e-3
    seed: int = 0


def reward(response: str, problem: Problem) -> float:
    """1 for the answer and nothing else."""
    return float(response.strip() == problem.answer)


def train(
    problems: Sequence[Problem],
    config: Config,
    *,
    service_client: mint.ServiceClient,
    on_step: Callable[[int, float], None] = lambda step, mean_reward: None,
) -> mint.TrainingClient:
    """The loop. `on_step` is told each step's number and mean reward; returns the trained model."""
    trainer = service_client.create_lora_training_client(config.base_model, rank=config.rank, seed=config.seed)
    tokenizer = trainer.get_tokenizer()
    adam = types.AdamParams(learning_rate=config.learning_rate)
    for step, batch in enumerate(batches(problems, config), start=1):
        # 1. Sample from the current policy, all prompts in flight at once.
        sampler = trainer.save_weights_and_get_sampling_client(name=f"rl-step-{step - 1}")
        prompts = [tokenizer.encode(problem.question) for problem in batch]
        futures = [
            sampler.sample(
                prompt=types.ModelInput.from_ints(prompt),
                num_samples=config.group_size,
                sampling_params=types.SamplingParams(
                    max_tokens=config.max_tokens,
                    temperature=config.temperature,
                    seed=config.seed + step * config.batch_size + place,
                ),
            )
            for place, prompt in enumerate(prompts)
        ]
        # 2. Score each group, and centre its rewards: what is above the mean becomes likelier.
        datums, rewards = [], []
        for problem, prompt, future in zip(batch, prompts, futures, strict=True):
            sequences = future.result().sequences
            texts = [tokenizer.decode(sequence.tokens, skip_special_tokens=True) for sequence in sequences]
            rewards_G = np.array([reward(text, problem) for text in texts])
            rewards.append(rewards_G)
            if rewards_G.std() > 0:  # equal rewards say nothing
                advantages = rewards_G - rewards_G.mean()
                datums += [datum(prompt, *pair) for pair in zip(sequences, advantages.tolist(), strict=True)]
        # 3. One step of importance sampling; the two requests are sent before either is waited for.
        if datums:
            passed = trainer.forward_backward(datums, loss_fn="importance_sampling")
            stepped = trainer.optim_step(adam)
            passed.result()
            stepped.result()
        on_step(step, float(np.mean(rewards)))
    return trainer


def datum(prompt: Sequence[int], sequence: types.SampledSequence, advantage: float) -> types.Datum:
    """Position t predicts token t + 1; the prompt has weight, logprob and advantage 0."""
    full, said = [*prompt, *sequence.tokens], len(sequence.tokens)
    prefix = [0.0] * (len(prompt) - 1)
    return types.Datum(
        model_input=types.ModelInput.from_ints(full[:-1]),
        loss_fn_inputs={
            "target_tokens": full[1:],
            "weights": [*prefix, *[1.0] * said],
            "logprobs": [*prefix, *sequence.logprobs],
            "advantages": [*prefix, *[advantage] * said],
        },
    )


def batches(problems: Sequence[Problem], config: Config) -> Iterator[list[Problem]]:
    """`steps` batches, drawn without repetition within each."""
    generator = np.random.default_rng(config.seed)
    for _ in range(config.steps):
        yield [problems[place] for place in generator.permutation(len(problems))[: config.batch_size]]


def main() -> None:
    """Arithmetic on the bundled model."""
    from rich.console import Console  # deferred: only the command prints

    console = Console()
    with mint.ServiceClient() as service:
        train(
            draw_problems(0, 8192, heldout=False),
            Config(),
            service_client=service,
            on_step=lambda step, mean: console.print(f"step {step:2d}   mean reward {mean:.3f}"),
        )


if __name__ == "__main__":
    main()
