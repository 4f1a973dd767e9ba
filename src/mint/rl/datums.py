"""From a sampled completion to a `Datum`: the shift, the mask, the alignment. The only place that knows them.

Letters: P prompt tokens · T completion tokens · N = P + T − 1.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from mint.types import Datum, ModelInput, TensorData


def policy_datum(
    prompt_P: Sequence[int],
    completion_T: Sequence[int],
    *,
    logprobs_T: Sequence[float],
    advantages_T: np.ndarray,
) -> Datum:
    """One completion for a policy loss: weight 0 on the prompt, 1 on the completion.

    `logprobs_T` are the sampler's, at temperature 1. Needs at least one prompt and one completion token.
    """
    full = [*prompt_P, *completion_T]
    prefix = [0.0] * (len(prompt_P) - 1)
    length = [len(full) - 1]
    columns = {
        "weights": [*prefix, *[1.0] * len(completion_T)],
        "logprobs": [*prefix, *logprobs_T],
        "advantages": [*prefix, *advantages_T.tolist()],
    }
    tensors = {
        name: TensorData.model_construct(data=values, dtype="float32", shape=length) for name, values in columns.items()
    }
    targets = TensorData.model_construct(data=full[1:], dtype="int64", shape=length)
    return Datum(model_input=ModelInput.from_ints(full[:-1]), loss_fn_inputs={"target_tokens": targets, **tensors})
