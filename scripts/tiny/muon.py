"""Muon: momentum whose update of each matrix is made orthogonal (after Keller Jordan's description).

Matrices of one shape are updated together. Does not know the model; embeddings, norms and biases belong to AdamW.
Letters: M matrices of one shape, P rows, Q columns.
"""

import torch
from torch import Tensor

MOMENTUM = 0.95
QUINTIC = (3.4445, -4.7750, 2.0315)
"""Coefficients of the Newton-Schulz iteration."""
ITERATIONS = 5


def orthogonalise(updates_MPQ: Tensor) -> Tensor:
    """Each matrix with its singular values pushed to about 1, in bf16."""
    a, b, c = QUINTIC
    x = updates_MPQ.bfloat16()
    is_tall = x.shape[-2] > x.shape[-1]
    if is_tall:
        x = x.mT
    x = x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    for _ in range(ITERATIONS):
        gram = x @ x.mT
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x.mT if is_tall else x


class Muon:
    """Nesterov momentum, orthogonalised, over 2-d parameters."""

    def __init__(self, parameters: list[torch.nn.Parameter]) -> None:
        shapes = sorted({tuple(parameter.shape) for parameter in parameters})
        self.groups = [[p for p in parameters if tuple(p.shape) == shape] for shape in shapes]
        self.momenta_MPQ = [torch.zeros(len(group), *group[0].shape) for group in self.groups]

    @torch.no_grad()
    def step(self, learning_rate: float) -> None:
        """One update from the parameters' gradients, which it then clears."""
        for group, momentum_MPQ in zip(self.groups, self.momenta_MPQ, strict=True):
            gradients_MPQ = torch.stack([parameter.grad for parameter in group])
            momentum_MPQ.lerp_(gradients_MPQ, 1 - MOMENTUM)
            updates_MPQ = orthogonalise(gradients_MPQ.lerp(momentum_MPQ, MOMENTUM)).float()
            rows, columns = group[0].shape
            scale = max(1.0, rows / columns) ** 0.5
            for parameter, update in zip(group, updates_MPQ, strict=True):
                parameter.add_(update, alpha=-learning_rate * scale)
                parameter.grad = None
