"""Sampler against trainer: how far are a token's two logprobs apart, in mint and in transformers?

    python -m benchmarks.exactness.mismatch [--shape mint/tiny] [--shape middle] [--shape qwen3-0.6b] [--threads 1]

Both get the same weights in the same precision, the same prompts, temperature 1 and no lora that does anything. The
sampler's logprob is that which came with the token; the trainer's comes from a forward over the whole sequence. For
mint that is `forward` of a model whose lora is still zero; for transformers `generate` with its logits, and a forward
in micro-batches of 8, both without padding. The implied KL is the mean of exp(d) - 1 - d, where d is trainer minus
sampler, over tokens that the sampler has drawn: an unbiased estimate of KL(sampler, trainer) that is never negative.

`middle` and `qwen3-0.6b` are random, with the last norm scaled so that the distributions are about as sharp as those of
a trained model. Needs transformers; a process holds one model at a time.
"""

from __future__ import annotations

import argparse
import gc
import os
import tempfile
import time
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from transformers import AutoModelForCausalLM, Qwen3Config, Qwen3ForCausalLM
from transformers.utils import logging

from mint.config import read_settings
from mint.engine.protocol import LoraSpec, SampleJob, StopRule, TrainDatum, resolve_loss
from mint.engine.torch_engine import TorchEngine
from mint.models.registry import resolve

DType = Literal["float32", "bfloat16"]

RANDOM: dict[str, dict[str, Any]] = {
    "middle": {"hidden_size": 512, "num_hidden_layers": 8, "num_attention_heads": 8, "num_key_value_heads": 4,
               "head_dim": 64, "intermediate_size": 1536, "vocab_size": 8192},
    "qwen3-0.6b": {"hidden_size": 1024, "num_hidden_layers": 28, "num_attention_heads": 16, "num_key_value_heads": 8,
                   "head_dim": 128, "intermediate_size": 3072, "vocab_size": 151_936},
}  # fmt: skip
LOGIT_DEVIATION = 2.5
"""The deviation of the random models' logits: 0.02 sqrt(hidden size) with a tied unembedding of deviation 0.02."""

MICRO_BATCH = 8


@dataclass(frozen=True)
class Work:
    """Prompts [prompts, prompt_tokens], `group` samples of each, `max_tokens` new ones."""

    prompts: np.ndarray
    group: int
    max_tokens: int


def mint_pairs(folder: Path, work: Work, dtype: DType, threads: int) -> tuple[np.ndarray, np.ndarray]:
    """The sampler's logprobs and the trainer's, of all sampled tokens."""
    engine = TorchEngine(dtype=dtype, threads=threads, device="cpu", native=read_settings().native_folder)
    engine.load_base("base", str(folder))
    engine.create_model("model", "base", LoraSpec(16, 0, True, True, False))
    engine.publish("model", "weights")
    jobs = [
        SampleJob("base", "weights", prompt, work.group, work.max_tokens, 1.0, -1, 1.0, seed, StopRule())
        for seed, prompt in enumerate(work.prompts)
    ]
    sampled, data = [], []
    for job, result in zip(jobs, engine.sample(jobs), strict=True):
        for sample in result.samples:
            whole = np.concatenate([job.prompt, sample.tokens])
            weights = np.zeros(len(whole) - 1, np.float32)
            weights[len(job.prompt) - 1 :] = 1
            data.append(TrainDatum(whole[:-1], whole[1:], weights))
            sampled.append(sample.logprobs)
    passed = engine.forward("model", data, resolve_loss("cross_entropy"))
    trained = [logprobs[-work.max_tokens :] for logprobs in passed.logprobs]
    return np.concatenate(sampled), np.concatenate(trained)


@torch.no_grad()
def transformers_pairs(folder: Path, work: Work, dtype: DType, threads: int) -> tuple[np.ndarray, np.ndarray]:
    """As `mint_pairs`."""
    torch.set_num_threads(threads)
    torch.manual_seed(0)
    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, dtype)).eval()
    model.generation_config.eos_token_id = None
    prompts = torch.from_numpy(work.prompts).repeat_interleave(work.group, 0)
    made = model.generate(
        prompts,
        attention_mask=torch.ones_like(prompts),
        do_sample=True,
        temperature=1.0,
        top_k=0,
        top_p=1.0,
        max_new_tokens=work.max_tokens,
        pad_token_id=0,
        return_dict_in_generate=True,
        output_logits=True,
    )
    new = made.sequences[:, prompts.shape[1] :]
    steps = [_logprobs(logits, tokens) for logits, tokens in zip(made.logits, new.T, strict=True)]
    whole = []
    for rows in made.sequences.split(MICRO_BATCH):
        logits = model(input_ids=rows[:, :-1]).logits[:, -work.max_tokens :]
        whole.append(torch.stack([_logprobs(*one) for one in zip(logits, rows[:, -work.max_tokens :], strict=True)]))
    return torch.stack(steps, 1).flatten().numpy(), torch.cat(whole).flatten().numpy()


def _logprobs(logits: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    return logits.float().log_softmax(-1).gather(-1, tokens[:, None])[:, 0]


@contextmanager
def weights(shape: str) -> Generator[tuple[Path, int]]:
    """A folder with a model of that shape, and its vocabulary."""
    if shape not in RANDOM:
        yield resolve(shape, {}), 1024
        return
    torch.manual_seed(1)
    config = Qwen3Config(**RANDOM[shape], tie_word_embeddings=True, max_position_embeddings=4096)
    with tempfile.TemporaryDirectory() as folder:
        model = Qwen3ForCausalLM(config).bfloat16()
        model.model.norm.weight.data.fill_(LOGIT_DEVIATION / (0.02 * config.hidden_size**0.5))
        model.save_pretrained(folder)
        (Path(folder) / "tokenizer.json").write_text("{}")
        del model
        yield Path(folder), config.vocab_size


def main() -> None:
    """One row for each side, shape and precision."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--shape", action="append", help=f"mint/tiny, {', '.join(RANDOM)}; may be repeated")
    parser.add_argument("--prompts", type=int, default=8)
    parser.add_argument("--group", type=int, default=8)
    parser.add_argument("--prompt-tokens", type=int, default=48)
    parser.add_argument("--max-tokens", type=int, default=32)
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args()
    logging.disable_progress_bar()
    began_s = time.process_time()
    print("| model | dtype | | tokens | max | mean | 99.9th percentile | implied KL | equal bits | entropy estimate |")
    print("|---|---|---|---|---|---|---|---|---|---|")
    for shape in options.shape or ["mint/tiny", "middle"]:
        with weights(shape) as (folder, vocabulary):
            rng = np.random.default_rng(3)
            prompts = rng.integers(1, vocabulary, (options.prompts, options.prompt_tokens))
            work = Work(prompts, options.group, options.max_tokens)
            for dtype in ("float32", "bfloat16"):
                for name, pairs in (("mint", mint_pairs), ("transformers", transformers_pairs)):
                    sampled, trained = (part.astype(np.float64) for part in pairs(folder, work, dtype, options.threads))
                    gc.collect()
                    d = trained - sampled
                    far = np.abs(d)
                    figures = (far.max(), far.mean(), np.quantile(far, 0.999), np.mean(np.expm1(d) - d))
                    cells = [shape, dtype, name, str(d.size), *(f"{figure:.2g}" for figure in figures)]
                    cells += [f"{np.mean(d == 0):.1%}", f"{-sampled.mean():.2f}"]
                    print("|", " | ".join(cells), "|", flush=True)
    print(f"\n{time.process_time() - began_s:.0f} CPU s, {options.threads} thread(s), load {os.getloadavg()[0]:.1f}")


if __name__ == "__main__":
    main()
