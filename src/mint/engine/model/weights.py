"""The base weights of a decoder as the forward uses them: layers that share their inputs are one matrix.

Letters: E hidden size · H all heads (query, key, value) · D head dimension · I an MLP's inner width · V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from mint.engine.model.linear import Matrix


@dataclass(frozen=True)
class MlpWeights:
    """Gate and up as one matrix, and down."""

    gate_up: Matrix  # [2·I, E]
    down: Matrix  # [E, I]


@dataclass(frozen=True)
class MixtureWeights:
    """A mixture of experts, each an MLP, and the matrix that chooses among them, in float32."""

    router: Matrix  # [experts, E]
    experts: list[MlpWeights]


@dataclass(frozen=True)
class LayerWeights:
    """One layer: the matrices in the base's dtype, the bias and the norms in float32."""

    input_norm: Tensor  # [E]
    qkv: Matrix  # [H·D, E]
    qkv_bias: Tensor | None  # [H·D]
    head_norms: Tensor | None  # [query + key heads, D]
    o: Matrix  # [E, query heads · D]
    post_norm: Tensor  # [E]
    mlp: MlpWeights | MixtureWeights


@dataclass(frozen=True)
class BaseWeights:
    """All of a base model. `unembedding` shares the memory of the embedding where the two are tied."""

    layers: list[LayerWeights]
    embedding: Tensor  # [V, E], in the base's dtype
    final_norm: Tensor  # [E]
    unembedding: Matrix  # [V, E]

    @property
    def matrices(self) -> dict[str, Matrix]:
        """The matrices of the layers outside of experts, by the name of their site."""
        found: dict[str, Matrix] = {}
        for index, layer in enumerate(self.layers):
            found |= {f"{index}.qkv": layer.qkv, f"{index}.o": layer.o}
            if isinstance(layer.mlp, MlpWeights):
                found |= {f"{index}.gate_up": layer.mlp.gate_up, f"{index}.down": layer.mlp.down}
        return found
