"""The shift and the mask."""

from __future__ import annotations

import numpy as np
import pytest

from mint.rl.datums import policy_datum


@pytest.mark.parametrize(("prompt", "completion"), [([5], [6]), ([1, 2, 3], [4]), ([1], [2, 3, 4]), ([9, 8], [7, 6])])
def test_a_datum_is_the_seed_s_datum(prompt: list[int], completion: list[int]) -> None:
    logprobs = [-0.1 * (i + 1) for i in range(len(completion))]
    advantages = np.linspace(-1, 1, len(completion))
    datum = policy_datum(prompt, completion, logprobs_T=logprobs, advantages_T=advantages)
    full, prefix = prompt + completion, len(prompt) - 1
    assert datum.model_input.to_ints() == full[:-1]
    inputs = {name: tensor.tolist() for name, tensor in datum.loss_fn_inputs.items()}
    assert inputs["target_tokens"] == full[1:]
    assert inputs["weights"] == [0.0] * prefix + [1.0] * len(completion)
    assert inputs["logprobs"] == pytest.approx([0.0] * prefix + logprobs)
    assert inputs["advantages"] == pytest.approx([0.0] * prefix + advantages.tolist())
    assert len({len(values) for values in inputs.values()}) == 1
