"""Reads the base weights of a decoder from a Hugging Face state dict.

Every tensor is accounted for: a missing, misshapen or unknown one is refused. Knows the families' tensor names; knows
nothing of forwards or loras.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor

from mint.engine.model.config import DecoderConfig, DeltaNetConfig, ExpertsConfig, ExpertTensors
from mint.engine.model.linear import Matrix
from mint.engine.model.operations import Operations
from mint.engine.model.weights import (
    AttentionWeights,
    BaseWeights,
    DeltaNetWeights,
    LayerSource,
    LayerWeights,
    MixtureWeights,
    MlpWeights,
    SharedExpertWeights,
)
from mint.engine.quantized.number_formats import (
    Quantization,
    QuantizedWeight,
    join_outputs,
    keep_fp8,
    keep_mxfp4,
    quantize,
)
from mint.errors import CheckpointError, InvalidRequestError
from mint.models.quantized_tensors import Fp8Tensor, Mxfp4Tensor
from mint.models.tensor_files import StoredTensor

_FLOATS = frozenset({"F16", "BF16", "F32", "F64"})


def load_weights(
    config: DecoderConfig,
    tensors: Mapping[str, StoredTensor],
    operations: Operations,
    quantization: Quantization | None = None,
    source: LayerSource | None = None,
) -> BaseWeights:
    """Takes every tensor of a Hugging Face state dict, and lays the matrices out for `operations`.

    With a `quantization` the matrices of the layers are quantized, but for routers and for widths that do not fit it.
    FP8 keeps the numbers of matrices that are stored in it. int8 quantizes the unembedding, too; the embedding stays as
    it is. MXFP4 keeps the experts that are stored in it, and quantizes nothing. Each layer is given to `source`, if
    there is one, before the next is read.

    Raises:
        InvalidRequestError: a tensor is missing, has another shape than `config` says, or is not part of the family; or
            MXFP4 is asked for, and no tensor is stored in it.
    """
    if quantization == "mxfp4" and not any(isinstance(tensor, Mxfp4Tensor) for tensor in tensors.values()):
        raise InvalidRequestError(
            f"keeps experts that are stored in MXFP4, and this {config.family.name} model has none",
            field="MINT_QUANTIZE",
            value=quantization,
            remedy="Use nf4, which quantizes any base to 4.5 bits",
        )
    loader = _Loader(config, tensors, operations, quantization)
    layers = []
    for index in range(config.num_hidden_layers):
        layers.append(loader.layer(index))
        if source is not None:
            source.keep(layers[-1])
    return loader.whole_model(layers)


def load_layers(
    config: DecoderConfig, tensors: Mapping[str, StoredTensor], operations: Operations
) -> Iterator[LayerWeights]:
    """The layers of a model one after the other, from a state dict that has nothing else.

    Raises:
        InvalidRequestError: as `load_weights`.
    """
    loader = _Loader(config, tensors, operations, None)
    for index in range(config.num_hidden_layers):
        yield loader.layer(index)
    loader.finish()


def load_ends(config: DecoderConfig, tensors: Mapping[str, StoredTensor], operations: Operations) -> BaseWeights:
    """A model without its layers, from a state dict that has none.

    Raises:
        InvalidRequestError: as `load_weights`.
    """
    return _Loader(config, tensors, operations, None).whole_model([])


class _Loader:
    """Takes the tensors of a state dict one by one, and notices what is missing or left over."""

    def __init__(
        self,
        config: DecoderConfig,
        tensors: Mapping[str, StoredTensor],
        operations: Operations,
        quantization: Quantization | None,
    ) -> None:
        self._quantization: Quantization | None = quantization
        self._config = config
        self._operations = operations
        self._left = dict(tensors)

    def whole_model(self, layers: list[LayerWeights]) -> BaseWeights:
        """The model with these layers; nothing may be left."""
        config, operations = self._config, self._operations
        embedding = self.take("model.embed_tokens.weight", (config.vocab_size, config.hidden_size), operations.dtype)
        final_norm = self.norm("model.norm.weight", config.hidden_size) * config.scales.logits
        if config.tie_word_embeddings:
            self._ignore_equal("lm_head.weight", embedding)
            unembedding = embedding
        else:
            unembedding = self.take("lm_head.weight", (config.vocab_size, config.hidden_size), operations.dtype)
        self.finish()
        return BaseWeights(layers, embedding, final_norm, self.unembedding(unembedding))

    def layer(self, index: int) -> LayerWeights:
        config = self._config
        family = self._config.family
        prefix = f"model.layers.{index}"
        net = config.delta_net_of(index)
        o_bias = None
        if family.o_bias:
            o_bias = self.take(f"{prefix}.self_attn.o_proj.bias", (config.hidden_size,))
        mixture = config.experts_of(index)
        return LayerWeights(
            attention_norm=self._layer_norm(prefix, family.norms.attention_input),
            attention_output_norm=self._layer_norm(prefix, family.norms.attention_output),
            mixer=self._attention(f"{prefix}.self_attn")
            if net is None
            else self._delta_net(f"{prefix}.linear_attn", net),
            o_bias=o_bias,
            mlp_norm=self._layer_norm(prefix, family.norms.mlp_input),
            mlp_output_norm=self._layer_norm(prefix, family.norms.mlp_output),
            mlp=self._mlp(f"{prefix}.mlp", config.intermediate_size)
            if mixture is None or family.experts is None
            else self._mixture(f"{prefix}.mlp", mixture, family.experts),
        )

    def _attention(self, prefix: str) -> AttentionWeights:
        config = self._config
        family = config.family
        sizes = config.attention_inputs
        bias = norms = None
        if family.qkv_bias:
            bias = torch.cat([self.take(f"{prefix}.{part}_proj.bias", (size,)) for part, size in sizes.items()])
        if family.head_norms:
            norms = torch.cat(
                [
                    self._head_norms(f"{prefix}.q_norm.weight", config.num_attention_heads),
                    self._head_norms(f"{prefix}.k_norm.weight", config.num_key_value_heads),
                ]
            )
        self.ignore(f"{prefix}.rotary_emb.inv_freq")  # old checkpoints of Llama hold it
        return AttentionWeights(
            qkv=self._fused(prefix, "qkv", sizes, config.hidden_size),
            qkv_bias=bias,
            head_norms=norms,
            sinks=self.take(f"{prefix}.sinks", (config.num_attention_heads,)) if family.sinks else None,
            o=self._matrix(f"{prefix}.o_proj.weight", config.hidden_size, config.query_size),
        )

    def _delta_net(self, prefix: str, net: DeltaNetConfig) -> DeltaNetWeights:
        hidden = self._config.hidden_size
        taps = self.take(f"{prefix}.conv1d.weight", (net.channels, 1, net.taps))
        return DeltaNetWeights(
            inputs=self._join({f"{prefix}.in_proj_{part}.weight": size for part, size in net.inputs.items()}, hidden),
            taps=taps[:, 0].t().contiguous(),
            decay_rates=self.take(f"{prefix}.A_log", (net.value_heads,)).exp(),
            decay_bias=self.take(f"{prefix}.dt_bias", (net.value_heads,)),
            norm=self.take(f"{prefix}.norm.weight", (net.value_dim,)),
            o=self._matrix(f"{prefix}.out_proj.weight", hidden, net.value_size),
        )

    def _head_norms(self, name: str, heads: int) -> Tensor:
        """[heads, D]."""
        dim = self._config.head_dim
        if self._config.family.joint_head_norms:
            return self.norm(name, heads * dim).view(heads, dim)
        return self.norm(name, dim).expand(heads, dim)

    def _layer_norm(self, prefix: str, name: str | None) -> Tensor | None:
        return None if name is None else self.norm(f"{prefix}.{name}.weight", self._config.hidden_size)

    def _mixture(self, prefix: str, mixture: ExpertsConfig, tensors: ExpertTensors) -> MixtureWeights:
        # The router is in float32: with inputs rounded to bfloat16, another of two near experts would be chosen.
        name, shape = f"{prefix}.{tensors.router}", (mixture.count, self._config.hidden_size)
        router = self._operations.matrix(self.take(f"{name}.weight", shape))
        bias = self.take(f"{name}.bias", (mixture.count,)) if tensors.biases else None
        own = f"{prefix}.experts"
        if tensors.stacked and f"{own}.0.down_proj.weight" not in self._left:
            experts = self._stacked_experts(own, mixture, tensors)
        else:
            experts = [self._mlp(f"{own}.{expert}", mixture.intermediate_size) for expert in range(mixture.count)]
        self._operations.release_memory()  # the gaps that so many pieces leave would come to a third of the model
        return MixtureWeights(router, experts, bias, self._shared_expert(prefix, mixture))

    def _stacked_experts(self, prefix: str, mixture: ExpertsConfig, tensors: ExpertTensors) -> list[MlpWeights]:
        hidden, inner, count = self._config.hidden_size, mixture.intermediate_size, mixture.count
        shapes = {"gate_up": (2 * inner, hidden), "down": (hidden, inner)}
        stored, biases = [], []
        for part, shape in shapes.items():
            name = f"{prefix}.{part}_proj"
            stored.append(self._pop(name, (count, *(reversed(shape) if tensors.inputs_first else shape))))
            biases.append(self.take(f"{name}_bias", (count, shape[0])) if tensors.biases else [None] * count)
        experts = []
        for expert in range(count):  # one after the other: all of a layer in float32 would take gigabytes
            gate_up, down = (self._expert_matrix(tensor, expert, tensors) for tensor in stored)
            experts.append(MlpWeights(gate_up, down, *(bias[expert] for bias in biases)))
            self._operations.release_memory()
        return experts

    def _expert_matrix(self, stored: StoredTensor, expert: int, tensors: ExpertTensors) -> Matrix:
        if isinstance(stored, Mxfp4Tensor):
            codes, scales = (part.to(self._operations.device, copy=True) for part in stored.read_codes(expert))
            _check_finite(stored, scales)
            kept = keep_mxfp4(codes, scales)
            if kept is not None and self._quantization == "mxfp4":
                return self._operations.quantized_matrix(kept)
            if kept is not None:  # widened on the device, in the order in which it is stored
                return self._layout(kept.widen().to(self._operations.dtype))
        own = self._read(stored, self._operations.dtype, expert)
        return self._layout(own.t().contiguous() if tensors.inputs_first else own)

    def _shared_expert(self, prefix: str, mixture: ExpertsConfig) -> SharedExpertWeights | None:
        width = mixture.shared_intermediate_size
        if width is None:
            return None
        gate = self.take(f"{prefix}.shared_expert_gate.weight", (1, self._config.hidden_size))
        return SharedExpertWeights(self._mlp(f"{prefix}.shared_expert", width), gate[0])

    def _mlp(self, prefix: str, inner: int) -> MlpWeights:
        hidden = self._config.hidden_size
        down = self._matrix(f"{prefix}.down_proj.weight", hidden, inner)
        return MlpWeights(self._fused(prefix, "gate_up", {"gate": inner, "up": inner}, hidden), down)

    def unembedding(self, weight: Tensor) -> Matrix:
        quantized = quantize(weight, "int8") if self._quantization == "int8" else None
        if quantized is None:
            return self._operations.unembedding(weight)
        matrix = self._operations.quantized_unembedding(quantized)
        self._operations.release_memory()
        return matrix

    def _fused(self, prefix: str, fused: str, sizes: Mapping[str, int], inputs: int) -> Matrix:
        """Layers with the same inputs as one matrix, which some families store as the layer `fused`."""
        if self._config.family.fused:
            sizes = {fused: sum(sizes.values())}
        return self._join({f"{prefix}.{name}_proj.weight": size for name, size in sizes.items()}, inputs)

    def _matrix(self, name: str, outputs: int, inputs: int) -> Matrix:
        return self._join({name: outputs}, inputs)

    def _join(self, outputs: Mapping[str, int], inputs: int) -> Matrix:
        """The tensors `outputs` names, one below the other, as one matrix."""
        stored = [self._pop(name, (size, inputs)) for name, size in outputs.items()]
        kept = self._keep_fp8(stored)
        if kept is not None:
            return self._operations.quantized_matrix(kept)
        return self._layout(torch.cat([self._read(tensor, self._operations.dtype) for tensor in stored]))

    def _layout(self, weight: Tensor) -> Matrix:
        quantized = None if self._quantization is None else quantize(weight, self._quantization)
        if quantized is None:
            return self._operations.matrix(weight)
        matrix = self._operations.quantized_matrix(quantized)
        self._operations.release_memory()  # quantizing a matrix takes several times its size
        return matrix

    def _keep_fp8(self, stored: Sequence[StoredTensor]) -> QuantizedWeight | None:
        """The codes and scales of the file, if they can be held as they are."""
        parts = []
        for tensor in stored if self._quantization == "fp8" else ():
            if isinstance(tensor, Fp8Tensor):
                codes, scales = (part.to(self._operations.device, copy=True) for part in tensor.read_codes())
                _check_finite(tensor, scales)
                _check_finite(tensor, _of_largest_codes(codes))
                parts.append(keep_fp8(codes, scales, tensor.block))
        kept = [part for part in parts if part is not None]
        return join_outputs(kept) if len(kept) == len(stored) else None

    def take(self, name: str, shape: tuple[int, ...], dtype: torch.dtype = torch.float32) -> Tensor:
        return self._read(self._pop(name, shape), dtype)

    def _pop(self, name: str, shape: tuple[int, ...]) -> StoredTensor:
        stored = self._left.pop(name, None)
        if stored is None:
            raise self._unfit(name, "is missing")
        if stored.shape != shape or stored.dtype not in _FLOATS:
            raise self._unfit(name, f"is {stored.dtype} {stored.shape}; config.json says a float of {shape}")
        return stored

    def _read(self, stored: StoredTensor, dtype: torch.dtype, part: int | None = None) -> Tensor:
        tensor: Tensor = stored.read(part)
        _check_finite(stored, tensor)
        # A copy: as long as a part of the file is used, all of it would stay in memory, and could still change.
        return tensor.to(device=self._operations.device, dtype=dtype, copy=True)

    def norm(self, name: str, width: int) -> Tensor:
        weight = self.take(name, (width,))
        return weight + 1 if self._config.family.norms_from_one else weight

    def ignore(self, name: str) -> None:
        self._left.pop(name, None)

    def _ignore_equal(self, name: str, other: Tensor) -> None:
        """Leaves out a tensor that some files have once more."""
        if name in self._left and not torch.equal(self.take(name, tuple(other.shape), other.dtype), other):
            raise InvalidRequestError(
                f"says that {name} is model.embed_tokens.weight, and the file has another matrix of this name",
                field="config.json tie_word_embeddings",
                value=True,
                remedy="Set it to false in config.json, so that both matrices are used",
            )

    def finish(self) -> None:
        if self._left:
            raise self._unfit(min(self._left), f"is not part of a {self._config.family.name} model")

    def _unfit(self, name: str, what: str) -> InvalidRequestError:
        remedy = f"Give an unmodified {self._config.family.name} folder of Hugging Face"
        return InvalidRequestError(f"tensor {name} {what}", field="base_model", remedy=remedy)


def _check_finite(stored: StoredTensor, numbers: Tensor) -> None:
    """Refuses numbers that were read from `stored` and are not finite.

    Raises:
        CheckpointError: there are such numbers.
    """
    if not numbers.numel():
        return
    least, most = numbers.aminmax()  # one pass without a copy; NaN and infinity reach the extremes
    if not torch.isfinite(least) & torch.isfinite(most):
        raise CheckpointError(
            f"{stored.path}: the tensor {stored.name} has numbers that are not finite",
            remedy="Copy or download the model again, or take an earlier checkpoint of it",
        )


def _of_largest_codes(codes: Tensor) -> Tensor:
    """The numbers of the least and the largest E4M3 code of a matrix without its sign: NaN is the largest of all."""
    magnitudes = codes.view(torch.uint8).bitwise_and(127)
    return torch.stack(magnitudes.aminmax()).view(codes.dtype).float()
