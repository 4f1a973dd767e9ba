"""A causal language model of transformers, in the form in which the engine trains and samples: hidden states, logits,
their gradients, and loras on its linear layers.

The model's own code computes; a hook on each linear layer adds the lora that is active. A forward runs one sequence,
or several: a training pass pads the shorter ones on the right. Some models scale or cap the product of the last hidden
states and the output layer. For them, the logits take the place of the hidden states in all methods here.

Letters: S sequences · T tokens of each · E hidden size · V vocabulary · I inputs and O outputs of a layer · r rank.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import Cache

from mint.engine.lora import LoraRows, LoraWeights, Site
from mint.engine.model.functions import pad_rows
from mint.engine.model.linear import min_rows
from mint.engine.model.torch_operations import TorchOperations
from mint.engine.model.weights import LayerSource
from mint.engine.packing import MicroBatch, pack, pack_padded
from mint.engine.protocol import LoraSpec, TrainDatum
from mint.engine.transfers import upload
from mint.engine.transformers.corrections import correct_steps, rotation_switch
from mint.engine.transformers.linear_layers import linear_layers, part_of, widths_of
from mint.engine.transformers.loading import load_model
from mint.errors import InvalidRequestError
from mint.models.folder import ModelFolder


@dataclass
class ModelCache:
    """The cache of a model: the `state` after `length` tokens of each sequence, and the `argument` of its forward that
    takes it."""

    argument: str
    length: int
    state: Any  # `Cache` of transformers, or a class of the model's own

    @property
    def size_bytes(self) -> int:
        """The memory of all of its tensors."""
        return sum(tensor.nbytes for tensor in _tensors_in(self.state, set()))

    def repeat(self, copies: int) -> None:
        """Its one sequence stands `copies` times."""
        if self._has_own_order():
            self.state.batch_repeat_interleave(copies)
        else:
            self.state.reorder_cache(torch.zeros(copies, dtype=torch.int64))

    def select(self, sequences: Tensor) -> None:
        """Keeps these sequences, int64, in this order."""
        if self._has_own_order():
            self.state.batch_select_indices(sequences)
        else:
            self.state.reorder_cache(sequences)

    def _has_own_order(self) -> bool:
        """Whether the cache is of a class that has methods of its own for this (MiniMax). Others reorder what all of
        their layers have; the general methods do not know the states of hybrid models."""
        return type(self.state).batch_repeat_interleave is not Cache.batch_repeat_interleave


class TransformersDecoder:
    """The weights of a model and its forward: `TrainedDecoder`, and what `TransformersSampler` runs."""

    layer_source: LayerSource | None = None

    def __init__(self, folder: ModelFolder, operations: TorchOperations) -> None:
        """Loads the model in `folder` onto the device of `operations`, in their dtype; never runs code from it.

        Raises:
            InvalidRequestError: transformers does not know the architecture, or cannot load the folder.
            CheckpointError: a weight file is damaged.
        """
        self.operations = operations
        self.device = operations.device
        self.path = folder.path
        self._model = load_model(folder, operations.dtype).to(operations.device)
        if self.device.type == "cpu":
            _leave_files(self._model)
        unembedding = self._model.get_output_embeddings()
        if not isinstance(unembedding, nn.Linear):
            raise InvalidRequestError(
                "its model has no linear output layer",
                field="base_model",
                value=str(folder.path),
                remedy="Choose a causal language model",
            )
        self._unembedding = unembedding
        self.vocab_size = int(unembedding.weight.shape[0])
        self._lora: LoraWeights | None = None
        self._layers = linear_layers(self._model)
        for name, layer in self._layers.items():
            layer.register_forward_hook(_AddLora(self, name))
        correct_steps(self._model)
        self.rotation_switch = rotation_switch(self._model)
        """The tokens beyond which all positions of a sequence are rotated otherwise; None: there is no such length."""
        self._is_plain = self._unembeds_plainly()
        self.tells_positions = False
        """Whether the position of a token behind a cache is told. Most models know it; some would take it for 0."""

    @property
    def arch(self) -> str:
        """The `model_type` of its configuration."""
        return str(self._model.config.model_type)

    @property
    def class_name(self) -> str:
        """The class in transformers."""
        return type(self._model).__name__

    @property
    def is_encoder(self) -> bool:
        """Whether its configuration says that it is no decoder, which most configurations leave open."""
        return getattr(self._model.config, "is_decoder", None) is False

    @property
    def context_length(self) -> int:
        """The longest sequence; 2^20 where the configuration has no limit."""
        config = self._model.config.get_text_config()
        limits = (getattr(config, name, None) for name in ("max_position_embeddings", "n_positions"))
        # XLNet's class says -1 for no limit
        return next((limit for limit in limits if isinstance(limit, int) and limit > 0), 1 << 20)

    @property
    def weight_bytes(self) -> int:
        """The memory of the frozen weights."""
        storages = [parameter.untyped_storage() for parameter in self._model.parameters()]
        return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())

    @property
    def lora(self) -> LoraWeights | None:
        """The weights that are active in the forward that runs, and in its backward."""
        return self._lora

    def sites(self, lora: LoraSpec) -> list[Site]:
        """The layers that `lora` trains, one site each.

        Raises:
            InvalidRequestError: there is none.
        """
        wanted = {"attn": lora.train_attn, "mlp": lora.train_mlp, "unembed": lora.train_unembed}
        sites = []
        for name, layer in self._layers.items():
            if wanted[part_of(name)]:
                inputs, outputs = widths_of(layer)
                sites.append(Site(name, (name,), inputs, (outputs,)))
        if not sites:
            raise InvalidRequestError(
                f"trains no linear layer of {self.class_name}",
                field="lora_config",
                value=", ".join(f"train_{part}={is_wanted}" for part, is_wanted in wanted.items()),
                remedy="Train attention or the unembedding, too",
            )
        return sites

    # --- for training ---

    def pack(self, data: Sequence[TrainDatum], rows: int) -> list[MicroBatch]:
        """Micro-batches of about `rows` rows with padding; of one sequence each, if `rows` is 1."""
        return pack(data, 1) if rows == 1 else pack_padded(data, rows)

    def forward_packed(
        self, batch: MicroBatch, lora: LoraWeights, *, recompute: bool, rows: np.ndarray | None = None
    ) -> Tensor:
        """Hidden states [T, E] (or logits, see above) in float32 of the rows of `batch`: whole sequences. If given, of
        `rows` alone.

        With `recompute`, the model's layers run again in the backward instead of keeping their activations.
        """
        starts = np.flatnonzero(batch.positions == 0)
        places, is_real = _pad_right(starts, np.diff(starts, append=len(batch.tokens)))
        wanted = np.flatnonzero(is_real) if rows is None else np.flatnonzero(is_real)[rows]
        tokens, taken = upload(self.device, batch.tokens[places], wanted)
        hidden = self._run_layers(tokens, lora, recompute=recompute).flatten(0, 1)
        return hidden if len(wanted) == len(hidden) else hidden[taken]

    @contextmanager
    def kept_tensors(self) -> Generator[dict[int, int]]:
        """Counts what is kept for a backward within the context, without weights: sizes in bytes by address."""
        weights = {parameter.untyped_storage().data_ptr() for parameter in self._model.parameters()}
        storages: dict[int, int] = {}

        def note(tensor: Tensor) -> Tensor:
            storage = tensor.untyped_storage()
            if storage.data_ptr() not in weights:
                storages[storage.data_ptr()] = storage.nbytes()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
            yield storages

    def _run_layers(self, tokens: Tensor, lora: LoraWeights, *, recompute: bool) -> Tensor:
        """Hidden states [S, T, E] of `tokens` [S, T], for a backward if gradients are enabled."""
        self._lora = lora
        if not (recompute and torch.is_grad_enabled() and self._model.supports_gradient_checkpointing):
            return self._run(tokens, None, use_cache=False)[0]
        self._model.gradient_checkpointing_enable({"use_reentrant": False})
        self._model.train()  # layers recompute in this mode alone; nothing is dropped out
        try:
            return self._run(tokens, None, use_cache=False)[0]
        finally:
            self._model.eval()
            self._model.gradient_checkpointing_disable()

    def logits(self, hidden: Tensor, loras: Sequence[LoraRows]) -> Tensor:
        """Float32 logits [T, V] of what `forward` or `prefill` gave [T, ·]; without `loras`, those of the base."""
        if not self._is_plain:
            return hidden.clone()  # others work in place
        self._lora = loras[0].weights if loras else None
        rows = pad_rows(hidden, min_rows())  # fewer rows would have other bits
        logits: Tensor = self._unembedding(rows.to(self._unembedding.weight.dtype))
        return logits[: len(hidden)].float()

    def logits_gradient(self, grad: Tensor, hidden: Tensor, loras: Sequence[LoraRows]) -> Tensor:
        """From the gradient for `logits` [T, V] that for hidden [T, ·]; a lora's is added to its `.grad`."""
        if not self._is_plain:
            return grad.float()
        with torch.enable_grad():
            tracked = hidden.detach().requires_grad_()
            self.logits(tracked, loras).backward(grad.float())
        return torch.zeros_like(hidden) if tracked.grad is None else tracked.grad

    # --- for sampling ---

    def prefill(self, tokens: Tensor, lora: LoraWeights | None, *, use_cache: bool) -> tuple[Tensor, ModelCache | None]:
        """Hidden states [S, T, E] (or logits) of equal-length sequences `tokens` [S, T], and the model's cache."""
        self._lora = lora
        return self._run(tokens, None, use_cache=use_cache)

    def decode(self, tokens: Tensor, lora: LoraWeights | None, cache: ModelCache) -> tuple[Tensor, ModelCache]:
        """Hidden states [S, E] (or logits) one token further: `tokens` [S] behind what is in `cache`.

        Raises:
            ValueError: the model takes a cache and returns none.
        """
        self._lora = lora
        hidden, grown = self._run(tokens[:, None], cache, use_cache=True)
        if grown is None:
            raise ValueError("the model returns no cache")
        return hidden[:, -1], grown

    def _run(self, tokens: Tensor, cache: ModelCache | None, *, use_cache: bool) -> tuple[Tensor, ModelCache | None]:
        model = self._model.base_model if self._is_plain else self._model
        given = {} if cache is None else {cache.argument: cache.state}
        before = 0 if cache is None else cache.length
        if cache is not None and self.tells_positions:
            given["position_ids"] = torch.full_like(tokens, before)
        found = model(input_ids=tokens, use_cache=use_cache, **given)
        hidden = found.last_hidden_state if self._is_plain else found.logits
        return hidden.float(), _cache_of(found, before + tokens.shape[1]) if use_cache else None

    def _unembeds_plainly(self) -> bool:
        """Whether logits are the output layer's product of the last hidden states, bit for bit."""
        tokens = torch.arange(2, min(10, self.vocab_size), device=self.device)[None]
        with torch.no_grad():
            try:
                hidden = self._model.base_model(input_ids=tokens, use_cache=False).last_hidden_state
                logits = self._model(input_ids=tokens, use_cache=False).logits
                return bool(torch.equal(self._unembedding(hidden), logits))
            except (ArithmeticError, AttributeError, LookupError, RuntimeError, TypeError, ValueError):
                return False  # `measure` says so of a model that cannot run at all


class _AddLora:
    """The hook of a linear layer: adds `scale · x @ a.T @ b.T` of the active lora, in float32."""

    def __init__(self, decoder: TransformersDecoder, name: str) -> None:
        self._decoder = decoder
        self._name = name

    def __call__(self, layer: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> Tensor:
        lora = self._decoder.lora
        site = None if lora is None else lora.sites.get(self._name)
        if lora is None or site is None:
            return output
        product = F.linear(F.linear(inputs[0].to(site.a.dtype), site.a), site.bs[0])
        return output + (product * lora.scale).to(output.dtype)


def _pad_right(starts: np.ndarray, lengths: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Row numbers in a padded grid [S, T] of sequences, and a mask of the real rows, bool [S, T].

    A sequence is padded with its last row. Attention is causal, so the padding on the right needs no mask.
    """
    columns = np.arange(lengths.max())
    return starts[:, None] + np.minimum(columns, lengths[:, None] - 1), columns < lengths[:, None]


def _cache_of(output: Any, length: int) -> ModelCache | None:
    for name in ("past_key_values", "cache_params", "state"):
        state = getattr(output, name, None)
        if state is not None:
            return ModelCache(name, length, state)
    return None


def _tensors_in(value: object, seen: set[int]) -> Iterator[Tensor]:
    """Each tensor once that an object holds, also in lists, dictionaries and objects within it."""
    if id(value) in seen:
        return
    seen.add(id(value))
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (list, tuple, dict)) or hasattr(value, "__dict__"):
        if not isinstance(value, (list, tuple)):
            value = list((value if isinstance(value, dict) else vars(value)).values())
        for part in value:
            yield from _tensors_in(part, seen)


def _leave_files(model: nn.Module) -> None:
    """Copies the weights: those that need no conversion still lie in the mapped files, and would change with them."""
    for tensor in (*model.parameters(), *model.buffers()):
        tensor.data = tensor.data.clone(memory_format=torch.preserve_format)
