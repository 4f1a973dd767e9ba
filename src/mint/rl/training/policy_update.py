"""One batch of rollouts becomes optimizer steps: advantages, datums, preflight, passes, and what the server measured.

Letters: T sampled tokens of one rollout.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from mint.client.training_client import TrainingClient
from mint.rl.config import RLConfig
from mint.rl.finding import Finding
from mint.rl.rollout import RolloutBatch
from mint.rl.training.advantages import RolloutAdvantage, loss_weights, rollout_advantages
from mint.rl.training.datum_check import check_datums
from mint.rl.training.datums import rollout_datums
from mint.rl.training.kl_reference import KLReference
from mint.types import Datum, ForwardBackwardOutput, OptimStepResponse


@dataclass(frozen=True)
class Update:
    """What a step trained on (`chosen`, with signal) out of what counted (`judged`), and what came of it.

    `advantages` are those of the tokens of each `chosen` [T], where a penalty makes them differ from the rollout's own;
    else there are none. `entropies` [T] are those of the distributions that the tokens of each `chosen` were drawn
    from, as the pass found them; none where the server does not say.
    """

    judged: list[RolloutAdvantage]
    chosen: list[RolloutAdvantage]
    advantages: list[np.ndarray] = field(default_factory=list)
    entropies: list[np.ndarray] = field(default_factory=list)
    datums: int = 0
    metrics: dict[str, float] = field(default_factory=dict)
    warnings: list[str] = field(default_factory=list)
    findings: list[Finding] = field(default_factory=list)
    state_digest: str | None = None
    optim_steps: int = 0


class Updater:
    """Trains on batches of rollouts."""

    def __init__(self, trainer: TrainingClient, reference: KLReference | None, config: RLConfig) -> None:
        """`reference` is that of the KL penalty, None without one."""
        self.trainer, self.reference, self.config = trainer, reference, config

    def update(self, batch: RolloutBatch, *, on_policy: bool) -> Update:
        """The optimizer steps of one batch; none at all where no group had a signal."""
        judged = rollout_advantages(batch.groups, self.config)
        informative = {id(one.group) for one in judged if one.advantage}
        chosen = [one for one in judged if self.reference is not None or id(one.group) in informative]
        if not chosen:
            return Update(judged, [])
        penalties, metrics = self._penalties(chosen)
        advantages = [one.advantage - penalty for one, penalty in zip(chosen, penalties, strict=True)]
        datums_of = [
            rollout_datums(one.rollout, advantages_T=advantages_T, weight=weight)
            for one, advantages_T, weight in zip(chosen, advantages, loss_weights(chosen, self.config), strict=True)
        ]
        datums = [datum for of_rollout in datums_of for datum in of_rollout]
        findings = check_datums(
            datums, [len(one.rollout.turns[0].prompt) for one, of in zip(chosen, datums_of, strict=True) for _ in of]
        )
        outputs, steps = self._train(batch.step, self._shares(chosen, datums_of))
        metrics |= _measured(outputs, steps)
        if on_policy:
            metrics |= logprob_mismatch(outputs[0][0], outputs[0][1])
        return Update(
            judged,
            chosen,
            advantages=advantages if self.reference is not None else [],
            entropies=_entropies(datums_of, outputs),
            datums=len(datums),
            metrics=metrics,
            warnings=[warning for _, output in outputs for warning in output.warnings],
            findings=[_at(finding, batch.step) for finding in findings],
            state_digest=steps[-1].state_digest,
            optim_steps=len(steps),
        )

    def _penalties(self, chosen: Sequence[RolloutAdvantage]) -> tuple[list[np.ndarray], dict[str, float]]:
        if self.reference is None:
            return [np.zeros(len(one.rollout.tokens)) for one in chosen], {}
        return self.reference.penalties([one.rollout for one in chosen])

    def _shares(self, chosen: Sequence[RolloutAdvantage], datums_of: Sequence[list[Datum]]) -> list[list[Datum]]:
        """The datums of each optimizer step: whole groups, dealt in turn."""
        count = self.config.optim_steps_per_batch
        order = {id(group): place for place, group in enumerate({id(one.group): one.group for one in chosen}.values())}
        shares: list[list[Datum]] = [[] for _ in range(count)]
        for one, datums in zip(chosen, datums_of, strict=True):
            shares[order[id(one.group)] % count] += datums
        return [share for share in shares if share]

    def _train(
        self, step: int, shares: Sequence[list[Datum]]
    ) -> tuple[list[tuple[list[Datum], ForwardBackwardOutput]], list[OptimStepResponse]]:
        """All passes and steps are sent before the first is waited for."""
        config = self.config
        sent = [
            (
                share,
                self.trainer.forward_backward(share, config.loss_fn, config.loss_fn_config),
                self.trainer.optim_step(config.adam_params(step, config.steps)),
            )
            for share in shares
        ]
        return [(share, passed.result()) for share, passed, _ in sent], [stepped.result() for _, _, stepped in sent]


def logprob_mismatch(datums: Sequence[Datum], output: ForwardBackwardOutput) -> dict[str, float]:
    """|sampler − trainer| over the trained tokens: where the weights are those that sampled, it should be 0."""
    differences = [
        np.abs(datum.loss_fn_inputs["logprobs"].to_numpy() - result["logprobs"].to_numpy())[
            datum.loss_fn_inputs["weights"].to_numpy() != 0
        ]
        for datum, result in zip(datums, output.loss_fn_outputs, strict=True)
    ]
    joined = np.concatenate(differences)
    return {
        "mismatch/max_abs_logprob_diff": float(joined.max()),
        "mismatch/mean_abs_logprob_diff": float(joined.mean()),
    }


def _entropies(
    datums_of: Sequence[list[Datum]], outputs: Sequence[tuple[list[Datum], ForwardBackwardOutput]]
) -> list[np.ndarray]:
    """Of the sampled tokens of each rollout, whose datums were dealt out to the passes."""
    found = {
        id(datum): result.get("entropies")
        for datums, output in outputs
        for datum, result in zip(datums, output.loss_fn_outputs, strict=True)
    }
    if any(tensor is None for tensor in found.values()):
        return []
    return [
        np.concatenate(
            [tensor.to_numpy()[datum.loss_fn_inputs["weights"].to_numpy() != 0]
             for datum in datums if (tensor := found[id(datum)]) is not None]
        )
        for datums in datums_of
    ]  # fmt: skip


def _measured(
    outputs: Sequence[tuple[list[Datum], ForwardBackwardOutput]], steps: Sequence[OptimStepResponse]
) -> dict[str, float]:
    """The server's metrics: those of passes averaged over the step's passes (maxima: the largest), the last step's."""
    merged: dict[str, list[float]] = {}
    for _, output in outputs:
        for name, value in output.metrics.items():
            merged.setdefault(name, []).append(value)
    passes = {}
    for name, values in merged.items():
        short, _, reduction = name.partition(":")
        combine = {"max": max, "min": min, "sum": sum}.get(reduction, lambda found: float(np.mean(found)))
        passes[f"train/{short}"] = float(combine(values))
    optimizer = {f"optim/{name.partition(':')[0]}": value for name, value in steps[-1].metrics.items()}
    skipped = sum(step.metrics.get("skipped_nonfinite", 0.0) for step in steps)
    return {**passes, **optimizer, "optim/skipped_nonfinite": skipped, "optim/steps": float(len(steps))}


def _at(finding: Finding, step: int) -> Finding:
    return Finding(finding.code, finding.severity, step, finding.evidence, finding.remedy, finding.numbers)
