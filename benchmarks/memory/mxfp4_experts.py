"""What GPT-OSS's experts take in memory when they are kept as published, in MXFP4, beside bfloat16 and NF4.

    python -m benchmarks.memory.mxfp4_experts [--layers 1] [--experts 16] [--new 16] [--device cpu]
        [--ways bfloat16 mxfp4 nf4] [--train 192]

Layers of gpt-oss-20b's widths (2,880; 64 query and 8 key heads of 64) with random codes and a small vocabulary, in
bfloat16, the engine alone on one thread. Each way is a process of its own: its anonymous memory beyond what it had
before it loaded the base, the CPU time of a token that one sequence decodes, and how far its logprobs of a prompt are
from those of the first way. On a GPU: the memory of the device, and wall-clock time, also for 64 sequences at once.
"""

from __future__ import annotations

import argparse
import gc
import json
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file

from mint.config import read_settings
from mint.engine.protocol import AdamSpec, LoraSpec, SampleJob, StopRule, TrainDatum, resolve_loss
from mint.engine.quantized.number_formats import Quantization
from mint.engine.torch_engine import TorchEngine

WAYS: dict[str, Quantization | None] = {"bfloat16": None, "mxfp4": "mxfp4", "nf4": "nf4"}
WIDTH, HEAD, HEADS, KEY_HEADS, VOCABULARY, BLOCK = 2880, 64, 64, 8, 2048, 32
KV_CACHE_BYTES = {"cpu": 1 << 26, "cuda": 1 << 30}
"""One sequence decodes on a CPU, 64 at once on a GPU."""

TRAINED_SEQUENCES, TRAINED_STEPS = 8, 3


def write_folder(folder: Path, layers: int, experts: int) -> None:
    """A random GPT-OSS with experts in MXFP4, as OpenAI publishes it."""
    generator, bits = torch.Generator().manual_seed(0), np.random.default_rng(0)

    def halves(*shape: int) -> torch.Tensor:
        return (torch.randn(*shape, generator=generator) * 0.02).bfloat16()

    tensors = {"model.embed_tokens.weight": halves(VOCABULARY, WIDTH), "lm_head.weight": halves(VOCABULARY, WIDTH)}
    tensors["model.norm.weight"] = torch.ones(WIDTH).bfloat16()
    outputs = {"q": HEADS * HEAD, "k": KEY_HEADS * HEAD, "v": KEY_HEADS * HEAD}
    for layer in range(layers):
        place = f"model.layers.{layer}"
        for name in ("input_layernorm", "post_attention_layernorm"):
            tensors[f"{place}.{name}.weight"] = torch.ones(WIDTH).bfloat16()
        for name, size in outputs.items():
            tensors[f"{place}.self_attn.{name}_proj.weight"] = halves(size, WIDTH)
            tensors[f"{place}.self_attn.{name}_proj.bias"] = halves(size)
        tensors[f"{place}.self_attn.o_proj.weight"] = halves(WIDTH, HEADS * HEAD)
        tensors[f"{place}.self_attn.o_proj.bias"] = halves(WIDTH)
        tensors[f"{place}.self_attn.sinks"] = halves(HEADS)
        tensors[f"{place}.mlp.router.weight"] = halves(experts, WIDTH)
        tensors[f"{place}.mlp.router.bias"] = halves(experts)
        for name, size in (("gate_up_proj", 2 * WIDTH), ("down_proj", WIDTH)):
            shape = (experts, size, WIDTH // BLOCK)
            own = f"{place}.mlp.experts.{name}"
            codes = bytearray(bits.bytes(experts * size * WIDTH // 2))
            tensors[f"{own}_blocks"] = torch.frombuffer(codes, dtype=torch.uint8).view(*shape, BLOCK // 2)
            # numbers of at most 6 · 2^-7
            tensors[f"{own}_scales"] = torch.randint(117, 121, shape, generator=generator, dtype=torch.uint8)
            tensors[f"{own}_bias"] = halves(experts, size)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    config = {
        "model_type": "gpt_oss", "hidden_size": WIDTH, "intermediate_size": WIDTH, "num_hidden_layers": layers,
        "num_attention_heads": HEADS, "num_key_value_heads": KEY_HEADS, "head_dim": HEAD, "vocab_size": VOCABULARY,
        "num_local_experts": experts, "num_experts_per_tok": 4, "sliding_window": 128, "attention_bias": True,
        "max_position_embeddings": 4096, "rope_theta": 150000, "tie_word_embeddings": False, "eos_token_id": 1,
        "quantization_config": {"quant_method": "mxfp4"},
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "tokenizer.json").write_text("{}")


def own_bytes(device: str) -> int:
    """The memory that this process has on the device. On a CPU: its anonymous memory, without files that it maps."""
    if device == "cuda":
        return torch.cuda.memory_allocated()
    found = re.search(r"RssAnon:\s+(\d+) kB", Path("/proc/self/status").read_text())
    if found is None:
        raise RuntimeError("this kernel does not tell anonymous memory")
    return int(found[1]) * 1024


def train(engine: TorchEngine, tokens: int, device: str) -> dict[str, Any]:
    """Steps on random sequences of a fresh LoRA; the first step compiles."""
    engine.create_model("model", "base", LoraSpec(16, 0, train_attn=True, train_mlp=True, train_unembed=False))
    rows = np.random.default_rng(1).integers(2, VOCABULARY, (TRAINED_SEQUENCES, tokens + 1))
    data = [TrainDatum(row[:-1], row[1:], np.ones(tokens, np.float32)) for row in rows]
    seconds, losses, norms = [], [], []
    for _ in range(TRAINED_STEPS):
        started_s = time.perf_counter()
        passed = engine.forward_backward("model", data, resolve_loss("cross_entropy"))
        stepped = engine.optim_step("model", AdamSpec(1e-4, 0.9, 0.999, 1e-8, 0.0, 0.0))
        seconds.append(round(time.perf_counter() - started_s, 3))
        losses.append(round(passed.metrics["loss:sum"] / rows[:, 1:].size, 5))
        norms.append(round(stepped["grad_norm"], 4))
    most = {} if device == "cpu" else {"train_mib_at_most": torch.cuda.max_memory_allocated() >> 20}
    return {"train_s": seconds, "loss": losses, "gradient_norm": norms, **most}


def measure(folder: str, way: Quantization | None, new_tokens: int, device: str, trained_tokens: int = 0) -> None:
    """Prints one JSON object."""
    native = read_settings().native_folder if device == "cpu" else None
    clock = time.process_time if device == "cpu" else time.perf_counter
    engine = TorchEngine(
        dtype="bfloat16",
        threads=1,
        device=device,
        native=native,
        quantize=way,
        kv_cache_bytes=KV_CACHE_BYTES[device],
    )
    before = own_bytes(device)
    started_s = clock()
    info = engine.load_base("base", folder)
    load_s = clock() - started_s
    gc.collect()
    mib = (own_bytes(device) - before) / 2**20
    prompt = np.random.default_rng(0).integers(2, VOCABULARY, 48)

    def token_ms(sequences: int) -> float:
        seconds = []
        for tokens in (1, 1 + new_tokens, 1, 1 + new_tokens):  # the first of each compiles
            started_s = clock()
            steps = engine.sampling_counters()["steps"]
            engine.sample([SampleJob("base", None, prompt, sequences, tokens, 1.0, -1, 1.0, 0, StopRule())])
            seconds.append(clock() - started_s)
            steps = engine.sampling_counters()["steps"] - steps
            if steps > tokens + 1:  # a GPU may start one step more than it needs
                raise RuntimeError(
                    f"{sequences} sequences took {steps} steps for {tokens} tokens: the KV cache is full"
                )
        return round(1000 * (seconds[3] - seconds[2]) / new_tokens, 2)

    scored = SampleJob("base", None, prompt, 1, 0, 1.0, -1, 1.0, 0, StopRule(), prompt_logprobs=True)
    (result,) = engine.sample([scored])
    assert result.prompt_logprobs is not None
    found = {
        "way": way or "bfloat16",
        "device": device,
        "mib": round(mib),
        "load_s": round(load_s, 1),
        "token_ms": token_ms(1),
        **({} if device == "cpu" else {"token_ms_of_64": token_ms(64)}),
        **(train(engine, trained_tokens, device) if trained_tokens else {}),
        "switched_off": info.settings["switched_off"],
        "logprobs": [float(value) for value in result.prompt_logprobs[1:]],
    }
    print(json.dumps(found))


def main(argv: list[str]) -> None:
    """Prints one JSON object for each way."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.memory.mxfp4_experts")
    parser.add_argument("--layers", type=int, default=1)
    parser.add_argument("--experts", type=int, default=16)
    parser.add_argument("--new", type=int, default=16)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=tuple(WAYS))
    parser.add_argument("--train", type=int, default=0, metavar="TOKENS")
    options = parser.parse_args(argv)
    numbers = options.layers * options.experts * 3 * WIDTH**2
    print(
        json.dumps(
            {"numbers_of_experts": numbers, "bfloat16_mib": numbers * 2 >> 20, "kept_mib": numbers * 5 // 8 >> 20}
        )
    )
    first: list[float] | None = None
    with tempfile.TemporaryDirectory() as folder:
        write_folder(Path(folder), options.layers, options.experts)
        for way in options.ways:
            arguments = f"{folder!r}, {WAYS[way]!r}, {options.new}, {options.device!r}, {options.train}"
            code = f"from benchmarks.memory.mxfp4_experts import measure; measure({arguments})"
            answer = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout
            found: dict[str, Any] = json.loads(answer.strip().splitlines()[-1])
            logprobs = np.array(found.pop("logprobs"))
            first = logprobs.tolist() if first is None else first
            found["median_difference"] = float(f"{np.median(np.abs(logprobs - first)):.1e}")
            print(json.dumps(found))


if __name__ == "__main__":
    main(sys.argv[1:])
