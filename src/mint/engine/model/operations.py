"""The operations that a decoder needs of a device: the one seam between the model and what computes it.

`torch_operations` is the reference. A device overrides what it computes in another way (`engine/cpu/operations.py`,
`engine/cuda/operations.py`). `engine/devices.py` chooses once, when a base model is loaded; the decoder never asks.

Letters: T rows (tokens) · E hidden size · I an MLP's inner width · O outputs · H all heads (query, key, value) · D head
dimension · r rank · S lora parts of one product · V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from mint.engine.lora import LoraRows, LoraWeights, SiteLora, SiteWeights
from mint.engine.model.config import Activation, DecoderConfig, Windows
from mint.engine.model.delta_net import StatesOfLayers
from mint.engine.model.linear import Linear, LoraLinears, Matrix
from mint.engine.model.weights import DeltaNetWeights, MixtureWeights
from mint.engine.packing import AttentionBlock, StateSpans
from mint.engine.quantized.number_formats import QuantizedWeight

Attention = Callable[[int, Tensor, Tensor | None], Tensor]
"""(layer, normed and rotated heads [T, H, D] in the base's dtype, sinks [query heads], if there are any) → attended
values [T, query heads · D]."""

DeltaRule = Callable[[int, DeltaNetWeights, Tensor], Tensor]
"""(layer, its weights, products [T, W] with the input of its delta net) → what its heads read [T, U], normed and gated.
Letters as in `delta_net`."""

FeedForward = Callable[[Tensor, Sequence[LoraRows]], Tensor]
"""(rows x [T, E], loras that cover them) → x + the result of a layer's experts for norm(x)."""


@dataclass(frozen=True)
class HeadSettings:
    """How a layer turns its product [T, H·D] into heads; see `Operations.finish_heads`."""

    bias: Tensor | None  # [H·D]
    norms: Tensor | None  # [rotated_heads, D]
    cos: Tensor  # [T, 1, P], as sin
    sin: Tensor
    eps: float
    head_dim: int
    rotated_heads: int
    joint_heads: int


class TrainedHeads(Protocol):
    """From the training rows of a layer to the heads that attend: norm, query/key/value product, norms and rotation of
    heads."""

    def forward(self, x: Tensor) -> tuple[Tensor, list[Tensor | None]]:
        """Heads [T, H, D] in the base's dtype of x [T, E], and what the backward needs beside x."""
        ...

    def backward(
        self, grad: Tensor, x: Tensor, saved: Sequence[Tensor | None], *, for_input: bool
    ) -> tuple[Tensor | None, list[Tensor]]:
        """From grad [T, H, D] in the base's dtype, x and what `forward` gave the gradient for x, if asked for, and
        those of the parameters of the product."""
        ...


class TrainedMlp(Protocol):
    """A layer's dense MLP over training rows: down(swiglu(gate_up(norm(x)))), to which x may be added."""

    def forward(self, x: Tensor) -> tuple[Tensor, list[Tensor | None]]:
        """[T, E] of x [T, E], and what the backward needs beside x."""
        ...

    def backward(
        self, grad: Tensor, x: Tensor, saved: Sequence[Tensor | None], *, for_input: bool
    ) -> tuple[Tensor | None, list[Tensor]]:
        """From grad [T, E], x and what `forward` gave the gradient for x, if asked for, and those of the parameters of
        the two products, gate_up's first."""
        ...


class Operations(Protocol):
    """The operations of one device on base weights of one dtype. Tensors are float32 where nothing else is said."""

    dtype: torch.dtype
    """The dtype of the base's matrices and of heads."""
    device: torch.device
    activation: Activation
    attention_name: str
    """Which attention packed rows go through, for `get_info`."""
    instructions: str | None
    """The set of vector instructions of the kernels in C, for `get_info`; None without them."""
    kernels_digest: str | None
    """The digest of their sources (`NativeBuild.digest`), for `get_info`; None without them."""
    max_rows: int
    """Rows of a training micro-batch where memory sets no bound."""
    activation_share: int
    """What a training forward keeps for its backward may take one part in so many of the device's memory."""
    max_sampling_rows: int
    """Sequences that are decoded together where memory sets no bound."""
    max_prefill_tokens: int
    """Prompt tokens of one step of sampling where memory sets no bound."""
    merged_bytes: int
    """Loras are merged into copies of the layers of a float32 base that take no more than this."""
    logits_at_once: int
    """Logits of a training pass that exist at once."""

    def release_memory(self) -> None:
        """Hands freed memory back to the device or the system."""
        ...

    # --- matrices and loras ---

    def matrix(self, weight: Tensor) -> Matrix:
        """A frozen matrix [O, I], float32 or bfloat16, in the device's layout."""
        ...

    def quantized_matrix(self, weight: QuantizedWeight) -> Matrix:
        """A frozen matrix [O, I] whose numbers have 4 or 8 bits, in the device's layout."""
        ...

    def unembedding(self, weight: Tensor) -> Matrix:
        """A matrix [V, E] whose products, the logits, are not rounded to bfloat16. `weight` itself stays in memory: it
        may be the embedding too."""
        ...

    def unembedding_copy_bytes(self, vocabulary: int, hidden: int) -> int:
        """The memory that `unembedding` takes beside the tensor of a matrix [vocabulary, hidden]."""
        ...

    def turned_copy_bytes(self, outputs: int, inputs: int) -> int:
        """The memory of what `matrix` of [outputs, inputs] keeps once a gradient has needed it."""
        ...

    def quantized_unembedding(self, weight: QuantizedWeight) -> Matrix:
        """A matrix [V, E] whose numbers have 8 bits, and whose products are not rounded to bfloat16."""
        ...

    def loras(self, matrices: Mapping[str, Matrix]) -> LoraLinears:
        """How loras are applied to the `matrices` of the layers, by site."""
        ...

    def published_lora(self, lora: LoraWeights) -> LoraWeights:
        """The weights from which `add_loras` computes the same bits, in as little memory as it can read; they are never
        trained."""
        ...

    def add_loras(self, out: Tensor, x: Tensor, loras: Sequence[SiteLora]) -> None:
        """Adds `scale · x @ a.T @ b.T` of each lora to its own rows of `out` [T, O] in place: a row gets the same bits
        whatever other rows and loras are in the batch.

        The S parts of a fused product (query, key, value) share one `a` [S·r, I] and write side by side into `out`.
        """
        ...

    def lora_gradient(
        self, grad: Tensor, x: Tensor, lora: SiteWeights, scale: float, grad_x: Tensor | None
    ) -> list[Tensor]:
        """The gradients of `a` and the bs from grad [T, O] and x [T, I]; that of x is added to `grad_x` [T, I], if
        given."""
        ...

    # --- rows ---

    def take_rows(self, table: Tensor, rows: Tensor, scale: float = 1.0) -> Tensor:
        """Rows of a `table` [any, E] by their numbers int64 [T], in float32, times `scale`."""
        ...

    def join_rows(self, parts: Sequence[Tensor]) -> Tensor:
        """`parts` [·, E] one below the other."""
        ...

    # --- between the products ---

    def add_bias(self, x: Tensor, bias: Tensor) -> Tensor:
        """`x + bias` of x [T, E] and bias [E]."""
        ...

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float, residual: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """`x / rms(x) · weight` of x [T, E], plus `residual` [T, E], and 1 / rms(x) [T, 1]."""
        ...

    def rms_norm_again(self, x: Tensor, inverse: Tensor, weight: Tensor) -> Tensor:
        """`rms_norm` where 1 / rms(x) is known."""
        ...

    def rms_norm_backward(
        self, grad: Tensor, x: Tensor, inverse: Tensor, weight: Tensor, residual: Tensor | None = None
    ) -> Tensor:
        """The gradient for x from grad [T, E] for `rms_norm`, plus `residual` [T, E]; may overwrite `grad`."""
        ...

    def finish_heads(
        self,
        qkv: Tensor,
        bias: Tensor | None,
        norms: Tensor | None,
        cos: Tensor,
        sin: Tensor,
        *,
        eps: float,
        rotated_heads: int,
        joint_heads: int = 0,
    ) -> tuple[Tensor, Tensor | None]:
        """Heads [T, H, D] in `dtype` from qkv [T, H, D], and 1 / rms [T, rotated_heads, 1] of those that are normed.

        The bias is added to qkv in place. The first `rotated_heads` heads are normed, if there are `norms`
        [rotated_heads, D], and their first 2·P numbers rotated by cos and sin [T, 1, P]. If there are `joint_heads`, so
        many are normed together, and the other rotated ones, too; else each alone.
        """
        ...

    def finish_heads_backward(
        self,
        grad: Tensor,
        qkv: Tensor | None,
        inverse: Tensor | None,
        norms: Tensor | None,
        cos: Tensor,
        sin: Tensor,
        *,
        rotated_heads: int,
        joint_heads: int = 0,
    ) -> Tensor:
        """The gradient for qkv [T, H, D], float32, from grad [T, H, D] for `finish_heads`, which gave `inverse`.
        Without `norms` it does not depend on qkv, which may then be missing."""
        ...

    def take_heads(self, x: Tensor, order: Tensor) -> Tensor:
        """The heads `order` int64 [N] of x [T, any, D], [T, N, D]."""
        ...

    def take_columns(self, x: Tensor, order: Tensor) -> Tensor:
        """The columns `order` int64 [N] of x [T, any], [T, N]."""
        ...

    def gate(self, x: Tensor, gates: Tensor) -> Tensor:
        """`x · sigmoid(gates)` of rows, both [T, U]."""
        ...

    def gate_rows(self, x: Tensor, inputs: Tensor, gate: Tensor) -> tuple[Tensor, Tensor]:
        """`x · share` of rows x [T, U], with one share = sigmoid(inputs · gate) for each row of inputs [T, E] by gate
        [E]; and the shares [T, 1]."""
        ...

    def gate_backward(self, grad: Tensor, x: Tensor, gates: Tensor) -> tuple[Tensor, Tensor]:
        """The gradients for x and gates from grad for `gate`, all [T, U]."""
        ...

    def swiglu(self, gate_up: Tensor) -> Tensor:
        """`activation(gate) · up` [T, I] of [T, 2·I]; see `Activation`."""
        ...

    def swiglu_again(self, gate_up: Tensor) -> tuple[Tensor, Tensor | None]:
        """`swiglu`, and what `swiglu_backward` can use of it."""
        ...

    def swiglu_backward(self, grad: Tensor, gate_up: Tensor, active_gate: Tensor | None = None) -> Tensor:
        """The gradient for gate_up [T, 2·I] from grad [T, I] and what `swiglu_again` gave; may overwrite `grad`."""
        ...

    def mlp_parts(self, rows: int, width: int) -> int:
        """In how many parts so many rows are trained through an MLP whose wide product has `width` outputs."""
        ...

    def heads(self, qkv: Linear, norm: Tensor | None, settings: HeadSettings) -> TrainedHeads | None:
        """The heads of a layer with `norm` [E] before its product. None where the operations above compute them one
        after the other."""
        ...

    def mlp(
        self, gate_up: Linear, down: Linear, norm: Tensor | None, *, eps: float, adds: bool, rows: int
    ) -> TrainedMlp | None:
        """The MLP of a layer with `norm` [E] before it, for so many rows; `adds`: x is added to its result. None where
        the operations above compute it one after the other."""
        ...

    def packed_attention(
        self, blocks: Sequence[AttentionBlock], query_heads: int, kv_heads: int, windows: Windows
    ) -> Attention:
        """Causal attention of packed rows; in layers with a window, over the last keys alone."""
        ...

    def delta_rule(self, spans: StateSpans, config: DecoderConfig, states: StatesOfLayers | None) -> DeltaRule:
        """The delta nets over the rows of `spans`, whose slots are those of `states`; None: of one forward alone. The
        arrays of `spans` are read at each call."""
        ...

    def mixture(
        self, weights: MixtureWeights, norm: Tensor, layer: int, config: DecoderConfig, loras: LoraLinears
    ) -> FeedForward:
        """The experts of a layer, with the norm [E] before them."""
        ...

    # --- logits ---

    def rows_in_cache(self, width: int) -> int | None:
        """Rows of `width` logits that are best treated together; None: all."""
        ...

    def softmax_statistics(self, logits: Tensor, needs_gradient: np.ndarray) -> tuple[Tensor, Tensor, Tensor]:
        """logsumexp and entropy of each row of logits [T, V], both [T]; and the negative softmax, in `dtype`, of the
        rows with `needs_gradient` (bool [T]), written over the logits. With 1 added at a token, that is the gradient
        of the token's logprob for the logits."""
        ...
