"""A decoder over packed rows: one forward for training, prefill and decoding alike.

Rows are tokens; which row attends to which is the business of the `attention` that the caller passes in. Base weights
are frozen, in float32 or bfloat16; hidden states are float32 throughout. Knows nothing of sequences, losses or caches.

The bits of a row do not depend on the other rows: every product runs over at least `min_rows` rows, above which (as
measured, and tested) BLAS treats each row alike, and nothing here reduces over rows.

Letters: T rows · E hidden size · H all heads (query, key, value) · D head dimension · V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from mint.engine.cpu.attention import NativePackedAttention
from mint.engine.cpu.grouped_experts import group_experts
from mint.engine.cpu.kernels import HEAD_DIMS, LANES, NativeKernels
from mint.engine.cpu.linear import NativeProducts
from mint.engine.cpu.moves import NativeMoves
from mint.engine.cuda.attention import MIN_HEAD_DIM, FlexPackedAttention
from mint.engine.lora import UNEMBED, LoraRows, LoraWeights
from mint.engine.model.blocks import AttentionInputs, Geometry, Mlp, Norm, apply_mlp, project_heads
from mint.engine.model.config import DecoderConfig
from mint.engine.model.experts import mix_experts
from mint.engine.model.functions import LoraProduct, RmsNorm, recomputed, run
from mint.engine.model.linear import FrozenMatrix, min_rows
from mint.engine.model.lora_linear import MergedMatrices, SiteProduct, fit_for_merging
from mint.engine.model.packed_attention import PackedAttention
from mint.engine.model.rope import rope_tables
from mint.engine.model.weights import LayerWeights, read_base_weights
from mint.engine.packing import AttentionBlock
from mint.models.tensor_files import StoredTensor


@dataclass(frozen=True)
class _Run:
    """Rows `start:stop` are multiplied with `product`."""

    start: int
    stop: int
    product: SiteProduct

    @property
    def count(self) -> int:
        return self.stop - self.start

    def rows(self, x: Tensor, least: int) -> Tensor:
        """Its rows of x; a copy where these are fewer than `least`."""
        return pad_rows(x[self.start : self.stop], least)


Attention = Callable[[int, Tensor], Tensor]
"""(layer, normed and rotated heads [T, H, D]) → attended values [T, query heads · D], both in the base's dtype."""


class Decoder:
    """The base model's weights and its forward."""

    def __init__(
        self,
        config: DecoderConfig,
        tensors: Mapping[str, StoredTensor],
        *,
        dtype: torch.dtype,
        device: torch.device,
        kernels: NativeKernels | None = None,
        gpu_kernels: bool = True,
    ) -> None:
        """Takes every tensor of a Hugging Face state dict. `kernels` compute what they can on a CPU; with
        `gpu_kernels`, packed rows attend by FlexAttention on a GPU.

        Raises:
            InvalidRequestError: a tensor is missing, has another shape than `config` says, or is not of its family.
        """
        self.config = config
        self.dtype = dtype
        self.device = device
        self.kernels = kernels if device.type == "cpu" and _fits_kernels(config) else None
        self.flexes = gpu_kernels and device.type == "cuda" and config.head_dim >= MIN_HEAD_DIM
        self.moves = None if self.kernels is None else NativeMoves(self.kernels)
        products = None if self.kernels is None else NativeProducts(self.kernels)
        weights = read_base_weights(config, tensors, dtype=dtype, device=device, kernels=products)
        self.weights = weights
        self._layers = weights.layers
        self._grouped = group_experts(self.kernels, weights.layers, config)
        self._embedding, self._final_norm, self._unembedding = (
            weights.embedding,
            weights.final_norm,
            weights.unembedding,
        )
        self.rope = self._cos, self._sin = rope_tables(config, device)
        matrices = _layer_matrices(self._layers)
        self._sites = {**matrices, UNEMBED: self._unembedding}
        self._matrices = tuple(matrices.values())
        # Many loras share one product of the base; merged, each has products of its own, which pays for small ones.
        merges = device.type == "cpu" and dtype == torch.float32 and fit_for_merging(matrices)
        self._merged = MergedMatrices(matrices) if merges else None

    @property
    def entries(self) -> int:
        """Weights that a step of decoding reads."""
        experts = [layer.experts for layer in self._layers if layer.experts is not None]
        matrices = [*self._sites.values(), *(matrix for own in experts for matrix in own.gate_up + own.down)]
        return sum(matrix.outputs * matrix.inputs for matrix in matrices)

    def bytes_between(self, rows: int) -> int:
        """What the rows that go into and come out of all products take, and what is made of the latter in between."""
        return 4 * rows * sum(weight.inputs + 2 * weight.outputs for weight in self._sites.values())

    def packed_attention(self, blocks: Sequence[AttentionBlock]) -> Attention:
        """Causal attention of packed rows."""
        heads = (self.config.num_attention_heads, self.config.num_key_value_heads)
        if self.flexes:
            return FlexPackedAttention(blocks, *heads, self.device)
        if self.kernels is None:
            return PackedAttention(blocks, *heads, self.device)
        return NativePackedAttention(self.kernels, blocks, *heads)

    def forward(
        self,
        tokens: Tensor,
        positions: Tensor,
        attention: Attention,
        loras: Sequence[LoraRows],
        *,
        recompute: bool = False,
    ) -> Tensor:
        """Final hidden states (normed) [T, E] of `tokens` [T] at `positions` [T]; `loras` cover all rows.

        With `recompute`, a layer keeps nothing but its input for the backward, which then runs its forward again:
        the same bits in less memory and more time.
        """
        count = tokens.shape[0]
        least = _rows_of_all(self._matrices)
        tokens, positions = pad_rows(tokens, least), pad_rows(positions, least)
        loras = _cover(loras, count, tokens.shape[0])
        config = self.config
        geometry = Geometry(
            dtype=self.dtype,
            eps=config.rms_norm_eps,
            rotated=config.num_attention_heads + config.num_key_value_heads,
            head_dim=config.head_dim,
            cos=self._take(self._cos, positions).unsqueeze(1),
            sin=self._take(self._sin, positions).unsqueeze(1),
            kernels=self.kernels,
        )
        x = self._take(self._embedding, tokens)
        for index in range(len(self._layers)):
            layer = partial(self._layer, index, attention=attention, loras=loras, geometry=geometry, count=count)
            if recompute and torch.is_grad_enabled():
                x = recomputed(layer, x)
            else:
                x = layer(x)
        return run(Norm, x, self._final_norm, geometry)[:count]

    def _layer(
        self, index: int, x: Tensor, *, attention: Attention, loras: Sequence[LoraRows], geometry: Geometry, count: int
    ) -> Tensor:
        """One layer on rows x [T, E], of which the first `count` are tokens and the rest padding."""
        layer = self._layers[index]
        heads = self._heads(index, x, loras, geometry)
        mixed = pad_rows(attention(index, heads[:count]), len(x))
        if self.moves is not None and not torch.is_grad_enabled():
            mixed = self.moves.widen(mixed)
        x = self._linear(mixed, layer.o, f"{index}.o", loras, residual=x)
        if index in self._grouped:
            return pad_rows(self._grouped[index].mix(x[:count], loras), len(x))
        if layer.experts is not None and self.config.experts is not None:
            # without the padding, whose rows would go to experts that nobody else needs
            own = run(RmsNorm, x, layer.post_norm, geometry.eps)[:count], x[:count]
            mixed = mix_experts(*own, layer.experts, self.config.experts, index, loras, self._linear_of_any)
            return pad_rows(mixed, len(x))
        return self._mlp(index, x, loras, geometry)

    def _heads(self, index: int, x: Tensor, loras: Sequence[LoraRows], geometry: Geometry) -> Tensor:
        layer = self._layers[index]
        runs = self._site(f"{index}.qkv", layer.qkv, loras)
        if torch.is_grad_enabled():
            return run(AttentionInputs, x, layer, runs[0].product, geometry, *runs[0].product.parameters)
        return project_heads(x, layer, partial(_multiply, runs, moves=self.moves), geometry)[0]

    def _mlp(self, index: int, x: Tensor, loras: Sequence[LoraRows], geometry: Geometry) -> Tensor:
        layer = self._layers[index]
        if layer.gate_up is None or layer.down is None:
            raise AssertionError(f"layer {index} has neither an MLP nor experts")
        gate_up = self._site(f"{index}.gate_up", layer.gate_up, loras)
        down = self._site(f"{index}.down", layer.down, loras)
        if torch.is_grad_enabled():
            products = (gate_up[0].product, down[0].product)
            parameters = (parameter for product in products for parameter in product.parameters)
            return run(Mlp, x, layer, *products, geometry, *parameters)
        return apply_mlp(x, layer, *(partial(_multiply, runs, moves=self.moves) for runs in (gate_up, down)), geometry)[
            0
        ]

    def _take(self, table: Tensor, rows: Tensor) -> Tensor:
        """Rows of a table in float32."""
        return table.index_select(0, rows).float() if self.moves is None else self.moves.take(table, rows)

    def logits(self, hidden: Tensor, loras: Sequence[LoraRows]) -> Tensor:
        """Float32 logits [T, V] of hidden states [T, E]."""
        return self._linear_of_any(hidden, self._unembedding, UNEMBED, loras)

    def runs_natively(self, loras: Sequence[LoraRows]) -> bool:
        """Whether kernels compute all of a forward without gradient, and of its logits, for rows with `loras`."""
        mixtures = (self._grouped.get(index) for index, layer in enumerate(self._layers) if layer.experts is not None)
        if self.kernels is None or not all(own is not None and own.routes_natively for own in mixtures):
            return False
        return all(
            _is_native(self._product(name, weight, own.weights))
            for own in loras
            for name, weight in self._sites.items()
        )

    def versions(self, loras: Sequence[LoraRows]) -> list[int]:
        """Changes when a forward with `loras` would multiply with other merged matrices than before."""
        if self._merged is None:
            return []
        return [own.weights.flat._version for own in loras if own.weights is not None]

    def logits_gradient(self, grad: Tensor, hidden: Tensor, loras: Sequence[LoraRows]) -> Tensor:
        """From the gradient for `logits` [T, V] that for hidden [T, E]; a lora's is added to its `.grad`. One lora
        covers all rows."""
        product = self._product(UNEMBED, self._unembedding, loras[0].weights)
        grad_hidden, grads = product.gradient(grad, hidden)
        for parameter, own in zip(product.parameters, grads, strict=True):
            if parameter.grad is not None:
                parameter.grad += own
        return torch.zeros_like(hidden) if grad_hidden is None else grad_hidden

    def _linear(
        self, x: Tensor, weight: FrozenMatrix, site: str, loras: Sequence[LoraRows], residual: Tensor | None = None
    ) -> Tensor:
        return _multiply(self._site(site, weight, loras), x, residual, self.moves)

    def _linear_of_any(self, x: Tensor, weight: FrozenMatrix, site: str, loras: Sequence[LoraRows]) -> Tensor:
        """`_linear` of any number of rows; `loras` may cover more of them."""
        count, x = x.shape[0], pad_rows(x, _rows_of_all([weight]))
        loras = [LoraRows(own.start, min(own.stop, count), own.weights) for own in loras if own.start < count]
        return self._linear(x, weight, site, _cover(loras, count, x.shape[0]))[:count]

    def _site(self, name: str, weight: FrozenMatrix, loras: Sequence[LoraRows]) -> list[_Run]:
        """What each run of rows is multiplied with at a site."""
        return [_Run(rows.start, rows.stop, self._product(name, weight, rows.weights)) for rows in loras]

    def _product(self, name: str, weight: FrozenMatrix, lora: LoraWeights | None) -> SiteProduct:
        found = None if lora is None else lora.sites.get(name)
        if lora is None or found is None:
            return SiteProduct(weight)
        if self._merged is not None and name in self._merged.sites:
            return self._merged.of(lora)[name]
        return SiteProduct(weight, found, lora.scale)


def _layer_matrices(layers: Sequence[LayerWeights]) -> dict[str, FrozenMatrix]:
    """The matrices outside of experts, by site."""
    found = {}
    for index, layer in enumerate(layers):
        own = {"qkv": layer.qkv, "o": layer.o, "gate_up": layer.gate_up, "down": layer.down}
        found |= {f"{index}.{name}": matrix for name, matrix in own.items() if matrix is not None}
    return found


def _rows_of_all(matrices: Iterable[FrozenMatrix]) -> int:
    """Rows that products with all `matrices` need; a gradient's loras need more, and otherwise see to it themselves."""
    return min_rows() if torch.is_grad_enabled() else max(matrix.min_rows for matrix in matrices)


def _fits_kernels(config: DecoderConfig) -> bool:
    """Whether the native kernels have loops for such widths."""
    widths = (config.hidden_size, config.intermediate_size)
    return config.head_dim in HEAD_DIMS and not any(width % LANES for width in widths)


def pad_rows(rows: Tensor, least: int) -> Tensor:
    """`rows` with at least `least` along the first dimension; what is added is zero."""
    missing = least - rows.shape[0]
    return rows if missing <= 0 else F.pad(rows, (*(0, 0) * (rows.dim() - 1), 0, missing))


def _multiply(
    runs: Sequence[_Run], x: Tensor, residual: Tensor | None = None, moves: NativeMoves | None = None
) -> Tensor:
    """`residual + x @ weight.T` plus each lora's part on its rows; with a gradient, one lora covers all rows."""
    product = runs[0].product
    if torch.is_grad_enabled():
        return run(LoraProduct, x, residual, product, *product.parameters)
    if any(own.product.merged for own in runs):
        if len(runs) == 1:
            return product.product(x, residual)
        parts = []
        for own in runs:
            least = own.product.weight.min_rows
            added = None if residual is None else own.rows(residual, least)
            parts.append(own.product.product(own.rows(x, least), added)[: own.count])
        return torch.cat(parts) if moves is None else moves.join(parts, torch.empty(len(x), product.weight.outputs))
    out = product.weight.product(x, residual)
    for own in runs:
        own.product.add_lora(out[own.start : own.stop], x[own.start : own.stop])
    return out


def _is_native(product: SiteProduct) -> bool:
    weight, lora = product.weight, product.lora
    if weight.min_rows != 1 or weight.kernels is None:  # only kernels treat a lone row as any other
        return False
    return lora is None or product.merged or weight.kernels.adds_lora(lora.a, lora.bs)


def _cover(loras: Sequence[LoraRows], count: int, padded: int) -> Sequence[LoraRows]:
    """The last run extended over the padding, so that a lone small batch needs no second padding."""
    if padded == count:
        return loras
    return [*loras[:-1], LoraRows(loras[-1].start, padded, loras[-1].weights)]
