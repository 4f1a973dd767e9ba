"""The base weights of a decoder as the forward uses them, and the sites of loras on them.

Layers that share their inputs are one matrix, and one site.

Letters: E hidden size · H all heads (query, key, value) · D head dimension · I an MLP's inner width · V vocabulary.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor

from mint.engine.lora import UNEMBED, Site
from mint.engine.model.config import DecoderConfig
from mint.engine.model.linear import Matrix
from mint.engine.protocol import LoraSpec


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
    """One layer: the matrices in the base's dtype, the bias and the norms in float32. Norms stand before attention and
    MLP, and behind them; None: there is none."""

    attention_norm: Tensor | None  # [E]
    attention_output_norm: Tensor | None  # [E]
    qkv: Matrix  # [H·D, E]
    qkv_bias: Tensor | None  # [H·D]
    head_norms: Tensor | None  # [query + key heads, D]
    o: Matrix  # [E, query heads · D]
    mlp_norm: Tensor | None  # [E]
    mlp_output_norm: Tensor | None  # [E]
    mlp: MlpWeights | MixtureWeights


@dataclass(frozen=True)
class BaseWeights:
    """All of a base model. `unembedding` shares the memory of the embedding where the two are tied; `final_norm` is
    multiplied with the scale of the logits."""

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


def list_sites(config: DecoderConfig, lora: LoraSpec) -> list[Site]:
    """The sites that `lora` trains, in the order of their storage."""
    hidden, query, kv = config.hidden_size, config.query_size, config.key_value_size
    sites = []
    for layer in range(config.num_hidden_layers):
        attention = f"model.layers.{layer}.self_attn"
        mlp = f"model.layers.{layer}.mlp"
        mixture = config.experts_of(layer)
        if lora.train_attn:
            sizes = {"q": query, "k": kv, "v": kv}
            sites.append(_fused_site(config, f"{layer}.qkv", attention, sizes, hidden))
            sites.append(Site(f"{layer}.o", (f"{attention}.o_proj",), query, (hidden,)))
        if lora.train_mlp and mixture is None:
            sites += _mlp_sites(config, str(layer), mlp, config.intermediate_size)
        elif lora.train_mlp and mixture is not None:
            for expert in range(mixture.count):
                name = expert_site(layer, expert)
                sites += _mlp_sites(config, name, f"{mlp}.experts.{expert}", mixture.intermediate_size)
    if lora.train_unembed:
        sites.append(Site(UNEMBED, (UNEMBED,), hidden, (config.vocab_size,)))
    return sites


def expert_site(layer: int, expert: int) -> str:
    """The prefix of the names of an expert's sites."""
    return f"{layer}.experts.{expert}"


def _mlp_sites(config: DecoderConfig, name: str, module: str, inner: int) -> list[Site]:
    gate_up = _fused_site(config, f"{name}.gate_up", module, {"gate": inner, "up": inner}, config.hidden_size)
    return [gate_up, Site(f"{name}.down", (f"{module}.down_proj",), inner, (config.hidden_size,))]


def _fused_site(config: DecoderConfig, name: str, module: str, sizes: Mapping[str, int], inputs: int) -> Site:
    """One product of several layers, or of one where the family stores them so: PEFT then has one lora for it."""
    if config.family.fused:
        return Site(name, (f"{module}.{name.rsplit('.', 1)[-1]}_proj",), inputs, (sum(sizes.values()),))
    return Site(name, tuple(f"{module}.{part}_proj" for part in sizes), inputs, tuple(sizes.values()))
