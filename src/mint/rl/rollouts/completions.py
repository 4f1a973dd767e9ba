"""Rollouts of one turn: a prompt, a completion, a reward. Tokens in, tokens out.

Letters: G completions of one prompt.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from mint.client.sampling_client import SamplingClient
from mint.errors import MintError
from mint.rl.adapter import RLAdapter, task_name
from mint.rl.call_pool import CallPool
from mint.rl.rollout import Group, GroupRequest, Rollout, Turn
from mint.rl.rollouts.grading import Grade, grade_group, grade_one_by_one
from mint.types import ModelInput, SampledSequence


def roll_out_completions(
    sampling_client: SamplingClient,
    adapter: RLAdapter,
    requests: Sequence[GroupRequest],
    *,
    tokenizer: Any,
    calls: CallPool,
    group_size: int,
    policy_step: int,
    grade_alone: bool,
) -> list[Group]:
    """See `RolloutWorker.roll_out`."""
    prompts = [_prompt(adapter, request.item, tokenizer) for request in requests]
    futures = [
        sampling_client.sample(ModelInput.from_ints(prompt), group_size, request.params)
        if isinstance(prompt, list)
        else None
        for prompt, request in zip(prompts, requests, strict=True)
    ]
    groups = []
    for request, prompt, future in zip(requests, prompts, futures, strict=True):
        item = request.item
        index = request.index
        if future is None or not isinstance(prompt, list):
            groups.append(Group(item, index, [], [], error=str(prompt)))
            continue
        try:
            sequences_G = future.result().sequences
        except MintError as error:
            groups.append(Group(item, index, prompt, [], error=str(error)))
            continue
        texts_G = [tokenizer.decode(sequence.tokens, skip_special_tokens=True) for sequence in sequences_G]
        if grade_alone:
            grades_G = grade_one_by_one(calls, adapter, [(text, item) for text in texts_G])
        else:
            grades_G = grade_group(calls, adapter, texts_G, item)
        rollouts_G = [
            _rollout(prompt, sequence, text, grade, policy_step)
            for sequence, text, grade in zip(sequences_G, texts_G, grades_G, strict=True)
        ]
        groups.append(Group(item, index, prompt, rollouts_G))
    return groups


def _prompt(adapter: RLAdapter, item: Any, tokenizer: Any) -> list[int] | str:
    """The token ids of the prompt, or the error in words."""
    where = f"{task_name(adapter)}.make_prompt()"
    try:
        prompt = [int(token) for token in adapter.make_prompt(item, tokenizer)]
    except Exception as error:  # noqa: BLE001 - the boundary to the user's code: it costs this group and is shown
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
