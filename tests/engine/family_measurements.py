"""What a family of models gives in mint and in transformers with PEFT, on the CPU: numbers first, then CPU time."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from engine_data import CROSS_ENTROPY, LORA, datum, job, random_data, take_gradient, train
from peft import PeftModel
from small_models import FAMILIES, UNSUPPORTED_BY_PEFT, WITHOUT_MLP_IN_PEFT, write_model, write_other_model
from torch.nn.functional import cross_entropy
from transformers import PreTrainedModel

from mint.engine.protocol import LORA_ALPHA, LoraSpec, TrainDatum
from mint.engine.torch_engine import TorchEngine
from mint.models.peft_format import write_peft

SEQUENCES, LENGTH, PROMPT, SAMPLES, SAMPLED, TURNS = 4, 128, 32, 4, 48, 3
"""What is timed: a training batch of `SEQUENCES` × `LENGTH` tokens; `SAMPLES` of `SAMPLED` tokens after `PROMPT`."""

GREEDY_PROMPTS, GREEDY_TOKENS = (5, 17, 33, 70), 50

_WIDE = {"hidden_size": 512, "intermediate_size": 1408, "num_attention_heads": 8, "num_key_value_heads": 2,
         "head_dim": 64, "vocab_size": 4096, "max_position_embeddings": 512}  # fmt: skip
_WIDE_LATENT = {"num_key_value_heads": 8, "head_dim": None, "moe_intermediate_size": 352}
_WIDE_DELTA_NET = {"linear_num_value_heads": 16, "linear_num_key_heads": 8, "linear_key_head_dim": 64,
                   "linear_value_head_dim": 64}  # fmt: skip
_WIDE_MIXTURE = {"moe_intermediate_size": 352, "shared_expert_intermediate_size": 352}
_WIDE_MAMBA = {"mamba_n_heads": 16, "mamba_d_head": 64, "mamba_d_ssm": 1024, "mamba_chunk_size": 64}
_WIDE_CHANGES: dict[str, dict[str, Any]] = {
    "qwen3_moe": {"moe_intermediate_size": 352},
    "gemma4_text": {"hidden_size_per_layer_input": 64, "vocab_size_per_layer_input": 4096},
    "glm4_moe": {"moe_intermediate_size": 352},
    "glm_moe_dsa": _WIDE_LATENT,
    "gpt2": {"n_embd": 512, "n_head": 8, "n_positions": 512},
    "deepseek_v3": _WIDE_LATENT,
    "llama4_text": {"intermediate_size_mlp": 1408},
    "qwen3_5_text": _WIDE_DELTA_NET,
    "qwen3_5_moe_text": {**_WIDE_DELTA_NET, **_WIDE_MIXTURE},
    "qwen3_next": {**_WIDE_DELTA_NET, **_WIDE_MIXTURE},
    "falcon_h1": _WIDE_MAMBA,
    "granitemoehybrid": {**_WIDE_MAMBA, "shared_intermediate_size": 1408},
    "nemotron_h": {"mamba_num_heads": 16, "mamba_head_dim": 64, "chunk_size": 64},
    "olmo_hybrid": _WIDE_DELTA_NET,
}
"""What a family needs besides, so that its parts grow with the hidden size."""


@dataclass(frozen=True)
class FamilyFigures:
    """One row of the table. Both speeds are CPU seconds of transformers with PEFT over those of mint."""

    family: str
    implementation: str
    loras: str
    logprob_difference: float
    gradient_difference: float
    """Over the largest entry of all gradients."""
    greedy_equal: int
    greedy_total: int
    training_speed: float
    decoding_speed: float


def measure_family(family: str, folder: Path, native: Path) -> FamilyFigures:
    """`native` is the folder of the compiled kernels. All runs in float32 on the threads of the caller."""
    sides = _Sides(family, folder / "small", native, rank=LORA.rank)
    equal = sides.greedy_tokens_equal()
    wide = _Sides(family, folder / "wide", native, rank=16, **{**_WIDE, **_WIDE_CHANGES.get(family, {})})
    return FamilyFigures(
        family=family,
        implementation=sides.implementation,
        loras=sides.loras,
        logprob_difference=sides.logprob_difference(),
        gradient_difference=sides.gradient_difference(),
        greedy_equal=equal,
        greedy_total=len(GREEDY_PROMPTS) * GREEDY_TOKENS,
        training_speed=wide.training_speed(),
        decoding_speed=wide.decoding_speed(),
    )


class _Sides:
    """One random model and one LoRA that is no longer zero, in mint and in transformers with PEFT."""

    def __init__(self, family: str, folder: Path, native: Path, *, rank: int, **shape: object) -> None:
        base = folder / "base"
        if family in FAMILIES:
            reference: PreTrainedModel = write_model(base, "untied", family=family, **{"num_hidden_layers": 2, **shape})
        else:
            reference = write_other_model(base, family, **shape)
        self._vocab = reference.config.vocab_size
        self._engine = TorchEngine(
            dtype="float32", device="cpu", native=native, kv_cache_bytes=1 << 27, prefix_cache_bytes=0
        )
        self.implementation = self._engine.load_base("base", str(base)).settings["implementation"]
        lora = _lora(family, rank)
        self._engine.create_model("m", "base", lora)
        train(self._engine, "m", steps=1)
        self._engine.publish("m", "w")
        weights = self._engine.read_state("m").weights
        write_peft(folder / "lora", weights, rank=rank, alpha=LORA_ALPHA, base_model=str(base))
        self._peft = PeftModel.from_pretrained(reference, folder / "lora", is_trainable=True).eval()
        kinds = {"attention": lora.train_attn, "MLP": lora.train_mlp, "unembedding": lora.train_unembed}
        self.loras = "all" if all(kinds.values()) else ", ".join(kind for kind, trains in kinds.items() if trains)

    def logprob_difference(self) -> float:
        """The largest over a sequence of random tokens."""
        tokens = self._tokens(200)
        (ours,) = self._engine.sample([job(tokens, weights_id="w", max_tokens=0, prompt_logprobs=True)])
        with torch.no_grad():
            logits = self._peft(input_ids=torch.from_numpy(tokens)[None]).logits[0].float()
        theirs = logits.log_softmax(-1).numpy()[np.arange(len(tokens) - 1), tokens[1:]]
        assert ours.prompt_logprobs is not None
        return float(np.abs(ours.prompt_logprobs[1:] - theirs).max())

    def gradient_difference(self) -> float:
        """The largest over all LoRA matrices, relative to the largest entry of all gradients."""
        data = random_data(11, shared=12)
        self._engine.forward_backward("m", data, CROSS_ENTROPY)
        self._peft.zero_grad()
        for example in data:
            self._peft_loss([example]).backward()
        theirs = {
            name.replace("base_model.model.", "").replace(".default", ""): parameter.grad
            for name, parameter in self._peft.named_parameters()
            if parameter.requires_grad
        }
        ours = take_gradient(self._engine, "m")
        assert ours.keys() == theirs.keys()
        largest = max(float(np.abs(gradient).max()) for gradient in ours.values())
        differences = [
            np.abs(gradient - (0.0 if (other := theirs[name]) is None else other.numpy())).max()
            for name, gradient in ours.items()
        ]
        return float(max(differences)) / largest

    def greedy_tokens_equal(self) -> int:
        """How many tokens are those of `generate` at the same place, over all prompts."""
        equal = 0
        for length in GREEDY_PROMPTS:
            prompt = self._tokens(length)
            greedy = job(prompt, weights_id="w", temperature=0.0, max_tokens=GREEDY_TOKENS)
            (ours,) = self._engine.sample([greedy])
            theirs = self._generate(prompt, 1, GREEDY_TOKENS)[0, length:]
            equal += int((ours.samples[0].tokens == theirs.numpy()).sum())
        return equal

    def training_speed(self) -> float:
        """Of a forward and backward pass over sequences that have no prompt in common."""
        data = [datum(self._tokens(LENGTH + 1, seed)) for seed in range(SEQUENCES)]

        def theirs() -> None:
            self._peft_loss(data).backward()
            self._peft.zero_grad()

        return _ratio_in_turns(lambda: self._engine.forward_backward("m", data, CROSS_ENTROPY), theirs)

    def decoding_speed(self) -> float:
        """Of greedy samples of one prompt, in one batch on both sides."""
        prompt = self._tokens(PROMPT)
        samples = job(prompt, weights_id="w", num_samples=SAMPLES, max_tokens=SAMPLED, temperature=0.0)
        return _ratio_in_turns(lambda: self._engine.sample([samples]), lambda: self._generate(prompt, SAMPLES, SAMPLED))

    def _tokens(self, count: int, seed: int = 0) -> np.ndarray:
        return np.random.default_rng(seed).integers(3, self._vocab, count)

    def _peft_loss(self, data: list[TrainDatum]) -> torch.Tensor:
        """The sum over all tokens of examples of one length."""
        tokens, targets, weights = (
            torch.from_numpy(np.stack([getattr(example, field) for example in data]))
            for field in ("tokens", "targets", "weights")
        )
        logits = self._peft(input_ids=tokens, use_cache=False).logits.float()
        return (cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="none") * weights.flatten()).sum()

    def _generate(self, prompt: np.ndarray, samples: int, tokens: int) -> torch.Tensor:
        repeated = torch.from_numpy(prompt)[None].expand(samples, -1)
        with torch.no_grad():
            return self._peft.generate(
                input_ids=repeated, attention_mask=torch.ones_like(repeated), max_new_tokens=tokens, do_sample=False,
                eos_token_id=None, pad_token_id=0,
            )  # fmt: skip


def _lora(family: str, rank: int) -> LoraSpec:
    """All linear layers, less those where PEFT puts no LoRA, or puts it elsewhere."""
    return replace(
        LORA, rank=rank, train_attn=family not in UNSUPPORTED_BY_PEFT, train_mlp=family not in WITHOUT_MLP_IN_PEFT
    )


def _ratio_in_turns(ours: Callable[[], object], theirs: Callable[[], object]) -> float:
    """CPU seconds of `theirs` over those of `ours`, each the least of `TURNS` after one that warms up."""
    seconds: tuple[list[float], list[float]] = ([], [])
    for _ in range(TURNS + 1):
        for side, found in zip((ours, theirs), seconds, strict=True):
            start = time.process_time()
            side()
            found.append(time.process_time() - start)
    return min(seconds[1][1:]) / min(seconds[0][1:])
