"""Rollouts of one turn: a prompt, a completion, a reward. Tokens in, tokens out.

Letters: B groups of a batch · G completions of one prompt.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from mint.errors import MintError
from mint.rl.adapter import RLAdapter, task_name
from mint.rl.rollout import Group, GroupRequest, GroupTimes, Rollout, Span
from mint.rl.rollouts.grading import Grade, Grader
from mint.rl.rollouts.swapping_sampler import PolicySampler, sampled_turn
from mint.types import ModelInput, SampledSequence


async def roll_out_completions(
    sampling_client: PolicySampler,
    grader: Grader,
    requests: Sequence[GroupRequest],
    prompts: Sequence[list[int] | str],
    *,
    tokenizer: Any,
    group_size: int,
    policy_step: int,
    grade_alone: bool,
) -> list[Group]:
    """See `RolloutWorker.roll_out`. `prompts` are those of `make_prompts`.

    All prompts are in flight at once. A group is graded as soon as it is sampled, while others are still sampled,
    unless the task grades the whole batch at once.
    """
    began = time.monotonic()
    futures = [
        sampling_client.sample(ModelInput.from_ints(prompt), group_size, request.params)
        if isinstance(prompt, list)
        else None
        for prompt, request in zip(prompts, requests, strict=True)
    ]

    async def sample(place: int) -> _SampledGroup:
        prompt = prompts[place]
        future = futures[place]
        if future is None or not isinstance(prompt, list):
            return _SampledGroup(requests[place], [], error=str(prompt))
        try:
            sequences_G = (await future).sequences
        except MintError as error:
            return _SampledGroup(requests[place], prompt, error=str(error))
        texts_G = [tokenizer.decode(sequence.tokens, skip_special_tokens=True) for sequence in sequences_G]
        return _SampledGroup(requests[place], prompt, sequences_G, texts_G, (began, time.monotonic()))

    async def grade(group: _SampledGroup, given: list[Grade] | None = None, since: float | None = None) -> Group:
        if group.error is not None:
            return Group(group.request.item, group.request.index, group.prompt, [], error=group.error)
        item = group.request.item
        grading_since = time.monotonic() if since is None else since
        if given is not None:
            grades_G = given
        elif grade_alone:
            grades_G = await grader.one_by_one([(text, item) for text in group.texts])
        else:
            grades_G = await grader.group(group.texts, item)
        return group.graded(grades_G, policy_step, (grading_since, time.monotonic()))

    async def sample_and_grade(place: int) -> Group:
        return await grade(await sample(place))

    places = range(len(requests))
    if grade_alone or not grader.grades_batches:
        return list(await asyncio.gather(*map(sample_and_grade, places)))
    sampled_B = await asyncio.gather(*map(sample, places))
    since = time.monotonic()
    known_B = [group for group in sampled_B if group.error is None]
    grades_B = await grader.batch([group.texts for group in known_B], [group.request.item for group in known_B])
    given = {} if grades_B is None else {id(group): one for group, one in zip(known_B, grades_B, strict=True)}
    return list(await asyncio.gather(*(grade(group, given.get(id(group)), since) for group in sampled_B)))


@dataclass(frozen=True)
class _SampledGroup:
    """The completions of one prompt, or the error in words. `sampling`: from when to when they were sampled."""

    request: GroupRequest
    prompt: list[int]
    sequences: Sequence[SampledSequence] = ()
    texts: Sequence[str] = ()
    sampling: Span = (0.0, 0.0)
    error: str | None = None

    def graded(self, grades_G: Sequence[Grade], policy_step: int, grading: Span) -> Group:
        rollouts_G = [
            _rollout(self.prompt, sequence, text, grade, policy_step)
            for sequence, text, grade in zip(self.sequences, self.texts, grades_G, strict=True)
        ]
        times = GroupTimes(self.sampling, grading)
        return Group(self.request.item, self.request.index, self.prompt, rollouts_G, times=times)


def make_prompts(adapter: RLAdapter, requests: Sequence[GroupRequest], tokenizer: Any) -> list[list[int] | str]:
    """For each request the token ids of its prompt, or the error in words."""
    return [make_prompt(adapter, request.item, tokenizer) for request in requests]


def make_prompt(adapter: RLAdapter, item: Any, tokenizer: Any) -> list[int] | str:
    """The token ids of the prompt, or the error in words."""
    where = f"{task_name(adapter)}.make_prompt()"
    try:
        made: Any = adapter.make_prompt(item, tokenizer)
        if isinstance(made, str):
            return f"{where} returned text; return token ids: tokenizer.encode(text)"
        if isinstance(made, Mapping):  # a tokenizer of transformers that was called
            return f"{where} returned a {type(made).__name__}; return its token ids: tokenizer(text)['input_ids']"
        if isinstance(made, Sequence) and any(isinstance(part, Mapping) for part in made):
            return (
                f"{where} returned messages; return token ids: "
                "tokenizer.apply_chat_template(messages, add_generation_prompt=True)"
            )
        prompt = [int(token) for token in made]
    except Exception as error:  # noqa: BLE001 - the boundary to the user's code: it costs this group and is shown
        return f"{where} raised {type(error).__name__}: {error}"
    return prompt or f"{where} returned no token"


def _rollout(prompt: list[int], sequence: SampledSequence, text: str, grade: Grade, policy_step: int) -> Rollout:
    turn = sampled_turn(prompt, sequence)
    return Rollout(
        turns=[turn],
        text=text,
        stop_reason="length" if sequence.stop_reason == "length" else "stop",
        reward=grade.reward,
        parts=grade.parts,
        info=grade.info,
        error=grade.error,
        unsupported=grade.unsupported,
        timed_out=grade.timed_out,
        policy_step=turn.policy_steps[0] if turn.policy_steps else policy_step,
        grader_s=grade.seconds,
        grader_retries=grade.retries,
        grader_seconds=grade.seconds_of,
    )
