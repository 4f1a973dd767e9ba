"""From rewards to advantages.

The mean-centred advantage, summed over tokens and not divided by the length or the deviation, is the unbiased
estimator (Dr. GRPO, arXiv 2503.20783). `rloo` is leave-one-out (arXiv 2402.14740), `std` the original GRPO
(arXiv 2402.03300), `std_batch` divides by the deviation over the whole batch (Lite PPO, arXiv 2508.08221).

Letters: G samples of one prompt · T tokens of one completion.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from mint.rl.config import AdvantageName

STD_EPS = 1e-4


def group_advantages(
    rewards_G: Sequence[float], estimator: AdvantageName = "center", *, batch_std: float = 1.0
) -> np.ndarray:
    """Advantages float64 [G]; all zero exactly where all rewards are equal, and where G is 1.

    `batch_std` is the sample deviation of all rewards of the batch, for `std_batch`.
    """
    rewards = np.asarray(rewards_G, dtype=np.float64)
    if len(rewards) < 2 or bool((rewards == rewards[0]).all()):
        return np.zeros_like(rewards)
    centred = rewards - rewards.mean()
    if estimator == "rloo":
        return centred * (len(rewards) / (len(rewards) - 1))
    if estimator == "std":
        return centred / (rewards.std(ddof=1) + STD_EPS)
    if estimator == "std_batch":
        return centred / (batch_std + STD_EPS)
    return centred


def kl_penalty(policy_logprobs_T: np.ndarray, base_logprobs_T: np.ndarray, coef: float) -> np.ndarray:
    """What to subtract from the advantage of each token, float64 [T].

    The k1 estimate log p − log p_base, summed from each token to the end: with the score-function gradient this is the
    exact gradient of coef · KL(policy ‖ base) of the whole completion (arXiv 2510.01555). k3 used as a loss is not.
    """
    k1 = np.asarray(policy_logprobs_T, dtype=np.float64) - np.asarray(base_logprobs_T, dtype=np.float64)
    return coef * np.cumsum(k1[::-1])[::-1]
