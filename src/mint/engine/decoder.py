"""A Qwen3 decoder over packed rows: one forward for training, prefill and decoding alike.

Rows are tokens; which row attends to which is the business of the `attention` that the caller passes in. Base weights
are frozen, in float32 or bfloat16; hidden states are float32 throughout. Knows nothing of sequences, losses or caches.

The bits of a row do not depend on the other rows: every product runs over at least `min_rows()` rows, above which (as
measured, and tested) BLAS treats each row alike, and nothing here reduces over rows.

Letters: T rows · E hidden size · H all heads (query, key, value) · D head dimension · V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from mint.engine.decoder_config import DecoderConfig
from mint.engine.decoder_weights import read_base_weights
from mint.engine.kernels import BaseProduct, LoraProduct, NormRope, RmsNorm, SwiGlu, add_lora, run
from mint.engine.lora import UNEMBED, LoraRows
from mint.engine.products import FrozenMatrix
from mint.models.tensor_files import StoredTensor

MIN_ROWS, MIN_ROWS_PER_THREAD = 16, 4
"""Below 4 rows, and below about 2 for each thread, MKL sums in another order (measured with 1 to 16 threads)."""

Attention = Callable[[int, Tensor], Tensor]
"""(layer, normed and rotated heads [T, H, D]) → attended values [T, query heads · D], both in the base's dtype."""


class Decoder:
    """The base model's weights and its forward."""

    def __init__(
        self, config: DecoderConfig, tensors: Mapping[str, StoredTensor], *, dtype: torch.dtype, device: torch.device
    ) -> None:
        """Takes every tensor of a Hugging Face state dict.

        Raises:
            InvalidRequestError: a tensor is missing, has another shape than `config` says, or is not part of Qwen3.
        """
        self.config = config
        self.dtype = dtype
        self.device = device
        weights = read_base_weights(config, tensors, dtype=dtype, device=device)
        self._layers = weights.layers
        self._embedding, self._final_norm, self._unembedding = (
            weights.embedding,
            weights.final_norm,
            weights.unembedding,
        )
        self._cos, self._sin = _rope_tables(config, device)

    def forward(self, tokens: Tensor, positions: Tensor, attention: Attention, loras: Sequence[LoraRows]) -> Tensor:
        """Final hidden states (normed) [T, E] of `tokens` [T] at `positions` [T]; `loras` cover all rows."""
        count = tokens.shape[0]
        tokens, positions = pad_rows(tokens), pad_rows(positions)
        loras = _cover(loras, count, tokens.shape[0])
        config, eps = self.config, self.config.rms_norm_eps
        cos, sin = (table.index_select(0, positions).unsqueeze(1) for table in (self._cos, self._sin))
        x = self._embedding.index_select(0, tokens)
        for index, layer in enumerate(self._layers):
            normed = run(RmsNorm, x, layer.input_norm, eps)
            qkv = _linear(normed, layer.qkv, f"{index}.qkv", loras).view(len(tokens), -1, config.head_dim)
            heads = run(NormRope, qkv, layer.head_norms, eps, cos, sin).to(self.dtype)
            mixed = pad_rows(attention(index, heads[:count])).float()
            x = _linear(mixed, layer.o, f"{index}.o", loras, residual=x)
            normed = run(RmsNorm, x, layer.post_norm, eps)
            inner = run(SwiGlu, _linear(normed, layer.gate_up, f"{index}.gate_up", loras))
            x = _linear(inner, layer.down, f"{index}.down", loras, residual=x)
        return run(RmsNorm, x, self._final_norm, eps)[:count]

    def logits(self, hidden: Tensor, loras: Sequence[LoraRows]) -> Tensor:
        """Float32 logits [T, V] of hidden states [T, E]."""
        count = hidden.shape[0]
        hidden = pad_rows(hidden)
        return _linear(hidden, self._unembedding, UNEMBED, _cover(loras, count, hidden.shape[0]))[:count]


def min_rows() -> int:
    """How many rows a product needs so that each of them is treated alike."""
    return max(MIN_ROWS, MIN_ROWS_PER_THREAD * torch.get_num_threads())


def pad_rows(rows: Tensor) -> Tensor:
    """`rows` with at least `min_rows()` along the first dimension; what is added is zero."""
    missing = min_rows() - rows.shape[0]
    return rows if missing <= 0 else F.pad(rows, (*(0, 0) * (rows.dim() - 1), 0, missing))


def _linear(
    x: Tensor, weight: FrozenMatrix, site: str, loras: Sequence[LoraRows], residual: Tensor | None = None
) -> Tensor:
    """`residual + x @ weight.T` plus each lora's part on its rows; with a gradient, one lora covers all rows."""
    trained = [(rows, rows.weights.scale, found) for rows in loras if rows.weights and (found := rows.site(site))]
    if torch.is_grad_enabled():
        if not trained:
            return run(BaseProduct, x, residual, weight)
        _, scale, found = trained[0]
        return run(LoraProduct, x, residual, weight, scale, found.a, *found.bs)
    out = weight.product(x, residual)
    for rows, scale, found in trained:
        part = slice(rows.start, rows.stop)
        if rows.stop - rows.start >= min_rows():
            add_lora(out[part], x[part], found.a, found.bs, scale)
            continue
        padded = pad_rows(out[part])
        add_lora(padded, pad_rows(x[part]), found.a, found.bs, scale)
        out[part] = padded[: rows.stop - rows.start]
    return out


def _cover(loras: Sequence[LoraRows], count: int, padded: int) -> Sequence[LoraRows]:
    """The last run extended over the padding, so that a lone small batch needs no second padding."""
    if padded == count:
        return loras
    return [*loras[:-1], LoraRows(loras[-1].start, padded, loras[-1].weights)]


def _rope_tables(config: DecoderConfig, device: torch.device) -> tuple[Tensor, Tensor]:
    """cos and sin [positions, D / 2] in float32, computed as Hugging Face does."""
    exponents = torch.arange(0, config.head_dim, 2, dtype=torch.float32) / config.head_dim
    frequencies = 1.0 / (config.rope_theta**exponents)
    angles = torch.arange(config.max_position_embeddings, dtype=torch.float32)[:, None] * frequencies
    return angles.cos().to(device), angles.sin().to(device)
