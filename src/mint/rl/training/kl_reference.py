"""The KL penalty: what it subtracts from each token's advantage, and the KL estimates in the metrics.

The penalty is k1 inside the advantage, which gives the exact gradient of coef · KL(policy ‖ reference); k3 used as a
loss does not (arXiv 2510.01555, 2512.21852), but k3 is the better estimate of the value, so both are reported.

Letters: T sampled tokens of one rollout.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from mint.client.sampling_client import SamplingClient
from mint.client.service_client import ServiceClient
from mint.rl.config import RLConfig
from mint.rl.rollout import Rollout
from mint.types import ModelInput


def kl_penalty(policy_logprobs_T: np.ndarray, base_logprobs_T: np.ndarray, coef: float) -> np.ndarray:
    """The penalty to subtract from the advantage of each token, float64 [T].

    The k1 estimate log p − log p_base, summed from each token to the end: with the score-function gradient this is the
    exact gradient of coef · KL(policy ‖ base) of the whole completion (arXiv 2510.01555). k3 used as a loss is not.
    """
    k1 = np.asarray(policy_logprobs_T, dtype=np.float64) - np.asarray(base_logprobs_T, dtype=np.float64)
    return coef * np.cumsum(k1[::-1])[::-1]


class KLReference:
    """The fixed policy of the KL penalty."""

    def __init__(self, service: ServiceClient, config: RLConfig) -> None:
        """The base model, or the checkpoint `config.kl_reference`."""
        self.coef = config.kl_penalty_coef
        if config.kl_reference is None:
            self.sampler: SamplingClient = service.create_sampling_client(base_model=config.base_model)
        else:
            self.sampler = service.create_sampling_client(model_path=config.kl_reference)

    def penalties(self, rollouts: Sequence[Rollout]) -> tuple[list[np.ndarray], dict[str, float]]:
        """Per rollout the penalty of each token [T], and the estimates of the KL per token."""
        if not rollouts:
            return [], {}
        futures = [
            [self.sampler.compute_logprobs(ModelInput.from_ints([*turn.prompt, *turn.tokens])) for turn in one.turns]
            for one in rollouts
        ]
        policy = [np.asarray(one.logprobs, dtype=np.float64) for one in rollouts]
        reference = [
            np.concatenate(
                [
                    np.asarray(future.result()[len(turn.prompt) :], dtype=np.float64)
                    for turn, future in zip(one.turns, of_turns, strict=True)
                ]
            )
            for one, of_turns in zip(rollouts, futures, strict=True)
        ]
        log_ratio = np.concatenate(reference) - np.concatenate(policy)
        numbers = {
            "kl/policy_reference_k1": float(-log_ratio.mean()),
            "kl/policy_reference_k3": float((np.expm1(log_ratio) - log_ratio).mean()),
        }
        return [kl_penalty(*pair, self.coef) for pair in zip(policy, reference, strict=True)], numbers
