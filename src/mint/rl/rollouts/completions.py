"""Samples groups of rollouts and grades them, through whichever door the task has. Tokens in, tokens out.

Letters: P prompt tokens · T sampled tokens · G samples of one prompt.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from mint.client.sampling_client import SamplingClient
from mint.errors import InvalidRequestError, MintError
from mint.rl.adapter import MessageEnvAdapter, RLAdapter, Task
from mint.rl.call_pool import CallPool
from mint.rl.config import RLConfig
from mint.rl.rollout import Group, Rollout, Turn
from mint.rl.rollouts.episodes import EpisodeLimits, roll_out_episodes
from mint.rl.rollouts.grading import Grade, grade_completions, grade_single
from mint.types import ModelInput, SampledSequence


def collect_groups(
    sampler: SamplingClient,
    task: Task,
    samples: Sequence[Any],
    items: Sequence[int],
    *,
    config: RLConfig,
    tokenizer: Any,
    calls: CallPool,
    num_samples: int,
    seeds: Sequence[int],
    temperature: float,
    policy_step: int = 0,
    alone: bool = False,
) -> list[Group]:
    """`num_samples` graded rollouts of each sample, all prompts in flight at once; `seeds[i]` belongs to `samples[i]`.

    `items` are the samples' places in the dataset. With `alone` no group judge is asked. A prompt that cannot be made
    or sampled becomes a group with an `error`; the others go on.
    """
    params = [config.sampling_params(seed, temperature) for seed in seeds]
    if isinstance(task, MessageEnvAdapter):
        limits = EpisodeLimits(config.max_turns, config.max_episode_tokens, config.max_episode_s)
        return roll_out_episodes(
            sampler,
            task,
            samples,
            items,
            tokenizer=tokenizer,
            calls=calls,
            num_samples=num_samples,
            params=params,
            limits=limits,
            policy_step=policy_step,
        )
    adapter = as_adapter(task)
    prompts = [_prompt(adapter, sample, tokenizer) for sample in samples]
    futures = [
        sampler.sample(ModelInput.from_ints(prompt), num_samples, how) if isinstance(prompt, list) else None
        for prompt, how in zip(prompts, params, strict=True)
    ]
    groups = []
    for sample, item, prompt, future in zip(samples, items, prompts, futures, strict=True):
        if future is None or not isinstance(prompt, list):
            groups.append(Group(sample, item, [], [], error=str(prompt)))
            continue
        try:
            sequences = future.result().sequences
        except MintError as error:
            groups.append(Group(sample, item, prompt, [], error=str(error)))
            continue
        texts = [tokenizer.decode(sequence.tokens, skip_special_tokens=True) for sequence in sequences]
        if alone:
            grades = grade_single(calls, adapter, texts, [sample] * len(texts))
        else:
            grades = grade_completions(calls, adapter, texts, sample)
        rollouts = [
            _rollout(prompt, sequence, text, grade, policy_step)
            for sequence, text, grade in zip(sequences, texts, grades, strict=True)
        ]
        groups.append(Group(sample, item, prompt, rollouts))
    return groups


def as_adapter(task: Any) -> RLAdapter:
    """The task as an `RLAdapter`; one that only has its four methods is wrapped.

    Raises:
        InvalidRequestError: a method is missing.
    """
    if isinstance(task, RLAdapter):
        return task
    missing = [name for name in ("build_dataset", "make_prompt", "compute_reward") if not hasattr(task, name)]
    if missing:
        raise InvalidRequestError(
            f"has no {', '.join(missing)}",
            field="adapter",
            value=type(task).__name__,
            remedy="Derive it from mint.rl.RLAdapter or mint.rl.MessageEnvAdapter",
        )
    return _Duck(task)


class _Duck(RLAdapter):
    """An adapter that was written without our base class."""

    def __init__(self, inner: Any) -> None:
        self.inner = inner
        self.heldout_name = getattr(inner, "heldout_name", RLAdapter.heldout_name)
        self.reward_range = getattr(inner, "reward_range", None)
        self.spec = getattr(inner, "spec", None)

    def build_dataset(self) -> Sequence[Any]:
        """The inner adapter's."""
        return self.inner.build_dataset()

    def make_prompt(self, sample: Any, tokenizer: Any) -> list[int]:
        """The inner adapter's."""
        return self.inner.make_prompt(sample, tokenizer)

    def compute_reward(self, response: str, sample: Any) -> Any:
        """The inner adapter's."""
        return self.inner.compute_reward(response, sample)

    def build_heldout(self) -> Sequence[Any]:
        """The inner adapter's, if it has one."""
        return self.inner.build_heldout() if hasattr(self.inner, "build_heldout") else ()

    def evaluate(self, step: int, rewards: list[float], num_datums: int) -> None:
        """The inner adapter's, if it has one."""
        if hasattr(self.inner, "evaluate"):
            self.inner.evaluate(step, rewards, num_datums)


def task_name(task: Any) -> str:
    """The class that the user wrote."""
    return type(task.inner if isinstance(task, _Duck) else task).__name__


def _prompt(adapter: RLAdapter, sample: Any, tokenizer: Any) -> list[int] | str:
    """The prompt's ids, or why there are none."""
    where = f"{task_name(adapter)}.make_prompt()"
    try:
        prompt = [int(token) for token in adapter.make_prompt(sample, tokenizer)]
    except Exception as error:  # noqa: BLE001 - the boundary to the user's code: it costs this sample and is shown
        return f"{where} raised {type(error).__name__}: {error}"
    return prompt or f"{where} returned no token"


def _rollout(prompt: list[int], sequence: SampledSequence, text: str, grade: Grade, policy_step: int) -> Rollout:
    return Rollout(
        turns=[Turn(prompt, sequence.tokens, sequence.logprobs)],
        text=text,
        stop_reason="length" if sequence.stop_reason == "length" else "stop",
        reward=grade.reward,
        parts=grade.parts,
        info=grade.info,
        error=grade.error,
        unsupported=grade.unsupported,
        timed_out=grade.timed_out,
        policy_step=policy_step,
    )
