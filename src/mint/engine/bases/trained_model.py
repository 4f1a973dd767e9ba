"""A lora in training on one base model: its weights, their gradient, and the moments of its optimizer.

One process keeps all four vectors. Where several processes divide a large lora (`Peers.divide_state`), each keeps its
part of every vector. The whole weights are gathered for the time of a pass, whose gradient is added up by parts. Then
all processes call the same methods in the same order.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from contextlib import contextmanager

import numpy as np
import torch
from torch import Tensor

from mint.engine.bases.base_model import BaseModel
from mint.engine.lora import LoraLayout, LoraWeights
from mint.engine.optimizer import AdamState, step_adam
from mint.engine.protocol import AdamSpec, LoraSpec, LossSpec, MicroBatching, ModelState, PassResult, TrainDatum
from mint.engine.reductions.division import Peers
from mint.engine.state_digest import blocks_of, digest_of, digest_of_divided, is_old, old_digest_of
from mint.errors import CheckpointError


class TrainedModel:
    """A lora in training."""

    def __init__(self, base: BaseModel, spec: LoraSpec, peers: Peers, *, fused: bool) -> None:
        """A new lora with a fresh optimizer, which takes its steps `fused` or not (`step_adam`)."""
        self.base = base
        self.layout = LoraLayout(base.sites(spec), spec)
        self._peers = peers
        self._fused = fused
        self._division = peers.divide_state(blocks_of(self.layout.arrays))
        whole = LoraWeights.zeros(self.layout, base.device)
        whole.initialise()
        # None: divided, and nothing whole outlives a pass.
        self._whole = whole if self._division is None else None
        self.weights = self._part(whole.flat)
        """Those that this process keeps: [layout.size], or a part of them."""
        self.gradient = whole.enable_gradient() if self._division is None else torch.zeros_like(self.weights)
        """The accumulated gradient of `weights`."""
        self.adam = AdamState.fresh(self.weights)
        self._has_gradient = False
        self._has_older_sum = False  # the gradient has a part that was summed as older versions did
        self._tokens = 0  # trained since the last step

    def forward(self, data: Sequence[TrainDatum], loss: LossSpec) -> PassResult:
        """Logprobs and loss; nothing changes."""
        with self._whole_weights() as weights:
            return self.base.run_pass(weights, data, loss, gradient=None, repeated=None, peers=self._peers)

    def forward_backward(
        self, data: Sequence[TrainDatum], loss: LossSpec, *, repeated: MicroBatching | None
    ) -> PassResult:
        """Runs `forward`, and adds the gradient of the summed loss to the accumulated one.

        Raises:
            OutOfMemoryError: memory does not suffice for one sequence, or to run the pass as it was `repeated`.
        """
        with self._whole_weights() as weights:
            # Parts are added in the tree alone: one after the other, each process adds all of them.
            is_older = repeated is not None and repeated.order == "running"
            gradient = self._whole_gradient(weights, gathers=is_older)
            result = self.base.run_pass(
                weights,
                data,
                loss,
                gradient=gradient,
                repeated=repeated,
                peers=self._peers,
                state=None if is_older else self._division,
            )
            if self._division is not None:
                self.gradient = self._part(gradient)
        self._has_gradient = True
        self._has_older_sum |= is_older
        self._tokens += int(result.metrics["tokens:sum"])
        return result

    def clear_gradient(self) -> None:
        """Throws the accumulated gradient away."""
        self.gradient.zero_()
        self._has_gradient, self._has_older_sum, self._tokens = False, False, 0

    def optim_step(self, adam: AdamSpec) -> dict[str, float]:
        """Applies and clears the gradient; `tokens` counts the tokens that it comes from."""
        metrics = step_adam(
            self.weights,
            self.gradient,
            self.adam,
            adam,
            fused=self._fused,
            older_norm=self._has_older_sum,
            division=self._division,
        )
        metrics["tokens"] = float(self._tokens)
        self._has_gradient, self._has_older_sum, self._tokens = False, False, 0
        return metrics

    def read_state(self) -> ModelState:
        """A copy of weights and optimizer."""
        # Moments need no copy: a step replaces their tensors, and never writes into them.
        exp_avg, exp_avg_sq = self._gathered(self.adam.exp_avg), self._gathered(self.adam.exp_avg_sq)
        return ModelState(
            weights=self.read_weights(),
            step=self.adam.step,
            exp_avg=self.layout.named(exp_avg),
            exp_avg_sq=self.layout.named(exp_avg_sq),
        )

    def read_weights(self) -> dict[str, np.ndarray]:
        """A copy of the weights, by PEFT name."""
        return self.layout.named(self._copied_weights())

    def copy_weights(self) -> LoraWeights:
        """A copy of the weights without gradient; later steps do not touch it."""
        return LoraWeights(self.layout, self._copied_weights())

    def write_state(self, state: ModelState) -> None:
        """Replaces weights and optimizer (moments None: a fresh optimizer) and clears the gradient.

        Raises:
            CheckpointError: names or shapes differ, or one moment is missing; nothing has changed.
        """
        # All parts are checked before the first is written: a state that does not fit leaves the model as it was.
        weights = self.layout.assemble(state.weights, "the weights")
        if (state.exp_avg is None) != (state.exp_avg_sq is None):
            raise CheckpointError(
                "the state has one of the optimizer's two moments, but not the other",
                remedy="Load its weights without the optimizer, or another checkpoint",
            )
        adam = AdamState.fresh(self.weights)
        if state.exp_avg is not None and state.exp_avg_sq is not None:
            exp_avg = self.layout.assemble(state.exp_avg, "the optimizer's first moments")
            exp_avg_sq = self.layout.assemble(state.exp_avg_sq, "the optimizer's second moments")
            device = self.weights.device
            adam = AdamState(self._part(exp_avg).to(device), self._part(exp_avg_sq).to(device), state.step)
        self.weights.copy_(self._part(weights))
        self.adam = adam
        self.clear_gradient()

    def digest(self, *, like: str | None = None) -> str:
        """A hash of weights, moments and step count, bit for bit, in the form of the digest `like`."""
        # The gradient is left out: a digest is taken after a step, when it is zero.
        step, arrays = self.adam.step, self.layout.arrays
        vectors = self.weights, self.adam.exp_avg, self.adam.exp_avg_sq
        if like is not None and is_old(like):
            return old_digest_of(step, [self._gathered(vector) for vector in vectors])
        if self._division is None:
            return digest_of(step, arrays, vectors)
        return digest_of_divided(step, arrays, vectors, self._division)

    def forget(self) -> None:
        """Frees what the base keeps for the weights."""
        if self._whole is not None:
            self.base.forget(self._whole)

    @contextmanager
    def _whole_weights(self) -> Generator[LoraWeights]:
        """The whole weights for a pass. Those of a divided lora are gathered, and dropped afterwards."""
        if self._whole is not None:
            yield self._whole
            return
        gathered = LoraWeights(self.layout, self._gathered(self.weights))
        try:
            yield gathered
        finally:
            self.base.forget(gathered)

    def _whole_gradient(self, weights: LoraWeights, *, gathers: bool) -> Tensor:
        """The vector to which a pass with the whole `weights` adds. Of a divided lora, it has the accumulated gradient
        in this process's own part, or everywhere, if it `gathers`."""
        if self._division is None:
            return self.gradient
        gradient = weights.enable_gradient()
        if self._has_gradient:
            if gathers:
                gradient.copy_(self._division.gather(self.gradient))
            else:
                gradient[self._division.own] = self.gradient
        return gradient

    def _copied_weights(self) -> Tensor:
        """The whole weights, in a vector of their own."""
        return self.weights.clone() if self._division is None else self._division.gather(self.weights)

    def _gathered(self, part: Tensor) -> Tensor:
        """The whole vector of which this process keeps `part`."""
        return part if self._division is None else self._division.gather(part)

    def _part(self, whole: Tensor) -> Tensor:
        """The part of `whole` that this process keeps, as a copy, so that the rest can be freed; undivided, all."""
        return whole if self._division is None else whole[self._division.own].clone()
