"""llama.cpp's side of `python -m benchmarks sample`, through llama-cpp-python: one batch decodes all sequences.

Runs in its own environment and imports nothing of mint. It has no lora. Each prompt is prefilled once and its cache
shared by the group. Tokens are drawn with numpy, one uniform number each, and their logprobs are kept. `settings` may
hold `separate_caches` (one cache for each sequence instead of one for all) and `quantized` (weights in 8 bits, which
gives other numbers than the other sides).
"""

from __future__ import annotations

import ctypes
import importlib.metadata
import subprocess
import sys
from pathlib import Path
from typing import Any

import llama_cpp as llama  # ty: ignore[import-not-found]
import numpy as np

from benchmarks.peers.answering import answer_turns, open_answers, read_spec
from benchmarks.peers.drawing import draw

PREFILL_TOKENS = 2048
PROBE_ROWS = 64
CACHE_STEP = 256
CACHE_TYPES = {"float32": 0, "bfloat16": 1}
"""ggml's numbers for float32 and float16."""


class Batch:
    """Tokens of any sequences for one decoding call."""

    def __init__(self, capacity: int) -> None:
        self.raw = llama.llama_batch_init(capacity, 0, 1)
        arrays = (self.raw.token, self.raw.pos, self.raw.n_seq_id, self.raw.logits)
        self._token, self._position, self._counts, self._output = (
            np.ctypeslib.as_array(array, (capacity,)) for array in arrays
        )

    def fill(self, tokens: np.ndarray, positions: np.ndarray, sequences: list[int], outputs: np.ndarray) -> None:
        """All of the same length; `outputs` says which tokens' logits are wanted."""
        count = len(tokens)
        self.raw.n_tokens = count
        self._token[:count], self._position[:count], self._output[:count] = tokens, positions, outputs
        self._counts[:count] = 1
        for row, sequence in enumerate(sequences):
            self.raw.seq_id[row][0] = sequence


class SampleSide:
    """A model without a lora, and one context for all sequences."""

    def __init__(self, spec: dict[str, Any]) -> None:
        self.spec, self.vocabulary = spec, spec["vocabulary"]
        self.settings = spec["settings"]
        self.sequences = spec["prompts_per_step"] * spec["group_size"]
        self.length = len(spec["prompts"][0]) + spec["max_tokens"]
        self.rng = np.random.default_rng(spec["seed"])
        llama.llama_backend_init()
        path = gguf_path(spec)
        self.model = llama.llama_model_load_from_file(str(path).encode(), llama.llama_model_default_params())
        self.context = llama.llama_init_from_model(self.model, self._parameters())
        if not self.context:
            raise SystemExit(f"llama.cpp cannot open {path}")
        self.memory = llama.llama_get_memory(self.context)
        self.batch = Batch(PREFILL_TOKENS)
        self.latest: tuple[list[int], list[float]] = ([], [])

    def ready(self) -> dict[str, Any]:
        """Settings, and the probe's logprob under the base alone."""
        quantized = self.settings.get("quantized")
        return {
            "quantized_probe_logprob" if quantized else "base_probe_logprob": float(
                sum(self.score(self.spec["probe_tokens"]))
            ),
            "dtype": self.spec["dtype"],
            "threads": self.spec["threads"],
        }

    def step(self, index: int) -> dict[str, Any]:
        """Prompts to samples and their logprobs, as lists."""
        count, group = self.spec["prompts_per_step"], self.spec["group_size"]
        prompts = np.array(self.spec["prompts"][index * count : (index + 1) * count])
        logits = self.prefill(prompts, group)
        rows = list(range(self.sequences))
        tokens, logprobs = draw(np.repeat(logits, group, axis=0), self.rng)
        all_tokens, all_logprobs = [tokens], [logprobs]
        everything = np.ones(self.sequences, dtype=np.int8)
        for position in range(prompts.shape[1], self.length - 1):
            self.batch.fill(tokens, np.full(self.sequences, position), rows, everything)
            tokens, logprobs = draw(self.decode(self.sequences), self.rng)
            all_tokens.append(tokens)
            all_logprobs.append(logprobs)
        completions, values = np.stack(all_tokens, 1).tolist(), np.stack(all_logprobs, 1).tolist()
        self.latest = (prompts[0].tolist() + completions[0], values[0])
        lengths = [len(completion) for completion in completions]
        return {"completion_lengths": lengths, "tokens": sum(lengths)}

    def prefill(self, prompts: np.ndarray, group: int) -> np.ndarray:
        """Caches every prompt and shares it within its group; logits [prompts, vocabulary] of the last tokens."""
        llama.llama_memory_clear(self.memory, True)
        size = prompts.shape[1]
        tokens, positions = prompts.ravel(), np.tile(np.arange(size), len(prompts))
        sequences = [row * group for row in range(len(prompts)) for _ in range(size)]
        outputs = (positions == size - 1).astype(np.int8)
        found = []
        for at in range(0, len(tokens), PREFILL_TOKENS):
            part = slice(at, at + PREFILL_TOKENS)
            self.batch.fill(tokens[part], positions[part], sequences[part], outputs[part])
            found.append(self.decode(int(outputs[part].sum())))
        for first in range(0, self.sequences, group):
            for other in range(first + 1, first + group):
                llama.llama_memory_seq_cp(self.memory, first, other, -1, -1)
        return np.concatenate(found)

    def decode(self, outputs: int) -> np.ndarray:
        """Runs the batch; a copy of the logits [outputs, vocabulary], in the order of the batch."""
        if llama.llama_decode(self.context, self.batch.raw) != 0:
            raise SystemExit("llama.cpp could not decode the batch")
        if outputs == 0:
            return np.empty((0, self.vocabulary), np.float32)
        logits = llama.llama_get_logits(self.context)
        return np.ctypeslib.as_array(logits, (outputs, self.vocabulary)).copy()

    def score(self, tokens: list[int]) -> list[float]:
        """Logprobs of all tokens but the first."""
        llama.llama_memory_clear(self.memory, True)
        given, wanted = np.array(tokens[:-1]), np.array(tokens[1:])
        found: list[float] = []
        for at in range(0, len(given), PROBE_ROWS):
            part = given[at : at + PROBE_ROWS]
            positions = np.arange(at, at + len(part))
            self.batch.fill(part, positions, [0] * len(part), np.ones(len(part), np.int8))
            logits = self.decode(len(part)).astype(np.float64)
            targets = np.take_along_axis(logits, wanted[at : at + len(part), None], 1)[:, 0]
            found += (targets - np.log(np.exp(logits).sum(1))).tolist()
        return found

    def finished(self) -> dict[str, Any]:
        """How far a sample's logprobs are from those of the same tokens read as a prompt."""
        tokens, logprobs = self.latest
        again = np.array(self.score(tokens)[-len(logprobs) :])
        packages = ("llama-cpp-python", "numpy")
        return {
            "sample_logprob_error": float(np.abs(again - logprobs).max()),
            "versions": {name: importlib.metadata.version(name) for name in packages},
        }

    def _parameters(self) -> Any:
        parameters = llama.llama_context_default_params()
        separate = bool(self.settings.get("separate_caches"))
        step = CACHE_STEP if separate else 1
        each = -(-self.length // step) * step
        parameters.n_ctx = max(self.sequences * each, CACHE_STEP)
        parameters.n_batch = PREFILL_TOKENS
        parameters.n_seq_max = self.sequences
        parameters.n_outputs_max = max(self.sequences, PROBE_ROWS)
        parameters.n_threads = parameters.n_threads_batch = self.spec["threads"]
        parameters.type_k = parameters.type_v = CACHE_TYPES[self.spec["dtype"]]
        parameters.kv_unified = not separate
        return parameters


def gguf_path(spec: dict[str, Any]) -> Path:
    """The base model in llama.cpp's format, beside its folder; written by a process of its own if it is not there."""
    dtype = "q8_0" if spec["settings"].get("quantized") else spec["dtype"]
    folder = Path(spec["base_model"])
    path = folder.with_name(f"{folder.name}-{dtype}.gguf")
    if not path.exists():
        command = [sys.executable, "-m", "benchmarks.peers.gguf", str(folder), dtype, str(path)]
        subprocess.run(command, check=True)
    return path


keep_quiet = llama.llama_log_callback(lambda level, text, data: None)
"""Drops what llama.cpp says about every tensor."""


if __name__ == "__main__":
    answers, given = open_answers(), read_spec()
    llama.llama_log_set(keep_quiet, ctypes.c_void_p(0))
    answer_turns(SampleSide(given), answers)
