"""Trains on one batch of rollouts: advantages, datums, passes, optimizer steps, and the server's measurements.

Letters: T sampled tokens of one rollout.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from mint.client.futures import APIFuture
from mint.client.metric_reduction import reduce_metrics
from mint.client.training_client import TrainingClient
from mint.rl.config import RLConfig
from mint.rl.finding import Finding
from mint.rl.rollout import Rollout, RolloutBatch
from mint.rl.training.advantages import RolloutAdvantage, loss_weights, passes_filter, rollout_advantages
from mint.rl.training.custom_loss import custom_loss
from mint.rl.training.datum_check import check_datums
from mint.rl.training.datums import rollout_datums
from mint.rl.training.kl_reference import KLReference
from mint.rl.training.off_policy import correction_factors, correction_metrics
from mint.types import Datum, ForwardBackwardOutput, OptimStepResponse, TensorData


@dataclass(frozen=True)
class TrainedRollout:
    """A rollout that went into the loss.

    `advantage` is its own within its group; `advantages_T` are those of its tokens, less the KL penalty. `entropies_T`
    are those of the distributions that the tokens were drawn from, in nats; None if the server does not report them.
    """

    rollout: Rollout
    advantage: float
    advantages_T: np.ndarray
    entropies_T: np.ndarray | None


@dataclass(frozen=True)
class PolicyUpdate:
    """The result of training on one batch: `trained` are the rollouts of `counted` that went into the loss.

    Without a signal nothing is trained and no optimizer step is taken.
    """

    counted: list[RolloutAdvantage]
    trained: list[TrainedRollout] = field(default_factory=list)
    datums: int = 0
    metrics: dict[str, float] = field(default_factory=dict)
    warnings: list[str] = field(default_factory=list)
    findings: list[Finding] = field(default_factory=list)
    state_digest: str | None = None
    optim_steps: int = 0


class PolicyTrainer:
    """Trains the policy on batches of rollouts."""

    def __init__(self, training_client: TrainingClient, reference: KLReference | None, config: RLConfig) -> None:
        """`reference` is None without a KL penalty."""
        self.training_client = training_client
        self.reference = reference
        self.config = config

    def train(self, batch: RolloutBatch, *, on_policy: bool) -> PolicyUpdate:
        """Takes the optimizer steps of one batch.

        A group without an advantage is left out, unless there is a KL penalty or an entropy bonus, which need no
        advantage; so is one that `group_filter` refuses. A rollout of weight 0 is left out, too.
        `on_policy`: the weights to train are those that sampled, so that sampler and trainer must agree on every
        logprob.

        Raises:
            InvalidRequestError: a function of the settings returned something that it must not.
        """
        counted = rollout_advantages(batch.groups, self.config)
        all_train = self.reference is not None or self.config.has_entropy_bonus
        with_signal = {id(one.group) for one in counted if one.advantages_T.any()}
        refused = {id(group) for group in batch.groups if not passes_filter(group, self.config)}
        used = [one for one in counted if (all_train or id(one.group) in with_signal) and id(one.group) not in refused]
        weighted = [(one, weight) for one, weight in zip(used, loss_weights(used, self.config), strict=True) if weight]
        if not weighted:
            return PolicyUpdate(counted)
        used = [one for one, _ in weighted]
        advantages, metrics = self._token_advantages(used, batch.step)
        datums_of = [
            rollout_datums(one.rollout, advantages_T=advantages_T, weight=weight)
            for (one, weight), advantages_T in zip(weighted, advantages, strict=True)
        ]
        datums = [datum for of_rollout in datums_of for datum in of_rollout]
        prompt_lengths = [len(one.rollout.turns[0].prompt) for one, of in zip(used, datums_of, strict=True) for _ in of]
        findings = check_datums(datums, prompt_lengths, step=batch.step)
        sent_of, corrected = self._corrected(datums_of, on_policy=on_policy)
        metrics |= corrected
        outputs, steps = self._run_passes(batch.step, self._minibatches(used, sent_of))
        metrics |= _measured(outputs, steps)
        if on_policy and self.config.correction is None and self.config.samples_raw_logprobs:
            first_datums, first_output = outputs[0]
            metrics |= logprob_mismatch(first_datums, first_output)
        # By identity: a `Datum` holds arrays and has no hash. Of several epochs, the first.
        results = {
            id(datum): result
            for minibatch, output in reversed(outputs)
            for datum, result in zip(minibatch, output.loss_fn_outputs, strict=True)
        }
        return PolicyUpdate(
            counted,
            trained=[
                TrainedRollout(
                    one.rollout,
                    one.advantage,
                    advantages_T,
                    _entropies([(datum, results[id(sent)]) for datum, sent in zip(of_rollout, sent_of, strict=True)]),
                )
                for one, advantages_T, of_rollout, sent_of in zip(used, advantages, datums_of, sent_of, strict=True)
            ],
            datums=len(datums),
            metrics=metrics,
            warnings=[warning for _, output in outputs for warning in output.warnings],
            findings=findings,
            state_digest=steps[-1].state_digest,
            optim_steps=len(steps),
        )

    def _token_advantages(
        self, used: Sequence[RolloutAdvantage], step: int
    ) -> tuple[list[np.ndarray], dict[str, float]]:
        """Per rollout the advantage of each token [T], and the metrics of the KL penalty."""
        if self.reference is None:
            return [one.advantages_T for one in used], {}
        penalties, metrics = self.reference.penalties([one.rollout for one in used], step)
        return [one.advantages_T - penalty_T for one, penalty_T in zip(used, penalties, strict=True)], metrics

    def _corrected(
        self, datums_of: Sequence[list[Datum]], *, on_policy: bool
    ) -> tuple[list[list[Datum]], dict[str, float]]:
        """The datums of each rollout with the weights of `correction` and the logprobs at the start of the step, which
        the loss then compares with; unchanged without a correction."""
        config = self.config
        if config.correction is None:
            return [list(datums) for datums in datums_of], {}
        joined = [datum for datums in datums_of for datum in datums]
        output = self.training_client.forward(joined, "importance_sampling", {"trained_only": 1.0}).result()
        rows = iter([result["logprobs"].to_numpy() for result in output.loss_fn_outputs])
        corrected = []
        factors = []
        for datums in datums_of:
            pairs = [(datum, next(rows)) for datum in datums]
            sampled = [datum.loss_fn_inputs["logprobs"].to_numpy()[_is_trained(datum)] for datum in datums]
            factors_T = correction_factors(
                np.concatenate([row[_is_trained(datum)] for datum, row in pairs]),
                np.concatenate(sampled),
                config.correction,
                low=config.correction_low,
                high=config.correction_high,
            )
            left = iter(factors_T.tolist())
            corrected.append([_reweighted(datum, row, left) for datum, row in pairs])
            factors.append(factors_T)
        metrics = correction_metrics(factors)
        return corrected, metrics | logprob_mismatch(joined, output) if on_policy else metrics

    def _minibatches(self, used: Sequence[RolloutAdvantage], datums_of: Sequence[list[Datum]]) -> list[list[Datum]]:
        """The datums of each optimizer step: whole groups, dealt in turn, the same in every epoch.

        A group is not divided, because centred advantages have the mean 0 over the whole group only.
        """
        count = self.config.optim_steps_per_batch
        order = {id(group): place for place, group in enumerate({id(one.group): one.group for one in used}.values())}
        minibatches: list[list[Datum]] = [[] for _ in range(count)]
        for one, datums in zip(used, datums_of, strict=True):
            minibatches[order[id(one.group)] % count] += datums
        return [minibatch for minibatch in minibatches if minibatch] * self.config.epochs_per_batch

    def _run_passes(
        self, step: int, minibatches: Sequence[list[Datum]]
    ) -> tuple[list[tuple[list[Datum], ForwardBackwardOutput]], list[OptimStepResponse]]:
        """Sends all passes and optimizer steps before it waits for the first, so that the server never waits for us."""
        config = self.config
        sent = [
            (
                minibatch,
                self._pass(minibatch),
                self.training_client.optim_step(config.adam_params(step, config.steps)),
            )
            for minibatch in minibatches
        ]
        outputs = [(minibatch, passed.result()) for minibatch, passed, _ in sent]
        return outputs, [stepped.result() for _, _, stepped in sent]

    def _pass(self, minibatch: list[Datum]) -> APIFuture[ForwardBackwardOutput]:
        """Nothing in a run reads the logprobs of prompts, so the server need not compute them."""
        loss = self.config.loss_fn
        if callable(loss):
            return self.training_client.forward_backward_custom(minibatch, custom_loss(loss), trained_only=True)
        settings = {"trained_only": 1.0, **(self.config.loss_fn_config or {})}
        return self.training_client.forward_backward(minibatch, loss, settings)


def logprob_mismatch(datums: Sequence[Datum], output: ForwardBackwardOutput) -> dict[str, float]:
    """|sampler − trainer| over the trained tokens, also as a share of the trainer's mean |logprob|, and the k3 estimate
    of their KL divergence: 0 where the weights to train are those that sampled."""
    pairs = [
        (
            result["logprobs"].to_numpy()[_is_trained(datum)],
            datum.loss_fn_inputs["logprobs"].to_numpy()[_is_trained(datum)],
        )
        for datum, result in zip(datums, output.loss_fn_outputs, strict=True)
    ]
    trainer_T, sampler_T = (np.concatenate(of).astype(np.float64) for of in zip(*pairs, strict=True))
    differences = trainer_T - sampler_T
    absolute = np.abs(differences)
    size = float(np.abs(trainer_T).mean())
    with np.errstate(over="ignore"):
        k3 = np.expm1(differences) - differences
    return {
        "mismatch/max_abs_logprob_diff": float(absolute.max()),
        "mismatch/mean_abs_logprob_diff": float(absolute.mean()),
        "mismatch/relative_logprob_diff": float(absolute.mean()) / size if size else 0.0,
        "mismatch/k3": float(k3.mean()),
    }


def _reweighted(datum: Datum, logprobs_N: np.ndarray, factors: Iterator[float]) -> Datum:
    """The datum with other sampler logprobs, and its trained weights times the next `factors`."""
    inputs = dict(datum.loss_fn_inputs)
    weights = inputs["weights"].to_numpy().copy()
    places = np.flatnonzero(weights)
    weights[places] *= np.fromiter(itertools.islice(factors, len(places)), np.float64, len(places))
    inputs["weights"] = TensorData.from_numpy(weights)
    inputs["logprobs"] = TensorData.from_numpy(np.where(_is_trained(datum), logprobs_N, 0).astype(np.float32))
    return Datum(datum.model_input, inputs)


def _is_trained(datum: Datum) -> np.ndarray:
    """Which positions of the datum are trained, bool [N]."""
    return datum.loss_fn_inputs["weights"].to_numpy() != 0


def _entropies(results: Sequence[tuple[Datum, Mapping[str, Any]]]) -> np.ndarray | None:
    """The entropies at the trained positions of a rollout's datums, joined [T]."""
    columns = []
    for datum, result in results:
        if result.get("entropies") is None:
            return None
        columns.append(result["entropies"].to_numpy()[_is_trained(datum)])
    return np.concatenate(columns)


def _measured(
    outputs: Sequence[tuple[list[Datum], ForwardBackwardOutput]], steps: Sequence[OptimStepResponse]
) -> dict[str, float]:
    """The server's metrics: those of all passes of the step joined, and those of its last optimizer step."""
    joined = reduce_metrics([output.metrics for _, output in outputs], [len(datums) for datums, _ in outputs])
    passes = {f"train/{name.partition(':')[0]}": value for name, value in joined.items()}
    optimizer = {f"optim/{name.partition(':')[0]}": value for name, value in steps[-1].metrics.items()}
    skipped = sum(step.metrics.get("skipped_nonfinite", 0.0) for step in steps)
    return {**passes, **optimizer, "optim/skipped_nonfinite": skipped, "optim/steps": float(len(steps))}
