"""The KL penalty: what it subtracts from each token's advantage, and the KL estimates in the metrics.

The penalty is k1 inside the advantage, which gives the exact gradient of coef · KL(policy ‖ reference); k3 used as a
loss does not (arXiv 2510.01555, 2512.21852), but k3 is the better estimate of the value, so both are reported.

Letters: T sampled tokens of one rollout.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from mint.client.service_client import ServiceClient
from mint.errors import NotFoundError
from mint.rl.checkpoint_sampler import checkpoint_sampler
from mint.rl.config import BASE_REFERENCE, RLConfig
from mint.rl.rollout import Rollout
from mint.types import ModelInput


def kl_penalty(policy_logprobs_T: np.ndarray, reference_logprobs_T: np.ndarray, coef: float) -> np.ndarray:
    """The penalty to subtract from the advantage of each token, float64 [T].

    The k1 estimate log p − log p_reference, summed from each token to the end: with the score-function gradient this is
    the exact gradient of coef · KL(policy ‖ reference) of the whole completion (arXiv 2510.01555). k3 used as a loss is
    not.
    """
    k1 = np.asarray(policy_logprobs_T, dtype=np.float64) - np.asarray(reference_logprobs_T, dtype=np.float64)
    return coef * np.cumsum(k1[::-1])[::-1]


class KLReference:
    """The policy of the KL penalty: that at the start of the run, unless the settings name another or renew it.

    `path` is the checkpoint that the run has made of it; None while it is the one that the settings name.
    """

    def __init__(self, service: ServiceClient, config: RLConfig, base_model: str) -> None:
        """`config.kl_reference` names it; None is `config.init_from`, or the base model without one.

        `base_model` is that of the model that is trained: a path in the settings could mean another folder where a run
        goes on.
        """
        named = config.kl_reference or config.init_from or BASE_REFERENCE
        self.service = service
        self.config = config
        self.path: str | None = None
        try:
            self.sampler = checkpoint_sampler(service, base_model if named == BASE_REFERENCE else named)
        except NotFoundError as error:
            raise NotFoundError(
                "is not here", field="RLConfig.kl_reference", value=named, remedy=error.remedy
            ) from error

    def renew(self, path: str | None) -> None:
        """Makes saved weights the reference; None changes nothing."""
        if path is not None:
            self.path = path
            self.sampler = checkpoint_sampler(self.service, path)

    def penalties(self, rollouts: Sequence[Rollout], step: int) -> tuple[list[np.ndarray], dict[str, float]]:
        """Per rollout the penalty of each token [T] at `step`, and the estimates of the KL per token."""
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
        coef = self.config.kl_penalty_coef_at(step)
        numbers["kl/penalty_coef"] = coef
        return [kl_penalty(*pair, coef) for pair in zip(policy, reference, strict=True)], numbers
