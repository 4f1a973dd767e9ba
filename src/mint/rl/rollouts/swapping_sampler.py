"""Samples a batch with the newest weights: those at its start, or with each piece of a completion the newest then.

With pieces, weights are swapped under a running completion between two tokens. The next piece computes the whole prefix
with the new weights, as after a prompt. Each token keeps the version that it was sampled with, and its logprob is that
of this version, so that ratios stay right.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from mint.errors import PromptTooLongError
from mint.rl.rollout import Turn
from mint.rl.seeds import mix_seed
from mint.types import ModelInput, SampledSequence, SampleResponse, SamplingParams


class PolicySampler(Protocol):
    """Samples completions: a `SamplingClient`, or a `SwappingSampler`."""

    def sample(
        self, prompt: ModelInput, num_samples: int, sampling_params: SamplingParams, /
    ) -> Awaitable[SampleResponse]:
        """`num_samples` continuations of `prompt`. The request is in flight before it is awaited."""
        ...


@dataclass(frozen=True)
class PublishedPolicy:
    """The weights after `step` steps, with `optim_steps` optimizer steps behind them."""

    step: int
    optim_steps: int
    client: PolicySampler


class VersionedSequence(SampledSequence):
    """A sampled sequence with the optimizer steps behind the weights of each token [T]."""

    __slots__ = ("policy_steps",)

    def __init__(self, pieces: Sequence[tuple[SampledSequence, int]], stop_reason: Any) -> None:
        """`pieces` are sequences that continue one another, each with the version that sampled it."""
        super().__init__(
            [token for piece, _ in pieces for token in piece.tokens],
            [logprob for piece, _ in pieces for logprob in piece.logprobs],
            stop_reason,
        )
        self.policy_steps = [version for piece, version in pieces for _ in piece.tokens]


def sampled_turn(prompt: list[int], sequence: SampledSequence) -> Turn:
    """The turn that a sequence makes, with the version of each token where it has them."""
    versions = sequence.policy_steps if isinstance(sequence, VersionedSequence) else ()
    return Turn(prompt, sequence.tokens, sequence.logprobs, versions)


class SwappingSampler:
    """Has the method `sample` of a `SamplingClient`, for one batch; `idle` is set once no request is in flight."""

    def __init__(self, newest: Callable[[], PublishedPolicy], swap_every: int, idle: threading.Event) -> None:
        """`swap_every` is the number of tokens of a piece; 0 keeps the weights for the whole batch."""
        self.policy = newest()
        self._newest = newest
        self._swap_every = swap_every
        self._idle = idle
        self._in_flight = 0
        self._lock = threading.Lock()

    def sample(
        self, prompt: ModelInput, num_samples: int, params: SamplingParams
    ) -> Coroutine[Any, Any, SampleResponse]:
        """As `SamplingClient.sample`; with pieces, the sequences are `VersionedSequence`s."""
        with self._lock:
            self._in_flight += 1
        if not self._swap_every:
            return self._counted(_awaited(self.policy.client, prompt, num_samples, params))
        return self._counted(self._in_pieces(prompt.to_ints(), num_samples, params))

    async def _counted(self, sampled: Coroutine[Any, Any, SampleResponse]) -> SampleResponse:
        try:
            return await sampled
        finally:
            with self._lock:
                self._in_flight -= 1
                if not self._in_flight:
                    self._idle.set()

    async def _in_pieces(self, prompt: list[int], num_samples: int, params: SamplingParams) -> SampleResponse:
        policy = self._newest()
        first = await policy.client.sample(ModelInput.from_ints(prompt), num_samples, self._piece(params, 0, 0))
        return SampleResponse(
            sequences=await asyncio.gather(
                *(
                    self._continued(prompt, params, place, [(sequence, policy.optim_steps)])
                    for place, sequence in enumerate(first.sequences)
                )
            )
        )

    async def _continued(
        self, prompt: list[int], params: SamplingParams, place: int, pieces: list[tuple[SampledSequence, int]]
    ) -> VersionedSequence:
        tokens = list(pieces[0][0].tokens)
        while pieces[-1][0].stop_reason == "length" and len(tokens) < (params.max_tokens or 0):
            policy = self._newest()
            prefix = ModelInput.from_ints([*prompt, *tokens])
            try:
                sent = policy.client.sample(prefix, 1, self._piece(params, place, len(tokens)))
                [sequence] = (await sent).sequences
            except PromptTooLongError:  # the context is full, which ends a completion that is sampled at once, too
                break
            if not sequence.tokens:
                break
            pieces.append((sequence, policy.optim_steps))
            tokens += sequence.tokens
        return VersionedSequence(pieces, pieces[-1][0].stop_reason)

    def _piece(self, params: SamplingParams, place: int, done: int) -> SamplingParams:
        """How the piece after `done` tokens of sample `place` is sampled; its draws depend on both."""
        limit = params.max_tokens or 0
        seed = params.seed if not done or params.seed is None else mix_seed(params.seed, place, done)
        return params.model_copy(update={"max_tokens": min(self._swap_every, limit - done), "seed": seed})


async def _awaited(
    client: PolicySampler, prompt: ModelInput, num_samples: int, params: SamplingParams
) -> SampleResponse:
    return await client.sample(prompt, num_samples, params)
