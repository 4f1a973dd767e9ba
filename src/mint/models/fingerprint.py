"""The fingerprint of a base model: tells whether a folder still has the weights on which a LoRA was trained.

It is a SHA-256 of what decides the numbers: the fields of config.json below, and of every tensor the name, dtype, shape
and a sample of its bytes at fixed places. So it does not read a large model as a whole; it finds weights of another
training, and cannot find a few changed numbers in a large matrix. Paths, shards, tokenizer and quantization at load do
not count. Every base model has files, also a random one (`random_base`) and a GGUF file, so that every one has a
fingerprint.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from mint.errors import CheckpointError
from mint.models.folder import ModelFolder
from mint.models.tensor_files import read_header

BASE_FINGERPRINT = "base_fingerprint"
"""The fingerprint's key among the settings of a base model."""

FORM = "1"
"""Begins every fingerprint. Another way to compute it needs another form: checkpoints keep those of this one."""

BLOCK_BYTES = 4096
"""The sample of a tensor: so many bytes at its beginning, in its middle and at its end; of a small one, all."""

_FIELDS = (
    "model_type",
    "hidden_act",
    "hidden_activation",
    "activation_function",
    "rms_norm_eps",
    "layer_norm_eps",
    "layer_norm_epsilon",
    "norm_eps",
    "norm_epsilon",
    "do_layer_norm_before",
    "num_attention_heads",
    "num_key_value_heads",
    "num_heads",
    "n_head",
    "partial_rotary_factor",
    "rotary_pct",
    "rotary_dim",
    "rotary_emb_base",
    "rope_local_base_freq",
    "rope_interleave",
    "rope_interleaved",
    "no_rope_layers",
    "sliding_window",
    "sliding_window_pattern",
    "layer_types",
    "use_sliding_window",
    "max_window_layers",
    "attention_chunk_size",
    "tie_word_embeddings",
    "use_parallel_residual",
    "parallel_attn",
    "alibi",
    "query_pre_attn_scalar",
    "scale_attn_weights",
    "scale_attn_by_inverse_layer_idx",
    "attn_temperature_tuning",
    "floor_scale",
    "attn_scale",
    "attn_logit_softcapping",
    "final_logit_softcapping",
    "clip_qkv",
    "use_qk_norm",
    "embedding_multiplier",
    "residual_multiplier",
    "attention_multiplier",
    "lm_head_multiplier",
    "key_multiplier",
    "mlp_multipliers",
    "ssm_multipliers",
    "ssm_in_multiplier",
    "ssm_out_multiplier",
    "attention_in_multiplier",
    "attention_out_multiplier",
    "scale_emb",
    "scale_depth",
    "dim_model_base",
    "logits_scaling",
    "logit_scale",
    "num_experts_per_tok",
    "top_k",
    "moe_topk",
    "norm_topk_prob",
    "routed_scaling_factor",
    "n_group",
    "topk_group",
    "topk_method",
    "scoring_func",
    "moe_router_activation_func",
    "interleave_moe_layer_step",
    "moe_layer_freq",
    "decoder_sparse_step",
    "mlp_only_layers",
    "swiglu_limit",
    "time_step_limit",
    "time_step_min",
    "time_step_max",
)
"""Fields of config.json that change the numbers, and do not follow from the tensors. Not all of a config: a newer
transformers writes more fields for the same model."""


def fingerprint(folder: Path) -> str:
    """The fingerprint of the base model in a Hugging Face folder.

    Raises:
        InvalidRequestError: the configuration or the index of the weights cannot be read.
        CheckpointError: a weight file is missing or damaged.
    """
    base = ModelFolder(folder)
    files: dict[Path, BinaryIO] = {}
    try:
        digest = hashlib.sha256(_json([FORM, _settings(base)]))
        found: dict[str, _Tensor] = {}
        for path in base.weight_files():
            files[path] = path.open("rb")
            found |= _tensors(path, files[path])
        for name, tensor in sorted(found.items()):
            digest.update(_json([name, tensor.dtype, tensor.shape]))
            file = files[tensor.path]
            for first, last in _sampled(tensor.start, tensor.stop):
                file.seek(first)
                digest.update(file.read(last - first))
    except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise CheckpointError(
            f"the base model in {folder} cannot be read: {error}", remedy="Copy or download the model again"
        ) from error
    finally:
        for file in files.values():
            file.close()
    return f"{FORM}:{digest.hexdigest()[:32]}"


def require_same_weights(checkpoint: str, base_model: str, *, recorded: str | None, found: str) -> None:
    """Checks that a base model has the weights on which a checkpoint was trained.

    `recorded` is the fingerprint that the checkpoint holds; one that an older mint saved has none, and passes.

    Raises:
        CheckpointError: it has others.
    """
    if recorded in (None, found):
        return
    raise CheckpointError(
        f"{checkpoint} was trained on other weights of {base_model}: their fingerprint was {recorded}, "
        f"and that of the weights there now is {found}",
        remedy=f"Put the weights of before back, or name their folder with MINT_MODELS={base_model}=FOLDER, and start "
        "again. To use the LoRA on the weights of now, download the checkpoint, and upload it with "
        f"`mint checkpoints upload FILE --model {base_model}`",
    )


@dataclass(frozen=True)
class _Tensor:
    """Where a tensor is in its file; `start` and `stop` are bytes from the beginning of the file."""

    dtype: str
    shape: list[int]
    start: int
    stop: int
    path: Path


def _tensors(path: Path, file: BinaryIO) -> dict[str, _Tensor]:
    header, begin = read_header(file)
    found = {}
    for name, entry in header.items():
        start, stop = (begin + offset for offset in entry["data_offsets"])
        found[name] = _Tensor(entry["dtype"], entry["shape"], start, stop, path)
    return found


def _sampled(start: int, stop: int) -> list[tuple[int, int]]:
    """The ranges of bytes that count of a tensor."""
    if stop - start <= 3 * BLOCK_BYTES:
        return [(start, stop)]
    middle = start + (stop - start - BLOCK_BYTES) // 2
    return [(first, first + BLOCK_BYTES) for first in (start, middle, stop - BLOCK_BYTES)]


def _settings(base: ModelFolder) -> dict[str, Any]:
    """The fields of a configuration that count, without those that are null."""
    config = base.config | dict(base.config.get("text_config") or {})  # of a model with images the text model's
    rope = dict(config.get("rope_scaling") or {}) | dict(config.get("rope_parameters") or {})
    older_name = rope.pop("type", None)
    rope.setdefault("rope_type", older_name or "default")
    rope.setdefault("rope_theta", config.get("rope_theta"))  # its place in older configurations
    found = {name: config.get(name) for name in _FIELDS} | {"rope": rope, "quantization": base.quantization}
    return {name: value for name, value in found.items() if value is not None}


def _json(content: Any) -> bytes:
    return json.dumps(content, sort_keys=True).encode()
