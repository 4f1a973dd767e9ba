"""A policy that says what it is told to, and tokenizers whose templates and texts are awkward."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerFast

import mint
from mint.errors import MintError
from mint.rl.calls.call_pool import CallPool
from mint.rl.calls.own_thread import run_in_own_thread
from mint.rl.rollout import Group, GroupRequest
from mint.rl.rollouts.episodes import EpisodeLimits, roll_out_episodes
from mint.types import ModelInput, SampledSequence, SampleResponse, SamplingParams

TINY = Path(mint.__file__).parent / "models" / "tiny"
END = 2
LIMITS = EpisodeLimits(max_turns=8, max_tokens=None, wall_time_s=60.0)


@cache
def tiny_tokenizer(template: str | None = None) -> Any:
    """The bundled model's tokenizer, with another chat template where one is given."""
    tokenizer = PreTrainedTokenizerFast.from_pretrained(TINY)
    if template is not None:
        tokenizer.chat_template = template
    return tokenizer


@dataclass
class ScriptedPolicy:
    """A sampler whose replies are a function of the prompt's ids; `requests` keeps what it was asked."""

    reply: Callable[[list[int]], Sequence[int] | MintError]
    requests: list[tuple[list[int], int, SamplingParams]] = field(default_factory=list)
    said: list[list[int]] = field(default_factory=list)

    def sample(self, prompt: ModelInput, num_samples: int, params: SamplingParams) -> _Done:
        ids = prompt.to_ints()
        self.requests.append((ids, num_samples, params))
        tokens = self.reply(ids)
        if isinstance(tokens, MintError):
            return _Done(tokens)
        cut = params.max_tokens is not None and len(tokens) > params.max_tokens
        kept = list(tokens)[: params.max_tokens]
        self.said += [kept] * num_samples
        sequence = SampledSequence(tokens=kept, logprobs=[-0.5] * len(kept), stop_reason="length" if cut else "stop")
        return _Done(SampleResponse(sequences=[sequence] * num_samples))


@dataclass
class _Done:
    outcome: SampleResponse | MintError

    def __await__(self) -> Generator[Any, None, SampleResponse]:
        yield from asyncio.sleep(0).__await__()
        if isinstance(self.outcome, MintError):
            raise self.outcome
        return self.outcome


def says(*replies: str) -> ScriptedPolicy:
    """Says the replies in order, one per turn, each closed by the end token."""
    tokenizer = tiny_tokenizer()

    def reply(prompt: list[int]) -> list[int]:
        turn = tokenizer.decode(prompt).count("<|im_start|>assistant") - 1
        return [*tokenizer.encode(replies[turn]), END]

    return ScriptedPolicy(reply)


def roll_out(
    policy: Any,
    adapter: Any,
    *,
    items: Sequence[Any] = ("",),
    group_size: int = 1,
    limits: EpisodeLimits = LIMITS,
    params: SamplingParams | None = None,
    tokenizer: Any = None,
    timeout_s: float = 60.0,
    call_clock: Callable[[], float] = time.monotonic,
    **others: Any,
) -> list[Group]:
    """`roll_out_episodes` with the bundled tokenizer, its own call pool and seeds 0, 1, …"""
    calls = CallPool(timeout_s=timeout_s, clock=call_clock)
    try:
        return run_in_own_thread(
            roll_out_episodes(
                policy,
                adapter,
                [
                    GroupRequest(item, index, params or SamplingParams(max_tokens=256, seed=index))
                    for index, item in enumerate(items)
                ],
                tokenizer=tokenizer or tiny_tokenizer(),
                calls=calls,
                group_size=group_size,
                limits=limits,
                **others,
            )
        )
    finally:
        calls.close()
