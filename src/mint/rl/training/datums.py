"""From sampled tokens to `Datum`s: the shift, the mask, the alignment. The only place that knows them.

Letters: P prompt tokens · T sampled tokens · N tokens of a datum.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from mint.rl.rollout import Rollout, Turn
from mint.types import Datum, ModelInput


def policy_datum(
    prompt_P: Sequence[int],
    completion_T: Sequence[int],
    *,
    logprobs_T: Sequence[float],
    advantages_T: np.ndarray,
    weight: float = 1.0,
) -> Datum:
    """One completion for a policy loss: weight 0 on the prompt, `weight` on the completion.

    `logprobs_T` are the sampler's, at temperature 1. Needs at least one prompt and one completion token.
    """
    turn = Turn(list(prompt_P), list(completion_T), list(logprobs_T))
    return _datum([turn], advantages_T, weight)


def rollout_datums(rollout: Rollout, *, advantages_T: np.ndarray, weight: float = 1.0) -> list[Datum]:
    """The datums of one rollout; `advantages_T` belong to `rollout.tokens`, all turns joined.

    Turns that each begin with the whole of the turn before become one datum, in which everything that the policy did
    not say has weight, advantage and logprob 0; a turn whose prompt was rendered afresh begins another.
    """
    datums = []
    first = 0
    for turns in _chains(rollout.turns):
        last = first + sum(len(turn.tokens) for turn in turns)
        datums.append(_datum(turns, advantages_T[first:last], weight))
        first = last
    return datums


def _chains(turns: Sequence[Turn]) -> Iterator[list[Turn]]:
    """Runs of turns of which each prompt extends all that came before."""
    chain: list[Turn] = []
    for turn in turns:
        past = [*chain[-1].prompt, *chain[-1].tokens] if chain else []
        if chain and turn.prompt[: len(past)] != past:
            yield chain
            chain = []
        chain.append(turn)
    if chain:
        yield chain


def _datum(turns: Sequence[Turn], advantages_T: np.ndarray, weight: float) -> Datum:
    """Position n of every tensor speaks of predicting token n + 1, so that column 0 of the full sequence falls away."""
    full = [*turns[-1].prompt, *turns[-1].tokens]
    weights_N, logprobs_N, advantages_N = np.zeros((3, len(full)))
    first = 0
    for turn in turns:
        last = first + len(turn.tokens)
        said = slice(len(turn.prompt), len(turn.prompt) + len(turn.tokens))
        weights_N[said] = weight
        logprobs_N[said] = turn.logprobs
        advantages_N[said] = advantages_T[first:last]
        first = last
    tensors = {"weights": weights_N, "logprobs": logprobs_N, "advantages": advantages_N}
    return Datum(
        ModelInput.from_ints(full[:-1]),
        {"target_tokens": full[1:], **{name: column[1:] for name, column in tensors.items()}},
    )
