"""Demonstrations: a prompt and the reply to learn, as datums and in batches. Knows no loss.

Letters: P prompt tokens · T completion tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from mint.errors import InvalidRequestError
from mint.types import Datum, ModelInput


@dataclass(frozen=True)
class Demonstration:
    """A prompt as token ids, as the task's own `make_prompt` gives them, and the reply to learn."""

    prompt: list[int]
    completion: str


def completion_datum(prompt: Sequence[int], completion: Sequence[int]) -> Datum:
    """Weight 1 on the T completion tokens, 0 on the P prompt tokens; position t predicts token t + 1."""
    full = [*prompt, *completion]
    weights = [0.0] * (len(prompt) - 1) + [1.0] * len(completion)
    return Datum(
        model_input=ModelInput.from_ints(full[:-1]), loss_fn_inputs={"target_tokens": full[1:], "weights": weights}
    )


def reply_ids(completion: str, tokenizer: Any) -> list[int]:
    """The reply and the end of turn, so that the model learns to stop."""
    return [*tokenizer.encode(completion, add_special_tokens=False), tokenizer.eos_token_id]


def batch_places(size: int, batch_size: int, step: int, seed: int) -> list[int]:
    """The places of step `step` (from 1): each epoch visits all `size` in an order of its own."""
    steps_per_epoch = -(-size // batch_size)
    epoch, place = divmod(step - 1, steps_per_epoch)
    order = np.random.default_rng([seed, epoch]).permutation(size)
    return order[place * batch_size : (place + 1) * batch_size].tolist()


def check_disjoint(trained: Sequence[Any], heldout: Sequence[Any]) -> None:
    """Refuses an empty training set, and one that shares a prompt with the held-out set."""
    if not trained:
        raise InvalidRequestError("is empty", field="training set", value=[], remedy="Give at least one")
    closed = {tuple(each.prompt) for each in heldout}
    shared = sum(tuple(each.prompt) in closed for each in trained)
    if shared:
        raise InvalidRequestError(
            f"shares {shared} prompts with the held-out set",
            field="training set",
            value=shared,
            remedy="Leave them out",
        )
