"""Corrections for samples of other weights than those at the start of a step: a factor of each token's weight. Pure.

Truncated importance sampling (TIS, https://fengyao.notion.site/off-policy-rl), masked importance sampling of whole
sequences (MIS, https://richardli.xyz/rl-collapse), the double-sided mask of IcePop (arXiv 2510.18855), and a mask by
the geometric mean of the ratios. The loss that follows compares with the weights at the start of the step (decoupled
PPO, arXiv 2110.00641; AReaL, arXiv 2505.24298).

Letters: T sampled tokens of one rollout.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from mint.rl.config import CorrectionName, RLConfig

TIS_CAP = 2.0
"""The bound of a token's ratio where another program samples."""


def truncated_by_default(config: RLConfig, effective: Mapping[str, Any]) -> RLConfig:
    """The config with truncated importance sampling, if the server says that it measures the distance of sampler and
    trainer (`sampler_promise`), and the config says nothing of it; else the same object."""
    given = config.loss_fn_config or {}
    if effective.get("sampler_promise") != "measured" or config.correction is not None or "tis_cap" in given:
        return config
    if callable(config.loss_fn):
        return config
    if config.loss_fn == "importance_sampling":
        return config.model_copy(update={"loss_fn_config": {**given, "tis_cap": TIS_CAP}})
    return config.model_copy(update={"correction": "token_truncate"})


def correction_factors(
    proximal_T: np.ndarray, sampled_T: np.ndarray, correction: CorrectionName, *, low: float, high: float
) -> np.ndarray:
    """The factors of one rollout's tokens, float64 [T], without a gradient.

    `proximal_T` are the logprobs under the weights at the start of the step, `sampled_T` those of the sampler. The
    ratio of a rollout is the product of those of its tokens; `low` does not bound it, because a product of many ratios
    is small in most rollouts.
    """
    log_ratio = np.asarray(proximal_T, dtype=np.float64) - np.asarray(sampled_T, dtype=np.float64)
    with np.errstate(over="ignore"):
        ratio = np.exp(log_ratio)
        of_rollout = np.full_like(ratio, np.exp(log_ratio.sum()))
        mean = np.full_like(ratio, np.exp(log_ratio.mean() if len(log_ratio) else 0.0))
    if correction == "token_truncate":
        return np.minimum(ratio, high)
    if correction == "token_mask":
        return np.where((low <= ratio) & (ratio <= high), ratio, 0.0)
    if correction == "sequence_truncate":
        return np.minimum(of_rollout, high)
    if correction == "sequence_mask":
        return np.where(of_rollout <= high, of_rollout, 0.0)
    return np.where((low <= mean) & (mean <= high), 1.0, 0.0)


def correction_metrics(factors: Sequence[np.ndarray]) -> dict[str, float]:
    """The mean factor of a token, the share of tokens with factor 0, and the largest factor."""
    joined = np.concatenate(factors)
    return {
        "correction/mean": float(joined.mean()),
        "correction/masked_share": float((joined == 0).mean()),
        "correction/max": float(joined.max()),
    }
