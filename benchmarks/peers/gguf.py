"""Writes a base model in GGUF, llama.cpp's format: `python -m benchmarks.peers.gguf MODEL_FOLDER DTYPE OUTPUT`.

Runs in llama.cpp's environment, once for each base model and dtype. The file has no tokenizer: the benchmark passes
token ids. Writes tensor by tensor, so that a large model is never in memory as a whole.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import gguf
import numpy as np

NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
}
KINDS = {
    "float32": gguf.GGMLQuantizationType.F32,
    "bfloat16": gguf.GGMLQuantizationType.BF16,
    "q8_0": gguf.GGMLQuantizationType.Q8_0,
}


def gguf_name(name: str) -> str:
    """llama.cpp's name of a tensor of a Hugging Face folder."""
    stem = name.removesuffix(".weight")
    if stem in NAMES:
        return f"{NAMES[stem]}.weight"
    layer, _, part = stem.removeprefix("model.layers.").partition(".")
    return f"blk.{layer}.{NAMES[part]}.weight"


def stored_tensors(path: Path) -> dict[str, tuple[str, list[int], np.ndarray]]:
    """Name -> dtype as safetensors names it, shape, and bytes that are not read yet."""
    everything = np.memmap(path, dtype=np.uint8, mode="r")
    length = int(everything[:8].view(np.uint64)[0])
    header = json.loads(everything[8 : 8 + length].tobytes())
    header.pop("__metadata__", None)
    found = {}
    for name, entry in header.items():
        start, end = (8 + length + offset for offset in entry["data_offsets"])
        found[name] = (entry["dtype"], entry["shape"], everything[start:end])
    return found


def encode(dtype: str, shape: list[int], stored: np.ndarray, kind: Any) -> np.ndarray:
    """A tensor's bytes [rows, bytes of a row] in another type; norms stay in float32."""
    if dtype == "BF16" and kind == KINDS["bfloat16"]:
        return stored.reshape(shape[0], -1)
    values = stored.view(np.uint16).astype(np.uint32) << 16 if dtype == "BF16" else stored
    return gguf.quantize(values.view(np.float32).reshape(shape), kind)


def describe(writer: Any, config: dict[str, Any]) -> None:
    """The metadata that llama.cpp asks of a Qwen3 model."""
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_key_length(config["head_dim"])
    writer.add_value_length(config["head_dim"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_freq_base(config["rope_theta"])
    writer.add_vocab_size(config["vocab_size"])
    writer.add_tokenizer_model("no_vocab")


def main() -> None:
    """Writes beside the output and renames, so that the output is whole if it is there."""
    folder, dtype, output = Path(sys.argv[1]), sys.argv[2], Path(sys.argv[3])
    unfinished = output.with_suffix(".unfinished")
    writer = gguf.GGUFWriter(unfinished, "qwen3")
    describe(writer, json.loads((folder / "config.json").read_text()))
    tensors = stored_tensors(folder / "model.safetensors")
    kinds = {name: KINDS[dtype] if len(shape) > 1 else KINDS["float32"] for name, (_, shape, _) in tensors.items()}
    for name, (_, shape, _) in tensors.items():
        block, size = gguf.GGML_QUANT_SIZES[kinds[name]]
        width = shape[-1] // block * size
        writer.add_tensor_info(
            gguf_name(name),
            [*shape[:-1], width] if len(shape) > 1 else shape,
            np.dtype(np.uint8) if len(shape) > 1 else np.dtype(np.float32),
            int(np.prod(shape[:-1])) * width,
            raw_dtype=kinds[name],
        )
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    for name, (stored_as, shape, stored) in tensors.items():
        writer.write_tensor_data(np.ascontiguousarray(encode(stored_as, shape, stored, kinds[name])))
    writer.close()
    unfinished.rename(output)


if __name__ == "__main__":
    main()
