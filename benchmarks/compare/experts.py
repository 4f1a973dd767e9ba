"""A mixture of experts against transformers: decoding and training, by CPU time, all sides in turns in one process.

    python -m benchmarks.compare.experts [--shape large] [--dtype bfloat16] [--batch 64] [--lora] [--train]

`small` has 32 experts of which 4 in each of 4 layers, `large` two layers with the proportions of Qwen3-30B-A3B: 128
experts of which 8. Random weights, a vocabulary of 8,192. Decoding: prompts of 16 tokens, 32 new ones by default; mint
returns their logprobs and, with `--lora`, computes with a lora on every linear layer; transformers does neither.
Training: 16 sequences of 64 tokens, forward and backward; a lora on attention, or on all linear layers, experts
included (PEFT's `target_parameters`). Transformers runs with each of its ways to compute experts; ratios are to its
fastest.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, GenerationConfig, Qwen3MoeConfig, Qwen3MoeForCausalLM

from mint.config import read_settings
from mint.engine.memory.machine_memory import keep_freed_memory
from mint.engine.protocol import LoraSpec, SampleJob, StopRule, TrainDatum, resolve_loss
from mint.engine.torch_engine import TorchEngine

VOCABULARY, RANK, PROMPT = 8192, 16, 16
SEQUENCES, LENGTH = 16, 64
SHAPES: dict[str, dict[str, Any]] = {
    "small": {"hidden_size": 512, "num_hidden_layers": 4, "num_attention_heads": 8, "num_key_value_heads": 2,
              "head_dim": 64, "moe_intermediate_size": 256, "num_experts": 32, "num_experts_per_tok": 4},
    "large": {"hidden_size": 2048, "num_hidden_layers": 2, "num_attention_heads": 32, "num_key_value_heads": 4,
              "head_dim": 128, "moe_intermediate_size": 768, "num_experts": 128, "num_experts_per_tok": 8},
}  # fmt: skip
IMPLEMENTATIONS = ("eager", "batched_mm", "grouped_mm")
ATTENTION = ["q_proj", "k_proj", "v_proj", "o_proj"]
DType = Literal["float32", "bfloat16"]
Sides = dict[str, Callable[[], object]]


def write_base(folder: Path, shape: str) -> None:
    """A random model, unless it is there."""
    if (folder / "config.json").exists():
        return
    torch.manual_seed(0)
    settings: dict[str, Any] = SHAPES[shape] | {
        "norm_topk_prob": True,
        "tie_word_embeddings": True,
        "vocab_size": VOCABULARY,
    }
    config = Qwen3MoeConfig(intermediate_size=1024, max_position_embeddings=512, **settings)
    config.dtype = "bfloat16" if shape == "large" else "float32"
    model = Qwen3MoeForCausalLM._from_config(config, dtype=getattr(torch, config.dtype))
    model.save_pretrained(folder)
    (folder / "tokenizer.json").write_text("{}")


def mint_engine(folder: Path, dtype: DType, threads: int) -> TorchEngine:
    """With a lora on attention, and one on all linear layers, neither of which is zero."""
    engine = TorchEngine(dtype=dtype, threads=threads, device="cpu", native=read_settings().native_folder)
    engine.load_base("base", str(folder))
    for name, on_experts in (("attention", False), ("all", True)):
        engine.create_model(name, "base", LoraSpec(RANK, 0, True, on_experts, False))
        engine._models[name].weights.normal_(0, 0.01)
        engine.publish(name, name)
    return engine


def mint_decodes(engine: TorchEngine, batch: int, new: int, lora: str | None) -> Callable[[], object]:
    """Samples of prompts that nobody has asked before."""
    rng = np.random.default_rng(batch)

    def sample() -> object:
        prompts = rng.integers(0, VOCABULARY, (batch, PROMPT))
        jobs = [
            SampleJob("base", lora, row, 1, new, 1.0, -1, 1.0, seed, StopRule()) for seed, row in enumerate(prompts)
        ]
        return engine.sample(jobs)

    return sample


def mint_trains(engine: TorchEngine, name: str) -> Callable[[], object]:
    """One forward and backward."""
    tokens = np.random.default_rng(0).integers(0, VOCABULARY, (SEQUENCES, LENGTH + 1))
    data = [TrainDatum(row[:-1], row[1:], np.ones(LENGTH, np.float32)) for row in tokens]
    return lambda: engine.forward_backward(name, data, resolve_loss("cross_entropy"))


def peer_decodes(model: Any, batch: int, new: int, implementation: str) -> Callable[[], object]:
    """`generate` of transformers."""
    prompts = torch.randint(0, VOCABULARY, (batch, PROMPT))
    rule = GenerationConfig(do_sample=True, top_k=0, max_new_tokens=new, min_new_tokens=new, pad_token_id=0)

    @torch.inference_mode()
    def sample() -> object:
        model.set_experts_implementation(implementation)
        return model.generate(prompts, attention_mask=torch.ones_like(prompts), generation_config=rule)

    return sample


def peer_trains(model: Any, implementation: str) -> Callable[[], object]:
    """One forward and backward of transformers and PEFT."""
    tokens = torch.from_numpy(np.random.default_rng(0).integers(0, VOCABULARY, (SEQUENCES, LENGTH + 1)))

    def step() -> None:
        model.base_model.model.set_experts_implementation(implementation)
        logits = model(tokens[:, :-1]).logits.float()
        torch.nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten(), reduction="sum").backward()

    return step


def compare(title: str, sides: Sides, repeats: int) -> None:
    """Prints the median CPU seconds of each side, and the ratio of the fastest peer to mint."""
    times: dict[str, list[float]] = {name: [] for name in sides}
    for turn in range(repeats + 1):
        for name, work in list(sides.items())[:: 1 if turn % 2 else -1]:
            before = time.process_time()
            work()
            if turn:  # the first is a warm-up
                times[name].append(time.process_time() - before)
    medians = {name: statistics.median(own) for name, own in times.items()}
    peer = min(value for name, value in medians.items() if not name.startswith("mint"))
    for name, value in medians.items():
        ratio = f"{peer / value:.2f}" if name.startswith("mint") else ""
        print(f"| {title} | {name} | {value:.3f} | {ratio} |", flush=True)


def run(shape: str, dtype: DType, folder: Path, options: argparse.Namespace) -> None:
    """All that was asked for at one shape."""
    write_base(folder, shape)
    engine = mint_engine(folder, dtype, options.threads)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, dtype)).eval()
    ways = [way for way in IMPLEMENTATIONS if way in options.peer]
    for batch in options.batch:
        sides = {"mint": mint_decodes(engine, batch, options.new, None)}
        if options.lora:
            sides["mint, lora on all"] = mint_decodes(engine, batch, options.new, "all")
        # One copies an expert's weights for every pair of a row and an expert, eight times slower at 8 rows already.
        able = [way for way in ways if way != "batched_mm" or batch == 1]
        sides |= {f"transformers {way}": peer_decodes(model, batch, options.new, way) for way in able}
        compare(f"{shape} {dtype}: decode {batch}", sides, options.repeats)
    if not options.train:
        return
    for name in ("attention", "all"):
        experts = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"] if name == "all" else None
        rule = LoraConfig(r=RANK, lora_alpha=32, target_modules=ATTENTION, target_parameters=experts)
        peer: Any = get_peft_model(model, rule)
        sides = {"mint": mint_trains(engine, name)}
        sides |= {f"transformers {way}": peer_trains(peer, way) for way in ways if way != "batched_mm"}
        compare(f"{shape} {dtype}: train, lora on {name}", sides, options.repeats)
        model = peer.unload()


def main() -> None:
    """Prints a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", action="append", choices=list(SHAPES))
    parser.add_argument("--dtype", action="append", choices=["float32", "bfloat16"])
    parser.add_argument("--batch", action="append", type=int)
    parser.add_argument("--peer", action="append", choices=IMPLEMENTATIONS)
    parser.add_argument("--train", action="store_true")
    parser.add_argument("--lora", action="store_true")
    parser.add_argument("--new", type=int, default=32)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--folder", type=Path, help="keeps the base models")
    options = parser.parse_args()
    options.batch = [1, 8, 64] if options.batch is None else options.batch
    options.peer = options.peer or IMPLEMENTATIONS
    torch.set_num_threads(options.threads)
    keep_freed_memory()  # as the server does; the peers share it
    print("| work | side | CPU s | mint's speed-up |\n|---|---|---|---|")
    with tempfile.TemporaryDirectory() as place:
        dtypes: list[DType] = options.dtype or ["float32", "bfloat16"]
        for shape in options.shape or ["small"]:
            for dtype in dtypes:
                run(shape, dtype, (options.folder or Path(place)) / shape, options)


if __name__ == "__main__":
    main()
