"""Samples groups of completions and grades them. Tokens in, tokens out: what was sampled is never re-tokenised.

Letters: P prompt tokens · T completion tokens · G samples of one prompt.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from mint.client.sampling_client import SamplingClient
from mint.errors import MintError
from mint.rl.adapter import RLAdapter
from mint.rl.grading import Grade, Grader
from mint.types import ModelInput, SampledSequence, SamplingParams


@dataclass(frozen=True)
class Rollout:
    """One completion: ids [T], the sampler's logprobs [T] (temperature 1), its text, and its reward or why not."""

    tokens: list[int]
    logprobs: list[float]
    text: str
    truncated: bool
    reward: float | None
    error: str | None = None


@dataclass(frozen=True)
class Group:
    """The completions of one prompt; `error` where sampling itself failed, and then there are none."""

    sample: Any
    prompt: list[int] = field(repr=False)
    rollouts: list[Rollout]
    error: str | None = None

    @property
    def graded(self) -> list[Rollout]:
        """The rollouts that have a reward and at least one token."""
        return [rollout for rollout in self.rollouts if rollout.reward is not None and rollout.tokens]

    @property
    def rewards(self) -> list[float]:
        """The rewards of `graded`."""
        return [rollout.reward for rollout in self.graded if rollout.reward is not None]


def roll_out(
    sampler: SamplingClient,
    adapter: RLAdapter,
    samples: Sequence[Any],
    *,
    tokenizer: Any,
    grader: Grader,
    num_samples: int,
    params: Sequence[SamplingParams],
) -> list[Group]:
    """`num_samples` completions of each sample, all prompts in flight at once; `params[i]` belongs to `samples[i]`.

    A prompt that cannot be sampled becomes a group with an `error`; the others go on.
    """
    prompts = [list(adapter.make_prompt(sample, tokenizer)) for sample in samples]
    futures = [
        sampler.sample(ModelInput.from_ints(prompt), num_samples, how)
        for prompt, how in zip(prompts, params, strict=True)
    ]
    groups = []
    for sample, prompt, future in zip(samples, prompts, futures, strict=True):
        try:
            sequences = future.result().sequences
        except MintError as error:
            groups.append(Group(sample, prompt, [], error=str(error)))
            continue
        groups.append(Group(sample, prompt, _grade(sequences, sample, adapter, tokenizer, grader)))
    return groups


def _grade(
    sequences: list[SampledSequence], sample: Any, adapter: RLAdapter, tokenizer: Any, grader: Grader
) -> list[Rollout]:
    texts = [tokenizer.decode(sequence.tokens, skip_special_tokens=True) for sequence in sequences]
    grades = grader.grade([_reward_call(adapter, text, sample) for text in texts])
    return [_rollout(sequence, text, grade) for sequence, text, grade in zip(sequences, texts, grades, strict=True)]


def _reward_call(adapter: RLAdapter, text: str, sample: Any) -> Any:
    return lambda: adapter.compute_reward(text, sample)


def _rollout(sequence: SampledSequence, text: str, grade: Grade) -> Rollout:
    return Rollout(
        tokens=sequence.tokens,
        logprobs=sequence.logprobs,
        text=text,
        truncated=sequence.stop_reason == "length",
        reward=grade.reward,
        error=grade.error,
    )
